#include "layers/experts.h"

#include "products/int8.h"
#include "threads/pool.h"
#include "math/vector_math.h"

/* A batch of rows. */
typedef struct {
    const Experts *experts;
    const ExpertsRoom *room;
    const ExpertsGroup *group;
    const char *x, *router_x;
    char *y;
    int64_t num_rows;
    int dtype;
    int thread, num_threads;
} Batch;

static int64_t share_of(int64_t count, int thread, int num_threads) { return count * thread / num_threads; }

static void route(const Batch *batch) {
    Gemm args = batch->experts->router;
    args.x = batch->router_x, args.x_stride = args.depth;
    args.y = batch->room->logits, args.y_stride = args.num_columns;
    args.num_rows = batch->num_rows;
    gemm_part(&args, batch->thread, batch->num_threads);
}

static void choose_rows(const Batch *batch) {
    const Routing *routing = &batch->experts->routing;
    const ExpertsRoom *room = batch->room;
    const int64_t end = share_of(batch->num_rows, batch->thread + 1, batch->num_threads);
    for (int64_t row = share_of(batch->num_rows, batch->thread, batch->num_threads); row < end; row++)
        choose_experts(routing, room->logits + row * batch->experts->router.num_columns,
                       room->keys + row * (routing->num_experts + routing->num_groups),
                       room->chosen + row * routing->num_chosen, room->weights + row * routing->num_chosen);
}

/* Give each chosen expert of each row a place among the gathered rows, expert after expert. */
static void sort_rows(const Batch *batch) {
    const int num_experts = batch->experts->routing.num_experts;
    const int64_t count = batch->num_rows * batch->experts->routing.num_chosen;
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

/* Write a row, times the weight of one of its experts, to that expert's place. */
INLINE void scale_row(const char *row, float weight, char *out, int64_t width, const int dtype) {
    for (int64_t i = 0; i < width; i += LANES)
        store_some(out, i, width - i, load_some(row, i, width - i, dtype) * weight, dtype);
}

/* Write a thread's share of the rows, times their weights, to their places. Those of results are 1 then. */
static void gather_scaled(const Batch *batch) {
    const int num_chosen = batch->experts->routing.num_chosen;
    const int64_t width = batch->experts->width, bytes = width * element_bytes(batch->dtype);
    const int64_t end = share_of(batch->num_rows, batch->thread + 1, batch->num_threads);
    for (int64_t row = share_of(batch->num_rows, batch->thread, batch->num_threads); row < end; row++)
        for (int i = 0; i < num_chosen; i++) {
            float *weight = batch->room->weights + row * num_chosen + i;
            char *out = (char *)batch->room->gathered + batch->room->places[row * num_chosen + i] * bytes;
            if (batch->dtype == BFLOAT16)
                scale_row(batch->x + row * bytes, *weight, out, width, BFLOAT16);
            else
                scale_row(batch->x + row * bytes, *weight, out, width, FLOAT32);
            *weight = 1.0f;
        }
}

/* Copy a thread's share of the rows to their places. */
static void gather(const Batch *batch) {
    if (batch->experts->routing.scales_inputs) {
        gather_scaled(batch);
        return;
    }
    const int num_chosen = batch->experts->routing.num_chosen;
    const int64_t bytes = batch->experts->width * element_bytes(batch->dtype);
    const int64_t end = share_of(batch->num_rows, batch->thread + 1, batch->num_threads);
    for (int64_t row = share_of(batch->num_rows, batch->thread, batch->num_threads); row < end; row++)
        for (int i = 0; i < num_chosen; i++)
            memcpy((char *)batch->room->gathered + batch->room->places[row * num_chosen + i] * bytes,
                   batch->x + row * bytes, bytes);
}

/* One of the two products of all experts: with x and y as gathered, and of the shared expert with all rows. */
typedef struct {
    const Gemm *weights, *shared; /* shared: NULL = there is none */
    const void *x, *shared_x;
    void *y, *shared_y;
    const Place *place, *shared_place; /* of a rank's columns in y and shared_y; NULL = they are all */
} Stage;

/* Return a product with num_rows rows of x and y from row `first` on. place: of the columns in y; NULL = they are all of y.
 * quantized: of x's first row. */
static Gemm product_of(const Batch *batch, const Gemm *weights, const void *x, void *y, const Place *place, int64_t first,
                       int64_t num_rows, int64_t quantized) {
    Gemm args = *weights;
    args.x_stride = args.depth, args.y_stride = args.gate ? args.num_columns / 2 : args.num_columns;
    if (place) args.y_stride = place->width;
    args.x = (const char *)x + first * args.x_stride * element_bytes(args.dtype);
    args.y = (char *)y + (first * args.y_stride + (place ? place->first : 0)) * element_bytes(args.y_dtype);
    args.num_rows = num_rows;
    args.quantized_stride = batch->room->quantized_stride;
    if (batch->room->quantized)
        args.quantized = (Int8Block *)batch->room->quantized + (quantized + first) * args.quantized_stride;
    return args;
}

static int64_t num_gathered(const Batch *batch) { return batch->num_rows * batch->experts->routing.num_chosen; }

static Gemm product_of_expert(const Batch *batch, const Stage *stage, int expert) {
    const int32_t *starts = batch->room->starts;
    return product_of(batch, stage->weights + expert, stage->x, stage->y, stage->place, starts[expert],
                      starts[expert + 1] - starts[expert], 0);
}

static Gemm product_of_shared(const Batch *batch, const Stage *stage) {
    return product_of(batch, stage->shared, stage->shared_x, stage->shared_y, stage->shared_place, 0, batch->num_rows,
                      num_gathered(batch));
}

/* Quantize a thread's share of the product's rows of x. */
static void quantize_rows(const Batch *batch, Gemm args, int64_t num_rows) {
    args.num_rows = num_rows;
    int8_quantize(&args, share_of(num_rows, batch->thread, batch->num_threads),
                  share_of(num_rows, batch->thread + 1, batch->num_threads));
}

/* Quantize a thread's share of all rows of x, if products are in 8 bits; return whether any is. */
static int quantize(const Batch *batch, const Stage *stage) {
    int is_routed = 0, is_shared = stage->shared && stage->shared->packing == INT8_WEIGHTS;
    for (int i = 0; i < batch->experts->routing.num_experts; i++) is_routed |= stage->weights[i].packing == INT8_WEIGHTS;
    if (is_routed)
        quantize_rows(batch, product_of(batch, stage->weights, stage->x, stage->y, NULL, 0, 0, 0), num_gathered(batch));
    if (is_shared) quantize_rows(batch, product_of_shared(batch, stage), batch->num_rows);
    return is_routed | is_shared;
}

static int64_t panels_of(const Gemm *weights) { return (weights->num_columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS; }

/* Multiply piece `at` of a product. */
static void multiply_piece(const Gemm *args, int64_t at, int64_t piece) {
    const int64_t num_panels = panels_of(args), first = at * piece;
    gemm_panels(args, first, first + piece < num_panels ? first + piece : num_panels);
}

/* Multiply all rows of x with their experts' matrices. The panels of all experts, the shared one's first, are divided among
 * threads; first a thread computes its own, then those left of the others. */
static void multiply(const Batch *batch, const Stage *stage) {
    const int32_t *active = batch->room->active;
    if (quantize(batch, stage)) pool_barrier();
    Gemm most = stage->weights[0];
    most.num_rows = batch->num_rows;
    const int64_t piece = gemm_piece(&most), pieces = (panels_of(&most) + piece - 1) / piece;
    const int64_t shared = stage->shared ? (panels_of(stage->shared) + piece - 1) / piece : 0;
    const int64_t count = shared + pieces * active[batch->experts->routing.num_experts];
    for (int i = 0; i < batch->num_threads; i++) {
        const int owner = (batch->thread + i) % batch->num_threads;
        const int64_t begin = share_of(count, owner, batch->num_threads);
        const int64_t end = share_of(count, owner + 1, batch->num_threads);
        for (int64_t next = 0, at; (at = begin + (batch->num_threads > 1 ? pool_take(owner) : next++)) < end;) {
            const int64_t place = at - shared; /* among the chosen experts' */
            const Gemm args = place < 0 ? product_of_shared(batch, stage)
                                        : product_of_expert(batch, stage, active[place / pieces]);
            multiply_piece(&args, place < 0 ? at : place % pieces, piece);
        }
    }
}

/* Return the router's last logit of a row. */
static float shared_logit(const Batch *batch, int64_t row) {
    const Routing *routing = &batch->experts->routing;
    return batch->room->logits[row * batch->experts->router.num_columns + routing->num_experts];
}

/* Return sum + weight * numbers, of at most LANES numbers from place i on; `count` are left. */
static Floats add_weighted(const float *from, int i, int count, float weight, Floats sum) {
    const Floats numbers = count >= LANES ? load_floats(from + i) : load_tail(from, i, count, FLOAT32);
    return multiply_add(numbers, all_floats(weight), sum);
}

/* y of a thread's rows = the weighted sums of their experts' results, of a rank in its columns. */
static void combine(const Batch *batch) {
    const int num_chosen = batch->experts->routing.num_chosen, width = batch->experts->down->num_columns;
    const int64_t first = batch->group ? batch->group->y->first : 0;
    const int64_t end = share_of(batch->num_rows, batch->thread + 1, batch->num_threads);
    for (int64_t row = share_of(batch->num_rows, batch->thread, batch->num_threads); row < end; row++) {
        const float *weights = batch->room->weights + row * num_chosen;
        const int32_t *places = batch->room->places + row * num_chosen;
        const float shared = batch->experts->has_shared_gate ? sigmoid_of(shared_logit(batch, row)) : 1.0f;
        char *y = batch->y + (row * batch->experts->width + first) * element_bytes(batch->dtype);
        for (int i = 0; i < width; i += LANES) {
            const int count = width - i; /* at most LANES are added */
            Floats sum = all_floats(0.0f);
            for (int j = 0; j < num_chosen; j++)
                sum = add_weighted(batch->room->results + (int64_t)places[j] * width, i, count, weights[j], sum);
            if (batch->experts->shared)
                sum = add_weighted(batch->room->shared_results + row * width, i, count, shared, sum);
            if (count >= LANES)
                store_numbers(y, i, sum, batch->dtype);
            else
                store_tail(y, i, count, sum, batch->dtype);
        }
    }
}

/* Wait until the stage's results are complete: of a rank, with the columns of the others. */
static void finish_stage(const Batch *batch, const Stage *stage) {
    if (!stage->place) {
        pool_barrier();
        return;
    }
    const Ranks *ranks = batch->group->ranks;
    const int64_t bytes = element_bytes(stage->weights->y_dtype);
    group_gather(ranks, stage->y, num_gathered(batch), stage->place, bytes, 0, batch->thread);
    if (stage->shared && ranks->streams) /* memory that ranks share is complete after the first wait */
        group_gather(ranks, stage->shared_y, batch->num_rows, stage->shared_place, bytes, 0, batch->thread);
}

static void run_batch(const Batch *batch) {
    const Experts *experts = batch->experts;
    const ExpertsRoom *room = batch->room;
    const ExpertsGroup *group = batch->group;
    const Gemm *shared = experts->shared;
    const Stage gate_up = {experts->gate_up, shared, room->gathered, batch->x, room->gated, room->shared_gated,
                           group ? group->gated : NULL, group ? group->shared_gated : NULL};
    const Stage down = {experts->down, shared ? shared + 1 : NULL, room->gated, room->shared_gated, room->results,
                        room->shared_results, NULL, NULL};
    route(batch);
    pool_barrier();
    choose_rows(batch);
    pool_barrier();
    if (batch->thread == 0) sort_rows(batch);
    pool_barrier();
    gather(batch);
    pool_barrier();
    multiply(batch, &gate_up);
    finish_stage(batch, &gate_up);
    multiply(batch, &down);
    finish_stage(batch, &down);
    combine(batch);
    if (group) group_gather(group->ranks, batch->y, batch->num_rows, group->y, element_bytes(batch->dtype), 0, batch->thread);
}

void experts_part(const ExpertsStep *args, int thread, int num_threads) {
    const Experts *experts = args->experts;
    const int dtype = experts->gate_up->dtype;
    const int64_t bytes = experts->width * element_bytes(dtype);
    for (int64_t row = 0; row < args->num_rows; row += EXPERT_ROWS) {
        const int64_t left = args->num_rows - row;
        const char *x = args->x, *router_x = args->router_x ? args->router_x : args->x;
        const Batch batch = {experts, args->room, args->group, x + row * bytes, router_x + row * bytes, (char *)args->y + row * bytes,
                             left < EXPERT_ROWS ? left : EXPERT_ROWS, dtype, thread, num_threads};
        if (row > 0) pool_barrier(); /* the room is in use until all have combined */
        run_batch(&batch);
    }
}

static void experts_job(void *args, int thread, int num_threads) { experts_part(args, thread, num_threads); }

EXPORT void experts(const ExpertsStep *args) { pool_run(experts_job, (void *)args); }
