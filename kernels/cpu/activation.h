/* The gated activations of MLPs: f(gate) * up (Shazeer 2020, arXiv 2002.05202), float32 inside, rounded once.
 *
 * silu(x) = x / (1 + exp(-x)). gelu's tanh form (Hendrycks & Gimpel 2016, arXiv 1606.08415) is x * (1 + tanh(u)) / 2 =
 * x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 * x ** 3).
 */
#ifndef ACTIVATION_H
#define ACTIVATION_H

#include <stdint.h>

enum { SILU = 0, GELU_TANH = 1 };

typedef struct {
    const void *gate_up; /* [num_rows, 2 * width] of dtype */
    void *out;           /* [num_rows, width] of dtype */
    int64_t num_rows, width;
    int32_t dtype; /* BFLOAT16 or FLOAT32 */
    int32_t function;
} Activation;

void activation_part(const Activation *args, int thread, int num_threads);
void activation(const Activation *args);

#endif
