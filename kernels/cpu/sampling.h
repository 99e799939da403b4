/* One token per row of logits, a function of that row, its parameters and its position alone.
 *
 * Temperature, then min_p, top_k (ties of the last one stay) and top_p, then a draw: one Philox4x32-10 uniform (Salmon
 * et al. 2011) pushed through the inverse cumulative distribution of the tokens left - of rows with top_p < 1 or
 * top_k < vocab_size in order of descending logit, ties by lower id; of other rows in vocabulary order. Weights are
 * exp(logit / temperature - the largest), float32; their sums are float64, in the order of the draw.
 */
#ifndef SAMPLING_H
#define SAMPLING_H

#include <stdint.h>

typedef struct {
    const float *logits;      /* [num_rows, vocab_size] */
    const float *temperature; /* [num_rows], as all below; 0 = the largest logit, the first of equals. NULL: 0 for all
                                 rows, and none of the others is read */
    const int64_t *top_k;     /* 0 = all */
    const float *top_p, *min_p;
    const uint64_t *seed;
    const int64_t *position, *choice;
    const int32_t *largest; /* what find_largest() gave for these logits, or NULL: it was not asked */
    int32_t *tokens; /* -1 where the row's largest logit, over the temperature, is no finite number */
    char *scratch;   /* sampling_scratch_bytes() for each thread, 64-byte aligned */
    int64_t num_rows, vocab_size;
} Sampling;

/* Of some rows of logits: the index of each one's largest, the first of equals; -1 where that is no finite number. */
void find_largest(const float *logits, int64_t num_rows, int64_t vocab_size, int32_t *largest);

void sample_part(const Sampling *args, int thread, int num_threads);
void sample(const Sampling *args);

int64_t sampling_scratch_bytes(int64_t vocab_size);

#endif
