/* Some rows of 8-bit blocks times groups of a panel by SMMLA, for the variant neon_bf16.
 *
 * The instruction multiplies two rows of eight codes with two columns of eight, and adds to four sums in int32. They
 * are exact, so the bits are those of all other variants. The rows' blocks are paired once for all columns. Sums and
 * results stay in vectors of two rows and two columns for all groups of a slice. The last of an odd number of rows is
 * its own partner.
 */
#ifndef INT8_PAIRS_H
#define INT8_PAIRS_H

#include "products/int8_lanes.h"

/* Most pairs of rows, and of columns at once. */
enum { ROW_PAIRS = 4, COLUMN_PAIRS = 4 };

/* Return the pairs of columns of a pass: as many as there are registers for. */
INLINE int column_pairs(const int pairs) { return pairs == 4 ? 2 : 4; }

/* Two rows' blocks: eight codes of each in turn, then numbers of both, [row][column]. */
typedef struct {
    int8_t codes[2 * GROUP];
    Floats scale, sum[2]; /* sums of the codes that belong to a minimum: of all, or of each half */
    Signed zeros[2];      /* what the zero of packed codes takes off, of all or of each half */
} PairedBlock;

/* Write the sums or the zeros of two rows' blocks, of which a and b are the last vectors. */
INLINE void pair_sums(PairedBlock *to, const Words a, const Words b, const int type) {
    const int zero_bits = BLOCK_TYPES[type].zero_bits;
    const int32x4_t ends = vzip2q_s32((int32x4_t)a, (int32x4_t)b); /* zeros, those of the first halves */
    const Signed zeros = (Signed)vzip1q_s32(ends, ends), sum = -(zeros >> 7);
    const Signed first = -((Signed)vzip2q_s32(ends, ends) >> 7);
#pragma GCC unroll 2
    for (int half = 0; half < 1 + has_halves(type); half++) {
        const Signed own = !has_halves(type) ? sum : half ? sum - first : first;
        if (has_minimum(type))
            to->sum[half] = __builtin_convertvector(own, Floats);
        else
            to->zeros[half] = has_halves(type) ? -(own << zero_bits) : zeros >> (7 - zero_bits);
    }
}

/* Pair the blocks of two rows; `to` has those of other pairs in between. */
INLINE void pair_blocks(PairedBlock *to, const Int8Block *first, const Int8Block *second, const int64_t count,
                        const int type, const int is_unpacked) {
#pragma GCC unroll 1
    for (const Int8Block *end = first + count; first < end; to += ROW_PAIRS) {
        const LoadedBlock a = load_block(&first), b = load_block(&second);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const uint64x2_t left = (uint64x2_t)a.codes[i], right = (uint64x2_t)b.codes[i];
            store_floats(to->codes + i * 2 * VECTOR_BYTES, (Floats)vzip1q_u64(left, right));
            store_floats(to->codes + i * 2 * VECTOR_BYTES + VECTOR_BYTES, (Floats)vzip2q_u64(left, right));
        }
        const uint32x4_t each = vzip1q_u32((uint32x4_t)a.rest, (uint32x4_t)b.rest); /* scales, sums */
        to->scale = (Floats)vzip1q_u32(each, each);
        if (has_minimum(type) && !has_halves(type))
            to->sum[0] = (Floats)vzip2q_u32(each, each);
        else if (has_minimum(type) || (!is_unpacked && !is_wide(type)))
            pair_sums(to, a.rest, b.rest, type);
    }
}

/* Write eight codes of each pair of columns: those from k on. */
INLINE void load_columns(Words columns[COLUMN_PAIRS], const GroupPlace *place, const int k, const int count,
                         const int type, const int is_unpacked) {
    if (is_unpacked) {
        load_row(columns, (const char *)place->unpacked->codes[0] + place_in_group(k, place->v * LANES), count);
        return;
    }
    const char *at = place->group + layout_of(type).scale_bytes + place->v * VECTOR_BYTES;
    Words codes[2][PANEL_VECTORS];
    codes_of_two_steps(codes, at, k / 4, place->own->levels, type, count / 2);
#pragma GCC unroll 2
    for (int i = 0; i < count / 2; i++) {
        columns[2 * i] = (Words)vzip1q_u32((uint32x4_t)codes[0][i], (uint32x4_t)codes[1][i]);
        columns[2 * i + 1] = (Words)vzip2q_u32((uint32x4_t)codes[0][i], (uint32x4_t)codes[1][i]);
    }
}

/* Sum the products of one half of a group, or of all of it. */
INLINE void sum_pairs(Signed sums[ROW_PAIRS][COLUMN_PAIRS], const PairedBlock x[ROW_PAIRS], const GroupPlace *place,
                      const int half, const int pairs, const int type, const int is_unpacked) {
    const int count = has_halves(type) ? GROUP / 2 : GROUP, num_columns = column_pairs(pairs);
    const int has_zeros = !is_unpacked && !has_minimum(type) && !is_wide(type);
#pragma GCC unroll 4
    for (int pair = 0; pair < pairs; pair++)
#pragma GCC unroll 4
        for (int c = 0; c < num_columns; c++) sums[pair][c] = has_zeros ? x[pair].zeros[half] : (Signed){0};
#pragma GCC unroll 2
    for (int k = half * count; k < (half + 1) * count; k += 16) {
        Words both[ROW_PAIRS][2];
#pragma GCC unroll 4
        for (int pair = 0; pair < pairs; pair++) load_row(both[pair], (const char *)x[pair].codes + 2 * k, 2);
#pragma GCC unroll 2
        for (int eight = 0; eight < 2; eight++) {
            Words columns[COLUMN_PAIRS];
            load_columns(columns, place, k + 8 * eight, num_columns, type, is_unpacked);
#pragma GCC unroll 4
            for (int c = 0; c < num_columns; c++)
#pragma GCC unroll 4
                for (int pair = 0; pair < pairs; pair++)
                    sums[pair][c] = (Signed)vmmlaq_s32((int32x4_t)sums[pair][c], (int8x16_t)both[pair][eight],
                                                       (int8x16_t)columns[c]);
        }
    }
}

/* Return the numbers of two of four columns for both rows. */
INLINE Floats numbers_of_columns(Floats four, const int second) {
    __asm__("" : "+w"(four)); /* GCC 12 would load each two alone */
    return (Floats)(second ? vdupq_laneq_f64((float64x2_t)four, 1) : vdupq_laneq_f64((float64x2_t)four, 0));
}

/* Add the products of one half of a group (of types without halves of all of it), scaled, to values. */
INLINE void add_half_of_pairs(Floats values[ROW_PAIRS][COLUMN_PAIRS], const PairedBlock x[ROW_PAIRS],
                              const GroupPlace *place, const int half, const int pairs, const int type,
                              const int is_unpacked) {
    Signed sums[ROW_PAIRS][COLUMN_PAIRS];
    sum_pairs(sums, x, place, half, pairs, type, is_unpacked);
#pragma GCC unroll 4
    for (int c = 0; c < column_pairs(pairs); c++) {
        const Floats scale = numbers_of_columns(scales_of_place(place, c / 2, type, is_unpacked).scale[half], c % 2);
#pragma GCC unroll 4
        for (int pair = 0; pair < pairs; pair++) {
            const Floats value = __builtin_convertvector(sums[pair][c], Floats) * scale;
            values[pair][c] = half ? values[pair][c] + value : value;
        }
    }
}

/* Add a group's values to the rows' results. */
INLINE void multiply_pairs_of_group(Floats out[ROW_PAIRS][COLUMN_PAIRS], const PairedBlock x[ROW_PAIRS],
                                    const GroupPlace *place, const int pairs, const int type, const int is_unpacked) {
    Floats values[ROW_PAIRS][COLUMN_PAIRS];
    add_half_of_pairs(values, x, place, 0, pairs, type, is_unpacked);
    if (has_halves(type)) add_half_of_pairs(values, x, place, 1, pairs, type, is_unpacked);
    for (int half = 0; has_minimum(type) && half < 1 + has_halves(type); half++)
#pragma GCC unroll 4
        for (int c = 0; c < column_pairs(pairs); c++) {
            const Scales scales = scales_of_place(place, c / 2, type, is_unpacked);
            const Floats minimum = numbers_of_columns(scales.minimum[half], c % 2);
#pragma GCC unroll 4
            for (int pair = 0; pair < pairs; pair++) values[pair][c] = values[pair][c] + x[pair].sum[half] * minimum;
        }
#pragma GCC unroll 4
    for (int pair = 0; pair < pairs; pair++)
#pragma GCC unroll 4
        for (int c = 0; c < column_pairs(pairs); c++) out[pair][c] = out[pair][c] + values[pair][c] * x[pair].scale;
}

/* Multiply with groups [first, last), from vector v of columns on. `x` has the blocks of these groups. */
INLINE void pass_of_pairs(Floats out[ROW_PAIRS][COLUMN_PAIRS], const Int8Work *work, const OwnParts *own,
                          const PairedBlock *x, int64_t first, const int64_t last, const int v, const int pairs,
                          const int type, const int is_unpacked) {
    const QuantizedLayout layout = layout_of(type);
    const char *unpacked = work->panel + (first - work->first) * sizeof(Int8Group), *scales = unpacked + v * VECTOR_BYTES;
    unpacked += 2 * v * VECTOR_BYTES;
#pragma GCC unroll 1
    for (const PairedBlock *end = x + (last - first) * ROW_PAIRS; x < end; x += ROW_PAIRS) {
        GroupPlace place = {.own = own, .v = v};
        if (is_unpacked) {
            __asm__("" : "+r"(unpacked), "+r"(scales)); /* so that codes and scales are offsets from them */
            place.unpacked = (const Int8Group *)unpacked, place.scales = (const Int8Group *)scales, place.v = 0;
            unpacked += sizeof(Int8Group), scales += sizeof(Int8Group);
        } else {
            place.head = work->panel + head_offset(layout, first), place.group = work->panel + group_offset(layout, first);
            first++;
            if (v == 0) prefetch_codes(work, place.group, layout.group_bytes, 2 * pairs);
        }
        multiply_pairs_of_group(out, x, &place, pairs, type, is_unpacked);
    }
}

/* Multiply some rows with one slice: unpacked groups, or groups [first, last) of a packed panel. */
INLINE void multiply_slice_of_pairs(const Int8Work *work, const OwnParts *own, const int64_t first, const int64_t last,
                                    const int rows, const int type, const int is_unpacked) {
    const int pairs = (rows + 1) / 2;
    PairedBlock blocks[SLICE_GROUPS][ROW_PAIRS];
#pragma GCC unroll 4
    for (int pair = 0; pair < pairs; pair++) {
        const Int8Block *even = work->x + 2 * pair * work->x_stride + (first - work->first);
        const Int8Block *odd = 2 * pair + 1 < rows ? even + work->x_stride : even;
        pair_blocks(&blocks[0][pair], even, odd, last - first, type, is_unpacked);
    }
    for (int v = 0; v < PANEL_VECTORS; v += column_pairs(pairs) / 2) {
        Floats out[ROW_PAIRS][COLUMN_PAIRS];
        float *sums[2 * ROW_PAIRS];
#pragma GCC unroll 8
        for (int row = 0; row < 2 * pairs; row++)
            sums[row] = work->out + (row < rows ? row : row - 1) * PANEL_COLUMNS + v * LANES;
#pragma GCC unroll 4
        for (int pair = 0; pair < pairs; pair++)
#pragma GCC unroll 4
            for (int c = 0; c < column_pairs(pairs); c++)
                out[pair][c] =
                    (Floats)vcombine_f32(vld1_f32(sums[2 * pair] + 2 * c), vld1_f32(sums[2 * pair + 1] + 2 * c));
        pass_of_pairs(out, work, own, blocks[0], first, last, v, pairs, type, is_unpacked);
#pragma GCC unroll 4
        for (int pair = 0; pair < pairs; pair++)
#pragma GCC unroll 4
            for (int c = 0; c < column_pairs(pairs); c++) {
                vst1_f32(sums[2 * pair] + 2 * c, vget_low_f32((float32x4_t)out[pair][c]));
                vst1_f32(sums[2 * pair + 1] + 2 * c, vget_high_f32((float32x4_t)out[pair][c]));
            }
    }
}

/* Multiply some rows with unpacked groups, or with a whole panel. */
INLINE void multiply_pairs(const Int8Work *work, const int rows, const int type, const int is_unpacked) {
    const OwnParts own = is_unpacked ? (OwnParts){.unit = 1.0f} : own_parts(work->type, type);
    for (int64_t first = work->first; first < work->last; first += SLICE_GROUPS) {
        const int64_t end = first + SLICE_GROUPS, last = end < work->last ? end : work->last;
        multiply_slice_of_pairs(work, &own, first, last, rows, type, is_unpacked);
    }
}

#endif
