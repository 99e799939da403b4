/* GGUF blocks to float32 or bfloat16. kernels/dequantize.py documents their layouts.
 *
 * Each product and sum is rounded to float32, and the result once to bfloat16. The bits are those of
 * kernels/dequantize.py.
 */
#ifndef DEQUANTIZE_H
#define DEQUANTIZE_H

#include "blocks/block_types.h"

typedef struct {
    const void *blocks; /* no alignment needed */
    void *out;          /* of dtype, one number for each weight */
    int64_t num_blocks;
    int32_t type;
    int32_t dtype; /* BFLOAT16 (rounded to nearest even) or FLOAT32 */
} Dequantize;

void dequantize_part(const Dequantize *args, int thread, int num_threads);
void dequantize(const Dequantize *args);

/* Read the weights of consecutive blocks as float32. */
void read_blocks(const void *blocks, int32_t type, int64_t num_blocks, float *out);

#endif
