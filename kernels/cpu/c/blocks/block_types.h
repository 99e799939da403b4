/* The types of blocks of GGUF and of packed folders, in one table. kernels/dequantize.py documents their bytes and what
 * they stand for.
 *
 * Every type is the same thing: weight = (code - zero) * scale + minimum, with a scale for each GROUP weights, or for
 * each half of a group. Codes of a type with levels are first looked up in a table of 16 bytes, which has the zero added.
 * Codes of FP8, NF4 and BNB_FP4 are floats or stand for floats, so their products are not computed with integers.
 */
#ifndef BLOCK_TYPES_H
#define BLOCK_TYPES_H

#include <stdint.h>

/* Those from IQ2_XXS on are the types with a grid. */
enum {
    Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, Q2_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4, TQ2_0, TQ1_0,
    FP8, NF4, BNB_FP4, NVFP4_F32,
    IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M, NUM_TYPES
};

enum { GROUP = 32, LARGE = 256 }; /* weights; a block has at most LARGE */

/* The bits of a code, as panels have them (quantized.h): a byte; or its low four bits, and two or one above them; or its
 * low two bits, and one above them. */
enum { BYTES = 1, FOURS = 2, TWOS = 4, ONES = 8 };

/* How scales are stored, in blocks and in panels. */
enum {
    FLOATS,    /* float16; and a minimum */
    FACTORS,   /* the block's factor is the scale */
    WIDE,      /* the same, as float32 */
    DIVIDED,   /* as E4M3, divided by the block's float32 */
    SIGNED,    /* signed bytes times the block's factor */
    UNSIGNED,  /* bytes times the block's factor; and minima times its other factor */
    NIBBLES,   /* the same, scale and minimum in one byte */
    EXPONENTS, /* 2 ** (byte - 128) */
    E4M3       /* half of a float of eight bits without a sign */
};

/* FLOATS_OF_E4M3: codes are bytes of E4M3. Those after it have levels that are floats. */
enum {
    NO_LEVELS, LEVELS_OF_IQ4, LEVELS_OF_FP4, LEVELS_OF_IQ2, LEVELS_OF_IQ3_XXS, LEVELS_OF_IQ3_S, LEVELS_OF_IQ1,
    FLOATS_OF_E4M3, FLOATS_OF_NF4, FLOATS_OF_BNB_FP4
};

typedef struct {
    uint16_t weights;    /* of a block */
    uint8_t bytes;       /* of a block */
    uint8_t planes;      /* BYTES, or a sum of the others */
    uint8_t scales;      /* FLOATS, ... */
    uint8_t has_minimum; /* then there is no zero */
    uint8_t has_halves;  /* whether each half of a group has a scale */
    uint8_t zero_bits;   /* the zero is 2 ** zero_bits; of Q8_0 once the codes' sign is taken off */
    uint8_t levels;      /* NO_LEVELS, ... */
    float unit;          /* what scales are multiplied by */
} BlockType;

static const BlockType BLOCK_TYPES[NUM_TYPES] = {
    [Q8_0] = {32, 34, BYTES, FLOATS, 0, 0, 7, NO_LEVELS, 1},
    [Q4_0] = {32, 18, FOURS, FLOATS, 0, 0, 3, NO_LEVELS, 1},
    [Q4_1] = {32, 20, FOURS, FLOATS, 1, 0, 0, NO_LEVELS, 1},
    [Q5_0] = {32, 22, FOURS | ONES, FLOATS, 0, 0, 4, NO_LEVELS, 1},
    [Q5_1] = {32, 24, FOURS | ONES, FLOATS, 1, 0, 0, NO_LEVELS, 1},
    [Q4_K] = {256, 144, FOURS, UNSIGNED, 1, 0, 0, NO_LEVELS, 1},
    [Q5_K] = {256, 176, FOURS | ONES, UNSIGNED, 1, 0, 0, NO_LEVELS, 1},
    [Q6_K] = {256, 210, FOURS | TWOS, SIGNED, 0, 1, 5, NO_LEVELS, 1},
    [Q2_K] = {256, 84, TWOS, NIBBLES, 1, 1, 0, NO_LEVELS, 1},
    [Q3_K] = {256, 110, TWOS | ONES, SIGNED, 0, 1, 2, NO_LEVELS, 1},
    [IQ4_NL] = {32, 18, FOURS, FLOATS, 0, 0, 7, LEVELS_OF_IQ4, 1},
    [IQ4_XS] = {256, 136, FOURS, SIGNED, 0, 0, 7, LEVELS_OF_IQ4, 1},
    [MXFP4] = {32, 17, FOURS, EXPONENTS, 0, 0, 4, LEVELS_OF_FP4, 1},
    [NVFP4] = {64, 36, FOURS, E4M3, 0, 1, 4, LEVELS_OF_FP4, 1},
    [TQ2_0] = {256, 66, TWOS, FACTORS, 0, 0, 0, NO_LEVELS, 1},
    [TQ1_0] = {256, 54, TWOS, FACTORS, 0, 0, 0, NO_LEVELS, 1},
    [FP8] = {64, 68, BYTES, WIDE, 0, 0, 0, FLOATS_OF_E4M3, 1},
    [NF4] = {64, 36, FOURS, WIDE, 0, 0, 0, FLOATS_OF_NF4, 1},
    [BNB_FP4] = {64, 36, FOURS, WIDE, 0, 0, 0, FLOATS_OF_BNB_FP4, 1},
    [NVFP4_F32] = {64, 40, FOURS, DIVIDED, 0, 1, 4, LEVELS_OF_FP4, 1},
    [IQ2_XXS] = {256, 66, FOURS, SIGNED, 0, 1, 6, LEVELS_OF_IQ2, 0.125f},
    [IQ2_XS] = {256, 74, FOURS, SIGNED, 0, 1, 6, LEVELS_OF_IQ2, 0.125f},
    [IQ2_S] = {256, 82, FOURS, SIGNED, 0, 1, 6, LEVELS_OF_IQ2, 0.125f},
    [IQ3_XXS] = {256, 98, FOURS, SIGNED, 0, 1, 6, LEVELS_OF_IQ3_XXS, 0.25f},
    [IQ3_S] = {256, 110, FOURS, SIGNED, 0, 1, 6, LEVELS_OF_IQ3_S, 1},
    [IQ1_S] = {256, 50, FOURS, SIGNED, 0, 1, 6, LEVELS_OF_IQ1, 0.125f},
    [IQ1_M] = {256, 56, FOURS, SIGNED, 0, 1, 6, LEVELS_OF_IQ1, 0.125f},
};

/* What codes stand for, with the type's zero added. */
static const uint8_t LEVELS[][16] = {
    [LEVELS_OF_IQ4] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    [LEVELS_OF_FP4] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4},
    [LEVELS_OF_IQ2] = {72, 89, 107, 64, 64, 64, 64, 64, 56, 39, 21, 64, 64, 64, 64, 64},
    [LEVELS_OF_IQ3_XXS] = {68, 76, 84, 92, 100, 108, 116, 126, 60, 52, 44, 36, 28, 20, 12, 2},
    [LEVELS_OF_IQ3_S] = {65, 67, 69, 71, 73, 75, 77, 79, 63, 61, 59, 57, 55, 53, 51, 49},
    [LEVELS_OF_IQ1] = {57, 65, 73, 64, 64, 64, 64, 64, 55, 63, 71, 64, 64, 64, 64, 64},
};

/* What codes stand for if that is no integer, from FLOATS_OF_NF4 on: float32 numbers that bitsandbytes writes to files. */
static const float FLOAT_LEVELS[][16] = {
    {-1, -0x1.647362p-1f, -0x1.0cd660p-1f, -0x1.946540p-2f, -0x1.23449ap-2f, -0x1.7a6a7ep-3f, -0x1.74f0e2p-4f, 0,
     0x1.45f5fep-4f, 0x1.4995c6p-3f, 0x1.f809bap-3f, 0x1.5a0674p-2f, 0x1.c34970p-2f, 0x1.200f56p-1f, 0x1.722766p-1f, 1},
    {0, 0x1.555556p-8f, 0x1.555556p-1f, 1, 0x1.555556p-2f, 0.5f, 0x1.555556p-3f, 0.25f,
     0, -0x1.555556p-8f, -0x1.555556p-1f, -1, -0x1.555556p-2f, -0.5f, -0x1.555556p-3f, -0.25f},
};

/* Expand X(name, type, ...) for the types that a panel can have, in products in 8 bits and in all. Those with a grid share
 * one function: they differ only in their levels and their unit, which it is given. */
#define EACH_PANEL_TYPE(X, ...)                                                                                        \
    EACH_INT8_TYPE(X, __VA_ARGS__) X(fp8, FP8, __VA_ARGS__) X(nf4, NF4, __VA_ARGS__) X(bnb_fp4, BNB_FP4, __VA_ARGS__)
#define EACH_INT8_TYPE(X, ...)                                                                                         \
    X(q8_0, Q8_0, __VA_ARGS__) X(q4_0, Q4_0, __VA_ARGS__) X(q4_1, Q4_1, __VA_ARGS__) X(q5_0, Q5_0, __VA_ARGS__)         \
    X(q5_1, Q5_1, __VA_ARGS__) X(q4_k, Q4_K, __VA_ARGS__) X(q5_k, Q5_K, __VA_ARGS__) X(q6_k, Q6_K, __VA_ARGS__)         \
    X(q2_k, Q2_K, __VA_ARGS__) X(q3_k, Q3_K, __VA_ARGS__) X(iq4_nl, IQ4_NL, __VA_ARGS__) X(iq4_xs, IQ4_XS, __VA_ARGS__) \
    X(mxfp4, MXFP4, __VA_ARGS__) X(nvfp4, NVFP4, __VA_ARGS__) X(nvfp4_f32, NVFP4_F32, __VA_ARGS__)     \
    X(tq2_0, TQ2_0, __VA_ARGS__) X(grids, IQ2_XXS, __VA_ARGS__)

/* Return the type that a panel of this type's blocks gets: TQ1_0 has the weights of TQ2_0. */
static inline int32_t panel_type_of(int32_t type) { return type == TQ1_0 ? TQ2_0 : type; }

/* Return the type whose functions a panel's type uses: one of EACH_PANEL_TYPE. */
static inline int32_t function_type_of(int32_t type) { return type > IQ2_XXS ? IQ2_XXS : type; }

static inline int has_levels(int type) {
    return BLOCK_TYPES[type].levels != NO_LEVELS && BLOCK_TYPES[type].levels < FLOATS_OF_E4M3;
}

static inline int is_e4m3(int type) { return BLOCK_TYPES[type].levels == FLOATS_OF_E4M3; }
static inline int has_float_levels(int type) { return BLOCK_TYPES[type].levels > FLOATS_OF_E4M3; }

/* Return those of a type that has them. */
static inline const float *float_levels(int type) { return FLOAT_LEVELS[BLOCK_TYPES[type].levels - FLOATS_OF_NF4]; }

static inline int block_weights(int32_t type) { return BLOCK_TYPES[type].weights; }
static inline int block_bytes(int32_t type) { return BLOCK_TYPES[type].bytes; }

/* The rows of the grids, one grid after the other: Python writes them before a type with a grid is used
 * (kernels/block_grids.py). A row is a digit of each weight, in a byte. */
enum {
    ROWS_OF_IQ2_XXS = 0,
    ROWS_OF_IQ2_XS = ROWS_OF_IQ2_XXS + 256 * 8,
    ROWS_OF_IQ2_S = ROWS_OF_IQ2_XS + 512 * 8,
    ROWS_OF_IQ1 = ROWS_OF_IQ2_S + 1024 * 8,
    ROWS_OF_IQ3_XXS = ROWS_OF_IQ1 + 2048 * 8,
    ROWS_OF_IQ3_S = ROWS_OF_IQ3_XXS + 256 * 4,
    GRID_BYTES = ROWS_OF_IQ3_S + 512 * 4
};
extern uint8_t block_grids[GRID_BYTES];

#endif
