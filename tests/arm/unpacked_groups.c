/* Multiplies rows of blocks by the functions of int8.h, with packed groups and, if they have such functions, with unpacked
 * ones, and compares every bit with the definition.
 *
 * Exit status 0 = all rows of all types are right. test_unpacked_groups.py compiles it for each variant for ARM64.
 */
#include <stdio.h>
#include <stdlib.h>

#include "products/int8_block.h"

/* Functions of packed groups take long to compile: ALL_TYPES asks for those of all types. */
#ifndef ALL_TYPES
#undef EACH_INT8_TYPE
#define EACH_INT8_TYPE(X, rows) X(q8_0, Q8_0, rows) X(q4_k, Q4_K, rows) X(q6_k, Q6_K, rows) X(q2_k, Q2_K, rows)
#endif
#include "products/int8_functions.h"

enum { GROUPS = 32, MOST = 8 };

static const Int8Function packed[INT8_PACKED_ROWS][IQ2_XXS + 1] = INT8_ALL_PACKED;
static Int8Group groups[GROUPS];
static Int8Block x[MOST][GROUPS];
static char panel[(2 * LARGE + GROUP * PANEL_COLUMNS * 2) * GROUPS];

static int random_code(int bits) { return (rand() >> 8) % (1 << bits) - (1 << (bits - 1)); }
static float random_scale(void) { return (float)(rand() % 2001 - 1000) * 0.00173f; }

/* Number k of a group's column, and number k of a block. */
static int weight(int g, int k, int column) { return (int8_t)groups[g].codes[0][place_in_group(k, column)]; }
static int number(int row, int g, int k) { return x[row][g].codes[k / 8 * 8 + k % 2 * 4 + k % 8 / 2]; }

/* Return a code that a function may be given: those of types that share it, the largest ones in the first group. */
static int code_of_type(int type, int g) {
    const int bits = type == Q8_0 ? 8 : type == Q2_K ? 2 : type == Q6_K ? 6 : 5;
    if (g == 0) return has_minimum(type) ? (1 << bits) - 1 : -(1 << (bits - 1));
    return has_minimum(type) ? (rand() >> 8) % (1 << bits) : random_code(bits);
}

static void fill(int type) {
    for (int g = 0; g < GROUPS; g++) {
        for (int i = 0; i < 8 * ROW_BYTES; i++) ((uint8_t *)groups[g].codes)[i] = (uint8_t)code_of_type(type, g);
        for (int half = 0; half < 2; half++)
            for (int column = 0; column < PANEL_COLUMNS; column++)
                groups[g].scale[half][column] = random_scale(), groups[g].minimum[half][column] = random_scale();
    }
    for (int row = 0; row < MOST; row++)
        for (int g = 0; g < GROUPS; g++) {
            Int8Block *block = &x[row][g];
            int sums[2] = {0};
            for (int k = 0; k < GROUP; k++) block->codes[k] = (int8_t)(g == 0 ? row % 2 * 254 - 127 : random_code(8));
            for (int k = 0; k < GROUP; k++) sums[k / (GROUP / 2)] += block->codes[k];
            block->scale = random_scale(), block->sum = (float)(sums[0] + sums[1]);
            block->zeros = -128 * (sums[0] + sums[1]), block->zeros_of_first = -128 * sums[0];
        }
}

/* The definition of int8.h; `volatile` has each product and each sum rounded. */
static float defined(int row, int column, int type, float sum) {
    const BlockType traits = BLOCK_TYPES[type];
    const int halves = 1 + traits.has_halves, count = GROUP / halves;
    for (int g = 0; g < GROUPS; g++) {
        volatile float value = 0.0f, part;
        int sums_of_x[2] = {0};
        for (int half = 0; half < halves; half++) {
            int32_t products = 0;
            for (int k = half * count; k < (half + 1) * count; k++) {
                products += weight(g, k, column) * number(row, g, k);
                sums_of_x[half] += number(row, g, k);
            }
            part = (float)products * groups[g].scale[half][column];
            value = half ? value + part : part;
        }
        for (int half = 0; half < halves && traits.has_minimum; half++) {
            part = (float)sums_of_x[half] * groups[g].minimum[half][column];
            value = value + part;
        }
        part = value * x[row][g].scale;
        sum = sum + part;
    }
    return sum;
}

/* Write the codes and scales of a packed group to groups[g]. */
static void read_group(int type, int g) {
    const QuantizedLayout layout = layout_of(type);
    const OwnParts own = own_parts(type, type);
    const char *head = panel + head_offset(layout, g), *group = panel + group_offset(layout, g);
    const int zero = has_minimum(type) || is_wide(type) ? 0 : 1 << BLOCK_TYPES[type].zero_bits;
    for (int v = 0; v < PANEL_VECTORS; v += 2)
        for (int s = 0; s < 8; s += 2) {
            Words codes[2][PANEL_VECTORS];
            codes_of_two_steps(codes, group + layout.scale_bytes + v * VECTOR_BYTES, s, own.levels, type, 2);
            for (int i = 0; i < 2 * 2 * VECTOR_BYTES; i++) {
                const int step = i / (2 * VECTOR_BYTES), place = i % (2 * VECTOR_BYTES), k = s / 2 * 8 + place % 4 * 2 + step;
                const uint8_t code = ((const uint8_t *)codes[step])[place];
                groups[g].codes[0][place_in_group(k, v * LANES + place / 4)] = (uint8_t)(code - zero);
            }
        }
    for (int v = 0; v < PANEL_VECTORS; v++) {
        const Scales scales = load_scales(head, group, v, own.unit, type);
        memcpy(groups[g].scale[0] + v * LANES, &scales.scale[0], VECTOR_BYTES);
        memcpy(groups[g].scale[1] + v * LANES, &scales.scale[1], VECTOR_BYTES);
        memcpy(groups[g].minimum[0] + v * LANES, &scales.minimum[0], VECTOR_BYTES);
        memcpy(groups[g].minimum[1] + v * LANES, &scales.minimum[1], VECTOR_BYTES);
    }
}

/* Return how many numbers of some rows are wrong. */
static int wrong_of_rows(int type, int rows) {
    const QuantizedLayout layout = layout_of(type);
    float out[MOST][PANEL_COLUMNS] = {{0}};
    int wrong = 0;
    for (size_t i = 0; i < sizeof panel; i++) panel[i] = (char)(rows == 1 ? 255 : rand() >> 8); /* 255: the largest codes */
    for (int g = 0; g < GROUPS; g++) { /* floats of whatever kind that are no NaN */
        for (int i = 0; i < layout.head_bytes; i++) panel[head_offset(layout, g) + i] &= 0x3f;
        for (int i = 0; i < layout.scale_bytes; i++) panel[group_offset(layout, g) + i] &= 0x3f;
        read_group(type, g);
    }
    const Int8Work work = {.panel = panel, .type = type, .last = GROUPS, .ahead = 64, .line_step = 64, .x = x[0],
                           .x_stride = GROUPS, .out = out[0]};
    packed[rows - 1][type](&work);
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < PANEL_COLUMNS; column++) {
            const float expected = defined(row, column, type, 0);
            wrong += memcmp(&out[row][column], &expected, sizeof expected) != 0;
        }
    return wrong;
}
#if defined(INT8_ALL_UNPACKED)
/* Only the functions that run are compiled. */
#undef INT8_UNPACKED_ROW
#define INT8_UNPACKED_ROW(rows) \
    {[Q8_0] = bytes_##rows, [Q4_1] = moved_up_##rows, [Q6_K] = halves_##rows, [Q2_K] = halves_moved_up_##rows}

static int wrong_of_unpacked(void) {
    static const Int8Function functions[INT8_ROWS][IQ2_XXS + 1] = INT8_ALL_UNPACKED;
    static const int types[] = {Q8_0, Q4_1, Q6_K, Q2_K};
    int wrong = 0;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        fill(types[i]);
        for (int rows = 1; rows <= INT8_ROWS; rows++) {
            float out[INT8_ROWS + 1][PANEL_COLUMNS];
            for (int j = 0; j < (INT8_ROWS + 1) * PANEL_COLUMNS; j++) out[j / PANEL_COLUMNS][j % PANEL_COLUMNS] = 0.25f;
            const Int8Work work = {.panel = (const char *)groups, .type = types[i], .last = GROUPS, .x = x[0],
                                   .x_stride = GROUPS, .zero_bits = 7, .out = out[0]};
            functions[rows - 1][types[i]](&work);
            for (int row = 0; row <= INT8_ROWS; row++)
                for (int column = 0; column < PANEL_COLUMNS; column++) {
                    const float expected = row < rows ? defined(row, column, types[i], 0.25f) : 0.25f;
                    wrong += memcmp(&out[row][column], &expected, sizeof expected) != 0;
                }
            printf("type %d, %d rows: %d wrong\n", types[i], rows, wrong);
        }
    }
    return wrong;
}
#else
static int wrong_of_unpacked(void) { return 0; }
#endif

int main(void) {
    int wrong = wrong_of_unpacked();
    fill(Q8_0);
    for (int type = 0; type <= IQ2_XXS; type++)
        for (int rows = 1; packed[0][type] && rows <= INT8_PACKED_ROWS; rows++) {
            wrong += wrong_of_rows(type, rows);
            printf("type %d, %d packed rows: %d wrong\n", type, rows, wrong);
        }
    return wrong != 0;
}
