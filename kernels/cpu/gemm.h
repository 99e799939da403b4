/* y = x @ w^T + bias for packed w: any number of rows, bfloat16 or float32, sums in float32.
 *
 * A packed matrix [num_columns, depth] (num_columns of y, as nn.Linear stores it) consists of panels of PANEL_COLUMNS
 * columns, each panel of steps along the depth, each step of 4 bytes per column: two neighbouring bfloat16, or one
 * float32. So a panel is read from its first byte to its last, and one load has a step of as many columns as a vector
 * has lanes. Columns that the matrix does not have are the panel's first once more; half a step that it
 * does not have is zero.
 *
 * Each element of y is one running float32 sum over the steps in ascending order, whatever the number of rows, the
 * row's place among them and the number of threads. Within a step of two bfloat16: the dpbf16 instruction where there
 * is one (the odd one first, subnormals as zero), else the even one first. With bias: y = sum + bias, rounded once.
 *
 * With a gate (gate.h) the first half of the columns are gates, and the second half what they let through: a panel has
 * PANEL_COLUMNS / 2 of each, so that the thread that has their sums writes f(gate) * up at once. The sums are rounded to
 * y's dtype before it, as if they were stored between.
 */
#ifndef GEMM_H
#define GEMM_H

#include <stdint.h>

enum { PANEL_COLUMNS = 32 };

typedef struct Gemm {
    const void *x;       /* [num_rows, depth] of dtype, rows x_stride elements apart */
    const void *weights; /* packed, of dtype, 64-byte aligned */
    const float *bias;   /* [num_columns] or NULL; none with a gate */
    void *y;             /* [num_rows, num_columns, with a gate half as many] of y_dtype, rows y_stride elements apart */
    int64_t num_rows, num_columns, depth, x_stride, y_stride;
    int32_t dtype;   /* BFLOAT16 or FLOAT32 */
    int32_t y_dtype; /* BFLOAT16 (rounded to nearest even) or FLOAT32 */
    int32_t gate;    /* NO_GATE or a function of gate.h */
    int32_t streams; /* no cache keeps the weights until they are wanted again */
    int32_t is_compact; /* the weights: see compact.h */
    int32_t reserved;
    const struct Gemm *next; /* the product to come, whose weights are asked for ahead; or NULL */
} Gemm;

typedef struct {
    const void *source; /* [num_columns, depth] of source_dtype, rows source_stride elements apart */
    void *packed;       /* packed_bytes(num_columns, depth, dtype) bytes, 64-byte aligned */
    int64_t num_columns, depth, source_stride;
    int32_t source_dtype; /* BFLOAT16, FLOAT16 or FLOAT32 */
    int32_t dtype;        /* BFLOAT16 (rounded to nearest even) or FLOAT32 */
    int32_t is_gated;     /* its halves are gates and what they let through */
    int32_t reserved;
    void *plan; /* of compact weights (compact.h) */
} GemmPack;

void gemm_part(const Gemm *args, int thread, int num_threads);

/* Whether gemm_part() gives each thread rows [num_rows * thread / num_threads, num_rows * (thread + 1) / num_threads). */
int gemm_splits_rows(int64_t num_rows, int num_threads);

void gemm(const Gemm *args);

int64_t packed_bytes(int64_t num_columns, int64_t depth, int32_t dtype);
void gemm_pack_part(const GemmPack *args, int thread, int num_threads);
void gemm_pack(const GemmPack *args);

/* Steps [first, last) of a panel, one after the other. */
void gemm_pack_steps(const GemmPack *args, int64_t panel, int64_t first, int64_t last, void *to);

#endif
