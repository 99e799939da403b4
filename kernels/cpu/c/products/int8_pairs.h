/* Some rows of 8-bit blocks times unpacked groups by SMMLA, for the variant neon_bf16.
 *
 * The instruction multiplies two rows of eight codes with two columns of eight, and adds to four sums in int32. They are
 * exact, so the bits are those of all other variants. Sums and results stay in vectors of two rows and two columns from
 * the first group to the last. The last of an odd number of rows is its own partner.
 */
#ifndef INT8_PAIRS_H
#define INT8_PAIRS_H

#include "products/int8_block.h"

/* Most pairs of rows, and the pairs of columns at once. */
enum { ROW_PAIRS = INT8_ROWS / 2, COLUMN_PAIRS = 4 };

/* Two rows of blocks; both are the same row if only one is left. */
typedef struct {
    const Int8Block *first, *second;
} RowPair;

INLINE RowPair row_pair(const Int8Work *work, const int pair, const int rows) {
    const int second = 2 * pair + 1 < rows ? 2 * pair + 1 : 2 * pair;
    return (RowPair){work->x + 2 * pair * work->x_stride, work->x + second * work->x_stride};
}

/* Return a number of each row: [row][column]. */
INLINE Floats numbers_of_rows(const float first, const float second) {
    return (Floats)vcombine_f32(vdup_n_f32(first), vdup_n_f32(second));
}

/* Return two numbers of columns for both rows. */
INLINE Floats numbers_of_columns(const float *from) {
    double both;
    memcpy(&both, from, sizeof both);
    return (Floats)vdupq_n_f64(both);
}

/* Sum the products of one half of a group, or of all of it. */
INLINE void sum_pairs(Signed sums[ROW_PAIRS][COLUMN_PAIRS], const RowPair x[ROW_PAIRS], const uint8_t *codes,
                      const int half, const int pairs, const int type) {
    const int count = has_halves(type) ? GROUP / 2 : GROUP;
#pragma GCC unroll 3
    for (int pair = 0; pair < pairs; pair++)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMN_PAIRS; c++) sums[pair][c] = (Signed){0};
#pragma GCC unroll 4
    for (int k = half * count; k < (half + 1) * count; k += 8) {
        int8x16_t eight[COLUMN_PAIRS];
#pragma GCC unroll 4
        for (int c = 0; c < COLUMN_PAIRS; c++)
            eight[c] = vreinterpretq_s8_u8(vld1q_u8(codes + place_in_group(k, 0) + c * VECTOR_BYTES));
#pragma GCC unroll 3
        for (int pair = 0; pair < pairs; pair++) {
            const int64x2_t first = vreinterpretq_s64_s8(vld1q_s8(x[pair].first->codes + k / 16 * 16));
            const int64x2_t second = vreinterpretq_s64_s8(vld1q_s8(x[pair].second->codes + k / 16 * 16));
            const int8x16_t both = vreinterpretq_s8_s64(k % 16 ? vzip2q_s64(first, second) : vzip1q_s64(first, second));
#pragma GCC unroll 4
            for (int c = 0; c < COLUMN_PAIRS; c++)
                sums[pair][c] = (Signed)vmmlaq_s32((int32x4_t)sums[pair][c], both, eight[c]);
        }
    }
}

/* Return what minima add: the sum of each row's x times each column's minimum, of one half of a group or of all of it. */
INLINE Floats minima_of_pair(const RowPair *x, const float *minimum, const int half, const int type) {
    const Floats sums = has_halves(type) ? numbers_of_rows((float)sum_of_x(x->first, half, type),
                                                           (float)sum_of_x(x->second, half, type))
                                         : numbers_of_rows(x->first->sum, x->second->sum);
    return sums * numbers_of_columns(minimum);
}

/* Add the products of one half of a group (of types without halves of all of it), scaled, to values. */
INLINE void add_half_of_pairs(Floats values[ROW_PAIRS][COLUMN_PAIRS], const RowPair x[ROW_PAIRS], const Int8Group *group,
                              const int v, const int half, const int pairs, const int type) {
    Signed sums[ROW_PAIRS][COLUMN_PAIRS];
    sum_pairs(sums, x, group->codes[0] + place_in_group(0, v * LANES), half, pairs, type);
#pragma GCC unroll 4
    for (int c = 0; c < COLUMN_PAIRS; c++) {
        const Floats scale = numbers_of_columns(group->scale[half] + v * LANES + 2 * c);
#pragma GCC unroll 3
        for (int pair = 0; pair < pairs; pair++) {
            const Floats value = __builtin_convertvector(sums[pair][c], Floats) * scale;
            values[pair][c] = half ? values[pair][c] + value : value;
        }
    }
}

/* Add a group's values to the rows' results. v: the first of the vectors of columns. */
INLINE void multiply_pairs_of_group(Floats out[ROW_PAIRS][COLUMN_PAIRS], const RowPair x[ROW_PAIRS],
                                    const Int8Group *group, const int v, const int pairs, const int type) {
    Floats values[ROW_PAIRS][COLUMN_PAIRS];
    add_half_of_pairs(values, x, group, v, 0, pairs, type);
    if (has_halves(type)) add_half_of_pairs(values, x, group, v, 1, pairs, type);
#pragma GCC unroll 3
    for (int pair = 0; pair < pairs; pair++) {
        const Floats scale = numbers_of_rows(x[pair].first->scale, x[pair].second->scale);
#pragma GCC unroll 4
        for (int c = 0; c < COLUMN_PAIRS; c++) {
            if (has_minimum(type))
                for (int half = 0; half < 1 + has_halves(type); half++) {
                    const float *minimum = group->minimum[half] + v * LANES + 2 * c;
                    values[pair][c] = values[pair][c] + minima_of_pair(&x[pair], minimum, half, type);
                }
            out[pair][c] = out[pair][c] + values[pair][c] * scale;
        }
    }
}

/* Multiply some rows with unpacked groups. */
INLINE void multiply_pairs(const Int8Work *work, const int rows, const int type) {
    const int pairs = (rows + 1) / 2;
    for (int v = 0; v < PANEL_VECTORS; v += COLUMN_PAIRS / 2) {
        const Int8Group *group = (const Int8Group *)work->panel;
        RowPair x[ROW_PAIRS];
        Floats out[ROW_PAIRS][COLUMN_PAIRS];
        float *sums[INT8_ROWS];
#pragma GCC unroll 6
        for (int row = 0; row < 2 * pairs; row++)
            sums[row] = work->out + (row < rows ? row : row - 1) * PANEL_COLUMNS + v * LANES;
#pragma GCC unroll 3
        for (int pair = 0; pair < pairs; pair++) {
            x[pair] = row_pair(work, pair, rows);
#pragma GCC unroll 4
            for (int c = 0; c < COLUMN_PAIRS; c++)
                out[pair][c] =
                    (Floats)vcombine_f32(vld1_f32(sums[2 * pair] + 2 * c), vld1_f32(sums[2 * pair + 1] + 2 * c));
        }
#pragma GCC unroll 1
        for (int64_t g = work->first; g < work->last; g++, group++) {
            multiply_pairs_of_group(out, x, group, v, pairs, type);
#pragma GCC unroll 3
            for (int pair = 0; pair < pairs; pair++) x[pair].first++, x[pair].second++;
        }
#pragma GCC unroll 3
        for (int pair = 0; pair < pairs; pair++)
#pragma GCC unroll 4
            for (int c = 0; c < COLUMN_PAIRS; c++) {
                vst1_f32(sums[2 * pair] + 2 * c, vget_low_f32((float32x4_t)out[pair][c]));
                vst1_f32(sums[2 * pair + 1] + 2 * c, vget_high_f32((float32x4_t)out[pair][c]));
            }
    }
}

#endif
