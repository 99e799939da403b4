/* From scores to weights: 2 ** (score - maximum), of one row against one KV tile. Included by attention_rows.h alone.
 */
#ifndef ATTENTION_WEIGHTS_H
#define ATTENTION_WEIGHTS_H

#include <math.h>

#include "attention.h"
#include "cache_layout.h"
#include "vector_math.h"

#define TILE_CHUNKS (TILE / CHUNK)

/* Registers: rows x vectors of sums, beside as many vectors of K or V and one number of q or the weights. */
#if VECTOR_BYTES == 64
#define MAX_ROWS 6
#else
#define MAX_ROWS 2
#endif
#define MAX_VECTORS 4

/* Tokens of a tile that a row sees. */
typedef struct {
    int first, last; /* from the tile's first token on; either may lie beyond it */
} Seen;

/* Some rows' scores of a tile, then their weights. */
typedef struct {
    float scores[MAX_ROWS][TILE] __attribute__((aligned(64)));
    uint32_t weights[MAX_ROWS][TILE] __attribute__((aligned(64))); /* units: bfloat16 pairs, or float32 */
    Floats highest[MAX_ROWS]; /* of the scores, lane by lane */
    Floats sums[MAX_ROWS];    /* of the weights, lane by lane */
    float maximum[LANES];     /* of each row's; 0 where it sees nothing */
    float kept[LANES], added[LANES]; /* factors of each row's sums of the tiles before, and of this one */
    Seen seen[MAX_ROWS];
    int begin, end; /* chunks of the tile that some of the rows see */
    int whole_begin, whole_end; /* vectors of tokens that each row sees every lane of */
    int fetches; /* what is read later is fetched meanwhile */
} Block;

/* The scores of the tokens from `token` on, minus infinity for those that the row does not see. */
INLINE Floats hide(Floats scores, Seen seen, int token) {
    Signed tokens;
    for (int i = 0; i < LANES; i++) tokens[i] = token + i;
    return choose((tokens <= seen.last) & (tokens >= seen.first), scores, all_floats(-INFINITY));
}

/* How sums of weights, each relative to a maximum of its own, become one. */
typedef struct {
    Floats maximum;     /* the greater one */
    Floats kept, added; /* factors of the sums before, and of those that join them */
} Joint;

/* A maximum as it is subtracted: 0 where nothing was seen, for minus infinity less itself is no number. */
INLINE Floats subtrahend(Floats maximum) { return choose(maximum == -INFINITY, all_floats(0.0f), maximum); }

INLINE Joint join(Floats before, Floats joining, float scale) {
    const Floats maximum = larger(joining, before), subtracted = subtrahend(maximum);
    return (Joint){maximum, exp2_negative((before - subtracted) * scale),
                   exp2_negative((joining - subtracted) * scale)};
}

INLINE Floats joined(Floats before, float kept, Floats joining, float added) {
    return multiply_add(joining, all_floats(added), before * kept);
}

/* The rows' maxima so far become those of them and of the tile. All rows at once, each in a lane. */
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

/* 2 ** x for x <= 0, exactly 1 at 0, exactly 0 at minus infinity; NaN stays NaN. What is rounded to bfloat16 anyway, by
 * up to 2e-3, has a relative error of 9e-5. The polynomial is the best one with 1 at 0. */
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
#else
    sum = multiply_add((Floats)(a << 16), (Floats)(b << 16), sum);
    return multiply_add((Floats)(a & 0xffff0000), (Floats)(b & 0xffff0000), sum);
#endif
}

/* Store the weights of the 2 * LANES tokens from `token` on; returns sum plus these, as they are stored. */
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
    return add_unit(sum, pairs, all_words(0x3f803f80), dtype);
}

/* Scores to weights of some rows, for the two chunks from `chunk` on, an even one. */
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

/* Weights are made of two chunks at once: one that is not visited has scores of minus infinity. */
INLINE void pad_scores(Block *block, const int rows) {
    const int begin = block->begin / 2 * 2 * CHUNK, end = (block->end + 1) / 2 * 2 * CHUNK;
    for (int row = 0; row < rows; row++) {
        float *scores = block->scores[row];
        for (int i = begin; i < block->begin * CHUNK; i += LANES) store_floats(scores + i, all_floats(-INFINITY));
        for (int i = block->end * CHUNK; i < end; i += LANES) store_floats(scores + i, all_floats(-INFINITY));
    }
}

#endif
