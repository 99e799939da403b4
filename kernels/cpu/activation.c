#include "activation.h"

#include "pool.h"
#include "vector_math.h"

/* Columns of a row that are one thread's work at a time. */
#define BLOCK 256

#define TWICE_SQRT_2_OVER_PI 1.5957691216057308f

INLINE Floats gated(Floats gate, Floats up, const int function) {
    Floats exponent = -gate;
    if (function == GELU_TANH) exponent *= multiply_add(gate * gate, all_floats(0.044715f), all_floats(1.0f)) *
                                           TWICE_SQRT_2_OVER_PI;
    return gate / (1.0f + exponential(exponent)) * up;
}

INLINE void gate_block(const Activation *args, int64_t row, int64_t begin, int64_t end, const int dtype,
                       const int function) {
    const int64_t bytes = element_bytes(dtype);
    const char *gate = (const char *)args->gate_up + row * 2 * args->width * bytes, *up = gate + args->width * bytes;
    char *out = (char *)args->out + row * args->width * bytes;
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
        store_numbers(out, i, gated(load_numbers(gate, i, dtype), load_numbers(up, i, dtype), function), dtype);
    if (i < end) {
        Floats tail = gated(load_tail(gate, i, end - i, dtype), load_tail(up, i, end - i, dtype), function);
        store_tail(out, i, end - i, tail, dtype);
    }
}

void activation_part(const Activation *args, int thread, int num_threads) {
    const int64_t per_row = (args->width + BLOCK - 1) / BLOCK, count = args->num_rows * per_row;
    for (int64_t i = count * thread / num_threads; i < count * (thread + 1) / num_threads; i++) {
        const int64_t row = i / per_row, begin = i % per_row * BLOCK;
        const int64_t end = begin + BLOCK < args->width ? begin + BLOCK : args->width;
        if (args->dtype == FLOAT32) {
            if (args->function == SILU)
                gate_block(args, row, begin, end, FLOAT32, SILU);
            else
                gate_block(args, row, begin, end, FLOAT32, GELU_TANH);
        } else if (args->function == SILU) {
            gate_block(args, row, begin, end, BFLOAT16, SILU);
        } else {
            gate_block(args, row, begin, end, BFLOAT16, GELU_TANH);
        }
    }
}

static void activation_job(void *args, int thread, int num_threads) { activation_part(args, thread, num_threads); }

EXPORT void activation(const Activation *args) {
    if (args->num_rows * args->width <= NOT_SHARED)
        activation_part(args, 0, 1);
    else
        pool_run(activation_job, (void *)args);
}
