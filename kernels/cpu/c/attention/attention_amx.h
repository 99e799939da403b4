/* Some rows of q against one KV tile, as in attention_rows.h, with AMX's products (amx.h). Only attention.c includes
 * this file.
 *
 * The chunks of the cache are already tiles: K of a chunk has the dimensions as its rows, 32 of them in a tile; V has
 * pairs of its 16 tokens as rows, 16 dimensions in a tile. So scores are summed over 32 dimensions at a time, and
 * values over the 16 tokens of a chunk, whatever the size of the blocks.
 */
#ifndef ATTENTION_AMX_H
#define ATTENTION_AMX_H

#include "products/amx.h"
#include "attention/attention_rows.h"

#if defined(__AMX_BF16__)

/* Tiles: four sums, then what is multiplied: rows of q with keys, weights with values. */
enum { NUM_SUMS = 4, Q = 4, WEIGHTS = 5, KEYS = 6, VALUES = 7 };

enum { KEY_UNITS = AMX_DEPTH / 2 }; /* units of q and rows of a chunk of K that make a tile */

/* The last units of rows or chunks, if they do not fill a tile, with zeros after them. */
typedef struct {
    uint32_t q[BLOCK_ROWS][KEY_UNITS], keys[KEY_UNITS][CHUNK];
} Tails;

/* Configure the tiles for `rows` rows of q. */
static void shape_for_rows(Amx *amx, int rows) {
    amx->shapes = (AmxShapes){.palette = 1};
    for (int tile = 0; tile <= Q; tile++) amx_shape(amx, tile, rows, AMX_ROW_BYTES);
    amx_shape(amx, WEIGHTS, rows, CHUNK * 2);
    amx_shape(amx, KEYS, KEY_UNITS, AMX_ROW_BYTES);
    amx_shape(amx, VALUES, CHUNK / 2, AMX_ROW_BYTES);
}

INLINE void zero_sums(Amx *amx, const int is_real) {
    amx_zero(amx, 0, is_real), amx_zero(amx, 1, is_real), amx_zero(amx, 2, is_real), amx_zero(amx, 3, is_real);
}

/* Store the sums of `count` tiles next to each other, in rows that are `stride` bytes apart. */
INLINE void store_sums(const Amx *amx, float *to, int64_t stride, int count, const int is_real) {
    amx_store(amx, 0, to, stride, is_real);
    if (count > 1) amx_store(amx, 1, to + 16, stride, is_real);
    if (count > 2) amx_store(amx, 2, to + 32, stride, is_real);
    if (count > 3) amx_store(amx, 3, to + 48, stride, is_real);
}

INLINE void prefetch_chunk(const char *chunk, int bytes) {
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(chunk + line);
}

/* Multiply the loaded units of q with those of a chunk of K. */
INLINE void multiply_keys(Amx *amx, const int sums, const char *keys, const int is_real) {
    amx_load(amx, KEYS, keys, AMX_ROW_BYTES, is_real);
    amx_product(amx, sums, Q, KEYS, is_real);
}

INLINE void multiply_last_keys(Amx *amx, const int sums, const char *keys, Tails *tails, int units,
                               const int is_real) {
    memcpy(tails->keys, keys, units * AMX_ROW_BYTES);
    multiply_keys(amx, sums, (const char *)tails->keys, is_real);
}

/* Compute the scores of at most NUM_SUMS chunks. */
INLINE void score_chunks(Amx *amx, const Work *work, const char *const *keys, int count, const uint32_t *q,
                         Tails *tails, float *scores, const int is_real) {
    const int last = work->units % KEY_UNITS;
    zero_sums(amx, is_real);
    for (int unit = 0; unit + KEY_UNITS <= work->units; unit += KEY_UNITS) {
        const int offset = unit * AMX_ROW_BYTES;
        amx_load(amx, Q, q + unit, work->units * 4, is_real);
        multiply_keys(amx, 0, keys[0] + offset, is_real);
        if (count > 1) multiply_keys(amx, 1, keys[1] + offset, is_real);
        if (count > 2) multiply_keys(amx, 2, keys[2] + offset, is_real);
        if (count > 3) multiply_keys(amx, 3, keys[3] + offset, is_real);
    }
    if (last) {
        const int offset = (work->units - last) * AMX_ROW_BYTES;
        amx_load(amx, Q, tails->q, AMX_ROW_BYTES, is_real);
        multiply_last_keys(amx, 0, keys[0] + offset, tails, last, is_real);
        if (count > 1) multiply_last_keys(amx, 1, keys[1] + offset, tails, last, is_real);
        if (count > 2) multiply_last_keys(amx, 2, keys[2] + offset, tails, last, is_real);
        if (count > 3) multiply_last_keys(amx, 3, keys[3] + offset, tails, last, is_real);
    }
    store_sums(amx, scores, TILE * sizeof(float), count, is_real);
}

/* Find each row's highest score, lane by lane; hide those that a row does not see. */
static void find_highest(Block *block, int rows) {
    const int begin = max(block->begin, block->whole_begin), end = min(block->end, block->whole_end);
    for (int row = 0; row < rows; row++) {
        Floats highest = all_floats(-INFINITY);
        for (int chunk = begin; chunk < end; chunk++)
            highest = larger(load_floats(&block->scores[row][chunk * CHUNK]), highest);
        block->highest[row] = highest;
    }
    for (int chunk = block->begin; chunk < block->end; chunk++)
        if (chunk < begin || chunk >= end) hide_scores(block, chunk, rows, 1);
}

INLINE void score_rows(Amx *amx, const Work *work, const Tile *tile, const uint32_t *q, Block *block, int rows,
                       const int is_real) {
    Tails tails = {0};
    const int last = work->units % KEY_UNITS, bytes = work->units * AMX_ROW_BYTES;
    if (last)
        for (int row = 0; row < rows; row++)
            memcpy(tails.q[row], q + (row + 1) * work->units - last, last * sizeof *q);
    for (int chunk = block->begin; chunk < block->end; chunk += NUM_SUMS) {
        const int count = min(NUM_SUMS, block->end - chunk);
        if (block->fetches)
            for (int i = 0; i < count; i++) prefetch_chunk(tile->after_keys[chunk + i], bytes);
        score_chunks(amx, work, tile->keys + chunk, count, q, &tails, &block->scores[0][chunk * CHUNK], is_real);
    }
    find_highest(block, rows);
}

/* Multiply the loaded weights with 16 dimensions of a chunk of V. */
INLINE void multiply_values_amx(Amx *amx, const int sums, const char *values, int64_t stride, const int is_real) {
    amx_load(amx, VALUES, values + sums * AMX_ROW_BYTES, stride, is_real);
    amx_product(amx, sums, WEIGHTS, VALUES, is_real);
}

/* Add weights * V of the tile to the state's sums, for `count` tiles of dimensions from dim on. With is_first the weights
 * are computed in the same loop, two chunks ahead. */
INLINE void add_values_amx(Amx *amx, const Work *work, const Tile *tile, float *state, Block *block, int dim, int count,
                           int rows, const int is_first, const int is_real) {
    float sums[BLOCK_ROWS][NUM_SUMS * 16] __attribute__((aligned(64)));
    const int64_t stride = work->width * 4;
    const float scale = work->args->scale;
    zero_sums(amx, is_real);
    if (is_first) weigh(block, block->begin / 2 * 2, scale, 0, rows, BFLOAT16);
    for (int chunk = block->begin; chunk < block->end; chunk++) {
        const char *values = tile->values[chunk] + dim * 4;
        const int next = chunk / 2 * 2 + 2, is_due = chunk % 2 == 0 || chunk == block->begin;
        if (is_first && is_due && next < block->end) weigh(block, next, scale, 0, rows, BFLOAT16);
        if (is_first && block->fetches) prefetch_chunk(tile->after_values[chunk], (int)stride * CHUNK / 2);
        amx_load(amx, WEIGHTS, &block->weights[0][chunk * CHUNK / 2], TILE * sizeof(uint32_t), is_real);
        multiply_values_amx(amx, 0, values, stride, is_real);
        if (count > 1) multiply_values_amx(amx, 1, values, stride, is_real);
        if (count > 2) multiply_values_amx(amx, 2, values, stride, is_real);
        if (count > 3) multiply_values_amx(amx, 3, values, stride, is_real);
    }
    store_sums(amx, sums[0], sizeof sums[0], count, is_real);
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < count * 16; i += LANES) {
            float *values = state + row * (LANES + work->width) + LANES + dim + i;
            const Floats sum = load_floats(&sums[row][i]);
            store_floats(values, joined(load_floats(values), block->kept[row], sum, block->added[row]));
        }
}

INLINE void attend_rows_amx(Amx *amx, const Work *work, const Tile *tile, int row, int rows, const int is_real) {
    Block block;
    if (!find_seen(work, tile, row, &block, rows)) return;
    block.fetches = row == 0; /* for later rows the tile is in a cache */
    score_rows(amx, work, tile, work->q + (size_t)row * work->units, &block, rows, is_real);
    join_maxima(&block, work->state.maxima + row, work->args->scale, rows);
    pad_scores(&block, rows);
    for (int r = 0; r < rows; r++) block.sums[r] = all_floats(0.0f);
    float *state = work->state.sums + (size_t)row * (LANES + work->width);
    for (int dim = 0; dim < work->width; dim += NUM_SUMS * 16) {
        const int count = min(NUM_SUMS, (work->width - dim) / 16);
        if (dim == 0)
            add_values_amx(amx, work, tile, state, &block, dim, count, rows, 1, is_real);
        else
            add_values_amx(amx, work, tile, state, &block, dim, count, rows, 0, is_real);
    }
    for (int r = 0; r < rows; r++, state += LANES + work->width)
        store_floats(state, joined(load_floats(state), block.kept[r], block.sums[r], block.added[r]));
}

INLINE void attend_all_amx(const Work *work, const Tile *tile, const int is_real) {
    Amx amx;
    for (int row = 0, rows = 0; row < work->rows; row += BLOCK_ROWS) {
        const int count = min(BLOCK_ROWS, work->rows - row);
        if (count != rows) {
            shape_for_rows(&amx, count);
            amx_begin(&amx, is_real);
            rows = count;
        }
        attend_rows_amx(&amx, work, tile, row, rows, is_real);
    }
    amx_end(is_real);
}

static __attribute__((noinline)) void attend_real(const Work *work, const Tile *tile) {
    attend_all_amx(work, tile, 1);
}

static __attribute__((noinline)) void attend_emulated(const Work *work, const Tile *tile) {
    attend_all_amx(work, tile, 0);
}

static void attend_amx(const Work *work, const Tile *tile) {
    if (amx_is_real)
        attend_real(work, tile);
    else
        attend_emulated(work, tile);
}

#else

static void attend_amx(const Work *work, const Tile *tile) {
    (void)work, (void)tile;
}

#endif

#endif
