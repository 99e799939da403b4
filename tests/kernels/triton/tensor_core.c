/* The sums of a tensor core, and those of a float32 product, as GPUs compute them.

A product of 16-bit floats adds `group` neighbours of K at a time to the accumulator: the products are exact, they and
the accumulator are shifted to the largest exponent of all, cut to `fraction` bits behind the point, added without
error, and cut to a float32. Hopper has group 16 and fraction 25, Ampere 8 and 24. A zero has the
exponent -108 - fraction. See arXiv 2511.10909, which measured this. A float32 product is a chain of fused multiply-adds. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BITS = 10 };

static float float_of(uint16_t code, int is_bfloat16) {
    if (is_bfloat16) {
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

enum { FAR = -1000 }; /* the exponent of a factor that is 0: its product is never the largest */

/* Split a finite number into significand * 2 ** (exponent - bits). least: the exponent of subnormal numbers. */
static int32_t significand_of(float number, int bits, int least, int32_t *exponent) {
    int power;
    float fraction = frexpf(number, &power);
    if (fraction == 0) {
        *exponent = FAR;
        return 0;
    }
    int shift = power - 1 < least ? power - 1 - least : 0;
    *exponent = power - 1 - shift;
    return (int32_t)ldexpf(fraction, bits + 1 + shift);
}

/* The accumulator: significand * 2 ** (exponent - 23). */
static int32_t split(float number, int32_t *exponent) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    int32_t power = bits >> 23 & 255, size = bits & 0x7fffff;
    *exponent = (power ? power : 1) - 127;
    size |= power ? 0x800000 : 0;
    return bits >> 31 ? -size : size;
}

static inline int32_t shifted(int32_t number, int left, int by) { /* the bits that fall out at the right are dropped */
    int32_t sign = number >> 31, size = ((number ^ sign) - sign) << left >> (by < 31 ? by : 31);
    return (size ^ sign) - sign;
}

static float cut(int64_t sum, int exponent) { /* sum * 2 ** exponent towards zero; never -0 */
    if (sum == 0) return 0;
    int64_t size = sum < 0 ? -sum : sum;
    int drop = 64 - __builtin_clzll((unsigned long long)size) - 24;
    if (exponent + drop < -149) drop = -149 - exponent; /* subnormal */
    size = drop < 0 ? size << -drop : drop < 63 ? size >> drop : 0;
    int power = exponent + drop + 127 + 23;
    float number;
    if (power > 0 && power < 255 && size >> 23 == 1) {
        uint32_t bits = (uint32_t)power << 23 | (size & 0x7fffff);
        memcpy(&number, &bits, sizeof number);
    } else number = ldexpf((float)size, exponent + drop);
    return sum < 0 ? -number : number;
}

static float group_sum(float total, const int32_t *a, const int32_t *a_exponents, const int32_t *b,
                       const int32_t *b_exponents, int group, int fraction) {
    int32_t own, most = -108 - fraction, sum = split(total, &own), exponents[16];
    if (sum) most = own > most ? own : most;
    for (int k = 0; k < group; k++) exponents[k] = a_exponents[k] + b_exponents[k];
    for (int k = 0; k < group; k++) most = exponents[k] > most ? exponents[k] : most;
    int64_t all = sum ? shifted(sum, fraction - 23, most - own) : 0;
    for (int k = 0; k < group; k++) all += shifted(a[k] * b[k], fraction - 2 * BITS, most - exponents[k]);
    return cut(all, most - fraction);
}

/* a [rows, depth], b [depth, columns] -> out = sums + a b [rows, columns]. */
void tensor_core(const uint16_t *a, const uint16_t *b, const float *sums, float *out, int rows, int depth, int columns,
                 int is_bfloat16, int group, int fraction) {
    int least = is_bfloat16 ? -126 : -14;
    size_t left = (size_t)rows * depth, right = (size_t)depth * columns;
    int32_t *numbers = calloc(2 * (left + right), sizeof(int32_t)), *exponents = numbers + left + right;
    char *is_finite = malloc((size_t)rows + columns);
    memset(is_finite, 1, (size_t)rows + columns);
    for (size_t i = 0; i < left + right; i++) { /* those of b transposed */
        size_t k = (i - left) % depth, place = i < left ? i / depth : rows + (i - left) / depth;
        float number = float_of(i < left ? a[i] : b[k * columns + (i - left) / depth], is_bfloat16);
        if (!isfinite(number)) is_finite[place] = 0;
        else numbers[i] = significand_of(number, BITS, least, &exponents[i]);
    }
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++) {
            float total = sums[row * columns + column];
            size_t mine = (size_t)row * depth, theirs = left + (size_t)column * depth;
            for (int first = 0; first < depth; first += group)
                if (is_finite[row] && is_finite[rows + column] && isfinite(total))
                    total = group_sum(total, numbers + mine + first, exponents + mine + first, numbers + theirs + first,
                                      exponents + theirs + first, group, fraction);
                else
                    for (int k = first; k < first + group; k++)
                        total += float_of(a[row * depth + k], is_bfloat16) * float_of(b[k * columns + column], is_bfloat16);
            out[row * columns + column] = total;
        }
    free(numbers), free(is_finite);
}

void chain(const float *a, const float *b, const float *sums, float *out, int rows, int depth, int columns) {
    memcpy(out, sums, sizeof(float) * (size_t)rows * columns);
    for (int row = 0; row < rows; row++)
        for (int k = 0; k < depth; k++) {
            float factor = a[row * depth + k];
            for (int column = 0; column < columns; column++)
                out[row * columns + column] = fmaf(factor, b[k * columns + column], out[row * columns + column]);
        }
}
