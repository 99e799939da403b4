#include "products/gemm_amx.h"

#if defined(__AMX_BF16__)

#include "products/gemm_slices.h"

/* Tiles: sums of two by two, then rows of x, then weights. */
enum { X = 4, WEIGHTS = 6 };

enum { TALL = 2 * AMX_ROWS };                             /* the most rows of a block */
enum { SLAB_BYTES = AMX_DEPTH / 2 * STEP_BYTES };         /* weights of AMX_DEPTH places of a panel: a slab */
enum { ROOM_BYTES = 640 << 10, RING_SLABS = 8, AHEAD = 2 }; /* AHEAD: slabs unpacked before the one multiplied */
enum { PREFETCH_BYTES = 2048 };

/* Unpacked weights. A thread's room is allocated with all else that the library keeps for it. */
static _Thread_local char room[ROOM_BYTES] __attribute__((aligned(64)));

/* Some rows and what is multiplied with them. */
typedef struct {
    const Gemm *args;
    int64_t row;
    int rows;
    const char *x;    /* the first row */
    int64_t x_bytes;  /* from row to row */
    const char *tail; /* [TALL, AMX_ROW_BYTES]: places of x after the last whole slab, then zeros */
    int64_t first;    /* the group's first panel */
    int is_first;     /* whether it is the first block that needs the unpacked weights */
    int keeps;        /* whether all slabs of the group are kept for the next blocks */
} RowBlock;

static int64_t num_slabs(const Gemm *args) { return (args->depth + AMX_DEPTH - 1) / AMX_DEPTH; }

/* Write a slab as it is packed in a whole panel; zeros past the depth. */
static void unpack_slab(const Gemm *args, int64_t panel, int64_t slab, char *out) {
    const int64_t begin = slab * AMX_DEPTH, end = begin + AMX_DEPTH < args->depth ? begin + AMX_DEPTH : args->depth;
    if (end - begin < AMX_DEPTH) memset(out, 0, SLAB_BYTES);
    gemm_unpack(args, panel, begin, end, out);
}

/* Whether a slab is multiplied where it is packed. */
INLINE int is_in_place(const Gemm *args, int64_t slab) {
    return args->packing == WHOLE_WEIGHTS && (slab + 1) * AMX_DEPTH <= args->depth;
}

/* Return where a slab is, once unpacked. */
INLINE char *place_of(const RowBlock *rows, int64_t panel, int64_t slab) {
    const int64_t number = rows->keeps ? (panel - rows->first) * num_slabs(rows->args) + slab : slab % RING_SLABS;
    return room + number * SLAB_BYTES;
}

/* Unpack a slab, if there is one of this number and it has not been unpacked for a block before. */
INLINE void prepare(const RowBlock *rows, int64_t panel, int64_t slab) {
    if (slab >= num_slabs(rows->args) || is_in_place(rows->args, slab)) return;
    if (rows->is_first || !rows->keeps) unpack_slab(rows->args, panel, slab, place_of(rows, panel, slab));
}

INLINE const char *weights_of(const RowBlock *rows, int64_t panel, int64_t slab) {
    const Gemm *args = rows->args;
    if (!is_in_place(args, slab)) return place_of(rows, panel, slab);
    const char *weights = args->weights;
    weights += panel * packed_bytes(PANEL_COLUMNS, args->depth, BFLOAT16) + slab * SLAB_BYTES;
    if (rows->is_first)
        for (int line = 0; line < SLAB_BYTES; line += 64) __builtin_prefetch(weights + PREFETCH_BYTES + line);
    return weights;
}

/* Multiply the rows with a panel. is_tall: there are more than AMX_ROWS. */
INLINE void multiply_panel(Amx *amx, const RowBlock *rows, int64_t panel, const int is_tall, const int is_real) {
    const Gemm *args = rows->args;
    const int64_t count = num_slabs(args), whole = args->depth / AMX_DEPTH;
    float sums[TALL * PANEL_COLUMNS] __attribute__((aligned(64)));
    const int64_t stride = PANEL_COLUMNS * sizeof(float);
    amx_zero(amx, 0, is_real), amx_zero(amx, 1, is_real);
    if (is_tall) amx_zero(amx, 2, is_real), amx_zero(amx, 3, is_real);
    for (int64_t slab = 0; slab < AHEAD; slab++) prepare(rows, panel, slab);
    for (int64_t slab = 0; slab < count; slab++) {
        prepare(rows, panel, slab + AHEAD);
        const char *weights = weights_of(rows, panel, slab);
        const char *x = slab < whole ? rows->x + slab * AMX_ROW_BYTES : rows->tail;
        const int64_t x_bytes = slab < whole ? rows->x_bytes : AMX_ROW_BYTES;
        amx_load(amx, X, x, x_bytes, is_real);
        amx_load_past(amx, WEIGHTS, weights, STEP_BYTES, is_real);
        amx_product(amx, 0, X, WEIGHTS, is_real);
        if (is_tall) {
            amx_load(amx, X + 1, x + AMX_ROWS * x_bytes, x_bytes, is_real);
            amx_product(amx, 2, X + 1, WEIGHTS, is_real);
        }
        amx_load_past(amx, WEIGHTS + 1, weights + AMX_ROW_BYTES, STEP_BYTES, is_real);
        amx_product(amx, 1, X, WEIGHTS + 1, is_real);
        if (is_tall) amx_product(amx, 3, X + 1, WEIGHTS + 1, is_real);
    }
    amx_store(amx, 0, sums, stride, is_real), amx_store(amx, 1, sums + AMX_ROWS, stride, is_real);
    if (is_tall) {
        float *lower = sums + AMX_ROWS * PANEL_COLUMNS;
        amx_store(amx, 2, lower, stride, is_real), amx_store(amx, 3, lower + AMX_ROWS, stride, is_real);
    }
    gemm_store_panel(args, sums, rows->row, rows->rows, panel);
}

/* Configure the tiles for `rows` rows. Missing rows are neither read nor written. */
static void shape(Amx *amx, int rows) {
    amx->shapes = (AmxShapes){.palette = 1};
    const int upper = rows < AMX_ROWS ? rows : AMX_ROWS;
    for (int tile = 0; tile < X; tile++) amx_shape(amx, tile, tile < 2 ? upper : rows - upper, AMX_ROW_BYTES);
    amx_shape(amx, X, upper, AMX_ROW_BYTES), amx_shape(amx, X + 1, rows - upper, AMX_ROW_BYTES);
    amx_shape(amx, WEIGHTS, AMX_ROWS, AMX_ROW_BYTES), amx_shape(amx, WEIGHTS + 1, AMX_ROWS, AMX_ROW_BYTES);
}

/* Copy the places of x after the last whole slab; the rest of `tail` is zero already. */
static void copy_tail(const RowBlock *rows, char *tail) {
    const int64_t begin = rows->args->depth / AMX_DEPTH * AMX_DEPTH;
    for (int i = 0; i < rows->rows; i++)
        memcpy(tail + i * AMX_ROW_BYTES, rows->x + i * rows->x_bytes + begin * 2, (rows->args->depth - begin) * 2);
}

/* Return how many panels fit in the room; 0 if there is not even room for one. */
static int64_t group_of(const Gemm *args) { return ROOM_BYTES / (num_slabs(args) * SLAB_BYTES); }

INLINE void multiply(const Gemm *args, int64_t begin, int64_t end, int64_t first, int64_t last, const int is_real) {
    Amx amx;
    char tail[TALL * AMX_ROW_BYTES] __attribute__((aligned(64))) = {0};
    RowBlock rows = {.args = args, .x_bytes = args->x_stride * 2, .tail = tail};
    const int64_t most = group_of(args) ? group_of(args) : 1;
    rows.keeps = end - begin > TALL && args->packing != WHOLE_WEIGHTS && group_of(args);
    for (rows.first = first; rows.first < last; rows.first += most) {
        const int64_t after = last - rows.first < most ? last : rows.first + most;
        rows.is_first = 1;
        for (rows.row = begin; rows.row < end; rows.row += TALL, rows.is_first = 0) {
            const int count = end - rows.row < TALL ? (int)(end - rows.row) : TALL;
            if (count != rows.rows) {
                shape(&amx, count);
                amx_begin(&amx, is_real);
            }
            rows.rows = count;
            rows.x = (const char *)args->x + rows.row * rows.x_bytes;
            copy_tail(&rows, tail);
            for (int64_t panel = rows.first; panel < after; panel++)
                if (count > AMX_ROWS)
                    multiply_panel(&amx, &rows, panel, 1, is_real);
                else
                    multiply_panel(&amx, &rows, panel, 0, is_real);
        }
    }
    amx_end(is_real);
}

static __attribute__((noinline)) void multiply_real(const Gemm *args, int64_t begin, int64_t end, int64_t first,
                                                    int64_t last) {
    multiply(args, begin, end, first, last, 1);
}

static __attribute__((noinline)) void multiply_emulated(const Gemm *args, int64_t begin, int64_t end, int64_t first,
                                                        int64_t last) {
    multiply(args, begin, end, first, last, 0);
}

void gemm_multiply_amx(const Gemm *args, int64_t begin, int64_t end, int64_t first, int64_t last) {
    if (amx_is_real)
        multiply_real(args, begin, end, first, last);
    else
        multiply_emulated(args, begin, end, first, last);
}

int64_t gemm_amx_piece(const Gemm *args, int64_t least) {
    const int64_t group = args->num_rows > TALL ? group_of(args) : 0;
    return group > least ? group : least;
}

#endif
