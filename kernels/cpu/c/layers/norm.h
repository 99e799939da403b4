/* Root mean square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467), with the addition before it:
 *
 *     hidden += x * multiplier; out = hidden / sqrt(mean(hidden ** 2) + eps) * weight
 *
 * A norm that precedes the addition normalises hidden as it was before: `out` is what a parallel branch reads.
 *
 * With a scale, hidden is multiplied by it after the addition.
 *
 * A centred one is layer normalisation (Ba et al. 2016, arXiv 1607.06450): the row's mean is subtracted first, and a bias
 * may be added. All is done row by row. All intermediate numbers are float32. The sums of a row have a fixed order.
 */
#ifndef NORM_H
#define NORM_H

#include <stdint.h>

/* The constants of one normalisation. */
typedef struct {
    const float *weight; /* [width]; NULL = there is no such normalisation: out is hidden, rounded */
    const float *bias;   /* [width] for a centred norm; NULL = none */
    int32_t is_centred;
    int32_t replaces;    /* the result, in float32, also replaces hidden; only for centred norms */
    int32_t precedes;    /* hidden is normalised before x is added to it */
    int32_t reserved;
} NormWeights;

typedef struct {
    float *hidden;       /* [num_rows, width], or NULL: x itself is normalised */
    const void *x;       /* [num_rows, width] of x_dtype, or NULL: nothing is added */
    NormWeights norm;
    void *out;           /* [num_rows, width] of out_dtype, or NULL: only add */
    int64_t num_rows, width;
    int32_t x_dtype, out_dtype; /* BFLOAT16 or FLOAT32 */
    float eps, multiplier;
    float scale;         /* of hidden, after the addition; 0 = none */
    int32_t reserved;
} Norm;

void norm_part(const Norm *args, int thread, int num_threads);
void norm(const Norm *args);

#endif
