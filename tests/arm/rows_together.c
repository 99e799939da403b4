/* Multiplies rows together, and each row alone, by products in 8 bits, and compares every bit.
 *
 * Exit status 0 = all rows are right. Numbers of rows and depths are those at which int8.c changes what it does: rows
 * while codes are unpacked, those of a slice, several parts, several chunks, and more pairs of blocks than a thread has
 * room for. test_rows_together.py compiles it for each variant for ARM64, with int8.c, for the
 * types of some_types.h.
 */
#include <stdio.h>
#include <stdlib.h>

#include "products/gemm_slices.h"
#include "products/int8_block.h"
#include "threads/pool.h"

#include "products/int8_functions.h"

const Int8Functions int8_plain = INT8_FUNCTIONS;

enum { PANELS = 6, COLUMNS = PANELS * PANEL_COLUMNS, TABLE = 64 * PANELS, MOST_X = 1 << 19, MOST_WEIGHTS = 1 << 23 };

static const int types[PANELS] = {Q8_0, Q4_0, Q4_K, Q6_K, Q2_K, NVFP4_F32};
static _Alignas(64) char weights[TABLE + MOST_WEIGHTS];
static float x[MOST_X];
static Int8Block blocks[MOST_X / GROUP];

/* What int8.c needs of other files: one thread, and sums as they are. */
int gemm_splits_rows(int64_t num_rows, int num_threads, int32_t dtype) { return num_rows > 0 && num_threads + dtype; }
int64_t pool_take(int owner) { return owner; }
void pool_barrier(void) {}
int gemm_has_slices(const Gemm *args, int64_t num_rows) { return args == NULL && num_rows; }
void gemm_multiply_slices(const Gemm *args, int64_t begin, int64_t end, int64_t first, int64_t last) {
    (void)args, (void)begin, (void)end, (void)first, (void)last;
}
void quantized_multiply(const Gemm *args, int64_t begin, int64_t end, int64_t first, int64_t last) {
    (void)args, (void)begin, (void)end, (void)first, (void)last;
}
void gemm_store_panel(const Gemm *args, float *sums, int64_t row, int rows, int64_t panel) {
    for (int i = 0; i < rows; i++)
        memcpy((float *)args->y + (row + i) * COLUMNS + panel * PANEL_COLUMNS, sums + i * PANEL_COLUMNS,
               PANEL_COLUMNS * sizeof *sums);
}

static void fill(int64_t num_rows, int64_t depth) {
    int64_t offset = TABLE;
    for (int i = 0; i < PANELS; offset += quantized_panel_bytes(types[i], depth), i++)
        ((QuantizedPanel *)weights)[i] = (QuantizedPanel){offset, types[i], 0};
    for (int64_t i = TABLE; i < offset; i++) weights[i] = (char)(rand() >> 8 & 0x3f); /* no scale is a NaN */
    memcpy(weights + TABLE + quantized_panel_bytes(Q8_0, depth) / 2, &(uint16_t){0x7c00}, 2); /* one is infinite */
    for (int64_t i = 0; i < num_rows * depth; i++) x[i] = (float)(rand() % 2001 - 1000) * 0.00173f;
}

/* Return how many numbers of a product differ from those of each row alone. */
static int wrong_of(int num_rows, int64_t depth) {
    float *const alone = malloc(num_rows * COLUMNS * sizeof *alone), *const together = malloc(num_rows * COLUMNS * sizeof *alone);
    Gemm gemm = {.x = x, .weights = weights, .num_columns = COLUMNS, .depth = depth, .x_stride = depth,
                 .dtype = FLOAT32, .packing = INT8_WEIGHTS, .quantized = blocks, .quantized_stride = depth / GROUP};
    int wrong = 0;
    fill(num_rows, depth);
    gemm.num_rows = 1;
    for (int row = 0; row < num_rows; row++) {
        gemm.x = x + row * depth, gemm.y = alone + row * COLUMNS;
        int8_part(&gemm, 0, 1);
    }
    gemm.x = x, gemm.y = together, gemm.num_rows = num_rows;
    int8_part(&gemm, 0, 1);
    for (int i = 0; i < num_rows * COLUMNS; i++) wrong += memcmp(alone + i, together + i, sizeof *alone) != 0;
    free(alone), free(together);
    return wrong;
}

int main(void) {
    static const int cases[][2] = {{5, 512}, {8, 512}, {9, 1024}, {33, 256}, {259, 256}, {131, 2048}, {115, 2304}, {7, 33024}};
    int wrong = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int found = wrong_of(cases[i][0], cases[i][1]);
        printf("%d rows of %d: %d wrong\n", cases[i][0], cases[i][1], found);
        wrong += found;
    }
    return wrong != 0;
}
