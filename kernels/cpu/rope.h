/* Rotary position embedding, half-split ("neox") layout (Su et al. 2021, arXiv 2104.09864), and the KV cache write.
 *
 * The heads of Q and K are normalised if the model says so, and rotated: pairs (x[i], x[i + head_dim / 2]) are turned by
 * their angle, two products and a sum, each rounded to float32. Q goes to `q`, K and V to the cache, rounded once.
 * Where K or V is not finite, K's first number becomes NaN, so that what is wrong shows to all who see the token: with
 * an infinity in it a score might be minus infinity, as if the token were hidden.
 */
#ifndef ROPE_H
#define ROPE_H

#include "cache_shape.h"

typedef struct {
    const void *qkv;         /* [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] of dtype: Q, K, V */
    const float *cos, *sin;  /* [positions, head_dim]; sin has the sign of its half: (-, +). NULL: nothing is rotated */
    const int64_t *positions; /* [num_tokens]: rows of cos and sin */
    const float *head_norms; /* weights [num_heads + num_kv_heads, head_dim], or NULL: the heads are not normalised */
    const int64_t *slots;    /* [num_tokens]: block * block_size + offset, -1 = do not store */
    void *q;                 /* [num_tokens, num_heads, head_dim] of dtype */
    void *layer;             /* of the cache */
    CacheShape shape;        /* has num_kv_heads, head_dim (even, at most 4096) and dtype */
    int32_t num_heads, num_tokens;
    float eps;
} RopeKvWrite;

void rope_kv_write_part(const RopeKvWrite *args, int thread, int num_threads);
void rope_kv_write(const RopeKvWrite *args);

#endif
