#include "products/gemm.h"
#include "products/quantized.h"
#include "threads/pool.h"
#include "math/vector_math.h"

static int64_t num_steps(int64_t depth, int dtype) { return dtype == FLOAT32 ? depth : (depth + 1) / 2; }

EXPORT int64_t packed_bytes(int64_t num_columns, int64_t depth, int32_t dtype) {
    int64_t num_panels = (num_columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
    return num_panels * num_steps(depth, dtype) * PANEL_COLUMNS * 4;
}

INLINE uint32_t word_of(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return word;
}

INLINE float float_at(const char *row, int64_t index, const int dtype) {
    float value;
    uint16_t bits;
    if (dtype == FLOAT32) {
        memcpy(&value, row + index * 4, sizeof value);
        return value;
    }
    memcpy(&bits, row + index * 2, sizeof bits);
    return dtype == BFLOAT16 ? float_of_bfloat16(bits) : float_of_float16(bits);
}

/* Return one column's step: a float32, or two bfloat16 with the first one in the lower half. */
INLINE uint32_t step_at(const char *row, int64_t step, int64_t depth, const int source_dtype, const int dtype) {
    if (dtype == FLOAT32) return word_of(float_at(row, step, source_dtype));
    int64_t index = step * 2;
    if (source_dtype == BFLOAT16 && index + 1 < depth) { /* no conversion needed */
        uint32_t word;
        memcpy(&word, row + index * 2, sizeof word);
        return word;
    }
    uint32_t low = bfloat16_of_float(float_at(row, index, source_dtype));
    uint32_t high = index + 1 < depth ? bfloat16_of_float(float_at(row, index + 1, source_dtype)) : 0;
    return low | high << 16;
}

/* Find the source rows of a panel's columns. A missing column gets the first column's row; its sums are not used. */
INLINE void find_rows(const GemmPack *args, int64_t panel, const char *rows[PANEL_COLUMNS]) {
    const int64_t in_panel = args->is_gated ? PANEL_COLUMNS / 2 : PANEL_COLUMNS, first = panel * in_panel;
    const int64_t in_source = args->is_gated ? args->num_columns / 2 : args->num_columns;
    const int64_t stride = args->source_stride * element_bytes(args->source_dtype);
    for (int64_t column = 0; column < PANEL_COLUMNS; column++) {
        const int64_t is_second = column >= in_panel, index = first + column - is_second * in_panel;
        const int64_t row = index < in_source ? is_second * in_source + index : first;
        rows[column] = (const char *)args->source + row * stride;
    }
}

/* Pack steps that need no conversion, as many at a time as a vector has lanes. Return the first one that is left. */
INLINE int64_t pack_squares(const char *const *rows, int64_t first, int64_t last, uint32_t *to) {
    for (; first + LANES <= last; first += LANES, to += LANES * PANEL_COLUMNS)
        for (int64_t column = 0; column < PANEL_COLUMNS; column += LANES) {
            Floats square[LANES];
            for (int64_t i = 0; i < LANES; i++) square[i] = load_floats(rows[column + i] + first * 4);
            transpose(square);
            for (int64_t i = 0; i < LANES; i++) store_floats(to + i * PANEL_COLUMNS + column, square[i]);
        }
    return first;
}

INLINE void pack_steps(const GemmPack *args, int64_t panel, int64_t first, int64_t last, uint32_t *to,
                       const int source_dtype, const int dtype) {
    const char *rows[PANEL_COLUMNS];
    find_rows(args, panel, rows);
    if (source_dtype == dtype) {
        const int64_t whole = args->depth * element_bytes(dtype) / 4; /* a last step of bfloat16 may have one of two */
        const int64_t next = pack_squares(rows, first, last < whole ? last : whole, to);
        to += (next - first) * PANEL_COLUMNS;
        first = next;
    }
    for (int64_t step = first; step < last; step++, to += PANEL_COLUMNS)
        for (int64_t column = 0; column < PANEL_COLUMNS; column++)
            to[column] = step_at(rows[column], step, args->depth, source_dtype, dtype);
}

/* Write steps of a quantized panel. The first one begins a group, and the last one ends one. */
static void pack_quantized_steps(const GemmPack *args, int64_t panel, int64_t first, int64_t last, uint32_t *to) {
    const QuantizedPanel *entry = quantized_panel(args->source, panel);
    const char *from = (const char *)args->source + entry->offset;
    enum { STEPS = GROUP / 2 };
    if (BY_PAIRS) {
        quantized_unpack(from, entry->type, first / STEPS, last / STEPS, to);
        return;
    }
    for (int64_t step = first; step < last; step += STEPS, to += STEPS * PANEL_COLUMNS) {
        _Alignas(64) uint32_t floats[GROUP * PANEL_COLUMNS];
        quantized_unpack(from, entry->type, step / STEPS, step / STEPS + 1, floats);
        for (int64_t i = 0; i < STEPS * PANEL_COLUMNS; i++) {
            const uint32_t *low = floats + i / PANEL_COLUMNS * 2 * PANEL_COLUMNS + i % PANEL_COLUMNS;
            to[i] = low[0] >> 16 | (low[PANEL_COLUMNS] & 0xffff0000);
        }
    }
}

void gemm_pack_steps(const GemmPack *args, int64_t panel, int64_t first, int64_t last, void *to) {
    if (args->is_packed) {
        pack_quantized_steps(args, panel, first, last, to);
        return;
    }
    const int source_dtype = args->source_dtype, dtype = args->dtype;
    if (source_dtype == BFLOAT16 && dtype == BFLOAT16) /* the usual cases, compiled for constants */
        pack_steps(args, panel, first, last, to, BFLOAT16, BFLOAT16);
    else if (source_dtype == FLOAT32 && dtype == FLOAT32)
        pack_steps(args, panel, first, last, to, FLOAT32, FLOAT32);
    else
        pack_steps(args, panel, first, last, to, source_dtype, dtype);
}

void gemm_copy_steps(const GemmPack *args, int64_t panel, int64_t first, int64_t last, void *to) {
    if (args->is_packed || args->source_dtype != args->dtype || last * 4 > args->depth * element_bytes(args->dtype)) {
        gemm_pack_steps(args, panel, first, last, to);
        return;
    }
    const char *rows[PANEL_COLUMNS];
    const int64_t num_bytes = (last - first) * 4;
    find_rows(args, panel, rows);
    for (int64_t column = 0; column < PANEL_COLUMNS; column++)
        memcpy((char *)to + column * num_bytes, rows[column] + first * 4, (size_t)num_bytes);
}

void gemm_pack_part(const GemmPack *args, int thread, int num_threads) {
    const int64_t num_panels = (args->num_columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
    const int64_t steps = num_steps(args->depth, args->dtype), last = num_panels * (thread + 1) / num_threads;
    for (int64_t panel = num_panels * thread / num_threads; panel < last; panel++)
        gemm_pack_steps(args, panel, 0, steps, (uint32_t *)args->packed + panel * steps * PANEL_COLUMNS);
}

static void gemm_pack_job(void *args, int thread, int num_threads) { gemm_pack_part(args, thread, num_threads); }

EXPORT void gemm_pack(const GemmPack *args) { pool_run(gemm_pack_job, (void *)args); }
