/* The KV cache's shape; cache_layout.h has its layout. */
#ifndef CACHE_SHAPE_H
#define CACHE_SHAPE_H

#include "elements.h"

typedef struct {
    int32_t num_kv_heads, head_dim, block_size;
    int32_t dtype; /* BFLOAT16 or FLOAT32: of the numbers that are written and read */
    int32_t is_quantized; /* stored are codes of 8 bits and scales (cache_codes.h) */
    int32_t token_bytes;  /* that a token takes in a head, for K or V */
} CacheShape;

#endif
