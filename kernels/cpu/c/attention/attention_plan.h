/* A step's attention as work items, and the merges that follow them (attention.h).
 *
 * An item is some tokens of one request, for one KV head, against their context. If few tokens have a long context,
 * each TILE of it is an item, so that threads share the work. If requests with one token each have the same blocks in a
 * tile, as with a common prefix, one item serves several of them. None of this changes a bit of any result.
 */
#ifndef ATTENTION_PLAN_H
#define ATTENTION_PLAN_H

#include "attention/shared_tiles.h"

typedef struct {
    const int64_t *num_tokens;   /* [num_requests] in this step, packed request after request */
    const int64_t *context_lens; /* [num_requests] tokens in the cache after the step */
    /* [num_wholes, 2] first token of the step and number of tokens, ascending: these all see each other, such as
     * those of an image. Each is within one request. */
    const int64_t *wholes;
    AttentionItem *items;        /* room for max_items; longest first, lengths rounded to an eighth */
    AttentionMerge *merges;      /* room for max_items */
    AttentionMember *members;    /* room for max_items */
    TileUser *tile_users;        /* room for max_items; internal, like places */
    int32_t *places;             /* room for 2 * max_items; see find_shared_tiles() */
    AttentionItem *wanted_items; /* room for max_items; see narrow_plan() */
    AttentionMerge *wanted_merges; /* room for max_items */
    BlockTables tables;          /* [num_requests, width] */
    int64_t num_requests, num_wholes, max_items; /* max_items is a power of two */
    int32_t num_kv_heads, group; /* group: query heads of a KV head */
    int32_t window, ahead;       /* see attention.h */
    int32_t max_item_tokens;     /* in: limit per item; out: tokens of the largest item */
    int32_t max_split_rows;      /* items of more rows (tokens * group) are not split along the context */
    int32_t max_members;         /* the most tokens in an item of several requests; 1 = never share */
    int64_t num_items, num_merges; /* out; if num_items > max_items nothing was written */
    int64_t num_members, num_partials; /* out; num_partials: rows of partial results */
    int64_t num_tile_users;            /* whole tiles seen by the only token of a request */
    int64_t num_rows, longest;         /* out: the sum of num_tokens; the largest of context_lens */
    int64_t num_wanted_items, num_wanted_merges;
} AttentionPlan;

void attention_plan(AttentionPlan *plan);

/* Select the work that these rows need (wanted_items, wanted_merges). Items of one token and shared items are kept;
 * items of several tokens are dropped if they contain none of the rows. */
void narrow_plan(AttentionPlan *plan, const int64_t *rows, int64_t num_rows);

/* Copy a plan into the arguments of attention(): all of its work, or with is_narrow the selected work only. */
void use_plan(Attention *args, const AttentionPlan *plan, int is_narrow);

#endif
