/* Some rows of q against one KV tile: scores, weights 2 ** (score - maximum), and the weighted sum of V, with all sums
 * of a block of rows in registers. The order of every sum is fixed: dimensions ascending for scores, tokens ascending
 * for values, lane by lane for the sum of weights. Included by attention.c alone.
 */
#ifndef ATTENTION_ROWS_H
#define ATTENTION_ROWS_H

#include "attention_weights.h"

#define CHUNK_VECTORS (CHUNK / LANES)

/* What an item's rows have after some tiles. */
typedef struct {
    float *maxima; /* [rows + LANES] of the scores, not scaled; the latter are of no row */
    float *sums;   /* [rows, LANES + width]: of the weights, of all tokens together; of weighted V */
} State;

/* An item under way. */
typedef struct {
    const Attention *args;
    const AttentionItem *item, *next; /* the one that the thread will do after it, or NULL */
    int group, rows, width, units; /* query heads per KV head; rows; padded head_dim; units of a row of q */
    uint32_t *q;                   /* [rows, units] */
    State state;
    char *keys, *values; /* room for the chunks of a tile that are not read from the cache itself */
} Work;

/* A tile's chunks that are visited. */
typedef struct {
    int first, begin, end; /* token of the tile's first chunk; chunks from begin to end */
    const char *keys[TILE_CHUNKS], *values[TILE_CHUNKS];
    const char *after_keys[TILE_CHUNKS], *after_values[TILE_CHUNKS]; /* chunks that are read a little later */
} Tile;

/* sums[row][v] += a[row, step] * b[v][step], steps ascending. If not NULL, `later` stands as b does, and is fetched. */
INLINE void multiply(Floats sums[MAX_ROWS][MAX_VECTORS], const uint32_t *a, int a_stride, const char *const *b,
                     const char *const *later, int b_stride, int steps, const int rows, const int vectors,
                     const int dtype) {
    for (int step = 0; step < steps; step++) {
        Words right[MAX_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) right[v] = load_words(b[v] + (size_t)step * b_stride);
        if (later)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) __builtin_prefetch(later[v] + (size_t)step * b_stride);
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++) {
            Words left = all_words(a[row * a_stride + step]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sums[row][v] = add_unit(sums[row][v], left, right[v], dtype);
        }
    }
}

static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }

/* Scores of `vectors` vectors of tokens, from `vector` on. */
INLINE void score_vectors(const Work *work, const Tile *tile, const uint32_t *q, Block *block, int vector,
                          const int rows, const int vectors, const int dtype) {
    const char *keys[MAX_VECTORS], *later[MAX_VECTORS];
    for (int v = 0; v < vectors; v++) {
        const int chunk = (vector + v) / CHUNK_VECTORS, offset = (vector + v) % CHUNK_VECTORS * VECTOR_BYTES;
        keys[v] = tile->keys[chunk] + offset;
        later[v] = tile->after_keys[chunk] + offset;
    }
    Floats sums[MAX_ROWS][MAX_VECTORS] = {0};
    multiply(sums, q, work->units, keys, block->fetches ? later : NULL, CHUNK * 4, work->units, rows,
             vectors, dtype);
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++) {
        Floats highest = block->highest[row];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            Floats scores = sums[row][v];
            if (!block->is_whole) scores = hide(scores, block->seen[row], (vector + v) * LANES);
            store_floats(&block->scores[row][(vector + v) * LANES], scores);
            highest = larger(scores, highest);
        }
        block->highest[row] = highest;
    }
}

INLINE void score(const Work *work, const Tile *tile, const uint32_t *q, Block *block, const int rows,
                  const int dtype) {
    for (int row = 0; row < rows; row++) block->highest[row] = all_floats(-INFINITY);
    int vector = block->begin * CHUNK_VECTORS, end = block->end * CHUNK_VECTORS;
    for (; vector + MAX_VECTORS <= end; vector += MAX_VECTORS)
        score_vectors(work, tile, q, block, vector, rows, MAX_VECTORS, dtype);
    for (; vector + 2 <= end; vector += 2) score_vectors(work, tile, q, block, vector, rows, 2, dtype);
    for (; vector < end; vector++) score_vectors(work, tile, q, block, vector, rows, 1, dtype);
}

/* weights[row] * V joins sums[row], for some vectors of dimensions. */
INLINE void add_values(const Work *work, const Tile *tile, float *state, const Block *block, int dim, const int rows,
                       const int vectors, const int dtype) {
    const int stride = LANES + work->width, units = CHUNK * (dtype == FLOAT32 ? 4 : 2) / 4;
    Floats sums[MAX_ROWS][MAX_VECTORS] = {0};
    for (int chunk = block->begin; chunk < block->end; chunk++) {
        const char *right[MAX_VECTORS], *later[MAX_VECTORS];
        for (int v = 0; v < vectors; v++) {
            const size_t offset = (dim + v * LANES) * 4;
            right[v] = tile->values[chunk] + offset;
            later[v] = tile->after_values[chunk] + offset;
        }
        multiply(sums, &block->weights[0][chunk * units], TILE, right, block->fetches ? later : NULL, work->width * 4,
                 units, rows, vectors, dtype);
    }
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *values = state + row * stride + LANES + dim + v * LANES;
            store_floats(values, joined(load_floats(values), block->kept[row], sums[row][v], block->added[row]));
        }
}

/* The window that cuts off what an item's rows see, or 0. Tokens of several requests see all of what they share. */
static int window_of(const Attention *args, const AttentionItem *item) { return item->members < 0 ? args->window : 0; }

/* What of a tile these rows see; returns whether it is anything. */
INLINE int find_seen(const Work *work, const Tile *tile, int row, Block *block, const int rows) {
    const int window = window_of(work->args, work->item), position = work->item->position - tile->first;
    const int last = position + (row + rows - 1) / work->group, first = position + row / work->group - window + 1;
    block->begin = window && first > 0 ? max(tile->begin, first / CHUNK) : tile->begin;
    block->end = last < 0 ? 0 : min(tile->end, last / CHUNK + 1);
    block->is_whole = 1;
    for (int r = 0; r < rows; r++) {
        const int last = position + (row + r) / work->group, first = window ? last - window + 1 : -1;
        block->seen[r] = (Seen){(float)first, (float)last};
        block->is_whole &= first <= block->begin * CHUNK && last >= block->end * CHUNK - 1;
    }
    return block->begin < block->end;
}

INLINE void attend_rows(const Work *work, const Tile *tile, int row, const int rows, const int dtype) {
    Block block;
    if (!find_seen(work, tile, row, &block, rows)) return;
    block.fetches = row == 0; /* later rows find the tile in a cache */
    score(work, tile, work->q + (size_t)row * work->units, &block, rows, dtype);
    join_maxima(&block, work->state.maxima + row, work->args->scale, rows);
    const int stride = LANES + work->width;
    float *sums = work->state.sums + (size_t)row * stride;
    for (int r = 0; r < rows; r++) weigh(&block, r, work->args->scale, sums + r * stride, dtype);
    int dim = 0;
    for (; dim + MAX_VECTORS * LANES <= work->width; dim += MAX_VECTORS * LANES)
        add_values(work, tile, sums, &block, dim, rows, MAX_VECTORS, dtype);
    for (; dim < work->width; dim += LANES) add_values(work, tile, sums, &block, dim, rows, 1, dtype);
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
