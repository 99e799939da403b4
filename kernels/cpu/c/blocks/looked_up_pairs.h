/* Pairs of bfloat16 weights that are looked up instead of computed (products/quantized_decode.h), with AVX512_BF16.
 *
 * A code of these types stands for a number k with a sign: an odd number, its root, times a power of two. So all weights
 * of a column's group are the rounded products of its scale and a few roots, with another exponent and another sign: a
 * power of two changes no mantissa. A vector has the rounded products of its 16 columns, each two bytes long, and a word
 * of it is found by one permutation. The code says which: it is looked up first, as sign << 15 | (power + 1) << 7 |
 * place of the root << 4, to which the column is added. Then an addition of 16-bit integers puts sign and exponent to the
 * product. The place is added too, so the products have theirs subtracted before, and 1 << 7 of the power + 1. Codes of
 * zero are 0 there, so that a mask tells them from others.
 *
 * The scales of MXFP4 are powers of two, so a weight is what its code stands for with another exponent: a subtraction.
 * A zero is below what is subtracted from it, and stays zero as the smaller of both.
 *
 * Results that are no normal numbers are wrong, but gemm_quantize() compares all weights of a panel.
 */
#ifndef LOOKED_UP_PAIRS_H
#define LOOKED_UP_PAIRS_H

#include "blocks/block_types.h"
#include "math/vectors.h"

/* Whether the pairs of a type are looked up. */
INLINE int has_pairs_looked_up(const int type) {
#if defined(__AVX512BF16__)
    return type == Q4_0 || type == MXFP4 || type == NVFP4 || type == NVFP4_F32;
#else
    (void)type;
    return 0;
#endif
}

#if defined(__AVX512BF16__)
/* The largest exponent of MXFP4's scales that is looked up, as a float32 has it; others are in whole panels. */
enum { LARGEST_EXPONENT = 251 };

#define NUMBER(root, power) ((power) + 1) << 7 | (root) / 2 << 4
#define MINUS(number) 1 << 15 | (number)
#define FLOAT_OF(has_half, power) (LARGEST_EXPONENT + (power)) << 7 | (has_half) << 6

/* What the codes stand for, of Q4_0 from -8 to 7. */
static const uint16_t NUMBERS_OF_Q4_0[16] = {
    MINUS(NUMBER(1, 3)), MINUS(NUMBER(7, 0)), MINUS(NUMBER(3, 1)), MINUS(NUMBER(5, 0)), MINUS(NUMBER(1, 2)),
    MINUS(NUMBER(3, 0)), MINUS(NUMBER(1, 1)), MINUS(NUMBER(1, 0)), 0,                   NUMBER(1, 0),
    NUMBER(1, 1),        NUMBER(3, 0),        NUMBER(1, 2),        NUMBER(5, 0),        NUMBER(3, 1),
    NUMBER(7, 0),
};

/* Of E2M1: 0, 1, 2, 3, 4, 6, 8, 12, and the same with a sign. */
static const uint16_t NUMBERS_OF_FP4[16] = {
    0, NUMBER(1, 0), NUMBER(1, 1), NUMBER(3, 0), NUMBER(1, 2), NUMBER(3, 1), NUMBER(1, 3), NUMBER(3, 2),
    0, MINUS(NUMBER(1, 0)), MINUS(NUMBER(1, 1)), MINUS(NUMBER(3, 0)), MINUS(NUMBER(1, 2)), MINUS(NUMBER(3, 1)),
    MINUS(NUMBER(1, 3)), MINUS(NUMBER(3, 2)),
};

/* The same as bfloat16, times 2 ** (LARGEST_EXPONENT - 127). */
static const uint16_t FLOATS_OF_FP4[16] = {
    0, FLOAT_OF(0, 0), FLOAT_OF(0, 1), FLOAT_OF(1, 1), FLOAT_OF(0, 2), FLOAT_OF(1, 2), FLOAT_OF(0, 3), FLOAT_OF(1, 3),
    0, MINUS(FLOAT_OF(0, 0)), MINUS(FLOAT_OF(0, 1)), MINUS(FLOAT_OF(1, 1)), MINUS(FLOAT_OF(0, 2)), MINUS(FLOAT_OF(1, 2)),
    MINUS(FLOAT_OF(0, 3)), MINUS(FLOAT_OF(1, 3)),
};

/* Return what a type's codes stand for, twice: the bit above a code is another's. */
INLINE Words load_code_numbers(const int type) {
    const uint16_t *numbers = type == Q4_0 ? NUMBERS_OF_Q4_0 : type == MXFP4 ? FLOATS_OF_FP4 : NUMBERS_OF_FP4;
    return (Words)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)numbers));
}

/* What weights are made of, for the 16 columns of a vector. */
typedef struct {
    Words products[2]; /* of the roots 1 and 3, 5 and 7: rounded, [root][column]. MXFP4: what is subtracted, in each half */
    Words is_scaled;   /* all bits of a column whose scale is not 0 */
} Roots;

/* Return products of two roots, rounded and without what is added to them. */
INLINE Words rounded_products(const Floats lower, const Floats upper, const int first_place) {
    const __m512i places = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13,
                                            12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i added = _mm512_add_epi16(places, _mm512_set1_epi16((short)((1 << 7) + first_place)));
    return (Words)_mm512_sub_epi16((__m512i)_mm512_cvtne2ps_pbh((__m512)upper, (__m512)lower), added);
}

INLINE Roots roots_of(const Floats scale, const int type) {
    Roots roots = {{{0}, {0}}, {0}};
    if (type == MXFP4) {
        const Words exponents = (Words)scale; /* their lower half is 0 */
        roots.products[0] = all_words(LARGEST_EXPONENT * (1 << 23 | 1 << 7)) - (exponents | exponents >> 16);
        return roots;
    }
    const Floats two = scale + scale, three = two + scale; /* additions use other units than products */
    roots.products[0] = rounded_products(scale, three, 0);
    if (type == Q4_0) roots.products[1] = rounded_products(three + two, three + two + two, 32);
    roots.is_scaled = (Words)(scale != 0.0f);
    return roots;
}

/* Return the weights at places i and i + 1 of a word's eight codes. */
INLINE Words pairs_looked_up(const Words codes, const Words numbers, const int i, const Roots *roots, const int type) {
    const __m512i nibbles = _mm512_set1_epi64(0x2c2428200c040800 + i * 0x0404040404040404); /* bits of two columns */
    const __m512i found = _mm512_permutexvar_epi16(_mm512_multishift_epi64_epi8(nibbles, (__m512i)codes), (__m512i)numbers);
    if (type == MXFP4) return (Words)_mm512_min_epu16(_mm512_sub_epi16(found, (__m512i)roots->products[0]), found);
    const __m512i columns = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5,
                                             4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i places = _mm512_or_si512(found, columns), products = (__m512i)roots->products[0];
    const __m512i product = type == Q4_0 ? _mm512_permutex2var_epi16(products, places, (__m512i)roots->products[1])
                                         : _mm512_permutexvar_epi16(places, products);
    return (Words)_mm512_maskz_add_epi16(_mm512_test_epi16_mask(found, (__m512i)roots->is_scaled), product, places);
}
#endif

#endif
