/* Products of int8.h by AMX (amx.h).
 *
 * The codes of a group are 8 rows of a tile, of four codes for each of 16 columns; those of 16 blocks of x are another
 * tile. Their product is exact in int32, as every sum of codes is, so the bits are those of all other variants. Scales
 * are applied to each group's sums with AVX-512.
 *
 * 16 rows' blocks are stored together once for many panels. Codes lose their zero as they are unpacked. Sums begin with
 * the bits of MIDDLE, a float whose last bit counts one. So they are floats at the end, MIDDLE more than the sum, and a
 * subtraction, which is exact, takes the place of a conversion.
 *
 * After a tile's instruction, conversions and products of vectors have one unit instead of two for some hundred cycles
 * (Intel Emerald Rapids); additions have two. A tile's loads and its store hardly overlap with vectors.
 */
#ifndef INT8_AMX_H
#define INT8_AMX_H

#include "products/amx.h"
#include "products/int8.h"

/* The deepest product whose blocks a thread has room for. */
enum { MOST_AMX_GROUPS = 2048 };

/* Multiply the rows of a chunk with the panels [first, last), none of which is whole or has a scale for each half of a
 * group. */
void int8_multiply_amx(const Gemm *args, Int8Chunk *chunk, int64_t first, int64_t last);

#endif
