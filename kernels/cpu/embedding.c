#include "embedding.h"

#include "gemm.h"
#include "pool.h"
#include "vector_math.h"

INLINE void embed_row(const Embedding *args, int64_t row, const int dtype) {
    const int64_t width = args->width;
    const char *from = (const char *)args->table + args->ids[row] * width * element_bytes(dtype);
    float *out = args->out + row * width;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store_floats(out + i, load_numbers(from, i, dtype) * args->scale);
    if (i < width) store_tail(out, i, width - i, load_tail(from, i, width - i, dtype) * args->scale, FLOAT32);
}

/* The same of a packed table. */
static void embed_packed_row(const Embedding *args, int64_t row) {
    const int64_t id = args->ids[row], width = args->width, panel = id / PANEL_COLUMNS;
    const char *from = (const char *)args->table + panel * packed_bytes(PANEL_COLUMNS, width, args->dtype);
    float *out = args->out + row * width;
    from += id % PANEL_COLUMNS * 4;
    for (int64_t i = 0; i < width; from += PANEL_COLUMNS * 4) {
        if (args->dtype == FLOAT32) {
            float number;
            memcpy(&number, from, sizeof number);
            out[i++] = number * args->scale;
        } else {
            uint16_t pair[2];
            memcpy(pair, from, sizeof pair);
            out[i++] = float_of_bfloat16(pair[0]) * args->scale;
            if (i < width) out[i++] = float_of_bfloat16(pair[1]) * args->scale;
        }
    }
}

void embedding_part(const Embedding *args, int thread, int num_threads) {
    const int64_t begin = args->num_rows * thread / num_threads, end = args->num_rows * (thread + 1) / num_threads;
    for (int64_t row = begin; row < end; row++) {
        if (args->is_packed)
            embed_packed_row(args, row);
        else if (args->dtype == FLOAT32)
            embed_row(args, row, FLOAT32);
        else
            embed_row(args, row, BFLOAT16);
    }
}

static void embedding_job(void *args, int thread, int num_threads) { embedding_part(args, thread, num_threads); }

EXPORT void embedding(const Embedding *args) {
    if (args->num_rows * args->width <= NOT_SHARED)
        embedding_part(args, 0, 1);
    else
        pool_run(embedding_job, (void *)args);
}
