#include "products/quantized.h"

#include "blocks/block_readers.h"
#include "threads/pool.h"

/* The blocks of one column of a panel. */
typedef struct {
    const uint8_t *blocks;
    int32_t type; /* of dequantize.h; or PLAIN_PART + element type */
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
    int32_t type = columns[0].type;
    for (int64_t i = 1; i < PANEL_COLUMNS; i++)
        if (columns[i].type != type) type = WHOLE_PANEL;
    return type >= PLAIN_PART || args->must_be_whole[panel] ? WHOLE_PANEL : type;
}

/* Read `count` weights of a column from place k on as float32; both are multiples of the column's blocks. */
static void read_column(Column column, int64_t k, int64_t count, float *out) {
    if (column.type < PLAIN_PART) {
        const int weights = block_weights(column.type), bytes = block_bytes(column.type);
        for (int64_t i = 0; i < count; i += weights)
            read_block(column.blocks + (k + i) / weights * bytes, column.type, out + i);
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

/* Write the factors of the column's block to a head. */
static void write_head(const uint8_t *block, int32_t type, int column, char *head) {
    if (type == Q4_K || type == Q5_K) {
        memcpy(head + column * 2, block, 2);
        memcpy(head + PANEL_COLUMNS * 2 + column * 2, block + 2, 2);
    } else if (type == Q6_K) {
        memcpy(head + column * 2, block + 208, 2);
    }
}

/* Write the column's scales to group `g` of a block. */
static void write_scales(const uint8_t *block, int32_t type, int g, int column, char *group) {
    if (type == Q4_K || type == Q5_K) {
        int scale, minimum;
        codes_of_scales(block, g, &scale, &minimum);
        group[column] = (char)scale;
        group[PANEL_COLUMNS + column] = (char)minimum;
    } else if (type == Q6_K) {
        for (int i = 0; i < 2; i++) group[i * PANEL_COLUMNS + column] = (char)block[192 + g * 2 + i];
    } else {
        memcpy(group + column * 2, block, 2);
        if (type == Q4_1 || type == Q5_1) memcpy(group + PANEL_COLUMNS * 2 + column * 2, block + 2, 2);
    }
}

/* Return the bytes at even places. */
static uint32_t even_bytes(uint64_t bytes) {
    bytes &= 0x00ff00ff00ff00ff;
    bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffff;
    return (uint32_t)(bytes | bytes >> 16);
}

/* Write the column's codes of a group. Of each eight consecutive codes, those at even places are one step, those at
 * odd places the next. */
static void write_codes(const uint8_t codes[GROUP], int32_t type, int column, char *rows) {
    const int bits = type == Q6_K ? 2 : type == Q5_0 || type == Q5_1 || type == Q5_K ? 1 : 0;
    uint32_t *words = (uint32_t *)rows + column, upper[2] = {0, 0};
    for (int r = 0; r < GROUP / 8; r++) {
        uint64_t eight;
        memcpy(&eight, codes + r * 8, sizeof eight);
        if (type == Q8_0) {
            words[2 * r * PANEL_COLUMNS] = even_bytes(eight);
            words[(2 * r + 1) * PANEL_COLUMNS] = even_bytes(eight >> 8);
            continue;
        }
        const uint64_t low = eight & 0x0f0f0f0f0f0f0f0f, high = eight >> 4 & 0x0f0f0f0f0f0f0f0f;
        words[r * PANEL_COLUMNS] = even_bytes(low | low >> 4);
        if (bits) {
            const int row = r * bits / 4, step = 2 * r % (8 / bits);
            upper[row] |= even_bytes(high) << (step * bits) | even_bytes(high >> 8) << ((step + 1) * bits);
        }
    }
    for (int row = 0; row < bits; row++) words[(4 + row) * PANEL_COLUMNS] = upper[row];
}

/* Write the groups from place k on that share a head: `to` is the head's place. */
static void write_groups(const Column columns[PANEL_COLUMNS], int32_t type, int64_t k, char *to) {
    const QuantizedLayout layout = layout_of(type);
    const int64_t block = k / block_weights(type) * block_bytes(type);
    for (int column = 0; column < PANEL_COLUMNS; column++) {
        const uint8_t *from = columns[column].blocks + block;
        uint8_t codes[LARGE];
        read_codes(from, type, codes);
        write_head(from, type, column, to);
        for (int g = 0; g < layout.groups; g++) {
            char *group = to + group_offset(layout, g);
            write_scales(from, type, g, column, group);
            write_codes(codes + g * GROUP, type, column, group + layout.scale_bytes);
        }
    }
}

/* Whether `count` weights of a column are the wanted ones. The words of pairs are compared first. They differ if a
 * zero has another sign. */
static int are_equal(const uint32_t *steps, int column, const uint16_t *wanted, int count) {
    uint32_t different = !BY_PAIRS;
    for (int i = 0; BY_PAIRS && i < count / 2; i++) {
        uint32_t pair;
        memcpy(&pair, wanted + 2 * i, sizeof pair);
        different |= steps[i * PANEL_COLUMNS + column] ^ pair;
    }
    if (!different) return 1;
    for (int i = 0; i < count; i++)
        if (!(quantized_weight(steps, i, column) == float_of_bfloat16(wanted[i]))) return 0;
    return 1;
}

/* Whether `count` places of a panel from place k on, at most LARGE, give the weights that dequantize.h gives. */
static int are_exact(const Column columns[PANEL_COLUMNS], int32_t type, int64_t k, int count, const char *panel) {
    _Alignas(64) uint32_t steps[LARGE * PANEL_COLUMNS];
    _Alignas(64) float weights[LARGE];
    _Alignas(64) uint16_t wanted[LARGE];
    quantized_unpack(panel, type, k / GROUP, (k + count) / GROUP, steps);
    for (int column = 0; column < PANEL_COLUMNS; column++) {
        read_column(columns[column], k, count, weights);
        Floats differences = {0}; /* NaN if a weight is not finite */
        for (int i = 0; i < count; i += LANES) {
            const Floats some = load_floats(weights + i);
            store_bfloat16(wanted + i, some);
            differences += some - some;
        }
        float sum = 0;
        for (int i = 0; i < LANES; i++) sum += differences[i];
        if (sum != 0 || !are_equal(steps, column, wanted, count)) return 0;
    }
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
            write_groups(columns, entry->type, i, to + head_offset(layout, i / GROUP));
        if (!are_exact(columns, entry->type, k, count, to)) return 0;
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
