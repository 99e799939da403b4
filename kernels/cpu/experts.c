#include "experts.h"

#include <math.h>

#include "int8.h"
#include "pool.h"
#include "vector_math.h"

/* A batch of rows. */
typedef struct {
    const Experts *experts;
    const ExpertsRoom *room;
    const char *x;
    char *y;
    int64_t num_rows;
    int dtype;
    int thread, num_threads;
} Batch;

static int64_t share_of(int64_t count, int thread, int num_threads) { return count * thread / num_threads; }

static void route(const Batch *batch) {
    Gemm args = batch->experts->router;
    args.x = batch->x, args.x_stride = args.depth;
    args.y = batch->room->logits, args.y_stride = args.num_columns;
    args.num_rows = batch->num_rows;
    gemm_part(&args, batch->thread, batch->num_threads);
}

/* Find the largest logits, of equal ones those with lower numbers, and write their numbers in ascending order. */
static void choose_largest(const float *logits, int num_experts, int32_t *chosen, int num_chosen) {
    int count = 0;
    for (int expert = 0; expert < num_experts; expert++) {
        int at = count;
        while (at > 0 && logits[expert] > logits[chosen[at - 1]]) at--;
        if (at >= num_chosen) continue;
        if (count < num_chosen) count++;
        for (int i = count - 1; i > at; i--) chosen[i] = chosen[i - 1];
        chosen[at] = expert;
    }
    for (int i = 1; i < num_chosen; i++) {
        const int32_t expert = chosen[i];
        int at = i;
        for (; at > 0 && chosen[at - 1] > expert; at--) chosen[at] = chosen[at - 1];
        chosen[at] = expert;
    }
}

/* Return exp(x) as the other kernels compute it, for x <= 0. */
static float power(float x) { return exponential(all_floats(x))[0]; }

/* Choose the experts of a row, and compute their weights. */
static void choose_row(const Batch *batch, int64_t row) {
    const Experts *experts = batch->experts;
    const int num_chosen = experts->num_chosen;
    const float *logits = batch->room->logits + row * experts->num_experts;
    int32_t *chosen = batch->room->chosen + row * num_chosen;
    float *weights = batch->room->weights + row * num_chosen, largest = -INFINITY, sum = 0.0f;
    int is_finite = 1;
    for (int i = 0; i < experts->num_experts; i++) {
        is_finite &= isfinite(logits[i]) != 0;
        largest = logits[i] > largest ? logits[i] : largest;
    }
    if (!is_finite) { /* no comparison with a NaN is true */
        for (int i = 0; i < num_chosen; i++) chosen[i] = i, weights[i] = NAN;
        return;
    }
    choose_largest(logits, experts->num_experts, chosen, num_chosen);
    for (int i = 0; i < num_chosen; i++) weights[i] = power(logits[chosen[i]] - largest);
    if (experts->normalises)
        for (int i = 0; i < num_chosen; i++) sum += weights[i];
    else
        for (int i = 0; i < experts->num_experts; i++) sum += power(logits[i] - largest);
    for (int i = 0; i < num_chosen; i++) weights[i] /= sum;
}

static void choose_rows(const Batch *batch) {
    const int64_t end = share_of(batch->num_rows, batch->thread + 1, batch->num_threads);
    for (int64_t row = share_of(batch->num_rows, batch->thread, batch->num_threads); row < end; row++)
        choose_row(batch, row);
}

/* Give each chosen expert of each row a place among the gathered rows, expert after expert. */
static void sort_rows(const Batch *batch) {
    const int num_experts = batch->experts->num_experts;
    const int64_t count = batch->num_rows * batch->experts->num_chosen;
    const ExpertsRoom *room = batch->room;
    int32_t *starts = room->starts, num_active = 0;
    for (int expert = 0; expert <= num_experts; expert++) starts[expert] = 0;
    for (int64_t i = 0; i < count; i++) starts[room->chosen[i] + 1]++;
    for (int expert = 0; expert < num_experts; expert++) {
        if (starts[expert + 1] > 0) room->active[num_active++] = expert;
        starts[expert + 1] += starts[expert];
    }
    room->active[num_experts] = num_active;
    for (int64_t i = 0; i < count; i++) room->places[i] = starts[room->chosen[i]]++;
    for (int expert = num_experts; expert > 0; expert--) starts[expert] = starts[expert - 1];
    starts[0] = 0;
}

/* Copy a thread's share of the rows to their places. */
static void gather(const Batch *batch) {
    const int num_chosen = batch->experts->num_chosen;
    const int64_t bytes = batch->experts->width * element_bytes(batch->dtype);
    const int64_t end = share_of(batch->num_rows, batch->thread + 1, batch->num_threads);
    for (int64_t row = share_of(batch->num_rows, batch->thread, batch->num_threads); row < end; row++)
        for (int i = 0; i < num_chosen; i++)
            memcpy((char *)batch->room->gathered + batch->room->places[row * num_chosen + i] * bytes,
                   batch->x + row * bytes, bytes);
}

/* Return the product of an expert with its gathered rows. x and y have all rows. */
static Gemm product_of(const Batch *batch, const Gemm *weights, int expert, const void *x, void *y) {
    const ExpertsRoom *room = batch->room;
    const int64_t first = room->starts[expert];
    Gemm args = weights[expert];
    args.x_stride = args.depth, args.y_stride = args.gate ? args.num_columns / 2 : args.num_columns;
    args.x = (const char *)x + first * args.x_stride * element_bytes(args.dtype);
    args.y = (char *)y + first * args.y_stride * element_bytes(args.y_dtype);
    args.num_rows = room->starts[expert + 1] - first;
    args.quantized_stride = room->quantized_stride;
    if (room->quantized) args.quantized = (Int8Block *)room->quantized + first * room->quantized_stride;
    return args;
}

/* Quantize a thread's share of all rows of x, if the products are in 8 bits. */
static void quantize(const Batch *batch, const Gemm *weights, const void *x) {
    const ExpertsRoom *room = batch->room;
    const int64_t count = batch->num_rows * batch->experts->num_chosen;
    Gemm args = weights[room->active[0]];
    args.x = x, args.x_stride = args.depth;
    args.quantized = room->quantized, args.quantized_stride = room->quantized_stride;
    int8_quantize(&args, share_of(count, batch->thread, batch->num_threads),
                  share_of(count, batch->thread + 1, batch->num_threads));
}

static int is_in_8_bits(const Batch *batch, const Gemm *weights) {
    for (int i = 0; i < batch->experts->num_experts; i++)
        if (weights[i].packing == INT8_WEIGHTS) return 1;
    return 0;
}

/* Multiply all gathered rows of x with their experts' matrices. The panels of all experts are divided among threads; first
 * a thread computes its own, then those left of the others. */
static void multiply(const Batch *batch, const Gemm *weights, const void *x, void *y) {
    const int32_t *active = batch->room->active;
    if (is_in_8_bits(batch, weights)) {
        quantize(batch, weights, x);
        pool_barrier();
    }
    const int64_t num_panels = (weights->num_columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
    Gemm most = weights[0];
    most.num_rows = batch->num_rows;
    const int64_t piece = gemm_piece(&most), pieces = (num_panels + piece - 1) / piece;
    const int64_t count = pieces * active[batch->experts->num_experts];
    for (int i = 0; i < batch->num_threads; i++) {
        const int owner = (batch->thread + i) % batch->num_threads;
        const int64_t begin = share_of(count, owner, batch->num_threads);
        const int64_t end = share_of(count, owner + 1, batch->num_threads);
        for (int64_t next = 0, at; (at = begin + (batch->num_threads > 1 ? pool_take(owner) : next++)) < end;) {
            const int64_t first = at % pieces * piece, last = first + piece < num_panels ? first + piece : num_panels;
            const Gemm args = product_of(batch, weights, active[at / pieces], x, y);
            gemm_panels(&args, first, last);
        }
    }
}

/* y of a thread's rows = the weighted sums of their experts' results. */
static void combine(const Batch *batch) {
    const int num_chosen = batch->experts->num_chosen, width = batch->experts->width;
    const int64_t end = share_of(batch->num_rows, batch->thread + 1, batch->num_threads);
    for (int64_t row = share_of(batch->num_rows, batch->thread, batch->num_threads); row < end; row++) {
        const float *weights = batch->room->weights + row * num_chosen;
        const int32_t *places = batch->room->places + row * num_chosen;
        char *y = batch->y + row * width * element_bytes(batch->dtype);
        for (int i = 0; i < width; i += LANES) {
            const int count = width - i; /* at most LANES are added */
            Floats sum = all_floats(0.0f);
            for (int j = 0; j < num_chosen; j++) {
                const float *from = batch->room->results + (int64_t)places[j] * width;
                const Floats numbers = count >= LANES ? load_floats(from + i) : load_tail(from, i, count, FLOAT32);
                sum = multiply_add(numbers, all_floats(weights[j]), sum);
            }
            if (count >= LANES)
                store_numbers(y, i, sum, batch->dtype);
            else
                store_tail(y, i, count, sum, batch->dtype);
        }
    }
}

static void run_batch(const Batch *batch) {
    const ExpertsRoom *room = batch->room;
    route(batch);
    pool_barrier();
    choose_rows(batch);
    pool_barrier();
    if (batch->thread == 0) sort_rows(batch);
    pool_barrier();
    gather(batch);
    pool_barrier();
    multiply(batch, batch->experts->gate_up, room->gathered, room->gated);
    pool_barrier();
    multiply(batch, batch->experts->down, room->gated, room->results);
    pool_barrier();
    combine(batch);
}

void experts_part(const ExpertsStep *args, int thread, int num_threads) {
    const Experts *experts = args->experts;
    const int dtype = experts->gate_up->dtype;
    const int64_t bytes = experts->width * element_bytes(dtype);
    for (int64_t row = 0; row < args->num_rows; row += EXPERT_ROWS) {
        const int64_t left = args->num_rows - row;
        const Batch batch = {experts, args->room, (const char *)args->x + row * bytes, (char *)args->y + row * bytes,
                             left < EXPERT_ROWS ? left : EXPERT_ROWS, dtype, thread, num_threads};
        if (row > 0) pool_barrier(); /* the room is in use until all have combined */
        run_batch(&batch);
    }
}

static void experts_job(void *args, int thread, int num_threads) { experts_part(args, thread, num_threads); }

EXPORT void experts(const ExpertsStep *args) { pool_run(experts_job, (void *)args); }
