/* Some rows of 8-bit blocks times groups of a panel. int8_functions.h makes functions of it. */
#ifndef INT8_BLOCK_H
#define INT8_BLOCK_H

#include "products/int8.h"
#include "products/quantized_decode.h"

/* Prefetch distance: the hardware's own prefetch ends at each page. */
enum { INT8_PREFETCH_BYTES = 2048 };

/* Groups that are multiplied with all vectors of columns before the next ones. Packed ones are prefetched as the first
 * vectors are multiplied, so with few rows and AVX2 the others follow at once: else memory would be idle. */
enum { ALL_GROUPS = 1 << 20 };
INLINE int visited_groups(const int is_unpacked) { return is_unpacked || VECTOR_BYTES != 32 ? ALL_GROUPS : 1; }

/* Most unpacked groups at once: the first level cache keeps them. */
enum { SLICE_GROUPS = VECTOR_BYTES == 32 ? 12 : 24 };

/* Vectors of columns at once. */
#if defined(__AVX2__) || defined(WITH_NEON)
enum { INT8_VECTORS = 2 };
#else
enum { INT8_VECTORS = 1 };
#endif

/* Whether a type's codes need eight bits, else at most seven. */
INLINE int is_wide(const int type) { return type != WHOLE_PANEL && BLOCK_TYPES[type].zero_bits == 7; }

/* Whether products of pairs of bytes are summed in 16 bits while they fit: AVX2 has no instruction that sums four. */
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
enum { SUMS_IN_16_BITS = 1 };
#else
enum { SUMS_IN_16_BITS = 0 };
#endif

/* Whether codes have a sign: their zero is taken off before they are multiplied. NEON has no product of bytes with a sign
 * and bytes without one. HAS_SIGNED_BYTES: of codes of eight bits, with AVX2 too. */
#if defined(WITH_NEON)
enum { HAS_SIGNED_CODES = 1, HAS_SIGNED_BYTES = 1 };
#else
enum { HAS_SIGNED_CODES = 0, HAS_SIGNED_BYTES = SUMS_IN_16_BITS };
#endif

/* Whether this instruction set adds products of bytes in one instruction, of eight bits as fast as of seven. */
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
enum { HAS_DOT_PRODUCT = 1 };
#else
enum { HAS_DOT_PRODUCT = 0 };
#endif

/* Return what changes codes of eight bits without a sign to those that products take. */
INLINE uint32_t sign_bits(const int type) { return HAS_SIGNED_BYTES && is_wide(type) ? 0x80808080 : 0; }

/* Return where an Int8Group has code k of a column. */
INLINE int place_in_group(const int k, const int column) {
    return (k / 8 * 2 + k % 2) * ROW_BYTES + column * 4 + k % 8 / 2;
}

typedef uint8_t AllBytes __attribute__((vector_size(VECTOR_BYTES)));

/* Load `count` vectors of columns side by side. */
INLINE void load_row(Words row[], const char *at, const int count) {
#if defined(WITH_NEON) && defined(__GNUC__) && !defined(__clang__) /* GCC 12 loads vectors one by one */
    if (count % 2 == 0) {
#pragma GCC unroll 4
        for (int i = 0; i < count; i += 2)
            __asm__("ldp %q0, %q1, %2"
                    : "=w"(row[i]), "=w"(row[i + 1])
                    : "Ump"(((const Words *)at)[i]), "m"(((const Words *)at)[i + 1]));
        return;
    }
#endif
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) row[i] = load_words(at + i * VECTOR_BYTES);
}

/* Store `count` vectors side by side: on NEON an even number. */
INLINE void store_row(uint8_t *at, const Words row[], const int count) {
#if defined(WITH_NEON) && defined(__GNUC__) && !defined(__clang__) /* GCC 12 stores vectors one by one */
#pragma GCC unroll 2
    for (int i = 0; i < count; i += 2)
        __asm__("stp %q2, %q3, %0"
                : "=Ump"(((Words *)at)[i]), "=m"(((Words *)at)[i + 1])
                : "w"(row[i]), "w"(row[i + 1]));
#else
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) store_floats(at + i * VECTOR_BYTES, (Floats)row[i]);
#endif
}

/* Return bits `plane` of each code of step s, from bit `to` on; `row` is the one of that plane that has them. */
INLINE Words plane_of_step(const Words row, const int s, const int plane, const int to) {
    const int bits = plane == FOURS ? 4 : plane == TWOS ? 2 : 1, steps = 8 / bits;
    const uint32_t mask = ((1u << bits) - 1) * 0x01010101;
#if defined(WITH_NEON) /* which shifts bytes: nothing is left to remove from their upper bits */
    if (to == 0 && s % steps == steps - 1) return (Words)((AllBytes)row >> (8 - bits));
#endif
    return moved(row, s % steps * bits, to) & (mask << to);
}

/* Rows of words that have two steps of a vector of columns: of BYTES both. */
typedef struct {
    Words bytes[2], fours, twos, ones;
} StepRows;

/* Return four codes of each column as bytes: step s. They have no sign, but see HAS_SIGNED_BYTES. */
INLINE Words codes_of_step(const StepRows *rows, const int s, const Table levels, const int type) {
    const int planes = planes_of(type), above = planes & FOURS ? 4 : 0;
    if (planes == BYTES) return rows->bytes[s % 2] ^ (0x80808080 ^ sign_bits(type));
    Words found = {0};
    if (planes & FOURS) found = plane_of_step(rows->fours, s, FOURS, 0);
    if (has_levels(type)) return look_up(levels, found) ^ sign_bits(type);
    if (planes & TWOS) found |= plane_of_step(rows->twos, s, TWOS, above);
    if (planes & ONES) found |= plane_of_step(rows->ones, s, ONES, above + (planes & TWOS ? 2 : 0));
    return found;
}

/* Write the codes of steps s and s + 1, of `count` vectors of columns from `at` on. */
INLINE void codes_of_two_steps(Words codes[2][PANEL_VECTORS], const char *at, const int s, const Table levels,
                               const int type, const int count) {
    const int planes = planes_of(type);
    Words row[4][PANEL_VECTORS] = {{{0}}};
    if (planes == BYTES) load_row(row[0], at + s * ROW_BYTES, count), load_row(row[1], at + (s + 1) * ROW_BYTES, count);
    if (planes & FOURS) load_row(row[0], at + s / 2 * ROW_BYTES, count);
    if (planes & TWOS) load_row(row[2], at + (first_row_of(planes, TWOS) + s / 4) * ROW_BYTES, count);
    if (planes & ONES) load_row(row[3], at + first_row_of(planes, ONES) * ROW_BYTES, count);
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
        const StepRows rows = {{row[0][i], row[1][i]}, row[0][i], row[2][i], row[3][i]};
        codes[0][i] = codes_of_step(&rows, s, levels, type);
        codes[1][i] = codes_of_step(&rows, s + 1, levels, type);
    }
}

/* Add the products of four neighbours to each lane: codes of codes_of_step() times those of x, which have a sign. wide:
 * codes have eight bits, else at most seven, so that two products fit 16 bits. */
INLINE Signed add_products(Signed sums, const Words codes, const uint32_t x, const int wide) {
#if defined(__AVX512VNNI__)
    (void)wide;
    return (Signed)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32((int)x));
#elif defined(__AVX512BW__)
    const __m512i all = _mm512_set1_epi32((int)x), ones = _mm512_set1_epi16(1);
    if (!wide) return sums + (Signed)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)codes, all), ones);
    const __m512i low = _mm512_maddubs_epi16((__m512i)(codes & 0x0f0f0f0f), all);
    const __m512i high = _mm512_maddubs_epi16((__m512i)(codes >> 4 & 0x0f0f0f0f), all);
    return sums + (Signed)_mm512_madd_epi16(low, ones) + (Signed)_mm512_madd_epi16(high, _mm512_set1_epi16(16));
#elif defined(__AVXVNNI__)
    (void)wide;
    return (Signed)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32((int)x));
#elif defined(WITH_NEON)
    (void)wide; /* 2 * 128 * 127 fits 16 bits */
    const int8x16_t left = (int8x16_t)codes, right = (int8x16_t)all_words(x);
    const int16x8_t low = vmull_s8(vget_low_s8(left), vget_low_s8(right)), high = vmull_high_s8(left, right);
    return (Signed)vpadalq_s16((int32x4_t)sums, vpaddq_s16(low, high));
#else
    typedef int16_t Shorts __attribute__((vector_size(VECTOR_BYTES)));
    (void)wide; /* 255 * 127 fits 16 bits */
    const uint32_t even = (uint16_t)(int8_t)x | (uint32_t)(int8_t)(x >> 16) << 16;
    const uint32_t odd = (uint16_t)(int8_t)(x >> 8) | (uint32_t)(int8_t)(x >> 24) << 16;
    const Shorts first = (Shorts)(codes & 0x00ff00ff) * (Shorts)all_words(even);
    const Shorts second = (Shorts)(codes >> 8 & 0x00ff00ff) * (Shorts)all_words(odd);
    sums += ((Signed)first >> 16) + ((Signed)((Words)first << 16) >> 16);
    return sums + ((Signed)second >> 16) + ((Signed)((Words)second << 16) >> 16);
#endif
}

/* Where a packed group is, and its head. */
typedef struct {
    const char *head, *group;
} PackedPlace;

/* Codes and scales of one group. */
typedef struct {
    const char *codes; /* of the first of the vectors */
    Table levels;
    Scales scales[INT8_VECTORS];
} GroupParts;

/* Prefetch packed codes while the first vectors of a group are multiplied. */
INLINE void prefetch_codes(const Int8Work *work, const char *group, const int bytes, const int rows) {
#if defined(NEON_DOT) /* a loop over some lines would take more instructions than all lines */
    const char *ahead = group + (rows == 1 ? INT8_PREFETCH_BYTES : work->ahead);
    __asm__("" : "+r"(ahead)); /* so that lines are offsets from it */
#pragma GCC unroll 20
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(ahead + line);
#else
    if (rows == 1)
#pragma GCC unroll 20
        for (int line = 0; line < bytes; line += 64) __builtin_prefetch(group + INT8_PREFETCH_BYTES + line);
    else if (VECTOR_BYTES == 64 && work->line_step > 64) /* the next panel: it would push x out of the first level cache */
        for (int line = work->first_line; line < bytes; line += work->line_step)
            __builtin_prefetch(group + work->ahead + line, 0, 2);
    else
        for (int line = work->first_line; line < bytes; line += work->line_step)
            __builtin_prefetch(group + work->ahead + line);
#endif
}

INLINE Scales scales_of_unpacked(const Int8Group *group, const int v) {
    Scales scales;
    for (int half = 0; half < 2; half++) {
        scales.scale[half] = load_floats(group->scale[half] + v * LANES);
        scales.minimum[half] = load_floats(group->minimum[half] + v * LANES);
    }
    return scales;
}

INLINE GroupParts parts_of_group(const Int8Work *work, const OwnParts *own, const PackedPlace place, const int64_t g,
                                 const int v, const int rows, const int type, const int is_unpacked) {
    GroupParts parts;
    if (is_unpacked) {
        const Int8Group *group = (const Int8Group *)work->panel + (g - work->first);
        parts.codes = (const char *)group->codes + v * VECTOR_BYTES;
#pragma GCC unroll 2
        for (int i = 0; i < INT8_VECTORS; i++) parts.scales[i] = scales_of_unpacked(group, v + i);
        return parts;
    }
    const QuantizedLayout layout = layout_of(type);
    if (v == 0) prefetch_codes(work, place.group, layout.group_bytes, rows);
    parts.codes = place.group + layout.scale_bytes + v * VECTOR_BYTES;
    parts.levels = own->levels;
#pragma GCC unroll 2
    for (int i = 0; i < INT8_VECTORS; i++)
        parts.scales[i] = load_scales(place.head, place.group, v + i, own->unit, type);
    return parts;
}

/* Return -128 times the sum of the codes of x that belong to a scale: of one half of a group, or of all of it. In all
 * lanes, because two broadcasts cost less than one of a number that was computed. */
INLINE Signed zeros_of_x(const Int8Block *x, const int half, const int type) {
    if (!has_halves(type)) return (Signed)all_words((uint32_t)x->zeros);
    const Signed first = (Signed)all_words((uint32_t)x->zeros_of_first);
    return half ? (Signed)all_words((uint32_t)x->zeros) - first : first;
}

/* Return what sums of products with a row's block begin with: what the zero of the codes takes off. */
INLINE Signed zeros_of(const Int8Block *x, const int half, const int zero_bits, const int type, const int is_unpacked) {
    if (has_minimum(type) || (HAS_SIGNED_CODES && is_unpacked) || (HAS_SIGNED_BYTES && is_wide(type))) return (Signed){0};
    if (is_wide(type) || (HAS_DOT_PRODUCT && is_unpacked)) return zeros_of_x(x, half, type); /* zero_bits is 7 */
    return zeros_of_x(x, half, type) >> (7 - zero_bits);
}

/* Load steps s and s + 1 of a group, whose codes begin at `at`, of `count` vectors. */
INLINE void load_two_steps(Words codes[2][PANEL_VECTORS], const char *at, const int s, const Table levels,
                           const int type, const int is_unpacked, const int count) {
    if (is_unpacked) {
        load_row(codes[0], at + s * ROW_BYTES, count);
        load_row(codes[1], at + (s + 1) * ROW_BYTES, count);
    } else {
        codes_of_two_steps(codes, at, s, levels, type, count);
    }
}

#if (defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)) || (defined(WITH_NEON) && !defined(NEON_DOT))
/* Return the largest code of a type; of unpacked codes that of all types that share the function. */
INLINE int largest_code(const int type, const int is_unpacked) {
    const int planes = planes_of(type);
    if (has_levels(type)) return BLOCK_TYPES[type].levels == LEVELS_OF_FP4 ? 28 : 126;
    if (planes & FOURS) return planes & TWOS ? 63 : planes & ONES || is_unpacked ? 31 : 15;
    return planes & ONES ? 7 : 3;
}

/* Return how many steps of codes have products whose sums fit 16 bits; 0 if those of one step only do with a sign: a pair's
 * sum is at most 2 * 128 * 127. */
INLINE int steps_in_16_bits(const int type, const int is_unpacked) {
    if (is_wide(type)) return 0;
    const int fitting = INT16_MAX / (largest_code(type, is_unpacked) * 2 * 127);
#if defined(WITH_NEON)
    return fitting < 2 ? 0 : fitting < 4 ? 2 : fitting < 8 ? 4 : 8;
#endif
    return fitting < 4 ? fitting : 4;
}
#endif

#if defined(WITH_NEON) && !defined(NEON_DOT)
/* Add the products of `count` steps from s on: an even number. */
INLINE void sum_in_16_bits(Signed sums[INT8_ROWS][INT8_VECTORS], const GroupParts *parts, const Int8Work *work,
                           const int64_t block, const int s, const int count, const int rows, const int type,
                           const int is_unpacked) {
    int16x8_t low[INT8_ROWS][INT8_VECTORS], high[INT8_ROWS][INT8_VECTORS];
    Words codes[2][PANEL_VECTORS];
#pragma GCC unroll 8
    for (int step = 0; step < count; step++) {
        if (step % 2 == 0)
            load_two_steps(codes, parts->codes, s + step, parts->levels, type, is_unpacked, INT8_VECTORS);
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++) {
            const int8_t *at = work->x[row * work->x_stride + block].codes + (s + step) * 4;
            const int8x16_t x = (int8x16_t)vld1q_dup_u32((const uint32_t *)at);
#pragma GCC unroll 2
            for (int i = 0; i < INT8_VECTORS; i++) {
                const int8x16_t four = (int8x16_t)codes[step % 2][i];
                const int8x8_t first = vget_low_s8(four);
                low[row][i] = step ? vmlal_s8(low[row][i], first, vget_low_s8(x)) : vmull_s8(first, vget_low_s8(x));
                high[row][i] = step ? vmlal_high_s8(high[row][i], four, x) : vmull_high_s8(four, x);
            }
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int i = 0; i < INT8_VECTORS; i++)
            sums[row][i] = (Signed)vpadalq_s16((int32x4_t)sums[row][i], vpaddq_s16(low[row][i], high[row][i]));
}
#elif defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)

/* Load step s of a group. */
INLINE void load_codes_of_step(Words codes[INT8_VECTORS], const GroupParts *parts, const int s, const int type,
                      const int is_unpacked) {
    Words two[2][PANEL_VECTORS];
    load_two_steps(two, parts->codes, s / 2 * 2, parts->levels, type, is_unpacked, INT8_VECTORS);
#pragma GCC unroll 2
    for (int i = 0; i < INT8_VECTORS; i++) codes[i] = two[s % 2][i];
}

/* Add the products of `count` steps from s on. */
INLINE void sum_in_16_bits(Signed sums[INT8_ROWS][INT8_VECTORS], const GroupParts *parts, const Int8Work *work,
                           const int64_t block, const int s, const int count, const int rows, const int type,
                           const int is_unpacked) {
    __m256i narrow[INT8_ROWS][INT8_VECTORS];
#pragma GCC unroll 4
    for (int step = 0; step < count; step++) {
        Words codes[INT8_VECTORS];
        __m256i sizes[INT8_VECTORS];
        load_codes_of_step(codes, parts, s + step, type, is_unpacked);
#pragma GCC unroll 2
        for (int i = 0; i < INT8_VECTORS; i++)
            sizes[i] = is_wide(type) ? _mm256_abs_epi8((__m256i)codes[i]) : (__m256i)codes[i];
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++) {
            int32_t four;
            memcpy(&four, work->x[row * work->x_stride + block].codes + (s + step) * 4, sizeof four);
            const __m256i x = _mm256_set1_epi32(four);
#pragma GCC unroll 2
            for (int i = 0; i < INT8_VECTORS; i++) {
                const __m256i signs = is_wide(type) ? _mm256_sign_epi8(x, (__m256i)codes[i]) : x;
                const __m256i products = _mm256_maddubs_epi16(sizes[i], signs);
                narrow[row][i] = step ? _mm256_add_epi16(narrow[row][i], products) : products;
                if (count > 1) __asm__("" : "+x"(narrow[row][i])); /* else GCC moves products ahead, more than registers hold */
            }
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int i = 0; i < INT8_VECTORS; i++) {
            sums[row][i] += (Signed)_mm256_madd_epi16(narrow[row][i], _mm256_set1_epi16(1));
            __asm__("" : "+x"(sums[row][i]));
        }
}
#endif

/* Sum the products of one half of a group, or of all of it. */
INLINE void sum_steps(Signed sums[INT8_ROWS][INT8_VECTORS], const GroupParts *parts, const Int8Work *work,
                      const int64_t block, const int half, const int rows, const int type, const int is_unpacked) {
    const int count = has_halves(type) ? 4 : 8;
    const int zero_bits = is_unpacked ? work->zero_bits : BLOCK_TYPES[type].zero_bits;
    Words codes[2][PANEL_VECTORS];
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++) {
        const Signed zeros = zeros_of(work->x + row * work->x_stride + block, half, zero_bits, type, is_unpacked);
#pragma GCC unroll 2
        for (int i = 0; i < INT8_VECTORS; i++) sums[row][i] = zeros;
    }
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
    const int fitting = steps_in_16_bits(type, is_unpacked), steps = fitting > 0 ? fitting : 1;
#pragma GCC unroll 8
    for (int step = 0; step < count; step += steps)
        sum_in_16_bits(sums, parts, work, block, half * count + step, steps, rows, type, is_unpacked);
    return;
#elif defined(WITH_NEON) && !defined(NEON_DOT)
    const int steps = steps_in_16_bits(type, is_unpacked);
#pragma GCC unroll 4
    for (int step = 0; steps && step < count; step += steps < count ? steps : count)
        sum_in_16_bits(sums, parts, work, block, half * count + step, steps < count ? steps : count, rows, type,
                       is_unpacked);
    if (steps) return;
#endif
#pragma GCC unroll 8
    for (int step = 0; step < count; step++) {
        const int s = half * count + step;
        if (s % 2 == 0) load_two_steps(codes, parts->codes, s, parts->levels, type, is_unpacked, INT8_VECTORS);
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++) {
            uint32_t x;
            memcpy(&x, work->x[row * work->x_stride + block].codes + s * 4, sizeof x);
#pragma GCC unroll 2
            for (int i = 0; i < INT8_VECTORS; i++)
                sums[row][i] = add_products(sums[row][i], codes[s % 2][i], x, is_wide(type));
        }
    }
}

/* Add the products of one half of a group (of types without halves of all of it), scaled, to values. */
INLINE void add_half(Floats values[INT8_ROWS][INT8_VECTORS], const GroupParts *parts, const Int8Work *work,
                     const int64_t block, const int half, const int rows, const int type, const int is_unpacked) {
    Signed sums[INT8_ROWS][INT8_VECTORS];
    sum_steps(sums, parts, work, block, half, rows, type, is_unpacked);
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int i = 0; i < INT8_VECTORS; i++) {
            const Floats value = __builtin_convertvector(sums[row][i], Floats) * parts->scales[i].scale[half];
            values[row][i] = half ? values[row][i] + value : value;
        }
}

/* Add what minima give: the sum of x times each. */
INLINE Floats with_minima(Floats value, const Int8Block *x, const Floats minimum[2], const int type) {
    if (!has_minimum(type)) return value;
    if (!has_halves(type)) return value + all_floats(x->sum) * minimum[0];
    for (int half = 0; half < 2; half++)
        value = value + __builtin_convertvector(-(zeros_of_x(x, half, type) >> 7), Floats) * minimum[half];
    return value;
}

/* Add a group's values to the rows' results. */
INLINE void multiply_group(Floats out[INT8_ROWS][INT8_VECTORS], const Int8Work *work, const OwnParts *own,
                           const PackedPlace place, const int64_t g, const int v, const int rows, const int type,
                           const int is_unpacked) {
    const GroupParts parts = parts_of_group(work, own, place, g, v, rows, type, is_unpacked);
    const int64_t block = g - work->first;
    Floats values[INT8_ROWS][INT8_VECTORS];
    add_half(values, &parts, work, block, 0, rows, type, is_unpacked);
    if (has_halves(type)) add_half(values, &parts, work, block, 1, rows, type, is_unpacked);
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++) {
        const Int8Block *x = work->x + row * work->x_stride + block;
        const Floats scale = all_floats(x->scale);
#pragma GCC unroll 2
        for (int i = 0; i < INT8_VECTORS; i++) {
            values[row][i] = with_minima(values[row][i], x, parts.scales[i].minimum, type);
            out[row][i] = out[row][i] + values[row][i] * scale;
        }
    }
}

/* Multiply groups [first, last) with vectors from v on. */
INLINE void multiply_vectors_of_groups(const Int8Work *work, const OwnParts *own, const int64_t first, const int64_t last,
                                       const int v, const int rows, const int type, const int is_unpacked) {
    Floats out[INT8_ROWS][INT8_VECTORS];
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int i = 0; i < INT8_VECTORS; i++) out[row][i] = load_floats(work->out + row * PANEL_COLUMNS + (v + i) * LANES);
    const QuantizedLayout layout = layout_of(type);
#pragma GCC unroll 1
    for (int64_t g = first; g < last;) { /* block by block: the compiler loads the factors of a block's scales once */
        const int64_t next = (g / layout.groups + 1) * layout.groups;
        const int64_t end = is_unpacked || layout.groups == 1 || next > last ? last : next;
        PackedPlace place = {work->panel + head_offset(layout, g), work->panel + group_offset(layout, g)};
#pragma GCC unroll 1
        for (; g < end; g++, place.group += layout.group_bytes)
            multiply_group(out, work, own, place, g, v, rows, type, is_unpacked);
    }
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int i = 0; i < INT8_VECTORS; i++) store_floats(work->out + row * PANEL_COLUMNS + (v + i) * LANES, out[row][i]);
}

INLINE void multiply_groups(const Int8Work *work, const int rows, const int type, const int is_unpacked) {
    const OwnParts own = is_unpacked ? (OwnParts){.unit = 1.0f} : own_parts(work->type, type);
    const int64_t visited = visited_groups(is_unpacked);
    for (int64_t first = work->first; first < work->last; first += visited) {
        const int64_t last = first + visited < work->last ? first + visited : work->last;
        for (int v = 0; v < PANEL_VECTORS; v += INT8_VECTORS)
            multiply_vectors_of_groups(work, &own, first, last, v, rows, type, is_unpacked);
    }
}

#endif
