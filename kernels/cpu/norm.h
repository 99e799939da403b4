/* Root mean square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467), with the addition before it:
 *
 *     hidden += x; out = hidden / sqrt(mean(hidden ** 2) + eps) * weight
 *
 * Both are done row by row. All intermediate numbers are float32. The squares of a row are summed in a fixed order.
 */
#ifndef NORM_H
#define NORM_H

#include <stdint.h>

typedef struct {
    float *hidden;       /* [num_rows, width], or NULL: x itself is normalised */
    const void *x;       /* [num_rows, width] of x_dtype, or NULL: nothing is added */
    const float *weight; /* [width] */
    void *out;           /* [num_rows, width] of out_dtype, or NULL: only the addition is wanted */
    int64_t num_rows, width;
    int32_t x_dtype, out_dtype; /* BFLOAT16 or FLOAT32 */
    float eps;
} Norm;

void norm_part(const Norm *args, int thread, int num_threads);
void norm(const Norm *args);

#endif
