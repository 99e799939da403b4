/* Some rows of q against one KV tile: scores, weights 2 ** (score - maximum), and the weighted sum of V, with all sums of
 * a block of rows in registers. The order of every sum is fixed: dimensions ascending for scores, tokens ascending for
 * values, lane by lane for the sum of weights. Included by attention.c alone.
 */
#ifndef ATTENTION_ROWS_H
#define ATTENTION_ROWS_H

#include <math.h>

#include "attention.h"
#include "vector_math.h"

/* Registers: rows x vectors of sums, beside as many vectors of K or V and one number of q or the weights. */
#if VECTOR_BYTES == 64
#define MAX_ROWS 6
#else
#define MAX_ROWS 2
#endif
#define MAX_VECTORS 4

#define TILE_CHUNKS (TILE / CHUNK)
#define CHUNK_VECTORS (CHUNK / LANES)

/* One row block's scores of a tile, then its weights. */
typedef struct {
    float scores[MAX_ROWS][TILE] __attribute__((aligned(64)));
    uint32_t weights[MAX_ROWS][TILE] __attribute__((aligned(64))); /* units: bfloat16 pairs, or float32 */
} Block;

/* What an item's rows have after some tiles. */
typedef struct {
    float *maximum, *sum; /* [rows] */
    float *values;        /* [rows, width] */
} State;

/* An item under way. */
typedef struct {
    const Attention *args;
    const AttentionItem *item;
    int group, rows, width, units; /* query heads per KV head; rows; padded head_dim; units of a row of q */
    uint32_t *q;                   /* [rows, units] */
    State state, folded;
    char *keys, *values; /* room for the chunks of a tile that are not read from the cache itself */
} Work;

/* A tile's chunks that are visited. */
typedef struct {
    int first, begin, count; /* token of the tile's first chunk; the first one visited; the number visited */
    const char *keys[TILE_CHUNKS], *values[TILE_CHUNKS];
    const char *next_keys[TILE_CHUNKS], *next_values[TILE_CHUNKS];
    int is_whole; /* every row sees every token of it */
} Tile;

INLINE Floats add_unit(Floats sum, Words a, Words b, const int dtype) {
    if (dtype == FLOAT32) return multiply_add((Floats)a, (Floats)b, sum);
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#else
    sum = multiply_add((Floats)(a << 16), (Floats)(b << 16), sum);
    return multiply_add((Floats)(a & 0xffff0000), (Floats)(b & 0xffff0000), sum);
#endif
}

/* sums[row][v] += a[row, step] * b[v][step], steps ascending. */
INLINE void multiply(Floats sums[MAX_ROWS][MAX_VECTORS], const uint32_t *a, int a_stride, const char *const *b,
                     int b_stride, int steps, const int rows, const int vectors, const int dtype) {
    for (int step = 0; step < steps; step++) {
        Words right[MAX_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) right[v] = load_words(b[v] + (size_t)step * b_stride);
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++) {
            Words left = all_words(a[row * a_stride + step]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sums[row][v] = add_unit(sums[row][v], left, right[v], dtype);
        }
    }
}

/* Scores of `vectors` vectors of tokens from chunk on. */
INLINE void score_vectors(const Work *work, const Tile *tile, const uint32_t *q, Block *block, int vector,
                          const int rows, const int vectors, const int dtype) {
    const char *keys[MAX_VECTORS];
    for (int v = 0; v < vectors; v++)
        keys[v] = tile->keys[(vector + v) / CHUNK_VECTORS] + (vector + v) % CHUNK_VECTORS * VECTOR_BYTES;
    Floats sums[MAX_ROWS][MAX_VECTORS] = {0};
    multiply(sums, q, work->units, keys, CHUNK * 4, work->units, rows, vectors, dtype);
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_floats(&block->scores[row][(vector + v) * LANES], sums[row][v]);
}

INLINE void score(const Work *work, const Tile *tile, const uint32_t *q, Block *block, const int rows,
                  const int dtype) {
    int vector = tile->begin * CHUNK_VECTORS, end = vector + tile->count * CHUNK_VECTORS;
    for (; vector + MAX_VECTORS <= end; vector += MAX_VECTORS)
        score_vectors(work, tile, q, block, vector, rows, MAX_VECTORS, dtype);
    for (; vector < end; vector++) score_vectors(work, tile, q, block, vector, rows, 1, dtype);
}

/* Tokens that the row does not see get minus infinity. */
INLINE void hide(const Work *work, const Tile *tile, int row, float *scores) {
    Floats lane;
    for (int i = 0; i < LANES; i++) lane[i] = (float)i;
    float last = (float)(work->item->position + row / work->group - tile->first);
    float first = work->args->window ? last - (float)work->args->window + 1 : -1.0f;
    for (int i = tile->begin * CHUNK; i < (tile->begin + tile->count) * CHUNK; i += LANES) {
        Floats token = lane + (float)i;
        Signed seen = (token <= last) & (token >= first);
        store_floats(scores + i, choose(seen, load_floats(scores + i), all_floats(-INFINITY)));
    }
}

INLINE void store_weights(uint32_t *weights, int token, Floats x, const int dtype) {
    if (dtype == FLOAT32) {
        store_floats(weights + token, x);
        return;
    }
#if defined(__AVX512BF16__)
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)x); /* never subnormal */
    memcpy((uint16_t *)weights + token, &rounded, sizeof rounded);
#else
    store_bfloat16((uint16_t *)weights + token, x);
#endif
}

/* Scores of one row to weights; returns by how much what the row has so far shrinks. */
INLINE float weigh(const Work *work, const Tile *tile, int row, float *scores, uint32_t *weights, const int dtype) {
    const int begin = tile->begin * CHUNK, end = begin + tile->count * CHUNK;
    const State *state = &work->state;
    Floats scale = all_floats(work->args->scale), highest = all_floats(-INFINITY);
    for (int i = begin; i < end; i += LANES) highest = larger(load_floats(scores + i), highest);
    float before = state->maximum[row], maximum = largest_of(highest) * work->args->scale;
    maximum = maximum > before ? maximum : before;
    float finite = maximum == -INFINITY ? 0.0f : maximum;
    for (int i = begin; i < end; i += LANES) {
        Floats exponent = multiply_add(load_floats(scores + i), scale, all_floats(-finite));
        /* A rounding apart from the maximum's own. */
        exponent = choose(exponent > 0.0f, all_floats(0.0f), exponent);
        store_weights(weights, i, exp2_negative(exponent), dtype);
    }
    Floats sum = {0};
    const Words one = all_words(dtype == FLOAT32 ? 0x3f800000 : 0x3f803f80);
    const int units = CHUNK * (dtype == FLOAT32 ? 4 : 2) / 4;
    for (int i = tile->begin * units / LANES * LANES; i < (tile->begin + tile->count) * units; i += LANES)
        sum = add_unit(sum, load_words(weights + i), one, dtype);
    float shrink = exp2_negative(all_floats(before - finite))[0];
    state->sum[row] = state->sum[row] * shrink + sum_of(sum);
    state->maximum[row] = maximum;
    return shrink;
}

/* values[row] = values[row] * shrink + weights[row] * V, for some vectors of dimensions. */
INLINE void add_values(const Work *work, const Tile *tile, int row, const Block *block, const float *shrink, int dim,
                       const int rows, const int vectors, const int dtype) {
    Floats sums[MAX_ROWS][MAX_VECTORS];
    float *values = work->state.values + (size_t)row * work->width + dim;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sums[r][v] = load_floats(values + r * work->width + v * LANES) * all_floats(shrink[r]);
    const int units = CHUNK * (dtype == FLOAT32 ? 4 : 2) / 4;
    for (int chunk = tile->begin; chunk < tile->begin + tile->count; chunk++) {
        const char *right[MAX_VECTORS];
        for (int v = 0; v < vectors; v++) right[v] = tile->values[chunk] + (dim + v * LANES) * 4;
        multiply(sums, &block->weights[0][chunk * units], TILE, right, work->width * 4, units, rows, vectors, dtype);
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_floats(values + r * work->width + v * LANES, sums[r][v]);
}

INLINE void attend_rows(const Work *work, const Tile *tile, int row, const int rows, const int dtype) {
    Block block;
    float shrink[MAX_ROWS];
    score(work, tile, work->q + (size_t)row * work->units, &block, rows, dtype);
    for (int r = 0; r < rows; r++) {
        if (!tile->is_whole) hide(work, tile, row + r, block.scores[r]);
        if (dtype == BFLOAT16) { /* sums are taken over whole vectors */
            int begin = tile->begin * (CHUNK / 2) / LANES * LANES, end = (tile->begin + tile->count) * (CHUNK / 2);
            memset(&block.weights[r][begin], 0, LANES * 4);
            memset(&block.weights[r][(end - 1) / LANES * LANES], 0, LANES * 4);
        }
        shrink[r] = weigh(work, tile, row + r, block.scores[r], block.weights[r], dtype);
    }
    int dim = 0;
    for (; dim + MAX_VECTORS * LANES <= work->width; dim += MAX_VECTORS * LANES)
        add_values(work, tile, row, &block, shrink, dim, rows, MAX_VECTORS, dtype);
    for (; dim < work->width; dim += LANES) add_values(work, tile, row, &block, shrink, dim, rows, 1, dtype);
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
