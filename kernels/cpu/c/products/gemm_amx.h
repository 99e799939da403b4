/* Products of bfloat16 numbers with AMX (amx.h), for weights with any packing.
 *
 * An element of y is one float32 sum, to which 32 places along the depth are added at a time, in AMX's order; past the
 * last place both sides are zeros. It does not depend on the number of rows, nor on whether AMX is emulated.
 *
 * Sixteen steps of a packed panel are two adjacent tiles. A block is at most 32 rows, with a panel's 32 columns: two by
 * two tiles of sums. Partly filled tiles cost the same, so one row costs as much as sixteen: less than reading the
 * weights. With one block, weights that must be unpacked are unpacked to a small ring.
 *
 * With more blocks a group of panels is unpacked to memory that the second level cache keeps, while the first block is
 * multiplied; the other blocks prefetch the next group. Rows of x are copied first, as tiles one after the other, since
 * rows of a tile that are far apart take longer to load; a deep matrix is multiplied in several parts of its depth, and
 * the sums are kept in between. The rows of a finished panel are stored while the next one is multiplied.
 */
#ifndef GEMM_AMX_H
#define GEMM_AMX_H

#include "products/amx.h"
#include "products/gemm.h"

/* Whether products of these numbers use AMX. */
INLINE int gemm_has_amx(int32_t dtype) { return HAS_AMX && dtype == BFLOAT16; }

/* Multiply rows [begin, end) with the panels [first, last). */
void gemm_multiply_amx(const Gemm *args, int64_t begin, int64_t end, int64_t first, int64_t last);

/* Return the number of panels that a thread should take at a time; at least `least`. */
int64_t gemm_amx_piece(const Gemm *args, int64_t least);

#endif
