/* Functions on one row of numbers that several kernels use. */
#ifndef ROW_MATH_H
#define ROW_MATH_H

#include <math.h>

#include "vector_math.h"

/* Return the sum of the squares of a row. Four sums each take every fourth vector; the last vectors, which do not fill
 * a group of four, are added to the first sum. */
INLINE float sum_of_squares(const void *x, int64_t width, const int dtype) {
    Floats sums[4] = {0};
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            Floats numbers = load_numbers(x, i + j * LANES, dtype);
            sums[j] = multiply_add(numbers, numbers, sums[j]);
        }
    for (; i + LANES <= width; i += LANES) {
        Floats numbers = load_numbers(x, i, dtype);
        sums[0] = multiply_add(numbers, numbers, sums[0]);
    }
    if (i < width) {
        Floats numbers = load_tail(x, i, width - i, dtype);
        sums[0] = multiply_add(numbers, numbers, sums[0]);
    }
    return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/* out = x / sqrt(mean(x ** 2) + eps) * weight. */
INLINE void normalise(const void *x, const int dtype, const float *weight, float eps, int64_t width, void *out,
                      const int out_dtype) {
    const float scale = 1.0f / sqrtf(sum_of_squares(x, width, dtype) / (float)width + eps);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        store_numbers(out, i, load_numbers(x, i, dtype) * scale * load_floats(weight + i), out_dtype);
    if (i < width) {
        Floats tail = load_tail(x, i, width - i, dtype) * scale * load_tail(weight, i, width - i, FLOAT32);
        store_tail(out, i, width - i, tail, out_dtype);
    }
}

#endif
