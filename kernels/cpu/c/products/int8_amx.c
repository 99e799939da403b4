#include "products/int8_amx.h"

#if defined(__AMX_INT8__)

#include "products/int8_block.h"

/* Tiles: sums, rows of x and codes; the first two again for the last rows, which may be fewer. Whole ones are even. */
enum { SUMS = 0, X = 2, CODES = 4 };

enum { STEPS = GROUP / 4, HALF = GROUP / 2 };

/* Codes that have been multiplied at once: all of a group, or one half of it. */
typedef struct {
    const Int8Work *work;
    const Int8Group *group;
    int64_t block;
    int type, half;
} Part;

INLINE int num_halves(int type) { return has_halves(type) ? 2 : 1; }

/* Configure the tiles for `rows` rows. */
static void shape(Amx *amx, int rows, int type) {
    const int rest = rows % AMX_ROWS, bytes = GROUP / num_halves(type);
    amx->shapes = (AmxShapes){.palette = 1};
    amx_shape(amx, SUMS, AMX_ROWS, AMX_ROW_BYTES), amx_shape(amx, SUMS + 1, rest, AMX_ROW_BYTES);
    amx_shape(amx, X, AMX_ROWS, bytes), amx_shape(amx, X + 1, rest, bytes);
    amx_shape(amx, CODES, bytes / 4, AMX_ROW_BYTES);
}

/* Scale the sums of a part, of some rows and a vector of columns, and add them to the values before. */
INLINE void add_values(Floats *values, const int32_t sums[][AMX_ROWS], const Part *part, int row, int rows, int v) {
    const Int8Work *work = part->work;
    const Int8Block *x = work->x + row * work->x_stride + part->block;
    const Floats scale = load_floats(part->group->scale[part->half] + v * LANES);
    for (int i = 0; i < rows; i++, x += work->x_stride) {
        Signed sum = (Signed)load_words(sums[i]);
        if (!has_minimum(part->type)) sum += zeros_of_x(x, part->half, part->type) >> (7 - work->zero_bits);
        const Floats value = __builtin_convertvector(sum, Floats) * scale;
        values[i] = part->half ? values[i] + value : value;
    }
}

/* Add a group's values to the rows' results. */
INLINE void add_group(const Floats *values, const Part *part, int row, int rows, int v) {
    const Int8Work *work = part->work;
    const Int8Block *x = work->x + row * work->x_stride + part->block;
    const Floats minimum[2] = {load_floats(part->group->minimum[0] + v * LANES),
                               load_floats(part->group->minimum[1] + v * LANES)};
    float *out = work->out + row * PANEL_COLUMNS + v * LANES;
    for (int i = 0; i < rows; i++, x += work->x_stride, out += PANEL_COLUMNS) {
        const Floats value = with_minima(values[i], x, minimum, part->type);
        store_floats(out, load_floats(out) + value * all_floats(x->scale));
    }
}

/* Multiply some rows with a vector of columns of a group. is_rest: they are those after the last whole tile. */
INLINE void multiply_tile(Amx *amx, Part *part, int row, int rows, int v, const int is_rest, const int is_real) {
    const Int8Work *work = part->work;
    const int64_t stride = work->x_stride * (int64_t)sizeof(Int8Block);
    int32_t sums[AMX_ROWS][AMX_ROWS] __attribute__((aligned(64)));
    Floats values[AMX_ROWS];
    for (part->half = 0; part->half < num_halves(part->type); part->half++) {
        const int8_t *x = work->x[row * work->x_stride + part->block].codes + part->half * HALF;
        const uint8_t *codes = part->group->codes[part->half * STEPS / 2] + v * AMX_ROW_BYTES;
        amx_zero(amx, SUMS + is_rest, is_real);
        amx_load(amx, X + is_rest, x, stride, is_real);
        amx_load(amx, CODES, codes, PANEL_COLUMNS * 4, is_real);
        amx_product_of_codes(amx, SUMS + is_rest, X + is_rest, CODES, is_real);
        amx_store(amx, SUMS + is_rest, sums, AMX_ROW_BYTES, is_real);
        add_values(values, sums, part, row, rows, v);
    }
    add_group(values, part, row, rows, v);
}

INLINE void multiply(const Int8Work *work, int rows, int type, const int is_real) {
    Amx amx;
    const int whole = rows / AMX_ROWS * AMX_ROWS;
    shape(&amx, rows, type);
    amx_begin(&amx, is_real);
    for (int64_t g = work->first; g < work->last; g++)
        for (int v = 0; v < PANEL_COLUMNS / LANES; v++) {
            Part part = {work, (const Int8Group *)work->panel + (g - work->first), g - work->first, type, 0};
            for (int row = 0; row < whole; row += AMX_ROWS) multiply_tile(&amx, &part, row, AMX_ROWS, v, 0, is_real);
            if (whole < rows) multiply_tile(&amx, &part, whole, rows - whole, v, 1, is_real);
        }
    amx_end(is_real);
}

static __attribute__((noinline)) void multiply_codes_real(const Int8Work *work, int rows, int type) {
    multiply(work, rows, type, 1);
}

static __attribute__((noinline)) void multiply_codes_emulated(const Int8Work *work, int rows, int type) {
    multiply(work, rows, type, 0);
}

void int8_multiply_amx(const Int8Work *work, int rows, int type) {
    if (amx_is_real)
        multiply_codes_real(work, rows, type);
    else
        multiply_codes_emulated(work, rows, type);
}

#endif
