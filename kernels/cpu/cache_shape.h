/* The KV cache's shape; cache_layout.h has its layout. */
#ifndef CACHE_SHAPE_H
#define CACHE_SHAPE_H

#include "elements.h"

typedef struct {
    int32_t num_kv_heads, head_dim, block_size;
    int32_t dtype; /* BFLOAT16 or FLOAT32 */
} CacheShape;

#endif
