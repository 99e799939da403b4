/* A group of quantized weights (quantized.h), unpacked in registers to bfloat16 numbers.
 *
 * A weight is its code times a scale, plus a minimum. The product has at most 23 significant bits, so it is exact and
 * only the sum is rounded, whether or not the instruction set rounds both together. What remains is to round a float f
 * to bfloat16, to nearest even: 65537 f - 65536 f, where the first product is rounded to float32. Its last bit is the
 * bfloat16's last one, so both round alike. Only if f has all 24 bits, and lies just below a power of two, is the
 * result another one; gemm_quantize() does not let such a weight through, nor one that is not finite.
 */
#ifndef QUANTIZED_DECODE_H
#define QUANTIZED_DECODE_H

#include "gemm_block.h"
#include "quantized.h"

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

/* Return what code i of a row of words stands for: `low` has four bits of each code, `high` one or two. */
INLINE Floats number_of_code(const Words low, const Words high, const int i, const int type) {
    const int zero = type == Q4_0 ? 8 : type == Q5_0 ? 16 : type == Q6_K ? 32 : 0;
#if defined(__AVX512F__)
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const Floats table = (Floats)_mm512_cvtepi32_ps(_mm512_sub_epi32(lanes, _mm512_set1_epi32(zero)));
    const __m512i shifted = (__m512i)(low >> (4 * i));
    if (type == Q4_0 || type == Q4_1 || type == Q4_K) return (Floats)_mm512_permutexvar_ps(shifted, (__m512)table);
    if (has_fifth_bit(type)) { /* the lower four bits of one, the fifth of the other; further ones are not looked at */
        const __m512i fifth = (__m512i)moved(high, i / 2 * 8 + i % 2, 4);
        const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi32(15), shifted, fifth, 0xca);
        return (Floats)_mm512_permutex2var_ps((__m512)table, code, (__m512)(table + 16.0f));
    }
#endif
    Words code = low >> (4 * i) & 15;
    if (has_fifth_bit(type)) code |= moved(high, i / 2 * 8 + i % 2, 4) & 16;
    if (type == Q6_K) code |= moved(high, i / 2 * 8 + i % 2 * 2, 4) & 48;
    const Floats number = __builtin_convertvector((Signed)code, Floats);
    return zero ? number - (float)zero : number;
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

/* Return byte i / 2 of each word of a step of Q8_0 as a number. */
INLINE Floats number_of_byte(const Words step, const int i) {
    return __builtin_convertvector((Signed)(step << (24 - i / 2 * 8)) >> 24, Floats);
}

/* Return the weight at place k = 8 r + i of the group as a float; `low` and `high` are those of row r. */
INLINE Floats weight_at(const char *codes, const Words low, const Words high, const int v, const int r, const int i,
                        const Scales *scales, const int type) {
    const int k = 8 * r + i;
    if (type == WHOLE_PANEL) {
        const Words pair = load_words(codes + k / 2 * ROW_BYTES + v * VECTOR_BYTES);
        return (Floats)(k % 2 ? pair & 0xffff0000 : pair << 16);
    }
    const Floats scale = type == Q6_K ? scales->scale[r / 2] : scales->scale[0];
    const Floats number = type == Q8_0 ? number_of_byte(i % 2 ? high : low, i) : number_of_code(low, high, i, type);
    return rounded_exactly(has_minimum(type) ? multiply_add(number, scale, scales->minimum) : number * scale);
}

#endif
