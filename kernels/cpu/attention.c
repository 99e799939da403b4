#include "attention.h"

#include "attention_rows.h"
#include "pool.h"

/* Items of this many rows or fewer are bound by memory and fetch the next tile while they compute. */
#define FEW_ROWS 16

/* A copy of a chunk of V in which what is no number is 0: a weight of 0 does not undo a NaN. A token gone wrong still
 * shows to the rows that see it: its K is no number either (kv_write.h). */
static const char *clean_values(const CacheShape *shape, const char *chunk, char *room) {
    size_t bytes = chunk_bytes(shape);
    uint32_t exponent = 0x7f800000;
    for (size_t i = 0; i < bytes; i += VECTOR_BYTES) {
        Words x = load_words(chunk + i);
        Words is_finite = (Words)((x & exponent) != exponent);
        if (shape->dtype == BFLOAT16) {
            is_finite &= 0xffff0000;
            is_finite |= (Words)((x & (exponent >> 16)) != exponent >> 16) & 0xffff;
        }
        x &= is_finite;
        memcpy(room + i, &x, sizeof x);
    }
    return room;
}

static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }

/* The tile from token `first` on, as far as it lies in the item's part of the context. */
static void find_tile(const Work *work, int first, Tile *tile) {
    const Attention *args = work->args;
    const AttentionItem *item = work->item;
    const int32_t *table = args->block_tables + (size_t)item->request * args->table_width;
    const int last_row = item->position + item->num_tokens - 1;
    const int lowest = args->window ? max(0, item->position - args->window + 1) : 0;
    const int seen_by_all = args->window ? max(0, last_row - args->window + 1) : 0; /* and up to item->position */
    const int end = min(first + TILE, item->end);
    const size_t bytes = chunk_bytes(&args->shape);
    tile->first = first;
    tile->begin = max(0, lowest - first) / CHUNK;
    tile->count = (end - first + CHUNK - 1) / CHUNK - tile->begin;
    tile->is_whole = 1;
    for (int i = tile->begin; i < tile->begin + tile->count; i++) {
        int token = first + i * CHUNK;
        tile->keys[i] = find_chunk(&args->shape, args->layer, table, 0, item->kv_head, token, item->end - 1,
                                   work->keys + i * bytes);
        tile->values[i] = find_chunk(&args->shape, args->layer, table, 1, item->kv_head, token, item->end - 1,
                                     work->values + i * bytes);
        if (token + CHUNK - 1 <= item->position && token >= seen_by_all) continue;
        tile->is_whole = 0;
        tile->values[i] = clean_values(&args->shape, tile->values[i], work->values + i * bytes);
    }
}

/* Ask for the K and V of the tile from token `first` on. */
static void prefetch_tile(const Work *work, int first) {
    const Attention *args = work->args;
    const int32_t *table = args->block_tables + (size_t)work->item->request * args->table_width;
    if (args->shape.block_size < CHUNK) return;
    const size_t bytes = chunk_bytes(&args->shape);
    for (int token = first; token < min(first + TILE, work->item->end); token += CHUNK)
        for (int is_value = 0; is_value < 2; is_value++) {
            const char *chunk =
                find_chunk(&args->shape, args->layer, table, is_value, work->item->kv_head, token, token, NULL);
            for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(chunk + i, 0, 2);
        }
}

static void clear(const Work *work, State *state) {
    for (int row = 0; row < work->rows; row++) state->maximum[row] = -INFINITY, state->sum[row] = 0.0f;
    memset(state->values, 0, sizeof(float) * work->rows * work->width);
}

/* Add a later split of one row to what the row has: both shrink to the greater maximum. */
static void fold(float *maximum, float *sum, float *values, float other_maximum, float other_sum,
                 const float *other_values, int width) {
    float greater = other_maximum > *maximum ? other_maximum : *maximum;
    float finite = greater == -INFINITY ? 0.0f : greater;
    float mine = exp2_negative(all_floats(*maximum - finite))[0];
    float others = exp2_negative(all_floats(other_maximum - finite))[0];
    *maximum = greater;
    *sum = *sum * mine + other_sum * others;
    for (int dim = 0; dim < width; dim += LANES) {
        Floats kept = load_floats(values + dim) * mine;
        store_floats(values + dim, multiply_add(load_floats(other_values + dim), all_floats(others), kept));
    }
}

/* values / sum of the row'th (token, query head) of a KV head to out. */
static void finish_row(const Attention *args, int token, int kv_head, int row, float sum, const float *values) {
    const int group = args->num_heads / args->shape.num_kv_heads, head_dim = args->shape.head_dim;
    const int dtype = args->shape.dtype;
    size_t out_row = (size_t)(token + row / group) * args->num_heads + kv_head * group + row % group;
    char *out = (char *)args->out + out_row * head_dim * element_bytes(dtype);
    for (int dim = 0; dim < head_dim; dim += LANES) {
        Floats x = load_floats(values + dim) / sum + 0.0f; /* never minus zero, which hidden tokens would make plus */
        if (dim + LANES <= head_dim)
            store_numbers(out, dim, x, dtype);
        else
            store_tail(out, dim, head_dim - dim, x, dtype);
    }
}

static char *take(char **scratch, size_t bytes) {
    char *taken = *scratch;
    *scratch += (bytes + 63) / 64 * 64;
    return taken;
}

static State take_state(char **scratch, int rows, int width) {
    State state;
    state.maximum = (float *)take(scratch, sizeof(float) * rows);
    state.sum = (float *)take(scratch, sizeof(float) * rows);
    state.values = (float *)take(scratch, sizeof(float) * rows * width);
    return state;
}

/* An item's rows of q, one after the other: (token, query head). */
static void gather_q(const Work *work) {
    const Attention *args = work->args;
    const size_t row_bytes = args->shape.head_dim * element_bytes(args->shape.dtype);
    const char *from = (const char *)args->q + ((size_t)work->item->token * args->num_heads +
                                                work->item->kv_head * work->group) * row_bytes;
    for (int token = 0; token < work->item->num_tokens; token++)
        memcpy((char *)work->q + token * work->group * row_bytes, from + token * args->num_heads * row_bytes,
               work->group * row_bytes);
}

static void run_item(const Attention *args, const AttentionItem *item, char *scratch) {
    const int group = args->num_heads / args->shape.num_kv_heads, width = padded_dim(args->shape.head_dim);
    Work work = {.args = args, .item = item, .group = group, .rows = item->num_tokens * group, .width = width};
    work.units = (int)(args->shape.head_dim * element_bytes(args->shape.dtype) / 4);
    work.q = (uint32_t *)take(&scratch, sizeof(uint32_t) * work.rows * work.units);
    work.state = take_state(&scratch, work.rows, width);
    work.folded = take_state(&scratch, work.rows, width);
    work.keys = take(&scratch, TILE_CHUNKS * chunk_bytes(&args->shape));
    work.values = take(&scratch, TILE_CHUNKS * chunk_bytes(&args->shape));
    gather_q(&work);
    clear(&work, &work.state);
    int num_folded = 0;
    for (int first = item->begin; first < item->end; first += TILE) {
        if (first > item->begin && first % SPLIT == 0) {
            if (num_folded++ == 0) {
                State swapped = work.folded;
                work.folded = work.state, work.state = swapped;
            } else {
                for (int row = 0; row < work.rows; row++)
                    fold(&work.folded.maximum[row], &work.folded.sum[row], work.folded.values + (size_t)row * width,
                         work.state.maximum[row], work.state.sum[row], work.state.values + (size_t)row * width, width);
            }
            clear(&work, &work.state);
        }
        Tile tile;
        find_tile(&work, first, &tile);
        if (work.rows <= FEW_ROWS) prefetch_tile(&work, first + TILE);
        if (args->shape.dtype == FLOAT32)
            attend_float32(&work, &tile);
        else
            attend_bfloat16(&work, &tile);
    }
    for (int row = 0; row < work.rows; row++) {
        float *values = work.state.values + (size_t)row * width;
        if (item->partial >= 0) {
            float *partial = args->partials + (size_t)(item->partial + row) * attention_partial_floats(width);
            partial[0] = work.state.maximum[row], partial[1] = work.state.sum[row];
            memcpy(partial + LANES, values, sizeof(float) * width);
            continue;
        }
        if (num_folded > 0) {
            float *folded = work.folded.values + (size_t)row * width;
            fold(&work.folded.maximum[row], &work.folded.sum[row], folded, work.state.maximum[row],
                 work.state.sum[row], values, width);
            finish_row(args, item->token, item->kv_head, row, work.folded.sum[row], folded);
        } else {
            finish_row(args, item->token, item->kv_head, row, work.state.sum[row], values);
        }
    }
}

static void run_merge(const Attention *args, const AttentionMerge *merge) {
    const int group = args->num_heads / args->shape.num_kv_heads, width = padded_dim(args->shape.head_dim);
    const int rows = merge->num_tokens * group;
    const size_t stride = attention_partial_floats(width);
    for (int row = 0; row < rows; row++) {
        float *first = args->partials + (merge->partial + row) * stride;
        for (int i = 1; i < merge->num_partials; i++) {
            const float *other = first + i * rows * stride;
            fold(&first[0], &first[1], first + LANES, other[0], other[1], other + LANES, width);
        }
        finish_row(args, merge->token, merge->kv_head, row, first[1], first + LANES);
    }
}

EXPORT int64_t attention_partial_floats(int32_t head_dim) { return LANES + padded_dim(head_dim); }

EXPORT int64_t attention_scratch_bytes(const CacheShape *shape, int32_t num_heads, int32_t max_item_tokens) {
    const int64_t rows = (int64_t)max_item_tokens * (num_heads / shape->num_kv_heads);
    const int64_t width = padded_dim(shape->head_dim);
    return rows * width * 4 * 3 + rows * 4 * 4 + 2 * TILE_CHUNKS * (int64_t)chunk_bytes(shape) + 9 * 64;
}

void attention_part(const Attention *args, int thread, int num_threads) {
    int64_t scratch_bytes = attention_scratch_bytes(&args->shape, args->num_heads, args->max_item_tokens);
    char *scratch = args->scratch + thread * ((scratch_bytes + 63) / 64 * 64);
    for (int i = thread; i < args->num_items; i += num_threads) run_item(args, &args->items[i], scratch);
    if (args->num_merges == 0) return;
    pool_barrier();
    for (int i = thread; i < args->num_merges; i += num_threads) run_merge(args, &args->merges[i]);
}

static void attention_job(void *args, int thread, int num_threads) { attention_part(args, thread, num_threads); }

EXPORT void attention(const Attention *args) { pool_run(attention_job, (void *)args); }
