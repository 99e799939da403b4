/* Weights as stored in a GGUF file (kernels/dequantize.py documents its blocks), in panels like those of gemm.h.
 *
 * A product reads each weight's code and its block's scales, and computes from them, in registers, the bfloat16 number
 * that dequantize.h gives. So the sums are those of the dequantized matrix, bit for bit, but only as many bytes are
 * read as the file has.
 *
 * A matrix starts with a table of its panels (QuantizedPanel); the panels follow, each on a cache line. The weights of
 * a panel are all of one type. A panel whose columns are of several types, or of a type that is not a quantized one, is
 * WHOLE_PANEL: packed bfloat16 as in gemm.h. So is a panel in which a weight would have other bits than dequantize.h
 * gives: one with a scale that is not finite, or with scales of very different magnitudes. gemm_quantize() compares
 * every weight. Products in 8 bits (int8.h) compute with codes and scales and not with those bits, so they take such
 * panels as they are: then only types decide, and all variants have the same panels.
 *
 * The sign of a zero is not kept. A sum would show it only if all of its products were zero or too small for a float.
 *
 * The depth is cut into groups of GROUP weights. A group has its scales, then its codes. All are rows with an entry for
 * each of the panel's 32 columns, side by side:
 *   BYTES  8 rows of words: steps (below)
 *   FOURS  4 rows of words; a word has four bits of the codes of 8 neighbours along the depth, from its low end
 *   TWOS   2 rows of words; a word has two bits of 16 codes: bits 2 s and 2 s + 1 of each byte have step s or 4 + s
 *   ONES   a row of words with one bit of all 32: bit s of each byte has step s
 * A step has four codes: of eight neighbours those at even places, or those at odd places. A row of words with four bits
 * of each code is two steps; so products in 8 bits (int8.h) get a step by one shift, and all types have the same steps.
 * Scales, and minima after them, are rows, before the codes (block_types.h):
 *   FLOATS            float16
 *   UNSIGNED, SIGNED  bytes; SIGNED ones of types with a scale for each half of a group have a row for each half
 *   NIBBLES           a row of bytes for each half, scale and minimum in one
 *   EXPONENTS         bytes, one less than in the file: bits of a float's exponent
 *   E4M3              a row of bytes for each half
 *   DIVIDED           the same
 * The float16 factors of a block (of FACTORS it has nothing else) are in rows before its first group: the head. Of WIDE
 * and DIVIDED, the head is a row of float32.
 */
#ifndef QUANTIZED_H
#define QUANTIZED_H

#include <string.h>

#include "blocks/dequantize.h"
#include "math/elements.h"
#include "products/gemm.h"

enum { MAX_GROUPS = 8, WHOLE_PANEL = -1 };

typedef struct {
    int64_t offset; /* bytes from the table to the panel */
    int32_t type;   /* of block_types.h, or WHOLE_PANEL */
    int32_t reserved;
} QuantizedPanel;

/* Bytes of a panel of one type: a head, then `groups` groups, and so on. */
typedef struct {
    int32_t head_bytes, scale_bytes, group_bytes, groups;
} QuantizedLayout;

/* Return the place of the first row of TWOS or ONES among a group's rows of codes. */
static inline int first_row_of(const int planes, const int plane) {
    return (planes & FOURS && plane > FOURS ? 4 : 0) + (planes & TWOS && plane > TWOS ? 2 : 0);
}

static inline QuantizedLayout layout_of(int32_t type) {
    if (type == WHOLE_PANEL) return (QuantizedLayout){0, 0, GROUP * PANEL_COLUMNS * 2, 1};
    const BlockType traits = BLOCK_TYPES[type];
    const int kind = traits.scales, rows = 1 + traits.has_halves;
    const int row_bytes = kind == FLOATS ? 2 * PANEL_COLUMNS : kind == FACTORS || kind == WIDE ? 0 : PANEL_COLUMNS;
    const int scale_rows = kind == FLOATS || kind == UNSIGNED ? 1 + traits.has_minimum : rows;
    const int code_rows = traits.planes & BYTES ? 8 : first_row_of(traits.planes, ONES) + (traits.planes & ONES ? 1 : 0);
    const int has_head = kind == SIGNED || kind == UNSIGNED || kind == NIBBLES || kind == FACTORS;
    const int32_t scale_bytes = scale_rows * row_bytes, factor_bytes = (1 + traits.has_minimum) * 2 * PANEL_COLUMNS;
    return (QuantizedLayout){
        .head_bytes = kind == WIDE || kind == DIVIDED ? 4 * PANEL_COLUMNS : has_head ? factor_bytes : 0,
        .scale_bytes = scale_bytes,
        .group_bytes = scale_bytes + code_rows * 4 * PANEL_COLUMNS,
        .groups = traits.weights / GROUP,
    };
}

/* Return the offset of the head that group `group` belongs to, from the panel's start. */
static inline int64_t head_offset(QuantizedLayout layout, int64_t group) {
    return group / layout.groups * (layout.head_bytes + (int64_t)layout.groups * layout.group_bytes);
}

/* Return the offset of a group, from the panel's start. */
static inline int64_t group_offset(QuantizedLayout layout, int64_t group) {
    return head_offset(layout, group) + layout.head_bytes + group % layout.groups * layout.group_bytes;
}

static inline int64_t quantized_panel_bytes(int32_t type, int64_t depth) {
    return head_offset(layout_of(type), depth / GROUP);
}

static inline const QuantizedPanel *quantized_panel(const void *weights, int64_t panel) {
    return (const QuantizedPanel *)weights + panel;
}

/* Rows of a matrix that are stored in the same way. */
typedef struct {
    const void *rows; /* no alignment needed */
    int64_t num_rows, row_bytes;
    int32_t type; /* of block_types.h; or PLAIN_PART + element type */
    int32_t reserved;
} QuantizedPart;

enum { PLAIN_PART = 64 };

typedef struct {
    const QuantizedPart *parts; /* their rows are the matrix's columns (gemm.h), one part after the other */
    void *packed;               /* quantize_bytes() bytes, 64-byte aligned */
    uint8_t *must_be_whole;     /* [panels], 0 at first; gemm_quantize() sets it for panels that need more bytes */
    int64_t num_parts, num_columns, depth; /* the depth is a multiple of each part's block */
    int32_t is_gated;                      /* whether the matrix's halves are gates and up */
    int32_t in_8_bits;                     /* whether it is packed for products in 8 bits */
} Quantize;

/* Return the bytes of the matrix; 0 if fewer than half of its panels would be quantized. */
int64_t quantize_bytes(const Quantize *args);

/* Write the matrix. Return how many panels could not be written: they are marked in must_be_whole, and quantize_bytes()
 * has changed. */
int64_t gemm_quantize(const Quantize *args);

/* Unpack groups [first, last) of a panel, as steps of floats, or of pairs if products take those (gemm.h). */
void quantized_unpack(const char *panel, int32_t type, int64_t first, int64_t last, void *out);

/* Return weight k of a column from the word that has it. */
static inline float weight_of(uint32_t word, int k) {
    const uint32_t bits = !BY_PAIRS ? word : k % 2 ? word & 0xffff0000 : word << 16;
    float weight;
    memcpy(&weight, &bits, sizeof weight);
    return weight;
}

/* Return weight k of a column from what quantized_unpack() has written. */
static inline float quantized_weight(const uint32_t *steps, int k, int column) {
    return weight_of(steps[(BY_PAIRS ? k / 2 : k) * PANEL_COLUMNS + column], k);
}

/* Rows that are multiplied while the weights are in registers. More are computed slice by slice (gemm_slices.h). */
#if defined(__AVX512BF16__)
enum { QUANTIZED_FEW_ROWS = 8 };
#elif defined(__AVX512F__)
enum { QUANTIZED_FEW_ROWS = 4 };
#else
enum { QUANTIZED_FEW_ROWS = 2 };
#endif

/* Multiply at most QUANTIZED_FEW_ROWS rows [begin, end) with the panels [first, last). */
void quantized_multiply(const Gemm *args, int64_t begin, int64_t end, int64_t first, int64_t last);

/* Write the weights [depth] of one column: the numbers that products take. */
void quantized_column(const void *weights, int64_t depth, int64_t column, float *out);

#endif
