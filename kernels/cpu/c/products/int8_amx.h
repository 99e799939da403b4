/* Sums of codes by AMX (amx.h), for the products of int8.h.
 *
 * The codes of a group are 8 rows of a tile, of four codes for each of 16 columns; those of 16 blocks of x are another
 * tile. Their product is exact in int32, as every sum of codes is, so the bits are those of all other variants. Scales
 * are applied to each group's sums with AVX-512.
 */
#ifndef INT8_AMX_H
#define INT8_AMX_H

#include "products/amx.h"
#include "products/int8.h"

/* Add the products of `rows` rows with unpacked groups to work->out. type: of the panel. */
void int8_multiply_amx(const Int8Work *work, int rows, int type);

#endif
