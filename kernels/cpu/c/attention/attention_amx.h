/* Some rows of q against one KV tile, as in attention_rows.h, with AMX's products (amx.h). Only attention.c includes
 * this file.
 *
 * K of a chunk of the cache is right operands as it lies: the dimensions are its rows, 32 of them in a tile. V has pairs
 * of tokens as rows, so V of two chunks is right operands, 16 dimensions in each. Scores are summed over 32 dimensions
 * at a time, and values over 32 tokens from an absolute multiple of 32, whatever the size of the blocks. Where the two
 * chunks do not follow each other in the cache, their V is copied, once for all rows of the item.
 *
 * Weights are summed by a product too: with a right operand that has ones in its first column. So the lanes of a row's
 * sum of weights are that sum and zeros.
 *
 * Up to 16 rows are a block. While the weights of a block are computed and multiplied with V, the scores of the next one
 * are computed. AMX and the vector units work at the same time if the CPU finds work for both close together, so the
 * weights of some rows follow each product.
 */
#ifndef ATTENTION_AMX_H
#define ATTENTION_AMX_H

#include "products/amx.h"
#include "attention/attention_rows.h"

#if defined(__AMX_BF16__)

/* Tiles: sums of values, and of weights; q or weights, and what they are multiplied with; scores of a chunk. */
enum { NUM_SUMS = 4, WEIGHT_SUMS = 4, LEFT = 5, RIGHT = 6, SCORES = 7 };

enum { UNITS = AMX_DEPTH / 2 }; /* units of q, and rows of a chunk of K, that make a tile */

/* How many pairs before their product weights are computed: what has just been stored cannot be loaded as a tile yet.
 * With 2 instead of 1, heads of 128 take 2 to 4 % less time and heads of 64 the same (Intel Emerald Rapids). */
enum { PAIRS_AHEAD = 2 };

/* The score of a token that a row does not see: less than any that it sees, and so little that its weight is 0. */
#define HIDDEN (-3e38f)

enum { NUM_PAIRS = TILE_CHUNKS / 2 };

/* The scores of a pair of chunks, then the weights of both in the place of the first one's scores. */
typedef union {
    float scores[2][BLOCK_ROWS][CHUNK];
    uint32_t weights[BLOCK_ROWS][CHUNK]; /* units */
} Pair;

/* A block of rows. */
typedef struct {
    Block block;
    Pair *pairs; /* [NUM_PAIRS] */
    const uint32_t *q;
    int row, count;            /* its first row of the item, and the number of rows */
    int first_pair, end_pair;  /* pairs [first_pair, end_pair) that at least one row sees */
    float added_scores[LANES]; /* what is added to the scaled scores: minus the row's maximum, scaled */
    int scored;                /* a pair whose scores are not yet in block.highest; -1: none */
    int hides;                 /* whether scores have been hidden */
    uint32_t q_tail[BLOCK_ROWS][UNITS] __attribute__((aligned(64))); /* the last units, if they fill no tile, and zeros */
} Rows;

/* 2 ** (k / 32). */
static const float POWERS[2 * LANES] __attribute__((aligned(64))) = {
    0x1.000000p+0f, 0x1.059b0ep+0f, 0x1.0b5586p+0f, 0x1.11301ep+0f,
    0x1.172b84p+0f, 0x1.1d4874p+0f, 0x1.2387a6p+0f, 0x1.29e9e0p+0f,
    0x1.306fe0p+0f, 0x1.371a74p+0f, 0x1.3dea64p+0f, 0x1.44e086p+0f,
    0x1.4bfdaep+0f, 0x1.5342b6p+0f, 0x1.5ab07ep+0f, 0x1.6247ecp+0f,
    0x1.6a09e6p+0f, 0x1.71f75ep+0f, 0x1.7a1148p+0f, 0x1.82589ap+0f,
    0x1.8ace54p+0f, 0x1.93737cp+0f, 0x1.9c4918p+0f, 0x1.a5503cp+0f,
    0x1.ae89fap+0f, 0x1.b7f770p+0f, 0x1.c199bep+0f, 0x1.cb720ep+0f,
    0x1.d5818ep+0f, 0x1.dfc974p+0f, 0x1.ea4afap+0f, 0x1.f50766p+0f,
};

/* The right operand that sums weights: in its first column ones. */
static const uint32_t ONES[UNITS][CHUNK] __attribute__((aligned(64))) = {
    {0x3f803f80}, {0x3f803f80}, {0x3f803f80}, {0x3f803f80}, {0x3f803f80}, {0x3f803f80}, {0x3f803f80}, {0x3f803f80},
    {0x3f803f80}, {0x3f803f80}, {0x3f803f80}, {0x3f803f80}, {0x3f803f80}, {0x3f803f80}, {0x3f803f80}, {0x3f803f80},
};

/* The next weights of a block, which are computed between products; rows = NULL: none. */
typedef struct {
    Rows *rows;
    int pair;
    float scale;
} Due;

INLINE void prefetch_lines(const char *lines, int count) {
    for (int line = 0; line < count; line++) __builtin_prefetch(lines + line * 64);
}

/* Return weights of two chunks as units. Those under the least normal number become 0, which the products make of them
 * anyway. */
INLINE Words units_of_weights(Floats a, Floats b, const int is_real) {
    Words units;
    if (is_real) {
        __asm__("vcvtne2ps2bf16 %2, %1, %0" : "=v"(units) : "v"(b), "v"(a));
        return units;
    }
    uint16_t numbers[2 * LANES];
    store_bfloat16(numbers, choose(((Signed)a & INT32_MAX) < 0x00800000, all_floats(0.0f), a));
    store_bfloat16(numbers + LANES, choose(((Signed)b & INT32_MAX) < 0x00800000, all_floats(0.0f), b));
    memcpy(&units, numbers, sizeof units);
    return units;
}

/* 2 ** x for x <= 0, or so little above that it is a rounding error; relative error 6e-5. While tiles are multiplied,
 * only one unit of Intel's CPUs does products of vectors, and another one adds and looks up. So x is split by additions
 * into a multiple of 1/32 and the rest, and 2 ** rest is a line. The rest of minus infinity is no number; the maximum
 * makes one of it, and what it is does not matter, because the multiple makes 0 of it, and NaN of NaN. */
INLINE Floats power(Floats x) {
    const Floats split = all_floats(0x1.8p18f), sum = x + split, multiple = sum - split;
    const Floats rest = (Floats)_mm512_max_ps((__m512)(x - multiple), _mm512_set1_ps(-1.0f));
    const __m512 low = _mm512_load_ps(POWERS), high = _mm512_load_ps(POWERS + LANES), ln2 = _mm512_set1_ps(0x1.62e43p-1f);
    const __m512i places = (__m512i)sum; /* the lowest 5 bits count */
    const __m512 value = _mm512_permutex2var_ps(low, places, high);
    const __m512 slope = _mm512_permutex2var_ps(low * ln2, places, high * ln2);
    return (Floats)_mm512_scalef_ps((__m512)multiply_add((Floats)slope, rest, (Floats)value), (__m512)multiple);
}

/* Compute the weights of rows [row, end) for a pair of chunks. */
INLINE void weigh_pair(const Due *due, int row, int end, const int is_real) {
    if (!due->rows) return;
    Pair *pair = &due->rows->pairs[due->pair];
    const Floats scale = all_floats(due->scale);
    for (; row < end; row++) {
        const Floats added = all_floats(due->rows->added_scores[row]);
        const Floats a = power(multiply_add(load_floats(pair->scores[0][row]), scale, added));
        const Floats b = power(multiply_add(load_floats(pair->scores[1][row]), scale, added));
        store_floats((float *)pair->weights[row], (Floats)units_of_weights(a, b, is_real));
    }
}

/* Cap a chunk's scores, and hide those of tokens that a row does not see. */
static __attribute__((noinline)) void hide_chunk(Rows *rows, int chunk) {
    const Block *block = &rows->block;
    rows->hides = 1;
    for (int row = 0; row < rows->count; row++) {
        float *at = rows->pairs[chunk / 2].scores[chunk % 2][row];
        Floats scores = load_floats(at);
        if (block->cap_factor != 0.0f) scores = hyperbolic_tangent(scores * block->cap_factor);
        scores = hide(scores, block->seen[row], chunk * CHUNK);
        store_floats(at, choose(scores == -INFINITY, all_floats(HIDDEN), scores));
    }
}

/* Update each row's highest score, lane by lane, with those of the pair that was scored last. By now they are stored. */
INLINE void raise_highest(Rows *rows) {
    Block *block = &rows->block;
    if (rows->scored < 0) return;
    for (int chunk = rows->scored * 2; chunk < rows->scored * 2 + 2; chunk++)
        if (chunk < max(block->begin, block->whole_begin) || chunk >= min(block->end, block->whole_end))
            hide_chunk(rows, chunk);
    const Pair *pair = &rows->pairs[rows->scored];
    for (int row = 0; row < rows->count; row++) {
        const Floats highest = larger(load_floats(pair->scores[0][row]), block->highest[row]);
        block->highest[row] = larger(load_floats(pair->scores[1][row]), highest);
    }
}

/* Multiply the last units of q and a chunk of K, which do not fill a tile. */
INLINE void multiply_last_keys(Amx *amx, const Rows *rows, const char *keys, int units, const int is_real) {
    uint32_t last[UNITS][CHUNK] __attribute__((aligned(64))) = {0};
    memcpy(last, keys, units * AMX_ROW_BYTES);
    amx_load(amx, LEFT, rows->q_tail, AMX_ROW_BYTES, is_real);
    amx_load(amx, RIGHT, last, AMX_ROW_BYTES, is_real);
    amx_product(amx, SCORES, LEFT, RIGHT, is_real);
}

/* Compute the scores of a chunk; between the products, weights of rows [row, end). later: a chunk to prefetch. */
INLINE void score_chunk(Amx *amx, const Work *work, const Rows *rows, const char *keys, const char *later,
                        float *scores, const Due *due, int row, int end, const int is_real) {
    const int last = work->units % UNITS;
    amx_zero(amx, SCORES, is_real);
    for (int steps = work->units / UNITS, unit = 0; steps > 0; steps--, unit += UNITS) {
        amx_load(amx, LEFT, rows->q + unit, work->units * 4, is_real);
        amx_load_past(amx, RIGHT, keys + unit * AMX_ROW_BYTES, AMX_ROW_BYTES, is_real);
        if (rows->block.fetches) prefetch_lines(later + unit * AMX_ROW_BYTES, UNITS);
        amx_product(amx, SCORES, LEFT, RIGHT, is_real);
        const int until = row + (end - row) / steps;
        weigh_pair(due, row, until, is_real);
        row = until;
    }
    if (last) multiply_last_keys(amx, rows, keys + (work->units - last) * AMX_ROW_BYTES, last, is_real);
    weigh_pair(due, row, end, is_real);
    amx_store(amx, SCORES, scores, AMX_ROW_BYTES, is_real);
}

/* Compute the scores of a pair of chunks; between the products, weights of rows [row, end). */
INLINE void score_pair(Amx *amx, const Work *work, const Tile *tile, Rows *rows, int pair, const Due *due, int row,
                       int end, const int is_real) {
    const int first = max(2 * pair, rows->block.begin), second = min(2 * pair + 1, rows->block.end - 1);
    Pair *to = &rows->pairs[pair];
    raise_highest(rows);
    const int middle = (row + end) / 2; /* the chunk that no row sees has any scores: they are hidden later */
    score_chunk(amx, work, rows, tile->keys[first], tile->after_keys[first], to->scores[0][0], due, row, middle, is_real);
    score_chunk(amx, work, rows, tile->keys[second], tile->after_keys[second], to->scores[1][0], due, middle, end,
                is_real);
    rows->scored = pair;
}

/* Compute the scores of pairs [pair, end) that the block sees. */
INLINE void score_pairs(Amx *amx, const Work *work, const Tile *tile, Rows *rows, int pair, int end, const int is_real) {
    const Due none = {.rows = NULL};
    for (pair = max(pair, rows->first_pair); pair < min(end, rows->end_pair); pair++)
        score_pair(amx, work, tile, rows, pair, &none, 0, 0, is_real);
}

/* Begin a block of rows. */
static void start_rows(const Work *work, const Tile *tile, int row, Pair *pairs, Rows *rows) {
    const int last = work->units % UNITS;
    rows->row = row, rows->count = min(BLOCK_ROWS, work->rows - row), rows->pairs = pairs;
    rows->scored = -1, rows->hides = 0;
    rows->q = work->q + (size_t)row * work->units;
    const int is_seen = find_seen(work, tile, row, &rows->block, rows->count);
    rows->first_pair = is_seen ? rows->block.begin / 2 : 0;
    rows->end_pair = is_seen ? (rows->block.end + 1) / 2 : 0;
    rows->block.fetches = row == 0; /* for later rows the tile is in a cache */
    for (int r = 0; r < rows->count; r++)
        rows->block.highest[r] = all_floats(-INFINITY);
    if (last) {
        memset(rows->q_tail, 0, sizeof rows->q_tail);
        for (int r = 0; r < rows->count; r++)
            memcpy(rows->q_tail[r], rows->q + (r + 1) * work->units - last, last * sizeof(uint32_t));
    }
}

/* V of a pair of chunks, one after the other: some dimensions. */
typedef struct {
    const char *at;
    int64_t stride; /* bytes from a pair of tokens to the next */
} Values;

/* Room for the values of two pairs and some dimensions, for a block that is its item's only one. The first level cache
 * keeps it. */
typedef char Ring[2][2][CHUNK / 2][NUM_SUMS * AMX_ROW_BYTES];

/* Copy `lines` tiles of dimensions, from `dim` on, of a chunk of V; zeros if the tile does not have the chunk, because
 * its weights are 0. fetches: whether to prefetch the chunk that is read later. */
static void copy_values(const Tile *tile, int chunk, int dim, int lines, int64_t stride, char *to, int64_t to_stride,
                        int fetches) {
    const int is_there = chunk >= tile->begin && chunk < tile->end;
    const char *from = is_there ? tile->values[chunk] + dim * 4 : NULL;
    for (int token = 0; token < CHUNK / 2; token++, to += to_stride) {
        if (is_there && fetches) prefetch_lines(tile->after_values[chunk] + token * stride, (int)stride / 64);
        for (int line = 0; line < lines; line++) {
            const Words x = is_there ? load_words(from + token * stride + line * 64) : (Words){0};
            memcpy(to + line * 64, &x, sizeof x);
        }
    }
}

/* Find V of a pair of chunks. Where it is not one after the other, it is copied: to the ring if only one block of rows
 * reads it, otherwise to the tile's room, where the next blocks find it. */
INLINE Values find_values(const Work *work, Tile *tile, int pair, int dim, int count, Ring ring, int fetches) {
    const int chunk = 2 * pair;
    const int64_t stride = work->width * 4, bytes = stride * CHUNK / 2;
    if (chunk >= tile->begin && chunk + 1 < tile->end && tile->values[chunk + 1] == tile->values[chunk] + bytes) {
        if (fetches)
            for (int i = 0; i < 2; i++) prefetch_lines(tile->after_values[chunk + i], (int)bytes / 64);
        return (Values){tile->values[chunk] + dim * 4, stride};
    }
    if (work->rows <= BLOCK_ROWS) {
        const int64_t ring_stride = sizeof ring[0][0][0];
        copy_values(tile, chunk, dim, count, stride, ring[pair % 2][0][0], ring_stride, fetches);
        copy_values(tile, chunk + 1, dim, count, stride, ring[pair % 2][1][0], ring_stride, fetches);
        return (Values){ring[pair % 2][0][0], ring_stride};
    }
    for (int i = chunk; i < chunk + 2; i++) {
        char *room = work->values + i * bytes;
        if (i >= tile->begin && i < tile->end && tile->values[i] == room) continue;
        copy_values(tile, i, 0, work->width / 16, stride, room, stride, fetches);
        tile->values[i] = room;
    }
    return (Values){work->values + chunk * bytes + dim * 4, stride};
}

/* Multiply the loaded weights with 16 dimensions of V. */
INLINE void multiply_values_amx(Amx *amx, const int sums, const Values *values, const int is_real) {
    amx_load_past(amx, RIGHT, values->at + sums * AMX_ROW_BYTES, values->stride, is_real);
    amx_product(amx, sums, LEFT, RIGHT, is_real);
}

INLINE void zero_sums(Amx *amx, const int is_real) {
    amx_zero(amx, 0, is_real), amx_zero(amx, 1, is_real), amx_zero(amx, 2, is_real), amx_zero(amx, 3, is_real);
    amx_zero(amx, WEIGHT_SUMS, is_real);
}

/* Merge sums with those in the state, from `at` on of each row. */
INLINE void join_sums(const Work *work, const Rows *rows, float sums[BLOCK_ROWS][CHUNK], int at) {
    float *to = work->state.sums + (size_t)rows->row * (LANES + work->width) + at;
    for (int row = 0; row < rows->count; row++, to += LANES + work->width)
        store_floats(to, joined(load_floats(to), rows->block.kept[row], load_floats(sums[row]), rows->block.added[row]));
}

/* The same for the sums in the tiles: `count` tiles of values from `dim` on, and those of the weights. All tiles are
 * stored first, because a load must wait until what it reads has left the CPU's store buffer. */
INLINE void join_tiles(const Amx *amx, const Work *work, const Rows *rows, int dim, int count, const int is_first,
                       const int is_real) {
    float sums[NUM_SUMS + 1][BLOCK_ROWS][CHUNK] __attribute__((aligned(64)));
    amx_store(amx, 0, sums[0], AMX_ROW_BYTES, is_real);
    if (count > 1) amx_store(amx, 1, sums[1], AMX_ROW_BYTES, is_real);
    if (count > 2) amx_store(amx, 2, sums[2], AMX_ROW_BYTES, is_real);
    if (count > 3) amx_store(amx, 3, sums[3], AMX_ROW_BYTES, is_real);
    if (is_first) amx_store(amx, WEIGHT_SUMS, sums[NUM_SUMS], AMX_ROW_BYTES, is_real);
    for (int i = 0; i < count; i++) join_sums(work, rows, sums[i], LANES + dim + 16 * i);
    if (is_first) join_sums(work, rows, sums[NUM_SUMS], 0);
}

/* Add weights * V of the tile to the state's sums, for `count` tiles of dimensions from dim on. With is_first the weights
 * are computed in the same loop, PAIRS_AHEAD, and so are the scores of the next block. */
INLINE void add_values_amx(Amx *amx, const Work *work, Tile *tile, Rows *rows, Rows *next, int dim, int count,
                           const int is_first, const int is_real) {
    Ring ring __attribute__((aligned(64)));
    const int n = rows->count, fetches = is_first && rows->block.fetches;
    Due due = {rows, rows->first_pair, work->args->scale};
    zero_sums(amx, is_real);
    for (; is_first && due.pair < min(rows->first_pair + PAIRS_AHEAD, rows->end_pair); due.pair++)
        weigh_pair(&due, 0, n, is_real);
    Values coming = find_values(work, tile, rows->first_pair, dim, count, ring, fetches);
    for (int pair = rows->first_pair; pair < rows->end_pair; pair++) {
        due.pair = pair + PAIRS_AHEAD;
        if (!is_first || due.pair >= rows->end_pair) due.rows = NULL;
        const Values values = coming;
        if (pair + 1 < rows->end_pair) coming = find_values(work, tile, pair + 1, dim, count, ring, fetches);
        amx_load(amx, LEFT, rows->pairs[pair].weights, AMX_ROW_BYTES, is_real);
        if (is_first) {
            amx_load(amx, RIGHT, ONES, AMX_ROW_BYTES, is_real);
            amx_product(amx, WEIGHT_SUMS, LEFT, RIGHT, is_real);
        }
        multiply_values_amx(amx, 0, &values, is_real);
        weigh_pair(&due, 0, n / 8, is_real);
        if (count > 1) multiply_values_amx(amx, 1, &values, is_real);
        weigh_pair(&due, n / 8, n / 4, is_real);
        if (count > 2) multiply_values_amx(amx, 2, &values, is_real);
        weigh_pair(&due, n / 4, n * 3 / 8, is_real);
        if (count > 3) multiply_values_amx(amx, 3, &values, is_real);
        weigh_pair(&due, n * 3 / 8, n / 2, is_real);
        if (is_first && next && pair >= next->first_pair && pair < next->end_pair)
            score_pair(amx, work, tile, next, pair, &due, n / 2, n, is_real);
        else
            weigh_pair(&due, n / 2, n, is_real);
    }
    join_tiles(amx, work, rows, dim, count, is_first, is_real);
}

/* Finish a block whose scores are known, and compute the scores of the next one, if it is not NULL. */
INLINE void finish_rows_amx(Amx *amx, const Work *work, Tile *tile, Rows *rows, Rows *next, const int is_real) {
    raise_highest(rows);
    for (int row = 0; rows->hides && row < rows->count; row++) {
        Floats *highest = &rows->block.highest[row];
        *highest = choose(*highest == HIDDEN, all_floats(-INFINITY), *highest);
    }
    join_maxima(&rows->block, work->state.maxima + rows->row, work->args->scale, rows->count);
    store_floats(rows->added_scores, -load_floats(rows->block.maximum) * work->args->scale);
    for (int dim = 0; dim < work->width; dim += NUM_SUMS * 16) {
        const int count = min(NUM_SUMS, (work->width - dim) / 16);
        if (dim == 0)
            add_values_amx(amx, work, tile, rows, next, dim, count, 1, is_real);
        else
            add_values_amx(amx, work, tile, rows, NULL, dim, count, 0, is_real);
    }
}

INLINE void attend_all_amx(Amx *amx, const Work *work, Tile *tile, const int is_real) {
    Pair pairs[2][NUM_PAIRS] __attribute__((aligned(64)));
    Rows blocks[2];
    const int is_one_pass = work->width <= NUM_SUMS * 16; /* a pair's weights make room for the next block's scores */
    start_rows(work, tile, 0, pairs[0], &blocks[0]);
    score_pairs(amx, work, tile, &blocks[0], 0, NUM_PAIRS, is_real);
    for (int row = 0, turn = 0; row < work->rows; row += BLOCK_ROWS, turn ^= 1) {
        Rows *rows = &blocks[turn], *next = row + BLOCK_ROWS < work->rows ? &blocks[turn ^ 1] : NULL;
        if (next) start_rows(work, tile, row + BLOCK_ROWS, pairs[is_one_pass ? 0 : turn ^ 1], next);
        if (rows->first_pair < rows->end_pair) finish_rows_amx(amx, work, tile, rows, next, is_real);
        if (!next) break;
        score_pairs(amx, work, tile, next, 0, rows->first_pair, is_real);
        score_pairs(amx, work, tile, next, rows->end_pair, NUM_PAIRS, is_real);
    }
}

static __attribute__((noinline)) void attend_real(Amx *amx, const Work *work, Tile *tile) {
    attend_all_amx(amx, work, tile, 1);
}

static __attribute__((noinline)) void attend_emulated(Amx *amx, const Work *work, Tile *tile) {
    attend_all_amx(amx, work, tile, 0);
}

static void attend_amx(Amx *amx, const Work *work, Tile *tile) {
    if (amx_is_real)
        attend_real(amx, work, tile);
    else
        attend_emulated(amx, work, tile);
}

/* Configure this thread's tiles for items of at most `rows` rows, once for all of them: it takes as long as a chunk. A
 * block with fewer rows reads q past its last one, within the thread's scratch, and what becomes of that is not used. */
static __attribute__((noinline)) void begin_attention(Amx *amx, int rows) {
    amx->shapes = (AmxShapes){.palette = 1};
    for (int tile = 0; tile < NUM_AMX_TILES; tile++)
        amx_shape(amx, tile, tile == RIGHT ? UNITS : min(rows, BLOCK_ROWS), AMX_ROW_BYTES);
    amx_begin(amx, amx_is_real);
}

static __attribute__((noinline)) void end_attention(void) { amx_end(amx_is_real); }

#else

static void attend_amx(Amx *amx, const Work *work, Tile *tile) { (void)amx, (void)work, (void)tile; }

static void begin_attention(Amx *amx, int rows) { (void)amx, (void)rows; }

static void end_attention(void) {}

#endif

#endif
