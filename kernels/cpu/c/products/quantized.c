#include "products/quantized.h"

#include "products/gemm_slices.h"
#include "products/quantized_decode.h"

enum { FEW_ROWS = QUANTIZED_FEW_ROWS };

/* Depth of a converted slice of x: whole heads. */
enum { SLICE_DEPTH = GROUP * MAX_GROUPS };

/* Prefetch distances: the hardware's own prefetch ends at each page. Bytes are read so fast that they would fill the first
 * level cache's queue of misses; they come to the second level cache. */
enum { PREFETCH_BYTES = 4096, FAR_PREFETCH_BYTES = 16384 };

/* Groups [first, last) of a panel, and what is done with their weights. */
typedef struct {
    const char *panel;
    int32_t type; /* of block_types.h */
    int64_t first, last;
    const char *x;   /* rows of pairs of bfloat16 (BY_PAIRS) or of float32, from the first group on */
    int64_t x_bytes; /* from row to row */
    char *out;       /* sums [rows][PANEL_COLUMNS], which are added to; without rows: steps, as gemm.h packs them */
} Groups;

#if defined(WITH_NEON)
enum { VECTORS_OF_EIGHT = BY_PAIRS ? 1 : 2 };

/* The rows' numbers at eight places. */
typedef struct {
    Words steps[FEW_ROWS][VECTORS_OF_EIGHT];
} EightPlaces;

INLINE EightPlaces load_eight(const char *x, const int64_t x_bytes, const int rows) {
    EightPlaces loaded;
#pragma GCC unroll 2
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int i = 0; i < VECTORS_OF_EIGHT; i++) {
            loaded.steps[row][i] = load_words(x + row * x_bytes + i * VECTOR_BYTES);
            __asm__("" : "+w"(loaded.steps[row][i])); /* GCC 12 would move each lane to a vector of its own */
        }
    return loaded;
}

/* Add the products of a step of w with one of four steps of x. */
INLINE Floats add_lane_of(const Floats sum, const Words x, const Words w, const int lane) {
    const int dtype = BY_PAIRS ? BFLOAT16 : FLOAT32;
    switch (lane) {
    case 0: return add_lane(sum, x, w, 0, dtype);
    case 1: return add_lane(sum, x, w, 1, dtype);
    case 2: return add_lane(sum, x, w, 2, dtype);
    default: return add_lane(sum, x, w, 3, dtype);
    }
}

/* Multiply the rows with two adjacent weights, the first of which is weight i of eight. */
INLINE void multiply_two(Floats *sums, const EightPlaces *x, const int i, const Two two, const int rows) {
#pragma GCC unroll 2
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int s = 0; s < STEPS_OF_TWO; s++) {
            const int step = i * STEPS_OF_TWO / 2 + s;
            sums[row] = add_lane_of(sums[row], x->steps[row][step / LANES], two.steps[s], step % LANES);
        }
}
#else
/* Where the rows' numbers at eight places are. */
typedef struct {
    const char *x;
    int64_t x_bytes;
} EightPlaces;

INLINE EightPlaces load_eight(const char *x, const int64_t x_bytes, const int rows) {
    (void)rows;
    return (EightPlaces){x, x_bytes};
}

/* Multiply the rows with two adjacent weights, the first of which is weight i of eight. */
INLINE void multiply_two(Floats *sums, const EightPlaces *x, const int i, const Two two, const int rows) {
    const int bytes = BY_PAIRS ? 2 : 4;
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
        const char *at = x->x + row * x->x_bytes + i * bytes;
#pragma GCC unroll 2
        for (int s = 0; s < STEPS_OF_TWO; s++)
            sums[row] = add_step(sums[row], load_step(at + 4 * s, 4), two.steps[s], BY_PAIRS ? BFLOAT16 : FLOAT32);
    }
}
#endif

/* Write two adjacent weights as one or two steps of vector v, the first of which is weight i of eight. */
INLINE void store_two(char *out, const int i, const int v, const Two two) {
    out += v * VECTOR_BYTES + i * STEPS_OF_TWO / 2 * STEP_BYTES;
#pragma GCC unroll 2
    for (int s = 0; s < STEPS_OF_TWO; s++) store_floats(out + s * STEP_BYTES, (Floats)two.steps[s]);
}

/* Work on a row of words of a group, for `vectors` vectors of columns from `first` on: multiply eight adjacent
 * weights along the depth with `rows` rows, or unpack them to `out` if there are none. */
INLINE void work_on_words(Floats sums[PANEL_VECTORS][FEW_ROWS], const Groups *work, const char *codes, const char *x,
                          char *out, Scales scales[][2], const OwnParts *own, const int first, const int r,
                          const int vectors, const int rows, const int type) {
    RowCodes row[PANEL_VECTORS];
    out += first * VECTOR_BYTES + r * (8 * STEPS_OF_TWO / 2 * STEP_BYTES);
#if defined(WITH_NEON)
    __asm__("" : "+r"(out)); /* so that steps are offsets from it */
#endif
    const EightPlaces eight = load_eight(x + 8 * r * (BY_PAIRS ? 2 : 4), work->x_bytes, rows);
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) row[v] = load_codes(codes, first + v, r, own->levels, type);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            const Two two = two_weights(codes, &row[v], own, first + v, r, i, scales[v], type);
            if (rows)
                multiply_two(sums[v], &eight, i, two, rows);
            else
                store_two(out, i, v, two);
        }
}

/* Work on all groups, for `vectors` vectors of columns from `first` on. Several vectors have several chains of sums;
 * one row alone has too few of them. */
INLINE void work_on_vectors(const Groups *work, const int first, const int vectors, const int rows, const int type) {
    const QuantizedLayout layout = layout_of(type);
    const OwnParts own = own_parts(work->type, type);
    const char *x = work->x;
    char *out = work->out, *at = out + first * VECTOR_BYTES;
    Floats sums[PANEL_VECTORS][FEW_ROWS];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) sums[v][row] = load_floats(at + row * ROW_BYTES + v * VECTOR_BYTES);
    for (int64_t g = work->first; g < work->last; g++) {
        const char *head = work->panel + head_offset(layout, g), *group = work->panel + group_offset(layout, g);
        Scales scales[PANEL_VECTORS][2];
        for (int line = 0; first == 0 && line < layout.group_bytes; line += 64) {
            if (has_lane_pairs(type))
                __builtin_prefetch(group + FAR_PREFETCH_BYTES + line, 0, 2);
            else
                __builtin_prefetch(group + PREFETCH_BYTES + line);
        }
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) load_lane_scales(scales[v], head, group, first + v, own.unit, type);
#pragma GCC unroll 1
        for (int r = 0; r < GROUP / 8; r++)
            work_on_words(sums, work, group + layout.scale_bytes, x, out, scales, &own, first, r, vectors, rows, type);
        x += GROUP * (BY_PAIRS ? 2 : 4);
        if (!rows) out += GROUP / (BY_PAIRS ? 2 : 1) * STEP_BYTES;
    }
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) store_floats(at + row * ROW_BYTES + v * VECTOR_BYTES, sums[v][row]);
}

INLINE void work_on_groups(const Groups *work, const int rows, const int type) {
    const int vectors = PANEL_VECTORS >= 2 ? 2 : 1;
#pragma GCC unroll 1
    for (int v = 0; v < PANEL_VECTORS; v += vectors) work_on_vectors(work, v, vectors, rows, type);
}

typedef void (*Work_On_Groups)(const Groups *work);

#define DEFINE_OF(name, type, rows) \
    static void name##_##rows(const Groups *work) { work_on_groups(work, rows, type); }
#define DEFINE_TYPES(rows) DEFINE_OF(whole, WHOLE_PANEL, rows) EACH_PANEL_TYPE(DEFINE_OF, rows)
#define ENTRY_OF(name, type, rows) [type - WHOLE_PANEL] = name##_##rows,
#define TYPES_OF(rows) {whole_##rows, EACH_PANEL_TYPE(ENTRY_OF, rows)}

DEFINE_TYPES(0)
DEFINE_TYPES(1)
DEFINE_TYPES(2)
#if defined(__AVX512F__)
DEFINE_TYPES(3)
DEFINE_TYPES(4)
#endif
#if defined(__AVX512BF16__)
DEFINE_TYPES(5)
DEFINE_TYPES(6)
DEFINE_TYPES(7)
DEFINE_TYPES(8)
#endif

/* [rows][function_type_of() - WHOLE_PANEL] */
static const Work_On_Groups WORKS[FEW_ROWS + 1][IQ2_XXS + 2] = {
    TYPES_OF(0), TYPES_OF(1), TYPES_OF(2),
#if defined(__AVX512F__)
    TYPES_OF(3), TYPES_OF(4),
#endif
#if defined(__AVX512BF16__)
    TYPES_OF(5), TYPES_OF(6), TYPES_OF(7), TYPES_OF(8),
#endif
};

static void work_on(const Groups *work, int rows) {
    WORKS[rows][function_type_of(work->type) - WHOLE_PANEL](work);
}

void quantized_unpack(const char *panel, int32_t type, int64_t first, int64_t last, void *out) {
    const Groups work = {.panel = panel, .type = type, .first = first, .last = last, .out = out};
    work_on(&work, 0);
}

/* Multiply a few rows with at most SLICE_PANELS panels. */
static void multiply_panels(const Gemm *args, int64_t row, int num_rows, int64_t first, int64_t last) {
    _Alignas(64) float sums[SLICE_PANELS][FEW_ROWS * PANEL_COLUMNS], room[FEW_ROWS * SLICE_DEPTH];
    const int64_t most = BY_PAIRS ? args->depth : SLICE_DEPTH; /* pairs need no conversion */
    memset(sums, 0, sizeof sums);
    for (int64_t k = 0; k < args->depth; k += most) {
        const int64_t end = args->depth - k > most ? k + most : args->depth;
        const Slice x = slice_of_x(args, row, num_rows, k, end - k, room);
        for (int64_t panel = first; panel < last; panel++) {
            const QuantizedPanel *entry = quantized_panel(args->weights, panel);
            const Groups work = {
                .panel = (const char *)args->weights + entry->offset,
                .type = entry->type,
                .first = k / GROUP,
                .last = end / GROUP,
                .x = x.rows,
                .x_bytes = x.bytes,
                .out = (char *)sums[panel - first],
            };
            work_on(&work, num_rows);
        }
    }
    for (int64_t panel = first; panel < last; panel++)
        gemm_store_panel(args, sums[panel - first], row, num_rows, panel);
}

void quantized_multiply(const Gemm *args, int64_t begin, int64_t end, int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; panel += SLICE_PANELS)
        multiply_panels(args, begin, (int)(end - begin), panel,
                        last - panel > SLICE_PANELS ? panel + SLICE_PANELS : last);
}
