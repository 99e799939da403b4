/* The sums of a tensor core, and those of a float32 product, as GPUs compute them.

A product of 16-bit or 8-bit floats adds `group` neighbours of K at a time to the accumulator: the products are exact,
they and the accumulator are shifted to the largest exponent of all, cut to `fraction` bits behind the point, added
without error, and cut to a float with `kept` bits behind the point. For 16 bits Hopper has group 16 and fraction 25,
Ampere 8 and 24, and both keep the 23 of a float32. For 8 bits Hopper's wgmma has group 32 and Ada 16, both have fraction
13 and keep 13; Blackwell has 32, 25 and 23. A zero has the exponent -108 - fraction. See arXiv 2511.10909, which measured
this. A float32 product is a chain of fused multiply-adds. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum Kind { HALF, BFLOAT16, E4M3 }; /* E4M3 is in the low bits of 16 */

static float float_of(uint16_t code, enum Kind kind) {
    if (kind == E4M3) {
        const int exponent = code >> 3 & 15, fraction = code & 7;
        const float size = ldexpf((float)(exponent ? fraction | 8 : fraction), (exponent ? exponent : 1) - 10);
        return (code & 0x7f) == 0x7f ? NAN : code >> 7 ? -size : size;
    }
    if (kind == BFLOAT16) {
        uint32_t bits = (uint32_t)code << 16;
        float number;
        memcpy(&number, &bits, sizeof number);
        return number;
    }
    int exponent = code >> 10 & 31, fraction = code & 1023;
    float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                : ldexpf((float)(exponent ? fraction | 1024 : fraction), (exponent ? exponent : 1) - 25);
    return code >> 15 ? -size : size;
}

enum { FAR = -1000, LANES = 16 }; /* the exponent of 0: such a number or product is never the largest */

/* 2 ** power, a normal number */
static inline double power_of_two(int64_t power) {
    int64_t bits = (power + 1023) << 52;
    double number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* The exponent of a number. least: that of subnormal numbers. */
static inline int32_t exponent_of(float number, int least) {
    int32_t bits, power;
    memcpy(&bits, &number, sizeof bits);
    power = (bits >> 23 & 255) - 127;
    return (bits & 0x7fffffff) == 0 ? FAR : power > least ? power : least;
}

/* sum towards zero, as a float with `kept` bits behind the point times 2 ** power; 0 is never -0 */
static inline float cut(double sum, int64_t power, int kept) {
    sum += 0.0;
    int64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    bits &= ~((INT64_C(1) << (52 - kept)) - 1);
    memcpy(&sum, &bits, sizeof bits);
    const double steps = power_of_two(126 + kept), number = sum * power_of_two(power);
    const double subnormal = trunc(number * steps) / steps;
    return (float)(fabs(number) < 0x1p-126 ? subnormal : number);
}

/* Not unrolled, so that the compiler makes vectors of it. */
#define EACH_LANE _Pragma("GCC unroll 1") for (int i = 0; i < LANES; i++)

/* Add to the totals of LANES columns. a [depth] and b [depth, LANES]: numbers and their exponents. All that is added is
 * a whole number under 2 ** 53, so the order does not matter, and doubles are exact. */
static void add_groups(float *totals, const double *a, const int32_t *a_exponents, const double *b,
                       const int32_t *b_exponents, int depth, int group, int fraction, int kept) {
    for (int first = 0; first < depth; first += group) {
        int32_t most[LANES];
        double sums[LANES], scales[LANES];
        EACH_LANE {
            const int32_t own = exponent_of(totals[i], -126), least = -108 - fraction;
            most[i] = own > least ? own : least;
        }
        for (int k = first; k < first + group; k++)
            EACH_LANE {
                const int32_t exponent = a_exponents[k] + b_exponents[k * LANES + i];
                most[i] = exponent > most[i] ? exponent : most[i];
            }
        EACH_LANE scales[i] = power_of_two(fraction - most[i]);
        EACH_LANE sums[i] = trunc(totals[i] * scales[i]);
        for (int k = first; k < first + group; k++)
            EACH_LANE sums[i] += trunc(a[k] * b[k * LANES + i] * scales[i]);
        EACH_LANE totals[i] = cut(sums[i], most[i] - fraction, kept);
    }
}

static void take(uint16_t code, enum Kind kind, double *number, int32_t *exponent) {
    const float given = float_of(code, kind);
    *number = given;
    *exponent = exponent_of(given, kind == BFLOAT16 ? -126 : kind == HALF ? -14 : -6);
}

/* a [rows, depth], b [depth, columns] -> out = sums + a b [rows, columns]. */
static void tensor_core(const uint16_t *a, const uint16_t *b, const float *sums, float *out, int rows, int depth, int columns,
                 enum Kind kind, int group, int fraction, int kept) {
    const size_t left = (size_t)rows * depth, right = (size_t)depth * LANES;
    double *numbers = calloc(left + right, sizeof(double)), *theirs = numbers + left;
    int32_t *exponents = calloc(left + right, sizeof(int32_t)), *their_exponents = exponents + left;
    for (size_t i = 0; i < left; i++) take(a[i], kind, &numbers[i], &exponents[i]);
    for (int first = 0; first < columns; first += LANES) {
        const int count = columns - first < LANES ? columns - first : LANES;
        for (size_t k = 0; k < (size_t)depth; k++)
            for (int i = 0; i < count; i++)
                take(b[k * columns + first + i], kind, &theirs[k * LANES + i], &their_exponents[k * LANES + i]);
        for (size_t row = 0; row < (size_t)rows; row++) {
            float totals[LANES] = {0};
            memcpy(totals, sums + row * columns + first, sizeof(float) * count);
            add_groups(totals, numbers + row * depth, exponents + row * depth, theirs, their_exponents, depth, group,
                       fraction, kept);
            memcpy(out + row * columns + first, totals, sizeof(float) * count);
        }
    }
    free(numbers), free(exponents);
}

/* Of `count` programs. Steps: to the next program's numbers, 0 if all have the same. */
void tensor_cores(const uint16_t *a, const uint16_t *b, const float *sums, float *out, int rows, int depth, int columns,
                  int count, size_t a_step, size_t b_step, size_t sums_step, enum Kind kind, int group, int fraction,
                  int kept) {
    for (size_t i = 0; i < (size_t)count; i++)
        tensor_core(a + i * a_step, b + i * b_step, sums + i * sums_step, out + i * rows * columns, rows, depth,
                    columns, kind, group, fraction, kept);
}

/* out = a * b + c, rounded once. */
void multiply_add(const float *a, const float *b, const float *c, float *out, int count) {
    for (int i = 0; i < count; i++) out[i] = fmaf(a[i], b[i], c[i]);
}

static void chain(const float *a, const float *b, const float *sums, float *out, int rows, int depth, int columns) {
    memcpy(out, sums, sizeof(float) * (size_t)rows * columns);
    for (int row = 0; row < rows; row++)
        for (int k = 0; k < depth; k++) {
            float factor = a[row * depth + k];
            for (int column = 0; column < columns; column++)
                out[row * columns + column] = fmaf(factor, b[k * columns + column], out[row * columns + column]);
        }
}

void chains(const float *a, const float *b, const float *sums, float *out, int rows, int depth, int columns, int count,
            size_t a_step, size_t b_step, size_t sums_step) {
    for (size_t i = 0; i < (size_t)count; i++)
        chain(a + i * a_step, b + i * b_step, sums + i * sums_step, out + i * rows * columns, rows, depth, columns);
}
