/* Products in 8 bits: y = x @ w^T with the panels of quantized.h, x quantized on the fly.
 *
 * A row of x is split into blocks of GROUP numbers. A block becomes 8-bit integers and a scale, computed from its own
 * numbers alone: scale = largest / 127, code = x * (127 / largest), to nearest even. A block with a NaN or an infinity
 * gets the scale NaN; a block of numbers below 1e-30 becomes zeros.
 *
 * Sums of codes are exact in int32, in whatever order an instruction set adds them. Then each group of weights gives
 *   value = float(sum(w * x)) * scale                      codes w with their zero taken off
 *   value = value + float(sum(w * x)) * scale              types with halves: the same of the second half
 *   value = value + float(sum(x)) * minimum                types with a minimum; with halves, of the first, then second
 *   y     = y + value * scale of x                         groups in ascending order
 * Each product and each sum is rounded. So all variants give the same bits, and a row's bits depend on nothing else.
 * Scales may be any numbers; those of MXFP4 below 2 ** -126 are zeros.
 *
 * A panel that is WHOLE_PANEL, because its columns are of several types, is multiplied in bfloat16, as in quantized.h.
 */
#ifndef INT8_H
#define INT8_H

#include "products/quantized.h"

/* A block of x. Codes are in the order of the weights' bytes: of each eight consecutive ones, those at even places,
 * then those at odd ones. */
typedef struct {
    int8_t codes[GROUP];
    float scale;
    float sum;            /* of the codes */
    int32_t zeros;        /* -128 times the same: what is added for weights whose codes have the zero 128 */
    int32_t zeros_of_first; /* the same of the codes of the first half */
} Int8Block;

/* Groups [first, last) of a panel, and rows of blocks from the first group on. */
typedef struct {
    const char *panel; /* or, unpacked, Int8Group[] from the first group on */
    int32_t type; /* of block_types.h */
    int64_t first, last;
    int64_t ahead; /* bytes from a packed group to the one that is prefetched; a single row does not use it */
    int32_t first_line, line_step; /* bytes, to the cache lines of that group which are prefetched */
    const Int8Block *x;
    int64_t x_stride; /* blocks from row to row */
    int32_t zero_bits; /* the zero of unpacked codes is 2 ** zero_bits, 128 for functions of Q8_0; without a minimum.
                        * NEON takes it off as codes are unpacked */
    int32_t raised_by; /* what is added to codes as they are unpacked */
    float *out;       /* sums [rows][PANEL_COLUMNS], which are added to */
} Int8Work;

/* A group with its codes as bytes and its scales as floats. */
typedef struct {
    uint8_t codes[8][PANEL_COLUMNS * 4]; /* steps of four codes for each column; see place_in_group() */
    float scale[2][PANEL_COLUMNS], minimum[2][PANEL_COLUMNS]; /* for each half, if the type has those; else the first */
} Int8Group;

/* Most rows at once: while codes are unpacked in registers, and of unpacked codes. With AVX2's 16 registers, two vectors of
 * four rows take fewer loads than one of six. SDOT has its own way to multiply unpacked codes (int8_four_rows.c). */
#if defined(NEON_DOT)
enum { INT8_PACKED_ROWS = 3, INT8_ROWS = 4 };
#elif defined(__AVX2__) && !defined(__AVX512F__)
enum { INT8_PACKED_ROWS = 4, INT8_ROWS = 4 };
#else
enum { INT8_PACKED_ROWS = 4, INT8_ROWS = 6 };
#endif

typedef void (*Int8Function)(const Int8Work *work);
typedef struct {
    Int8Function packed[INT8_PACKED_ROWS][IQ2_XXS + 1]; /* [rows - 1][function_type_of()] */
#if !defined(NEON_DOT)
    Int8Function unpacked[INT8_ROWS][IQ2_XXS + 1]; /* the same; types that differ in `zero` only share one */
#endif
} Int8Functions;

/* Made of the same source for three instruction sets; `int8_vnni` is used if the CPU has AVX512_VNNI, and
 * `int8_avx_vnni` by the variant avx2 if it has AVX_VNNI. */
extern const Int8Functions int8_plain, int8_vnni, int8_avx_vnni;

/* Rows of x that are multiplied with some panels, one after the other. */
typedef struct {
    int64_t begin, end;
    int form; /* in which a thread's room has them (int8_four_rows.c); of AMX the first row that it has (int8_amx.c) */
} Int8Chunk;

enum { NO_FORM = -1 };

/* Write the sums of some rows of a chunk with a panel, [num_rows, up to a multiple of four][PANEL_COLUMNS], where `row` is
 * a multiple of four from its first one. A sum that is not finite may be wrong. Of neon_dot and neon_bf16. */
void int8_four_rows(const Gemm *args, Int8Chunk *chunk, int64_t row, int64_t num_rows, int64_t panel, float *sums);

/* Multiply a thread's share: as gemm_part(), with args->packing INT8_WEIGHTS. args->quantized is written. */
void int8_part(const Gemm *args, int thread, int num_threads);

/* Unpack groups of a panel. */
void int8_unpack(const Int8Work *work, Int8Group *to);

/* Its two halves, on the calling thread: quantize rows [begin, end) of x; multiply all rows with some panels. */
void int8_quantize(const Gemm *args, int64_t begin, int64_t end);
void int8_panels(const Gemm *args, int64_t first, int64_t last);

/* Write the weights [depth] of one column, as of an embedding table that is also the head: the bfloat16 numbers that
 * dequantize.h gives, but for the signs of zeros and for scales of MXFP4 below 2 ** -126, which are zeros. */
void int8_column(const void *weights, int64_t depth, int64_t column, float *out);

#endif
