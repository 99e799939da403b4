#include "layers/norm.h"

#include "threads/pool.h"
#include "math/row_math.h"

/* Add a row of x to the row of hidden. */
INLINE void add_row(const Norm *args, float *hidden, const char *x, const int x_dtype) {
    const int64_t width = args->width, whole = width / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        store_floats(hidden + i, load_floats(hidden + i) + load_numbers(x, i, x_dtype) * args->multiplier);
    for (int64_t i = whole; i < width; i++) {
        const float number = x_dtype == FLOAT32 ? ((const float *)x)[i] : float_of_bfloat16(((const uint16_t *)x)[i]);
        hidden[i] += number * args->multiplier;
    }
}

/* Multiply the row of hidden by the scale. */
static void scale_row(const Norm *args, float *hidden) {
    const int64_t width = args->width, whole = width / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) store_floats(hidden + i, load_floats(hidden + i) * args->scale);
    for (int64_t i = whole; i < width; i++) hidden[i] *= args->scale;
}

/* Write the normalised row: of hidden, or of x without it. */
INLINE void write_row(const Norm *args, float *hidden, const char *x, char *out, const int x_dtype,
                      const int out_dtype) {
    const int64_t width = args->width;
    const void *from = hidden ? (const void *)hidden : x;
    const int dtype = hidden ? FLOAT32 : x_dtype;
    const NormWeights *norm = &args->norm;
    if (!norm->weight) {
        convert(from, width, out, out_dtype); /* float32 */
    } else if (!norm->is_centred) {
        normalise(from, dtype, norm->weight, args->eps, width, out, out_dtype);
    } else if (hidden && norm->replaces) {
        normalise_centred(hidden, FLOAT32, norm->weight, norm->bias, args->eps, width, hidden, FLOAT32);
        convert(hidden, width, out, out_dtype);
    } else {
        normalise_centred(from, dtype, norm->weight, norm->bias, args->eps, width, out, out_dtype);
    }
}

INLINE void norm_row(const Norm *args, int64_t row, const int x_dtype, const int out_dtype) {
    const int64_t width = args->width;
    float *hidden = args->hidden ? args->hidden + row * width : NULL;
    const char *x = args->x ? (const char *)args->x + row * width * element_bytes(x_dtype) : NULL;
    char *out = args->out ? (char *)args->out + row * width * element_bytes(out_dtype) : NULL;
    const int precedes = args->norm.precedes;
    if (out && precedes) write_row(args, hidden, x, out, x_dtype, out_dtype);
    if (hidden && x) add_row(args, hidden, x, x_dtype);
    if (hidden && args->scale != 0.0f) scale_row(args, hidden);
    if (out && !precedes) write_row(args, hidden, x, out, x_dtype, out_dtype);
}

void norm_part(const Norm *args, int thread, int num_threads) {
    const int64_t begin = args->num_rows * thread / num_threads, end = args->num_rows * (thread + 1) / num_threads;
    const int x_dtype = args->x_dtype, out_dtype = args->out_dtype;
    for (int64_t row = begin; row < end; row++) {
        if (x_dtype == BFLOAT16 && out_dtype == BFLOAT16)
            norm_row(args, row, BFLOAT16, BFLOAT16);
        else if (x_dtype == BFLOAT16)
            norm_row(args, row, BFLOAT16, FLOAT32);
        else if (out_dtype == BFLOAT16)
            norm_row(args, row, FLOAT32, BFLOAT16);
        else
            norm_row(args, row, FLOAT32, FLOAT32);
    }
}

static void norm_job(void *args, int thread, int num_threads) { norm_part(args, thread, num_threads); }

EXPORT void norm(const Norm *args) {
    if (args->num_rows * args->width <= NOT_SHARED)
        norm_part(args, 0, 1);
    else
        pool_run(norm_job, (void *)args);
}
