/* The activations of MLPs: f(x), and the gated ones f(gate) * up (Shazeer 2020, arXiv 2002.05202).
 *
 * silu(x) = x / (1 + exp(-x)). gelu's tanh form (Hendrycks & Gimpel 2016, arXiv 1606.08415) is x * (1 + tanh(u)) / 2 =
 * x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 * x ** 3). gelu itself is x * (1 + erf(x / sqrt(2))) / 2. The
 * clamped one of gpt-oss (OpenAI 2025, arXiv 2508.10925) is min(gate, 7) / (1 + exp(-1.702 * min(gate, 7))) * (1 + up),
 * up between -7 and 7. The squared relu (So et al. 2021, arXiv 2109.08668) is max(x, 0) ** 2, and the quick gelu x / (1 +
 * exp(-1.702 * x)); these two are never used with a gate.
 */
#ifndef GATE_H
#define GATE_H

#include "math/vector_math.h"

/* Values of Gemm.gate and Gemm.activation (gemm.h). */
enum { NO_GATE = 0, SILU = 1, GELU_TANH = 2, GELU = 3, CLAMPED_SILU = 4, RELU_SQUARED = 5, QUICK_GELU = 6 };

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

#endif
