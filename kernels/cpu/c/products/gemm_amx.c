#include "products/gemm_amx.h"

#if defined(__AMX_BF16__)

#include "blocks/unpack_amx.h"
#include "products/gemm_slices.h"

/* Tiles: sums of two by two, then rows of x, then weights. */
enum { X = 4, WEIGHTS = 6 };

enum { TALL = 2 * AMX_ROWS };                     /* the most rows of a block */
enum { SLAB_BYTES = AMX_DEPTH / 2 * STEP_BYTES }; /* weights of AMX_DEPTH places of a panel: a slab */
enum { X_SLAB_BYTES = TALL * AMX_ROW_BYTES };     /* a block's rows of x in these places */
enum { RING_SLABS = 8, AHEAD = 2 };               /* AHEAD: slabs unpacked before the one multiplied */
enum { PREFETCH_BYTES = 2048 };

/* With more rows than a block has: the most slabs of a part of the depth; what the second level cache keeps of unpacked
 * weights and of x; the most panels whose sums are kept from part to part. The best of those tried on an Intel Xeon
 * (Emerald Rapids, 2 MiB of second level cache) with depths from 576 to 9,728 and 64 to 512 rows. */
enum { PART_SLABS = 32, ROOM_BYTES = 160 << 10, X_BYTES = 1 << 20, PART_PANELS = 32 };

/* Panels that a thread takes at a time, since each time it copies x: SLABS_TOGETHER slabs of a row, then of the next. With
 * at most FEW_SLABS and fewer than MANY_PANELS it does not: the first level cache keeps a block's rows where they are. */
enum { PIECE_PANELS = 32, FEW_SLABS = 20, MANY_PANELS = 24, SLABS_TOGETHER = 4 };

/* Whole weights are multiplied where they are packed. With at least this many rows, and FEW_SLABS, they are copied as two tiles
 * a slab, as all others are unpacked. */
enum { LEAST_ROWS_OF_TILES = 256 };

typedef float Sums[TALL * PANEL_COLUMNS];

enum { MOST_BLOCKS = X_BYTES / X_SLAB_BYTES / PART_SLABS + 1 }; /* blocks of rows whose sums are kept */

/* Unpacked weights, copied rows of x, and the sums of the parts before. A thread's room is allocated with all else that
 * the library keeps for it. */
static _Thread_local char room[ROOM_BYTES] __attribute__((aligned(64)));
static _Thread_local char room_of_x[X_BYTES] __attribute__((aligned(64)));
static _Thread_local Sums kept_sums[MOST_BLOCKS][PART_PANELS] __attribute__((aligned(64)));

/* Sums that are stored row by row while the next panel is multiplied. */
typedef struct {
    float *sums;
    int64_t row, panel;
    int rows, stored;
} Pending;

/* Lines that are prefetched to the second level cache, `each` at a slab. */
typedef struct {
    const char *next, *end;
    int64_t each;
} Ahead;

/* Some rows and what is multiplied with them. */
typedef struct {
    const Gemm *args;
    int64_t row;
    int rows;
    const char *x;   /* the first row */
    int64_t x_bytes; /* from row to row */
    int64_t x_step;  /* from slab to slab */
    int is_copied;   /* whether rows of x have been copied: the slabs are tiles, one after the other */
    const char *tail; /* else [TALL, AMX_ROW_BYTES]: places of x after the last whole slab, then zeros */
    int64_t begin, end; /* the slabs */
    int64_t first;      /* the group's first panel */
    int keeps;          /* whether all slabs of the group are kept for the next blocks */
    Sums *kept;         /* of the block and the group's first panel, if the depth has several parts; or NULL */
    Sums *sums;         /* of the panel that is multiplied, and of the one before */
    char *room;            /* of this thread: its address takes a call */
    UnpackGroup unpack;    /* of the panel that is multiplied; or NULL */
    const char *quantized; /* that panel, and its type */
    int32_t type;
    int is_left;           /* whether it is the left side: its columns are rows of tiles */
    Pending pending;
    int rounds_only; /* whether the sums of whole panels are rounded and stored, and nothing else */
    Ahead ahead;
} RowBlock;

static int64_t num_slabs(const Gemm *args) { return (args->depth + AMX_DEPTH - 1) / AMX_DEPTH; }

INLINE const char *packed_place(const Gemm *args, int64_t panel, int64_t slab) {
    return (const char *)args->weights + panel * packed_bytes(PANEL_COLUMNS, args->depth, BFLOAT16) + slab * SLAB_BYTES;
}

/* Write a slab as two tiles; zeros past the depth. */
static void unpack_slab(const Gemm *args, int64_t panel, int64_t slab, char *out) {
    const int64_t begin = slab * AMX_DEPTH, end = begin + AMX_DEPTH < args->depth ? begin + AMX_DEPTH : args->depth;
    char places[SLAB_BYTES] __attribute__((aligned(64)));
    if (args->packing == WHOLE_WEIGHTS && end - begin == AMX_DEPTH) {
        part_columns(packed_place(args, panel, slab), out);
        return;
    }
    if (end - begin < AMX_DEPTH) memset(places, 0, SLAB_BYTES);
    gemm_unpack(args, panel, begin, end, places);
    part_columns(places, out);
}

/* Return the number of the first slabs that are multiplied where they are packed. */
INLINE int64_t num_in_place(const RowBlock *rows) {
    return rows->args->packing == WHOLE_WEIGHTS && !rows->keeps ? rows->args->depth / AMX_DEPTH : 0;
}

/* Return where a slab is, once unpacked. */
INLINE char *place_of(const RowBlock *rows, int64_t panel, int64_t slab) {
    const int64_t kept = (panel - rows->first) * (rows->end - rows->begin) + slab - rows->begin;
    return rows->room + (rows->keeps ? kept : slab % RING_SLABS) * SLAB_BYTES;
}

/* Unpack a slab, if there is one of this number. */
INLINE void prepare(const RowBlock *rows, int64_t panel, int64_t slab, int64_t in_place) {
    if (slab >= rows->end || slab < in_place) return;
    if (rows->unpack)
        rows->unpack(rows->quantized, rows->type, slab, place_of(rows, panel, slab));
    else
        unpack_slab(rows->args, panel, slab, place_of(rows, panel, slab));
}

INLINE const char *weights_of(const RowBlock *rows, int64_t panel, int64_t slab, int64_t in_place) {
    if (slab >= in_place) return place_of(rows, panel, slab);
    const char *weights = packed_place(rows->args, panel, slab);
    for (int line = 0; line < SLAB_BYTES; line += 64) __builtin_prefetch(weights + PREFETCH_BYTES + line);
    return weights;
}

/* Find out how a panel's slabs are unpacked. */
INLINE void choose_unpacker(RowBlock *rows, int64_t panel, const int is_real) {
    rows->unpack = NULL, rows->is_left = 0;
    if (!is_real || rows->args->packing != QUANTIZED_WEIGHTS) return;
    const QuantizedPanel *entry = quantized_panel(rows->args->weights, panel);
    if (rows->rows == 1) rows->unpack = column_unpacker_of(entry->type);
    rows->is_left = rows->unpack != NULL;
    if (!rows->unpack) rows->unpack = unpacker_of(entry->type);
    rows->quantized = (const char *)rows->args->weights + entry->offset, rows->type = entry->type;
}

/* Whether y consists of the sums, rounded to bfloat16 by an instruction: AMX's sums are no denormal numbers, the only ones
 * that it rounds in another way than store_bfloat16(). */
static int rounds_only(const Gemm *args, const int is_real) {
    if (!is_real || !__builtin_cpu_supports("avx512bf16")) return 0;
    return args->y_dtype == BFLOAT16 && !args->lora && !args->bias && !args->gate && !args->activation;
}

/* Write a row of y from [row, column] on. */
INLINE void round_row(const Gemm *args, const float *sums, int64_t row, int64_t column) {
    Floats first = load_floats(sums), pairs;
    __asm__("vcvtne2ps2bf16 %2, %1, %0" : "=v"(pairs) : "v"(load_floats(sums + LANES)), "v"(first));
    store_floats((float *)((uint16_t *)args->y + row * args->y_stride + column), pairs);
}

/* Store up to `most` rows of the panel before. */
INLINE void store_pending(RowBlock *rows, int most) {
    Pending *pending = &rows->pending;
    const int left = pending->rows - pending->stored, count = left < most ? left : most;
    if (count <= 0) return;
    const int64_t row = pending->row + pending->stored, column = pending->panel * PANEL_COLUMNS;
    float *sums = pending->sums + pending->stored * PANEL_COLUMNS;
    if (rows->rounds_only && column + PANEL_COLUMNS <= rows->args->num_columns)
        for (int i = 0; i < count; i++) round_row(rows->args, sums + i * PANEL_COLUMNS, row + i, column);
    else
        gemm_store_panel(rows->args, sums, row, count, pending->panel);
    pending->stored += count;
}

INLINE void prefetch_ahead(Ahead *ahead) {
    for (int64_t i = 0; i < ahead->each && ahead->next < ahead->end; i++, ahead->next += 64)
        __builtin_prefetch(ahead->next, 0, 2);
}

/* Where a slab's weights for the second half of the columns are, from those for the first half on, and from row to row. */
typedef struct {
    int64_t others, row_bytes;
} SlabLayout;

static const SlabLayout TWO_TILES = {SLAB_BYTES / 2, AMX_ROW_BYTES}, IN_PLACE = {AMX_ROW_BYTES, STEP_BYTES};

/* Multiply a slab of x with one of weights. is_tall: there are more than AMX_ROWS rows. */
INLINE void multiply_slab(Amx *amx, const char *x, int64_t x_bytes, const char *weights, const SlabLayout layout,
                          const int is_tall, const int is_real) {
    amx_load(amx, X, x, x_bytes, is_real);
    amx_load_past(amx, WEIGHTS, weights, layout.row_bytes, is_real);
    amx_product(amx, 0, X, WEIGHTS, is_real);
    if (is_tall) {
        amx_load(amx, X + 1, x + AMX_ROWS * x_bytes, x_bytes, is_real);
        amx_product(amx, 2, X + 1, WEIGHTS, is_real);
    }
    amx_load_past(amx, WEIGHTS + 1, weights + layout.others, layout.row_bytes, is_real);
    amx_product(amx, 1, X, WEIGHTS + 1, is_real);
    if (is_tall) amx_product(amx, 3, X + 1, WEIGHTS + 1, is_real);
}

INLINE void begin_sums(Amx *amx, const float *from, const int is_tall, const int is_real) {
    const int64_t stride = PANEL_COLUMNS * sizeof(float);
    if (!from) {
        amx_zero(amx, 0, is_real), amx_zero(amx, 1, is_real);
        if (is_tall) amx_zero(amx, 2, is_real), amx_zero(amx, 3, is_real);
        return;
    }
    const float *lower = from + AMX_ROWS * PANEL_COLUMNS;
    amx_load(amx, 0, from, stride, is_real), amx_load(amx, 1, from + AMX_ROWS, stride, is_real);
    if (is_tall) amx_load(amx, 2, lower, stride, is_real), amx_load(amx, 3, lower + AMX_ROWS, stride, is_real);
}

INLINE void store_sums(Amx *amx, float *to, const int is_tall, const int is_real) {
    const int64_t stride = PANEL_COLUMNS * sizeof(float);
    float *lower = to + AMX_ROWS * PANEL_COLUMNS;
    amx_store(amx, 0, to, stride, is_real), amx_store(amx, 1, to + AMX_ROWS, stride, is_real);
    if (is_tall) amx_store(amx, 2, lower, stride, is_real), amx_store(amx, 3, lower + AMX_ROWS, stride, is_real);
}

/* Multiply a panel that is the left side with a single row. */
INLINE void multiply_left(Amx *amx, RowBlock *rows, int64_t panel, const int is_real) {
    amx_zero(amx, 2, is_real), amx_zero(amx, 3, is_real);
    for (int64_t slab = rows->begin; slab < rows->begin + AHEAD; slab++) prepare(rows, panel, slab, 0);
    for (int64_t slab = rows->begin; slab < rows->end; slab++) {
        prepare(rows, panel, slab + AHEAD, 0);
        const char *weights = place_of(rows, panel, slab);
        amx_load(amx, X + 1, rows->x + slab * rows->x_step, 4, is_real);
        amx_load(amx, WEIGHTS, weights, AMX_ROW_BYTES, is_real);
        amx_product(amx, 2, WEIGHTS, X + 1, is_real);
        amx_load(amx, WEIGHTS + 1, weights + SLAB_BYTES / 2, AMX_ROW_BYTES, is_real);
        amx_product(amx, 3, WEIGHTS + 1, X + 1, is_real);
        store_pending(rows, 1);
    }
    float *sums = rows->sums[rows->pending.sums == rows->sums[0]];
    amx_store(amx, 2, sums, 4, is_real), amx_store(amx, 3, sums + AMX_ROWS, 4, is_real);
    rows->pending = (Pending){sums, rows->row, panel, 1, 0};
}

/* Multiply the rows with a panel. is_ready: all of its weights are unpacked. */
INLINE void multiply_panel(Amx *amx, RowBlock *rows, int64_t panel, const int is_tall, const int is_ready,
                           const int is_real) {
    const int64_t count = rows->end - rows->begin, whole = rows->args->depth / AMX_DEPTH;
    const int each = (int)((rows->pending.rows + count - 1) / count);
    const int64_t in_place = num_in_place(rows);
    const SlabLayout layout = in_place ? IN_PLACE : TWO_TILES;
    const char *ready = in_place ? packed_place(rows->args, panel, rows->begin) : place_of(rows, panel, rows->begin);
    Sums *kept = rows->kept ? rows->kept + (panel - rows->first) : NULL;
    if (!is_ready) choose_unpacker(rows, panel, is_real);
    if (!is_ready && !is_tall && rows->is_left) {
        multiply_left(amx, rows, panel, is_real);
        return;
    }
    begin_sums(amx, kept && rows->begin ? *kept : NULL, is_tall, is_real);
    for (int64_t slab = rows->begin; !is_ready && slab < rows->begin + AHEAD; slab++) prepare(rows, panel, slab, in_place);
    for (int64_t slab = rows->begin; slab < rows->end; slab++) {
        if (!is_ready) prepare(rows, panel, slab + AHEAD, in_place);
        const char *weights = is_ready ? ready + (slab - rows->begin) * SLAB_BYTES : weights_of(rows, panel, slab, in_place);
        if (rows->is_copied || slab < whole) {
            const char *x = rows->x + slab * rows->x_step;
            multiply_slab(amx, x, rows->x_bytes, weights, layout, is_tall, is_real);
        } else {
            multiply_slab(amx, rows->tail, AMX_ROW_BYTES, weights, TWO_TILES, is_tall, is_real);
        }
        if (is_ready) prefetch_ahead(&rows->ahead);
        store_pending(rows, each);
    }
    store_pending(rows, TALL);
    if (kept && rows->end < num_slabs(rows->args)) {
        store_sums(amx, *kept, is_tall, is_real);
        return;
    }
    float *sums = rows->sums[rows->pending.sums == rows->sums[0]];
    store_sums(amx, sums, is_tall, is_real);
    rows->pending = (Pending){sums, rows->row, panel, rows->rows, 0};
}

/* Configure the tiles for `rows` rows. Missing rows are neither read nor written. */
static void shape(Amx *amx, int rows) {
    amx->shapes = (AmxShapes){.palette = 1};
    const int upper = rows < AMX_ROWS ? rows : AMX_ROWS;
    for (int tile = 0; tile < X; tile++) amx_shape(amx, tile, tile < 2 ? upper : rows - upper, AMX_ROW_BYTES);
    amx_shape(amx, X, upper, AMX_ROW_BYTES), amx_shape(amx, X + 1, rows - upper, AMX_ROW_BYTES);
    if (rows == 1) /* the right side too, multiply_left(): a pair a row, and a sum a row */
        amx_shape(amx, 2, AMX_ROWS, 4), amx_shape(amx, 3, AMX_ROWS, 4), amx_shape(amx, X + 1, AMX_ROWS, 4);
    amx_shape(amx, WEIGHTS, AMX_ROWS, AMX_ROW_BYTES), amx_shape(amx, WEIGHTS + 1, AMX_ROWS, AMX_ROW_BYTES);
}

/* Take rows [row, row + count), where they are. */
INLINE void take_rows(Amx *amx, RowBlock *rows, int64_t row, int count, const int is_real) {
    const Gemm *args = rows->args;
    if (count != rows->rows) {
        shape(amx, count);
        amx_begin(amx, is_real);
    }
    rows->row = row, rows->rows = count, rows->is_copied = 0;
    rows->x_bytes = args->x_stride * 2, rows->x_step = AMX_ROW_BYTES;
    rows->x = (const char *)args->x + row * rows->x_bytes;
}

/* Copy the places of the rows of x after the last whole slab; the rest of `tail` is zero already. */
static void copy_tail(const RowBlock *rows, char *tail) {
    const int64_t begin = rows->args->depth / AMX_DEPTH * AMX_DEPTH;
    if (begin == rows->args->depth) return;
    for (int i = 0; i < rows->rows; i++)
        memcpy(tail + i * AMX_ROW_BYTES, rows->x + i * rows->x_bytes + begin * 2, (rows->args->depth - begin) * 2);
}

/* Multiply the rows with panels [first, last). */
INLINE void multiply_panels(Amx *amx, RowBlock *rows, int64_t first, int64_t last, const int is_ready, const int is_real) {
    for (int64_t panel = first; panel < last; panel++)
        if (rows->rows > AMX_ROWS)
            multiply_panel(amx, rows, panel, 1, is_ready, is_real);
        else
            multiply_panel(amx, rows, panel, 0, is_ready, is_real);
}

/* Multiply the rows of one block. */
INLINE void multiply_block(const Gemm *args, int64_t begin, int64_t end, int64_t first, int64_t last, const int is_real) {
    Amx amx;
    Sums sums[2] __attribute__((aligned(64)));
    char tail[X_SLAB_BYTES] __attribute__((aligned(64))) = {0};
    RowBlock rows = {.args = args, .tail = tail, .end = num_slabs(args), .sums = sums, .room = room};
    rows.rounds_only = rounds_only(args, is_real);
    take_rows(&amx, &rows, begin, (int)(end - begin), is_real);
    copy_tail(&rows, tail);
    multiply_panels(&amx, &rows, first, last, 0, is_real);
    store_pending(&rows, TALL);
    amx_end(is_real);
}

/* A part of a product of many rows. */
typedef struct {
    int64_t begin, end;     /* rows */
    int64_t first, last;    /* panels */
    int64_t slab, end_slab; /* places along the depth */
} Part;

/* Copy `count` places of rows [begin, end) of x, from a slab on: each slab's rows one after the other. */
INLINE void copy_slabs(const Gemm *args, int64_t begin, int64_t end, int64_t slab, int64_t count, char *to) {
    const int64_t stride = args->x_stride * 2;
    const char *from = (const char *)args->x + begin * stride + slab * AMX_ROW_BYTES;
    for (int64_t row = begin; row < end; row++, from += stride, to += AMX_ROW_BYTES)
        for (int64_t i = 0; i < count; i += AMX_DEPTH) memcpy(to + i / AMX_DEPTH * X_SLAB_BYTES, from + i * 2, AMX_ROW_BYTES);
}

/* Copy the places of rows [begin, end) after the last whole slab, and zeros after them. */
static void copy_last_slab(const Gemm *args, int64_t begin, int64_t end, char *to) {
    const int64_t slab = args->depth / AMX_DEPTH, stride = args->x_stride * 2;
    const char *from = (const char *)args->x + begin * stride + slab * AMX_ROW_BYTES;
    memset(to, 0, X_SLAB_BYTES);
    for (int64_t row = begin; row < end; row++, from += stride, to += AMX_ROW_BYTES)
        memcpy(to, from, (args->depth - slab * AMX_DEPTH) * 2);
}

/* Copy the rows of x of a part, block by block. */
static void copy_rows(const Gemm *args, const Part *part) {
    const int64_t whole = args->depth / AMX_DEPTH, last = part->end_slab < whole ? part->end_slab : whole;
    char *to = room_of_x;
    for (int64_t row = part->begin; row < part->end; row += TALL) {
        const int64_t end = part->end - row < TALL ? part->end : row + TALL;
        int64_t slab = part->slab;
        for (; slab + SLABS_TOGETHER <= last; slab += SLABS_TOGETHER, to += SLABS_TOGETHER * X_SLAB_BYTES)
            copy_slabs(args, row, end, slab, SLABS_TOGETHER * AMX_DEPTH, to);
        for (; slab < last; slab++, to += X_SLAB_BYTES) copy_slabs(args, row, end, slab, AMX_DEPTH, to);
        if (last == part->end_slab) continue;
        copy_last_slab(args, row, end, to);
        to += X_SLAB_BYTES;
    }
}

/* Prefetch the share of block number `block` of a panel's part. */
static Ahead ahead_of(const Gemm *args, const Part *part, int64_t panel, int64_t block, int64_t num_blocks) {
    const int64_t begin = part->slab * AMX_DEPTH, end = part->end_slab * AMX_DEPTH, slabs = part->end_slab - part->slab;
    const Packed packed = gemm_packed(args, panel, begin, end < args->depth ? end : args->depth);
    const int64_t lines = packed.bytes / 64, from = lines * (block - 1) / (num_blocks - 1) * 64;
    const int64_t to = lines * block / (num_blocks - 1) * 64;
    return (Ahead){packed.begin + from, packed.begin + to, ((to - from) / 64 + slabs - 1) / slabs};
}

/* Multiply the rows of a part with a group of panels. */
INLINE void multiply_group(Amx *amx, RowBlock *rows, const Part *part, int64_t after, int64_t ahead, char *tail,
                           const int is_copied, const int is_real) {
    const Gemm *args = rows->args;
    const int64_t slabs = rows->end - rows->begin, num_blocks = (part->end - part->begin + TALL - 1) / TALL;
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t row = part->begin + block * TALL;
        take_rows(amx, rows, row, part->end - row < TALL ? (int)(part->end - row) : TALL, is_real);
        if (is_copied) {
            rows->is_copied = 1, rows->x_bytes = AMX_ROW_BYTES, rows->x_step = X_SLAB_BYTES;
            rows->x = room_of_x + (block * slabs - rows->begin) * X_SLAB_BYTES;
        } else {
            copy_tail(rows, tail);
        }
        rows->kept = slabs < num_slabs(args) ? kept_sums[block] + (rows->first - part->first) : NULL;
        if (block == 0) {
            multiply_panels(amx, rows, rows->first, after, 0, is_real);
            continue;
        }
        for (int64_t panel = rows->first; panel < after; panel++) {
            rows->ahead = (Ahead){0};
            if (num_blocks > 2 && panel + ahead < part->last) rows->ahead = ahead_of(args, part, panel + ahead, block, num_blocks);
            multiply_panels(amx, rows, panel, panel + 1, 1, is_real);
        }
    }
}

/* Return how many panels are unpacked to the room: at least one, whose part has PART_SLABS at most. */
static int64_t group_of(int64_t slabs) {
    const int64_t panels = ROOM_BYTES / (slabs * SLAB_BYTES);
    return panels > 1 ? panels : 1;
}

static int64_t num_parts(const Gemm *args) { return (num_slabs(args) + PART_SLABS - 1) / PART_SLABS; }

/* Multiply the rows of more than one block. */
INLINE void multiply_blocks(const Gemm *args, Part *part, const int is_real) {
    Amx amx;
    Sums sums[2] __attribute__((aligned(64)));
    char tail[X_SLAB_BYTES] __attribute__((aligned(64))) = {0};
    const int64_t slabs = num_slabs(args), parts = num_parts(args), group = group_of((slabs + parts - 1) / parts);
    const int64_t num_rows = part->end - part->begin;
    const int is_copied = (slabs > FEW_SLABS || part->last - part->first >= MANY_PANELS) && num_rows > 3 * TALL;
    RowBlock rows = {.args = args, .tail = tail, .sums = sums, .room = room};
    rows.rounds_only = rounds_only(args, is_real);
    rows.keeps = args->packing != WHOLE_WEIGHTS || args->depth % AMX_DEPTH ||
                 (num_rows >= LEAST_ROWS_OF_TILES && slabs <= FEW_SLABS);
    for (int64_t i = 0; i < parts; i++) {
        rows.begin = part->slab = slabs * i / parts, rows.end = part->end_slab = slabs * (i + 1) / parts;
        if (is_copied) copy_rows(args, part);
        for (rows.first = part->first; rows.first < part->last; rows.first += group) {
            const int64_t after = part->last - rows.first < group ? part->last : rows.first + group;
            multiply_group(&amx, &rows, part, after, group, tail, is_copied, is_real);
        }
    }
    store_pending(&rows, TALL);
    amx_end(is_real);
}

/* Multiply in parts of rows, panels and depth that the caches keep. */
INLINE void multiply(const Gemm *args, int64_t begin, int64_t end, int64_t first, int64_t last, const int is_real) {
    if (end - begin <= TALL) {
        if (begin < end) multiply_block(args, begin, end, first, last, is_real);
        return;
    }
    const int64_t parts = num_parts(args), slabs = (num_slabs(args) + parts - 1) / parts;
    const int64_t fitting = X_BYTES / (slabs * X_SLAB_BYTES), most = parts > 1 && fitting > MOST_BLOCKS ? MOST_BLOCKS : fitting;
    const int64_t blocks = (end - begin + TALL - 1) / TALL, chunks = (blocks + most - 1) / most;
    const int64_t panels = parts > 1 ? PART_PANELS : last - first;
    for (int64_t i = 0; i < chunks; i++)
        for (int64_t panel = first; panel < last; panel += panels) {
            Part part = {.begin = begin + blocks * i / chunks * TALL, .end = begin + blocks * (i + 1) / chunks * TALL};
            if (part.end > end) part.end = end;
            part.first = panel, part.last = last - panel < panels ? last : panel + panels;
            multiply_blocks(args, &part, is_real);
        }
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
    return args->num_rows > TALL && least < PIECE_PANELS ? PIECE_PANELS : least;
}

#endif
