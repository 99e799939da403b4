/* Low-rank additions to a product's rows (LoRA, Hu et al. 2021, arXiv 2106.09685): y = x @ w^T + scale * (x @ a^T) @
 * b^T, each row with the matrices of its own adapter, or with none.
 *
 * First a row is lowered: t = (x @ a^T) * scale, float32. An element of t is the sum of LANES running sums, each of which
 * takes every LANES-th number, joined in a fixed order. Then the product adds t @ b^T to its own sums before they are
 * stored, so before a bias, an activation or a gate: for j ascending, sum += t[j] * b[j]. So a row's bits depend on its
 * numbers and its adapter only, and those of a row without an adapter are those of a step without adapters.
 */
#ifndef LORA_H
#define LORA_H

#include <stdint.h>

/* B is stored in strips of STRIP_COLUMNS columns, in the order of the product's panels (gemm.h), which have two
 * each: with a gate one of gates and one of what they scale, and these have different rows of A. */
enum { STRIP_COLUMNS = 16, STRIPS_OF_PANEL = 2 };

typedef struct {
    int64_t offset;      /* of the strip's numbers [rank][STRIP_COLUMNS] in b, in elements */
    int32_t first, rank; /* the elements of t that it is multiplied with; rank 0 = none */
} LoraStrip;

/* What an adapter adds to one product. */
typedef struct {
    const void *a;          /* [rank, depth] of the product's dtype; rank 0 = it adds nothing */
    const void *b;          /* of the product's dtype */
    const LoraStrip *strips; /* two for each panel */
    const float *scales;    /* [rank] */
    int64_t rank;
} LoraProduct;

/* The adapters of a product's rows. */
typedef struct Lora {
    const LoraProduct *const *adapters; /* [num_rows] the products of each row's adapter; NULL = it has none */
    float *lowered;                     /* [num_rows, stride]: t of each row */
    int64_t stride;                     /* at least the rank of each product */
    int64_t product;                    /* which of an adapter's products */
} Lora;

/* Rows to lower. */
typedef struct {
    const Lora *lora;
    const void *x; /* [num_rows, depth] of dtype, rows x_stride elements apart */
    int64_t num_rows, depth, x_stride;
    int32_t dtype;   /* BFLOAT16 or FLOAT32 */
    int32_t by_rows; /* each thread lowers rows [num_rows * thread / num_threads, ...) like gemm_part(); otherwise
                      * all threads share each row, and a barrier must follow */
} LoraLower;

void lora_lower_part(const LoraLower *args, int thread, int num_threads);
void lora_lower(const LoraLower *args);

/* Add to the sums [rows][PANEL_COLUMNS] of a panel, which belong to the rows from `row` on. */
void lora_add(const Lora *lora, float *sums, int64_t row, int rows, int64_t panel, int32_t dtype);

#endif
