/* Functions on one row of numbers that several kernels use. */
#ifndef ROW_MATH_H
#define ROW_MATH_H

#include <math.h>

#include "math/vector_math.h"

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

/* Return the last, incomplete vector of a row minus the mean; lanes past the end are zero. */
INLINE Floats centred_tail(const void *x, int64_t index, int64_t count, const int dtype, float mean) {
    Floats numbers = load_tail(x, index, count, dtype) - mean;
    for (int64_t i = count; i < LANES; i++) numbers[i] = 0.0f;
    return numbers;
}

/* Return the sum of a row's numbers minus the mean, or of their squares. The order is that of sum_of_squares(). */
INLINE float sum_of_row(const void *x, int64_t width, const int dtype, float mean, const int squares) {
    Floats sums[4] = {0};
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const Floats numbers = load_numbers(x, i + j * LANES, dtype) - mean;
            sums[j] = squares ? multiply_add(numbers, numbers, sums[j]) : sums[j] + numbers;
        }
    for (; i < width; i += LANES) {
        const int is_whole = i + LANES <= width;
        const Floats numbers =
            is_whole ? load_numbers(x, i, dtype) - mean : centred_tail(x, i, width - i, dtype, mean);
        sums[0] = squares ? multiply_add(numbers, numbers, sums[0]) : sums[0] + numbers;
    }
    return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/* out = (x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps) * weight + bias; out may be x if both have one dtype. */
INLINE void normalise_centred(const void *x, const int dtype, const float *weight, const float *bias, float eps,
                              int64_t width, void *out, const int out_dtype) {
    const float mean = sum_of_row(x, width, dtype, 0.0f, 0) / (float)width;
    const float scale = 1.0f / sqrtf(sum_of_row(x, width, dtype, mean, 1) / (float)width + eps);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        Floats numbers = (load_numbers(x, i, dtype) - mean) * scale * load_floats(weight + i);
        if (bias) numbers += load_floats(bias + i);
        store_numbers(out, i, numbers, out_dtype);
    }
    if (i < width) {
        Floats tail = (load_tail(x, i, width - i, dtype) - mean) * scale * load_tail(weight, i, width - i, FLOAT32);
        if (bias) tail += load_tail(bias, i, width - i, FLOAT32);
        store_tail(out, i, width - i, tail, out_dtype);
    }
}

/* Copy a row of float32 to out of dtype, each number rounded once. */
INLINE void convert(const float *x, int64_t width, void *out, const int dtype) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store_numbers(out, i, load_floats(x + i), dtype);
    if (i < width) store_tail(out, i, width - i, load_tail(x, i, width - i, FLOAT32), dtype);
}

/* Rotate one vector of each half, from `index` on. */
INLINE void rotate_vectors(const void *x, const int x_dtype, const float *cos, const float *sin, int half, int index,
                           void *out, const int dtype) {
    const int other = index + half;
    const Floats a = load_numbers(x, index, x_dtype), b = load_numbers(x, other, x_dtype);
    store_numbers(out, index, a * load_floats(cos + index) + b * load_floats(sin + index), dtype);
    store_numbers(out, other, b * load_floats(cos + other) + a * load_floats(sin + other), dtype);
}

/* Rotate x [2 * half] of x_dtype to out of dtype; the two must not overlap. */
INLINE void rotate(const void *x, const int x_dtype, const float *cos, const float *sin, int half, void *out,
                   const int dtype) {
    int i = 0;
    for (; i + LANES <= half; i += LANES) rotate_vectors(x, x_dtype, cos, sin, half, i, out, dtype);
    if (i == half) return;
    if (half >= LANES) { /* some numbers are computed twice, with the same result */
        rotate_vectors(x, x_dtype, cos, sin, half, half - LANES, out, dtype);
        return;
    }
    const Floats a = load_tail(x, 0, half, x_dtype), b = load_tail(x, half, half, x_dtype);
    const Floats cos_a = load_tail(cos, 0, half, FLOAT32), cos_b = load_tail(cos, half, half, FLOAT32);
    const Floats sin_a = load_tail(sin, 0, half, FLOAT32), sin_b = load_tail(sin, half, half, FLOAT32);
    store_tail(out, 0, half, a * cos_a + b * sin_a, dtype);
    store_tail(out, half, half, b * cos_b + a * sin_b, dtype);
}

/* Return whether the numbers in these bytes are finite. */
INLINE int is_finite_row(const char *x, int bytes, const int dtype) {
    Words finite = all_words(0xffffffff), tail = {0};
    int i = 0;
    for (; i + VECTOR_BYTES <= bytes; i += VECTOR_BYTES) finite &= finite_numbers(load_words(x + i), dtype);
    if (i < bytes) memcpy(&tail, x + i, bytes - i);
    return !is_any_set(~(finite & finite_numbers(tail, dtype)));
}

#endif
