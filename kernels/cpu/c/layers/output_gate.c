#include "layers/output_gate.h"

#include "math/vector_math.h"

INLINE Floats opened(Floats x, Floats gate) { return x / (1.0f + exponential(-gate)); }

INLINE void open_row(void *x, const void *gates, int64_t width, const int dtype) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        store_numbers(x, i, opened(load_numbers(x, i, dtype), load_numbers(gates, i, dtype)), dtype);
    if (i < width)
        store_tail(x, i, width - i, opened(load_tail(x, i, width - i, dtype), load_tail(gates, i, width - i, dtype)),
                   dtype);
}

/* Like open_row(), with one gate for each `group` numbers. */
INLINE void open_heads(void *x, const void *gates, int64_t width, int64_t group, const int dtype) {
    for (int64_t head = 0; head < width / group; head++) {
        char *numbers = (char *)x + head * group * element_bytes(dtype);
        const Floats gate = all_floats(load_tail(gates, head, 1, dtype)[0]);
        int64_t i = 0;
        for (; i + LANES <= group; i += LANES) store_numbers(numbers, i, opened(load_numbers(numbers, i, dtype), gate), dtype);
        if (i < group) store_tail(numbers, i, group - i, opened(load_tail(numbers, i, group - i, dtype), gate), dtype);
    }
}

void output_gate_row(void *x, const void *gates, int64_t width, int64_t group, int dtype) {
    if (group > 1 && dtype == BFLOAT16)
        open_heads(x, gates, width, group, BFLOAT16);
    else if (group > 1)
        open_heads(x, gates, width, group, FLOAT32);
    else if (dtype == BFLOAT16)
        open_row(x, gates, width, BFLOAT16);
    else
        open_row(x, gates, width, FLOAT32);
}

EXPORT void output_gate(const OutputGate *args) {
    const int64_t bytes = args->width * element_bytes(args->dtype);
    for (int64_t row = 0; row < args->num_rows; row++)
        output_gate_row((char *)args->x + row * bytes, (const char *)args->gates + row * bytes / args->group, args->width,
                        args->group, args->dtype);
}
