#include "products/quantized.h"

#include "blocks/block_readers.h"
#include "threads/pool.h"

/* The blocks of one column of a panel. */
typedef struct {
    const uint8_t *blocks;
    int32_t type; /* of block_types.h; or PLAIN_PART + element type */
} Column;

static int64_t num_panels(const Quantize *args) { return (args->num_columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS; }

/* Return the blocks of a panel's column. A missing column gets the first column's; its sums are not used. */
static Column column_of(const Quantize *args, int64_t panel, int64_t column) {
    const int64_t parts = args->is_gated ? 2 : 1;
    const int64_t in_panel = PANEL_COLUMNS / parts, in_source = args->num_columns / parts;
    int64_t index = panel * in_panel + column % in_panel;
    if (index >= in_source) index = panel * in_panel, column = 0;
    int64_t row = column / in_panel * in_source + index;
    const QuantizedPart *part = args->parts;
    while (row >= part->num_rows) row -= part++->num_rows;
    return (Column){(const uint8_t *)part->rows + row * part->row_bytes, part->type};
}

/* Find the panel's columns. Return the type that the panel gets. */
static int32_t columns_of(const Quantize *args, int64_t panel, Column columns[PANEL_COLUMNS]) {
    for (int64_t i = 0; i < PANEL_COLUMNS; i++) columns[i] = column_of(args, panel, i);
    int32_t type = panel_type_of(columns[0].type);
    for (int64_t i = 1; i < PANEL_COLUMNS; i++)
        if (panel_type_of(columns[i].type) != type) type = WHOLE_PANEL;
    return type >= PLAIN_PART || args->must_be_whole[panel] ? WHOLE_PANEL : type;
}

/* Read `count` weights of a column from place k on as float32; both are multiples of the column's blocks. */
static void read_column(Column column, int64_t k, int64_t count, float *out) {
    if (column.type < PLAIN_PART) {
        const int weights = block_weights(column.type);
        read_blocks(column.blocks + k / weights * block_bytes(column.type), column.type, count / weights, out);
        return;
    }
    const int dtype = column.type - PLAIN_PART;
    const uint8_t *from = column.blocks + k * element_bytes(dtype);
    for (int64_t i = 0; i < count; i++) {
        uint16_t bits;
        memcpy(&bits, from + i * 2, sizeof bits);
        if (dtype == FLOAT32)
            memcpy(out + i, from + i * 4, sizeof *out);
        else
            out[i] = dtype == BFLOAT16 ? float_of_bfloat16(bits) : float_of_float16(bits);
    }
}

/* Write the factors of a column's block to a head. */
INLINE void write_head(const StoredScales *scales, QuantizedLayout layout, const int32_t type, int column, char *head) {
    if (BLOCK_TYPES[type].scales == WIDE || BLOCK_TYPES[type].scales == DIVIDED) {
        memcpy(head + column * 4, &scales->wide, sizeof scales->wide);
        return;
    }
    if (layout.head_bytes) memcpy(head + column * 2, &scales->factor, 2);
    if (layout.head_bytes > 2 * PANEL_COLUMNS) memcpy(head + (PANEL_COLUMNS + column) * 2, &scales->factor_of_minima, 2);
}

/* Write a column's scales to group `g` of a block. */
INLINE void write_scales(const StoredScales *scales, const int32_t type, int g, int column, char *group) {
    const BlockType traits = BLOCK_TYPES[type];
    switch (traits.scales) {
    case FACTORS:
    case WIDE: return;
    case FLOATS:
        memcpy(group + column * 2, &scales->factor, 2);
        if (traits.has_minimum) memcpy(group + (PANEL_COLUMNS + column) * 2, &scales->factor_of_minima, 2);
        return;
    case UNSIGNED:
        group[column] = (char)scales->scales[g];
        group[PANEL_COLUMNS + column] = (char)scales->minima[g];
        return;
    case EXPONENTS: group[column] = (char)(scales->scales[0] ? scales->scales[0] - 1 : 0); return;
    default:
        for (int i = 0; i <= traits.has_halves; i++)
            group[i * PANEL_COLUMNS + column] = (char)scales->scales[g * (1 + traits.has_halves) + i];
    }
}

/* Return the bytes at even places. */
INLINE uint32_t even_bytes(uint64_t bytes) {
    bytes &= 0x00ff00ff00ff00ff;
    bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffff;
    return (uint32_t)(bytes | bytes >> 16);
}

/* Return the bits of two steps' codes, eight neighbours, from bit `from` on, as a plane of `bits` bits has them. */
INLINE uint32_t plane_of(uint64_t eight, int from, int bits, int step) {
    const uint64_t mask = ((1u << bits) - 1) * 0x0101010101010101, some = eight >> from & mask;
    return even_bytes(some | some >> (8 - bits)) << (step * bits); /* those at odd places go above those at even ones */
}

/* Write the column's codes of a group. Of each eight neighbours those at even places are one step, those at odd places
 * the next. */
INLINE void write_codes(const uint8_t codes[GROUP], const int32_t type, int column, char *rows) {
    const int planes = BLOCK_TYPES[type].planes, above = planes & FOURS ? 4 : 0;
    uint32_t *words = (uint32_t *)rows + column, twos[2] = {0, 0}, ones = 0;
#pragma GCC unroll 4
    for (int r = 0; r < GROUP / 8; r++) {
        uint64_t eight;
        memcpy(&eight, codes + r * 8, sizeof eight);
        if (planes == BYTES) {
            words[2 * r * PANEL_COLUMNS] = even_bytes(eight);
            words[(2 * r + 1) * PANEL_COLUMNS] = even_bytes(eight >> 8);
            continue;
        }
        if (planes & FOURS) words[r * PANEL_COLUMNS] = plane_of(eight, 0, 4, 0);
        if (planes & TWOS) twos[r / 2] |= plane_of(eight, above, 2, 2 * r % 4);
        if (planes & ONES) ones |= plane_of(eight, above + (planes & TWOS ? 2 : 0), 1, 2 * r);
    }
    for (int row = 0; row < 2 && planes & TWOS; row++)
        words[(first_row_of(planes, TWOS) + row) * PANEL_COLUMNS] = twos[row];
    if (planes & ONES) words[first_row_of(planes, ONES) * PANEL_COLUMNS] = ones;
}

/* Write a block of a column, of type `own`, to groups that share a head: `to` is the head's place. */
INLINE void write_block(const uint8_t *block, const int32_t own, int column, char *to) {
    const int32_t type = panel_type_of(own);
    const QuantizedLayout layout = layout_of(type);
    StoredScales scales = {0};
    uint8_t codes[LARGE];
    read_codes(block, own, codes);
    read_scales(block, own, &scales);
    write_head(&scales, layout, type, column, to);
    for (int g = 0; g < layout.groups; g++) {
        char *group = to + group_offset(layout, g);
        write_scales(&scales, type, g, column, group);
        write_codes(codes + g * GROUP, type, column, group + layout.scale_bytes);
    }
}

#define WRITE_BLOCK(name, type, unused) \
    case type: write_block(block, type, column, to); break;

/* Write the groups from place k on that share a head. Packing is half of a model's start, so most types have code of their
 * own. */
static void write_groups(const Column columns[PANEL_COLUMNS], int64_t k, char *to) {
    for (int column = 0; column < PANEL_COLUMNS; column++) {
        const int32_t own = columns[column].type;
        const int64_t index = (uint32_t)k / (uint32_t)block_weights(own); /* a division of words is quicker */
        const uint8_t *block = columns[column].blocks + index * block_bytes(own);
        switch (own) {
            EACH_PANEL_TYPE(WRITE_BLOCK, )
        default: write_block(block, own, column, to);
        }
    }
}

/* Weights of columns, each as one column of what quantized_unpack() writes. */
typedef struct {
    _Alignas(64) uint32_t words[LANES][LARGE];
} Wanted;

/* Read `count` weights, from place k on, of LANES columns from `columns` on. Return 0 if one is not finite, or so large
 * that rounded_exactly() would overflow. */
static int read_wanted(const Column *columns, int64_t k, int count, Wanted *to) {
    _Alignas(64) float weights[LARGE];
    Floats differences = {0}; /* NaN for such a weight */
    for (int column = 0; column < LANES; column++) {
        read_column(columns[column], k, count, weights);
        for (int i = 0; i < count; i += LANES) {
            const Floats some = load_floats(weights + i), larger_ones = some * 0x1p17f;
            if (BY_PAIRS)
                store_bfloat16((uint16_t *)to->words[column] + i, some);
            else
                store_floats(to->words[column] + i, rounded_to_bfloat16(some));
            differences += larger_ones - larger_ones;
        }
    }
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += differences[i];
    return sum == 0;
}

/* Whether the steps of LANES columns have the wanted weights. Words are compared first. They differ if a zero has
 * another sign. */
static int are_equal(const uint32_t *steps, const Wanted *wanted, int count) {
    const int num_steps = count / (BY_PAIRS ? 2 : 1);
    Words different = {0};
    for (int step = 0; step < num_steps; step += LANES) {
        Floats square[LANES];
        for (int column = 0; column < LANES; column++) square[column] = load_floats(wanted->words[column] + step);
        transpose(square);
        for (int i = 0; i < LANES; i++)
            different |= (Words)square[i] ^ load_words(steps + (step + i) * PANEL_COLUMNS);
    }
    if (!is_any_set(different)) return 1;
    for (int column = 0; column < LANES; column++)
        for (int k = 0; k < count; k++) {
            const uint32_t word = wanted->words[column][BY_PAIRS ? k / 2 : k];
            if (!(quantized_weight(steps, k, column) == weight_of(word, k))) return 0;
        }
    return 1;
}

/* Whether `count` places of a panel from place k on, at most LARGE, give the weights that dequantize.h gives. */
static int are_exact(const Column columns[PANEL_COLUMNS], int32_t type, int64_t k, int count, const char *panel) {
    _Alignas(64) uint32_t steps[LARGE * PANEL_COLUMNS];
    Wanted wanted;
    quantized_unpack(panel, type, k / GROUP, (k + count) / GROUP, steps);
    for (int column = 0; column < PANEL_COLUMNS; column += LANES)
        if (!read_wanted(columns + column, k, count, &wanted) || !are_equal(steps + column, &wanted, count)) return 0;
    return 1;
}

/* Write groups of packed bfloat16 numbers. */
static void write_whole(const Column columns[PANEL_COLUMNS], int64_t depth, uint16_t *to) {
    float weights[LARGE];
    for (int column = 0; column < PANEL_COLUMNS; column++)
        for (int64_t k = 0; k < depth; k += LARGE) {
            const int64_t count = depth - k < LARGE ? depth - k : LARGE;
            read_column(columns[column], k, count, weights);
            for (int64_t i = 0; i < count; i++)
                to[((k + i) / 2 * PANEL_COLUMNS + column) * 2 + (k + i) % 2] = bfloat16_of_float(weights[i]);
        }
}

/* Write a panel. Return 0 if it must be whole. */
static int write_panel(const Quantize *args, int64_t panel) {
    const QuantizedPanel *entry = quantized_panel(args->packed, panel);
    char *to = (char *)args->packed + entry->offset;
    Column columns[PANEL_COLUMNS];
    columns_of(args, panel, columns);
    if (entry->type == WHOLE_PANEL) {
        write_whole(columns, args->depth, (uint16_t *)to);
        return 1;
    }
    const QuantizedLayout layout = layout_of(entry->type);
    for (int64_t k = 0; k < args->depth; k += LARGE) {
        const int count = args->depth - k < LARGE ? (int)(args->depth - k) : LARGE;
        for (int64_t i = k; i < k + count; i += layout.groups * GROUP)
            write_groups(columns, i, to + head_offset(layout, i / GROUP));
        if (!args->in_8_bits && !are_exact(columns, entry->type, k, count, to)) return 0;
    }
    return 1;
}

static int64_t table_bytes(const Quantize *args) {
    return (num_panels(args) * (int64_t)sizeof(QuantizedPanel) + 63) / 64 * 64;
}

EXPORT int64_t quantize_bytes(const Quantize *args) {
    const int64_t panels = num_panels(args);
    int64_t bytes = table_bytes(args), num_whole = 0;
    for (int64_t panel = 0; panel < panels; panel++) {
        Column columns[PANEL_COLUMNS];
        const int32_t type = columns_of(args, panel, columns);
        bytes += quantized_panel_bytes(type, args->depth);
        num_whole += type == WHOLE_PANEL;
    }
    return num_whole * 2 > panels ? 0 : bytes;
}

static void write_table(const Quantize *args) {
    QuantizedPanel *table = args->packed;
    int64_t offset = table_bytes(args);
    for (int64_t panel = 0; panel < num_panels(args); panel++) {
        Column columns[PANEL_COLUMNS];
        table[panel] = (QuantizedPanel){offset, columns_of(args, panel, columns), 0};
        offset += quantized_panel_bytes(table[panel].type, args->depth);
    }
}

static void quantize_job(void *job, int thread, int num_threads) {
    const Quantize *args = job;
    const int64_t count = num_panels(args), last = count * (thread + 1) / num_threads;
    for (int64_t panel = count * thread / num_threads; panel < last; panel++)
        if (!write_panel(args, panel)) args->must_be_whole[panel] = 2;
}

EXPORT int64_t gemm_quantize(const Quantize *args) {
    int64_t num_failed = 0;
    write_table(args);
    pool_run(quantize_job, (void *)args);
    for (int64_t panel = 0; panel < num_panels(args); panel++)
        if (args->must_be_whole[panel] == 2) args->must_be_whole[panel] = 1, num_failed++;
    return num_failed;
}

void quantized_column(const void *weights, int64_t depth, int64_t column, float *out) {
    const QuantizedPanel *entry = quantized_panel(weights, column / PANEL_COLUMNS);
    const char *panel = (const char *)weights + entry->offset;
    const int64_t groups = layout_of(entry->type).groups;
    _Alignas(64) uint32_t steps[LARGE * PANEL_COLUMNS];
    for (int64_t group = 0; group * GROUP < depth; group += groups) {
        quantized_unpack(panel + head_offset(layout_of(entry->type), group), entry->type, 0, groups, steps);
        for (int k = 0; k < groups * GROUP; k++) *out++ = quantized_weight(steps, k, (int)(column % PANEL_COLUMNS));
    }
}
