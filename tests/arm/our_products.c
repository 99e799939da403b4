/* Multiplies matrices by the kernels of a shared library, and marks before and after each product what instructions.c
 * counts. Weights and x are any bytes that are no NaN: counts do not depend on them.
 *
 * usage: our_products LIBRARY. Prints the cases, one a line, in the order of their pairs of marks; the first is an empty one.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "products/int8.h"

enum { COLUMNS = 1024, DEPTH = 2048, PANELS = COLUMNS / PANEL_COLUMNS, TABLE = 4096, MOST_ROWS = 32, MARK = 1000000 };

static _Alignas(64) char weights[TABLE + PANELS * DEPTH * PANEL_COLUMNS * 2];
static _Alignas(64) uint16_t x[MOST_ROWS * DEPTH], y[MOST_ROWS * COLUMNS];
static _Alignas(64) Int8Block blocks[MOST_ROWS * DEPTH / GROUP];

static void fill(int type) {
    const int64_t bytes = quantized_panel_bytes(type, DEPTH);
    for (size_t i = 0; i < sizeof weights; i++) weights[i] = (char)(rand() >> 8 & 0x3f);
    for (int i = 0; i < MOST_ROWS * DEPTH; i++) x[i] = (uint16_t)(0x3f80 + (rand() >> 8 & 0x807f));
    for (int i = 0; i < PANELS; i++) ((QuantizedPanel *)weights)[i] = (QuantizedPanel){TABLE + i * bytes, type, 0};
}

/* A product with a matrix of WHOLE_PANEL is one with whole bfloat16 weights, which have no table. */
static Gemm gemm_of(int type, int packing, int num_rows) {
    return (Gemm){.x = x, .weights = weights + (type == WHOLE_PANEL ? TABLE : 0), .y = y, .num_rows = num_rows,
                  .num_columns = COLUMNS, .depth = DEPTH, .x_stride = DEPTH, .y_stride = COLUMNS, .dtype = BFLOAT16,
                  .y_dtype = BFLOAT16, .packing = packing, .quantized = blocks, .quantized_stride = DEPTH / GROUP};
}

int main(int count, char **arguments) {
    static const struct {
        const char *name;
        int type, packing;
    } cases[] = {
        {"BF16", WHOLE_PANEL, WHOLE_WEIGHTS},  {"Q4_0", Q4_0, QUANTIZED_WEIGHTS},   {"Q8_0", Q8_0, QUANTIZED_WEIGHTS},
        {"Q4_K", Q4_K, QUANTIZED_WEIGHTS},     {"Q4_0 in 8 bits", Q4_0, INT8_WEIGHTS}, {"Q8_0 in 8 bits", Q8_0, INT8_WEIGHTS},
        {"Q4_K in 8 bits", Q4_K, INT8_WEIGHTS}, {"Q6_K in 8 bits", Q6_K, INT8_WEIGHTS},
    };
    static const int rows[] = {1, 8, 32};
    void *library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : NULL;
    if (library == NULL) return 1;
    void (*start)(int) = (void (*)(int))dlsym(library, "pool_start");
    void (*multiply)(const Gemm *) = (void (*)(const Gemm *))dlsym(library, "gemm");
    start(1);
    syscall(MARK, 0), syscall(MARK, 1), puts("empty");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fill(cases[i].type);
        for (int j = 0; j < 3; j++) {
            const Gemm gemm = gemm_of(cases[i].type, cases[i].packing, rows[j]);
            multiply(&gemm);
            syscall(MARK, 0), multiply(&gemm), syscall(MARK, 1);
            printf("%s %d\n", cases[i].name, rows[j]);
        }
    }
    return 0;
}
