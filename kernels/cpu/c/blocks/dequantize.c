#include "blocks/dequantize.h"

#include "blocks/block_readers.h"
#include "threads/pool.h"

EXPORT uint8_t block_grids[GRID_BYTES];
EXPORT const int32_t block_grids_bytes = GRID_BYTES;

#define DEFINE_READER(name, type, unused)                                                                              \
    static void read_##name(const uint8_t *blocks, int64_t num_blocks, float *out) {                                   \
        for (; num_blocks > 0; num_blocks--, blocks += block_bytes(type), out += block_weights(type))                  \
            read_block_of(blocks, out, type);                                                                          \
    }
#define READER(name, type, unused) [type] = read_##name,

#define EACH_FILE_TYPE(X)                                                                                              \
    X(tq1_0, TQ1_0, ) X(iq2_xs, IQ2_XS, ) X(iq2_s, IQ2_S, ) X(iq3_xxs, IQ3_XXS, ) X(iq3_s, IQ3_S, ) X(iq1_s, IQ1_S, )   \
    X(iq1_m, IQ1_M, )

EACH_PANEL_TYPE(DEFINE_READER, )
EACH_FILE_TYPE(DEFINE_READER)

void read_blocks(const void *blocks, int32_t type, int64_t num_blocks, float *out) {
    static void (*const READERS[NUM_TYPES])(const uint8_t *, int64_t, float *) = {
        EACH_PANEL_TYPE(READER, ) EACH_FILE_TYPE(READER)};
    READERS[type](blocks, num_blocks, out);
}

/* Weights that are read at once, to be rounded. */
enum { CHUNK = 2048 };

void dequantize_part(const Dequantize *args, int thread, int num_threads) {
    const int64_t begin = args->num_blocks * thread / num_threads, end = args->num_blocks * (thread + 1) / num_threads;
    const int weights = block_weights(args->type), bytes = block_bytes(args->type);
    const char *blocks = args->blocks;
    if (args->dtype == FLOAT32) {
        read_blocks(blocks + begin * bytes, args->type, end - begin, (float *)args->out + begin * weights);
        return;
    }
    float chunk[CHUNK];
    for (int64_t i = begin; i < end; i += CHUNK / weights) {
        const int64_t count = end - i < CHUNK / weights ? end - i : CHUNK / weights;
        uint16_t *to = (uint16_t *)args->out + i * weights;
        read_blocks(blocks + i * bytes, args->type, count, chunk);
        for (int64_t j = 0; j < count * weights; j += LANES) store_bfloat16(to + j, load_floats(chunk + j));
    }
}

static void dequantize_job(void *args, int thread, int num_threads) { dequantize_part(args, thread, num_threads); }

EXPORT void dequantize(const Dequantize *args) { pool_run(dequantize_job, (void *)args); }
