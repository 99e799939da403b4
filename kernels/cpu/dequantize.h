/* Blocks of GGUF files (kernels/torch/dequantize.py has their layouts) to float32 or bfloat16.
 *
 * Products and sums are rounded one by one in float32, then once to bfloat16: the bits are those of kernels/torch/dequantize.py.
 */
#ifndef DEQUANTIZE_H
#define DEQUANTIZE_H

#include <stdint.h>

enum { Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };

typedef struct {
    const void *blocks; /* no alignment needed */
    void *out;          /* of dtype, as many as the blocks have weights */
    int64_t num_blocks;
    int32_t type;
    int32_t dtype; /* BFLOAT16 (rounded to nearest even) or FLOAT32 */
} Dequantize;

void dequantize_part(const Dequantize *args, int thread, int num_threads);
void dequantize(const Dequantize *args);

#endif
