/* y = x @ w^T + bias for packed w: any number of rows, bfloat16 or float32, sums in float32.
 *
 * A packed matrix [num_columns, depth] (columns of y, as nn.Linear stores it) consists of panels of PANEL_COLUMNS
 * columns. A panel consists of steps along the depth. A step has 4 bytes per column: two adjacent bfloat16, or one
 * float32. So a panel is read from its first byte to its last, and one load has the step of as many columns as a vector
 * has lanes. Missing columns of the last panel repeat the panel's first column. The missing half of a last step is
 * zero.
 *
 * Each element of y is one running float32 sum over the steps in ascending order. It does not depend on the number of
 * rows, the row's place among them or the number of threads. A step of two bfloat16 uses the dpbf16 instruction if the
 * CPU has it (the odd number first, subnormals as zero); otherwise the even number comes first. The variant amx adds up
 * bfloat16 products in another order, in every case the same (gemm_amx.h). With bias: y = sum + bias, rounded once. With
 * an activation: y = f(sum + bias), rounded once.
 *
 * With a gate (gate.h) the first half of the columns are gates, and the second half are the values that they scale
 * (up). A panel has PANEL_COLUMNS / 2 of each, so one thread has both sums and writes f(gate) * up. The sums with their
 * bias are rounded to y's dtype before that, as if they had been stored.
 */
#ifndef GEMM_H
#define GEMM_H

#include <stdint.h>

enum { PANEL_COLUMNS = 32 };

/* How weights are packed: as above; or, if they are bfloat16, compact (compact.h) or quantized (quantized.h). INT8_WEIGHTS
 * are packed as quantized ones, and multiplied in 8 bits (int8.h). */
enum { WHOLE_WEIGHTS = 0, COMPACT_WEIGHTS = 1, QUANTIZED_WEIGHTS = 2, INT8_WEIGHTS = 3 };

/* Memory bounds products of at most this many rows. Quantized weights are the fewest bytes, and unpacking them takes less
 * time than reading the others. */
enum { STORED_ROWS = 4 };

/* The same weights as quantized ones, in a form for more than STORED_ROWS rows. Between two products it may appear. */
typedef struct {
    const void *weights; /* packed, 64-byte aligned; NULL: they are not there yet */
    int32_t packing;     /* WHOLE_WEIGHTS or COMPACT_WEIGHTS */
    int32_t reserved;
} SecondForm;

typedef struct Gemm {
    const void *x;       /* [num_rows, depth] of dtype, rows x_stride elements apart */
    const void *weights; /* packed, of dtype, 64-byte aligned */
    const float *bias;   /* [num_columns] or NULL */
    void *y;             /* [num_rows, num_columns; half with a gate] of y_dtype, rows y_stride elements apart */
    int64_t num_rows, num_columns, depth, x_stride, y_stride;
    int32_t dtype;   /* BFLOAT16 or FLOAT32 */
    int32_t y_dtype; /* BFLOAT16 (rounded to nearest even) or FLOAT32 */
    int32_t gate;    /* NO_GATE or a function of gate.h */
    int32_t streams; /* whether the caches cannot keep the weights until the next product with them */
    int32_t packing; /* of the weights: see above */
    int32_t activation; /* without a gate: NO_GATE, or the function of gate.h that is applied to sum + bias */
    const struct Gemm *next; /* the product that follows, whose weights are prefetched; or NULL */
    void *quantized;         /* with INT8_WEIGHTS: room for num_rows rows of blocks of x (int8.h) */
    int64_t quantized_stride; /* blocks from row to row, at least depth / GROUP */
    const struct Lora *lora; /* what adapters add to rows before they are stored (lora.h); or NULL */
    const float *constants;  /* of the activation, for those that have any (gate.h); or NULL */
    const SecondForm *second; /* of QUANTIZED_WEIGHTS; or NULL */
} Gemm;

typedef struct {
    const void *source; /* [num_columns, depth] of source_dtype, rows source_stride elements apart; or packed */
    void *packed;       /* packed_bytes(num_columns, depth, dtype) bytes, 64-byte aligned */
    int64_t num_columns, depth, source_stride;
    int32_t source_dtype; /* BFLOAT16, FLOAT16 or FLOAT32 */
    int32_t dtype;        /* BFLOAT16 (rounded to nearest even) or FLOAT32 */
    int32_t is_gated;     /* whether its halves are gates and up */
    int32_t is_packed;    /* whether the source is packed as QUANTIZED_WEIGHTS; then dtype is BFLOAT16 */
    void *plan; /* memory for compact_bytes() (compact.h) */
} GemmPack;

void gemm_part(const Gemm *args, int thread, int num_threads);

/* Whether gemm_part() gives each thread rows [num_rows * thread / num_threads, num_rows * (thread + 1) /
 * num_threads). dtype: of x and the weights. */
int gemm_splits_rows(int64_t num_rows, int num_threads, int32_t dtype);

void gemm(const Gemm *args);

/* Panels that one thread multiplies at a time, of a product that several threads share. */
int64_t gemm_piece(const Gemm *args);

/* Multiply all rows with the panels [first, last), on the calling thread. INT8_WEIGHTS: the rows are quantized. */
void gemm_panels(const Gemm *args, int64_t first, int64_t last);

/* Write the rows of y from `row` on, from the sums [rows][PANEL_COLUMNS] of a panel, to which adapters may add. */
void gemm_store_panel(const Gemm *args, float *sums, int64_t row, int rows, int64_t panel);

int64_t packed_bytes(int64_t num_columns, int64_t depth, int32_t dtype);
void gemm_pack_part(const GemmPack *args, int thread, int num_threads);
void gemm_pack(const GemmPack *args);

/* Pack steps [first, last) of a panel, one after the other. */
void gemm_pack_steps(const GemmPack *args, int64_t panel, int64_t first, int64_t last, void *to);

/* Write the weights of these steps, for those who count them: in any order, which is faster. */
void gemm_copy_steps(const GemmPack *args, int64_t panel, int64_t first, int64_t last, void *to);

#endif
