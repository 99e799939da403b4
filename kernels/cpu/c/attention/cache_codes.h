/* Rows of K and V in 8 bits: codes from -127 to 127, and a float32 scale for each token and head.
 *
 * A number is its code times the scale, rounded to the cache's dtype. The scale is a 127th of the row's largest number,
 * rounded down, so that no number becomes larger than that. A row of numbers under 2**-100 becomes zeros. A row with a
 * number that is not finite becomes NaN. Nothing in this depends on the lanes: every variant gives the same bits.
 *
 * A chunk's codes have the order of its numbers (cache_layout.h). */
#ifndef CACHE_CODES_H
#define CACHE_CODES_H

#include "attention/cache_shape.h"
#include "math/vector_math.h"

#define CHUNK 16           /* tokens */
#define MAX_HEAD_DIM 4096  /* rows of a head are copied to stack buffers of this size */
#define PERIOD (2 * CHUNK) /* scales that decode() takes, for the same number of numbers */

#define LEAST_LARGEST 0x1p-100f /* a scale, its inverse and its products with codes are normal numbers */
#define A_127TH 0x1.020406p-7f  /* so far below 1/127 that 127 times a product is not more than before */

/* Return the bits of the row's largest number, without its sign; at least those of infinity if one is not finite. */
INLINE int32_t largest_bits(const void *row, int count, const int dtype) {
    Signed most = {0};
    for (int i = 0; i < count; i += LANES) {
        const Floats x = i + LANES <= count ? load_numbers(row, i, dtype) : load_tail(row, i, count - i, dtype);
        const Signed bits = (Signed)x & INT32_MAX, is_more = bits > most;
        most = (is_more & bits) | (~is_more & most);
    }
    int32_t largest = 0;
    for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    return largest;
}

/* Write a row's codes and return its scale. codes has room for whole vectors. */
INLINE float quantize(const void *row, int count, int8_t *codes, const int dtype) {
    const int32_t bits = largest_bits(row, count, dtype), is_finite = bits < 0x7f800000;
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    if (!is_finite || largest < LEAST_LARGEST) {
        memset(codes, 0, count);
        return is_finite ? 0.0f : float_of_bfloat16(0x7fc0);
    }
    const float scale = largest * A_127TH, inverse = 1.0f / scale;
    for (int i = 0; i < count; i += LANES) {
        const Floats x = i + LANES <= count ? load_numbers(row, i, dtype) : load_tail(row, i, count - i, dtype);
        store_signed_bytes(codes + i, nearest(x * inverse));
    }
    return scale;
}

static float quantize_row(const void *row, int count, int8_t *codes, int dtype) {
    return dtype == FLOAT32 ? quantize(row, count, codes, FLOAT32) : quantize(row, count, codes, BFLOAT16);
}

/* Store the codes of a token's K where its numbers would be in a chunk. pair: numbers of a unit. */
INLINE void put_key_codes(int8_t *to, const int8_t *codes, int count, int pair) {
    if (pair == 2)
        for (int i = 0; i < count; i += 2) memcpy(to + i * CHUNK, codes + i, 2);
    else
        for (int i = 0; i < count; i++) to[i * CHUNK] = codes[i];
}

/* The same for its V. Numbers between them are not written: another thread may write them at the same time. */
INLINE void put_value_codes(int8_t *to, const int8_t *codes, int count, int pair) {
    if (pair == 1)
        memcpy(to, codes, count);
    else
        for (int i = 0; i < count; i++) to[i * 2] = codes[i];
}

/* Scales of PERIOD numbers that follow each other in a chunk. */
typedef struct {
    Floats of[PERIOD / LANES];
} PeriodScales;

/* Write numbers of dtype: codes times the scales, which repeat. count: a multiple of 16, for bfloat16 of 32. */
INLINE void decode(const int8_t *codes, const PeriodScales *scales, int count, void *to, const int dtype) {
    for (int i = 0; i < count; i += PERIOD)
#pragma GCC unroll 4
        for (int j = 0; j < PERIOD; j += 2 * LANES) {
            if (dtype == FLOAT32 && i + j == count) return; /* half a period was left */
            const Floats a = load_signed_bytes(codes + i + j) * scales->of[j / LANES];
            if (dtype == FLOAT32 && i + j + LANES == count) {
                store_floats((float *)to + i + j, a);
                return;
            }
            const Floats b = load_signed_bytes(codes + i + j + LANES) * scales->of[j / LANES + 1];
#if defined(__AVX512BF16__)
            if (dtype == BFLOAT16) { /* rounds as store_bfloat16() does, since no product is subnormal */
                const Words pairs = (Words)(__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
                memcpy((uint16_t *)to + i + j, &pairs, sizeof pairs);
                continue;
            }
#endif
            store_numbers(to, i + j, a, dtype);
            store_numbers(to, i + j + LANES, b, dtype);
        }
}

/* The scales of K: those of the chunk's tokens, each as often as a unit has numbers. */
INLINE PeriodScales key_scales(const float *of_tokens, const int dtype) {
    PeriodScales scales;
    for (int i = 0; i < PERIOD / LANES; i++) {
        const float *from = of_tokens + (dtype == FLOAT32 ? i * LANES % CHUNK : i * LANES / 2);
        for (int lane = 0; lane < LANES; lane++) scales.of[i][lane] = from[dtype == FLOAT32 ? lane : lane / 2];
    }
    return scales;
}

/* The scales of V: those of a unit's tokens, in turn. */
INLINE PeriodScales value_scales(float first, float second) {
    PeriodScales scales;
    Floats turns;
    for (int lane = 0; lane < LANES; lane += 2) turns[lane] = first, turns[lane + 1] = second;
    for (int i = 0; i < PERIOD / LANES; i++) scales.of[i] = turns;
    return scales;
}

INLINE void decode_row(const void *codes, float scale, int width, void *to, const int dtype) {
    const PeriodScales scales = value_scales(scale, scale);
    if (dtype == BFLOAT16 && width % PERIOD) { /* the last 16 */
        const int8_t *last = (const int8_t *)codes + width - CHUNK;
        for (int i = 0; i < CHUNK; i++) ((uint16_t *)to)[width - CHUNK + i] = bfloat16_of_float(last[i] * scale);
        width -= CHUNK;
    }
    decode(codes, &scales, width, to, dtype);
}

/* Write a chunk's numbers. */
INLINE void decode_chunk(const int8_t *codes, const float *of_tokens, int is_value, int head_dim, int width, char *to,
                         const int dtype) {
    if (!is_value) {
        const PeriodScales scales = key_scales(of_tokens, dtype);
        decode(codes, &scales, head_dim * CHUNK, to, dtype);
        return;
    }
    const int pair = dtype == FLOAT32 ? 1 : 2, count = width * pair;
    for (int token = 0; token < CHUNK; token += pair, codes += count, to += width * 4) {
        const PeriodScales scales = value_scales(of_tokens[token], of_tokens[token + pair - 1]);
        decode(codes, &scales, count, to, dtype);
    }
}

#endif
