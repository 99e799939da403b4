/* Groups of quantized weights (products/quantized.h), unpacked for products by AMX with instructions that all CPUs with AMX
 * have: AVX512_BF16 and AVX512_VBMI.
 *
 * The numbers are those of quantized_unpack(), except that another number stands for some zeros: one with the other sign, or
 * one that AMX takes as a zero because it is below 2**-126.
 */
#ifndef UNPACK_AMX_H
#define UNPACK_AMX_H

#include <stdint.h>

/* Unpack group `group` of a panel of type `type`: 32 places, as pairs of bfloat16. */
typedef void (*UnpackGroup)(const char *panel, int32_t type, int64_t group, char *out);

/* Return the function for a panel of a type; NULL if there is none, or if this CPU lacks the instructions. */
UnpackGroup unpacker_of(int32_t type);

#endif
