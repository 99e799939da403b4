/* The activations of MLPs: f(x), and the gated ones f(gate) * up (Shazeer 2020, arXiv 2002.05202).
 *
 * silu(x) = x / (1 + exp(-x)). gelu's tanh form (Hendrycks & Gimpel 2016, arXiv 1606.08415) is x * (1 + tanh(u)) / 2 =
 * x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 * x ** 3). gelu itself is x * (1 + erf(x / sqrt(2))) / 2. The
 * clamped one of gpt-oss (OpenAI 2025, arXiv 2508.10925) is min(gate, 7) / (1 + exp(-1.702 * min(gate, 7))) * (1 + up),
 * up between -7 and 7. The squared relu (So et al. 2021, arXiv 2109.08668) is max(x, 0) ** 2, and the quick gelu x / (1 +
 * exp(-1.702 * x)); these two are never used with a gate.
 *
 * xIELU (Huang & Schlag 2024, arXiv 2411.13010) has four numbers of each layer: positive, negative, beta and limit, which is
 * just below 0. It is positive * x ** 2 + beta * x for x > 0, otherwise
 * negative * (exp(min(x, limit)) - 1 - x) + beta * x.
 */
#ifndef GATE_H
#define GATE_H

#include "math/vector_math.h"

/* Values of Gemm.gate and Gemm.activation (gemm.h). */
enum {
    NO_GATE = 0,
    SILU = 1,
    GELU_TANH = 2,
    GELU = 3,
    CLAMPED_SILU = 4,
    RELU_SQUARED = 5,
    QUICK_GELU = 6,
    XIELU = 7,
};

#define SQRT_HALF 0.70710678118654752f
#define TWICE_SQRT_2_OVER_PI 1.5957691216057308f
#define CLAMPED_SILU_LIMIT 7.0f
#define CLAMPED_SILU_STEEPNESS 1.702f
#define QUICK_GELU_STEEPNESS 1.702f

/* Return x, at most CLAMPED_SILU_LIMIT; NaN stays NaN. */
INLINE Floats limited(Floats x) {
    return choose(x > CLAMPED_SILU_LIMIT, all_floats(CLAMPED_SILU_LIMIT), x);
}

INLINE Floats clamped_silu(Floats gate, Floats up) {
    gate = limited(gate), up = -limited(-limited(up));
    return gate / (1.0f + exponential(gate * -CLAMPED_SILU_STEEPNESS)) * (up + 1.0f);
}

INLINE Floats gated(Floats gate, Floats up, const int function) {
    if (function == GELU) return gate * (0.5f + 0.5f * error_function(gate * SQRT_HALF)) * up;
    if (function == CLAMPED_SILU) return clamped_silu(gate, up);
    Floats exponent = -gate;
    if (function == GELU_TANH) exponent *= multiply_add(gate * gate, all_floats(0.044715f), all_floats(1.0f)) *
                                           TWICE_SQRT_2_OVER_PI;
    return gate / (1.0f + exponential(exponent)) * up;
}

INLINE Floats activated(Floats x, const int function) {
    if (function == QUICK_GELU) return x / (1.0f + exponential(x * -QUICK_GELU_STEEPNESS));
    if (function != RELU_SQUARED) return gated(x, all_floats(1.0f), function);
    const Floats positive = choose(x < 0.0f, all_floats(0.0f), x); /* NaN stays NaN */
    return positive * positive;
}

/* Return exp(x) - 1 - x for x <= 0: the series near 0, where the difference would lose its digits. */
INLINE Floats exponential_rest(Floats x) {
    Floats sum = all_floats(1.0f / 3628800.0f);
    const float terms[] = {1.0f / 362880.0f, 1.0f / 40320.0f, 1.0f / 5040.0f, 1.0f / 720.0f,
                           1.0f / 120.0f,    1.0f / 24.0f,    1.0f / 6.0f,    0.5f};
    for (int i = 0; i < 8; i++) sum = multiply_add(sum, x, all_floats(terms[i]));
    return choose(x > -0.5f, sum * x * x, exponential(x) - 1.0f - x);
}

/* numbers: of xIELU, in the order above. */
INLINE Floats xielu(Floats x, const float *numbers) {
    const Floats least = choose(x > numbers[3], all_floats(numbers[3]), x); /* NaN stays NaN */
    const Floats negative = (exponential_rest(least) + (least - x)) * numbers[1];
    return multiply_add(x, all_floats(numbers[2]), choose(x > 0.0f, x * x * numbers[0], negative));
}

#endif
