/* Numbers to blocks of Q8_0 (kernels/dequantize.py documents them), with the bits of llama.cpp's quantization:
 * scale = largest / 127, code = number / scale, halves away from zero. The scale is then rounded to float16.
 */
#ifndef MAKE_BLOCKS_H
#define MAKE_BLOCKS_H

#include <stdint.h>

typedef struct {
    const void *numbers; /* of dtype, contiguous; 32 for each block */
    void *blocks;        /* no alignment needed */
    int64_t num_blocks;
    int32_t dtype; /* BFLOAT16, FLOAT16 or FLOAT32 */
    int32_t reserved;
} MakeBlocks;

/* Write the blocks. Return how many could not be written, because their scale is not a finite float16. */
int64_t make_blocks(const MakeBlocks *args);

#endif
