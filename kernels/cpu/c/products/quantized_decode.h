/* A group of quantized weights (quantized.h), unpacked in registers to bfloat16 numbers.
 *
 * A weight is its code times a scale, plus a minimum. The product has at most 23 significant bits, so it is exact and
 * only the sum is rounded, whether or not the instruction set rounds both together. What remains is to round a float f
 * to bfloat16, to nearest even: 65537 f - 65536 f, where the first product is rounded to float32. Its last bit is the
 * bfloat16's last one, so both round in the same way. The result only differs if f has all 24 bits and is just below a
 * power of two; gemm_quantize() does not let such a weight through, nor one that is not finite. AVX512_BF16 has an
 * instruction that rounds like this. It treats numbers below 2**-126 as zeros, which gemm_quantize() detects too.
 */
#ifndef QUANTIZED_DECODE_H
#define QUANTIZED_DECODE_H

#include "products/gemm_block.h"
#include "products/quantized.h"

enum { ROW_BYTES = PANEL_COLUMNS * 4 };

INLINE Floats load_float16(const char *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    uint16_t bits[LANES];
    Floats values = {0};
    memcpy(bits, from, sizeof bits);
    for (int i = 0; i < LANES; i++) values[i] = float_of_float16(bits[i]);
    return values;
#endif
}

INLINE Floats rounded_exactly(Floats f) { return multiply_add(f, all_floats(-65536.0f), f * 65537.0f); }

INLINE int has_minimum(const int type) { return type == Q4_1 || type == Q5_1 || type == Q4_K || type == Q5_K; }
INLINE int has_fifth_bit(const int type) { return type == Q5_0 || type == Q5_1 || type == Q5_K; }

/* Scales of the columns of a vector; the first for the first half of a group, the second for the other. */
typedef struct {
    Floats scale[2], minimum;
} Scales;

/* Load the scales of vector v. */
INLINE Scales load_scales(const char *head, const char *group, const int v, const int type) {
    const int halves = v * LANES * 2, bytes = v * LANES, minima = PANEL_COLUMNS * 2;
    Scales loaded = {{{0}, {0}}, {0}};
    if (type == WHOLE_PANEL) return loaded;
    if (type == Q6_K) {
        const Floats factor = load_float16(head + halves);
        for (int i = 0; i < 2; i++) loaded.scale[i] = load_signed_bytes(group + i * PANEL_COLUMNS + bytes) * factor;
        return loaded;
    }
    if (type == Q4_K || type == Q5_K) {
        loaded.scale[0] = load_bytes(group + bytes) * load_float16(head + halves);
        loaded.minimum = -(load_bytes(group + PANEL_COLUMNS + bytes) * load_float16(head + minima + halves));
    } else {
        loaded.scale[0] = load_float16(group + halves);
        if (has_minimum(type)) loaded.minimum = load_float16(group + minima + halves);
    }
    loaded.scale[1] = loaded.scale[0];
    return loaded;
}

/* Return the words shifted so that bit `from` comes to bit `to`. */
INLINE Words moved(const Words words, const int from, const int to) {
    return from < to ? words << (to - from) : words >> (from - to);
}

#if defined(__AVX512F__)
/* Return (words & mask) ^ others. */
INLINE Words masked(const Words words, const uint32_t mask, const Words others) {
    return (Words)_mm512_ternarylogic_epi32((__m512i)words, (__m512i)all_words(mask), (__m512i)others, 0x6a);
}

/* Return the bits of 2**(23 - place) as a float. Bit `place` of it counts one, so a code placed there adds its own
 * value: codes become numbers in place, without a shift or a conversion. */
INLINE uint32_t power_for(const int place) { return (uint32_t)(127 + 23 - place) << 23; }

/* Return by how much floats of these bits are above 2**(23 - place) + zero; exact. */
INLINE Floats above_power(const Words bits, const int place, const int zero) {
    return (Floats)bits - (float)((1 << (23 - place)) + zero);
}
#endif

/* Return the value of code i of a row of words: `low` has four bits of each code, `high` one or two. */
INLINE Floats number_of_code(const Words low, const Words high, const int i, const int type) {
    const int zero = type == Q4_0 ? 8 : type == Q5_0 ? 16 : type == Q6_K ? 32 : 0;
#if defined(__AVX512F__)
    const int place = i % 4 * 4;
    Words bits = masked(i < 4 ? low : low >> 16, 15u << place, all_words(power_for(place)));
    if (has_fifth_bit(type) || type == Q6_K) {
        const Words half = i < 4 ? high : high >> 16; /* the code's upper bits are at i % 4 / 2 * 8, or next to it */
        const Words upper = half << (i % 2 == 0 ? 4 : type == Q6_K ? 6 : 7);
        bits = masked(upper, (type == Q6_K ? 48u : 16u) << place, bits);
    }
    return above_power(bits, place, zero);
#else
    Words code = low >> (4 * i) & 15;
    if (has_fifth_bit(type)) code |= moved(high, i / 2 * 8 + i % 2, 4) & 16;
    if (type == Q6_K) code |= moved(high, i / 2 * 8 + i % 2 * 2, 4) & 48;
    const Floats number = __builtin_convertvector((Signed)code, Floats);
    return zero ? number - (float)zero : number;
#endif
}

/* Return the lower bits of the codes of row r; of Q8_0 the first of its two steps. */
INLINE Words load_low(const char *codes, const int v, const int r, const int type) {
    if (type == WHOLE_PANEL) return (Words){0};
    return load_words(codes + (type == Q8_0 ? 2 * r : r) * ROW_BYTES + v * VECTOR_BYTES);
}

/* Return the upper bits of the codes of row r of words; of Q8_0 the second of its two steps. */
INLINE Words load_high(const char *codes, const int v, const int r, const int type) {
    codes += v * VECTOR_BYTES;
    if (type == Q8_0) return load_words(codes + (2 * r + 1) * ROW_BYTES);
    if (has_fifth_bit(type)) return load_words(codes + 4 * ROW_BYTES) >> (2 * r);
    if (type == Q6_K) return load_words(codes + (4 + r / 2) * ROW_BYTES) >> (r % 2 * 4);
    return (Words){0};
}

/* Return byte i / 2 of each word of a step of Q8_0 as a number; it has a sign. */
INLINE Floats number_of_byte(const Words step, const int i) {
#if defined(__AVX512F__)
    const int place = i / 2 % 2 * 8;
    const Words bits = masked(i < 4 ? step : step >> 16, 255u << place, all_words(power_for(place) | 128u << place));
    return above_power(bits, place, 128);
#else
    return __builtin_convertvector((Signed)(step << (24 - i / 2 * 8)) >> 24, Floats);
#endif
}

/* Return the weight at place 8 r + i of the group as a float that is not yet rounded to bfloat16; `low` and `high` are
 * those of row r. */
INLINE Floats unrounded_weight(const Words low, const Words high, const int r, const int i, const Scales *scales,
                               const int type) {
    const Floats scale = type == Q6_K ? scales->scale[r / 2] : scales->scale[0];
    const Floats number = type == Q8_0 ? number_of_byte(i % 2 ? high : low, i) : number_of_code(low, high, i, type);
    return has_minimum(type) ? multiply_add(number, scale, scales->minimum) : number * scale;
}

/* Round floats to bfloat16 and return them as pairs. */
INLINE Words pairs_of(const Floats even, const Floats odd) {
#if defined(__AVX512BF16__)
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i places = _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(16)), 16));
    return (Words)_mm512_permutexvar_epi16(places, halves);
#else
    return ((Words)rounded_exactly(even) >> 16) | (Words)rounded_exactly(odd);
#endif
}

/* Two adjacent weights along the depth, as the one or two steps that products take (gemm.h). */
enum { STEPS_OF_TWO = BY_PAIRS ? 1 : 2 };
typedef struct {
    Words steps[STEPS_OF_TWO];
} Two;

/* Return the weights at places 8 r + i and 8 r + i + 1 of the group. */
INLINE Two two_weights(const char *codes, const Words low, const Words high, const int v, const int r, const int i,
                       const Scales *scales, const int type) {
    Two two;
    if (type == WHOLE_PANEL) {
        const Words pairs = load_words(codes + (8 * r + i) / 2 * ROW_BYTES + v * VECTOR_BYTES);
        two.steps[0] = BY_PAIRS ? pairs : pairs << 16;
        if (!BY_PAIRS) two.steps[STEPS_OF_TWO - 1] = pairs & 0xffff0000;
        return two;
    }
    const Floats even = unrounded_weight(low, high, r, i, scales, type);
    const Floats odd = unrounded_weight(low, high, r, i + 1, scales, type);
    if (BY_PAIRS) {
        two.steps[0] = pairs_of(even, odd);
    } else {
        two.steps[0] = (Words)rounded_exactly(even);
        two.steps[STEPS_OF_TWO - 1] = (Words)rounded_exactly(odd);
    }
    return two;
}

#endif
