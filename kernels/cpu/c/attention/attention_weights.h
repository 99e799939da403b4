/* Weights 2 ** (score - maximum) of one row against one KV tile. Only attention_rows.h includes this file.
 */
#ifndef ATTENTION_WEIGHTS_H
#define ATTENTION_WEIGHTS_H

#include <math.h>

#include "attention/attention.h"
#include "attention/cache_layout.h"
#include "math/vector_math.h"

#define TILE_CHUNKS (TILE / CHUNK)

/* Registers: rows x vectors of sums, `vectors` vectors of K or V, and one number of q or of the weights. */
#if VECTOR_BYTES >= 32
#define MAX_ROWS 6
#elif defined(WITH_NEON) /* a row's maximum has a lane */
#define MAX_ROWS 4
#else
#define MAX_ROWS 2
#endif
#define MAX_VECTORS 4
#define VECTORS_FOR(rows) (VECTOR_BYTES == 32 && (rows) > 3 ? 2 : MAX_VECTORS)

/* The most rows of a Block. */
#if defined(__AMX_BF16__)
#define BLOCK_ROWS 16
#else
#define BLOCK_ROWS MAX_ROWS
#endif

/* The tokens of a tile that a row sees: [first, last]. */
typedef struct {
    int first, last; /* relative to the tile's first token; may be outside the tile */
} Seen;

/* Scores of some rows for a tile, then their weights. */
typedef struct {
    float scores[MAX_ROWS][TILE] __attribute__((aligned(64)));
    uint32_t weights[MAX_ROWS][TILE] __attribute__((aligned(64))); /* units: bfloat16 pairs, or float32 */
    Floats highest[BLOCK_ROWS]; /* of the scores, lane by lane */
    Floats sums[BLOCK_ROWS];    /* of the weights, lane by lane */
    float maximum[LANES];     /* of each row's scores; 0 if it sees nothing */
    float kept[LANES], added[LANES]; /* each row's factors: of the sums before, and of this tile's */
    Seen seen[BLOCK_ROWS];
    int begin, end; /* chunks [begin, end) that at least one row sees */
    int whole_begin, whole_end; /* vectors of tokens that all rows see in full */
    int fetches; /* whether to prefetch the chunks that are read later */
    float cap_factor; /* see attention.h */
} Block;

/* Return the scores of the tokens from `token` on, with minus infinity for those that the row does not see. */
INLINE Floats hide(Floats scores, Seen seen, int token) {
    Signed tokens;
    for (int i = 0; i < LANES; i++) tokens[i] = token + i;
    return choose((tokens <= seen.last) & (tokens >= seen.first), scores, all_floats(-INFINITY));
}

/* Factors that merge two sums of weights, each relative to its own maximum. */
typedef struct {
    Floats maximum;     /* the greater of the two maxima */
    Floats kept, added; /* factors of the sums before, and of the added sums */
} Joint;

/* The value to subtract for a maximum: 0 if nothing was seen, because minus infinity minus minus infinity is NaN. */
INLINE Floats subtrahend(Floats maximum) { return choose(maximum == -INFINITY, all_floats(0.0f), maximum); }

INLINE Joint join(Floats before, Floats joining, float scale) {
    const Floats maximum = larger(joining, before), subtracted = subtrahend(maximum);
    return (Joint){maximum, exp2_negative((before - subtracted) * scale),
                   exp2_negative((joining - subtracted) * scale)};
}

INLINE Floats joined(Floats before, float kept, Floats joining, float added) {
    return multiply_add(joining, all_floats(added), before * kept);
}

/* Update the rows' maxima with those of this tile. All rows are processed at once, one in each lane. */
INLINE void join_maxima(Block *block, float *maxima, float scale, const int rows) {
    Floats highest = all_floats(-INFINITY);
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++) {
        Signed lane = {0};
        lane[row] = -1;
        highest = choose(lane, all_largest(block->highest[row]), highest);
    }
    const Joint joint = join(load_floats(maxima), highest, scale);
    store_floats(block->maximum, subtrahend(highest));
    store_floats(block->kept, joint.kept);
    store_floats(block->added, joint.added);
    float joined_maxima[LANES];
    store_floats(joined_maxima, joint.maximum);
    for (int row = 0; row < rows; row++) maxima[row] = joined_maxima[row];
}

/* 2 ** x for x <= 0: exactly 1 at 0, exactly 0 at minus infinity; NaN stays NaN. For bfloat16 the relative error is
 * 9e-5; rounding the result adds up to 2e-3 anyway. The polynomial is the best one that is 1 at 0. */
INLINE Floats weight_of(Floats x, const int dtype) {
#if defined(__AVX512DQ__)
    if (dtype == BFLOAT16) {
        Floats part = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        Floats p = all_floats(7.706705e-02f);
        p = multiply_add(p, part, all_floats(2.2764498e-01f));
        p = multiply_add(p, part, all_floats(6.9511679e-01f));
        p = multiply_add(p, part, all_floats(1.0f));
        return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x); /* p * 2 ** floor(x) */
    }
#endif
    (void)dtype;
    return exp2_negative(x);
}

INLINE Floats add_unit(Floats sum, Words a, Words b, const int dtype) {
    if (dtype == FLOAT32) return multiply_add((Floats)a, (Floats)b, sum);
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#elif defined(NEON_BF16)
    return add_pairs(sum, b, a);
#else
    sum = multiply_add((Floats)(a << 16), (Floats)(b << 16), sum);
    return multiply_add((Floats)(a & 0xffff0000), (Floats)(b & 0xffff0000), sum);
#endif
}

/* Return the first (half 0) or second number of each pair of bfloat16 numbers. */
INLINE Floats half_of(Words pairs, const int half) { return (Floats)(half ? pairs & 0xffff0000 : pairs << 16); }

/* Return a unit in every lane. Otherwise compilers would separate the numbers of a pair first, and move each to a
 * vector. */
INLINE Words all_units(uint32_t unit) {
    Words units = all_words(unit);
#if defined(__AVX2__)
    __asm__("" : "+v"(units));
#endif
    return units;
}

/* Store the weights of the 2 * LANES tokens from `token` on. Return sum plus these weights as stored. */
INLINE Floats add_weights(Floats sum, uint32_t *weights, int token, Floats a, Floats b, const int dtype) {
    if (dtype == FLOAT32) {
        store_floats(weights + token, a);
        store_floats(weights + token + LANES, b);
        return sum + a + b;
    }
#if defined(__AVX512BF16__)
    Words pairs = (Words)(__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); /* never subnormal */
    memcpy(weights + token / 2, &pairs, sizeof pairs);
#else
    store_bfloat16((uint16_t *)weights + token, a);
    store_bfloat16((uint16_t *)weights + token + LANES, b);
    Words pairs = load_words(weights + token / 2);
#endif
    uint32_t ones = 0x3f803f80;
#if defined(NEON_BF16) /* GCC 12 makes a float16 of a constant bfloat16: 1.0 would be 0x3c00 */
    __asm__("" : "+r"(ones));
#endif
    return add_unit(sum, pairs, all_words(ones), dtype);
}

/* Compute the weights of rows [first_row, end_row) for two chunks from `chunk` on; chunk is even. */
INLINE void weigh(Block *block, int chunk, float scale, int first_row, int end_row, const int dtype) {
    for (int row = first_row; row < end_row; row++) {
        const Floats maximum = all_floats(block->maximum[row]);
        const float *scores = block->scores[row] + chunk * CHUNK;
#pragma GCC unroll 4
        for (int i = 0; i < 2 * CHUNK; i += 2 * LANES) {
            Floats a = weight_of((load_floats(scores + i) - maximum) * scale, dtype);
            Floats b = weight_of((load_floats(scores + i + LANES) - maximum) * scale, dtype);
            block->sums[row] = add_weights(block->sums[row], block->weights[row], chunk * CHUNK + i, a, b, dtype);
        }
    }
}

/* Set the scores of unread chunks to minus infinity: weights are computed for two chunks at once. */
INLINE void pad_scores(Block *block, const int rows) {
    const int begin = block->begin / 2 * 2 * CHUNK, end = (block->end + 1) / 2 * 2 * CHUNK;
    for (int row = 0; row < rows; row++) {
        float *scores = block->scores[row];
        for (int i = begin; i < block->begin * CHUNK; i += LANES) store_floats(scores + i, all_floats(-INFINITY));
        for (int i = block->end * CHUNK; i < end; i += LANES) store_floats(scores + i, all_floats(-INFINITY));
    }
}

#endif
