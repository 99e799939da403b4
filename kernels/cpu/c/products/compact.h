/* Compact weights: packed bfloat16 (gemm.h) in three quarters of the bytes, exactly.
 *
 * A product of few rows takes as long as reading its weights. The upper eight bits of a weight - its sign and seven
 * bits of its exponent - carry little information: in the weights of language models, 16 of the 256 values cover all
 * but one weight of ten thousand. So each panel has a table of 16 upper bytes, and each weight is a code of four bits
 * for one of them, and its lower byte. (Zhang et al. 2025, arXiv 2504.11651, use about 11 bits for the whole number, of
 * varying length. A fixed length can be unpacked while memory is being read.)
 *
 * A panel is a head (CompactPanel) and its pairs of steps. A pair is 192 bytes: 64 lower bytes of the first step, 64 of
 * the second, and 64 bytes of codes, those of the first step in the lower four bits. Their order is the one from which
 * the two forms of vpunpckbw make the vectors of a step. A pair with a weight that is not in the panel's table is
 * stored whole, as it was packed, in an array of such pairs after all panels; its 192 bytes are not used.
 */
#ifndef COMPACT_H
#define COMPACT_H

#include "products/gemm.h"

enum { PAIR_BYTES = 192, NO_PAIR = -1 };

/* Whether the instruction set unpacks compact weights fast: it looks up 16 bytes in a register. */
#if defined(__AVX512BW__) || defined(__AVX2__) || defined(WITH_NEON)
#define HAS_COMPACT 1
#else
#define HAS_COMPACT 0
#endif

typedef struct {
    uint16_t weights[2][PANEL_COLUMNS * 2]; /* both steps */
    int32_t next; /* number of the panel's next whole pair, which follows this one in memory; or NO_PAIR */
    char padding[60];
} WholePair;

/* A panel's first cache line. */
typedef struct {
    uint8_t upper[16];    /* the table: upper byte of each code */
    int64_t to_whole;     /* bytes from the panel to its first one; without one, still a place that may be prefetched */
    int32_t first_whole;  /* the number of that pair; or NO_PAIR */
    char padding[36];
} CompactPanel;

/* The panel's first whole pair. */
static inline const WholePair *first_whole_pair(const CompactPanel *panel) {
    return (const WholePair *)((const char *)panel + panel->to_whole);
}

static inline int64_t compact_panel_bytes(int64_t depth) {
    return (int64_t)sizeof(CompactPanel) + depth / 4 * PAIR_BYTES;
}

/* Index within a step of the byte of a column's first weight; the second weight's byte follows it. */
static inline int compact_place(int column) {
    const int vector = column / 16, lane = column % 16;
    return lane / 4 * 16 + vector * 8 + lane % 4 * 2;
}

/* First call: return the bytes that a plan needs. `plan` must point to that many bytes in the next calls. */
int64_t compact_plan_bytes(int64_t num_columns);

/* Second call: choose the tables, and return the bytes of the compact weights; 0 if this CPU or dtype has no compact
 * weights, or if they would not be much smaller. */
int64_t compact_bytes(const GemmPack *args);

/* Third call: write the compact weights to `packed`, 64-byte aligned. */
void compact_pack(const GemmPack *args);

#endif
