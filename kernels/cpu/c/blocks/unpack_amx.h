/* Groups of quantized weights (products/quantized.h), unpacked for products by AMX with instructions that all CPUs with AMX
 * have: AVX512_BF16 and AVX512_VBMI.
 *
 * The numbers are those of quantized_unpack(), except that another number stands for some zeros: one with the other sign, or
 * one that AMX takes as a zero because it is below 2**-126.
 */
#ifndef UNPACK_AMX_H
#define UNPACK_AMX_H

#include <stdint.h>
#include <string.h>

/* Write 32 places of a panel, [pairs of places, columns] pairs of bfloat16, as two tiles: those of its first 16 columns, then
 * the others. Loading tiles whose rows lie next to each other takes less time than loading each other row. */
static inline void part_columns(const char *places, char *tiles) {
    for (int half = 0; half < 2; half++)
        for (int j = 0; j < 16; j++, tiles += 64) memcpy(tiles, places + j * 128 + half * 64, 64);
}

/* Unpack group `group` of a panel of type `type`: 32 places, as part_columns() writes them. */
typedef void (*UnpackGroup)(const char *panel, int32_t type, int64_t group, char *out);

/* Return the function for a panel of a type; NULL if there is none, or if this CPU lacks the instructions. */
UnpackGroup unpacker_of(int32_t type);

/* The same for two tiles whose rows are the panel's columns: [32 columns, 32 places] of bfloat16. */
UnpackGroup column_unpacker_of(int32_t type);

#endif
