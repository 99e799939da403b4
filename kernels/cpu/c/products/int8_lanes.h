/* Some rows of 8-bit blocks times groups of a panel by SDOT, for the variants neon_dot and neon_bf16.
 *
 * The instruction adds products of four codes to each lane of a sum: those of four columns, times one lane of x. So a
 * block of x is loaded once for all columns of a pass, by one instruction, and its scale and sums are used where they
 * lie. A pass has as many vectors of columns as there are registers for: all of a panel with one row.
 */
#ifndef INT8_LANES_H
#define INT8_LANES_H

#include "products/int8_block.h"

enum { LANE_ROWS = 4 };

/* Where an Int8Block has what follows its codes, as lanes of the third vector. */
enum { SCALE_LANE, SUM_LANE, ZEROS_LANE, FIRST_LANE };
_Static_assert(sizeof(Int8Block) == 3 * VECTOR_BYTES, "codes and the rest are three vectors");
_Static_assert(offsetof(Int8Block, scale) == 2 * VECTOR_BYTES, "codes are two of them");

typedef struct {
    Words codes[2], rest;
} LoadedBlock;

/* Load a block. */
INLINE LoadedBlock load_block(const Int8Block *at) {
    LoadedBlock x;
    load_row(x.codes, (const char *)at->codes, 2);
    x.rest = (Words)vld1q_u32((const uint32_t *)&at->scale);
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
INLINE Signed zeros_of_block(const LoadedBlock *x, const int half, const int type, const int is_unpacked) {
    const int zero_bits = BLOCK_TYPES[type].zero_bits;
    if (has_minimum(type) || is_unpacked || is_wide(type)) return (Signed){0};
    if (has_halves(type)) return -(sum_of_block(x, half, type) << zero_bits);
    return (Signed)vdupq_laneq_s32((int32x4_t)((Signed)x->rest >> (7 - zero_bits)), ZEROS_LANE);
}

INLINE Signed add_codes(const Signed sum, const Words codes, const Words x, const int lane) {
    const int32x4_t before = (int32x4_t)sum;
    const int8x16_t left = (int8x16_t)codes, right = (int8x16_t)x;
    switch (lane) {
    case 0: return (Signed)vdotq_laneq_s32(before, left, right, 0);
    case 1: return (Signed)vdotq_laneq_s32(before, left, right, 1);
    case 2: return (Signed)vdotq_laneq_s32(before, left, right, 2);
    default: return (Signed)vdotq_laneq_s32(before, left, right, 3);
    }
}

/* A group, from a vector of columns on. */
typedef struct {
    const char *head, *group; /* if it is packed */
    const Int8Group *unpacked;
    const OwnParts *own;
    int v;
} GroupPlace;

/* Its scales are loaded after the products: before, the sums need all registers. */
INLINE Scales scales_of_place(const GroupPlace *place, const int i, const int type, const int is_unpacked) {
    if (is_unpacked) return scales_of_unpacked(place->unpacked, place->v + i);
    return load_scales(place->head, place->group, place->v + i, place->own->unit, type);
}

/* Add the products of steps s and s + 1, whose codes of x are lanes s % 4 and s % 4 + 1. */
INLINE void add_two_steps(Signed sums[LANE_ROWS][PANEL_VECTORS], const GroupPlace *place,
                          const LoadedBlock x[LANE_ROWS], const int s, const int rows, const int type,
                          const int is_unpacked) {
    const char *at = is_unpacked ? (const char *)place->unpacked->codes : place->group + layout_of(type).scale_bytes;
    const Table levels = is_unpacked ? (Table){0} : place->own->levels;
    Words codes[2][PANEL_VECTORS];
    load_two_steps(codes, at + place->v * VECTOR_BYTES, s, levels, type, is_unpacked, lane_vectors(rows));
#pragma GCC unroll 2
    for (int step = 0; step < 2; step++)
#pragma GCC unroll 8
        for (int i = 0; i < lane_vectors(rows); i++)
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++)
                sums[row][i] = add_codes(sums[row][i], codes[step][i], x[row].codes[s / 4], s % 4 + step);
}

/* Add the products of one half of a group (of types without halves of all of it), scaled, to values. */
INLINE void add_half_by_lanes(Floats values[LANE_ROWS][PANEL_VECTORS], const GroupPlace *place,
                              const LoadedBlock x[LANE_ROWS], const int half, const int rows, const int type,
                              const int is_unpacked) {
    const int count = has_halves(type) ? 4 : 8;
    Signed sums[LANE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int i = 0; i < lane_vectors(rows); i++) sums[row][i] = zeros_of_block(&x[row], half, type, is_unpacked);
#pragma GCC unroll 8
    for (int step = 0; step < count; step += 2)
        add_two_steps(sums, place, x, half * count + step, rows, type, is_unpacked);
#pragma GCC unroll 8
    for (int i = 0; i < lane_vectors(rows); i++) {
        const Floats scale = scales_of_place(place, i, type, is_unpacked).scale[half];
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
                                    const LoadedBlock x[LANE_ROWS], const int rows, const int type,
                                    const int is_unpacked) {
    Floats values[LANE_ROWS][PANEL_VECTORS];
    add_half_by_lanes(values, place, x, 0, rows, type, is_unpacked);
    if (has_halves(type)) add_half_by_lanes(values, place, x, 1, rows, type, is_unpacked);
#pragma GCC unroll 8
    for (int i = 0; i < lane_vectors(rows); i++) {
        const Scales scales = scales_of_place(place, i, type, is_unpacked);
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            const Floats value = with_minima_by_lanes(values[row][i], &x[row], scales.minimum, type);
            const float32x4_t rest = (float32x4_t)x[row].rest;
            out[row][i] = out[row][i] + (Floats)vmulq_laneq_f32((float32x4_t)value, rest, SCALE_LANE);
        }
    }
}

/* Load the rows' blocks, and let `at` point to the next ones. */
INLINE void load_blocks(LoadedBlock x[LANE_ROWS], const Int8Block *at[LANE_ROWS], const int rows) {
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++) x[row] = load_block(at[row]++);
}

/* Multiply with unpacked groups, from vector v of columns on. */
INLINE void pass_over_unpacked(Floats out[LANE_ROWS][PANEL_VECTORS], const Int8Work *work,
                               const Int8Block *at[LANE_ROWS], const int v, const int rows, const int type) {
    const Int8Group *group = (const Int8Group *)work->panel;
#pragma GCC unroll 1
    for (int64_t g = work->first; g < work->last; g++, group++) {
        const GroupPlace place = {.unpacked = group, .v = v};
        LoadedBlock x[LANE_ROWS];
        load_blocks(x, at, rows);
        multiply_group_by_lanes(out, &place, x, rows, type, 1);
    }
}

/* Multiply with all groups of a packed panel. The compiler loads the factors of a block's scales once. */
INLINE void pass_over_packed(Floats out[LANE_ROWS][PANEL_VECTORS], const Int8Work *work, const OwnParts *own,
                             const Int8Block *at[LANE_ROWS], const int v, const int rows, const int type) {
    const QuantizedLayout layout = layout_of(type);
    const char *head = work->panel, *end = work->panel + head_offset(layout, work->last);
#pragma GCC unroll 1
    while (head < end) {
        const char *group = head + layout.head_bytes, *next = group + layout.groups * layout.group_bytes;
#pragma GCC unroll 1
        for (; group < next; group += layout.group_bytes) {
            if (v == 0) prefetch_codes(work, group, layout.group_bytes, rows);
            const GroupPlace place = {.head = head, .group = group, .own = own, .v = v};
            LoadedBlock x[LANE_ROWS];
            load_blocks(x, at, rows);
            multiply_group_by_lanes(out, &place, x, rows, type, 0);
        }
        head = next;
    }
}

/* Multiply some rows with unpacked groups, or with a whole panel. */
INLINE void multiply_by_lanes(const Int8Work *work, const int rows, const int type, const int is_unpacked) {
    const OwnParts own = is_unpacked ? (OwnParts){.unit = 1.0f} : own_parts(work->type, type);
    const int count = lane_vectors(rows);
    for (int v = 0; v < PANEL_VECTORS; v += count) {
        const Int8Block *at[LANE_ROWS];
        Floats out[LANE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            at[row] = work->x + row * work->x_stride;
#pragma GCC unroll 8
            for (int i = 0; i < count; i++)
                out[row][i] = load_floats(work->out + row * PANEL_COLUMNS + (v + i) * LANES);
        }
        if (is_unpacked)
            pass_over_unpacked(out, work, at, v, rows, type);
        else
            pass_over_packed(out, work, &own, at, v, rows, type);
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
            for (int i = 0; i < count; i++)
                store_floats(work->out + row * PANEL_COLUMNS + (v + i) * LANES, out[row][i]);
    }
}

#endif
