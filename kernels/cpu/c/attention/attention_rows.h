/* Some rows of q against one KV tile: scores, weights 2 ** (score - maximum), and the weighted sum of V.
 *
 * All sums of a block of rows are in registers. The order of every sum is fixed: dimensions ascending for scores,
 * tokens ascending for values, lane by lane for the sum of weights. Only attention.c includes this file.
 */
#ifndef ATTENTION_ROWS_H
#define ATTENTION_ROWS_H

#include "attention/attention_weights.h"

#define CHUNK_VECTORS (CHUNK / LANES)

/* Running results of an item's rows after some tiles. */
typedef struct {
    float *maxima; /* [rows + LANES] of the scores, not scaled; the last LANES are padding */
    float *sums;   /* [rows, LANES + width]: sums of the weights by lane, then of weighted V */
} State;

/* An item that is being computed. */
typedef struct {
    const Attention *args;
    const AttentionItem *item, *next; /* next: the thread's next item, or NULL */
    int group, rows, width, units; /* query heads per KV head; rows; padded head_dim; units of a row of q */
    uint32_t *q;                   /* [rows, units] */
    State state;
    char *keys, *values; /* room for a tile's chunks that are copied from the cache */
} Work;

/* The chunks of a tile that are read. */
typedef struct {
    int first, begin, end; /* first: the tile's first token; chunks [begin, end) */
    const char *keys[TILE_CHUNKS], *values[TILE_CHUNKS];
    const char *after_keys[TILE_CHUNKS], *after_values[TILE_CHUNKS]; /* chunks to prefetch: they are read later */
} Tile;

/* sums[row][v] += a[row] * b[v], with one unit of a for each row. */
INLINE void multiply(Floats sums[MAX_ROWS][MAX_VECTORS], const uint32_t *a, int a_stride,
                     const Words b[MAX_VECTORS], const int rows, const int vectors, const int dtype) {
#if VECTOR_BYTES == 32 /* too few registers for both numbers of the pairs at once */
    if (dtype == BFLOAT16) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            Floats right[MAX_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) right[v] = half_of(b[v], half);
#pragma GCC unroll 6
            for (int row = 0; row < rows; row++) {
                __asm__ volatile("" : "+r"(a)); /* otherwise compilers keep all units of a, and the sums in memory */
                const Floats left = half_of(all_units(a[row * a_stride]), half);
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++) sums[row][v] = multiply_add(left, right[v], sums[row][v]);
            }
        }
        return;
    }
#endif
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++) {
        Words left = all_words(a[row * a_stride]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[row][v] = add_unit(sums[row][v], left, b[v], dtype);
    }
}

static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }

/* Cap the scores, set those of tokens that a row does not see to minus infinity, and update the row's highest score. */
static __attribute__((noinline)) void hide_scores(Block *block, int vector, int rows, int vectors) {
    for (int row = 0; row < rows; row++)
        for (int i = vector * LANES; i < (vector + vectors) * LANES; i += LANES) {
            Floats scores = load_floats(&block->scores[row][i]);
            if (block->cap_factor != 0.0f) scores = hyperbolic_tangent(scores * block->cap_factor);
            scores = hide(scores, block->seen[row], i);
            store_floats(&block->scores[row][i], scores);
            block->highest[row] = larger(scores, block->highest[row]);
        }
}

/* Compute the scores of `vectors` vectors of tokens, from `vector` on. */
INLINE void score_vectors(const Work *work, const Tile *tile, const uint32_t *q, Block *block, int vector,
                          const int rows, const int vectors, const int dtype) {
    const char *keys[MAX_VECTORS], *later[MAX_VECTORS];
    for (int v = 0; v < vectors; v++) {
        const int chunk = (vector + v) / CHUNK_VECTORS, offset = (vector + v) % CHUNK_VECTORS * VECTOR_BYTES;
        keys[v] = tile->keys[chunk] + offset;
        later[v] = tile->after_keys[chunk] + offset;
    }
    Floats sums[MAX_ROWS][MAX_VECTORS] = {0};
    for (int unit = 0, offset = 0; unit < work->units; unit++, offset += CHUNK * 4) {
        Words right[MAX_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) right[v] = load_words(keys[v] + offset);
        if (block->fetches)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) __builtin_prefetch(later[v] + offset);
        multiply(sums, q + unit, work->units, right, rows, vectors, dtype);
    }
    const int is_whole = vector >= block->whole_begin && vector + vectors <= block->whole_end;
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++) {
        Floats highest = block->highest[row];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            store_floats(&block->scores[row][(vector + v) * LANES], sums[row][v]);
            highest = larger(sums[row][v], highest);
        }
        if (is_whole) block->highest[row] = highest;
    }
    if (!is_whole) hide_scores(block, vector, rows, vectors);
}

INLINE void score(const Work *work, const Tile *tile, const uint32_t *q, Block *block, const int rows,
                  const int dtype) {
    for (int row = 0; row < rows; row++) block->highest[row] = all_floats(-INFINITY);
    int vector = block->begin * CHUNK_VECTORS, end = block->end * CHUNK_VECTORS;
    const int vectors = VECTORS_FOR(rows);
    for (; vector + vectors <= end; vector += vectors)
        score_vectors(work, tile, q, block, vector, rows, vectors, dtype);
    for (; vector + 2 <= end; vector += 2) score_vectors(work, tile, q, block, vector, rows, 2, dtype);
    for (; vector < end; vector++) score_vectors(work, tile, q, block, vector, rows, 1, dtype);
}

/* sums[row] += weights[row] * V of one chunk, for `vectors` vectors of dimensions from dim on. */
INLINE void multiply_values(const Work *work, const Tile *tile, Floats sums[MAX_ROWS][MAX_VECTORS], const Block *block,
                            int chunk, int dim, const int rows, const int vectors, const int dtype) {
    const int units = CHUNK * (dtype == FLOAT32 ? 4 : 2) / 4, stride = work->width * 4;
    const char *values = tile->values[chunk] + dim * 4, *later = tile->after_values[chunk] + dim * 4;
    const uint32_t *weights = &block->weights[0][chunk * units];
    for (int unit = 0; unit < units; unit++, values += stride, later += stride) {
        Words right[MAX_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) right[v] = load_words(values + v * VECTOR_BYTES);
        if (block->fetches)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) __builtin_prefetch(later + v * VECTOR_BYTES);
        multiply(sums, weights + unit, TILE, right, rows, vectors, dtype);
    }
}

/* Add weights[row] * V of the tile to the state's sums, for `vectors` vectors of dimensions from dim on. With is_first
 * the weights are computed in the same loop: those of the next two chunks while two are multiplied. The products leave
 * other execution units of the CPU free for that. */
INLINE void add_values(const Work *work, const Tile *tile, float *state, Block *block, int dim, const int is_first,
                       const int rows, const int vectors, const int dtype) {
    const int stride = LANES + work->width, half = rows / 2;
    const float scale = work->args->scale;
    Floats sums[MAX_ROWS][MAX_VECTORS] = {0};
    int chunk = block->begin / 2 * 2;
    if (is_first) weigh(block, chunk, scale, 0, rows, dtype);
    for (; chunk < block->end; chunk++) {
        const int is_odd = chunk % 2, next = chunk + 2 - is_odd;
        if (is_first && next < block->end)
            weigh(block, next, scale, is_odd ? half : 0, is_odd ? rows : half, dtype);
        if (chunk >= block->begin) multiply_values(work, tile, sums, block, chunk, dim, rows, vectors, dtype);
    }
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *values = state + row * stride + LANES + dim + v * LANES;
            store_floats(values, joined(load_floats(values), block->kept[row], sums[row][v], block->added[row]));
        }
}

/* The window of an item's rows, or 0. Tokens of several requests see the whole tile that they share. */
static int window_of(const Attention *args, const AttentionItem *item) { return item->members < 0 ? args->window : 0; }

/* How many tokens after it a row of an item sees, within the item's part of the context. */
static int ahead_of(const Attention *args, const AttentionItem *item) {
    return item->sees_end ? 1 << 30 : args->ahead;
}

/* Find the part of a tile that these rows see. Return whether it is not empty. */
INLINE int find_seen(const Work *work, const Tile *tile, int row, Block *block, const int rows) {
    const int window = window_of(work->args, work->item), position = work->item->position - tile->first;
    const int ahead = ahead_of(work->args, work->item), last = work->item->end - 1 - tile->first;
    for (int r = 0; r < rows; r++) {
        const int own = position + (row + r) / work->group;
        block->seen[r] = (Seen){window ? own - window + 1 : -1, ahead ? min(own + ahead, last) : own};
    }
    const Seen first_row = block->seen[0], last_row = block->seen[rows - 1];
    block->begin = max(tile->begin, first_row.first / CHUNK);
    block->end = last_row.last < 0 ? 0 : min(tile->end, last_row.last / CHUNK + 1);
    block->whole_begin = last_row.first > 0 ? (last_row.first + LANES - 1) / LANES : 0;
    block->whole_end = (first_row.last + 1) / LANES;
    block->cap_factor = work->args->cap_factor;
    if (block->cap_factor != 0.0f) block->whole_begin = block->whole_end = 0; /* hide_scores() caps */
    return block->begin < block->end;
}

INLINE void attend_rows(const Work *work, const Tile *tile, int row, const int rows, const int dtype) {
    Block block;
    if (!find_seen(work, tile, row, &block, rows)) return;
    block.fetches = row == 0; /* for later rows the tile is in a cache */
    score(work, tile, work->q + (size_t)row * work->units, &block, rows, dtype);
    join_maxima(&block, work->state.maxima + row, work->args->scale, rows);
    pad_scores(&block, rows);
    for (int r = 0; r < rows; r++) block.sums[r] = all_floats(0.0f);
    const int stride = LANES + work->width;
    float *sums = work->state.sums + (size_t)row * stride;
    int dim = 0;
    const int vectors = VECTORS_FOR(rows);
    for (; dim + vectors * LANES <= work->width; dim += vectors * LANES)
        add_values(work, tile, sums, &block, dim, dim == 0, rows, vectors, dtype);
    if (dim == 0) /* a narrow head: no product has computed the weights in its loop */
        for (int chunk = block.begin / 2 * 2; chunk < block.end; chunk += 2)
            weigh(&block, chunk, work->args->scale, 0, rows, dtype);
    for (; dim < work->width; dim += LANES) add_values(work, tile, sums, &block, dim, 0, rows, 1, dtype);
    for (int r = 0; r < rows; r++) {
        Floats sum = load_floats(sums + r * stride);
        store_floats(sums + r * stride, joined(sum, block.kept[r], block.sums[r], block.added[r]));
    }
}

INLINE void attend_all_rows(const Work *work, const Tile *tile, const int dtype) {
    int row = 0;
    for (; row + MAX_ROWS <= work->rows; row += MAX_ROWS) attend_rows(work, tile, row, MAX_ROWS, dtype);
#if MAX_ROWS > 3
    for (; row + 3 <= work->rows; row += 3) attend_rows(work, tile, row, 3, dtype);
#endif
    for (; row < work->rows; row++) attend_rows(work, tile, row, 1, dtype);
}

static __attribute__((noinline)) void attend_float32(const Work *work, const Tile *tile) {
    attend_all_rows(work, tile, FLOAT32);
}

static __attribute__((noinline)) void attend_bfloat16(const Work *work, const Tile *tile) {
    attend_all_rows(work, tile, BFLOAT16);
}

#endif
