/* Paged causal attention: prefill chunks and decode rows of one step in one call.
 *
 * Rows of the products are (token, query head) pairs of one KV head, so that K and V are read once for all its query
 * heads. Every row takes the KV tiles - TILE tokens from an absolute multiple of TILE - one by one: of a tile it has
 * the maximum of its scores, the sum of its weights 2 ** (score - maximum) and their weighted sum of V, and these join
 * those of the tiles before, in ascending order. A tile or chunk of which a row sees nothing adds exact zeros. So a
 * row's bits depend on its own tokens only, whichever item computes it.
 *
 * Scores, sums and accumulators are float32. With a bfloat16 cache, q and the weights are rounded to bfloat16 before
 * they are multiplied, and the sum is of the rounded weights.
 */
#ifndef ATTENTION_H
#define ATTENTION_H

#include "cache_shape.h"

enum { TILE = 512 }; /* tokens: a larger one has fewer sums to join, a smaller one lies in a nearer cache */

/* Work that one thread does: some rows of one KV head against some of their context. The rows are of tokens of one
 * request that follow each other; or of tokens of several, that all see the whole of a tile of the same blocks. */
typedef struct {
    int32_t request;    /* row of the block tables; one of several */
    int32_t kv_head;
    int32_t token;      /* the first one, as a row of q; not used of several requests */
    int32_t num_tokens; /* their number */
    int32_t position;   /* of the first one; of several requests the last that they share */
    int32_t begin, end; /* the part of the context, tokens; begin is a multiple of TILE */
    int32_t partial;    /* -1: all of the context, writes out; else where its rows' partial results go */
    int32_t members;    /* -1: of one request; else where the tokens of several are, each with a place for results */
} AttentionItem;

/* A token among those of several requests. */
typedef struct {
    int32_t token, partial; /* see AttentionItem */
} AttentionMember;

/* Items that are parts of the same rows' context. */
typedef struct {
    int32_t kv_head, token, num_tokens;
    int32_t partial, num_partials; /* each of num_tokens * group rows, one after the other */
} AttentionMerge;

typedef struct {
    const void *q;     /* [rows, num_heads, head_dim] of dtype */
    const void *layer; /* of the cache */
    void *out;         /* [rows, num_heads, head_dim] of dtype */
    const int32_t *block_tables; /* [R, table_width] */
    const AttentionItem *items;  /* the longest first */
    const AttentionMember *members; /* of the items of several requests */
    const AttentionMerge *merges;
    float *partials; /* [partial rows, attention_partial_floats()]: maximum, from LANES on the sums */
    char *scratch;   /* attention_scratch_bytes() for each thread, 64-byte aligned */
    CacheShape shape;
    int32_t num_heads, table_width, num_items, num_merges, max_item_tokens;
    int32_t window; /* tokens that a row sees, itself included; 0 = all before it */
    float scale;    /* of the scores, times log2(e) */
} Attention;

void attention_part(const Attention *args, int thread, int num_threads);
void attention(const Attention *args);

int64_t attention_scratch_bytes(const CacheShape *shape, int32_t num_heads, int32_t max_item_tokens);
int64_t attention_partial_floats(int32_t head_dim);

#endif
