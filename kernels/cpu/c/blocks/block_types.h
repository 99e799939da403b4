/* The types of GGUF's blocks, in one table. kernels/dequantize.py documents their bytes and what they stand for.
 *
 * Every type is the same thing: weight = (code - zero) * scale + minimum, with a scale for each GROUP weights, or for
 * each half of a group. Codes of a type with levels are first looked up in a table of 16 bytes, which has the zero added.
 */
#ifndef BLOCK_TYPES_H
#define BLOCK_TYPES_H

#include <stdint.h>

/* Those from IQ2_XXS on are the types with a grid. */
enum {
    Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, Q2_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4, TQ2_0, TQ1_0,
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
    SIGNED,    /* signed bytes times the block's factor */
    UNSIGNED,  /* bytes times the block's factor; and minima times its other factor */
    NIBBLES,   /* the same, scale and minimum in one byte */
    EXPONENTS, /* 2 ** (byte - 128) */
    E4M3       /* half of a float of eight bits without a sign */
};

enum { NO_LEVELS, LEVELS_OF_IQ4, LEVELS_OF_FP4, LEVELS_OF_IQ2, LEVELS_OF_IQ3_XXS, LEVELS_OF_IQ3_S, LEVELS_OF_IQ1 };

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

/* Expand X(name, type, ...) for the types that a panel can have. Those with a grid share one function: they differ only in
 * their levels and their unit, which it is given. */
#define EACH_PANEL_TYPE(X, ...)                                                                                        \
    X(q8_0, Q8_0, __VA_ARGS__) X(q4_0, Q4_0, __VA_ARGS__) X(q4_1, Q4_1, __VA_ARGS__) X(q5_0, Q5_0, __VA_ARGS__)         \
    X(q5_1, Q5_1, __VA_ARGS__) X(q4_k, Q4_K, __VA_ARGS__) X(q5_k, Q5_K, __VA_ARGS__) X(q6_k, Q6_K, __VA_ARGS__)         \
    X(q2_k, Q2_K, __VA_ARGS__) X(q3_k, Q3_K, __VA_ARGS__) X(iq4_nl, IQ4_NL, __VA_ARGS__) X(iq4_xs, IQ4_XS, __VA_ARGS__) \
    X(mxfp4, MXFP4, __VA_ARGS__) X(nvfp4, NVFP4, __VA_ARGS__) X(tq2_0, TQ2_0, __VA_ARGS__) X(grids, IQ2_XXS, __VA_ARGS__)

/* Return the type that a panel of this type's blocks gets: TQ1_0 has the weights of TQ2_0. */
static inline int32_t panel_type_of(int32_t type) { return type == TQ1_0 ? TQ2_0 : type; }

/* Return the type whose functions a panel's type uses: one of EACH_PANEL_TYPE. */
static inline int32_t function_type_of(int32_t type) { return type > IQ2_XXS ? IQ2_XXS : type; }

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
