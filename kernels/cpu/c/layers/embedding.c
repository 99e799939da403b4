#include "layers/embedding.h"

#include "blocks/dequantize.h"
#include "products/compact.h"
#include "threads/pool.h"
#include "products/int8.h"
#include "products/quantized.h"
#include "math/vector_math.h"

INLINE void embed_row(const Embedding *args, int64_t row, const int dtype) {
    const int64_t width = args->width;
    const int64_t id = args->kinds ? args->ids[row] % args->num_words : args->ids[row];
    const char *from = (const char *)args->table + id * width * element_bytes(dtype);
    float *out = args->out + row * width;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store_floats(out + i, load_numbers(from, i, dtype) * args->scale);
    if (i < width) store_tail(out, i, width - i, load_tail(from, i, width - i, dtype) * args->scale, FLOAT32);
}

/* Like embed_row(), for a packed table. */
static void embed_packed_row(const Embedding *args, int64_t row) {
    const int64_t id = args->ids[row], width = args->width, panel = id / PANEL_COLUMNS;
    const char *from = (const char *)args->table + panel * packed_bytes(PANEL_COLUMNS, width, args->dtype);
    float *out = args->out + row * width;
    from += id % PANEL_COLUMNS * 4;
    for (int64_t i = 0; i < width; from += PANEL_COLUMNS * 4) {
        if (args->dtype == FLOAT32) {
            float number;
            memcpy(&number, from, sizeof number);
            out[i++] = number * args->scale;
        } else {
            uint16_t pair[2];
            memcpy(pair, from, sizeof pair);
            out[i++] = float_of_bfloat16(pair[0]) * args->scale;
            if (i < width) out[i++] = float_of_bfloat16(pair[1]) * args->scale;
        }
    }
}

/* Like embed_row(), for a compact table. */
static void embed_compact_row(const Embedding *args, int64_t row) {
    const int64_t id = args->ids[row], num_pairs = args->width / 4;
    const int column = (int)(id % PANEL_COLUMNS), place = compact_place(column);
    const char *table = (const char *)args->table + id / PANEL_COLUMNS * compact_panel_bytes(args->width);
    const CompactPanel *panel = (const CompactPanel *)table;
    const uint8_t *bytes = (const uint8_t *)(panel + 1);
    const WholePair *whole = first_whole_pair(panel);
    int64_t whole_number = panel->first_whole;
    float *out = args->out + row * args->width;
    for (int64_t pair = 0; pair < num_pairs; pair++, bytes += PAIR_BYTES, out += 4) {
        const int is_whole = pair == whole_number;
        for (int i = 0; i < 4; i++) { /* two steps of two */
            const int step = i / 2, at = place + i % 2, code = bytes[128 + at] >> step * 4 & 15;
            const uint16_t weight = is_whole ? whole->weights[step][column * 2 + i % 2]
                                             : (uint16_t)(panel->upper[code] << 8 | bytes[step * 64 + at]);
            out[i] = float_of_bfloat16(weight) * args->scale;
        }
        if (is_whole) whole_number = whole++->next;
    }
}

/* Like embed_row(), for a table of quantized panels. */
static void embed_quantized_row(const Embedding *args, int64_t row) {
    float *out = args->out + row * args->width;
    if (args->packing == PACKED + INT8_WEIGHTS)
        int8_column(args->table, args->width, args->ids[row], out);
    else
        quantized_column(args->table, args->width, args->ids[row], out);
    for (int64_t i = 0; i < args->width; i++) out[i] *= args->scale;
}

/* Like embed_row(), for a table of rows of blocks. Their weights are rounded to bfloat16. */
static void embed_row_of_blocks(const Embedding *args, int64_t row, int32_t type) {
    const int64_t num_blocks = args->width / block_weights(type);
    float *out = args->out + row * args->width;
    read_blocks((const char *)args->table + args->ids[row] * num_blocks * block_bytes(type), type, num_blocks, out);
    for (int64_t i = 0; i < args->width; i++) out[i] = float_of_bfloat16(bfloat16_of_float(out[i])) * args->scale;
}

/* Add the row `from` [width] to a row of the output. */
static void add_to_row(const Embedding *args, int64_t row, const float *from) {
    float *out = args->out + row * args->width;
    for (int64_t i = 0; i < args->width; i++) out[i] += from[i];
}

void embedding_part(const Embedding *args, int thread, int num_threads) {
    const int64_t begin = args->num_rows * thread / num_threads, end = args->num_rows * (thread + 1) / num_threads;
    for (int64_t row = begin; row < end; row++) {
        if (args->ids[row] < 0) {
            const int64_t width = args->width;
            memcpy(args->out + row * width, args->given + (-1 - args->ids[row]) * width, width * sizeof(float));
            continue;
        }
        if (args->packing >= BLOCK_TABLE)
            embed_row_of_blocks(args, row, args->packing - BLOCK_TABLE);
        else if (args->packing >= PACKED + QUANTIZED_WEIGHTS)
            embed_quantized_row(args, row);
        else if (args->packing == PACKED + COMPACT_WEIGHTS)
            embed_compact_row(args, row);
        else if (args->packing == PACKED)
            embed_packed_row(args, row);
        else if (args->dtype == FLOAT32)
            embed_row(args, row, FLOAT32);
        else
            embed_row(args, row, BFLOAT16);
        if (args->kinds) add_to_row(args, row, args->kinds + args->ids[row] / args->num_words * args->width);
        if (args->places) add_to_row(args, row, args->places + args->positions[row] * args->width);
    }
}

static void embedding_job(void *args, int thread, int num_threads) { embedding_part(args, thread, num_threads); }

EXPORT void embedding(const Embedding *args) {
    if (args->num_rows * args->width <= NOT_SHARED)
        embedding_part(args, 0, 1);
    else
        pool_run(embedding_job, (void *)args);
}
