#include "sampling/token_masks.h"

#include <math.h>

#include "threads/pool.h"
#include "math/vector_math.h"

typedef struct {
    float *logits;
    const int64_t *rows;
    const uint32_t *masks;
    int64_t vocab_size, num_words, num_masks;
} TokenMasks;

/* Apply a word to the 32 logits from here on. */
INLINE void mask_word(float *logits, uint32_t word) {
    if (word == 0xFFFFFFFFu) return;
    const Floats forbidden = all_floats(-INFINITY);
    Words lane;
    for (int i = 0; i < LANES; i++) lane[i] = 1u << i;
    for (int i = 0; i < 32; i += LANES) {
        const Signed allows = (Signed)((all_words(word >> i) & lane) != 0);
        store_floats(logits + i, choose(allows, load_floats(logits + i), forbidden));
    }
}

static void mask_row(const TokenMasks *args, int64_t index) {
    float *logits = args->logits + args->rows[index] * args->vocab_size;
    const uint32_t *mask = args->masks + index * args->num_words;
    const int64_t num_whole = args->vocab_size / 32 < args->num_words ? args->vocab_size / 32 : args->num_words;
    for (int64_t word = 0; word < num_whole; word++) mask_word(logits + word * 32, mask[word]);
    for (int64_t i = num_whole * 32; i < args->vocab_size; i++) {
        const uint32_t word = i / 32 < args->num_words ? mask[i / 32] : 0;
        if (!(word >> i % 32 & 1)) logits[i] = -INFINITY;
    }
}

static void mask_job(void *job_args, int thread, int num_threads) {
    const TokenMasks *args = job_args;
    for (int64_t i = thread; i < args->num_masks; i += num_threads) mask_row(args, i);
}

EXPORT void mask_logits(float *logits, int64_t vocab_size, const int64_t *rows, const uint32_t *masks,
                        int64_t num_words, int64_t num_masks) {
    TokenMasks args = {logits, rows, masks, vocab_size, num_words, num_masks};
    if (num_masks == 1)
        mask_job(&args, 0, 1);
    else
        pool_run(mask_job, &args);
}
