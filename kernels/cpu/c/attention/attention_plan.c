#include "attention/attention_plan.h"

/* Number of size classes of items: eight between a power of two and the next. */
enum { NUM_SIZES = 63 * 8 };

/* Index of the next item of each size class; with writes = 0 items are only counted. */
typedef struct {
    int64_t next[NUM_SIZES];
    int writes, knows_users; /* knows_users: find_shared_tiles() has run */
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

/* Record that a request's only token sees a whole tile; `item` is its item for the first KV head. Return whether other
 * requests share the tile. */
static int is_shared(AttentionPlan *plan, const Places *places, const AttentionItem *item, int32_t head_stride) {
    const int64_t index = plan->num_tile_users;
    if (index >= plan->max_items || !tile_has_blocks(&plan->tables, item->begin)) return 0;
    plan->num_tile_users++;
    TileUser *user = &plan->tile_users[index];
    if (!places->knows_users)
        *user = lone_user(&plan->tables, item->request, item->token, item->begin, (int32_t)index);
    user->partial = item->partial;
    user->head_stride = head_stride;
    return plan->tile_users[user->first].count > 1;
}

/* Plan some tokens of a request, split along their context: an item for each part and KV head. */
static void put_parts(AttentionPlan *plan, Places *places, AttentionItem piece, int32_t num_parts) {
    const int32_t rows = piece.num_tokens * plan->group, head_stride = num_parts * rows;
    const int32_t lowest = plan->window ? piece.position - plan->window + 1 : 0;
    for (int32_t part = 0; part < num_parts; part++) {
        AttentionItem item = piece;
        item.begin = piece.begin + part * TILE;
        item.end = (int32_t)least(piece.end, item.begin + TILE);
        item.partial = (int32_t)(plan->num_partials + part * rows);
        const int is_seen_by_one = piece.num_tokens == 1 && item.end == item.begin + TILE && lowest <= item.begin;
        if (is_seen_by_one && plan->max_members > 1 && is_shared(plan, places, &item, head_stride)) continue;
        for (item.kv_head = 0; item.kv_head < plan->num_kv_heads; item.kv_head++, item.partial += head_stride)
            put(plan, places, &item);
    }
    for (int32_t head = 0; head < plan->num_kv_heads; head++) {
        if (places->writes)
            plan->merges[plan->num_merges] = (AttentionMerge){head, piece.token, piece.num_tokens,
                                                              (int32_t)plan->num_partials, num_parts};
        plan->num_merges++;
        plan->num_partials += head_stride;
    }
}

/* Plan some tokens of a request. */
static void put_piece(AttentionPlan *plan, Places *places, AttentionItem piece) {
    const int32_t num_parts = (piece.end - 1) / TILE - piece.begin / TILE + 1;
    plan->max_item_tokens = (int32_t)greatest(plan->max_item_tokens, piece.num_tokens);
    if (num_parts > 1 && piece.num_tokens * plan->group <= plan->max_split_rows)
        put_parts(plan, places, piece, num_parts);
    else
        for (piece.kv_head = 0; piece.kv_head < plan->num_kv_heads; piece.kv_head++) put(plan, places, &piece);
}

/* Plan one item for num_users users of a tile, from the one at `index` on, for one KV head. Return the next user's
 * index. */
static int32_t put_users(AttentionPlan *plan, Places *places, int32_t index, int32_t num_users, int32_t head) {
    const TileUser *user = &plan->tile_users[index];
    const AttentionItem item = {
        .request = user->request,
        .kv_head = head,
        .num_tokens = num_users,
        .position = user->begin + TILE - 1,
        .begin = user->begin,
        .end = user->begin + TILE,
        .members = (int32_t)plan->num_members,
    };
    put(plan, places, &item);
    plan->max_item_tokens = (int32_t)greatest(plan->max_item_tokens, num_users);
    for (int32_t i = 0; i < num_users; i++, index = user->next) {
        user = &plan->tile_users[index];
        if (places->writes)
            plan->members[plan->num_members] =
                (AttentionMember){user->token, user->partial + head * user->head_stride};
        plan->num_members++;
    }
    return index;
}

/* Plan the tiles that several requests share. For each KV head there are as few items as max_members allows, of similar
 * size. */
static void put_shared(AttentionPlan *plan, Places *places) {
    for (int32_t first = 0; first < plan->num_tile_users; first++) {
        const int32_t count = plan->tile_users[first].count;
        if (plan->tile_users[first].first != first || count == 1) continue;
        const int32_t num_items = (count + plan->max_members - 1) / plan->max_members;
        for (int32_t head = 0; head < plan->num_kv_heads; head++) {
            int32_t index = first;
            for (int32_t i = 0; i < num_items; i++)
                index = put_users(plan, places, index, count * (i + 1) / num_items - count * i / num_items, head);
        }
    }
}

/* Cut a piece of at most num_tokens tokens where a whole begins or ends; `whole` is the first one that ends after the
 * piece's first token. In a whole, the piece sees its end. */
static AttentionItem cut_at_wholes(const AttentionPlan *plan, int64_t whole, AttentionItem piece, int64_t num_tokens) {
    if (whole < plan->num_wholes) {
        const int64_t before = plan->wholes[2 * whole] - piece.token, left = before + plan->wholes[2 * whole + 1];
        piece.sees_end = before <= 0;
        num_tokens = least(num_tokens, piece.sees_end ? left : before);
        if (piece.sees_end) piece.end = (int32_t)(piece.position + left);
    }
    piece.num_tokens = (int32_t)num_tokens;
    if (!piece.sees_end) piece.end = (int32_t)least(piece.end, piece.position + num_tokens + plan->ahead);
    return piece;
}

static void put_all(AttentionPlan *plan, Places *places, int64_t piece_tokens) {
    int64_t token = 0, whole = 0;
    plan->num_items = plan->num_merges = plan->num_partials = plan->max_item_tokens = 0;
    plan->num_members = plan->num_tile_users = plan->longest = 0;
    for (int64_t request = 0; request < plan->num_requests; request++) {
        const int64_t count = plan->num_tokens[request], start = plan->context_lens[request] - count;
        for (int64_t offset = 0; offset < count;) {
            const int64_t position = start + offset;
            const int64_t lowest = plan->window ? greatest(0, position - plan->window + 1) / TILE * TILE : 0;
            const AttentionItem piece = {
                .request = (int32_t)request,
                .token = (int32_t)(token + offset),
                .position = (int32_t)position,
                .begin = (int32_t)lowest,
                .end = (int32_t)(start + count),
                .partial = -1,
                .members = -1,
            };
            while (whole < plan->num_wholes && plan->wholes[2 * whole] + plan->wholes[2 * whole + 1] <= piece.token) whole++;
            const AttentionItem cut = cut_at_wholes(plan, whole, piece, least(piece_tokens, count - offset));
            put_piece(plan, places, cut);
            offset += cut.num_tokens;
        }
        token += count;
        plan->longest = greatest(plan->longest, plan->context_lens[request]);
    }
    plan->num_rows = token;
    if (places->knows_users) put_shared(plan, places);
}

EXPORT void attention_plan(AttentionPlan *plan) {
    const int64_t piece_tokens = plan->max_item_tokens;
    Places places = {.writes = 0};
    put_all(plan, &places, piece_tokens);
    if (plan->num_items > plan->max_items) return;
    if (find_shared_tiles(&plan->tables, plan->tile_users, plan->num_tile_users, plan->places)) {
        places = (Places){.knows_users = 1};
        put_all(plan, &places, piece_tokens);
    }
    int64_t before = 0;
    for (int size = NUM_SIZES - 1; size >= 0; size--) {
        const int64_t count = places.next[size];
        places.next[size] = before;
        before += count;
    }
    places.writes = places.knows_users = 1;
    put_all(plan, &places, piece_tokens);
}

static int has_any(int32_t token, int32_t num_tokens, const int64_t *rows, int64_t num_rows) {
    if (num_tokens == 1) return 1;
    for (int64_t i = 0; i < num_rows; i++)
        if (rows[i] >= token && rows[i] < (int64_t)token + num_tokens) return 1;
    return 0;
}

void narrow_plan(AttentionPlan *plan, const int64_t *rows, int64_t num_rows) {
    plan->num_wanted_items = plan->num_wanted_merges = 0;
    for (int64_t i = 0; i < plan->num_items; i++) {
        const AttentionItem *item = &plan->items[i];
        if (item->members >= 0 || has_any(item->token, item->num_tokens, rows, num_rows))
            plan->wanted_items[plan->num_wanted_items++] = *item;
    }
    for (int64_t i = 0; i < plan->num_merges; i++) {
        const AttentionMerge *merge = &plan->merges[i];
        if (has_any(merge->token, merge->num_tokens, rows, num_rows))
            plan->wanted_merges[plan->num_wanted_merges++] = *merge;
    }
}

void use_plan(Attention *args, const AttentionPlan *plan, int is_narrow) {
    args->block_tables = plan->tables.blocks, args->table_width = plan->tables.width;
    args->items = is_narrow ? plan->wanted_items : plan->items;
    args->num_items = (int32_t)(is_narrow ? plan->num_wanted_items : plan->num_items);
    args->merges = is_narrow ? plan->wanted_merges : plan->merges;
    args->num_merges = (int32_t)(is_narrow ? plan->num_wanted_merges : plan->num_merges);
    args->members = plan->members;
    args->max_item_tokens = plan->max_item_tokens, args->window = plan->window, args->ahead = plan->ahead;
}
