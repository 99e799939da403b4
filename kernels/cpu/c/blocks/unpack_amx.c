/* While AMX multiplies, the second of the two units for vectors neither multiplies numbers nor rounds them to bfloat16
 * (Emerald Rapids: twice the time for a row of vmulps). So the first unit bounds what is done here: a weight costs one
 * product, codes are looked up and moved by shuffles, which only the second unit has, and roots (looked_up_pairs.h) take no
 * products at all. GCC's pragma works for whole functions, so clang has none of this.
 */
#include "blocks/unpack_amx.h"

#if defined(__AMX_BF16__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512bf16,avx512vbmi")
#ifndef __AVX512BF16__
#define __AVX512BF16__ 1
#endif
#include "products/quantized_decode.h"

enum { PREFETCH_BYTES = 4096 };

/* Scales and minima of a vector's first and last eight columns, each in two lanes; [half of the group]. */
typedef struct {
    Floats scale[2], minimum[2];
} LaneScales;

/* Part of a group: what is unpacked for a vector of columns. */
typedef struct {
    const char *codes;
    char *out;
    const OwnParts *own;
    Scales scales;
    LaneScales lanes[2];
    int v; /* of the panel's vectors */
} Part;

INLINE __m512i lanes_of(const int is_last) {
    const __m512i lanes = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_add_epi32(lanes, _mm512_set1_epi32(8 * is_last));
}

/* By how much codes become larger where they are put into a number: Q8_0's bytes are in the second byte of a lane, smaller
 * ones in the third. A scale times this and the zero has at most 24 bits. */
INLINE float base_of(const int type) { return (float)(type == Q8_0 ? 1 << 15 : 1 << 7); }

/* Whether codes become numbers with that base, which is taken off together with the zero. */
INLINE int has_base(const int type) {
    const int planes = planes_of(type);
    return !has_minimum(type) && (type == Q8_0 || planes == (FOURS | ONES) || planes == (FOURS | TWOS));
}

INLINE void spread_scales(Part *part, const int type) {
#pragma GCC unroll 2
    for (int last = 0; last < 2; last++)
#pragma GCC unroll 2
        for (int half = 0; half <= has_halves(type); half++) {
            LaneScales *to = &part->lanes[last];
            to->scale[half] = in_lane_pairs(part->scales.scale[half], last);
            if (has_minimum(type)) to->minimum[half] = in_lane_pairs(part->scales.minimum[half], last);
            if (has_base(type)) to->minimum[half] = to->scale[half] * -(base_of(type) + (float)zero_of(type));
        }
}

/* Store the products of two steps' numbers: row j of 32 places has the places 2 j and 2 j + 1. */
INLINE void store_products(const Part *part, const int j, const Floats first, const Floats last, const int type) {
    const Floats numbers[2] = {first, last};
    const int half = has_halves(type) ? j / 8 : 0;
    Floats products[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const LaneScales *scales = &part->lanes[i];
        products[i] = has_minimum(type) || has_base(type)
                          ? multiply_add(numbers[i], scales->scale[half], scales->minimum[half])
                          : numbers[i] * scales->scale[half];
    }
    const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh((__m512)products[1], (__m512)products[0]);
    _mm512_store_si512(part->out + j * VECTOR_BYTES, pairs);
}

/* Move code j of eight, or of the four bytes, to the low end of each lane; lanes with odd numbers have the next code of
 * eight. Three of four times by the second unit. */
INLINE __m512i moved_down(const __m512i codes, const int j, const int are_nibbles) {
    const int next = are_nibbles ? 4 : 0;
    if (j < 3) return _mm512_multishift_epi64_epi8(_mm512_set1_epi64((int64_t)(32 + 8 * j + next) << 32 | 8 * j), codes);
    return _mm512_srlv_epi32(codes, _mm512_set1_epi64((int64_t)(8 * j + next) << 32 | 8 * j));
}

/* Codes of four bits, looked up among 16 numbers. */
INLINE void unpack_fours(const Part *part, const int type) {
    const Floats codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512 numbers = (__m512)(has_levels(type) || has_float_levels(type) ? part->own->numbers : codes);
#pragma GCC unroll 4
    for (int r = 0; r < GROUP / 8; r++) {
        const __m512i words = _mm512_loadu_si512(part->codes + r * ROW_BYTES + part->v * VECTOR_BYTES);
        const __m512i first = _mm512_permutexvar_epi32(lanes_of(0), words);
        const __m512i last = _mm512_permutexvar_epi32(lanes_of(1), words);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            store_products(part, 4 * r + j, (Floats)_mm512_permutexvar_ps(moved_down(first, j, 1), numbers),
                           (Floats)_mm512_permutexvar_ps(moved_down(last, j, 1), numbers), type);
    }
}

/* Codes of five bits, looked up among 32 numbers. */
INLINE void unpack_fives(const Part *part, const int type) {
    const Floats lower = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, upper = lower + 16.0f;
#pragma GCC unroll 4
    for (int r = 0; r < GROUP / 8; r++) {
        const RowCodes row = steps_in_turns(load_stored_codes(part->codes, part->v, r, part->own->levels, type));
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const __m512i first = j ? moved_down((__m512i)row.low, j, 0) : (__m512i)row.low;
            const __m512i last = j ? moved_down((__m512i)row.high, j, 0) : (__m512i)row.high;
            store_products(part, 4 * r + j, (Floats)_mm512_permutex2var_ps((__m512)lower, first, (__m512)upper),
                           (Floats)_mm512_permutex2var_ps((__m512)lower, last, (__m512)upper), type);
        }
    }
}

/* Return byte j of each lane, below the exponent of base_of(). */
INLINE Floats number_at_base(const Words codes, const int j, const int type) {
    const int to = type == Q8_0 ? 1 : 2; /* byte */
    const __m512i base = (__m512i)all_floats(base_of(type));
    if (j == to) return (Floats)_mm512_ternarylogic_epi32((__m512i)codes, _mm512_set1_epi32(255 << 8 * to), base, 0xea);
    const __m512i places = _mm512_set4_epi32(12, 8, 4, 0); /* of lanes */
    const __m512i from = _mm512_slli_epi32(_mm512_add_epi32(places, _mm512_set1_epi32(j)), 8 * to);
    return (Floats)_mm512_mask_shuffle_epi8(base, 0x1111111111111111 << to, (__m512i)codes, from);
}

/* Codes that are bytes, or that are joined to bytes. */
INLINE void unpack_bytes(const Part *part, const int type) {
    const int planes = planes_of(type);
#pragma GCC unroll 4
    for (int r = 0; r < GROUP / 8; r++) {
        RowCodes row = steps_in_turns(load_stored_codes(part->codes, part->v, r, part->own->levels, type));
        if (type == Q8_0) row.low ^= 0x80808080, row.high ^= 0x80808080;
        if (planes != BYTES) {
            const uint32_t mask = planes & TWOS ? 0x3f3f3f3f : 0x1f1f1f1f;
            row.low &= mask, row.high &= mask;
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            store_products(part, 4 * r + j, number_at_base(row.low, j, type), number_at_base(row.high, j, type), type);
    }
}

/* Pairs that are looked up as they are. */
INLINE void unpack_pairs(const Part *part, const int type) {
    const Words numbers = load_code_numbers(type);
#pragma GCC unroll 4
    for (int r = 0; r < GROUP / 8; r++) {
        const Words words = load_words(part->codes + r * ROW_BYTES + part->v * VECTOR_BYTES);
        const Roots *roots = &part->scales.roots[has_halves(type) ? r / 2 : 0];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            store_floats((float *)(part->out + (4 * r + j) * VECTOR_BYTES),
                         (Floats)pairs_looked_up(words, numbers, 2 * j, roots, type));
    }
}

/* Whether all weights that are not zero are far above 2**-126 and finite. Scales that are made of float16 and E4M3 numbers
 * always give such weights, if they are finite at all. */
INLINE int are_usual(const Scales *scales, const int type) {
    const int kind = BLOCK_TYPES[type].scales;
    if (kind != EXPONENTS && kind != WIDE && kind != DIVIDED) return 1;
    const Words least = all_words(0x0c000000), most = all_words(0x70000000); /* 2**-103, 2**97 */
    Words is_usual = all_words(UINT32_MAX);
#pragma GCC unroll 2
    for (int half = 0; half <= has_halves(type); half++) {
        const Words size = (Words)scales->scale[half] & 0x7fffffff;
        is_usual &= (Words)(size > least) & (Words)(size < most);
    }
    return _mm512_test_epi32_mask((__m512i)is_usual, (__m512i)is_usual) == 0xffff;
}

INLINE void unpack_group(const char *panel, int32_t panel_type, int64_t g, char *out, const int type) {
    const QuantizedLayout layout = layout_of(type);
    const OwnParts own = own_parts(panel_type, type);
    const char *head = panel + head_offset(layout, g), *group = panel + group_offset(layout, g);
    Part part = {.codes = group + layout.scale_bytes, .own = &own};
#pragma GCC unroll 32
    for (int line = 0; line < layout.group_bytes + layout.head_bytes; line += 64) __builtin_prefetch(group + PREFETCH_BYTES + line);
#pragma GCC unroll 1
    for (part.v = 0; part.v < PANEL_VECTORS; part.v++) {
        part.scales = load_scales(head, group, part.v, own.unit, type);
        part.out = out + part.v * (GROUP / 2 * VECTOR_BYTES);
        if (!are_usual(&part.scales, type)) {
            char steps[GROUP / 2 * ROW_BYTES] __attribute__((aligned(64)));
            quantized_unpack(panel, panel_type, g, g + 1, steps);
            part_columns(steps, out);
            return;
        }
        if (has_pairs_looked_up(type)) {
            unpack_pairs(&part, type);
            continue;
        }
        spread_scales(&part, type);
        if (planes_of(type) == FOURS)
            unpack_fours(&part, type);
        else if (planes_of(type) == (FOURS | ONES) && has_minimum(type))
            unpack_fives(&part, type);
        else
            unpack_bytes(&part, type);
    }
}

/* Types without TWOS alone, and without FP8, whose scales are not usual here. */
#define EACH_TYPE(X)                                                                                              \
    X(q8_0, Q8_0) X(q4_0, Q4_0) X(q4_1, Q4_1) X(q5_0, Q5_0) X(q5_1, Q5_1) X(q4_k, Q4_K) X(q5_k, Q5_K) X(q6_k, Q6_K) \
    X(iq4_nl, IQ4_NL) X(iq4_xs, IQ4_XS) X(mxfp4, MXFP4) X(nvfp4, NVFP4) X(nvfp4_f32, NVFP4_F32) X(nf4, NF4)         \
    X(bnb_fp4, BNB_FP4) X(grids, IQ2_XXS)
#define DEFINE(name, type)                                                                        \
    static void name##_group(const char *panel, int32_t panel_type, int64_t group, char *out) {   \
        unpack_group(panel, panel_type, group, out, type);                                        \
    }
EACH_TYPE(DEFINE)

#define ENTRY(name, type) [type] = name##_group,
static const UnpackGroup UNPACKERS[NUM_TYPES] = {EACH_TYPE(ENTRY)};

UnpackGroup unpacker_of(int32_t type) {
    if (type == WHOLE_PANEL || !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi")) return NULL;
    return UNPACKERS[function_type_of(type)];
}
#elif defined(__AMX_BF16__)
#include <stddef.h>

UnpackGroup unpacker_of(int32_t type) {
    (void)type;
    return NULL;
}
#endif
