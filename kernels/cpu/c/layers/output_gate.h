/* The gate of attention's output (Qiu et al. 2025, arXiv 2505.06708): x * 1 / (1 + exp(-gate)), with a gate for each number,
 * or for each head. */
#ifndef OUTPUT_GATE_H
#define OUTPUT_GATE_H

#include <stdint.h>

/* Multiply a row x of dtype by the sigmoid of its gates, in place. group: neighbouring numbers that have one gate. */
void output_gate_row(void *x, const void *gates, int64_t width, int64_t group, int dtype);

typedef struct {
    void *x;           /* [num_rows, width] of dtype, replaced by the result */
    const void *gates; /* [num_rows, width / group] of dtype */
    int64_t num_rows, width;
    int32_t dtype, group;
} OutputGate;

void output_gate(const OutputGate *args);

#endif
