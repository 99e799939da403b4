#include "layers/per_layer.h"

#include "math/row_math.h"
#include "threads/pool.h"

/* Compute the input of a token in a layer. room: for as many numbers. */
static void make_input(const PerLayerStep *args, int64_t token, float *input, float *room) {
    const PerLayerInputs *inputs = args->inputs;
    const int64_t width = inputs->width, word = args->ids[token] < 0 ? inputs->given_id : args->ids[token];
    const int64_t id = word * inputs->row_layers + inputs->first_layer + args->layer;
    const int64_t columns = (token * inputs->num_layers + args->layer) * width;
    const char *projected = (const char *)args->projected + columns * element_bytes(inputs->dtype);
    if (inputs->dtype == BFLOAT16)
        normalise(projected, BFLOAT16, inputs->norm, inputs->eps, width, input, FLOAT32);
    else
        normalise(projected, FLOAT32, inputs->norm, inputs->eps, width, input, FLOAT32);
    if (!inputs->table.table) return;
    Embedding own = inputs->table;
    own.ids = &id, own.out = room, own.num_rows = 1;
    embedding_part(&own, 0, 1);
    for (int64_t i = 0; i < width; i++) input[i] += room[i];
}

INLINE void multiply_row(void *x, const float *input, int64_t width, const int dtype) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store_numbers(x, i, load_numbers(x, i, dtype) * load_floats(input + i), dtype);
    if (i < width)
        store_tail(x, i, width - i, load_tail(x, i, width - i, dtype) * load_tail(input, i, width - i, FLOAT32), dtype);
}

void per_layer_part(const PerLayerStep *args, int thread, int num_threads) {
    const int64_t width = args->inputs->width, end = args->num_rows * (thread + 1) / num_threads;
    const int dtype = args->inputs->dtype;
    for (int64_t row = args->num_rows * thread / num_threads; row < end; row++) {
        float input[MAX_PER_LAYER_WIDTH], room[MAX_PER_LAYER_WIDTH];
        make_input(args, args->tokens ? args->tokens[row] : row, input, room);
        char *x = (char *)args->x + row * width * element_bytes(dtype);
        if (dtype == BFLOAT16)
            multiply_row(x, input, width, BFLOAT16);
        else
            multiply_row(x, input, width, FLOAT32);
    }
}

static void per_layer_job(void *args, int thread, int num_threads) { per_layer_part(args, thread, num_threads); }

EXPORT void per_layer(const PerLayerStep *args) {
    if (args->num_rows * args->inputs->width <= NOT_SHARED)
        per_layer_part(args, 0, 1);
    else
        pool_run(per_layer_job, (void *)args);
}
