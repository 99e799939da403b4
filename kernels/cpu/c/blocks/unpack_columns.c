/* Groups of quantized weights for products by AMX whose left side they are: a column's 32 places are a row of a tile.
 *
 * With a column's scale and minimum, 16 codes of four bits stand for 16 numbers. These are computed and rounded first, for
 * two columns together; then a shuffle of bytes looks 32 weights up. So a weight costs half a product and half a rounding
 * (unpack_amx.c: one of each). Another shuffle brings a column's codes to their places; for that they have to be next to
 * each other, so words of 16 columns are turned first.
 */
#include "blocks/unpack_amx.h"

#if defined(__AMX_BF16__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512bf16,avx512vbmi")
#ifndef __AVX512BF16__
#define __AVX512BF16__ 1
#endif
#include "products/quantized_decode.h"

enum { PREFETCH_BYTES = 4096, CODE_BYTES = GROUP / 2 }; /* CODE_BYTES: of a column */

/* A group as it is taken column by column. */
typedef struct {
    char codes[PANEL_COLUMNS * CODE_BYTES] __attribute__((aligned(64))); /* at place_of_column() */
    float scales[PANEL_COLUMNS] __attribute__((aligned(64))), minima[PANEL_COLUMNS] __attribute__((aligned(64)));
    uint16_t roots[PANEL_COLUMNS][4] __attribute__((aligned(64))); /* of Q4_0: a scale times 1, 3, 5 and 7, rounded */
} Columns;

/* Columns 4 i + j of a vector, j < 4, are in vector j of the four that it becomes. */
INLINE int place_of_column(const int column) {
    return (column / LANES * 4 + column % 4) * VECTOR_BYTES + column % LANES / 4 * CODE_BYTES;
}

/* Write the four rows of words of vector v column by column: the lower halves of a column's words, then the upper ones. */
INLINE void turn_codes(Columns *columns, const char *codes, const int v) {
    __m512i rows[4], pairs[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) rows[r] = _mm512_loadu_si512(codes + r * ROW_BYTES + v * VECTOR_BYTES);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        pairs[2 * i] = _mm512_unpacklo_epi16(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi16(rows[2 * i], rows[2 * i + 1]);
    }
    char *to = columns->codes + v * 4 * VECTOR_BYTES;
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        _mm512_store_si512(to + 2 * i * VECTOR_BYTES, _mm512_unpacklo_epi32(pairs[i], pairs[2 + i]));
        _mm512_store_si512(to + (2 * i + 1) * VECTOR_BYTES, _mm512_unpackhi_epi32(pairs[i], pairs[2 + i]));
    }
}

/* Write the roots (looked_up_pairs.h) of vector v. Return whether no scale is 0. */
INLINE int find_roots(Columns *columns, const Floats scale, const int v) {
    const __m512i first = _mm512_set_epi16(55, 39, 23, 7, 54, 38, 22, 6, 53, 37, 21, 5, 52, 36, 20, 4, 51, 35, 19, 3, 50,
                                           34, 18, 2, 49, 33, 17, 1, 48, 32, 16, 0);
    const __m512i last = _mm512_add_epi16(first, _mm512_set1_epi16(8));
    const Floats two = scale + scale, three = two + scale; /* additions use other units than products */
    const __m512i lower = (__m512i)_mm512_cvtne2ps_pbh((__m512)three, (__m512)scale);
    const __m512i upper = (__m512i)_mm512_cvtne2ps_pbh((__m512)(three + two + two), (__m512)(three + two));
    _mm512_store_si512(columns->roots[v * LANES], _mm512_permutex2var_epi16(lower, first, upper));
    _mm512_store_si512(columns->roots[v * LANES + 8], _mm512_permutex2var_epi16(lower, last, upper));
    return _mm512_cmp_ps_mask((__m512)scale, _mm512_setzero_ps(), _CMP_NEQ_UQ) == 0xffff; /* -0 is 0 */
}

INLINE __m512i load_four_times(const void *from) { return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)from)); }

/* Return 16 numbers of each of two columns: all weights of Q4_0 are a root with another exponent and another sign. */
INLINE __m512i numbers_of_roots(const Columns *columns, const int column) {
    /* of the codes from -8 to 7: which root; 0x80: none */
    const __m512i places = _mm512_set_epi64(0x0f0e0b0a0d0c0908, 0x0b0a090809088080, 0x090809080b0a0908, 0x0d0c0b0a0f0e0908,
                                            0x0706030205040100, 0x0302010001008080, 0x0100010003020100, 0x0504030207060100);
    /* powers of two, and signs */
    const __m512i added = _mm512_set_epi64(0x0000008000000100, 0x0000008000000000, 0x8000808080008100, 0x8000808080008180,
                                           0x0000008000000100, 0x0000008000000000, 0x8000808080008100, 0x8000808080008180);
    return _mm512_add_epi16(_mm512_shuffle_epi8(load_four_times(columns->roots[column]), places), added);
}

/* Return the products of all codes' numbers in a column, before they are rounded. */
INLINE __m512 products_of_codes(const Columns *columns, const int column, const Floats numbers, const int type) {
    const Floats scale = all_floats(columns->scales[column]);
    if (!has_minimum(type)) return (__m512)(numbers * scale);
    return (__m512)multiply_add(numbers, scale, all_floats(columns->minima[column]));
}

/* Return the places of a column's weights among the bytes of 16 numbers: twice its codes, and one more in odd bytes. */
INLINE __m512i places_of_codes(const Columns *columns, const int column) {
    const __m512i from = _mm512_set_epi64(0x3b3b373733332f2f, 0x3b3b373733332f2f, 0x2b2b272723231f1f, 0x2b2b272723231f1f,
                                          0x1b1b171713130f0f, 0x1b1b171713130f0f, 0x0b0b070703033f3f, 0x0b0b070703033f3f);
    const __m512i codes = load_four_times(columns->codes + place_of_column(column));
    const __m512i odd = _mm512_set1_epi16((short)(column % 2 ? 0x2120 : 0x0100)), mask = _mm512_set1_epi8(0x1e);
    return _mm512_ternarylogic_epi64(_mm512_multishift_epi64_epi8(from, codes), mask, odd, 0xea);
}

INLINE void look_up_columns(const Columns *columns, const Floats numbers, char *out, const int has_roots, const int type) {
#pragma GCC unroll 16
    for (int column = 0; column < PANEL_COLUMNS; column += 2) {
        const __m512i table = has_roots ? numbers_of_roots(columns, column)
                                        : (__m512i)_mm512_cvtne2ps_pbh(products_of_codes(columns, column + 1, numbers, type),
                                                                       products_of_codes(columns, column, numbers, type));
#pragma GCC unroll 2
        for (int i = column; i < column + 2; i++)
            _mm512_store_si512(out + i * VECTOR_BYTES, _mm512_permutexvar_epi8(places_of_codes(columns, i), table));
    }
}

INLINE void unpack_columns(const char *panel, int32_t panel_type, int64_t g, char *out, const int type) {
    const QuantizedLayout layout = layout_of(type);
    const OwnParts own = own_parts(panel_type, type);
    const Floats codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats numbers = has_levels(type) ? own.numbers : codes - (float)zero_of(type);
    const char *head = panel + head_offset(layout, g), *group = panel + group_offset(layout, g);
    Columns columns;
    int has_roots = type == Q4_0;
#pragma GCC unroll 32
    for (int line = 0; line < layout.group_bytes + layout.head_bytes; line += 64) __builtin_prefetch(group + PREFETCH_BYTES + line);
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECTORS; v++) {
        Scales scales = {.scale = {{0}, {0}}};
        load_half(&scales, head, group, v, 0, own.unit, type);
        store_floats(columns.scales + v * LANES, scales.scale[0]);
        if (has_minimum(type)) store_floats(columns.minima + v * LANES, scales.minimum[0]);
        if (type == Q4_0) has_roots &= find_roots(&columns, scales.scale[0], v);
        turn_codes(&columns, group + layout.scale_bytes, v);
    }
    __asm__ volatile("" ::: "memory"); /* the compiler would shuffle registers in place of loading columns again */
    if (has_roots)
        look_up_columns(&columns, numbers, out, 1, type);
    else
        look_up_columns(&columns, numbers, out, 0, type);
}

/* Types with codes of four bits whose scales are usual (unpack_amx.c), and one for a group. */
#define EACH_TYPE(X) X(q4_0, Q4_0) X(q4_1, Q4_1) X(q4_k, Q4_K) X(iq4_nl, IQ4_NL) X(iq4_xs, IQ4_XS)
#define DEFINE(name, type)                                                                          \
    static void name##_columns(const char *panel, int32_t panel_type, int64_t group, char *out) {   \
        unpack_columns(panel, panel_type, group, out, type);                                        \
    }
EACH_TYPE(DEFINE)

#define ENTRY(name, type) [type] = name##_columns,
static const UnpackGroup UNPACKERS[NUM_TYPES] = {EACH_TYPE(ENTRY)};

UnpackGroup column_unpacker_of(int32_t type) {
    if (type == WHOLE_PANEL || !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi")) return NULL;
    return UNPACKERS[type];
}
#elif defined(__AMX_BF16__)
#include <stddef.h>

UnpackGroup column_unpacker_of(int32_t type) {
    (void)type;
    return NULL;
}
#endif
