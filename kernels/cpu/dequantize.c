#include "dequantize.h"

#include "block_readers.h"
#include "pool.h"

INLINE void store_weights(const Dequantize *args, int64_t first, const float *weights, int count) {
    if (args->dtype == FLOAT32) {
        memcpy((float *)args->out + first, weights, (size_t)count * sizeof *weights);
        return;
    }
    uint16_t *to = (uint16_t *)args->out + first;
    for (int i = 0; i < count; i += LANES) store_bfloat16(to + i, load_floats(weights + i));
}

/* A loop for one type, with its reader inlined. */
#define EACH_BLOCK(read, block_bytes, block_weights)                                                  \
    for (int64_t i = begin; i < end; i++) {                                                           \
        read((const uint8_t *)args->blocks + i * (block_bytes), weights);                             \
        store_weights(args, i * (block_weights), weights, block_weights);                             \
    }                                                                                                 \
    break

void dequantize_part(const Dequantize *args, int thread, int num_threads) {
    const int64_t begin = args->num_blocks * thread / num_threads, end = args->num_blocks * (thread + 1) / num_threads;
    float weights[LARGE];
    switch (args->type) {
    case Q8_0: EACH_BLOCK(read_q8_0, 34, SMALL);
    case Q4_0: EACH_BLOCK(read_q4_0, 18, SMALL);
    case Q4_1: EACH_BLOCK(read_q4_1, 20, SMALL);
    case Q5_0: EACH_BLOCK(read_q5_0, 22, SMALL);
    case Q5_1: EACH_BLOCK(read_q5_1, 24, SMALL);
    case Q4_K: EACH_BLOCK(read_q4_k, 144, LARGE);
    case Q5_K: EACH_BLOCK(read_q5_k, 176, LARGE);
    case Q6_K: EACH_BLOCK(read_q6_k, 210, LARGE);
    }
}

static void dequantize_job(void *args, int thread, int num_threads) { dequantize_part(args, thread, num_threads); }

EXPORT void dequantize(const Dequantize *args) { pool_run(dequantize_job, (void *)args); }
