#include "gemm.h"

#include "pool.h"
#include "vectors.h"

/* Registers: a block of rows x vectors of y is summed in rows * vectors registers, beside one vector of weights and one
 * of x per row. The fewer rows, the more vectors: there must be sums enough to hide the latency of each. What is left
 * over at the end of a thread's panels is summed NARROW vectors at a time. */
enum { NARROW = 2, MAX_VECTORS = 8 };
#if VECTOR_BYTES == 64
#define MAX_ROWS 14
#define VECTORS_OF(rows) ((rows) <= 3 ? MAX_VECTORS : (rows) <= 6 ? 4 : NARROW)
#else
#define MAX_ROWS 4
#define VECTORS_OF(rows) ((rows) == 1 ? MAX_VECTORS : (rows) == 2 ? 4 : NARROW)
#endif
#define MAX_SUMS (MAX_ROWS * NARROW > 3 * MAX_VECTORS ? MAX_ROWS * NARROW : 3 * MAX_VECTORS)

enum { PANEL_VECTORS = PANEL_COLUMNS / LANES, STEP_BYTES = PANEL_COLUMNS * 4 };

/* Bytes of x that meet all panels before the next rows do: they stay in the caches. (Measured on Zen 5, depth 576 to
 * 14336: twice to four times the second level cache is 5 to 20 % faster than a third of it.) */
enum { CHUNK_BYTES = 1536 << 10 };

/* Of weights, from memory; the hardware's own prefetch ends at each page. */
enum { PREFETCH_BYTES = 4096 };

/* From so many rows for each thread on, threads split the rows and not the panels. */
enum { ROWS_TO_SPLIT = 64 };

INLINE Floats add_step(Floats sum, Words x, Words w, int dtype) {
    if (dtype == FLOAT32) return multiply_add((Floats)x, (Floats)w, sum);
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)x, (__m512bh)(__m512i)w);
#else
    sum = multiply_add((Floats)(x << 16), (Floats)(w << 16), sum);
    return multiply_add((Floats)(x & 0xffff0000), (Floats)(w & 0xffff0000), sum);
#endif
}

/* `bytes` (2 or 4) of x as every lane's step. */
INLINE Words load_step(const char *x, const int bytes) {
    uint32_t step = 0;
    memcpy(&step, x, bytes);
    return all_words(step);
}

/* One step of a block: sums [rows][vectors]. */
INLINE void block_step(Floats sums[MAX_ROWS][MAX_VECTORS], const char *x, int64_t x_bytes, const int step_bytes,
                       const char *w, int64_t panel_bytes, const int rows, const int vectors, const int dtype) {
    Words weights[MAX_VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) {
        const char *at = w + v / PANEL_VECTORS * panel_bytes + v % PANEL_VECTORS * VECTOR_BYTES;
        if (v * VECTOR_BYTES % 64 == 0) __builtin_prefetch(at + PREFETCH_BYTES);
        weights[v] = load_words(at);
    }
#pragma GCC unroll 14
    for (int row = 0; row < rows; row++) {
        Words step = load_step(x + row * x_bytes, step_bytes);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sums[row][v] = add_step(sums[row][v], step, weights[v], dtype);
    }
}

/* x [rows, depth] times `vectors` vectors of columns beginning at w -> out [rows][vectors * LANES]. */
INLINE void block(const Gemm *args, const char *x, const char *w, int64_t panel_bytes, float *out, const int rows,
                  const int vectors, const int dtype) {
    Floats sums[MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 14
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sums[row][v] = (Floats){0};
    const int64_t x_bytes = args->x_stride * (dtype == FLOAT32 ? 4 : 2);
    const int64_t whole_steps = dtype == FLOAT32 ? args->depth : args->depth / 2;
    for (int64_t step = 0; step < whole_steps; step++, x += 4, w += STEP_BYTES)
        block_step(sums, x, x_bytes, 4, w, panel_bytes, rows, vectors, dtype);
    if (dtype != FLOAT32 && args->depth % 2) block_step(sums, x, x_bytes, 2, w, panel_bytes, rows, vectors, dtype);
#pragma GCC unroll 14
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) store_floats(out + (row * vectors + v) * LANES, sums[row][v]);
}

typedef void (*Block)(const Gemm *args, const char *x, const char *w, int64_t panel_bytes, float *out);

#define DEFINE(name, rows, vectors, dtype)                                                                    \
    static void name(const Gemm *args, const char *x, const char *w, int64_t panel_bytes, float *out) {       \
        block(args, x, w, panel_bytes, out, rows, vectors, dtype);                                            \
    }
#define DEFINE_NARROW(rows)                       \
    DEFINE(float32_##rows, rows, NARROW, FLOAT32) \
    DEFINE(bfloat16_##rows, rows, NARROW, BFLOAT16)
#define DEFINE_BOTH(rows)                                         \
    DEFINE_NARROW(rows)                                           \
    DEFINE(wide_float32_##rows, rows, VECTORS_OF(rows), FLOAT32)  \
    DEFINE(wide_bfloat16_##rows, rows, VECTORS_OF(rows), BFLOAT16)
#define NARROW_OF(rows) {{float32_##rows, bfloat16_##rows}, {float32_##rows, bfloat16_##rows}}
#define BOTH_OF(rows) {{float32_##rows, bfloat16_##rows}, {wide_float32_##rows, wide_bfloat16_##rows}}

/* BLOCKS[rows - 1][is wide][dtype] */
DEFINE_BOTH(1)
DEFINE_BOTH(2)
#if MAX_ROWS == 14
DEFINE_BOTH(3)
DEFINE_BOTH(4)
DEFINE_BOTH(5)
DEFINE_BOTH(6)
DEFINE_NARROW(7)
DEFINE_NARROW(8)
DEFINE_NARROW(9)
DEFINE_NARROW(10)
DEFINE_NARROW(11)
DEFINE_NARROW(12)
DEFINE_NARROW(13)
DEFINE_NARROW(14)
static const Block BLOCKS[MAX_ROWS][2][2] = {
    BOTH_OF(1),   BOTH_OF(2),   BOTH_OF(3),    BOTH_OF(4),    BOTH_OF(5),    BOTH_OF(6),    NARROW_OF(7),
    NARROW_OF(8), NARROW_OF(9), NARROW_OF(10), NARROW_OF(11), NARROW_OF(12), NARROW_OF(13), NARROW_OF(14),
};
#else
DEFINE_NARROW(3)
DEFINE_NARROW(4)
static const Block BLOCKS[MAX_ROWS][2][2] = {BOTH_OF(1), BOTH_OF(2), NARROW_OF(3), NARROW_OF(4)};
#endif

/* Element [row, column] of y and those after it in the row: sums plus the bias, as y_dtype. */
static void store_row(const Gemm *args, const float *sums, int64_t row, int64_t column, int64_t num_columns) {
    float biased[MAX_VECTORS * LANES];
    if (args->bias) {
        for (int64_t i = 0; i < num_columns; i++) biased[i] = sums[i] + args->bias[column + i];
        sums = biased;
    }
    int64_t at = row * args->y_stride + column, i = 0;
    if (args->y_dtype == FLOAT32) {
        memcpy((float *)args->y + at, sums, num_columns * sizeof *sums);
        return;
    }
    uint16_t *y = (uint16_t *)args->y + at;
    for (; i + LANES <= num_columns; i += LANES) store_bfloat16(y + i, load_floats(sums + i));
    for (; i < num_columns; i++) y[i] = bfloat16_of_float(sums[i]);
}

/* Rows [row, row + rows) times the panels [first, last), at most MAX_VECTORS wide. */
static void multiply_block(const Gemm *args, int64_t row, int rows, int64_t first, int64_t last) {
    const int64_t panel_bytes = packed_bytes(PANEL_COLUMNS, args->depth, args->dtype);
    const char *x = (const char *)args->x + row * args->x_stride * element_bytes(args->dtype);
    const int wide = VECTORS_OF(rows);
    float sums[MAX_SUMS * LANES];
    for (int64_t v = first * PANEL_VECTORS, vectors; v < last * PANEL_VECTORS; v += vectors) {
        int is_wide = v + wide <= last * PANEL_VECTORS;
        vectors = is_wide ? wide : NARROW;
        const char *w = (const char *)args->weights + v / PANEL_VECTORS * panel_bytes + v % PANEL_VECTORS * VECTOR_BYTES;
        BLOCKS[rows - 1][is_wide][args->dtype](args, x, w, panel_bytes, sums);
        int64_t columns = args->num_columns - v * LANES; /* the last panel's may be fewer */
        if (columns > vectors * LANES) columns = vectors * LANES;
        for (int i = 0; i < rows && columns > 0; i++)
            store_row(args, sums + i * vectors * LANES, row + i, v * LANES, columns);
    }
}

/* Rows [begin, end) times the panels [first, last): a few panels at once, so that the rows
 * of a block stay in the first level cache, meet all rows of a chunk. */
static void multiply(const Gemm *args, int64_t begin, int64_t end, int64_t first, int64_t last) {
    const int64_t panels_at_once = MAX_VECTORS * LANES / PANEL_COLUMNS;
    int64_t chunk_rows = CHUNK_BYTES / (args->depth * element_bytes(args->dtype));
    if (chunk_rows < MAX_ROWS) chunk_rows = MAX_ROWS;
    for (int64_t chunk_end; begin < end; begin = chunk_end) {
        chunk_end = end - begin > chunk_rows ? begin + chunk_rows : end;
        int64_t num_rows = chunk_end - begin, num_blocks = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
        for (int64_t panel = first; panel < last; panel += panels_at_once) {
            int64_t panel_end = last - panel > panels_at_once ? panel + panels_at_once : last;
            for (int64_t i = 0; i < num_blocks; i++) {
                int64_t row = num_rows * i / num_blocks;
                int rows = (int)(num_rows * (i + 1) / num_blocks - row);
                multiply_block(args, begin + row, rows, panel, panel_end);
            }
        }
    }
}

void gemm_part(const Gemm *args, int thread, int num_threads) {
    int64_t num_panels = (args->num_columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS, num_rows = args->num_rows;
    if (num_rows >= ROWS_TO_SPLIT * num_threads)
        multiply(args, num_rows * thread / num_threads, num_rows * (thread + 1) / num_threads, 0, num_panels);
    else
        multiply(args, 0, num_rows, num_panels * thread / num_threads, num_panels * (thread + 1) / num_threads);
}

EXPORT void gemm(const Gemm *args) { pool_run((Job)gemm_part, (void *)args); }
