/* Products of several rows, slice by slice: DEPTH places along the depth of a panel at a time.
 *
 * The slice's weights are unpacked once, to memory that the first level cache keeps, for all rows. If products are in
 * float32 (gemm.h), the weights are converted to it, and x is converted once for several panels. Sums are kept in
 * memory for the next slice. They equal those of the other ways to compute a product, bit for bit.
 */
#ifndef GEMM_SLICES_H
#define GEMM_SLICES_H

#include "products/gemm_block.h"
#include "products/quantized.h"

/* Panels that are multiplied in turn with a slice of x, which is prepared once for all of them. */
enum { SLICE_PANELS = 4 };

/* Rows of x from place k on, in the form that products take. */
typedef struct {
    const char *rows;
    int64_t bytes; /* from row to row */
} Slice;

/* Rows of x are prefetched this far ahead as they are converted: each is on a page of its own. */
enum { ROWS_AHEAD = 8 };

/* Return `count` numbers of each row from place k on. If they must be converted they are written to `room`. */
INLINE Slice slice_of_x(const Gemm *args, int64_t row, int64_t num_rows, int64_t k, int64_t count, float *room) {
    const uint16_t *x = (const uint16_t *)args->x + row * args->x_stride + k;
    if (BY_PAIRS) return (Slice){(const char *)x, args->x_stride * 2};
    for (int64_t i = 0; i < num_rows; i++, x += args->x_stride) {
        for (int64_t j = 0; i + ROWS_AHEAD < num_rows && j < count; j += 32)
            __builtin_prefetch(x + ROWS_AHEAD * args->x_stride + j);
        for (int64_t j = 0; j < count; j += LANES) store_floats(room + i * count + j, load_bfloat16(x + j));
    }
    return (Slice){(const char *)room, count * 4};
}

/* Unpack places [begin, end) along the depth of a panel, as steps of floats, or of pairs if products take those. `begin`
 * is a multiple of GROUP; `end` too, or it is the depth. */
void gemm_unpack(const Gemm *args, int64_t panel, int64_t begin, int64_t end, char *out);

/* Packed weights. */
typedef struct {
    const char *begin;
    int64_t bytes;
} Packed;

/* Return where places [begin, end) of a panel are; both as gemm_unpack() takes them. */
Packed gemm_packed(const Gemm *args, int64_t panel, int64_t begin, int64_t end);

/* Whether a product of num_rows rows is computed slice by slice. */
int gemm_has_slices(const Gemm *args, int64_t num_rows);

/* Multiply rows [begin, end) with the panels [first, last). */
void gemm_multiply_slices(const Gemm *args, int64_t begin, int64_t end, int64_t first, int64_t last);

#endif
