/* INT8_FUNCTIONS: the functions of int8.h for each type and number of rows, by the instruction set used. */
#ifndef INT8_FUNCTIONS_H
#define INT8_FUNCTIONS_H

#include "products/int8_block.h"

#define INT8_PACKED(name, rows, type) \
    static void name##_##rows(const Int8Work *work) { multiply_groups(work, rows, type, 0); }
#define INT8_PACKED_TYPES(rows)                                                              \
    INT8_PACKED(q8_0, rows, Q8_0) INT8_PACKED(q4_0, rows, Q4_0) INT8_PACKED(q4_1, rows, Q4_1) \
    INT8_PACKED(q5_0, rows, Q5_0) INT8_PACKED(q5_1, rows, Q5_1) INT8_PACKED(q4_k, rows, Q4_K) \
    INT8_PACKED(q5_k, rows, Q5_K) INT8_PACKED(q6_k, rows, Q6_K)
#define INT8_PACKED_ROW(rows) \
    {q8_0_##rows, q4_0_##rows, q4_1_##rows, q5_0_##rows, q5_1_##rows, q4_k_##rows, q5_k_##rows, q6_k_##rows}
#define INT8_UNPACKED(name, rows, type) \
    static void name##_##rows(const Int8Work *work) { multiply_groups(work, rows, type, 1); }
#define INT8_UNPACKED_TYPES(rows)                                                                       \
    INT8_UNPACKED(bytes, rows, Q8_0) INT8_UNPACKED(scaled, rows, Q4_0) INT8_UNPACKED(moved_up, rows, Q4_1) \
    INT8_UNPACKED(halves, rows, Q6_K)
#define INT8_UNPACKED_ROW(rows)                                                                                  \
    {bytes_##rows,    scaled_##rows,   moved_up_##rows, scaled_##rows, moved_up_##rows, moved_up_##rows, moved_up_##rows, \
     halves_##rows}

INT8_PACKED_TYPES(1)
INT8_PACKED_TYPES(2)
INT8_PACKED_TYPES(3)
INT8_PACKED_TYPES(4)
INT8_UNPACKED_TYPES(1)
INT8_UNPACKED_TYPES(2)
INT8_UNPACKED_TYPES(3)
INT8_UNPACKED_TYPES(4)
INT8_UNPACKED_TYPES(5)
INT8_UNPACKED_TYPES(6)

#define INT8_FUNCTIONS                                                                                   \
    {{INT8_PACKED_ROW(1), INT8_PACKED_ROW(2), INT8_PACKED_ROW(3), INT8_PACKED_ROW(4)},                   \
     {INT8_UNPACKED_ROW(1), INT8_UNPACKED_ROW(2), INT8_UNPACKED_ROW(3), INT8_UNPACKED_ROW(4), INT8_UNPACKED_ROW(5), \
      INT8_UNPACKED_ROW(6)}}

#endif
