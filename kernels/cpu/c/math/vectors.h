/* Vectors of the widest kind that the compiler's flags allow, and conversions of numbers.
 *
 * The same source makes every variant of the library: VECTOR_BYTES is 64 (AVX-512), 32 (AVX2) or 16 (SSE2, NEON, ...).
 * -ffp-contract=off holds for all files: a product and a sum are rounded together only in multiply_add().
 */
#ifndef VECTORS_H
#define VECTORS_H

#include "math/elements.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#include <immintrin.h>
#define VECTOR_BYTES 32
#elif defined(WITH_NEON)
#include <arm_neon.h>
#define VECTOR_BYTES 16
#else
#define VECTOR_BYTES 16
#endif

#define LANES (VECTOR_BYTES / 4)

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));

/* Loads and stores need no alignment. */
INLINE Floats load_floats(const void *from) {
    Floats loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

INLINE Words load_words(const void *from) {
    Words loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

INLINE void store_floats(void *to, Floats values) { memcpy(to, &values, sizeof values); }

INLINE Floats all_floats(float value) { return value - (Floats){0}; }
INLINE Words all_words(uint32_t value) { return value - (Words){0}; }

/* A table of 16 bytes in registers. */
typedef Words Table;

INLINE Table load_table(const uint8_t table[16]) {
#if defined(__AVX512BW__)
    return (Table)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
#elif defined(__AVX2__)
    return (Table)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
#else
    return load_words(table);
#endif
}

/* Return the table's bytes for indices of one byte each, 0 to 15. */
INLINE Words look_up(const Table table, const Words indices) {
#if defined(__AVX512BW__)
    return (Words)_mm512_shuffle_epi8((__m512i)table, (__m512i)indices);
#elif defined(__AVX2__)
    return (Words)_mm256_shuffle_epi8((__m256i)table, (__m256i)indices);
#elif defined(WITH_NEON)
    return (Words)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)indices);
#else
    uint8_t bytes[16], at[16];
    Words found;
    memcpy(bytes, &table, sizeof bytes);
    memcpy(at, &indices, sizeof at);
    for (int i = 0; i < 16; i++) at[i] = bytes[at[i] & 15];
    memcpy(&found, at, sizeof found);
    return found;
#endif
}

/* Return a * b + c: rounded once if the instruction set can (AVX-512, AVX2 with FMA, NEON), else twice. */
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(WITH_NEON)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* bfloat16 is the upper half of a float32. Rounding is to nearest even; a NaN stays a NaN. */
INLINE float float_of_bfloat16(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

INLINE uint16_t bfloat16_of_float(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    if ((word & 0x7fffffff) > 0x7f800000) return (uint16_t)(word >> 16) | 0x40;
    return (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

INLINE Floats load_bfloat16(const uint16_t *from) {
    Halves halves;
    memcpy(&halves, from, sizeof halves);
#if defined(WITH_NEON)
    return (Floats)vshll_n_u16((uint16x4_t)halves, 16);
#elif VECTOR_BYTES == 32 /* GCC 12 makes five instructions of the conversion below */
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)halves), 16);
#else
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
}

/* Return the bfloat16 bits in the lower half of each word. */
INLINE Words bfloat16_words(Floats values) {
    Words words = (Words)values;
    Words is_nan = (Words)(values != values);
    Words rounded = words + 0x7fff + ((words >> 16) & 1);
    Words quiet = words | 0x400000;
    return ((rounded & ~is_nan) | (quiet & is_nan)) >> 16;
}

INLINE void store_bfloat16(uint16_t *to, Floats values) {
#if defined(NEON_BF16)
    const bfloat16x4_t rounded = vcvt_bf16_f32((float32x4_t)values);
    memcpy(to, &rounded, sizeof rounded);
    return;
#endif
    Halves halves = __builtin_convertvector(bfloat16_words(values), Halves);
    memcpy(to, &halves, sizeof halves);
}

#if defined(NEON_BF16)
/* Add the products of the pairs of a and b to sum, the even number first. Each of these instructions rounds a product
 * and a sum together; BFDOT and BFMMLA round to odd, several times. */
INLINE Floats add_pairs(Floats sum, Words a, Words b) {
    sum = (Floats)vbfmlalbq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
    return (Floats)vbfmlaltq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#endif

/* Round to bfloat16 and back: load_bfloat16() of store_bfloat16(). */
INLINE Floats rounded_to_bfloat16(Floats values) { return (Floats)(bfloat16_words(values) << 16); }

/* Store 16-bit numbers as the first (which = 0) or second (1) numbers of consecutive pairs. The other numbers are not
 * written, so another thread may write them at the same time. */
INLINE void store_in_pairs(uint16_t *pairs, int which, const uint16_t *from, int64_t count) {
    int64_t i = 0;
#if defined(__AVX512BW__)
    const __mmask32 places = which ? 0xaaaaaaaa : 0x55555555;
    for (; i + 16 <= count; i += 16) {
        const __m512i numbers = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from + i)));
        _mm512_mask_storeu_epi16(pairs + i * 2, places, _mm512_or_si512(numbers, _mm512_slli_epi32(numbers, 16)));
    }
#endif
    for (; i < count; i++) pairs[i * 2 + which] = from[i];
}

/* Convert IEEE half precision to float; exact. */
INLINE float float_of_float16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    uint32_t word = sign | ((rest << 13) + (rest >= 0x7c00 ? 0x70000000 : 0x38000000));
    float value;
    if (rest < 0x0400) { /* zero and subnormal: units of 2**-24 */
        value = (float)rest * 0x1p-24f;
        return sign ? -value : value;
    }
    memcpy(&value, &word, sizeof value);
    return value;
}

#endif
