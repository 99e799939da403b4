#include "products/int8_amx.h"

#if defined(__AMX_INT8__)

#include "products/int8_block.h"

/* Tiles of two groups each: sums, rows of x and codes. */
enum { SUMS = 0, X = 2, CODES = 4 };

/* Groups of a panel that are unpacked together, and then multiplied with all rows. With 12, products of 16 and 32 rows
 * take up to 1.15 times as long, with 18 up to 1.6 times: the first level cache has x, too (Intel Emerald Rapids). */
enum { AMX_GROUPS = 6 };

/* Rows whose sums are in memory during that. */
enum { MOST_ROWS = 256 };

#define MIDDLE 0x1.8p23f
enum { MIDDLE_BITS = 0x4b400000 };

/* The blocks of 16 rows. */
typedef struct {
    _Alignas(64) int8_t codes[AMX_ROWS][GROUP];
    float scale[AMX_ROWS];
    float sum[AMX_ROWS]; /* of the codes */
} TileRows;

/* A thread's room is allocated with all else that the library keeps for it. */
static _Thread_local TileRows room[MOST_AMX_GROUPS];

/* What rows are multiplied with: `count` groups of a panel. */
typedef struct {
    const Int8Group *groups;
    const TileRows *x; /* [16 rows][x_step] */
    int64_t count, x_step;
    const char *ahead; /* what is prefetched with the first 16 rows: `ahead_bytes` for each vector of columns */
    int64_t ahead_bytes;
    float *out; /* [rows][PANEL_COLUMNS], which are added to */
} TileWork;

/* 16 rows and a vector of columns. */
typedef struct {
    const TileRows *x;
    const Int8Group *groups;
    int v;
} TilePass;

/* The middle in each of a tile's places. */
static const int32_t middles[AMX_ROWS * AMX_ROWS] __attribute__((aligned(64))) = {
    [0 ... AMX_ROWS * AMX_ROWS - 1] = MIDDLE_BITS};

/* Store rows together: to[16 rows][group]. Places of missing rows keep what they have. */
static void store_rows(TileRows *to, const Int8Block *x, int64_t x_stride, int64_t num_rows, int64_t groups) {
    for (int64_t row = 0; row < num_rows; row++) {
        TileRows *at = to + row / AMX_ROWS * groups;
        const int64_t i = row % AMX_ROWS;
        const Int8Block *from = x + row * x_stride;
        for (int64_t g = 0; g < groups; g++, at++, from++) {
            memcpy(at->codes[i], from->codes, sizeof from->codes);
            at->scale[i] = from->scale;
            at->sum[i] = from->sum;
        }
    }
}

typedef float TileSums[AMX_ROWS][AMX_ROWS];

/* Begin the product of a group. odd: which of two groups' tiles. */
INLINE void multiply_group_of(Amx *amx, const TilePass *pass, int64_t g, const int odd, const int is_real) {
    amx_load(amx, SUMS + odd, middles, AMX_ROW_BYTES, is_real);
    amx_load(amx, X + odd, pass->x[g].codes, GROUP, is_real);
    amx_load(amx, CODES + odd, pass->groups[g].codes[0] + pass->v * AMX_ROW_BYTES, ROW_BYTES, is_real);
    amx_product_of_codes(amx, SUMS + odd, X + odd, CODES + odd, is_real);
}

INLINE void store_sums(Amx *amx, TileSums to, const int odd, const int is_real) {
    amx_store(amx, SUMS + odd, to, AMX_ROW_BYTES, is_real);
}

/* Scale a group's sums of `rows` rows and a vector of columns, and add them to the results. */
INLINE void add_sums(Floats out[AMX_ROWS], const TileSums sums, const TilePass *pass, int64_t g, const int rows,
                     const int with_minimum) {
    const TileRows *x = pass->x + g;
    const Scales scales = scales_of_unpacked(pass->groups + g, pass->v);
    const Floats middle = all_floats(MIDDLE);
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        Floats value = (load_floats(sums[i]) - middle) * scales.scale[0];
        if (with_minimum) value = value + all_floats(x->sum[i]) * scales.minimum[0];
        out[i] = out[i] + value * all_floats(x->scale[i]);
    }
}

INLINE TilePass pass_of(const TileWork *work, int64_t number) {
    return (TilePass){work->x + number / PANEL_VECTORS * work->x_step, work->groups, (int)(number % PANEL_VECTORS)};
}

/* Multiply at most 16 rows with a vector of columns of all groups. A group's products begin two groups ahead, and its
 * sums leave the tiles one group ahead: those of the next pass too, unless `next` is NULL. */
INLINE void multiply_pass(Amx *amx, TileSums sums[2], const TilePass *pass, const TilePass *next, int64_t count,
                          float *to, const int rows, const int with_minimum, const int is_real) {
    Floats out[AMX_ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) out[i] = load_floats(to + i * PANEL_COLUMNS);
#pragma GCC unroll 1
    for (int64_t first = 0; first < count; first += 2)
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            const int64_t g = first + odd;
            if (g == count) break;
            if (g + 2 < count)
                multiply_group_of(amx, pass, g + 2, odd, is_real);
            else if (next)
                multiply_group_of(amx, next, odd, odd, is_real);
            if (g + 1 < count || next) store_sums(amx, sums[!odd], !odd, is_real);
            add_sums(out, sums[odd], pass, g, rows, with_minimum);
        }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) store_floats(to + i * PANEL_COLUMNS, out[i]);
}

/* Multiply rows with some groups: block after block of 16. */
INLINE void multiply_slice(Amx *amx, const TileWork *work, int64_t num_rows, const int with_minimum,
                           const int is_real) {
    TileSums sums[2] __attribute__((aligned(64)));
    const int64_t count = work->count, num_passes = (num_rows + AMX_ROWS - 1) / AMX_ROWS * PANEL_VECTORS;
    TilePass pass = pass_of(work, 0), next;
    int has_begun = 0;
    for (int64_t number = 0; number < num_passes; number++, pass = next) {
        const int is_followed = number + 1 < num_passes && count % 2 == 0;
        float *out = work->out + number / PANEL_VECTORS * AMX_ROWS * PANEL_COLUMNS + pass.v * LANES;
        for (int64_t line = 0; number < PANEL_VECTORS && line < work->ahead_bytes; line += 64)
            __builtin_prefetch(work->ahead + number * work->ahead_bytes + line, 0, 2);
        if (!has_begun) {
            multiply_group_of(amx, &pass, 0, 0, is_real);
            if (count > 1) multiply_group_of(amx, &pass, 1, 1, is_real);
            store_sums(amx, sums[0], 0, is_real);
        }
        next = pass_of(work, number + 1);
        if (num_rows - number / PANEL_VECTORS * AMX_ROWS <= AMX_ROWS / 2)
            multiply_pass(amx, sums, &pass, is_followed ? &next : NULL, count, out, AMX_ROWS / 2, with_minimum, is_real);
        else
            multiply_pass(amx, sums, &pass, is_followed ? &next : NULL, count, out, AMX_ROWS, with_minimum, is_real);
        has_begun = is_followed;
    }
}

/* Configure the tiles. Rows past the last one are multiplied too; their sums are not used. */
static void shape(Amx *amx) {
    amx->shapes = (AmxShapes){.palette = 1};
    for (int i = 0; i < 2; i++) {
        amx_shape(amx, SUMS + i, AMX_ROWS, AMX_ROW_BYTES);
        amx_shape(amx, X + i, AMX_ROWS, GROUP);
        amx_shape(amx, CODES + i, GROUP / 4, AMX_ROW_BYTES);
    }
}

/* Unpack groups [first, last) of a panel and multiply the rows in the room with them. */
INLINE void multiply_groups_of(Amx *amx, const Int8Work *packed, int64_t num_rows, int64_t x_step, float *sums,
                               const int is_real) {
    const QuantizedLayout layout = layout_of(packed->type);
    _Alignas(64) Int8Group unpacked[AMX_GROUPS];
    TileWork work = {
        .groups = unpacked,
        .x = room + packed->first,
        .count = packed->last - packed->first,
        .x_step = x_step,
        .ahead = packed->panel + group_offset(layout, packed->last),
        .ahead_bytes = layout.group_bytes * AMX_GROUPS / PANEL_VECTORS,
        .out = sums,
    };
    int8_unpack(packed, unpacked);
    if (BLOCK_TYPES[packed->type].has_minimum)
        multiply_slice(amx, &work, num_rows, 1, is_real);
    else
        multiply_slice(amx, &work, num_rows, 0, is_real);
}

/* Multiply rows [row, row + num_rows), which are in the room, with a panel. */
INLINE void multiply_panel(Amx *amx, const Gemm *args, int64_t row, int64_t num_rows, int64_t panel, const int is_real) {
    const QuantizedPanel *entry = quantized_panel(args->weights, panel);
    const BlockType traits = BLOCK_TYPES[entry->type];
    const int64_t groups = args->depth / GROUP;
    _Alignas(64) float sums[MOST_ROWS * PANEL_COLUMNS];
    memset(sums, 0, (num_rows + AMX_ROWS - 1) / AMX_ROWS * AMX_ROWS * PANEL_COLUMNS * sizeof *sums);
    for (int64_t first = 0, last; first < groups; first = last) {
        last = first + AMX_GROUPS < groups ? first + AMX_GROUPS : groups;
        const Int8Work packed = {
            .panel = (const char *)args->weights + entry->offset,
            .type = entry->type,
            .first = first,
            .last = last,
            .raised_by = traits.has_minimum ? 0 : -(1 << traits.zero_bits),
        };
        multiply_groups_of(amx, &packed, num_rows, groups, sums, is_real);
    }
    gemm_store_panel(args, sums, row, (int)num_rows, panel);
}

INLINE void multiply(const Gemm *args, Int8Chunk *chunk, int64_t first, int64_t last, const int is_real) {
    Amx amx;
    const int64_t groups = args->depth / GROUP, fitting = MOST_AMX_GROUPS / groups * AMX_ROWS;
    const int64_t most = fitting < MOST_ROWS ? fitting : MOST_ROWS;
    shape(&amx);
    amx_begin(&amx, is_real);
    for (int64_t row = chunk->begin; row < chunk->end; row += most) {
        const int64_t num_rows = chunk->end - row < most ? chunk->end - row : most;
        const Int8Block *x = (const Int8Block *)args->quantized + row * args->quantized_stride;
        if (chunk->form != row - chunk->begin) store_rows(room, x, args->quantized_stride, num_rows, groups);
        chunk->form = (int)(row - chunk->begin);
        for (int64_t panel = first; panel < last; panel++) multiply_panel(&amx, args, row, num_rows, panel, is_real);
    }
    amx_end(is_real);
}

static __attribute__((noinline)) void multiply_codes_real(const Gemm *args, Int8Chunk *chunk, int64_t first,
                                                          int64_t last) {
    multiply(args, chunk, first, last, 1);
}

static __attribute__((noinline)) void multiply_codes_emulated(const Gemm *args, Int8Chunk *chunk, int64_t first,
                                                              int64_t last) {
    multiply(args, chunk, first, last, 0);
}

void int8_multiply_amx(const Gemm *args, Int8Chunk *chunk, int64_t first, int64_t last) {
    if (amx_is_real)
        multiply_codes_real(args, chunk, first, last);
    else
        multiply_codes_emulated(args, chunk, first, last);
}

#endif
