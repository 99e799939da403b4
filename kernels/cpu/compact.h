/* Compact weights: packed bfloat16 (gemm.h) in three quarters of the bytes, exactly.
 *
 * A product of few rows takes as long as reading its weights, and of a weight's 16 bits the upper eight - its sign and
 * seven bits of its exponent - say little: in the weights of language models 16 of their 256 values are all but one of
 * ten thousand. (Zhang et al. 2025, arXiv 2504.11651, have 11 bits for the whole number, of varying length; a fixed
 * length is unpacked while memory is waited for.) So each panel has 16 upper bytes that it may use, and each weight a
 * code of four bits for one of them, beside its lower byte.
 *
 * A panel is a head and its pairs of steps. A pair is 192 bytes: 64 lower bytes of the first step, 64 of the second, and
 * 64 of codes, those of the first step in the lower halves. Their order is that in which the two halves of vpunpckbw
 * make vectors of a step. A pair with a weight that the panel's table does not have stands whole, as it was packed, in a
 * row of such pairs behind all panels; in its 192 bytes is nothing.
 */
#ifndef COMPACT_H
#define COMPACT_H

#include "gemm.h"

enum { PAIR_BYTES = 192, NO_PAIR = -1 };

typedef struct {
    uint16_t weights[2][PANEL_COLUMNS * 2]; /* of both steps */
    int32_t next; /* the number of the panel's next whole pair, which comes behind this one; or NO_PAIR */
    char padding[60];
} WholePair;

/* A panel's first cache line. */
typedef struct {
    uint8_t upper[16];      /* what the codes stand for */
    const WholePair *whole; /* the first one; at least an address that may be asked for */
    int32_t first_whole;    /* its number; or NO_PAIR */
    char padding[36];
} CompactPanel;

static inline int64_t compact_panel_bytes(int64_t depth) {
    return (int64_t)sizeof(CompactPanel) + depth / 4 * PAIR_BYTES;
}

/* Where a step has the byte of the first of a column's two weights; the second's is next to it. */
static inline int compact_place(int column) {
    const int vector = column / 16, lane = column % 16;
    return lane / 4 * 16 + vector * 8 + lane % 4 * 2;
}

/* First: how many bytes of room a plan takes, which `plan` points to from then on. */
int64_t compact_plan_bytes(int64_t num_columns);

/* Second: choose the tables, and say how many bytes the weights will take; 0 if they cannot be compact here, or would
 * not be much smaller. */
int64_t compact_bytes(const GemmPack *args);

/* Third: fill these bytes, which `packed` points to, 64-byte aligned. They stay where they are. */
void compact_pack(const GemmPack *args);

#endif
