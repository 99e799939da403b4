#include "attention/latent.h"

#include "attention/cache_layout.h"
#include "threads/pool.h"
#include "math/row_math.h"

/* The products of all heads, each with its own matrix: from its numbers of a row of x to its numbers of y. */
typedef struct {
    const Gemm *weights; /* [num_heads], all of one shape */
    const char *x;
    char *y;
    int64_t x_stride, y_stride; /* elements from row to row */
    int64_t x_step, y_step;     /* from head to head */
    int64_t num_rows;
    int num_heads;
} HeadProducts;

static Gemm product_of_head(const HeadProducts *args, int head, int64_t begin, int64_t end) {
    Gemm product = args->weights[head];
    product.x_stride = args->x_stride, product.y_stride = args->y_stride;
    product.x = args->x + (begin * args->x_stride + head * args->x_step) * element_bytes(product.dtype);
    product.y = args->y + (begin * args->y_stride + head * args->y_step) * element_bytes(product.y_dtype);
    product.num_rows = end - begin;
    return product;
}

/* Compute a thread's share: some rows, or pieces of the heads' panels. */
static void multiply_heads(const HeadProducts *args, int thread, int num_threads) {
    const int64_t num_rows = args->num_rows;
    const int64_t num_panels = (args->weights->num_columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
    if (gemm_splits_rows(num_rows, num_threads, args->weights->dtype)) {
        const int64_t begin = num_rows * thread / num_threads, end = num_rows * (thread + 1) / num_threads;
        for (int head = 0; begin < end && head < args->num_heads; head++) {
            const Gemm product = product_of_head(args, head, begin, end);
            gemm_panels(&product, 0, num_panels);
        }
        return;
    }
    Gemm whole = *args->weights;
    whole.num_rows = num_rows;
    const int64_t piece = gemm_piece(&whole), pieces = (num_panels + piece - 1) / piece;
    const int64_t count = pieces * args->num_heads;
    for (int i = 0; i < num_threads; i++) { /* first the thread's own, then what is left of the others' */
        const int owner = (thread + i) % num_threads;
        const int64_t begin = count * owner / num_threads, end = count * (owner + 1) / num_threads;
        for (int64_t at; (at = begin + pool_take(owner)) < end;) {
            const Gemm product = product_of_head(args, (int)(at / pieces), 0, num_rows);
            const int64_t first = at % pieces * piece;
            gemm_panels(&product, first, first + piece < num_panels ? first + piece : num_panels);
        }
    }
}

static int64_t width_of(const Latent *latent) { return latent->query_dim + latent->latent_dim + latent->rotated_dim; }

/* Return a row of qkv from number `at` on. */
static char *part_of(const LatentStep *args, int64_t row, int64_t at) {
    return (char *)args->qkv + (row * width_of(args->latent) + at) * element_bytes(args->shape.dtype);
}

INLINE void write_latent(const LatentStep *args, int64_t row, const int dtype) {
    const Latent *latent = args->latent;
    const int64_t slot = args->slots[row], at = args->positions[row] * latent->rotated_dim;
    char key[MAX_HEAD_DIM * 4] __attribute__((aligned(64)));
    char *rotated = key + latent->latent_dim * element_bytes(dtype);
    if (slot < 0) return;
    normalise(part_of(args, row, latent->query_dim), dtype, latent->latent_norm, latent->eps, latent->latent_dim, key, dtype);
    rotate(part_of(args, row, latent->query_dim + latent->latent_dim), dtype, args->cos + at, args->sin + at,
           latent->rotated_dim / 2, rotated, dtype);
    if (!is_finite_row(key, args->shape.head_dim * (int)element_bytes(dtype), dtype)) memset(key, 0xff, 4);
    put_in_cache(&args->shape, args->layer, slot / args->shape.block_size, (int)(slot % args->shape.block_size), 0, 0, key);
}

/* Write a row's latent vector and rotated part to the cache, and normalise its query's latent vector. */
static __attribute__((noinline)) void write_row(const LatentStep *args, int64_t row) {
    const Latent *latent = args->latent;
    char *query = part_of(args, row, 0);
    if (args->shape.dtype == FLOAT32) {
        write_latent(args, row, FLOAT32);
        if (latent->query) normalise(query, FLOAT32, latent->query_norm, latent->eps, latent->query_dim, query, FLOAT32);
    } else {
        write_latent(args, row, BFLOAT16);
        if (latent->query) normalise(query, BFLOAT16, latent->query_norm, latent->eps, latent->query_dim, query, BFLOAT16);
    }
}

/* Write the rotated parts of a row's queries to q. */
static __attribute__((noinline)) void rotate_row(const LatentStep *args, int64_t row, const char *queries, int64_t stride) {
    const Latent *latent = args->latent;
    const int dtype = args->shape.dtype, half = latent->rotated_dim / 2;
    const int64_t at = args->positions[row] * latent->rotated_dim, bytes = element_bytes(dtype);
    const int64_t width = latent->plain_dim + latent->rotated_dim, out_width = latent->latent_dim + latent->rotated_dim;
    const float *cos = args->query_cos + at, *sin = args->query_sin + at;
    for (int head = 0; head < latent->num_heads; head++) {
        const char *x = queries + (row * stride + head * width + latent->plain_dim) * bytes;
        char *out = (char *)args->q + ((row * latent->num_heads + head) * out_width + latent->latent_dim) * bytes;
        if (dtype == FLOAT32)
            rotate(x, FLOAT32, cos, sin, half, out, FLOAT32);
        else
            rotate(x, BFLOAT16, cos, sin, half, out, BFLOAT16);
    }
}

/* Separate two parts, the second of which reads row by row what the first wrote. No barrier is needed if threads divide
 * the rows. */
static void go_on_by_rows(const LatentStep *args, int num_threads) {
    if (!gemm_splits_rows(args->num_rows, num_threads, args->shape.dtype)) pool_barrier();
}

/* Compute the queries' heads from their latent vectors. */
static void expand_queries(const LatentStep *args, int thread, int num_threads) {
    Gemm product = *args->latent->query;
    product.x = args->qkv, product.x_stride = width_of(args->latent);
    product.y = args->queries, product.y_stride = product.num_columns;
    product.num_rows = args->num_rows;
    product.quantized = args->quantized, product.quantized_stride = args->quantized_stride;
    gemm_part(&product, thread, num_threads);
}

void latent_begin_part(const LatentStep *args, int thread, int num_threads) {
    const Latent *latent = args->latent;
    const int64_t begin = args->num_rows * thread / num_threads, end = args->num_rows * (thread + 1) / num_threads;
    const int64_t width = latent->plain_dim + latent->rotated_dim, out_width = latent->latent_dim + latent->rotated_dim;
    for (int64_t row = begin; row < end; row++) write_row(args, row);
    if (latent->query) {
        go_on_by_rows(args, num_threads);
        expand_queries(args, thread, num_threads);
        go_on_by_rows(args, num_threads);
    }
    const char *queries = latent->query ? args->queries : args->qkv;
    const int64_t stride = latent->query ? latent->num_heads * width : width_of(latent);
    for (int64_t row = begin; row < end; row++) rotate_row(args, row, queries, stride);
    const HeadProducts products = {latent->keys, queries,   args->q, stride,         latent->num_heads * out_width,
                                   width,        out_width, args->num_rows, latent->num_heads};
    multiply_heads(&products, thread, num_threads);
}

void latent_values_part(const LatentValues *args, int thread, int num_threads) {
    const Latent *latent = args->latent;
    const int64_t heads = latent->num_heads, from = latent->latent_dim, to = latent->value_dim;
    const HeadProducts products = {latent->values, args->attended, args->values,   heads * from, heads * to,
                                   from,           to,             args->num_rows, latent->num_heads};
    multiply_heads(&products, thread, num_threads);
}

static void latent_begin_job(void *args, int thread, int num_threads) { latent_begin_part(args, thread, num_threads); }

EXPORT void latent_begin(const LatentStep *args) { pool_run(latent_begin_job, (void *)args); }

static void latent_values_job(void *args, int thread, int num_threads) { latent_values_part(args, thread, num_threads); }

EXPORT void latent_values(const LatentValues *args) { pool_run(latent_values_job, (void *)args); }
