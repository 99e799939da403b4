/* The KV cache's shape; cache_layout.h has its layout. */
#ifndef CACHE_SHAPE_H
#define CACHE_SHAPE_H

#include "math/elements.h"

typedef struct {
    int32_t num_kv_heads, head_dim, block_size;
    int32_t dtype; /* BFLOAT16 or FLOAT32: of the numbers that are written and read */
    int32_t is_quantized; /* stores 8-bit codes and scales (cache_codes.h) */
    int32_t token_bytes;  /* that a token takes in a head, for K or V */
    int32_t num_sides;    /* 2: K and V are stored; 1: K is, and V is the first value_dim numbers of it */
    int32_t value_dim;    /* numbers of a row of V; with 2 sides head_dim */
    int64_t block_bytes;  /* from one block to the next: of K and V of all heads, or of a larger block alongside them */
} CacheShape;

#endif
