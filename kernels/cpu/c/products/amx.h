/* AMX: eight registers (tiles) of 16 rows of 64 bytes, and its product of bfloat16 matrices; real, or emulated with
 * AVX-512 with the same bits.
 *
 * The product adds to sums [rows, 16] (float32) what left [rows, pairs] times right [pairs, 16] gives; a unit of left
 * and right is a pair of bfloat16, adjacent along the axis that is summed over. For each element of the sums, with fma
 * rounded once, to nearest even, and with denormal inputs and results as zeros of their sign:
 *
 *     e = o = +0
 *     for each pair, ascending:   e = fma(left even, right even, e);   o = fma(left odd, right odd, o)
 *     sum = sum + (e + o)
 *
 * So 32 places along the depth are two chains of 16. Rows do not change each other. MXCSR is neither read nor written.
 * This was found equal to the instruction TDPBF16PS in 1.2e8 results on an Intel Xeon, NaN payloads included; on
 * machines with AMX, tests/kernels/cpu/test_amx.py compares the two.
 *
 * The product of codes adds to sums [rows, 16] (int32) what left [rows, steps] (four signed 8-bit integers) times right
 * [steps, 16] (four more) gives: TDPBSSD, exact while the sums fit.
 *
 * The functions with is_real, a constant, are one instruction each; only their operands are not tested without AMX.
 * gcc's own intrinsics are not used: those of gcc 12 do not say which memory they read.
 */
#ifndef AMX_H
#define AMX_H

#include "math/vectors.h"

/* Whether this variant multiplies bfloat16 numbers in AMX's order. */
#if defined(__AMX_BF16__)
enum { HAS_AMX = 1 };
#else
enum { HAS_AMX = 0 };
#endif

enum { AMX_ROWS = 16, AMX_ROW_BYTES = 64, AMX_DEPTH = 32, NUM_AMX_TILES = 8 };

/* Rows of each tile and bytes of a row, as LDTILECFG loads them. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} AmxShapes;

/* The shapes of the tiles, and the tiles themselves if they are emulated. */
typedef struct {
    AmxShapes shapes __attribute__((aligned(64)));
    uint32_t tiles[NUM_AMX_TILES][AMX_ROWS][AMX_ROWS] __attribute__((aligned(64)));
} Amx;

/* Whether the instructions are used. amx_use() sets it; only a process to which the kernel has granted AMX may. */
extern int amx_is_real;
void amx_use(int is_real);

void emulate_zero(Amx *amx, int tile);
void emulate_load(Amx *amx, int tile, const void *from, int64_t stride);
void emulate_store(const Amx *amx, int tile, void *to, int64_t stride);
void emulate_product(Amx *amx, int sums, int left, int right);
void emulate_product_of_codes(Amx *amx, int sums, int left, int right);

INLINE void amx_shape(Amx *amx, const int tile, int rows, int row_bytes) {
    amx->shapes.rows[tile] = (uint8_t)rows;
    amx->shapes.row_bytes[tile] = (uint16_t)(rows ? row_bytes : 0);
}

/* Give this thread tiles of the shapes. What they contained before is gone. */
INLINE void amx_begin(const Amx *amx, const int is_real) {
    if (is_real) __asm__ volatile("ldtilecfg %0" ::"m"(amx->shapes) : "memory");
}

/* Give the tiles back: a thread that sleeps with tiles in use makes each context switch longer. */
INLINE void amx_end(const int is_real) {
    if (is_real) __asm__ volatile("tilerelease" ::: "memory");
}

INLINE void amx_zero(Amx *amx, const int tile, const int is_real) {
    if (is_real)
        __asm__ volatile("tilezero %%tmm%c0" ::"i"(tile) : "memory");
    else
        emulate_zero(amx, tile);
}

/* Load a tile whose rows are `stride` bytes apart. */
INLINE void amx_load(Amx *amx, const int tile, const void *from, int64_t stride, const int is_real) {
    if (is_real)
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
    else
        emulate_load(amx, tile, from, stride);
}

/* The same, for data that should not evict other data from the first level cache. */
INLINE void amx_load_past(Amx *amx, const int tile, const void *from, int64_t stride, const int is_real) {
    if (is_real)
        __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
    else
        emulate_load(amx, tile, from, stride);
}

INLINE void amx_store(const Amx *amx, const int tile, void *to, int64_t stride, const int is_real) {
    if (is_real)
        __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
    else
        emulate_store(amx, tile, to, stride);
}

/* sums += left * right. The assembler's order of operands is the reverse of Intel's. */
INLINE void amx_product(Amx *amx, const int sums, const int left, const int right, const int is_real) {
    if (is_real)
        __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right) : "memory");
    else
        emulate_product(amx, sums, left, right);
}

INLINE void amx_product_of_codes(Amx *amx, const int sums, const int left, const int right, const int is_real) {
    if (is_real)
        __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right) : "memory");
    else
        emulate_product_of_codes(amx, sums, left, right);
}

#endif
