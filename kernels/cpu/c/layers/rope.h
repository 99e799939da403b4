/* Rotary position embedding, half-split ("neox") layout (Su et al. 2021, arXiv 2104.09864), and the KV cache write.
 *
 * The heads of Q and K are normalised if norms is given, before or after they are rotated: each pair (x[i], x[i + head_dim /
 * 2]) is turned by its angle with two products and a sum, each rounded to float32. Q is written to `q`, K and V to the
 * cache, each rounded once. If K or V is not finite, K's first number becomes NaN. So the error reaches every row that
 * sees the token. Without that, an infinity could make a score minus infinity, as if the token were hidden.
 */
#ifndef ROPE_H
#define ROPE_H

#include "attention/cache_shape.h"

/* What V is (kernels/value_form.py): columns behind those of K, as they are; these, normalised as heads; K's columns, before
 * K is, so normalised; or nothing, and K neither: the cache has K and V of another layer. */
enum { OWN_VALUES = 0, NORMALISED_VALUES = 1, KEY_VALUES = 2, SHARED_VALUES = 3 };

/* What a row of qkv has, if it has more heads of Q and K than are used: a rank of a group whose heads are normalised with
 * those of all ranks. The used ones are consecutive. heads 0: it has those that are used. */
typedef struct {
    int32_t heads, kv_heads, first_head, first_kv_head;
} RowHeads;

typedef struct {
    void *qkv;               /* [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] of dtype: Q, K, V; see `values` */
    const float *cos, *sin;  /* [positions, head_dim]; sin's halves have the signs (-, +). NULL = no rotation */
    const float *query_cos, *query_sin; /* the same for Q; NULL if cos is */
    const int64_t *positions; /* [num_tokens]: rows of cos and sin */
    const float *norms;      /* weights [num_heads + num_kv_heads, head_dim], then [num_kv_heads, head_dim] of V if it is
                              * normalised; NULL = heads are not normalised */
    const int64_t *slots;    /* [num_tokens]: block * block_size + offset, -1 = do not store */
    void *q;                 /* [num_tokens, num_heads, head_dim] of dtype */
    void *layer;             /* this layer of the cache */
    CacheShape shape;        /* has num_kv_heads, head_dim (even, at most 4096) and dtype */
    int32_t num_heads, num_tokens;
    float eps;
    int32_t norms_of_rows; /* Q's heads are normalised together, in qkv, and so are K's */
    int32_t is_centred;    /* norms are layer normalisations without biases (norm.h); otherwise RMS norms */
    int32_t is_after;      /* heads are normalised after the rotation; not with norms_of_rows */
    int32_t values;        /* one of those above; normalised ones only with norms of each head */
    RowHeads row;          /* only with norms_of_rows */
    const int64_t *tokens; /* [num_tokens] rows of positions and q, of SHARED_VALUES; NULL = row i of qkv is row i there */
} RopeKvWrite;

void rope_kv_write_part(const RopeKvWrite *args, int thread, int num_threads);
void rope_kv_write(const RopeKvWrite *args);

#endif
