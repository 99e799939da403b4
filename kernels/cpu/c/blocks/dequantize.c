#include "blocks/dequantize.h"

#include "blocks/block_readers.h"
#include "threads/pool.h"

INLINE void store_weights(const Dequantize *args, int64_t first, const float *weights, int count) {
    if (args->dtype == FLOAT32) {
        memcpy((float *)args->out + first, weights, (size_t)count * sizeof *weights);
        return;
    }
    uint16_t *to = (uint16_t *)args->out + first;
    for (int i = 0; i < count; i += LANES) store_bfloat16(to + i, load_floats(weights + i));
}

/* A loop for one type, with its reader inlined. */
#define EACH_BLOCK(type)                                                                               \
    case type:                                                                                         \
        for (int64_t i = begin; i < end; i++) {                                                        \
            const int count = type < Q4_K ? SMALL : LARGE;                                             \
            read_block_of((const uint8_t *)args->blocks + i * block_bytes(type), weights, type);       \
            store_weights(args, i * count, weights, count);                                            \
        }                                                                                              \
        break;

void dequantize_part(const Dequantize *args, int thread, int num_threads) {
    const int64_t begin = args->num_blocks * thread / num_threads, end = args->num_blocks * (thread + 1) / num_threads;
    float weights[LARGE];
    switch (args->type) {
        EACH_BLOCK(Q8_0)
        EACH_BLOCK(Q4_0)
        EACH_BLOCK(Q4_1)
        EACH_BLOCK(Q5_0)
        EACH_BLOCK(Q5_1)
        EACH_BLOCK(Q4_K)
        EACH_BLOCK(Q5_K)
        EACH_BLOCK(Q6_K)
    }
}

static void dequantize_job(void *args, int thread, int num_threads) { dequantize_part(args, thread, num_threads); }

EXPORT void dequantize(const Dequantize *args) { pool_run(dequantize_job, (void *)args); }
