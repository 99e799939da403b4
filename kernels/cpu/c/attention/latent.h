/* Multi-head latent attention (DeepSeek V2, arXiv 2405.04434): the parts around attention, which sees one KV head.
 *
 * A token's K and V of all heads are computed from one latent vector c = norm(x @ down_c^T) and from one rotated part r
 * that all heads share: K of head h is (c @ keys_h^T, r), V is c @ values_h^T. So a score is q_plain . (c @ keys_h^T) +
 * q_rotated . r = (q_plain @ keys_h) . c + q_rotated . r, and the weighted sum of V is (the weighted sum of c) @
 * values_h^T. This is attention with many query heads and one KV head, whose K is (c, r) and whose V is c, and the
 * cache has (c, r) only. Prompts are computed in the same way as single tokens. So a token's bits do not depend on how
 * a prompt is cut.
 *
 * If queries have a latent vector too, it is normalised and multiplied in between. Each step's result is rounded to
 * dtype.
 */
#ifndef LATENT_H
#define LATENT_H

#include "attention/cache_shape.h"
#include "products/gemm.h"

/* A layer's constants. */
typedef struct {
    const Gemm *query;         /* from the queries' latent vector to their heads; NULL = queries have none */
    const Gemm *keys, *values; /* [num_heads]: q_plain to latent_dim columns; latent_dim to value_dim columns; of dtype */
    const float *query_norm;   /* [query_dim], or NULL */
    const float *latent_norm;  /* [latent_dim] */
    int32_t num_heads;
    int32_t query_dim;  /* of queries' latent vector; if none, of all heads: num_heads * (plain_dim + rotated_dim) */
    int32_t latent_dim, plain_dim, rotated_dim, value_dim;
    float eps; /* of both norms */
    int32_t reserved;
} Latent;

typedef struct {
    const Latent *latent;
    void *qkv;     /* [num_rows, query_dim + latent_dim + rotated_dim] of dtype; a latent query is normalised in place */
    void *queries; /* [num_rows, num_heads * (plain_dim + rotated_dim)] of dtype: room, if queries have a latent one */
    const float *cos, *sin, *query_cos, *query_sin; /* see rope.h; of rotated_dim numbers */
    const int64_t *positions, *slots;               /* [num_rows], see rope.h */
    void *q;          /* [num_rows, num_heads, latent_dim + rotated_dim] of dtype */
    void *layer;      /* this layer of the cache */
    CacheShape shape; /* of one side; has the dtype */
    int64_t num_rows;
    void *quantized; /* room for num_rows rows of a product in 8 bits (gemm.h); or NULL */
    int64_t quantized_stride;
} LatentStep;

typedef struct {
    const Latent *latent;
    const void *attended; /* [num_rows, num_heads, latent_dim] of dtype */
    void *values;         /* [num_rows, num_heads * value_dim] of dtype */
    int64_t num_rows;
} LatentValues;

/* Compute q and write the cache. There are barriers inside, unless threads divide rows, but none at the end. */
void latent_begin_part(const LatentStep *args, int thread, int num_threads);
void latent_begin(const LatentStep *args);

/* Compute the values' heads from the sums of latent vectors. No barrier is inside. */
void latent_values_part(const LatentValues *args, int thread, int num_threads);
void latent_values(const LatentValues *args);

#endif
