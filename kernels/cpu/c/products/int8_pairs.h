/* Some rows of 8-bit blocks times groups of a panel by SMMLA, for the variant neon_bf16.
 *
 * The instruction multiplies two rows of eight codes with two columns of eight, and adds to four sums in int32. They
 * are exact, so the bits are those of all other variants. The rows' blocks are paired once for many panels (int8.c).
 * Sums and results stay in vectors of two rows and two columns for all groups of a slice. The last of an odd number of
 * rows is its own partner.
 */
#ifndef INT8_PAIRS_H
#define INT8_PAIRS_H

#include "products/int8_lanes.h"

/* Most pairs of rows, and of columns at once. */
enum { ROW_PAIRS = 4, COLUMN_PAIRS = 4 };

/* Return the pairs of columns of a pass: as many as there are registers for. */
INLINE int column_pairs(const int pairs) { return pairs == 4 ? 2 : 4; }

/* Two rows' blocks: eight codes of each in turn, then numbers of both, [row][column]. */
struct PairedBlock {
    int8_t codes[2 * GROUP];
    Floats scale;
    union {
        Floats sum[2];   /* of the codes that belong to a minimum: of all, or of each half */
        Signed zeros[2]; /* what the zero of packed codes takes off, of all or of each half */
    };
};
typedef struct PairedBlock PairedBlock;

/* What pairs of blocks have after their scales. Types for which that is equal share them. */
enum { NO_SUMS = 14, FLOAT_SUMS = 16 };
INLINE int pairing_of(const int type, const int is_unpacked) {
    if (has_minimum(type)) return FLOAT_SUMS + has_halves(type);
    return is_unpacked || is_wide(type) ? NO_SUMS : 2 * BLOCK_TYPES[type].zero_bits + has_halves(type);
}

/* Write the sums or the zeros of two rows' blocks, of which a and b are the last vectors. */
INLINE void pair_sums(PairedBlock *to, const Words a, const Words b, const int pairing) {
    const int halves = pairing % 2, zero_bits = pairing / 2;
    const int32x4_t ends = vzip2q_s32((int32x4_t)a, (int32x4_t)b); /* zeros, those of the first halves */
    const Signed sum = -((Signed)vzip1q_s32(ends, ends) >> 7), first = -((Signed)vzip2q_s32(ends, ends) >> 7);
    for (int half = 0; half < 1 + halves; half++) {
        const Signed own = !halves ? sum : half ? sum - first : first;
        if (pairing >= FLOAT_SUMS)
            to->sum[half] = __builtin_convertvector(own, Floats);
        else
            to->zeros[half] = -(own << zero_bits);
    }
}

/* Pair groups [0, count) of some rows: to[group][pair]. */
INLINE void pair_rows(PairedBlock *to, const Int8Block *x, const int64_t x_stride, const int64_t num_rows,
                      const int64_t count, const int pairing) {
    const int64_t pairs = (num_rows + 1) / 2;
    for (int64_t pair = 0; pair < pairs; pair++) {
        const Int8Block *first = x + 2 * pair * x_stride, *second = 2 * pair + 1 < num_rows ? first + x_stride : first;
        PairedBlock *block = to + pair;
        for (const Int8Block *end = first + count; first < end; block += pairs) {
            const LoadedBlock a = load_block(&first), b = load_block(&second);
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                const uint64x2_t left = (uint64x2_t)a.codes[i], right = (uint64x2_t)b.codes[i];
                store_floats(block->codes + i * 2 * VECTOR_BYTES, (Floats)vzip1q_u64(left, right));
                store_floats(block->codes + i * 2 * VECTOR_BYTES + VECTOR_BYTES, (Floats)vzip2q_u64(left, right));
            }
            const uint32x4_t each = vzip1q_u32((uint32x4_t)a.rest, (uint32x4_t)b.rest); /* scales, sums */
            block->scale = (Floats)vzip1q_u32(each, each);
            if (pairing != NO_SUMS) pair_sums(block, a.rest, b.rest, pairing);
        }
    }
}

/* Write eight codes of two pairs of columns, those of vector v of the place: from k on. */
INLINE void load_columns(Words columns[2], const GroupPlace *place, const int v, const int k, const int type,
                         const int is_unpacked) {
    if (is_unpacked) {
        load_row(columns, (const char *)place->unpacked->codes[0] + place_in_group(k, (place->v + v) * LANES), 2);
        return;
    }
    const char *at = place->codes + v * VECTOR_BYTES;
    Words codes[2][PANEL_VECTORS];
    codes_of_two_steps(codes, at, k / 4, place->own->levels, type, 1);
    columns[0] = (Words)vzip1q_u32((uint32x4_t)codes[0][0], (uint32x4_t)codes[1][0]);
    columns[1] = (Words)vzip2q_u32((uint32x4_t)codes[0][0], (uint32x4_t)codes[1][0]);
}

/* Return what a sum begins with: zeros, or a pair's. GCC 12 would copy them from registers that sums need. */
INLINE Signed begun_sum(const Signed *zeros, const int has_zeros) {
    Signed sum;
    if (has_zeros)
        __asm__ volatile("ldr %q0, %1" : "=w"(sum) : "m"(*zeros));
    else
        __asm__ volatile("movi %0.4s, #0" : "=w"(sum));
    return sum;
}

/* Sum the products of one half of a group, or of all of it. */
INLINE void sum_pairs(Signed sums[ROW_PAIRS][COLUMN_PAIRS], const PairedBlock x[ROW_PAIRS], const GroupPlace *place,
                      const int half, const int pairs, const int type, const int is_unpacked) {
    const int count = has_halves(type) ? GROUP / 2 : GROUP, num_columns = column_pairs(pairs);
    const int has_zeros = !is_unpacked && !has_minimum(type) && !is_wide(type);
#pragma GCC unroll 4
    for (int pair = 0; pair < pairs; pair++)
#pragma GCC unroll 4
        for (int c = 0; c < num_columns; c++) sums[pair][c] = begun_sum(&x[pair].zeros[half], has_zeros);
#pragma GCC unroll 2
    for (int k = half * count; k < (half + 1) * count; k += 16) {
        Words both[ROW_PAIRS][2];
#pragma GCC unroll 4
        for (int pair = 0; pair < pairs; pair++) load_row(both[pair], (const char *)x[pair].codes + 2 * k, 2);
#pragma GCC unroll 2
        for (int eight = 0; eight < 2; eight++)
#pragma GCC unroll 2
            for (int v = 0; v < num_columns / 2; v++) {
                Words columns[2];
                load_columns(columns, place, v, k + 8 * eight, type, is_unpacked);
#pragma GCC unroll 4
                for (int c = 2 * v; c < 2 * v + 2; c++)
#pragma GCC unroll 4
                    for (int pair = 0; pair < pairs; pair++)
                        sums[pair][c] = (Signed)vmmlaq_s32((int32x4_t)sums[pair][c], (int8x16_t)both[pair][eight],
                                                           (int8x16_t)columns[c % 2]);
            }
    }
}

/* Write a scale or minimum of each column for both rows: those that follow `at`, which is moved to the next of a group's
 * arrays, or of a packed group those of the place. */
INLINE void load_column_numbers(Floats numbers[COLUMN_PAIRS], const GroupPlace *place, const char **at, const int half,
                         const int is_minimum, const int count, const int type, const int is_unpacked) {
    if (is_unpacked) {
#pragma GCC unroll 4
        for (int c = 0; c < count; c++)
            __asm__("ld1r {%0.2d}, [%1], #8" : "=w"(numbers[c]), "+r"(*at) : "m"(*(const double *)*at));
        return;
    }
#pragma GCC unroll 2
    for (int i = 0; i < count / 2; i++) {
        const Scales scales = load_scales(place->head, place->group, place->v + i, place->own->unit, type);
        Floats four = is_minimum ? scales.minimum[half] : scales.scale[half];
        __asm__("" : "+w"(four)); /* GCC 12 would load each two alone */
        numbers[2 * i] = (Floats)vdupq_laneq_f64((float64x2_t)four, 0);
        numbers[2 * i + 1] = (Floats)vdupq_laneq_f64((float64x2_t)four, 1);
    }
}

/* Add the products of one half of a group (of types without halves of all of it), scaled, to values. */
INLINE void add_half_of_pairs(Floats values[ROW_PAIRS][COLUMN_PAIRS], const PairedBlock x[ROW_PAIRS],
                              const GroupPlace *place, const char **at, const int half, const int pairs,
                              const int type, const int is_unpacked) {
    const int count = column_pairs(pairs);
    Signed sums[ROW_PAIRS][COLUMN_PAIRS];
    Floats scale[COLUMN_PAIRS];
    sum_pairs(sums, x, place, half, pairs, type, is_unpacked);
    load_column_numbers(scale, place, at, half, 0, count, type, is_unpacked);
#pragma GCC unroll 4
    for (int c = 0; c < count; c++)
#pragma GCC unroll 4
        for (int pair = 0; pair < pairs; pair++) {
            const Floats value = __builtin_convertvector(sums[pair][c], Floats) * scale[c];
            values[pair][c] = half ? values[pair][c] + value : value;
        }
}

/* Bytes from the end of a pass's numbers of a group to those of the group's next array, and of the next group. */
INLINE int64_t to_next_array(const int count) { return PANEL_COLUMNS * sizeof(float) - count * 2 * sizeof(float); }

/* Add a group's values to the rows' results. */
INLINE void multiply_pairs_of_group(Floats out[ROW_PAIRS][COLUMN_PAIRS], const PairedBlock x[ROW_PAIRS],
                                    const GroupPlace *place, const char **at, const int pairs, const int type,
                                    const int is_unpacked) {
    const int count = column_pairs(pairs), arrays = 1 + has_halves(type);
    Floats values[ROW_PAIRS][COLUMN_PAIRS];
    add_half_of_pairs(values, x, place, at, 0, pairs, type, is_unpacked);
    if (has_halves(type)) {
        if (is_unpacked) *at += to_next_array(count);
        add_half_of_pairs(values, x, place, at, 1, pairs, type, is_unpacked);
    }
    if (is_unpacked && has_minimum(type))
        *at += to_next_array(count) + (has_halves(type) ? 0 : PANEL_COLUMNS * sizeof(float));
    for (int half = 0; has_minimum(type) && half < arrays; half++) {
        Floats minimum[COLUMN_PAIRS];
        if (is_unpacked && half) *at += to_next_array(count);
        load_column_numbers(minimum, place, at, half, 1, count, type, is_unpacked);
#pragma GCC unroll 4
        for (int c = 0; c < count; c++)
#pragma GCC unroll 4
            for (int pair = 0; pair < pairs; pair++)
                values[pair][c] = values[pair][c] + x[pair].sum[half] * minimum[c];
    }
#pragma GCC unroll 4
    for (int pair = 0; pair < pairs; pair++)
#pragma GCC unroll 4
        for (int c = 0; c < count; c++) out[pair][c] = out[pair][c] + values[pair][c] * x[pair].scale;
}

/* Return the bytes from the last number of a pass that multiply_pairs_of_group() has loaded to the next group's first. */
INLINE int64_t to_next_group(const int count, const int type) {
    const int last = has_minimum(type) ? 2 + has_halves(type) : has_halves(type);
    return sizeof(Int8Group) - last * PANEL_COLUMNS * sizeof(float) - count * 2 * sizeof(float);
}

/* Multiply with unpacked groups, from vector v of columns on. */
INLINE void pass_of_unpacked_pairs(Floats out[ROW_PAIRS][COLUMN_PAIRS], const Int8Work *work, const int v,
                                   const int pairs, const int type) {
    const int64_t x_bytes = work->pairs_step * sizeof(PairedBlock);
    const char *x = (const char *)work->pairs, *end = x + (work->last - work->first) * x_bytes;
    const char *group = work->panel + 2 * v * VECTOR_BYTES;
    const char *numbers = work->panel + offsetof(Int8Group, scale) + v * VECTOR_BYTES;
#pragma GCC unroll 1
    for (; x < end; x += x_bytes) {
        __asm__("" : "+r"(group)); /* so that codes are offsets from it */
        const GroupPlace place = {.unpacked = (const Int8Group *)group};
        multiply_pairs_of_group(out, (const PairedBlock *)x, &place, &numbers, pairs, type, 1);
        group += sizeof(Int8Group), numbers += to_next_group(column_pairs(pairs), type);
    }
}

/* Multiply with packed groups, of whole blocks. */
INLINE void pass_of_packed_pairs(Floats out[ROW_PAIRS][COLUMN_PAIRS], const Int8Work *work, const OwnParts *own,
                                 const int v, const int pairs, const int type) {
    const QuantizedLayout layout = layout_of(type);
    const int64_t x_bytes = work->pairs_step * sizeof(PairedBlock);
    const char *x = (const char *)work->pairs;
    const char *head = work->panel + head_offset(layout, work->first), *end = work->panel + head_offset(layout, work->last);
#pragma GCC unroll 1
    while (head < end) {
        const char *group = head + layout.head_bytes, *next = group + layout.groups * layout.group_bytes;
#pragma GCC unroll 1
        for (; group < next; group += layout.group_bytes, x += x_bytes) {
            if (v == 0) prefetch_codes(work, group, layout.group_bytes, 2 * pairs);
            const char *codes = group + layout.scale_bytes + v * VECTOR_BYTES;
            __asm__("" : "+r"(codes)); /* so that rows are offsets from it */
            const GroupPlace place = {.head = head, .group = group, .codes = codes, .own = own, .v = v};
            multiply_pairs_of_group(out, (const PairedBlock *)x, &place, NULL, pairs, type, 0);
        }
        head = next;
    }
}

/* Load or store the results of two rows from a column on, for both: [row][column] of each two columns. */
INLINE void load_results(Floats out[COLUMN_PAIRS], const float *first, const float *second, const int count) {
#pragma GCC unroll 2
    for (int i = 0; i < count; i += 2) {
        const float64x2_t even = (float64x2_t)load_floats(first + 2 * i), odd = (float64x2_t)load_floats(second + 2 * i);
        out[i] = (Floats)vzip1q_f64(even, odd), out[i + 1] = (Floats)vzip2q_f64(even, odd);
    }
}

INLINE void store_results(float *first, float *second, const Floats out[COLUMN_PAIRS], const int count) {
#pragma GCC unroll 2
    for (int i = 0; i < count; i += 2) {
        const float64x2_t left = (float64x2_t)out[i], right = (float64x2_t)out[i + 1];
        store_floats(first + 2 * i, (Floats)vzip1q_f64(left, right));
        store_floats(second + 2 * i, (Floats)vzip2q_f64(left, right));
    }
}

/* Multiply some rows with unpacked groups, or with groups of a panel. */
INLINE void multiply_pairs(const Int8Work *work, const int rows, const int type, const int is_unpacked) {
    const OwnParts own = is_unpacked ? (OwnParts){.unit = 1.0f} : own_parts(work->type, type);
    const int pairs = (rows + 1) / 2, count = column_pairs(pairs);
#pragma GCC unroll 1
    for (int v = 0; v < PANEL_VECTORS; v += count / 2) {
        Floats out[ROW_PAIRS][COLUMN_PAIRS];
        float *sums[2 * ROW_PAIRS];
#pragma GCC unroll 8
        for (int row = 0; row < 2 * pairs; row++)
            sums[row] = work->out + (row < rows ? row : row - 1) * PANEL_COLUMNS + v * LANES;
#pragma GCC unroll 4
        for (int pair = 0; pair < pairs; pair++) load_results(out[pair], sums[2 * pair], sums[2 * pair + 1], count);
        if (is_unpacked)
            pass_of_unpacked_pairs(out, work, v, pairs, type);
        else
            pass_of_packed_pairs(out, work, &own, v, pairs, type);
#pragma GCC unroll 4
        for (int pair = 0; pair < pairs; pair++) store_results(sums[2 * pair], sums[2 * pair + 1], out[pair], count);
    }
}

#endif
