/* Samples one token per row of logits. The token depends on that row, its parameters, seed, position and choice alone.
 *
 * The order is: temperature, min_p, top_k (ties of the last one are kept), top_p, then a draw. A draw applies the
 * inverse cumulative distribution of the remaining tokens to one Philox4x32-10 uniform (Salmon et al. 2011). Rows with
 * top_p < 1 or top_k < vocab_size order the tokens by descending logit, ties by lower id; other rows use vocabulary
 * order. Weights are exp(logit / temperature - the largest one) in float32. Their sums are float64, in the order of the
 * draw.
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
    const int32_t *largest; /* find_largest() of these logits; NULL = not known */
    int32_t *tokens; /* out; -1 if the row's largest logit / temperature is not finite */
    char *scratch;   /* sampling_scratch_bytes() for each thread, 64-byte aligned */
    int64_t num_rows, vocab_size;
} Sampling;

/* Find the index of each row's largest logit, the first of equals; -1 if that logit is not finite. */
void find_largest(const float *logits, int64_t num_rows, int64_t vocab_size, int32_t *largest);

void sample_part(const Sampling *args, int thread, int num_threads);
void sample(const Sampling *args);

int64_t sampling_scratch_bytes(int64_t vocab_size);

#endif
