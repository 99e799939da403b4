/* The functions on vectors of floats that the kernels need. Each has a fixed order of operations. So a number's bits do
 * not depend on its lane or its neighbours.
 */
#ifndef VECTOR_MATH_H
#define VECTOR_MATH_H

#include "math/vectors.h"

/* Work on at most this many numbers is done by one thread: waking another one takes as long. */
enum { NOT_SHARED = 16384 };

typedef int32_t Signed __attribute__((vector_size(VECTOR_BYTES)));

/* Return, lane by lane, yes if mask is -1 and no if it is 0. */
INLINE Floats choose(Signed mask, Floats yes, Floats no) {
    return (Floats)((mask & (Signed)yes) | (~mask & (Signed)no));
}

/* Return the larger number of each lane. A NaN in x is ignored; a NaN in `than` is kept. */
INLINE Floats larger(Floats x, Floats than) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)x, (__m512)than);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)x, (__m256)than);
#else /* not NEON's instruction, which returns a NaN of x */
    return choose(x > than, x, than);
#endif
}

/* Return the smaller number of each lane. A NaN in x is ignored; a NaN in `than` is kept. */
INLINE Floats smaller(Floats x, Floats than) {
#if defined(__AVX512F__)
    return (Floats)_mm512_min_ps((__m512)x, (__m512)than);
#elif defined(__AVX2__)
    return (Floats)_mm256_min_ps((__m256)x, (__m256)than);
#else
    return choose(x < than, x, than);
#endif
}

/* Return a mask: all bits set for each number that is finite, none for NaN and infinities. */
INLINE Words finite_numbers(Words x, const int dtype) {
    if (dtype == FLOAT32) return (Words)((x & 0x7f800000) != 0x7f800000);
    typedef uint16_t Shorts __attribute__((vector_size(VECTOR_BYTES)));
    return (Words)(((Shorts)x & 0x7f80) != 0x7f80);
}

INLINE int is_any_set(Words bits) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)bits, (__m512i)bits) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)bits, (__m256i)bits);
#elif defined(WITH_NEON)
    return vmaxvq_u32((uint32x4_t)bits) != 0;
#else
    uint32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= bits[i];
    return found != 0;
#endif
}

/* Swap lanes: lane i of the result is lane i ^ n of x. */
#if defined(__clang__)
#define PERMUTED(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define PERMUTED(x, ...) __builtin_shuffle(x, (Signed){__VA_ARGS__})
#endif
#if LANES == 16
#define SWAPPED(x, n)                                                                                                  \
    PERMUTED(x, 0 ^ n, 1 ^ n, 2 ^ n, 3 ^ n, 4 ^ n, 5 ^ n, 6 ^ n, 7 ^ n, 8 ^ n, 9 ^ n, 10 ^ n, 11 ^ n, 12 ^ n, 13 ^ n,  \
             14 ^ n, 15 ^ n)
#elif LANES == 8
#define SWAPPED(x, n) PERMUTED(x, 0 ^ n, 1 ^ n, 2 ^ n, 3 ^ n, 4 ^ n, 5 ^ n, 6 ^ n, 7 ^ n)
#else
#define SWAPPED(x, n) PERMUTED(x, 0 ^ n, 1 ^ n, 2 ^ n, 3 ^ n)
#endif

/* One step of transpose(): in every square of 2n x 2n lanes, exchange the upper right n x n lanes with the lower
 * left. */
#define EXCHANGE(rows, n)                                                                                              \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) {                                                         \
        if (i & n) continue;                                                                                           \
        const Signed stays = (lanes & n) == 0;                                                                         \
        const Floats low = rows[i], high = rows[i | n];                                                                \
        rows[i] = choose(stays, low, SWAPPED(high, n));                                                                \
        rows[i | n] = choose(stays, SWAPPED(low, n), high);                                                            \
    }

/* Transpose a square: lane j of row i becomes lane i of row j. */
INLINE void transpose(Floats rows[LANES]) {
    Signed lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    EXCHANGE(rows, 1)
    EXCHANGE(rows, 2)
#if LANES >= 8
    EXCHANGE(rows, 4)
#endif
#if LANES == 16
    EXCHANGE(rows, 8)
#endif
}

/* Return the sum of all lanes. The halves are added to each other, then the quarters, and so on. */
INLINE float sum_of(Floats x) {
#if LANES == 16
    x = x + SWAPPED(x, 8);
#endif
#if LANES >= 8
    x = x + SWAPPED(x, 4);
#endif
    x = x + SWAPPED(x, 2);
    x = x + SWAPPED(x, 1);
    return x[0];
}

/* Return the largest of all lanes, in every lane. */
INLINE Floats all_largest(Floats x) {
#if LANES == 16
    x = larger(x, SWAPPED(x, 8));
#endif
#if LANES >= 8
    x = larger(x, SWAPPED(x, 4));
#endif
    x = larger(x, SWAPPED(x, 2));
    return larger(x, SWAPPED(x, 1));
}

INLINE float largest_of(Floats x) { return all_largest(x)[0]; }

/* Return 2 ** (whole + part) for an integer `whole` in [-126, 127] and `part` in [-0.5, 0.5]; relative error 1e-7. The
 * polynomial interpolates (2 ** x - 1) / x at Chebyshev's points. */
INLINE Floats power_of_two(Floats whole, Floats part) {
    Floats p = all_floats(1.5461448e-04f);
    p = multiply_add(p, part, all_floats(1.3390867e-03f));
    p = multiply_add(p, part, all_floats(9.6180570e-03f));
    p = multiply_add(p, part, all_floats(5.5503570e-02f));
    p = multiply_add(p, part, all_floats(2.4022650e-01f));
    p = multiply_add(p, part, all_floats(6.9314720e-01f));
    p = multiply_add(p, part, all_floats(1.0f));
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    return p * (Floats)((__builtin_convertvector(whole, Signed) + 127) << 23);
#endif
}

/* Round x to the nearest integer, for |x| < 2 ** 22: adding this constant rounds the fraction away. */
INLINE Floats nearest(Floats x) { return (x + 12582912.0f) - 12582912.0f; }

/* Return 2 ** x for x <= 0: exactly 1 at 0, exactly 0 below -125; NaN stays NaN. */
INLINE Floats exp2_negative(Floats x) {
    Signed is_tiny = x < -125.0f;
    x = choose(is_tiny, all_floats(-125.0f), x);
    Floats whole = nearest(x);
    return choose(is_tiny, all_floats(0.0f), power_of_two(whole, x - whole));
}

/* Return e ** x with x limited to [-87, 88]; NaN stays NaN. */
INLINE Floats exponential(Floats x) {
    x = larger(all_floats(-87.0f), x), x = smaller(all_floats(88.0f), x);
    Floats whole = nearest(x * 1.44269504f);
    Floats part = multiply_add(whole, all_floats(-0.693359375f), x); /* ln 2 in two parts; this product is exact */
    part = multiply_add(whole, all_floats(2.12194440e-4f), part);
    return power_of_two(whole, part * 1.44269504f);
}

/* Return tanh(x); relative error 2e-7; NaN stays NaN. The polynomial (tanh(x) / x - 1) / x ** 2 was fitted to x ** 2 in
 * [0, 0.4]. */
INLINE Floats hyperbolic_tangent(Floats x) {
    const Signed sign = (Signed)x & INT32_MIN;
    const Floats size = (Floats)((Signed)x & INT32_MAX), square = x * x;
    Floats p = all_floats(-5.66078536e-03f);
    p = multiply_add(p, square, all_floats(2.06020046e-02f));
    p = multiply_add(p, square, all_floats(-5.37292287e-02f));
    p = multiply_add(p, square, all_floats(1.33313283e-01f));
    p = multiply_add(p, square, all_floats(-3.33332777e-01f));
    const Floats large = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
    return choose(size < 0.625f, multiply_add(x * square, p, x), (Floats)((Signed)large | sign));
}

/* Return erf(x); relative error 4e-7; NaN stays NaN. The quotient x P(x ** 2) / Q(x ** 2) was fitted to [-4, 4], at
 * whose ends erf is 1 up to 2e-8. */
INLINE Floats error_function(Floats x) {
    x = larger(all_floats(-4.0f), x), x = smaller(all_floats(4.0f), x);
    const Floats square = x * x;
    Floats p = all_floats(1.9867550e-06f), q = all_floats(3.7419712e-05f);
    p = multiply_add(p, square, all_floats(2.8456259e-04f));
    q = multiply_add(q, square, all_floats(1.1855579e-03f));
    p = multiply_add(p, square, all_floats(3.8833097e-03f));
    q = multiply_add(q, square, all_floats(1.5207187e-02f));
    p = multiply_add(p, square, all_floats(5.3101640e-02f));
    q = multiply_add(q, square, all_floats(1.1534978e-01f));
    p = multiply_add(p, square, all_floats(1.9354464e-01f));
    q = multiply_add(q, square, all_floats(5.0485700e-01f));
    p = multiply_add(p, square, all_floats(1.1283791f));
    q = multiply_add(q, square, all_floats(1.0f));
    return x * p / q;
}

/* Vectors of bytes as floats. */
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t SignedBytes __attribute__((vector_size(LANES)));

#if defined(WITH_NEON)
/* Load four bytes to the lowest ones of a vector: GCC 12 would copy them to all lanes. */
INLINE uint8x16_t load_four_bytes(const void *from) {
    uint8x16_t loaded;
    __asm__("ldr %s0, %1" : "=w"(loaded) : "m"(*(const char(*)[4])from));
    return loaded;
}
#endif

INLINE Floats load_bytes(const void *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#elif defined(WITH_NEON)
    const uint8x16_t places = {0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3, 255, 255, 255};
    return (Floats)vcvtq_f32_u32(vreinterpretq_u32_u8(vqtbl1q_u8(load_four_bytes(from), places)));
#else
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, Signed), Floats);
#endif
}

/* Return the byte of each word from bit `place` on, of E4M3, as a float that is 2 ** -120 of it. Bytes 0x7f and 0xff, which
 * are no numbers, are not told from others. */
INLINE Floats float_bits_of_e4m3(const Words words, const int place) {
    const Words size = (place < 20 ? words << (20 - place) : words >> (place - 20)) & 0x07f00000;
    return (Floats)(((words << (24 - place)) & 0x80000000) | size);
}

INLINE Floats load_signed_bytes(const void *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#elif defined(WITH_NEON)
    const uint8x16_t places = {255, 255, 255, 0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3};
    const uint8x16_t upper = vqtbl1q_u8(load_four_bytes(from), places); /* 2 ** 24 times each */
    return (Floats)vcvtq_n_f32_s32(vreinterpretq_s32_u8(upper), 24);
#else
    SignedBytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, Signed), Floats);
#endif
}

/* Store whole numbers from -128 to 127. */
INLINE void store_signed_bytes(void *to, Floats whole) {
#if defined(WITH_NEON)
    const int16x4_t halves = vmovn_s32(vcvtq_s32_f32((float32x4_t)whole));
    const int8x8_t bytes = vmovn_s16(vcombine_s16(halves, halves));
#else
    const SignedBytes bytes = __builtin_convertvector(__builtin_convertvector(whole, Signed), SignedBytes);
#endif
    memcpy(to, &bytes, LANES);
}

/* Load and store vectors of a row of float32 or bfloat16. */
INLINE Floats load_numbers(const void *row, int64_t index, const int dtype) {
    return dtype == FLOAT32 ? load_floats((const float *)row + index) : load_bfloat16((const uint16_t *)row + index);
}

INLINE void store_numbers(void *row, int64_t index, Floats values, const int dtype) {
    if (dtype == FLOAT32)
        store_floats((float *)row + index, values);
    else
        store_bfloat16((uint16_t *)row + index, values);
}

/* Load and store the last, incomplete vector of a row. Lanes past the end load as zero and are not stored. */
INLINE Floats load_tail(const void *row, int64_t index, int64_t count, const int dtype) {
    float numbers[LANES] = {0};
    for (int64_t i = 0; i < count; i++)
        numbers[i] = dtype == FLOAT32 ? ((const float *)row)[index + i]
                                      : float_of_bfloat16(((const uint16_t *)row)[index + i]);
    return load_floats(numbers);
}

INLINE void store_tail(void *row, int64_t index, int64_t count, Floats values, const int dtype) {
    float numbers[LANES];
    store_floats(numbers, values);
    for (int64_t i = 0; i < count; i++) {
        if (dtype == FLOAT32)
            ((float *)row)[index + i] = numbers[i];
        else
            ((uint16_t *)row)[index + i] = bfloat16_of_float(numbers[i]);
    }
}

/* Load and store the next vector, of a row of which `count` numbers are left. */
INLINE Floats load_some(const void *from, int64_t index, int64_t count, const int dtype) {
    return count >= LANES ? load_numbers(from, index, dtype) : load_tail(from, index, count, dtype);
}

INLINE void store_some(void *to, int64_t index, int64_t count, Floats values, const int dtype) {
    if (count >= LANES)
        store_numbers(to, index, values, dtype);
    else
        store_tail(to, index, count, values, dtype);
}

#endif
