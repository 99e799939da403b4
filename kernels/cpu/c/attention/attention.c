#include "attention/attention.h"

#include "attention/attention_amx.h"
#include "threads/pool.h"

/* Distance in chunks from the one that is read to the one that is prefetched, from memory to a core's first level
 * cache. A chunk is too short, and the next one too far away, for the hardware's own prefetch. */
enum { FETCHED_CHUNKS = 4 };

/* Copy a chunk of V to room, with 0 for numbers that are not finite: 0 * NaN would be NaN in rows that do not see the
 * token. Rows that see such a token still get NaN, because its K is NaN too (rope.h). */
static const char *clean_values(const CacheShape *shape, const char *chunk, char *room) {
    size_t bytes = value_chunk_bytes(shape);
    for (size_t i = 0; i < bytes; i += VECTOR_BYTES) {
        Words x = load_words(chunk + i);
        x &= finite_numbers(x, shape->dtype);
        memcpy(room + i, &x, sizeof x);
    }
    return room;
}

/* Return the first token of the item's part of the context that any of its rows sees. */
static int first_seen(const Attention *args, const AttentionItem *item) {
    const int window = window_of(args, item);
    return window ? max(item->begin, item->position - window + 1) : item->begin;
}

/* Prefetch K and V of a quantized chunk that find_tile() reads later: the item's from `token` on. */
static void fetch_codes(const Attention *args, const AttentionItem *item, int token) {
    const CacheShape *shape = &args->shape;
    if (token >= item->end || shape->block_size < CHUNK) return;
    const int32_t *table = args->block_tables + (size_t)item->request * args->table_width;
    const size_t bytes = stored_bytes(shape, CHUNK);
    for (int is_value = 0; is_value < shape->num_sides; is_value++) {
        const char *chunk = stored_chunk(shape, args->layer, table, is_value, item->kv_head, token);
        for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(chunk + line);
    }
}

/* Fill in the tile starting at token `first`, limited to the item's part of the context. */
static void find_tile(const Work *work, int first, Tile *tile) {
    const Attention *args = work->args;
    const AttentionItem *item = work->item;
    const int32_t *table = args->block_tables + (size_t)item->request * args->table_width;
    const int last_row = item->position + item->num_tokens - 1, window = window_of(args, item);
    const int seen_by_all = window ? max(0, last_row - window + 1) : 0; /* and up to seen_to */
    const int ahead = ahead_of(args, item);
    const int seen_to = ahead ? min(item->position + ahead, item->end - 1) : item->position;
    const int end = min(first + TILE, item->end);
    const size_t bytes = chunk_bytes(&args->shape), value_bytes = value_chunk_bytes(&args->shape);
    tile->first = first;
    tile->begin = max(0, first_seen(args, item) - first) / CHUNK;
    tile->end = (end - first + CHUNK - 1) / CHUNK;
    for (int i = tile->begin; i < tile->end; i++) {
        int token = first + i * CHUNK;
        if (args->shape.is_quantized) fetch_codes(args, item, token + FETCHED_CHUNKS * CHUNK);
        tile->keys[i] = find_chunk(&args->shape, args->layer, table, 0, item->kv_head, token, item->end - 1,
                                   work->keys + i * bytes);
        char *room = work->values + i * value_bytes;
        if (args->shape.num_sides == 1)
            tile->values[i] = values_of_keys(&args->shape, tile->keys[i], room);
        else
            tile->values[i] = find_chunk(&args->shape, args->layer, table, 1, item->kv_head, token, item->end - 1, room);
        if (token + CHUNK - 1 <= seen_to && token >= seen_by_all) continue;
        tile->values[i] = clean_values(&args->shape, tile->values[i], room);
    }
}

/* Return the chunk of an item's K from `token` on within the cache; NULL past the item's end, or if the cache has no
 * chunks of numbers. */
static const char *stored_keys(const Attention *args, const AttentionItem *item, int token) {
    if (token >= item->end || args->shape.block_size < CHUNK || args->shape.is_quantized) return NULL;
    const int32_t *table = args->block_tables + (size_t)item->request * args->table_width;
    return find_chunk(&args->shape, args->layer, table, 0, item->kv_head, token, token, NULL);
}

/* Set which chunk is read FETCHED_CHUNKS after each chunk. The order is: K, V, then K of the thread's next tile. */
static void find_later(const Work *work, Tile *tile) {
    const int count = tile->end - tile->begin;
    const char *following[2 * TILE_CHUNKS + FETCHED_CHUNKS];
    memcpy(following, tile->keys + tile->begin, sizeof following[0] * count);
    memcpy(following + count, tile->values + tile->begin, sizeof following[0] * count);
    const AttentionItem *item = work->item;
    int token = tile->first + TILE;
    if (token >= item->end) {
        item = work->next;
        token = item ? first_seen(work->args, item) / CHUNK * CHUNK : 0;
    }
    for (int i = 0; i < FETCHED_CHUNKS; i++) {
        const char *chunk = item ? stored_keys(work->args, item, token + i * CHUNK) : NULL;
        following[2 * count + i] = chunk ? chunk : following[0];
    }
    memcpy(tile->after_keys + tile->begin, following + FETCHED_CHUNKS, sizeof following[0] * count);
    memcpy(tile->after_values + tile->begin, following + FETCHED_CHUNKS + count, sizeof following[0] * count);
}

/* Merge a later tile's maximum and sums of one row into the row's. */
static void fold(float *maximum, float *sums, float joining_maximum, const float *joining, int count, float scale) {
    const Joint joint = join(all_floats(*maximum), all_floats(joining_maximum), scale);
    *maximum = joint.maximum[0];
    for (int i = 0; i < count; i += LANES) {
        Floats sum = joined(load_floats(sums + i), joint.kept[0], load_floats(joining + i), joint.added[0]);
        store_floats(sums + i, sum);
    }
}

/* Return the reciprocal of the sum of a row's weights, including that of the head's sink; weights are relative to
 * `maximum`. */
static float reciprocal_with_sink(const Attention *args, int head, float maximum, float sum) {
    const float score = maximum * args->scale, sink = args->sinks[head], largest = sink > score ? sink : score;
    const float kept = exp2_negative(all_floats(score - largest))[0];
    return kept / (sum * kept + exp2_negative(all_floats(sink - largest))[0]);
}

/* Write a row of the output: the weighted sum of V divided by the sum of the weights. */
static void finish_row(const Attention *args, int token, int head, float maximum, const float *sums) {
    const int head_dim = args->shape.value_dim, dtype = args->shape.dtype;
    const float sum = sum_of(load_floats(sums)), *values = sums + LANES;
    const float factor = args->sinks ? reciprocal_with_sink(args, head, maximum, sum) : 1.0f / sum;
    const size_t row = (size_t)token * args->num_heads + head;
    char *out = (char *)args->out + row * head_dim * element_bytes(dtype);
    for (int dim = 0; dim < head_dim; dim += LANES) {
        Floats x = load_floats(values + dim) * factor + 0.0f; /* + 0: no -0, which hidden tokens make +0 */
        if (dim + LANES <= head_dim)
            store_numbers(out, dim, x, dtype);
        else
            store_tail(out, dim, head_dim - dim, x, dtype);
    }
}

/* Write the output rows of some tokens and a KV head. Their maxima are maxima_stride floats apart, their sums `stride`. */
static void finish_rows(const Attention *args, int token, int num_tokens, int kv_head, const float *maxima,
                        size_t maxima_stride, const float *sums, size_t stride) {
    const int group = args->num_heads / args->shape.num_kv_heads;
    for (int end = token + num_tokens; token < end; token++)
        for (int head = kv_head * group; head < (kv_head + 1) * group; head++, maxima += maxima_stride, sums += stride)
            finish_row(args, token, head, *maxima, sums);
}

static char *take(char **scratch, size_t bytes) {
    char *taken = *scratch;
    *scratch += (bytes + 63) / 64 * 64;
    return taken;
}

/* Allocate the state of rows that have seen no token yet. */
static State take_state(char **scratch, int rows, int width) {
    State state;
    state.maxima = (float *)take(scratch, sizeof(float) * (rows + LANES));
    state.sums = (float *)take(scratch, sizeof(float) * rows * (LANES + width));
    for (int row = 0; row < rows + LANES; row++) state.maxima[row] = -INFINITY;
    memset(state.sums, 0, sizeof(float) * rows * (LANES + width));
    return state;
}

/* Copy an item's rows of q in the order (token, query head). */
static void gather_q(const Work *work) {
    const Attention *args = work->args;
    const AttentionItem *item = work->item;
    const size_t row_bytes = args->shape.head_dim * element_bytes(args->shape.dtype);
    for (int i = 0; i < item->num_tokens; i++) {
        const size_t token = item->members < 0 ? item->token + i : args->members[item->members + i].token;
        memcpy((char *)work->q + i * work->group * row_bytes,
               (const char *)args->q + (token * args->num_heads + item->kv_head * work->group) * row_bytes,
               work->group * row_bytes);
    }
}

static Work start_item(const Attention *args, const AttentionItem *item, const AttentionItem *next, char *scratch) {
    const int group = args->num_heads / args->shape.num_kv_heads, width = padded_dim(args->shape.value_dim);
    Work work = {.args = args, .item = item, .group = group, .rows = item->num_tokens * group, .width = width};
    work.next = next;
    work.units = (int)(args->shape.head_dim * element_bytes(args->shape.dtype) / 4);
    work.q = (uint32_t *)take(&scratch, sizeof(uint32_t) * work.rows * work.units);
    work.state = take_state(&scratch, work.rows, width);
    work.keys = take(&scratch, TILE_CHUNKS * chunk_bytes(&args->shape));
    work.values = take(&scratch, TILE_CHUNKS * value_chunk_bytes(&args->shape));
    gather_q(&work);
    return work;
}

/* Store the results of num_rows rows of an item, from `row` on, as partial results. */
static void keep_rows(const Work *work, int row, int num_rows, int partial) {
    const int count = LANES + work->width;
    float *to = work->args->partials + partial * attention_partial_floats(work->width);
    for (const int end = row + num_rows; row < end; row++, to += LANES + count) {
        to[0] = work->state.maxima[row];
        memcpy(to + LANES, work->state.sums + (size_t)row * count, sizeof(float) * count);
    }
}

static void finish_item(const Work *work) {
    const AttentionItem *item = work->item;
    if (item->members >= 0)
        for (int i = 0; i < item->num_tokens; i++)
            keep_rows(work, i * work->group, work->group, work->args->members[item->members + i].partial);
    else if (item->partial >= 0)
        keep_rows(work, 0, work->rows, item->partial);
    else
        finish_rows(work->args, item->token, item->num_tokens, item->kv_head, work->state.maxima, 1, work->state.sums,
                    LANES + work->width);
}

static void run_item(const Attention *args, const AttentionItem *item, const AttentionItem *next, char *scratch,
                     Amx *amx) {
    const Work work = start_item(args, item, next, scratch);
    for (int first = item->begin; first < item->end; first += TILE) {
        Tile tile;
        find_tile(&work, first, &tile);
        find_later(&work, &tile);
        if (args->shape.dtype == FLOAT32)
            attend_float32(&work, &tile);
        else if (HAS_AMX)
            attend_amx(amx, &work, &tile);
        else
            attend_bfloat16(&work, &tile);
    }
    finish_item(&work);
}

static void run_merge(const Attention *args, const AttentionMerge *merge) {
    const int width = padded_dim(args->shape.value_dim);
    const int rows = merge->num_tokens * (args->num_heads / args->shape.num_kv_heads);
    const size_t stride = attention_partial_floats(width);
    float *first = args->partials + merge->partial * stride;
    for (int row = 0; row < rows; row++)
        for (int i = 1; i < merge->num_partials; i++) {
            float *to = first + row * stride, *other = to + i * rows * stride;
            fold(&to[0], to + LANES, other[0], other + LANES, LANES + width, args->scale);
        }
    finish_rows(args, merge->token, merge->num_tokens, merge->kv_head, first, stride, first + LANES, stride);
}

EXPORT int64_t attention_partial_floats(int32_t value_dim) { return 2 * LANES + padded_dim(value_dim); }

EXPORT int64_t attention_scratch_bytes(const CacheShape *shape, int32_t num_heads, int32_t max_item_tokens) {
    const int64_t rows = (int64_t)max_item_tokens * (num_heads / shape->num_kv_heads);
    const int64_t width = padded_dim(shape->head_dim), value_width = padded_dim(shape->value_dim);
    const int64_t chunk_room = TILE_CHUNKS * (int64_t)(chunk_bytes(shape) + value_chunk_bytes(shape));
    return rows * width * 4 + (rows + LANES) * 4 + rows * (LANES + value_width) * 4 + chunk_room + 5 * 64;
}

/* Return a thread's item in a round, or NULL. Items are sorted by size. The thread order is reversed in every other
 * round, so that a thread with a larger item gets a smaller one next. */
static const AttentionItem *item_of(const Attention *args, int round, int thread, int num_threads) {
    const int index = round * num_threads + (round % 2 ? num_threads - 1 - thread : thread);
    return index < args->num_items ? &args->items[index] : NULL;
}

void attention_part(const Attention *args, int thread, int num_threads) {
    int64_t scratch_bytes = attention_scratch_bytes(&args->shape, args->num_heads, args->max_item_tokens);
    char *scratch = args->scratch + thread * ((scratch_bytes + 63) / 64 * 64);
    const AttentionItem *item = item_of(args, 0, thread, num_threads);
    const int uses_amx = HAS_AMX && item && args->shape.dtype == BFLOAT16;
    Amx amx;
    if (uses_amx) begin_attention(&amx, args->max_item_tokens * (args->num_heads / args->shape.num_kv_heads));
    for (int round = 1; item; round++) {
        const AttentionItem *next = item_of(args, round, thread, num_threads);
        run_item(args, item, next, scratch, &amx);
        item = next;
    }
    if (uses_amx) end_attention();
    if (args->num_merges == 0) return;
    pool_barrier();
    for (int i = thread; i < args->num_merges; i += num_threads) run_merge(args, &args->merges[i]);
}

static void attention_job(void *args, int thread, int num_threads) { attention_part(args, thread, num_threads); }

EXPORT void attention(const Attention *args) { pool_run(attention_job, (void *)args); }
