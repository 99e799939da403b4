/* A step's attention as items of work, and what has to be merged afterwards (attention.h).
 *
 * An item is some tokens of one request, for one KV head, against their context. Where few tokens have a long context,
 * each TILE of it is an item, so that threads share it; and where requests with one token each have the same blocks
 * there, as they do of a common prefix, one item is for several of them. None of this changes a bit of any result.
 */
#ifndef ATTENTION_PLAN_H
#define ATTENTION_PLAN_H

#include "shared_tiles.h"

typedef struct {
    const int64_t *num_tokens;   /* [num_requests] of each request in this step, packed one after the other */
    const int64_t *context_lens; /* [num_requests] tokens in the cache after it */
    AttentionItem *items;        /* room for max_items; longer ones before those that take an eighth less */
    AttentionMerge *merges;      /* room for max_items */
    AttentionMember *members;    /* room for max_items */
    TileUser *tile_users;        /* room for max_items; not for the caller, like the next one */
    int32_t *places;             /* room for 2 * max_items; see find_shared_tiles() */
    AttentionItem *wanted_items; /* room for max_items; see narrow_plan() */
    AttentionMerge *wanted_merges; /* room for max_items */
    BlockTables tables;          /* [num_requests, width] */
    int64_t num_requests, max_items; /* the latter a power of two */
    int32_t num_kv_heads, group; /* group: query heads of a KV head */
    int32_t window;              /* see attention.h */
    int32_t max_item_tokens;     /* in: of an item at most; out: of the largest one */
    int32_t max_split_rows;      /* items of more rows (tokens * group) are not split along their context */
    int32_t max_members;         /* tokens of several requests in an item; 1: each on its own */
    int64_t num_items, num_merges; /* out; with num_items > max_items nothing was written */
    int64_t num_members, num_partials; /* out; the latter rows of partial results */
    int64_t num_tile_users;            /* of tiles that a token on its own sees whole */
    int64_t num_rows, longest;         /* out: the sum of num_tokens; the largest of context_lens */
    int64_t num_wanted_items, num_wanted_merges;
} AttentionPlan;

void attention_plan(AttentionPlan *plan);

/* The work without which some of these rows would lack results is wanted: other items of several tokens are not. */
void narrow_plan(AttentionPlan *plan, const int64_t *rows, int64_t num_rows);

/* What a plan says of the attention's work: of all of it or of what is wanted. */
void use_plan(Attention *args, const AttentionPlan *plan, int is_narrow);

#endif
