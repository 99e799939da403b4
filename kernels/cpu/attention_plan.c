#include "attention_plan.h"

/* Items of like size: eight sizes between a power of two and the next. */
enum { NUM_SIZES = 63 * 8 };

/* Where the next item of each size goes; with writes = 0 they are counted only. */
typedef struct {
    int64_t next[NUM_SIZES];
    int writes;
} Places;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }

static int size_of(const AttentionItem *item) {
    const uint64_t work = (uint64_t)item->num_tokens * (uint64_t)(item->end - item->begin) * 8;
    const int power = 63 - __builtin_clzll(work); /* at least 3 */
    return (power - 3) * 8 + (int)(work >> (power - 3) & 7);
}

static void put(AttentionPlan *plan, Places *places, const AttentionItem *item) {
    const int64_t place = places->next[size_of(item)]++;
    if (places->writes) plan->items[place] = *item;
    plan->num_items++;
}

/* Some tokens of a request: an item for each KV head and part of the context. */
static void put_piece(AttentionPlan *plan, Places *places, AttentionItem piece) {
    const int32_t first = piece.begin / TILE, rows = piece.num_tokens * plan->group;
    const int32_t num_parts = rows <= plan->max_split_rows ? (piece.end - 1) / TILE - first + 1 : 1;
    for (int32_t head = 0; head < plan->num_kv_heads; head++) {
        AttentionItem item = piece;
        item.kv_head = head;
        if (num_parts == 1) {
            put(plan, places, &item);
            continue;
        }
        for (int32_t part = 0; part < num_parts; part++) {
            item.begin = (int32_t)greatest(piece.begin, (first + part) * TILE);
            item.end = (int32_t)least(piece.end, (first + part + 1) * TILE);
            item.partial = (int32_t)(plan->num_partials + part * rows);
            put(plan, places, &item);
        }
        if (places->writes)
            plan->merges[plan->num_merges] = (AttentionMerge){head, piece.token, piece.num_tokens,
                                                              (int32_t)plan->num_partials, num_parts};
        plan->num_merges++;
        plan->num_partials += num_parts * rows;
    }
}

static void put_all(AttentionPlan *plan, Places *places, int64_t piece_tokens) {
    int64_t token = 0;
    plan->num_items = plan->num_merges = plan->num_partials = plan->max_item_tokens = 0;
    for (int64_t request = 0; request < plan->num_requests; request++) {
        const int64_t count = plan->num_tokens[request], start = plan->context_lens[request] - count;
        for (int64_t offset = 0; offset < count; offset += piece_tokens) {
            const int64_t num_tokens = least(piece_tokens, count - offset), position = start + offset;
            const int64_t lowest = plan->window ? greatest(0, position - plan->window + 1) / TILE * TILE : 0;
            const AttentionItem piece = {
                .request = (int32_t)request,
                .token = (int32_t)(token + offset),
                .num_tokens = (int32_t)num_tokens,
                .position = (int32_t)position,
                .begin = (int32_t)lowest,
                .end = (int32_t)(position + num_tokens),
                .partial = -1,
            };
            put_piece(plan, places, piece);
            plan->max_item_tokens = (int32_t)greatest(plan->max_item_tokens, num_tokens);
        }
        token += count;
    }
}

EXPORT void attention_plan(AttentionPlan *plan) {
    const int64_t piece_tokens = plan->max_item_tokens;
    Places places = {.writes = 0};
    put_all(plan, &places, piece_tokens);
    if (plan->num_items > plan->max_items) return;
    int64_t before = 0;
    for (int size = NUM_SIZES - 1; size >= 0; size--) {
        const int64_t count = places.next[size];
        places.next[size] = before;
        before += count;
    }
    places.writes = 1;
    put_all(plan, &places, piece_tokens);
}
