#include "layers/soft_cap.h"

#include "threads/pool.h"
#include "math/vector_math.h"

INLINE Floats capped(Floats x, float cap) { return hyperbolic_tangent(x / cap) * cap; }

void soft_cap_part(const SoftCap *args, int thread, int num_threads) {
    const int64_t begin = args->num_rows * thread / num_threads, end = args->num_rows * (thread + 1) / num_threads;
    for (int64_t row = begin; row < end; row++) {
        float *numbers = args->numbers + row * args->width;
        int64_t i = 0;
        for (; i + LANES <= args->width; i += LANES) store_floats(numbers + i, capped(load_floats(numbers + i), args->cap));
        if (i < args->width)
            store_tail(numbers, i, args->width - i,
                       capped(load_tail(numbers, i, args->width - i, FLOAT32), args->cap), FLOAT32);
    }
}

static void soft_cap_job(void *args, int thread, int num_threads) { soft_cap_part(args, thread, num_threads); }

EXPORT void soft_cap(const SoftCap *args) { pool_run(soft_cap_job, (void *)args); }
