/* At most three rows of 8-bit blocks times packed groups by SDOT, for the variants neon_dot and neon_bf16.
 *
 * The instruction adds products of four codes to each lane of a sum: those of four columns, times one lane of x. So a
 * block of x is loaded once for all columns of a pass, by one instruction, and its scale and sums are used where they
 * lie. A pass has as many vectors of columns as there are registers for: all of a panel with one row.
 */
#ifndef INT8_LANES_H
#define INT8_LANES_H

#include "products/int8_block.h"

enum { LANE_ROWS = INT8_PACKED_ROWS };

/* Where an Int8Block has what follows its codes, as lanes of the third vector. */
enum { SCALE_LANE, SUM_LANE, ZEROS_LANE, FIRST_LANE };
_Static_assert(sizeof(Int8Block) == 3 * VECTOR_BYTES, "codes and the rest are three vectors");
_Static_assert(offsetof(Int8Block, scale) == 2 * VECTOR_BYTES, "codes are two of them");

typedef struct {
    Words codes[2], rest;
} LoadedBlock;

/* Load a block, and let `at` point to the next one. */
INLINE LoadedBlock load_block(const Int8Block **at) {
    LoadedBlock x;
    load_row(x.codes, (const char *)(*at)->codes, 2);
    x.rest = (Words)vld1q_u32((const uint32_t *)&(*at)->scale);
    (*at)++;
    return x;
}

/* Vectors of columns of a pass. */
INLINE int lane_vectors(const int rows) { return rows == 1 ? PANEL_VECTORS : rows == 2 ? 4 : 2; }

/* Return the sum of the codes of x that belong to a scale, in each lane. */
INLINE Signed sum_of_block(const LoadedBlock *x, const int half, const int type) {
    const Signed rest = (Signed)x->rest, sum = -((Signed)vdupq_laneq_s32((int32x4_t)rest, ZEROS_LANE) >> 7);
    if (!has_halves(type)) return sum;
    const Signed first = -((Signed)vdupq_laneq_s32((int32x4_t)rest, FIRST_LANE) >> 7);
    return half ? sum - first : first;
}

/* Return what sums of products with a row's block begin with: what the zero of the codes takes off. */
INLINE Signed zeros_of_block(const LoadedBlock *x, const int half, const int type) {
    const int zero_bits = BLOCK_TYPES[type].zero_bits;
    if (has_minimum(type) || is_wide(type)) return (Signed){0};
    if (has_halves(type)) return -(sum_of_block(x, half, type) << zero_bits);
    return (Signed)vdupq_laneq_s32((int32x4_t)((Signed)x->rest >> (7 - zero_bits)), ZEROS_LANE);
}

/* Add the products of codes with a lane of x. in_place: of many sums that begin with zeros of x, GCC 12 would copy some. */
INLINE Signed add_codes(Signed sum, const Words codes, const Words x, const int lane, const int in_place) {
#if defined(__GNUC__) && !defined(__clang__) /* which needs a number for "i" before it unrolls loops */
    if (in_place) {
        __asm__("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sum) : "w"(codes), "w"(x), "i"(lane));
        return sum;
    }
#else
    (void)in_place;
#endif
    const int32x4_t before = (int32x4_t)sum;
    const int8x16_t left = (int8x16_t)codes, right = (int8x16_t)x;
    switch (lane) {
    case 0: return (Signed)vdotq_laneq_s32(before, left, right, 0);
    case 1: return (Signed)vdotq_laneq_s32(before, left, right, 1);
    case 2: return (Signed)vdotq_laneq_s32(before, left, right, 2);
    default: return (Signed)vdotq_laneq_s32(before, left, right, 3);
    }
}

/* A packed group, from a vector of columns on. */
typedef struct {
    const char *head, *group;
    const OwnParts *own;
    int v;
    const float *factors; /* of load_factors() */
} GroupPlace;

/* Its scales are loaded after the products: before, the sums need all registers. */
INLINE Scales scales_of_place(const GroupPlace *place, const int i, const int type) {
    return load_scales(place->head, place->group, place->v + i, place->own->unit, type);
}

/* Add the products of steps s and s + 1, whose codes of x are lanes s % 4 and s % 4 + 1. */
INLINE void add_two_steps(Signed sums[LANE_ROWS][PANEL_VECTORS], const GroupPlace *place,
                          const LoadedBlock x[LANE_ROWS], const int s, const int rows, const int type) {
    const char *at = place->group + layout_of(type).scale_bytes + place->v * VECTOR_BYTES;
    const int in_place = rows > 2 && !has_minimum(type);
    Words codes[2][PANEL_VECTORS];
    codes_of_two_steps(codes, at, s, place->own->levels, type, lane_vectors(rows));
#pragma GCC unroll 2
    for (int step = 0; step < 2; step++)
#pragma GCC unroll 8
        for (int i = 0; i < lane_vectors(rows); i++)
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++)
                sums[row][i] = add_codes(sums[row][i], codes[step][i], x[row].codes[s / 4], s % 4 + step, in_place);
}

/* Add the products of one half of a group (of types without halves of all of it), scaled, to values. */
INLINE void add_half_by_lanes(Floats values[LANE_ROWS][PANEL_VECTORS], const GroupPlace *place,
                              const LoadedBlock x[LANE_ROWS], const int half, const int rows, const int type) {
    const int count = has_halves(type) ? 4 : 8;
    Signed sums[LANE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int i = 0; i < lane_vectors(rows); i++) sums[row][i] = zeros_of_block(&x[row], half, type);
#pragma GCC unroll 8
    for (int step = 0; step < count; step += 2)
        add_two_steps(sums, place, x, half * count + step, rows, type);
#pragma GCC unroll 8
    for (int i = 0; i < lane_vectors(rows); i++) {
        const Floats scale = scales_of_place(place, i, type).scale[half];
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            const Floats value = __builtin_convertvector(sums[row][i], Floats) * scale;
            values[row][i] = half ? values[row][i] + value : value;
        }
    }
}

/* Add what minima give: the sum of x times each. */
INLINE Floats with_minima_by_lanes(Floats value, const LoadedBlock *x, const Floats minimum[2], const int type) {
    if (!has_minimum(type)) return value;
    if (!has_halves(type))
        return value + (Floats)vmulq_laneq_f32((float32x4_t)minimum[0], (float32x4_t)x->rest, SUM_LANE);
    for (int half = 0; half < 2; half++)
        value = value + __builtin_convertvector(sum_of_block(x, half, type), Floats) * minimum[half];
    return value;
}

/* Add a group's values to the rows' results. */
INLINE void multiply_group_by_lanes(Floats out[LANE_ROWS][PANEL_VECTORS], const GroupPlace *place,
                                    const LoadedBlock x[LANE_ROWS], const int rows, const int type) {
    Floats values[LANE_ROWS][PANEL_VECTORS];
    add_half_by_lanes(values, place, x, 0, rows, type);
    if (has_halves(type)) add_half_by_lanes(values, place, x, 1, rows, type);
#pragma GCC unroll 8
    for (int i = 0; i < lane_vectors(rows); i++) {
        const Scales scales = scales_of_place(place, i, type);
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            const Floats value = with_minima_by_lanes(values[row][i], &x[row], scales.minimum, type);
            const float32x4_t rest = (float32x4_t)x[row].rest;
            out[row][i] = out[row][i] + (Floats)vmulq_laneq_f32((float32x4_t)value, rest, SCALE_LANE);
        }
    }
}

/* Whether one row is multiplied with a packed group by all_columns_of_group(). */
INLINE int has_all_columns(const int rows, const int type) {
    const int planes = planes_of(type), scales = BLOCK_TYPES[type].scales;
    return rows == 1 && !has_levels(type) && (scales == FLOATS || scales == UNSIGNED) &&
           (planes == FOURS || planes == BYTES);
}

/* The products of four vectors of columns with lanes of x: two steps of FOURS, which a row of words has, or one of BYTES. */
#define FOUR_OF_FOURS(q, r, s, t, x, lane, next)                                                                     \
    "ld1 {v28.4s-v31.4s}, [%[at]], #64\n\t"                                                                          \
    STEPS_OF_WORDS("28", "24", q, x, lane, next) STEPS_OF_WORDS("29", "25", r, x, lane, next)                         \
    STEPS_OF_WORDS("30", "26", s, x, lane, next) STEPS_OF_WORDS("31", "27", t, x, lane, next)
#define STEPS_OF_WORDS(words, low, sum, x, lane, next)                                                               \
    "and v" low ".16b, v" words ".16b, %[mask].16b\n\tushr v" words ".16b, v" words ".16b, #4\n\t"                   \
    ADD_STEP(sum, low, x, lane) ADD_STEP(sum, words, x, next)
#define FOUR_OF_BYTES(q, r, s, t, x, lane, next)                                                                     \
    "ld1 {v28.4s-v31.4s}, [%[at]], #64\n\t"                                                                          \
    ADD_STEP(q, "28", x, lane) ADD_STEP(r, "29", x, lane) ADD_STEP(s, "30", x, lane) ADD_STEP(t, "31", x, lane)
#define ADD_STEP(sum, codes, x, lane) "sdot %[" sum "].4s, v" codes ".16b, %[" x "].4b[" lane "]\n\t"
#define ALL_COLUMNS(FOUR, x, lane, next)                                                                             \
    FOUR("s0", "s1", "s2", "s3", x, lane, next) FOUR("s4", "s5", "s6", "s7", x, lane, next)
#define EACH_SUM(X) X("s0") X("s1") X("s2") X("s3") X("s4") X("s5") X("s6")
#define BEGIN_WITH_ZEROS(sum) "mov %[" sum "].16b, %[s7].16b\n\t"
#define BEGIN_WITH_NOTHING(sum) "movi %[" sum "].4s, #0\n\t"

/* Sum the products of a packed group of all columns with one row. In one piece: GCC 12 would move sums between
 * registers. */
INLINE void sum_all_columns(Signed sums[PANEL_VECTORS], const GroupPlace *place, const LoadedBlock *x, const int type) {
    const char *const codes = place->group + layout_of(type).scale_bytes, *at = codes;
#define SUMS_OF_COLUMNS                                                                                              \
    [s0] "=&w"(sums[0]), [s1] "=&w"(sums[1]), [s2] "=&w"(sums[2]), [s3] "=&w"(sums[3]), [s4] "=&w"(sums[4]),             \
        [s5] "=&w"(sums[5]), [s6] "=&w"(sums[6]), [s7] "=&w"(sums[7]), [at] "+&r"(at)
#define CODES_OF_COLUMNS(steps)                                                                                      \
    [x0] "w"(x->codes[0]), [x1] "w"(x->codes[1]), "m"(*(const char(*)[(steps) * ROW_BYTES])codes)
#define LOADED "v28", "v29", "v30", "v31"
#define MASKED "v24", "v25", "v26", "v27"
#define ALL_FOURS                                                                                       \
    ALL_COLUMNS(FOUR_OF_FOURS, "x0", "0", "1") ALL_COLUMNS(FOUR_OF_FOURS, "x0", "2", "3")                \
    ALL_COLUMNS(FOUR_OF_FOURS, "x1", "0", "1") ALL_COLUMNS(FOUR_OF_FOURS, "x1", "2", "3")
#define ALL_BYTES                                                                                       \
    ALL_COLUMNS(FOUR_OF_BYTES, "x0", "0", ) ALL_COLUMNS(FOUR_OF_BYTES, "x0", "1", )                      \
    ALL_COLUMNS(FOUR_OF_BYTES, "x0", "2", ) ALL_COLUMNS(FOUR_OF_BYTES, "x0", "3", )                      \
    ALL_COLUMNS(FOUR_OF_BYTES, "x1", "0", ) ALL_COLUMNS(FOUR_OF_BYTES, "x1", "1", )                      \
    ALL_COLUMNS(FOUR_OF_BYTES, "x1", "2", ) ALL_COLUMNS(FOUR_OF_BYTES, "x1", "3", )
    if (planes_of(type) == BYTES)
        __asm__(EACH_SUM(BEGIN_WITH_NOTHING) BEGIN_WITH_NOTHING("s7") ALL_BYTES
                : SUMS_OF_COLUMNS : CODES_OF_COLUMNS(8) : LOADED);
    else if (has_minimum(type))
        __asm__(EACH_SUM(BEGIN_WITH_NOTHING) BEGIN_WITH_NOTHING("s7") ALL_FOURS
                : SUMS_OF_COLUMNS : CODES_OF_COLUMNS(4), [mask] "w"(all_words(0x0f0f0f0f)) : LOADED, MASKED);
    else
        __asm__(EACH_SUM(BEGIN_WITH_ZEROS) ALL_FOURS
                : SUMS_OF_COLUMNS
                : CODES_OF_COLUMNS(4), [mask] "w"(all_words(0x0f0f0f0f)), "7"(zeros_of_block(x, 0, type)) : LOADED, MASKED);
}

/* Write the factors of a head's UNSIGNED scales, then those of its minima. A byte as a float16 is 2 ** -24 of its number. */
INLINE void load_factors(float factors[2 * PANEL_COLUMNS], const char *head) {
#pragma GCC unroll 16
    for (int i = 0; i < 2 * PANEL_COLUMNS; i += LANES)
        store_floats(factors + i, load_float16(head + i * 2) * (i < PANEL_COLUMNS ? 0x1p24f : -0x1p24f));
}

/* Load four vectors by one instruction. */
INLINE void load_four(Words four[4], const void *from) {
    register Words a __asm__("v28"), b __asm__("v29"), c __asm__("v30"), d __asm__("v31");
    __asm__("ld1 {v28.4s-v31.4s}, [%4]"
            : "=w"(a), "=w"(b), "=w"(c), "=w"(d)
            : "r"(from), "m"(*(const char(*)[4 * VECTOR_BYTES])from));
    four[0] = a, four[1] = b, four[2] = c, four[3] = d;
}

/* Write the FLOATS or UNSIGNED scales (which = 0) or minima (which = 1) of vectors v to v + 3 of a packed group, whose
 * rows of FLOATS, or of both scales and minima, are loaded. */
INLINE void four_scales(Floats four[4], const Words rows[4], const float *factors, const int which, const int v,
                        const int type) {
    const int is_unsigned = BLOCK_TYPES[type].scales == UNSIGNED;
    const uint8x16_t bytes = (uint8x16_t)rows[2 * which + v / 4];
    Words each[4];
    if (is_unsigned) load_row(each, (const char *)(factors + which * PANEL_COLUMNS + v * LANES), 4);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const uint16x8_t wide = i < 2 ? vmovl_u8(vget_low_u8(bytes)) : vmovl_high_u8(bytes);
        const float16x8_t both = is_unsigned ? (float16x8_t)wide : (float16x8_t)rows[(v + i) / 2];
        four[i] = (Floats)(i % 2 ? vcvt_high_f32_f16(both) : vcvt_f32_f16(vget_low_f16(both)));
        if (is_unsigned) four[i] = four[i] * (Floats)each[i];
    }
}

/* Add a packed group's values of all columns to one row's results. */
INLINE void all_columns_of_group(Floats out[PANEL_VECTORS], const GroupPlace *place, const LoadedBlock *x,
                                 const int type) {
    const int has_rows_of_minima = has_minimum(type) && BLOCK_TYPES[type].scales == FLOATS;
    Signed sums[PANEL_VECTORS];
    Words scales[4], minima[4];
    sum_all_columns(sums, place, x, type);
    load_four(scales, place->group);
    if (has_rows_of_minima) load_four(minima, place->group + 2 * PANEL_COLUMNS);
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECTORS; v += 4) {
        Floats values[4], minimum[2] = {{0}}, four[4];
        four_scales(four, scales, place->factors, 0, v, type);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) values[i] = __builtin_convertvector(sums[v + i], Floats) * four[i];
        if (has_rows_of_minima)
            four_scales(four, minima, place->factors, 0, v, type);
        else if (has_minimum(type))
            four_scales(four, scales, place->factors, 1, v, type);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            minimum[0] = four[i];
            const float32x4_t value = (float32x4_t)with_minima_by_lanes(values[i], x, minimum, type);
            out[v + i] = out[v + i] + (Floats)vmulq_laneq_f32(value, (float32x4_t)x->rest, SCALE_LANE);
        }
    }
}

/* Multiply with all groups of a packed panel. The compiler loads the factors of a block's scales once. */
INLINE void pass_over_packed(Floats out[LANE_ROWS][PANEL_VECTORS], const Int8Work *work, const OwnParts *own,
                             const Int8Block *at[LANE_ROWS], const int v, const int rows, const int type) {
    const QuantizedLayout layout = layout_of(type);
    const char *head = work->panel, *end = work->panel + head_offset(layout, work->last);
    const int has_factors = has_all_columns(rows, type) && BLOCK_TYPES[type].scales == UNSIGNED;
    float factors[2 * PANEL_COLUMNS];
#pragma GCC unroll 1
    while (head < end) {
        if (has_factors) load_factors(factors, head);
        const char *group = head + layout.head_bytes, *next = group + layout.groups * layout.group_bytes;
#pragma GCC unroll 1
        for (; group < next; group += layout.group_bytes) {
            if (v == 0) prefetch_codes(work, group, layout.group_bytes, rows);
            const GroupPlace place = {.head = head, .group = group, .own = own, .v = v, .factors = factors};
            LoadedBlock x[LANE_ROWS];
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++) x[row] = load_block(&at[row]);
            if (has_all_columns(rows, type))
                all_columns_of_group(out[0], &place, &x[0], type);
            else
                multiply_group_by_lanes(out, &place, x, rows, type);
        }
        head = next;
    }
}

/* Multiply some rows with a whole panel. */
INLINE void multiply_by_lanes(const Int8Work *work, const int rows, const int type) {
    const OwnParts own = own_parts(work->type, type);
    const int count = lane_vectors(rows);
    float *const sums = work->out;
    for (int v = 0; v < PANEL_VECTORS; v += count) {
        const Int8Block *at[LANE_ROWS];
        Floats out[LANE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            at[row] = work->x + row * work->x_stride;
#pragma GCC unroll 8
            for (int i = 0; i < count; i++)
                out[row][i] = load_floats(sums + row * PANEL_COLUMNS + (v + i) * LANES);
        }
        pass_over_packed(out, work, &own, at, v, rows, type);
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
            for (int i = 0; i < count; i++)
                store_floats(sums + row * PANEL_COLUMNS + (v + i) * LANES, out[row][i]);
    }
}

#endif
