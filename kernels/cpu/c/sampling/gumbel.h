/* Gumbel noise: kernels/gumbel.py has the definition and the reasons; the bits are the same. */
#ifndef GUMBEL_H
#define GUMBEL_H

#include "math/vector_math.h"

/* The numbers of one draw: those of a row's seed, position and choice. */
typedef struct {
    uint64_t seed;
    uint32_t position, choice;
} Stream;

enum { HIGH_BITS = 1, LOW_BITS = 2 }; /* the purposes of Philox's numbers */

/* Tokens whose high bits come from one block of Philox's numbers. */
#define TOKENS_PER_BLOCK 8

/* More than any noise. */
#define MOST_NOISE 34.0

typedef uint64_t Pairs __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t Shorts __attribute__((vector_size(VECTOR_BYTES)));

/* Return the products of a's even words with b, which has the same number in all of them. */
INLINE Pairs products(Pairs a, Pairs b) {
#if defined(__AVX512F__)
    return (Pairs)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Pairs)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(WITH_NEON)
    return (Pairs)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
    return (a & 0xffffffff) * b;
#endif
}

INLINE Words high_words(Pairs even, Pairs odd) {
#if defined(__AVX512F__)
    return (Words)_mm512_mask_blend_epi32(0xaaaa, (__m512i)(even >> 32), (__m512i)odd);
#elif defined(__AVX2__)
    return (Words)_mm256_blend_epi32((__m256i)(even >> 32), (__m256i)odd, 0xaa);
#else
    return (Words)(even >> 32 | (odd & 0xffffffff00000000));
#endif
}

INLINE Words low_words(Pairs even, Pairs odd) {
#if defined(__AVX512F__)
    return (Words)_mm512_mask_blend_epi32(0xaaaa, (__m512i)even, (__m512i)(odd << 32));
#elif defined(__AVX2__)
    return (Words)_mm256_blend_epi32((__m256i)even, (__m256i)(odd << 32), 0xaa);
#else
    return (Words)((even & 0xffffffff) | odd << 32);
#endif
}

/* Philox4x32-10 (Salmon et al. 2011) of LANES counters with one key. */
INLINE void philox_vectors(uint64_t key, Words counter[4]) {
    const Pairs zero = {0}, first = zero + 0xD2511F53u, third = zero + 0xCD9E8D57u;
    uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++, low += 0x9E3779B9u, high += 0xBB67AE85u) {
        const Pairs even0 = products((Pairs)counter[0], first), odd0 = products((Pairs)counter[0] >> 32, first);
        const Pairs even2 = products((Pairs)counter[2], third), odd2 = products((Pairs)counter[2] >> 32, third);
        counter[0] = high_words(even2, odd2) ^ counter[1] ^ low;
        counter[1] = low_words(even2, odd2);
        counter[2] = high_words(even0, odd0) ^ counter[3] ^ high;
        counter[3] = low_words(even0, odd0);
    }
}

/* Philox4x32-10 of one counter. */
INLINE void philox(uint64_t key, uint32_t counter[4]) {
    uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++, low += 0x9E3779B9u, high += 0xBB67AE85u) {
        const uint64_t first = (uint64_t)counter[0] * 0xD2511F53u, third = (uint64_t)counter[2] * 0xCD9E8D57u;
        counter[0] = (uint32_t)(third >> 32) ^ counter[1] ^ low;
        counter[1] = (uint32_t)third;
        counter[2] = (uint32_t)(first >> 32) ^ counter[3] ^ high;
        counter[3] = (uint32_t)first;
    }
}

/* Find the high bits of LANES * TOKENS_PER_BLOCK tokens from `token` on: lane i of halves[w] has those of tokens
 * token + 8i + 2w (its low half) and token + 8i + 2w + 1. */
INLINE void high_bits_from(const Stream *stream, int64_t token, Words halves[4]) {
    Words lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = (uint32_t)(token / TOKENS_PER_BLOCK + i);
    halves[0] = all_words(stream->position), halves[1] = all_words(stream->choice);
    halves[2] = all_words(HIGH_BITS), halves[3] = lanes;
    philox_vectors(stream->seed, halves);
}

INLINE uint32_t high_bits_of(const Stream *stream, int64_t token) {
    uint32_t words[4] = {stream->position, stream->choice, HIGH_BITS, (uint32_t)(token / TOKENS_PER_BLOCK)};
    philox(stream->seed, words);
    return words[token % 8 / 2] >> 16 * (token % 2) & 0xffff;
}

INLINE Shorts smaller_halves(Words a, Words b) {
#if defined(__AVX512BW__)
    return (Shorts)_mm512_min_epu16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Shorts)_mm256_min_epu16((__m256i)a, (__m256i)b);
#elif defined(WITH_NEON)
    return (Shorts)vminq_u16((uint16x8_t)a, (uint16x8_t)b);
#else
    const Shorts x = (Shorts)a, y = (Shorts)b, is_less = (Shorts)(x < y);
    return (x & is_less) | (y & ~is_less);
#endif
}

/* Return whether some half is below limit, which is at least 1. */
INLINE int has_half_below(const Words halves[4], uint32_t limit) {
    const Shorts zero = {0};
    const Shorts least = smaller_halves((Words)smaller_halves(halves[0], halves[1]),
                                        (Words)smaller_halves(halves[2], halves[3]));
    return limit > 0xffff || is_any_set((Words)(least < zero + (uint16_t)limit));
}

/* Return a limit of high bits: the noise of a token whose high bits reach it is less than `wanted`. It is at least 1,
 * and not the lowest such limit: noise < -ln(high / 2^16). */
INLINE uint32_t limit_of_high_bits(double wanted) {
    const double log2_limit = 17.0 - wanted * (1.0 / 0.69314719);
    if (log2_limit >= 16.0) return 0x10000;
    return log2_limit <= 0.0 ? 1 : 1u << (int)log2_limit;
}

/* The natural logarithm of a positive normal number. */
INLINE double gumbel_ln(double x) {
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    const int64_t exponent = (bits - 0x3FE6A09E667F3BCD) >> 52;
    bits -= (int64_t)((uint64_t)exponent << 52);
    double mantissa;
    memcpy(&mantissa, &bits, sizeof mantissa);
    const double s = (mantissa - 1.0) / (mantissa + 1.0), square = s * s;
    double series = 2.0 / 15;
    for (int odd = 13; odd > 0; odd -= 2) series = series * square + 2.0 / odd;
    return (double)exponent * 0.6931471805599453 + s * series;
}

/* Return a token's noise. high: its high bits. */
INLINE double gumbel_noise(const Stream *stream, int64_t token, uint32_t high) {
    uint32_t words[4] = {stream->position, stream->choice, LOW_BITS, (uint32_t)(token / 4)};
    philox(stream->seed, words);
    const double bits = (double)high * 0x1p32 + (double)words[token % 4];
    return -gumbel_ln(-gumbel_ln(1.0 - (bits + 0.5) * 0x1p-48));
}

#endif
