#include "products/gemm_slices.h"

/* Rows and places of a slice: few enough that their part of x stays in the second level cache, with the sums, and the
 * unpacked weights in the first. Pairs take half the room of floats. */
enum { MOST_ROWS = BY_PAIRS ? 256 : 128, DEPTH = BY_PAIRS ? 256 : 128 };

/* From this many rows on it is worth converting the weights to floats; with fewer, each is used too rarely. */
enum { LEAST_ROWS = VECTOR_BYTES == 32 ? 5 : 8, LEAST_COMPACT_ROWS = VECTOR_BYTES == 32 ? 3 : 4 };

/* Prefetch distance: the hardware's own prefetch ends at each page. */
enum { PREFETCH_BYTES = 2048 };

#define DEFINE_SLICE(rows)                                                                       \
    static void slice_##rows(const Work *work) {                                                 \
        block_of_slice(*work, rows, VECTORS_OF(rows), BY_PAIRS ? BFLOAT16 : FLOAT32);            \
    }
DEFINE_SLICE(1)
DEFINE_SLICE(2)
DEFINE_SLICE(3)
DEFINE_SLICE(4)
#if MAX_ROWS >= 6
DEFINE_SLICE(5)
DEFINE_SLICE(6)
#endif
#if MAX_ROWS >= 8
DEFINE_SLICE(7)
DEFINE_SLICE(8)
#endif
#if MAX_ROWS == 14
DEFINE_SLICE(9)
DEFINE_SLICE(10)
DEFINE_SLICE(11)
DEFINE_SLICE(12)
DEFINE_SLICE(13)
DEFINE_SLICE(14)
static void (*const SLICES[MAX_ROWS])(const Work *work) = {
    slice_1, slice_2, slice_3,  slice_4,  slice_5,  slice_6,  slice_7,
    slice_8, slice_9, slice_10, slice_11, slice_12, slice_13, slice_14,
};
#elif MAX_ROWS == 8
static void (*const SLICES[MAX_ROWS])(const Work *work) = {slice_1, slice_2, slice_3, slice_4,
                                                           slice_5, slice_6, slice_7, slice_8};
#elif MAX_ROWS == 6
static void (*const SLICES[MAX_ROWS])(const Work *work) = {slice_1, slice_2, slice_3, slice_4, slice_5, slice_6};
#else
static void (*const SLICES[MAX_ROWS])(const Work *work) = {slice_1, slice_2, slice_3, slice_4};
#endif

#if HAS_COMPACT
/* Unpack the pairs [first, last) of a compact panel (compact.h). */
static void unpack_compact(const CompactPanel *panel, int64_t first, int64_t last, char *out) {
    const Table table = load_table(panel->upper);
    const char *pairs = (const char *)(panel + 1);
    const WholePair *whole = first_whole_pair(panel);
    int64_t whole_number = panel->first_whole;
    while (whole_number != NO_PAIR && whole_number < first) whole_number = whole++->next;
    for (int64_t number = first; number < last; number++) {
        const char *pair = pairs + number * PAIR_BYTES;
        const int is_whole = number == whole_number;
        for (int line = 0; line < PAIR_BYTES; line += 64) __builtin_prefetch(pair + PREFETCH_BYTES + line);
        for (int step = 0; step < 2; step++, out += (BY_PAIRS ? 1 : 2) * STEP_BYTES) {
            Words weights[PANEL_VECTORS];
            if (__builtin_expect(is_whole, 0))
                load_whole_step(weights, whole, step);
            else
                unpack_step(weights, pair, step * 64, table);
            if (BY_PAIRS) {
                memcpy(out, weights, sizeof weights);
                continue;
            }
#pragma GCC unroll 8
            for (int v = 0; v < PANEL_VECTORS; v++) {
                store_floats(out + v * VECTOR_BYTES, (Floats)(weights[v] << 16));
                store_floats(out + STEP_BYTES + v * VECTOR_BYTES, (Floats)(weights[v] & 0xffff0000));
            }
        }
        if (is_whole) whole_number = whole++->next;
    }
}
#endif

/* Unpack the steps [first, last) of a panel of whole weights. */
static void unpack_whole(const char *panel, int64_t first, int64_t last, char *out) {
    const char *end = panel + last * STEP_BYTES;
    panel += first * STEP_BYTES;
    if (BY_PAIRS) {
        memcpy(out, panel, end - panel);
        return;
    }
    for (; panel != end; panel += STEP_BYTES, out += 2 * STEP_BYTES)
#pragma GCC unroll 8
        for (int v = 0; v < STEP_BYTES; v += VECTOR_BYTES) {
            const Words weights = load_words(panel + v);
            store_floats(out + v, (Floats)(weights << 16));
            store_floats(out + STEP_BYTES + v, (Floats)(weights & 0xffff0000));
        }
}

void gemm_unpack(const Gemm *args, int64_t panel, int64_t begin, int64_t end, char *out) {
    const char *weights = args->weights;
    if (args->packing == QUANTIZED_WEIGHTS) {
        const QuantizedPanel *entry = quantized_panel(weights, panel);
        quantized_unpack(weights + entry->offset, entry->type, begin / GROUP, end / GROUP, out);
        return;
    }
#if HAS_COMPACT
    if (args->packing == COMPACT_WEIGHTS) {
        const char *compact = weights + panel * compact_panel_bytes(args->depth);
        unpack_compact((const CompactPanel *)compact, begin / 4, end / 4, out);
        return;
    }
#endif
    unpack_whole(weights + panel * packed_bytes(PANEL_COLUMNS, args->depth, BFLOAT16), begin / 2, (end + 1) / 2, out);
}

static int64_t end_of_slice(const Gemm *args, int64_t begin) {
    return args->depth - begin > DEPTH ? begin + DEPTH : args->depth;
}

Packed gemm_packed(const Gemm *args, int64_t panel, int64_t begin, int64_t end) {
    const char *weights = args->weights;
    if (args->packing == QUANTIZED_WEIGHTS) {
        const QuantizedPanel *entry = quantized_panel(weights, panel);
        const QuantizedLayout layout = layout_of(entry->type);
        const int64_t first = group_offset(layout, begin / GROUP), last = group_offset(layout, end / GROUP);
        return (Packed){weights + entry->offset + first, last - first};
    }
    if (args->packing == COMPACT_WEIGHTS) {
        weights += panel * compact_panel_bytes(args->depth) + (int64_t)sizeof(CompactPanel);
        return (Packed){weights + begin / 4 * PAIR_BYTES, (end - begin) / 4 * PAIR_BYTES};
    }
    weights += panel * packed_bytes(PANEL_COLUMNS, args->depth, BFLOAT16);
    return (Packed){weights + begin / 2 * STEP_BYTES, (end - begin) / 2 * STEP_BYTES};
}

/* Return the weights of a panel's slice that starts at place `begin`. */
static Packed packed_slice(const Gemm *args, int64_t panel, int64_t begin) {
    return gemm_packed(args, panel, begin, end_of_slice(args, begin));
}

/* Return the weights that are unpacked after a panel's slice from `begin` on, when the panels are [first, last). */
static Packed slice_after(const Gemm *args, int64_t panel, int64_t begin, int64_t first, int64_t last) {
    const int64_t num_panels = (args->num_columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS, end = end_of_slice(args, begin);
    if (panel + 1 < last) return packed_slice(args, panel + 1, begin);
    if (end < args->depth) return packed_slice(args, first, end);
    return last < num_panels ? packed_slice(args, last, 0) : (Packed){args->weights, 0};
}

/* Add the products of rows with places [begin, end) of a panel to sums [num_rows][PANEL_COLUMNS]. During that time
 * memory delivers `next`, the weights that are unpacked after these. */
static void add_slice(const Gemm *args, int64_t panel, int64_t begin, int64_t end, Slice x, int num_rows,
                      float *sums, Packed next) {
    _Alignas(64) char weights[DEPTH / (BY_PAIRS ? 2 : 1) * STEP_BYTES];
    const int num_blocks = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const int64_t steps = (end - begin + BY_PAIRS) / (BY_PAIRS ? 2 : 1);
    gemm_unpack(args, panel, begin, end, weights);
    for (int i = 0; i < num_blocks; i++) {
        const int row = num_rows * i / num_blocks, rows = num_rows * (i + 1) / num_blocks - row;
        const int vectors = VECTORS_OF(rows), parts = num_blocks * PANEL_VECTORS / vectors;
        for (int v = 0; v < PANEL_VECTORS; v += vectors) {
            const Work work = {
                .ahead = next.begin + next.bytes * (i * PANEL_VECTORS + v) / (num_blocks * PANEL_VECTORS),
                .ahead_step = (next.bytes + parts * steps - 1) / (parts * steps),
                .x = x.rows + row * x.bytes,
                .x_bytes = x.bytes,
                .w = weights + v * VECTOR_BYTES,
                .depth = end - begin,
                .out = sums + row * PANEL_COLUMNS + v * LANES,
            };
            SLICES[rows - 1](&work);
        }
    }
}

/* Multiply at most MOST_ROWS rows with at most SLICE_PANELS panels. */
static void multiply_panels(const Gemm *args, int64_t row, int num_rows, int64_t first, int64_t last) {
    _Alignas(64) float sums[SLICE_PANELS][MOST_ROWS * PANEL_COLUMNS], room[BY_PAIRS ? 1 : MOST_ROWS * DEPTH];
    for (int64_t panel = first; panel < last; panel++)
        memset(sums[panel - first], 0, num_rows * PANEL_COLUMNS * sizeof(float));
    for (int64_t k = 0; k < args->depth; k += DEPTH) {
        const int64_t end = end_of_slice(args, k);
        const Slice x = slice_of_x(args, row, num_rows, k, end - k, room);
        for (int64_t panel = first; panel < last; panel++)
            add_slice(args, panel, k, end, x, num_rows, sums[panel - first], slice_after(args, panel, k, first, last));
    }
    for (int64_t panel = first; panel < last; panel++)
        gemm_store_panel(args, sums[panel - first], row, num_rows, panel);
}

int gemm_has_slices(const Gemm *args, int64_t num_rows) {
    if (args->packing == QUANTIZED_WEIGHTS) return num_rows > QUANTIZED_FEW_ROWS;
    const int64_t least = args->packing == COMPACT_WEIGHTS ? LEAST_COMPACT_ROWS : LEAST_ROWS;
    return !BY_PAIRS && args->dtype == BFLOAT16 && num_rows >= least && args->depth % GROUP == 0;
}

void gemm_multiply_slices(const Gemm *args, int64_t begin, int64_t end, int64_t first, int64_t last) {
    const int64_t num_rows = end - begin, num_parts = (num_rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t panel = first; panel < last; panel += SLICE_PANELS)
        for (int64_t i = 0; i < num_parts; i++) {
            const int64_t row = begin + num_rows * i / num_parts;
            const int rows = (int)(begin + num_rows * (i + 1) / num_parts - row);
            multiply_panels(args, row, rows, panel, last - panel > SLICE_PANELS ? panel + SLICE_PANELS : last);
        }
}
