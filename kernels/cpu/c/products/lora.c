#include "products/lora.h"

#include "products/gemm.h"
#include "threads/pool.h"
#include "math/vector_math.h"

/* Sums that are kept in registers at once: rows of x times rows of A. */
enum { MANY_ROWS = 3, MANY_COLUMNS = 4, COLUMNS_OF_ONE_ROW = 8 };

enum { STRIP_VECTORS = STRIP_COLUMNS / LANES };

/* Some rows of x and of A. */
typedef struct {
    const char *x, *a;
    int64_t x_bytes, a_bytes; /* from row to row */
    int64_t depth;
    float *out;          /* t of the first row, at the first column */
    int64_t stride;      /* of t, numbers from row to row */
    const float *scales; /* of these columns */
} Dots;

/* Multiply `rows` rows of x with `columns` rows of A. The number of either changes no bit. */
INLINE void multiply_dots(const Dots *dots, const int rows, const int columns, const int dtype) {
    Floats sums[MANY_ROWS][COLUMNS_OF_ONE_ROW];
#pragma GCC unroll 3
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int column = 0; column < columns; column++) sums[row][column] = (Floats){0};
    int64_t k = 0;
    for (; k + LANES <= dots->depth; k += LANES) {
        Floats x[MANY_ROWS];
#pragma GCC unroll 3
        for (int row = 0; row < rows; row++) x[row] = load_numbers(dots->x + row * dots->x_bytes, k, dtype);
#pragma GCC unroll 8
        for (int column = 0; column < columns; column++) {
            const Floats a = load_numbers(dots->a + column * dots->a_bytes, k, dtype);
#pragma GCC unroll 3
            for (int row = 0; row < rows; row++) sums[row][column] = multiply_add(x[row], a, sums[row][column]);
        }
    }
    const int64_t left = dots->depth - k;
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++) {
            Floats sum = sums[row][column];
            if (left > 0)
                sum = multiply_add(load_tail(dots->x + row * dots->x_bytes, k, left, dtype),
                                   load_tail(dots->a + column * dots->a_bytes, k, left, dtype), sum);
            dots->out[row * dots->stride + column] = sum_of(sum) * dots->scales[column];
        }
}

typedef void (*DotsBlock)(const Dots *dots);
#define DEFINE(name, rows, columns)                                                                          \
    static void name##_float32(const Dots *dots) { multiply_dots(dots, rows, columns, FLOAT32); }   \
    static void name##_bfloat16(const Dots *dots) { multiply_dots(dots, rows, columns, BFLOAT16); }
DEFINE(three_by_four, MANY_ROWS, MANY_COLUMNS)
DEFINE(three_by_one, MANY_ROWS, 1)
DEFINE(one_by_eight, 1, COLUMNS_OF_ONE_ROW)
DEFINE(one_by_one, 1, 1)

/* Write columns [first, last) of t of rows [begin, end), which have one adapter. */
static void lower_rows(const LoraLower *args, const LoraProduct *product, int64_t begin, int64_t end, int64_t first,
                       int64_t last) {
    const Lora *lora = args->lora;
    const int64_t bytes = element_bytes(args->dtype);
    const int is_float = args->dtype == FLOAT32;
    Dots dots = {.x_bytes = args->x_stride * bytes, .a_bytes = args->depth * bytes, .depth = args->depth};
    dots.stride = lora->stride;
    for (int64_t row = begin; row < end;) {
        const int is_many = end - row >= MANY_ROWS;
        const int rows = is_many ? MANY_ROWS : 1, most = is_many ? MANY_COLUMNS : COLUMNS_OF_ONE_ROW;
        const DotsBlock wide = is_many ? (is_float ? three_by_four_float32 : three_by_four_bfloat16)
                                       : (is_float ? one_by_eight_float32 : one_by_eight_bfloat16);
        const DotsBlock narrow = is_many ? (is_float ? three_by_one_float32 : three_by_one_bfloat16)
                                         : (is_float ? one_by_one_float32 : one_by_one_bfloat16);
        dots.x = (const char *)args->x + row * dots.x_bytes;
        for (int64_t column = first; column < last;) {
            const int is_wide = last - column >= most;
            dots.a = (const char *)product->a + column * dots.a_bytes;
            dots.out = lora->lowered + row * lora->stride + column;
            dots.scales = product->scales + column;
            (is_wide ? wide : narrow)(&dots);
            column += is_wide ? most : 1;
        }
        row += rows;
    }
}

void lora_lower_part(const LoraLower *args, int thread, int num_threads) {
    const LoraProduct *const *adapters = args->lora->adapters;
    const int64_t number = args->lora->product;
    const int64_t begin = args->by_rows ? args->num_rows * thread / num_threads : 0;
    const int64_t end = args->by_rows ? args->num_rows * (thread + 1) / num_threads : args->num_rows;
    for (int64_t row = begin, next; row < end; row = next) {
        for (next = row + 1; next < end && adapters[next] == adapters[row];) next++;
        if (!adapters[row]) continue;
        const LoraProduct *product = adapters[row] + number;
        const int64_t rank = product->rank;
        const int64_t first = args->by_rows ? 0 : rank * thread / num_threads;
        const int64_t last = args->by_rows ? rank : rank * (thread + 1) / num_threads;
        lower_rows(args, product, row, next, first, last);
    }
}

static void lower_job(void *args, int thread, int num_threads) { lora_lower_part(args, thread, num_threads); }

EXPORT void lora_lower(const LoraLower *args) { pool_run(lower_job, (void *)args); }

/* Add a strip times t to STRIP_COLUMNS sums. */
INLINE void add_strip(float *sums, const float *t, const char *b, int rank, const int dtype) {
    Floats columns[STRIP_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < STRIP_VECTORS; v++) columns[v] = load_floats(sums + v * LANES);
    for (int j = 0; j < rank; j++, b += STRIP_COLUMNS * element_bytes(dtype)) {
        const Floats factor = all_floats(t[j]);
#pragma GCC unroll 4
        for (int v = 0; v < STRIP_VECTORS; v++)
            columns[v] = multiply_add(factor, load_numbers(b, v * LANES, dtype), columns[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < STRIP_VECTORS; v++) store_floats(sums + v * LANES, columns[v]);
}

void lora_add(const Lora *lora, float *sums, int64_t row, int rows, int64_t panel, int32_t dtype) {
    for (int i = 0; i < rows; i++, sums += PANEL_COLUMNS) {
        if (!lora->adapters[row + i]) continue;
        const LoraProduct *product = lora->adapters[row + i] + lora->product;
        if (!product->rank) continue;
        const float *t = lora->lowered + (row + i) * lora->stride;
        for (int s = 0; s < STRIPS_OF_PANEL; s++) {
            const LoraStrip strip = product->strips[panel * STRIPS_OF_PANEL + s];
            const char *b = (const char *)product->b + strip.offset * element_bytes(dtype);
            if (dtype == FLOAT32)
                add_strip(sums + s * STRIP_COLUMNS, t + strip.first, b, strip.rank, FLOAT32);
            else
                add_strip(sums + s * STRIP_COLUMNS, t + strip.first, b, strip.rank, BFLOAT16);
        }
    }
}
