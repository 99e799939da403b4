/* Some rows of 8-bit blocks times unpacked groups by SMMLA, for the variant neon_bf16.
 *
 * The instruction multiplies two rows of eight codes with two columns of eight, and adds to four sums in int32. They
 * are exact, so the bits are those of all other variants. The rows' blocks are paired once for all columns. Sums and
 * results stay in vectors of two rows and two columns from the first group to the last. The last of an odd number of
 * rows is its own partner.
 */
#ifndef INT8_PAIRS_H
#define INT8_PAIRS_H

#include "products/int8_lanes.h"

/* Most pairs of rows, and the pairs of columns at once. */
enum { ROW_PAIRS = INT8_ROWS / 2, COLUMN_PAIRS = 4 };

/* Two rows' blocks: eight codes of each in turn, then numbers of both, [row][column]. */
typedef struct {
    int8_t codes[2 * GROUP];
    Floats scale, sum, sum_of_first;
} PairedBlock;

/* Pair the blocks of two rows; `to` has those of other pairs in between. */
INLINE void pair_blocks(PairedBlock *to, const Int8Block *first, const Int8Block *second, const int64_t count,
                        const int type) {
#pragma GCC unroll 1
    for (const Int8Block *end = first + count; first < end; first++, second++, to += ROW_PAIRS) {
        const LoadedBlock a = load_block(first), b = load_block(second);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const uint64x2_t left = (uint64x2_t)a.codes[i], right = (uint64x2_t)b.codes[i];
            store_floats(to->codes + i * 2 * VECTOR_BYTES, (Floats)vzip1q_u64(left, right));
            store_floats(to->codes + i * 2 * VECTOR_BYTES + VECTOR_BYTES, (Floats)vzip2q_u64(left, right));
        }
        const uint32x4_t each = vzip1q_u32((uint32x4_t)a.rest, (uint32x4_t)b.rest); /* scales, sums */
        to->scale = (Floats)vzip1q_u32(each, each);
        if (has_minimum(type)) to->sum = (Floats)vzip2q_u32(each, each);
        if (!has_minimum(type) || !has_halves(type)) continue;
        const int32x4_t ends = vzip2q_s32((int32x4_t)a.rest, (int32x4_t)b.rest);
        to->sum_of_first = (Floats)vcvtq_f32_s32(vzip2q_s32(ends, ends));
    }
}

/* Return two numbers of columns for both rows. */
INLINE Floats numbers_of_columns(const float *from) {
    double both;
    memcpy(&both, from, sizeof both);
    return (Floats)vdupq_n_f64(both);
}

/* Sum the products of one half of a group, or of all of it. */
INLINE void sum_pairs(Signed sums[ROW_PAIRS][COLUMN_PAIRS], const PairedBlock x[ROW_PAIRS], const uint8_t *codes,
                      const int half, const int pairs, const int type) {
    const int count = has_halves(type) ? GROUP / 2 : GROUP;
#pragma GCC unroll 3
    for (int pair = 0; pair < pairs; pair++)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMN_PAIRS; c++) sums[pair][c] = (Signed){0};
#pragma GCC unroll 2
    for (int k = half * count; k < (half + 1) * count; k += 16) {
        Words both[ROW_PAIRS][2];
#pragma GCC unroll 3
        for (int pair = 0; pair < pairs; pair++) load_row(both[pair], (const char *)x[pair].codes + 2 * k, 2);
#pragma GCC unroll 2
        for (int eight = 0; eight < 2; eight++) {
            Words columns[COLUMN_PAIRS];
            load_row(columns, (const char *)codes + place_in_group(k + 8 * eight, 0), COLUMN_PAIRS);
#pragma GCC unroll 4
            for (int c = 0; c < COLUMN_PAIRS; c++)
#pragma GCC unroll 3
                for (int pair = 0; pair < pairs; pair++)
                    sums[pair][c] = (Signed)vmmlaq_s32((int32x4_t)sums[pair][c], (int8x16_t)both[pair][eight],
                                                       (int8x16_t)columns[c]);
        }
    }
}

/* Return the sum of each row's x that belongs to a minimum. */
INLINE Floats sums_of_pair(const PairedBlock *x, const int half, const int type) {
    if (!has_halves(type)) return x->sum;
    return half ? x->sum - x->sum_of_first : x->sum_of_first; /* exact: integers */
}

/* Add the products of one half of a group (of types without halves of all of it), scaled, to values. */
INLINE void add_half_of_pairs(Floats values[ROW_PAIRS][COLUMN_PAIRS], const PairedBlock x[ROW_PAIRS],
                              const Int8Group *group, const int v, const int half, const int pairs, const int type) {
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
INLINE void multiply_pairs_of_group(Floats out[ROW_PAIRS][COLUMN_PAIRS], const PairedBlock x[ROW_PAIRS],
                                    const Int8Group *group, const int v, const int pairs, const int type) {
    Floats values[ROW_PAIRS][COLUMN_PAIRS];
    add_half_of_pairs(values, x, group, v, 0, pairs, type);
    if (has_halves(type)) add_half_of_pairs(values, x, group, v, 1, pairs, type);
    for (int half = 0; has_minimum(type) && half < 1 + has_halves(type); half++)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMN_PAIRS; c++) {
            const Floats minimum = numbers_of_columns(group->minimum[half] + v * LANES + 2 * c);
#pragma GCC unroll 3
            for (int pair = 0; pair < pairs; pair++)
                values[pair][c] = values[pair][c] + sums_of_pair(&x[pair], half, type) * minimum;
        }
#pragma GCC unroll 3
    for (int pair = 0; pair < pairs; pair++)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMN_PAIRS; c++) out[pair][c] = out[pair][c] + values[pair][c] * x[pair].scale;
}

/* Multiply some rows with unpacked groups. */
INLINE void multiply_pairs(const Int8Work *work, const int rows, const int type) {
    const int pairs = (rows + 1) / 2;
    PairedBlock blocks[SLICE_GROUPS][ROW_PAIRS];
#pragma GCC unroll 3
    for (int pair = 0; pair < pairs; pair++) {
        const Int8Block *first = work->x + 2 * pair * work->x_stride;
        const Int8Block *second = 2 * pair + 1 < rows ? first + work->x_stride : first; /* the last may have none */
        pair_blocks(&blocks[0][pair], first, second, work->last - work->first, type);
    }
    for (int v = 0; v < PANEL_VECTORS; v += COLUMN_PAIRS / 2) {
        const Int8Group *group = (const Int8Group *)work->panel;
        const PairedBlock *x = blocks[0];
        Floats out[ROW_PAIRS][COLUMN_PAIRS];
        float *sums[INT8_ROWS];
#pragma GCC unroll 6
        for (int row = 0; row < 2 * pairs; row++)
            sums[row] = work->out + (row < rows ? row : row - 1) * PANEL_COLUMNS + v * LANES;
#pragma GCC unroll 3
        for (int pair = 0; pair < pairs; pair++) {
#pragma GCC unroll 4
            for (int c = 0; c < COLUMN_PAIRS; c++)
                out[pair][c] =
                    (Floats)vcombine_f32(vld1_f32(sums[2 * pair] + 2 * c), vld1_f32(sums[2 * pair + 1] + 2 * c));
        }
#pragma GCC unroll 1
        for (int64_t g = work->first; g < work->last; g++, group++, x += ROW_PAIRS)
            multiply_pairs_of_group(out, x, group, v, pairs, type);
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
