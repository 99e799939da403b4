/* Paged attention: prefill chunks and decode rows of one step in one call.
 *
 * Rows of the products are (token, query head) pairs of one KV head. So K and V are read once for all its query heads.
 * A row processes the KV tiles one by one; a tile is TILE tokens from an absolute multiple of TILE. For each tile it
 * computes the maximum of its scores, the sum of its weights 2 ** (score - maximum) and the weighted sum of V. These
 * are merged with those of the tiles before, in ascending order. A tile or chunk that a row does not see adds exact
 * zeros. So a row's bits depend on its own tokens only, whichever item computes it.
 *
 * A head's sink (Xiao et al. 2024, arXiv 2309.17453, as gpt-oss has it) is an additional score of every row, without a
 * value: its weight is added to the sum of weights when a row is finished, so it does not matter how a context was
 * split.
 *
 * Scores, sums and accumulators are float32. With a bfloat16 cache, q and the weights are rounded to bfloat16 before
 * they are multiplied; the sum of weights uses the rounded ones.
 */
#ifndef ATTENTION_H
#define ATTENTION_H

#include "attention/cache_shape.h"

enum { TILE = 512 }; /* tokens: a larger tile has fewer sums to merge, a smaller one fits a nearer cache */

/* Work of one thread: some rows of one KV head against a part of their context. The rows belong to consecutive tokens
 * of one request, or to tokens of several requests that all see a whole tile of the same blocks. */
typedef struct {
    int32_t request;    /* row of the block tables; for several requests, one of them */
    int32_t kv_head;
    int32_t token;      /* the first one, as a row of q; unused with several requests */
    int32_t num_tokens; /* number of tokens */
    int32_t position;   /* of the first token; with several requests the last shared position */
    int32_t begin, end; /* part of the context, in tokens; begin is a multiple of TILE */
    int32_t partial;    /* -1: the whole context, writes out; otherwise the first row of its partial results */
    int32_t members;    /* -1: one request; otherwise index of the first member, one per token */
    int32_t sees_end;   /* 1: the rows see all tokens before `end`, including those after them; otherwise 0 */
} AttentionItem;

/* A token of an item that several requests share. */
typedef struct {
    int32_t token, partial; /* see AttentionItem */
} AttentionMember;

/* Partial results of the same rows, from items for parts of their context. */
typedef struct {
    int32_t kv_head, token, num_tokens;
    int32_t partial, num_partials; /* each has num_tokens * group rows, stored one after the other */
} AttentionMerge;

typedef struct {
    const void *q;     /* [rows, num_heads, head_dim] of dtype */
    const void *layer; /* this layer of the cache */
    void *out;         /* [rows, num_heads, value_dim] of dtype */
    const int32_t *block_tables; /* [R, table_width] */
    const AttentionItem *items;  /* longest first */
    const AttentionMember *members; /* of the items that several requests share */
    const AttentionMerge *merges;
    float *partials; /* [partial rows, attention_partial_floats()]: the maximum; the sums start at LANES */
    char *scratch;   /* attention_scratch_bytes() for each thread, 64-byte aligned */
    CacheShape shape;
    int32_t num_heads, table_width, num_items, num_merges, max_item_tokens;
    int32_t window; /* tokens that a row sees, including itself; 0 = no limit */
    int32_t ahead;  /* tokens after it that a row sees, within its context; 0 = causal attention */
    float scale;    /* factor of the scores, times log2(e); with a cap: the cap, times log2(e) */
    float cap_factor; /* with a cap: the factor of the scores, divided by the cap, before tanh; otherwise 0 */
    const float *sinks; /* [num_heads]: each head's score without a value, times log2(e); or NULL */
} Attention;

void attention_part(const Attention *args, int thread, int num_threads);
void attention(const Attention *args);

int64_t attention_scratch_bytes(const CacheShape *shape, int32_t num_heads, int32_t max_item_tokens);
int64_t attention_partial_floats(int32_t value_dim);

#endif
