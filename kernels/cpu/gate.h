/* The activations of MLPs: f(x), and the gated ones f(gate) * up (Shazeer 2020, arXiv 2002.05202).
 *
 * silu(x) = x / (1 + exp(-x)). gelu's tanh form (Hendrycks & Gimpel 2016, arXiv 1606.08415) is x * (1 + tanh(u)) / 2 =
 * x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 * x ** 3). gelu itself is x * (1 + erf(x / sqrt(2))) / 2.
 */
#ifndef GATE_H
#define GATE_H

#include "vector_math.h"

/* Values of Gemm.gate and Gemm.activation (gemm.h). */
enum { NO_GATE = 0, SILU = 1, GELU_TANH = 2, GELU = 3 };

#define SQRT_HALF 0.70710678118654752f
#define TWICE_SQRT_2_OVER_PI 1.5957691216057308f

INLINE Floats gated(Floats gate, Floats up, const int function) {
    if (function == GELU) return gate * (0.5f + 0.5f * error_function(gate * SQRT_HALF)) * up;
    Floats exponent = -gate;
    if (function == GELU_TANH) exponent *= multiply_add(gate * gate, all_floats(0.044715f), all_floats(1.0f)) *
                                           TWICE_SQRT_2_OVER_PI;
    return gate / (1.0f + exponential(exponent)) * up;
}

INLINE Floats activated(Floats x, const int function) { return gated(x, all_floats(1.0f), function); }

#endif
