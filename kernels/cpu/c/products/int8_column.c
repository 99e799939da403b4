#include "products/int8_block.h"

/* Write the weights of one column of a panel of bfloat16 numbers. */
static void whole_column(const uint16_t *panel, int64_t depth, int column, float *out) {
    for (int64_t k = 0; k < depth; k++) out[k] = float_of_bfloat16(panel[(k / 2 * PANEL_COLUMNS + column) * 2 + k % 2]);
}

/* Return code k of a group's column, with its zero taken off if it has one. */
static float code_of(const Int8Group *group, int k, int column, int type) {
    const BlockType traits = BLOCK_TYPES[type];
    const uint8_t code = group->codes[0][place_in_group(k, column)];
    if (HAS_SIGNED_BYTES && is_wide(type)) return (int8_t)code;
    return traits.has_minimum ? code : code - (1 << traits.zero_bits);
}

/* The product and the sum are rounded as dequantize.h rounds them. */
void int8_column(const void *weights, int64_t depth, int64_t column, float *out) {
    const QuantizedPanel *entry = quantized_panel(weights, column / PANEL_COLUMNS);
    const char *panel = (const char *)weights + entry->offset;
    const int in_panel = (int)(column % PANEL_COLUMNS);
    if (entry->type == WHOLE_PANEL) {
        whole_column((const uint16_t *)panel, depth, in_panel, out);
        return;
    }
    const BlockType traits = BLOCK_TYPES[entry->type];
    _Alignas(64) Int8Group group;
    for (int64_t g = 0; g < depth / GROUP; g++) {
        const Int8Work work = {.panel = panel, .type = entry->type, .first = g, .last = g + 1};
        int8_unpack(&work, &group);
        for (int k = 0; k < GROUP; k++) {
            const int half = traits.has_halves ? k / (GROUP / 2) : 0;
            float weight = code_of(&group, k, in_panel, entry->type) * group.scale[half][in_panel];
            if (traits.has_minimum) weight += group.minimum[half][in_panel];
            *out++ = float_of_bfloat16(bfloat16_of_float(weight));
        }
    }
}
