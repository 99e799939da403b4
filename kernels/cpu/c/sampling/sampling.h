/* Samples one token per row of logits. The token depends on that row, its parameters, seed, position and choice alone.
 *
 * The order is: temperature, min_p, top_k (ties of the last one are kept), top_p, then a draw. A draw takes the
 * remaining token with the largest logit / temperature (float32) + Gumbel noise (float64, gumbel.h), and the lowest id
 * on a tie. min_p and top_p see weights exp(logit / temperature - the largest one) in float32, whose sums are float64:
 * of all tokens in vocabulary order, of the largest ones in descending order, ties by lower id.
 */
#ifndef SAMPLING_H
#define SAMPLING_H

#include <stdint.h>

/* Used for the index of a largest logit that is unknown. */
#define UNKNOWN (-2)

typedef struct {
    const float *logits;      /* [num_rows, vocab_size] */
    const float *temperature; /* [num_rows], as all below; 0 = the largest logit, the first on a tie. NULL: 0 for all
                               * rows, and the others are not read */
    const int64_t *top_k;     /* 0 = all */
    const float *top_p, *min_p;
    const uint64_t *seed;
    const int64_t *position, *choice;
    const int32_t *largest; /* find_largest() of these logits, or UNKNOWN for some rows; NULL = unknown */
    int32_t *tokens; /* out; -1 if the row's largest logit / temperature is not finite */
    char *scratch;   /* sampling_scratch_bytes() for each thread, 64-byte aligned */
    int64_t num_rows, vocab_size;
} Sampling;

/* Find the index of each row's largest logit, the first on a tie; -1 if that logit is not finite. */
void find_largest(const float *logits, int64_t num_rows, int64_t vocab_size, int32_t *largest);

void sample_part(const Sampling *args, int thread, int num_threads);
void sample(const Sampling *args);

int64_t sampling_scratch_bytes(int64_t vocab_size);

#endif
