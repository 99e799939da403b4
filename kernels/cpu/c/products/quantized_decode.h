/* A group of quantized weights (quantized.h), unpacked in registers to bfloat16 numbers.
 *
 * A weight is its code times a scale, plus a minimum. The product has at most 23 significant bits, so it is exact and
 * only the sum is rounded, whether or not the instruction set rounds both together. What remains is to round a float f
 * to bfloat16, to nearest even: 65537 f - 65536 f, where the first product is rounded to float32. Its last bit is the
 * bfloat16's last one, so both round in the same way. The result only differs if f has all 24 bits and is just below a
 * power of two; gemm_quantize() does not let such a weight through, nor one that is not finite. AVX512_BF16 has an
 * instruction that rounds like this. It treats numbers below 2**-126 as zeros, which gemm_quantize() detects too.
 *
 * A scale of WIDE and DIVIDED is any float32, so its product is rounded, to the number that dequantize.h gives, and may
 * have all 24 bits. With a scale for each few weights many panels would have such a weight just below a power of two. So
 * these types are rounded to bfloat16 by integers.
 */
#ifndef QUANTIZED_DECODE_H
#define QUANTIZED_DECODE_H

#include "blocks/looked_up_pairs.h"
#include "products/gemm_block.h"
#include "products/quantized.h"

enum { ROW_BYTES = PANEL_COLUMNS * 4 };

INLINE Floats load_float16(const char *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(WITH_NEON)
    return (Floats)vcvt_f32_f16((float16x4_t)vld1_u16((const uint16_t *)from));
#else
    uint16_t bits[LANES];
    Floats values = {0};
    memcpy(bits, from, sizeof bits);
    for (int i = 0; i < LANES; i++) values[i] = float_of_float16(bits[i]);
    return values;
#endif
}

INLINE Floats rounded_exactly(Floats f) { return multiply_add(f, all_floats(-65536.0f), f * 65537.0f); }

/* Round as rounded_exactly(), and all other finite numbers too. */
INLINE Floats rounded_by_integers(Floats f) {
    const Words bits = (Words)f;
    return (Floats)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
}

INLINE int has_wide_scales(const int type) { return BLOCK_TYPES[type].scales == WIDE || BLOCK_TYPES[type].scales == DIVIDED; }

INLINE Floats rounded_weight(Floats f, const int type) {
    return has_wide_scales(type) ? rounded_by_integers(f) : rounded_exactly(f);
}

INLINE int has_minimum(const int type) { return BLOCK_TYPES[type].has_minimum; }
INLINE int has_halves(const int type) { return type != WHOLE_PANEL && BLOCK_TYPES[type].has_halves; }
INLINE int planes_of(const int type) { return BLOCK_TYPES[type].planes; }
INLINE int zero_of(const int type) { return has_minimum(type) ? 0 : 1 << BLOCK_TYPES[type].zero_bits; }

/* What types that share their functions differ in. */
typedef struct {
    Table levels;
    float unit;
#if LANES == 16
    Floats numbers; /* the levels with their zero taken off; bits of words if pairs are looked up */
#endif
} OwnParts;

/* Return those of a panel's type; its functions are those of `type`. */
INLINE OwnParts own_parts(const int32_t panel_type, const int type) {
    OwnParts own = {.unit = 1.0f};
#if LANES == 16
    if (type != WHOLE_PANEL && has_float_levels(type)) own.numbers = load_floats(float_levels(type));
#endif
#if defined(__AVX512BF16__)
    if (has_pairs_looked_up(type)) own.numbers = (Floats)load_code_numbers(type);
#endif
    if (type == WHOLE_PANEL || !has_levels(type)) return own;
    const uint8_t *levels = LEVELS[BLOCK_TYPES[type == IQ2_XXS ? panel_type : type].levels];
    own.levels = load_table(levels);
#if LANES == 16
    if (!has_pairs_looked_up(type)) own.numbers = load_bytes(levels) - (float)zero_of(type);
#endif
    if (type == IQ2_XXS) own.unit = BLOCK_TYPES[panel_type].unit;
    return own;
}

#if LANES < 16
/* Return the floats whose places are the lowest four bits of each word. */
INLINE Floats look_up_float(const float table[16], const Words places) {
#if defined(__AVX2__)
    const __m256 first = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)places);
    const __m256 last = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)places);
    return (Floats)_mm256_blendv_ps(first, last, (__m256)(places << 28));
#else
    Floats found = {0};
    for (int i = 0; i < LANES; i++) found[i] = table[places[i] & 15];
    return found;
#endif
}
#endif

/* Whether a type's zero is taken off together with its scale: code * scale - zero * scale, where both products are exact. With
 * AVX512_BF16 it is (2**15 + code) * scale - (2**15 + zero) * scale, so only of types whose scales are float16 numbers: then
 * the second product has at most 24 bits. */
INLINE int has_scaled_zero(const int type) {
#if defined(__AVX512BF16__)
    return BLOCK_TYPES[type].scales == FLOATS && !has_minimum(type) && !has_levels(type) && !has_pairs_looked_up(type);
#elif defined(__AVX512F__) || defined(WITH_NEON) /* where the shifts that this needs take as long */
    (void)type;
    return 0;
#else
    return BLOCK_TYPES[type].zero_bits && !has_wide_scales(type) && type != Q8_0;
#endif
}

/* Scales of the columns of a vector. Those of types with halves have one for each half of a group. A scaled zero is a
 * minimum; with AVX512_BF16 the two are for codes at bit 8 and at bit 12 of a word. */
typedef struct {
    Floats scale[2], minimum[2];
#if defined(__AVX512BF16__)
    Roots roots[2];
#endif
} Scales;

/* Load bytes of E4M3 without a sign as half of their numbers: as float16 they have a bias that is 8 more. */
INLINE Floats load_e4m3(const char *from) {
#if defined(__AVX512F__)
    const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
    return (Floats)_mm512_cvtph_ps(_mm256_slli_epi16(bytes, 7)) * 128.0f;
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i bytes = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)from));
    return (Floats)_mm256_cvtph_ps(_mm_slli_epi16(bytes, 7)) * 128.0f;
#elif defined(WITH_NEON)
    uint32_t four;
    memcpy(&four, from, sizeof four);
    const uint16x4_t bits = vget_low_u16(vshll_n_u8(vcreate_u8(four), 7));
    return (Floats)vcvt_f32_f16((float16x4_t)bits) * 128.0f;
#else
    Floats values = {0};
    for (int i = 0; i < LANES; i++) values[i] = float_of_float16((uint16_t)((uint8_t)from[i] << 7));
    return values * 128.0f;
#endif
}

/* Load bytes as powers of two, of which they are a float's exponent; 0 is zero. */
INLINE Floats load_exponents(const char *from) {
    return (Floats)((Words)__builtin_convertvector(load_bytes(from), Signed) << 23);
}

/* Load bytes that have a scale in the lower half and a minimum in the upper one. */
INLINE void load_nibbles(const char *from, Floats *scale, Floats *minimum) {
    const Signed bytes = __builtin_convertvector(load_bytes(from), Signed);
    *scale = __builtin_convertvector(bytes & 15, Floats);
    *minimum = __builtin_convertvector(bytes >> 4, Floats);
}

/* Load the scales of vector v from row `half` of a group's bytes, and the minima if they have any. */
INLINE void load_half(Scales *loaded, const char *head, const char *group, const int v, const int half, const float unit,
                      const int type) {
    const char *bytes = group + half * PANEL_COLUMNS + v * LANES, *factors = head + v * LANES * 2;
    const char *factors_of_minima = factors + PANEL_COLUMNS * 2;
    switch (BLOCK_TYPES[type].scales) {
    case FLOATS:
        loaded->scale[half] = load_float16(group + v * LANES * 2);
        if (has_minimum(type)) loaded->minimum[half] = load_float16(group + PANEL_COLUMNS * 2 + v * LANES * 2);
        break;
    case FACTORS: loaded->scale[half] = load_float16(factors); break;
    case WIDE: /* 2 ** 120: number_of_byte() */
        loaded->scale[half] = load_floats(head + v * LANES * 4);
        if (is_e4m3(type)) loaded->scale[half] = loaded->scale[half] * 0x1p120f;
        break;
    case DIVIDED: loaded->scale[half] = load_e4m3(bytes) / load_floats(head + v * LANES * 4); break;
    case SIGNED:
        loaded->scale[half] = load_signed_bytes(bytes) * load_float16(factors);
        if (type == IQ2_XXS) loaded->scale[half] = loaded->scale[half] * unit;
        break;
    case UNSIGNED:
        loaded->scale[half] = load_bytes(bytes) * load_float16(factors);
        loaded->minimum[half] = load_bytes(bytes + PANEL_COLUMNS) * -load_float16(factors_of_minima);
        break;
    case NIBBLES:
        load_nibbles(bytes, &loaded->scale[half], &loaded->minimum[half]);
        loaded->scale[half] = loaded->scale[half] * load_float16(factors);
        loaded->minimum[half] = loaded->minimum[half] * -load_float16(factors_of_minima);
        break;
    case EXPONENTS: loaded->scale[half] = load_exponents(bytes); break;
    case E4M3: loaded->scale[half] = load_e4m3(bytes); break;
    }
}

/* Load the scales of vector v. */
INLINE Scales load_scales(const char *head, const char *group, const int v, const float unit, const int type) {
    Scales loaded = {.scale = {{0}, {0}}};
    if (type == WHOLE_PANEL) return loaded;
    load_half(&loaded, head, group, v, 0, unit, type);
    if (has_halves(type)) {
        load_half(&loaded, head, group, v, 1, unit, type);
    } else {
        loaded.scale[1] = loaded.scale[0];
        loaded.minimum[1] = loaded.minimum[0];
    }
#if defined(__AVX512BF16__)
    if (has_pairs_looked_up(type)) {
        loaded.roots[0] = roots_of(loaded.scale[0], type);
        loaded.roots[1] = has_halves(type) ? roots_of(loaded.scale[1], type) : loaded.roots[0];
    }
#endif
    if (!has_scaled_zero(type)) return loaded;
#if defined(__AVX512BF16__)
    loaded.minimum[0] = loaded.scale[0] * -(float)((1 << 15) + zero_of(type));
    loaded.minimum[1] = loaded.scale[0] * -(float)((1 << 11) + zero_of(type));
#else
    loaded.minimum[0] = loaded.scale[0] * -(float)zero_of(type);
    loaded.minimum[1] = loaded.scale[1] * -(float)zero_of(type);
#endif
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

/* Return what code i of a row of words stands for; `low` has its lowest bits, `high` those above them, if any. */
INLINE Floats number_of_code(const Words low, const Words high, const int i, const int type) {
    const int planes = planes_of(type), zero = zero_of(type);
#if defined(__AVX512F__)
    const Words half = i < 4 ? high : high >> 16;
    if (!(planes & FOURS)) { /* codes are 8 bits apart, those at odd places 2 bits further; the third bits are 1 bit */
        const int place = i % 4 / 2 * 8 + i % 2 * 2;
        Words bits = masked(i < 4 ? low : low >> 16, 3u << place, all_words(power_for(place)));
        if (planes & ONES) bits = masked(half << (2 + i % 2), 4u << place, bits);
        return above_power(bits, place, zero);
    }
    if (has_scaled_zero(type)) {
        const int to = i % 2 ? 12 : 8;
        return (Floats)masked(moved(low, 4 * i, to), 15u << to, all_words(power_for(to)));
    }
    const int place = i % 4 * 4;
    return above_power(masked(i < 4 ? low : low >> 16, 15u << place, all_words(power_for(place))), place, zero);
#else
    const int fours = planes & FOURS, above = fours ? 4 : 2;
    Words code = fours ? low >> (4 * i) & 15 : low >> (i / 2 * 8 + i % 2 * 2) & 3;
    if (planes & ONES) code |= moved(high, i / 2 * 8 + i % 2, above) & (1u << above);
    if (fours && planes & TWOS) code |= moved(high, i / 2 * 8 + i % 2 * 2, 4) & 48;
    const Floats number = __builtin_convertvector((Signed)code, Floats);
    return zero && !has_scaled_zero(type) ? number - (float)zero : number;
#endif
}

/* Load row r of a plane of codes: of TWOS and ONES the bits of step 2 r come to the low end of each byte. */
INLINE Words load_plane(const char *codes, const int v, const int r, const int plane, const int planes) {
    codes += first_row_of(planes, plane) * ROW_BYTES + v * VECTOR_BYTES;
    if (plane == FOURS) return load_words(codes + r * ROW_BYTES);
    if (plane == TWOS) return load_words(codes + r / 2 * ROW_BYTES) >> (r % 2 * 4);
    return load_words(codes) >> (2 * r);
}

/* A row's codes: their lower and upper bits. Of BYTES, of codes that have been looked up and, with AVX-512, of five and six
 * bits, the row's two steps; with AVX512_BF16 these take turns in the lanes (has_lane_pairs()). With 16 lanes levels are
 * looked up as floats (unrounded_weight()). With NEON all types but those with levels that are floats have the row's two
 * steps, whose zero is taken off. */
typedef struct {
    Words low, high;
} RowCodes;

#if defined(WITH_NEON)
/* Whether a type's rows are steps. */
INLINE int has_steps(const int type) { return !is_e4m3(type) && !has_float_levels(type); }

/* Return the two steps of a row of words of the planes, from the lowest bits of each byte on. */
INLINE RowCodes steps_of_planes(const char *codes, const int v, const int r, const int planes) {
    const Words low = load_plane(codes, v, r, planes & FOURS ? FOURS : TWOS, planes);
    RowCodes row;
    if (planes & FOURS)
        row = (RowCodes){low & 0x0f0f0f0f, (Words)vshrq_n_u8((uint8x16_t)low, 4)};
    else
        row = (RowCodes){low & 0x03030303, low >> 2 & 0x03030303};
    if (planes & ONES) {
        const Words ones = load_plane(codes, v, r, ONES, planes);
        const int above = planes & FOURS ? 4 : 2;
        row.low |= ones << above & 0x01010101u << above, row.high |= ones << (above - 1) & 0x01010101u << above;
    }
    if (planes == (FOURS | TWOS)) {
        const Words twos = load_plane(codes, v, r, TWOS, planes);
        row.low |= twos << 4 & 0x30303030, row.high |= twos << 2 & 0x30303030;
    }
    return row;
}

/* Return the two steps of a row as bytes, with a sign unless the type has a minimum. */
INLINE RowCodes load_steps(const char *codes, const int v, const int r, const Table levels, const int type) {
    const char *at = codes + 2 * r * ROW_BYTES + v * VECTOR_BYTES;
    if (planes_of(type) == BYTES) return (RowCodes){load_words(at), load_words(at + ROW_BYTES)};
    RowCodes row = steps_of_planes(codes, v, r, planes_of(type));
    if (has_levels(type)) row = (RowCodes){look_up(levels, row.low), look_up(levels, row.high)};
    const uint8x16_t zero = vdupq_n_u8((uint8_t)zero_of(type));
    if (zero_of(type)) row.low = (Words)((uint8x16_t)row.low - zero), row.high = (Words)((uint8x16_t)row.high - zero);
    return row;
}

/* Return byte i / 2 of each word of a step as a number: as the upper byte of a word it is 2 ** 24 times that. */
INLINE Floats number_of_step(const Words step, const int i, const int type) {
    const uint8_t at = (uint8_t)(i / 2), no = 255;
    const uint8x16_t places = {no, no, no, at, no, no, no, at + 4, no, no, no, at + 8, no, no, no, at + 12};
    const uint8x16_t upper = vqtbl1q_u8((uint8x16_t)step, places);
    return (Floats)(has_minimum(type) ? vcvtq_n_f32_u32((uint32x4_t)upper, 24) : vcvtq_n_f32_s32((int32x4_t)upper, 24));
}
#endif

/* Whether codes of a type are bytes in RowCodes. */
INLINE int are_bytes(const int type) {
#if defined(__AVX512F__)
    const int planes = planes_of(type);
    return planes == BYTES || planes == (FOURS | TWOS) || planes == (FOURS | ONES);
#else
    return planes_of(type) == BYTES || has_levels(type);
#endif
}

/* Whether the two steps of a row take turns in the lanes of RowCodes: `low` has those of a vector's first eight columns and
 * `high` those of the last. Then what the two become is rounded to pairs that are in their places. */
INLINE int has_lane_pairs(const int type) {
#if defined(__AVX512BF16__)
    return type == Q8_0;
#else
    (void)type;
    return 0;
#endif
}

#if defined(__AVX512BF16__)
/* Return the lanes of a vector's first or last eight columns, each twice. */
INLINE Floats in_lane_pairs(const Floats columns, const int is_last) {
    const __m512i lanes = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return (Floats)_mm512_permutexvar_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(8 * is_last)), (__m512)columns);
}

/* Return two steps in turns. */
INLINE RowCodes steps_in_turns(const RowCodes steps) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i last = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    return (RowCodes){(Words)_mm512_permutex2var_epi32((__m512i)steps.low, first, (__m512i)steps.high),
                      (Words)_mm512_permutex2var_epi32((__m512i)steps.low, last, (__m512i)steps.high)};
}
#endif

#if defined(__AVX512F__)
/* Return a row's steps from the nibbles of its words and from the bits above them, of which a byte has those of both steps.
 * Bits above a code are others' bits. */
INLINE RowCodes joined(const Words nibbles, const Words above, const int bits_above) {
    const Words lower = all_words(0x0f0f0f0f);
    return (RowCodes){
        (Words)_mm512_ternarylogic_epi32((__m512i)lower, (__m512i)nibbles, (__m512i)(above << 4), 0xca),
        (Words)_mm512_ternarylogic_epi32((__m512i)lower, (__m512i)(nibbles >> 4), (__m512i)(above << (4 - bits_above)), 0xca),
    };
}
#endif

/* Load the scales of vector v as two_weights() takes them: with pairs in lanes, one for each half of the columns. */
INLINE void load_lane_scales(Scales scales[2], const char *head, const char *group, const int v, const float unit,
                             const int type) {
    scales[0] = load_scales(head, group, v, unit, type);
#if defined(__AVX512BF16__)
    if (!has_lane_pairs(type)) return;
    const Scales columns = scales[0];
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            scales[part].scale[half] = in_lane_pairs(columns.scale[half], part);
            scales[part].minimum[half] = in_lane_pairs(columns.minimum[half], part);
        }
#endif
}

/* Load row r of a group's codes as they are stored, or as steps. */
INLINE RowCodes load_stored_codes(const char *codes, const int v, const int r, const Table levels, const int type) {
    RowCodes row = {{0}, {0}};
    if (type == WHOLE_PANEL) return row;
    const int planes = planes_of(type);
#if defined(WITH_NEON)
    if (has_steps(type)) return load_steps(codes, v, r, levels, type);
#endif
    if (planes == BYTES) {
        const char *at = codes + 2 * r * ROW_BYTES + v * VECTOR_BYTES;
        return (RowCodes){load_words(at), load_words(at + ROW_BYTES)};
    }
    row.low = load_plane(codes, v, r, planes & FOURS ? FOURS : TWOS, planes);
    if (has_levels(type) && LANES < 16)
        return (RowCodes){look_up(levels, row.low & 0x0f0f0f0f), look_up(levels, row.low >> 4 & 0x0f0f0f0f)};
    if (planes & ONES) row.high = load_plane(codes, v, r, ONES, planes);
    if (planes == (FOURS | TWOS)) row.high = load_plane(codes, v, r, TWOS, planes);
#if defined(__AVX512F__)
    if (are_bytes(type)) return joined(row.low, row.high, planes & TWOS ? 2 : 1);
#endif
    return row;
}

INLINE RowCodes load_codes(const char *codes, const int v, const int r, const Table levels, const int type) {
    const RowCodes row = load_stored_codes(codes, v, r, levels, type);
#if defined(__AVX512BF16__)
    if (has_lane_pairs(type)) return steps_in_turns(row);
#endif
    return row;
}

/* Return byte i / 2 of each word of a step as a number; of Q8_0 it has a sign. If its zero is scaled, that is still added,
 * and with AVX512_BF16 2**15 is. Of FP8 it is 2 ** -120 of that, a subnormal number if E4M3's is: then a product is right too,
 * but slower on some CPUs. */
INLINE Floats number_of_byte(const Words step, const int i, const int type) {
    if (is_e4m3(type)) return float_bits_of_e4m3(step, i / 2 * 8);
#if defined(__AVX512F__)
    const int planes = planes_of(type), place = has_scaled_zero(type) ? 8 : i / 2 % 2 * 8;
    const uint32_t sign = type == Q8_0 ? 128u << place : 0;
    const uint32_t mask = planes == BYTES ? 255 : planes & TWOS ? 63 : planes & ONES ? 31 : 15;
    const Words bits = masked(moved(step, i / 2 * 8, place), mask << place, all_words(power_for(place) | sign));
    return has_scaled_zero(type) ? (Floats)bits : above_power(bits, place, zero_of(type));
#else
    if (type == Q8_0) return __builtin_convertvector((Signed)(step << (24 - i / 2 * 8)) >> 24, Floats);
    const Floats number = __builtin_convertvector((Signed)(step >> i / 2 * 8 & 255), Floats);
    return has_scaled_zero(type) ? number : number - (float)zero_of(type);
#endif
}

/* Return the weight at place 8 r + i of the group as a float that is not yet rounded to bfloat16; `codes` are those of
 * row r. */
INLINE Floats unrounded_weight(const RowCodes *codes, const OwnParts *own, const int r, const int i,
                               const Scales *scales, const int type) {
    const int half = has_halves(type) ? r / 2 : 0;
    Floats number;
#if LANES == 16 /* the instruction takes the lowest four bits of a lane */
    if (has_levels(type) || has_float_levels(type))
        number = (Floats)_mm512_permutexvar_ps((__m512i)(codes->low >> 4 * i), (__m512)own->numbers);
    else
#else
    if (has_float_levels(type))
        number = look_up_float(float_levels(type), codes->low >> 4 * i);
    else
#endif
#if defined(WITH_NEON)
    if (has_steps(type))
        number = number_of_step(i % 2 ? codes->high : codes->low, i, type);
    else
#endif
    if (are_bytes(type))
        number = number_of_byte(i % 2 ? codes->high : codes->low, i, type);
    else
        number = number_of_code(codes->low, codes->high, i, type);
    (void)own;
#if defined(__AVX512BF16__)
    const int minimum = has_scaled_zero(type) && planes_of(type) == FOURS ? i % 2 : half;
#else
    const int minimum = half;
#endif
    if (!has_minimum(type) && !has_scaled_zero(type)) return number * scales->scale[half];
    return multiply_add(number, scales->scale[half], scales->minimum[minimum]);
}

/* Round weights to bfloat16 and return them as pairs: `even` and `odd` are a pair's, or the first and the last eight
 * columns with two lanes for a pair (has_lane_pairs()). */
INLINE Words pairs_of(const Floats even, const Floats odd, const int type) {
#if defined(__AVX512BF16__)
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    if (has_lane_pairs(type)) return (Words)halves;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i places = _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(16)), 16));
    return (Words)_mm512_permutexvar_epi16(places, halves);
#elif defined(NEON_BF16)
    (void)type;
    const uint8x16_t places = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
    const bfloat16x8_t first = vcvtq_low_bf16_f32((float32x4_t)even);
    return (Words)vqtbl1q_u8((uint8x16_t)vcvtq_high_bf16_f32(first, (float32x4_t)odd), places);
#else
    return ((Words)rounded_weight(even, type) >> 16) | (Words)rounded_weight(odd, type);
#endif
}

/* Two adjacent weights along the depth, as the one or two steps that products take (gemm.h). */
enum { STEPS_OF_TWO = BY_PAIRS ? 1 : 2 };
typedef struct {
    Words steps[STEPS_OF_TWO];
} Two;

/* Return the weights at places 8 r + i and 8 r + i + 1 of the group. scales: as load_lane_scales() gives them. */
INLINE Two two_weights(const char *codes, const RowCodes *row, const OwnParts *own, const int v, const int r, const int i,
                       const Scales scales[2], const int type) {
    Two two;
    if (type == WHOLE_PANEL) {
        const Words pairs = load_words(codes + (8 * r + i) / 2 * ROW_BYTES + v * VECTOR_BYTES);
        two.steps[0] = BY_PAIRS ? pairs : pairs << 16;
        if (!BY_PAIRS) two.steps[STEPS_OF_TWO - 1] = pairs & 0xffff0000;
        return two;
    }
#if defined(__AVX512BF16__)
    if (has_pairs_looked_up(type)) {
        const Roots *roots = &scales[0].roots[has_halves(type) ? r / 2 : 0];
        two.steps[0] = pairs_looked_up(row->low, (Words)own->numbers, i, roots, type);
        return two;
    }
#endif
    const Floats even = unrounded_weight(row, own, r, i, &scales[0], type);
    const Floats odd = unrounded_weight(row, own, r, i + 1, &scales[has_lane_pairs(type)], type);
    if (BY_PAIRS) {
        two.steps[0] = pairs_of(even, odd, type);
    } else {
        two.steps[0] = (Words)rounded_weight(even, type);
        two.steps[STEPS_OF_TWO - 1] = (Words)rounded_weight(odd, type);
    }
    return two;
}

#endif
