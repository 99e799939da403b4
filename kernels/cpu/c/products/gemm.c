#include "products/gemm.h"

#include "layers/gate.h"
#include "products/gemm_amx.h"
#include "products/gemm_slices.h"
#include "products/int8.h"
#include "products/lora.h"
#include "threads/pool.h"

/* Rows of x are multiplied in chunks, each with all panels. A chunk has at most CHUNK_BYTES, so that a second level
 * cache keeps it and a panel. But it has at least CHUNK_ROWS rows, because each chunk reads the weights again. */
enum { CHUNK_BYTES = 384 << 10, CHUNK_ROWS = 112 };

/* Prefetch distance for weights that only one block of rows uses. The hardware's own prefetch ends at each page. */
enum { PREFETCH_BYTES = 4096 };

/* Panels that a thread takes at a time. Few, so that other threads can take work of a slow thread. Not one, because the
 * stream of reads is interrupted at the end of each piece. */
enum { PIECE = 4 };

/* With at least this many rows per thread, threads divide the rows instead of the panels. Not with AMX: there, many
 * rows cost so little that reading all of the weights in each thread would be noticeable. */
enum { ROWS_TO_SPLIT = 64 };

static int64_t num_panels(const Gemm *args) { return (args->num_columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS; }
static int64_t bytes_of_panel(const Gemm *args) {
    if (args->packing == COMPACT_WEIGHTS) return compact_panel_bytes(args->depth);
    return packed_bytes(PANEL_COLUMNS, args->depth, args->dtype);
}
static const char *weights_of_panel(const Gemm *args, int64_t panel) {
    const char *weights = args->weights;
    if (args->packing < QUANTIZED_WEIGHTS) return weights + panel * bytes_of_panel(args);
    return weights + quantized_panel(weights, panel)->offset;
}
/* Return the bytes of weights that a block reads at a time. */
static int64_t bytes_of_step(const Gemm *args) { return args->packing == COMPACT_WEIGHTS ? PAIR_BYTES : STEP_BYTES; }

typedef void (*Block)(const Work *work);

#define DEFINE(name, rows, vectors, dtype) \
    static void name(const Work *work) { block(*work, rows, vectors, dtype); }
#if HAS_COMPACT
#define DEFINE_COMPACT(rows) \
    static void compact_##rows(const Work *work) { compact_block(*work, rows); }
#define KINDS_OF(rows) {float32_##rows, bfloat16_##rows, compact_##rows}
#else
#define DEFINE_COMPACT(rows)
#define KINDS_OF(rows) {float32_##rows, bfloat16_##rows, NULL}
#endif
#define DEFINE_KINDS(rows)                                  \
    DEFINE(float32_##rows, rows, VECTORS_OF(rows), FLOAT32)   \
    DEFINE(bfloat16_##rows, rows, VECTORS_OF(rows), BFLOAT16) \
    DEFINE_COMPACT(rows)

enum { COMPACT = 2 }; /* a kind of weights, next to FLOAT32 and BFLOAT16 */

/* BLOCKS[rows - 1][kind of weights] */
DEFINE_KINDS(1)
DEFINE_KINDS(2)
DEFINE_KINDS(3)
DEFINE_KINDS(4)
#if MAX_ROWS >= 6
DEFINE_KINDS(5)
DEFINE_KINDS(6)
#endif
#if MAX_ROWS >= 8
DEFINE_KINDS(7)
DEFINE_KINDS(8)
#endif
#if MAX_ROWS == 14
DEFINE_KINDS(9)
DEFINE_KINDS(10)
DEFINE_KINDS(11)
DEFINE_KINDS(12)
DEFINE_KINDS(13)
DEFINE_KINDS(14)
static const Block BLOCKS[MAX_ROWS][3] = {
    KINDS_OF(1), KINDS_OF(2), KINDS_OF(3),  KINDS_OF(4),  KINDS_OF(5),  KINDS_OF(6),  KINDS_OF(7),
    KINDS_OF(8), KINDS_OF(9), KINDS_OF(10), KINDS_OF(11), KINDS_OF(12), KINDS_OF(13), KINDS_OF(14),
};
#elif MAX_ROWS == 8
static const Block BLOCKS[MAX_ROWS][3] = {KINDS_OF(1), KINDS_OF(2), KINDS_OF(3), KINDS_OF(4),
                                          KINDS_OF(5), KINDS_OF(6), KINDS_OF(7), KINDS_OF(8)};
#elif MAX_ROWS == 6
static const Block BLOCKS[MAX_ROWS][3] = {KINDS_OF(1), KINDS_OF(2), KINDS_OF(3),
                                          KINDS_OF(4), KINDS_OF(5), KINDS_OF(6)};
#else
static const Block BLOCKS[MAX_ROWS][3] = {KINDS_OF(1), KINDS_OF(2), KINDS_OF(3), KINDS_OF(4)};
#endif

/* Apply the activation to a row of a panel; columns past the matrix's last one have numbers too. */
INLINE void activate_as(float *numbers, const int function) {
    for (int v = 0; v < PANEL_COLUMNS; v += LANES)
        store_floats(numbers + v, activated(load_floats(numbers + v), function));
}

static void activate(float *numbers, const int function, const float *constants) {
    if (function == XIELU)
        for (int v = 0; v < PANEL_COLUMNS; v += LANES) store_floats(numbers + v, xielu(load_floats(numbers + v), constants));
    else if (function == GELU)
        activate_as(numbers, GELU);
    else if (function == RELU_SQUARED)
        activate_as(numbers, RELU_SQUARED);
    else if (function == QUICK_GELU)
        activate_as(numbers, QUICK_GELU);
    else
        activate_as(numbers, GELU_TANH);
}

/* Whether y is written past the caches: they would not keep it, and its lines are written whole, so none is read first.
 * Other threads see such writes after the pool's barrier, whose atomic addition waits for them. */
enum { PAST_CACHES_BYTES = 32 << 20 };
INLINE int is_past_caches(const Gemm *args) {
#if defined(__AVX512F__)
    const uint64_t aligned = (uint64_t)args->y | (uint64_t)args->y_stride * sizeof(float);
    return args->num_rows * args->num_columns >= PAST_CACHES_BYTES / (int64_t)sizeof(float) && aligned % 64 == 0;
#else
    (void)args;
    return 0;
#endif
}

INLINE void store_past_caches(float *to, const Floats values) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, (__m512)values);
#else
    store_floats(to, values);
#endif
}

/* Write num_columns elements of y from [row, column] on: sums plus the bias, maybe activated, as y_dtype. */
static void store_row(const Gemm *args, const float *sums, int64_t row, int64_t column, int64_t num_columns) {
    float biased[PANEL_COLUMNS];
    if (args->bias) {
        const float *bias = args->bias + column;
        int64_t i = 0;
        for (; i + LANES <= num_columns; i += LANES) store_floats(biased + i, load_floats(sums + i) + load_floats(bias + i));
        for (; i < num_columns; i++) biased[i] = sums[i] + bias[i];
        for (; i < PANEL_COLUMNS; i++) biased[i] = sums[i];
        sums = biased;
    }
    if (args->activation) {
        if (!args->bias) sums = memcpy(biased, sums, sizeof biased);
        activate(biased, args->activation, args->constants);
    }
    int64_t at = row * args->y_stride + column, i = 0;
    if (args->y_dtype == FLOAT32) {
        float *y = (float *)args->y + at;
        if (is_past_caches(args))
            for (; i + LANES <= num_columns; i += LANES) store_past_caches(y + i, load_floats(sums + i));
        for (; i + LANES <= num_columns; i += LANES) store_floats(y + i, load_floats(sums + i));
        if (i < num_columns) memcpy(y + i, sums + i, (num_columns - i) * sizeof *y);
        return;
    }
    uint16_t *y = (uint16_t *)args->y + at;
    for (; i + LANES <= num_columns; i += LANES) store_bfloat16(y + i, load_floats(sums + i));
    for (; i < num_columns; i++) y[i] = bfloat16_of_float(sums[i]);
}

/* Add the bias to the sums [rows][PANEL_COLUMNS] of a panel with a gate, which begins with column `column` of y. */
static void add_gated_bias(const Gemm *args, float *sums, int rows, int64_t column, int64_t columns) {
    const float *bias = args->bias + column;
    for (int i = 0; i < rows; i++, sums += PANEL_COLUMNS)
        for (int64_t j = 0; j < columns; j++) {
            sums[j] += bias[j];
            sums[PANEL_COLUMNS / 2 + j] += bias[args->num_columns / 2 + j];
        }
}

/* Write `columns` columns of y from [row, column] on, from the sums [rows][PANEL_COLUMNS] of a panel with a gate. */
INLINE void store_gated(const Gemm *args, const float *sums, int64_t row, int rows, int64_t column, int64_t columns,
                        const int function, const int dtype) {
    char *y = (char *)args->y + (row * args->y_stride + column) * element_bytes(dtype);
    for (int i = 0; i < rows; i++, sums += PANEL_COLUMNS, y += args->y_stride * element_bytes(dtype))
        for (int v = 0; v < PANEL_COLUMNS / 2; v += LANES) {
            Floats gate = load_floats(sums + v), up = load_floats(sums + PANEL_COLUMNS / 2 + v);
            if (dtype == BFLOAT16) gate = rounded_to_bfloat16(gate), up = rounded_to_bfloat16(up);
            const Floats result = gated(gate, up, function);
            if (v + LANES <= columns)
                store_numbers(y, v, result, dtype);
            else
                store_tail(y, v, columns - v, result, dtype);
        }
}

INLINE void store_gated_as(const Gemm *args, const float *sums, int64_t row, int rows, int64_t column, int64_t columns,
                           const int dtype) {
    if (args->gate == SILU)
        store_gated(args, sums, row, rows, column, columns, SILU, dtype);
    else if (args->gate == GELU_TANH)
        store_gated(args, sums, row, rows, column, columns, GELU_TANH, dtype);
    else if (args->gate == GELU)
        store_gated(args, sums, row, rows, column, columns, GELU, dtype);
    else
        store_gated(args, sums, row, rows, column, columns, CLAMPED_SILU, dtype);
}

void gemm_store_panel(const Gemm *args, float *sums, int64_t row, int rows, int64_t panel) {
    if (args->lora) lora_add(args->lora, sums, row, rows, panel, args->dtype);
    const int64_t parts = args->gate ? 2 : 1, in_panel = PANEL_COLUMNS / parts, column = panel * in_panel;
    const int64_t left = args->num_columns / parts - column, columns = left < in_panel ? left : in_panel;
    if (args->gate && args->bias) add_gated_bias(args, sums, rows, column, columns);
    if (!args->gate)
        for (int i = 0; i < rows; i++) store_row(args, sums + i * PANEL_COLUMNS, row + i, column, columns);
    else if (args->y_dtype == BFLOAT16)
        store_gated_as(args, sums, row, rows, column, columns, BFLOAT16);
    else
        store_gated_as(args, sums, row, rows, column, columns, FLOAT32);
}

/* Whether weights that are read once should be prefetched past the caches. On AMD (Zen 5) memory delivers them
 * sooner; on Intel (a Xeon with AMX) products of one row take 1.7 times as long. Other CPUs were not measured. */
static int reads_past_caches(void) {
#if defined(__x86_64__)
    return __builtin_cpu_is("amd");
#else
    return 0;
#endif
}

/* Multiply rows [row, row + rows) with the panels [first, last). `ahead` are weights to prefetch, ahead_step bytes
 * further at each step; NULL = those PREFETCH_BYTES after the ones that are read. */
static void multiply_block(const Gemm *args, int64_t row, int rows, int64_t first, int64_t last, const char *ahead,
                           int64_t ahead_step) {
    const int64_t panel_bytes = bytes_of_panel(args);
    const int is_compact = args->packing == COMPACT_WEIGHTS, kind = is_compact ? COMPACT : args->dtype;
    const int vectors = is_compact ? PANEL_VECTORS : VECTORS_OF(rows);
    _Alignas(64) float sums[MAX_ROWS * PANEL_COLUMNS];
    Work work = {.x_bytes = args->x_stride * element_bytes(args->dtype)};
    work.x = (const char *)args->x + row * work.x_bytes;
    work.depth = args->depth, work.ahead_step = ahead_step;
    work.streams = args->streams && !ahead && reads_past_caches();
    for (int64_t panel = first; panel < last; panel++) {
        for (int v = 0; v < PANEL_VECTORS; v += vectors) {
            work.w = (const char *)args->weights + panel * panel_bytes + v * VECTOR_BYTES;
            work.ahead = ahead ? ahead : work.w + PREFETCH_BYTES;
            work.out = sums + v * LANES;
            BLOCKS[rows - 1][kind](&work);
        }
        gemm_store_panel(args, sums, row, rows, panel);
    }
}

/* Multiply rows [begin, end) with the panels [first, last); `next` are the weights that are read after them. If
 * several blocks of rows use a panel, only the first block reads it from memory. To keep memory busy during that
 * time, each block prefetches its share of the next panel. */
static void multiply_chunk(const Gemm *args, int64_t begin, int64_t end, int64_t first, int64_t last,
                           const char *next) {
    const int64_t num_rows = end - begin, num_blocks = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const int64_t panel_bytes = bytes_of_panel(args);
    if (num_blocks == 1) {
        multiply_block(args, begin, (int)num_rows, first, last, NULL, bytes_of_step(args));
        return;
    }
    for (int64_t panel = first; panel < last; panel++) {
        const char *ahead = panel + 1 < last ? (const char *)args->weights + (panel + 1) * panel_bytes : next;
        for (int64_t i = 0; i < num_blocks; i++) {
            const int64_t row = num_rows * i / num_blocks;
            const int rows = (int)(num_rows * (i + 1) / num_blocks - row);
            multiply_block(args, begin + row, rows, panel, panel + 1, ahead + panel_bytes * i / num_blocks,
                           bytes_of_step(args) / num_blocks);
        }
    }
}

/* Rows at a distance of a page have the same sets of the first level cache: 8 of their lines fit, and a block has up to 14.
 * A chunk of at most SPREAD_BYTES is copied to rows with a line more. */
enum { PAGE = 4096, LINE = 64, SPREAD_BYTES = 960 << 10, LEAST_SPREAD_ROWS = 9 };

static int64_t spread_row(const Gemm *args) { return args->depth * element_bytes(args->dtype) + LINE; }

/* Whether blocks of rows have too many lines in the same sets. */
static int are_pages_apart(const Gemm *args) {
    return MAX_ROWS >= LEAST_SPREAD_ROWS && args->x_stride * element_bytes(args->dtype) % PAGE == 0;
}

static int is_spread(const Gemm *args, int64_t num_rows, int64_t panels) {
    return are_pages_apart(args) && num_rows >= LEAST_SPREAD_ROWS && panels >= PIECE &&
           num_rows * spread_row(args) <= SPREAD_BYTES;
}

/* A copy of a chunk's rows. A thread's room is allocated with all else that the library keeps for it. */
static _Thread_local char room[SPREAD_BYTES] __attribute__((aligned(LINE)));

/* Do what multiply_chunk() does, with a copy of the chunk's rows. */
static __attribute__((noinline)) void multiply_spread_chunk(const Gemm *args, int64_t begin, int64_t end, int64_t first,
                                                            int64_t last, const char *next) {
    const int64_t element = element_bytes(args->dtype), bytes = spread_row(args);
    for (int64_t row = begin; row < end; row++)
        memcpy(room + (row - begin) * bytes, (const char *)args->x + row * args->x_stride * element, bytes - LINE);
    Gemm spread = *args;
    spread.x = room - begin * bytes;
    spread.x_stride = bytes / element;
    multiply_chunk(&spread, begin, end, first, last, next);
}

/* Return the first of a thread's panels; they end at the next thread's first panel. */
static int64_t first_panel(const Gemm *args, int thread, int num_threads) {
    return num_panels(args) * thread / num_threads;
}

/* Multiply rows [begin, end) with the panels [first, last), in chunks of nearly equal numbers of rows. */
static void multiply(const Gemm *args, int64_t begin, int64_t end, int64_t first, int64_t last, const char *next) {
    int64_t chunk_rows = CHUNK_BYTES / (args->depth * element_bytes(args->dtype));
    if (chunk_rows < CHUNK_ROWS) chunk_rows = CHUNK_ROWS;
    const int64_t spread_rows = SPREAD_BYTES / spread_row(args);
    if (are_pages_apart(args) && chunk_rows > spread_rows && spread_rows >= CHUNK_ROWS / 2) chunk_rows = spread_rows;
    const int64_t num_rows = end - begin, num_chunks = (num_rows + chunk_rows - 1) / chunk_rows;
    const char *again = weights_of_panel(args, first);
    if (gemm_has_amx(args->dtype)) {
        gemm_multiply_amx(args, begin, end, first, last);
        return;
    }
    if (gemm_has_slices(args, num_rows)) {
        gemm_multiply_slices(args, begin, end, first, last);
        return;
    }
    if (args->packing == QUANTIZED_WEIGHTS) {
        quantized_multiply(args, begin, end, first, last);
        return;
    }
    for (int64_t i = 1; i <= num_chunks; i++) {
        const int64_t from = begin + num_rows * (i - 1) / num_chunks, to = begin + num_rows * i / num_chunks;
        const char *after = i < num_chunks ? again : next;
        if (is_spread(args, to - from, last - first))
            multiply_spread_chunk(args, from, to, first, last, after);
        else
            multiply_chunk(args, from, to, first, last, after);
    }
}

/* Multiply all rows with the panels of thread `owner`, piece by piece, except pieces that other threads have taken. */
static void multiply_pieces(const Gemm *args, int owner, int num_threads, const char *next) {
    const int64_t first = first_panel(args, owner, num_threads), last = first_panel(args, owner + 1, num_threads);
    const int64_t piece = gemm_piece(args);
    for (int64_t panel; (panel = first + pool_take(owner) * piece) < last;) {
        const int64_t end = last - panel > piece ? panel + piece : last;
        multiply(args, 0, args->num_rows, panel, end, end < last ? weights_of_panel(args, end) : next);
    }
}

int64_t gemm_piece(const Gemm *args) { return gemm_has_amx(args->dtype) ? gemm_amx_piece(args, PIECE) : PIECE; }

/* Whether a product of num_rows rows has the weights in their second form. */
static int uses_second(const Gemm *args, int64_t num_rows) {
    return args->second && args->second->weights && num_rows > STORED_ROWS;
}

/* Return a product with the weights in their second form. */
static Gemm with_second(const Gemm *args) {
    Gemm product = *args;
    product.weights = args->second->weights, product.packing = args->second->packing, product.second = NULL;
    return product;
}

void gemm_panels(const Gemm *args, int64_t first, int64_t last) {
    if (uses_second(args, args->num_rows)) {
        const Gemm product = with_second(args);
        gemm_panels(&product, first, last);
        return;
    }
    if (args->packing == INT8_WEIGHTS)
        int8_panels(args, first, last);
    else
        multiply(args, 0, args->num_rows, first, last, weights_of_panel(args, first));
}

int gemm_splits_rows(int64_t num_rows, int num_threads, int32_t dtype) {
    return num_threads == 1 || (num_rows >= ROWS_TO_SPLIT * num_threads && !gemm_has_amx(dtype));
}

void gemm_part(const Gemm *args, int thread, int num_threads) {
    if (uses_second(args, args->num_rows)) {
        const Gemm product = with_second(args);
        gemm_part(&product, thread, num_threads);
        return;
    }
    if (args->packing == INT8_WEIGHTS) {
        int8_part(args, thread, num_threads);
        return;
    }
    const int64_t num_rows = args->num_rows;
    Gemm next = args->next ? *args->next : *args;
    if (uses_second(&next, num_rows)) next = with_second(&next);
    if (gemm_splits_rows(num_rows, num_threads, args->dtype)) {
        const int64_t begin = num_rows * thread / num_threads, end = num_rows * (thread + 1) / num_threads;
        multiply(args, begin, end, 0, num_panels(args), next.weights);
        return;
    }
    const int64_t panel = first_panel(&next, thread, num_threads);
    const char *weights = weights_of_panel(&next, panel);
    for (int i = 0; i < num_threads; i++) /* first the thread's own panels, then what is left of the others' */
        multiply_pieces(args, (thread + i) % num_threads, num_threads, weights);
}

static void gemm_job(void *args, int thread, int num_threads) { gemm_part(args, thread, num_threads); }

EXPORT void gemm(const Gemm *args) { pool_run(gemm_job, (void *)args); }
