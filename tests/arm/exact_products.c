/* Packs random blocks of every type, multiplies them with rows of x, and compares every bit with the definition: the
 * dequantized weights, rounded to bfloat16, times x, in one sum of float32 in ascending order.
 *
 * Exit status 0 = all types are right. test_exact_products.py compiles it for each variant for ARM64, with quantized.c,
 * quantized_pack.c and dequantize.c.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "math/vectors.h"
#include "products/quantized.h"
#include "threads/pool.h"

enum { DEPTH = 512, ROWS = QUANTIZED_FEW_ROWS, MOST_BYTES = DEPTH * 2 };

static uint8_t blocks[PANEL_COLUMNS][MOST_BYTES];
static float weights[PANEL_COLUMNS][DEPTH], y[ROWS][PANEL_COLUMNS];
static uint16_t x[ROWS][DEPTH];

/* What quantized.c needs of other files: one thread, and sums as they are. */
void pool_run(void (*job)(void *, int, int), void *args) { job(args, 0, 1); }
void gemm_store_panel(const Gemm *args, float *sums, int64_t row, int rows, int64_t panel) {
    (void)args, (void)panel;
    for (int i = 0; i < rows; i++) memcpy(y[row + i], sums + i * PANEL_COLUMNS, sizeof y[row + i]);
}

/* Whether panels keep a weight as it is: scales of FP8 are multiplied by 2 ** 120. */
static int is_moderate(float weight) {
    return weight == 0 || (fabsf(weight) > 0x1p-100f && fabsf(weight) < 0x1p7f);
}

static void fill_blocks(int type) {
    const int bytes = block_bytes(type), count = block_weights(type);
    for (int i = 0; i < PANEL_COLUMNS * DEPTH / count;) {
        const int column = i / (DEPTH / count), at = i % (DEPTH / count);
        float *found = weights[column] + at * count;
        int fit = 1;
        for (int j = 0; j < bytes; j++) blocks[column][at * bytes + j] = (uint8_t)(rand() >> 8);
        read_blocks(blocks[column] + at * bytes, type, 1, found);
        for (int j = 0; j < count; j++) fit &= is_moderate(found[j]);
        i += fit;
    }
}

/* Return how many elements of a type's products are wrong; -1 if its panel was not packed. */
static int wrong_of(int type) {
    static _Alignas(64) char packed[64 + PANEL_COLUMNS * DEPTH * 2];
    uint8_t must_be_whole[1] = {0};
    const QuantizedPart part = {blocks, PANEL_COLUMNS, MOST_BYTES, type, 0};
    const Quantize quantize = {.parts = &part, .packed = packed, .must_be_whole = must_be_whole, .num_parts = 1,
                               .num_columns = PANEL_COLUMNS, .depth = DEPTH};
    const Gemm gemm = {.x = x, .weights = packed, .num_rows = ROWS, .num_columns = PANEL_COLUMNS, .depth = DEPTH,
                       .x_stride = DEPTH, .dtype = BFLOAT16, .packing = QUANTIZED_WEIGHTS};
    int wrong = 0;
    if (quantize_bytes(&quantize) > (int64_t)sizeof packed || gemm_quantize(&quantize)) return -1;
    for (int rows = 1; rows <= ROWS; rows++) {
        quantized_multiply(&gemm, 0, rows, 0, 1);
        for (int i = 0; i < rows * PANEL_COLUMNS; i++) {
            float sum = 0;
            for (int k = 0; k < DEPTH; k++) {
                const float weight = float_of_bfloat16(bfloat16_of_float(weights[i % PANEL_COLUMNS][k]));
                sum = fmaf(float_of_bfloat16(x[i / PANEL_COLUMNS][k]), weight, sum);
            }
            wrong += !(y[i / PANEL_COLUMNS][i % PANEL_COLUMNS] == sum);
        }
    }
    return wrong;
}

int main(void) {
    int wrong = 0;
    for (int i = 0; i < GRID_BYTES; i++) block_grids[i] = (uint8_t)((rand() >> 8) % 3);
    for (int i = 0; i < ROWS * DEPTH; i++) x[i / DEPTH][i % DEPTH] = (uint16_t)(0x3f00 + (rand() >> 8 & 0x80ff));
    for (int type = 0; type < NUM_TYPES; type++) {
        fill_blocks(type);
        const int found = wrong_of(type);
        wrong += found != 0;
        printf("type %d: %d wrong\n", type, found);
    }
    return wrong != 0;
}
