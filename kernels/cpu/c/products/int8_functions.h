/* INT8_FUNCTIONS: the functions of int8.h for each type and number of rows, by the instruction set used. */
#ifndef INT8_FUNCTIONS_H
#define INT8_FUNCTIONS_H

#include "products/int8_block.h"
#if defined(NEON_DOT)
#include "products/int8_lanes.h"
#endif

#if defined(NEON_DOT)
#define INT8_MULTIPLY_PACKED(work, rows, type) multiply_by_lanes(work, rows, type)
#else
#define INT8_MULTIPLY_PACKED(work, rows, type) multiply_groups(work, rows, type, 0)
#endif

#if defined(WITH_NEON) && !defined(__clang__)
/* GCC 12 would move loads so far ahead that the sums do not fit the registers. */
#define KEEPS_ORDER __attribute__((optimize("no-schedule-insns")))
#else
#define KEEPS_ORDER
#endif

#define INT8_PACKED(name, type, rows) \
    static KEEPS_ORDER void name##_##rows(const Int8Work *work) { INT8_MULTIPLY_PACKED(work, rows, type); }
#define INT8_PACKED_ENTRY(name, type, rows) [type] = name##_##rows,
#define INT8_PACKED_TYPES(rows) EACH_INT8_TYPE(INT8_PACKED, rows)
#define INT8_PACKED_ROW(rows) {EACH_INT8_TYPE(INT8_PACKED_ENTRY, rows)}

INT8_PACKED_TYPES(1)
INT8_PACKED_TYPES(2)
INT8_PACKED_TYPES(3)
#if defined(NEON_DOT) /* INT8_PACKED_ROWS */
#define INT8_ALL_PACKED {INT8_PACKED_ROW(1), INT8_PACKED_ROW(2), INT8_PACKED_ROW(3)}
#define INT8_FUNCTIONS {INT8_ALL_PACKED}
#else
INT8_PACKED_TYPES(4)
#define INT8_ALL_PACKED {INT8_PACKED_ROW(1), INT8_PACKED_ROW(2), INT8_PACKED_ROW(3), INT8_PACKED_ROW(4)}
#define INT8_UNPACKED(name, rows, type) \
    static KEEPS_ORDER void name##_##rows(const Int8Work *work) { multiply_groups(work, rows, type, 1); }
#define INT8_UNPACKED_TYPES(rows)                                                                       \
    INT8_UNPACKED(bytes, rows, Q8_0) INT8_UNPACKED(scaled, rows, Q4_0) INT8_UNPACKED(moved_up, rows, Q4_1) \
    INT8_UNPACKED(halves, rows, Q6_K) INT8_UNPACKED(halves_moved_up, rows, Q2_K) INT8_UNPACKED(halves_of_grids, rows, IQ2_XXS)
#define INT8_UNPACKED_ROW(rows)                                                                                        \
    {[Q8_0] = bytes_##rows, [IQ4_NL] = bytes_##rows, [IQ4_XS] = bytes_##rows, [Q4_0] = scaled_##rows,                   \
     [Q5_0] = scaled_##rows, [MXFP4] = scaled_##rows, [TQ2_0] = scaled_##rows, [Q4_1] = moved_up_##rows,                \
     [Q5_1] = moved_up_##rows, [Q4_K] = moved_up_##rows, [Q5_K] = moved_up_##rows, [Q6_K] = halves_##rows,              \
     [Q3_K] = halves_##rows, [NVFP4] = halves_##rows, [NVFP4_F32] = halves_##rows,                                      \
     [IQ2_XXS] = halves_of_grids_##rows, [Q2_K] = halves_moved_up_##rows}

INT8_UNPACKED_TYPES(1)
INT8_UNPACKED_TYPES(2)
INT8_UNPACKED_TYPES(3)
INT8_UNPACKED_TYPES(4)
#define INT8_UNPACKED_FOUR_ROWS INT8_UNPACKED_ROW(1), INT8_UNPACKED_ROW(2), INT8_UNPACKED_ROW(3), INT8_UNPACKED_ROW(4)
#if defined(__AVX2__) && !defined(__AVX512F__) /* INT8_ROWS */
#define INT8_ALL_UNPACKED {INT8_UNPACKED_FOUR_ROWS}
#else
INT8_UNPACKED_TYPES(5)
INT8_UNPACKED_TYPES(6)
#define INT8_ALL_UNPACKED {INT8_UNPACKED_FOUR_ROWS, INT8_UNPACKED_ROW(5), INT8_UNPACKED_ROW(6)}
#endif
#define INT8_FUNCTIONS {INT8_ALL_PACKED, INT8_ALL_UNPACKED}
#endif

#endif
