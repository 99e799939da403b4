#include "blocks/sums.h"

#include <string.h>

#include "math/elements.h"
#include "threads/pool.h"

typedef struct {
    const char *data;
    int64_t num_bytes;
    uint64_t *sums;
} Summing;

enum { LANES = 8, LINE = LANES * 8 };

static void add_line(uint64_t lanes[LANES], const char *line) {
    uint64_t words[LANES];
    memcpy(words, line, sizeof words);
    for (int i = 0; i < LANES; i++) lanes[i] = lanes[i] * SUM_FACTOR + words[i];
}

static uint64_t sum_piece(const char *data, int64_t num_bytes) {
    uint64_t lanes[LANES] = {0}, sum = 0;
    int64_t place = 0;
    for (; place + LINE <= num_bytes; place += LINE) add_line(lanes, data + place);
    if (place < num_bytes) {
        char line[LINE] = {0};
        memcpy(line, data + place, (size_t)(num_bytes - place));
        add_line(lanes, line);
    }
    for (int i = 0; i < LANES; i++) sum = sum * SUM_FACTOR + lanes[i];
    return sum;
}

static void sum_job(void *job, int thread, int num_threads) {
    const Summing *summing = job;
    const int64_t count = (summing->num_bytes + SUM_BYTES - 1) / SUM_BYTES, last = count * (thread + 1) / num_threads;
    for (int64_t piece = count * thread / num_threads; piece < last; piece++) {
        const int64_t begin = piece * SUM_BYTES, left = summing->num_bytes - begin;
        summing->sums[piece] = sum_piece(summing->data + begin, left < SUM_BYTES ? left : SUM_BYTES);
    }
}

EXPORT void sum_pieces(const void *data, int64_t num_bytes, uint64_t *sums) {
    Summing summing = {data, num_bytes, sums};
    pool_run(sum_job, &summing);
}
