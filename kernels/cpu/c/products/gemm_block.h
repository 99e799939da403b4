/* A block: some rows of x times a panel of weights, with all sums in registers. gemm.c and quantized.c cut products into
 * blocks; only they include this file.
 */
#ifndef GEMM_BLOCK_H
#define GEMM_BLOCK_H

#include "products/compact.h"
#include "math/vector_math.h"

enum { PANEL_VECTORS = PANEL_COLUMNS / LANES, STEP_BYTES = PANEL_COLUMNS * 4 };

/* Registers: a block of rows x vectors of y needs rows * vectors registers for sums, `vectors` for weights and one
 * for x. If there are enough, a block is as wide as a panel, so that the weights are read from the first byte to the
 * last. Otherwise it is NARROW vectors wide. */
enum { NARROW = 2 };
#if VECTOR_BYTES == 64
#define MAX_ROWS 14
#define VECTORS_OF(rows) PANEL_VECTORS
#elif VECTOR_BYTES == 32
#define MAX_ROWS 6
#define VECTORS_OF(rows) ((rows) <= 2 ? PANEL_VECTORS : NARROW)
#elif defined(WITH_NEON) /* 32 registers; each row of x has one */
#define MAX_ROWS 8
#define VECTORS_OF(rows) ((rows) <= 2 ? PANEL_VECTORS : (rows) <= 4 ? 4 : NARROW)
#else
#define MAX_ROWS 4
#define VECTORS_OF(rows) ((rows) == 1 ? PANEL_VECTORS : (rows) == 2 ? 4 : NARROW)
#endif

INLINE Floats add_step(Floats sum, Words x, Words w, int dtype) {
    if (dtype == FLOAT32) return multiply_add((Floats)x, (Floats)w, sum);
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)x, (__m512bh)(__m512i)w);
#elif defined(NEON_BF16)
    return add_pairs(sum, w, x);
#else
    sum = multiply_add((Floats)(x << 16), (Floats)(w << 16), sum);
    return multiply_add((Floats)(x & 0xffff0000), (Floats)(w & 0xffff0000), sum);
#endif
}

/* Return `bytes` (2 or 4) of x as the step of every lane. */
INLINE Words load_step(const char *x, const int bytes) {
    uint32_t step = 0;
    memcpy(&step, x, bytes);
    return all_words(step);
}

/* Inputs of a block, and what it prefetches at the same time. A prefetch never faults, so its addresses may be out
 * of bounds. */
typedef struct {
    const char *x, *w;
    const char *ahead;  /* weights that are read soon; the first step (or pair) prefetches these */
    int64_t ahead_step; /* bytes from there to what the next step (or pair) prefetches */
    int streams;        /* whether prefetches bypass the caches */
    int64_t x_bytes;    /* from row to row */
    int64_t depth;
    float *out; /* [rows][PANEL_COLUMNS]; `vectors` vectors of each row are written */
} Work;

/* Prefetch the cache lines of `bytes` bytes. Weights that are read once may use a prefetch that does not replace other
 * cache content (reads_past_caches() in gemm.c): the rest of the program keeps its cache lines. */
INLINE void ask_for(const Work *work, const int bytes) {
#pragma GCC unroll 4
    for (int line = 0; line < bytes; line += 64) {
        if (work->streams)
            __builtin_prefetch(work->ahead + line, 0, 0);
        else
            __builtin_prefetch(work->ahead + line);
    }
}

INLINE void clear(Floats sums[MAX_ROWS][PANEL_VECTORS], const int rows, const int vectors) {
#pragma GCC unroll 14
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sums[row][v] = (Floats){0};
}

INLINE void store(const Work *work, Floats sums[MAX_ROWS][PANEL_VECTORS], const int rows, const int vectors) {
#pragma GCC unroll 14
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) store_floats(work->out + row * PANEL_COLUMNS + v * LANES, sums[row][v]);
}

/* Addresses of the rows of x, as multiples of their distance; rows from the seventh on have a second base. So five
 * registers are enough. Compilers would use one for each row, and have too few left for the rest of the loop. */
typedef struct {
    const char *x, *seventh;
    int64_t once, thrice, five_times;
} Rows;

INLINE Rows rows_of(const Work *work) {
    const int64_t once = work->x_bytes;
    return (Rows){work->x, work->x + 7 * once, once, 3 * once, 5 * once};
}

INLINE const char *address_of(const Rows *x, const int row) {
    const char *base = row < 7 ? x->x : x->seventh;
    switch (row % 7) {
        case 0: return base;
        case 1: return base + x->once;
        case 2: return base + x->once * 2;
        case 3: return base + x->thrice;
        case 4: return base + x->once * 4;
        case 5: return base + x->five_times;
        default: return base + x->thrice * 2;
    }
}

/* Add the products of vectors first, first + stride, ... of a step to the sums of all rows. */
INLINE void multiply_vectors(Floats sums[MAX_ROWS][PANEL_VECTORS], Rows *x, const Words *weights, const int step_bytes,
                             const int rows, const int first, const int stride, const int vectors, const int dtype) {
    __asm__("" : "+r"(x->once), "+r"(x->thrice), "+r"(x->five_times)); /* hides their relation from compilers */
#pragma GCC unroll 14
    for (int row = 0; row < rows; row++) {
        Words step = load_step(address_of(x, row), step_bytes);
#if VECTOR_BYTES == 32 /* otherwise compilers separate a pair's numbers first, and move each to a vector */
        if (dtype == BFLOAT16) __asm__("" : "+x"(step));
#endif
#pragma GCC unroll 8
        for (int v = first; v < vectors; v += stride) sums[row][v] = add_step(sums[row][v], step, weights[v], dtype);
    }
}

/* Add one step's products to the sums of all rows. */
INLINE void multiply_step(Floats sums[MAX_ROWS][PANEL_VECTORS], Rows *x, const Words *weights, const int step_bytes,
                          const int rows, const int vectors, const int dtype) {
    multiply_vectors(sums, x, weights, step_bytes, rows, 0, 1, vectors, dtype);
    x->x += step_bytes, x->seventh += step_bytes;
}

INLINE void block_step(Floats sums[MAX_ROWS][PANEL_VECTORS], const Work *work, Rows *x, const int step_bytes,
                       const int rows, const int vectors, const int dtype) {
    Words weights[PANEL_VECTORS];
    ask_for(work, vectors * VECTOR_BYTES);
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) weights[v] = load_words(work->w + v * VECTOR_BYTES);
    multiply_step(sums, x, weights, step_bytes, rows, vectors, dtype);
}

#if defined(WITH_NEON)
/* Add the products of a step of w with lane `lane` of x, which has four steps of a row. */
INLINE Floats add_lane(Floats sum, const Words x, const Words w, const int lane, const int dtype) {
    if (dtype == FLOAT32) return (Floats)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)w, (float32x4_t)x, lane);
#if defined(NEON_BF16)
    /* For vbfmlalbq_laneq_f32() GCC 12 may take a register of x that the instruction does not have. */
    __asm__("bfmlalb %0.4s, %1.8h, %2.h[%3]" : "+w"(sum) : "w"(w), "x"(x), "i"(2 * lane));
    __asm__("bfmlalt %0.4s, %1.8h, %2.h[%3]" : "+w"(sum) : "w"(w), "x"(x), "i"(2 * lane + 1));
    return sum;
#else
    const Words odd = all_words(0xffff0000);
    sum = (Floats)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)(w << 16), (float32x4_t)(x << 16), lane);
    return (Floats)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)(w & odd), (float32x4_t)(x & odd), lane);
#endif
}

INLINE void multiply_lane(Floats sums[MAX_ROWS][PANEL_VECTORS], Work *work, const Words *x, const int lane,
                          const int rows, const int vectors, const int dtype, const int is_slice) {
    Words weights[PANEL_VECTORS];
    if (is_slice)
        __builtin_prefetch(work->ahead);
    else
        ask_for(work, vectors * VECTOR_BYTES);
    work->ahead += work->ahead_step;
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) weights[v] = load_words(work->w + lane * STEP_BYTES + v * VECTOR_BYTES);
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sums[row][v] = add_lane(sums[row][v], x[row], weights[v], lane, dtype);
}

/* Add the products of four steps to the sums of all rows: a load of x has four steps, and products take one lane. */
INLINE void multiply_steps(Floats sums[MAX_ROWS][PANEL_VECTORS], Work *work, Rows *x, const int rows,
                           const int vectors, const int dtype, const int is_slice) {
    Words steps[MAX_ROWS];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) steps[row] = load_words(address_of(x, row));
    multiply_lane(sums, work, steps, 0, rows, vectors, dtype, is_slice);
    multiply_lane(sums, work, steps, 1, rows, vectors, dtype, is_slice);
    multiply_lane(sums, work, steps, 2, rows, vectors, dtype, is_slice);
    multiply_lane(sums, work, steps, 3, rows, vectors, dtype, is_slice);
    x->x += VECTOR_BYTES, x->seventh += VECTOR_BYTES, work->w += LANES * STEP_BYTES;
}
#endif

/* Multiply the rows of x with `vectors` vectors of columns. */
INLINE void block(Work work, const int rows, const int vectors, const int dtype) {
    Floats sums[MAX_ROWS][PANEL_VECTORS];
    Rows x = rows_of(&work);
    clear(sums, rows, vectors);
    const int64_t whole_steps = dtype == FLOAT32 ? work.depth : work.depth / 2;
    int64_t step = 0;
#if defined(WITH_NEON)
    for (; step + LANES <= whole_steps; step += LANES) multiply_steps(sums, &work, &x, rows, vectors, dtype, 0);
#endif
    for (; step < whole_steps; step++) {
        block_step(sums, &work, &x, 4, rows, vectors, dtype);
        work.w += STEP_BYTES, work.ahead += work.ahead_step;
    }
    if (dtype != FLOAT32 && work.depth % 2) block_step(sums, &work, &x, 2, rows, vectors, dtype);
    store(&work, sums, rows, vectors);
}

/* Like block(), for weights in the first level cache: what is prefetched is a line at each step. The products are
 * added to the sums that `out` has. */
INLINE void block_of_slice(Work work, const int rows, const int vectors, const int dtype) {
    Floats sums[MAX_ROWS][PANEL_VECTORS];
    Rows x = rows_of(&work);
#pragma GCC unroll 14
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sums[row][v] = load_floats(work.out + row * PANEL_COLUMNS + v * LANES);
    int64_t step = dtype == FLOAT32 ? work.depth : work.depth / 2;
#if defined(WITH_NEON)
    for (; step >= LANES; step -= LANES) multiply_steps(sums, &work, &x, rows, vectors, dtype, 1);
#endif
    for (; step > 0; step--, work.w += STEP_BYTES) {
        Words weights[PANEL_VECTORS];
        __builtin_prefetch(work.ahead);
        work.ahead += work.ahead_step;
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) weights[v] = load_words(work.w + v * VECTOR_BYTES);
        multiply_step(sums, &x, weights, 4, rows, vectors, dtype);
    }
    store(&work, sums, rows, vectors);
}

#if HAS_COMPACT
/* The vectors of a step that one lookup makes, and how many lookups make a step. */
enum { UNPACKED_VECTORS = 2, UNPACKS = PANEL_VECTORS / UNPACKED_VECTORS };

/* Unpack a part of one step of a pair, whose lower bytes begin at `offset` (0 or 64): vectors `part` and UNPACKS + part
 * of the weights as they were packed. */
INLINE void unpack_part(Words weights[PANEL_VECTORS], const char *pair, int64_t offset, Table table, const int part) {
#if defined(__AVX512BW__)
    __m512i codes = _mm512_loadu_si512(pair + 128);
    if (offset) codes = _mm512_srli_epi16(codes, 4);
    const __m512i upper = (__m512i)look_up(table, (Words)_mm512_and_si512(codes, _mm512_set1_epi8(15)));
    const __m512i lower = _mm512_loadu_si512(pair + offset);
    weights[part] = (Words)_mm512_unpacklo_epi8(lower, upper);
    weights[UNPACKS + part] = (Words)_mm512_unpackhi_epi8(lower, upper);
#elif defined(WITH_NEON)
    const uint8x16_t both = vld1q_u8((const uint8_t *)pair + 128 + part * VECTOR_BYTES);
    const uint8x16_t codes = offset ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
    const uint8x16_t upper = (uint8x16_t)look_up(table, (Words)codes);
    const uint8x16_t lower = vld1q_u8((const uint8_t *)pair + offset + part * VECTOR_BYTES);
    weights[part] = (Words)vzip1q_u8(lower, upper);
    weights[UNPACKS + part] = (Words)vzip2q_u8(lower, upper);
#else
    __m256i codes = _mm256_loadu_si256((const __m256i *)(pair + 128) + part);
    if (offset) codes = _mm256_srli_epi16(codes, 4);
    const __m256i upper = (__m256i)look_up(table, (Words)_mm256_and_si256(codes, _mm256_set1_epi8(15)));
    const __m256i lower = _mm256_loadu_si256((const __m256i *)(pair + offset) + part);
    weights[part] = (Words)_mm256_unpacklo_epi8(lower, upper);
    weights[UNPACKS + part] = (Words)_mm256_unpackhi_epi8(lower, upper);
#endif
}

/* Unpack one step of a pair. */
INLINE void unpack_step(Words weights[PANEL_VECTORS], const char *pair, int64_t offset, Table table) {
#pragma GCC unroll 4
    for (int part = 0; part < UNPACKS; part++) unpack_part(weights, pair, offset, table, part);
}

INLINE void ask_for_pair(const WholePair *pair) {
    for (size_t line = 0; line < sizeof *pair; line += 64) __builtin_prefetch((const char *)pair + line);
}

INLINE void load_whole_step(Words weights[PANEL_VECTORS], const WholePair *pair, int64_t step) {
#pragma GCC unroll 8
    for (int v = 0; v < PANEL_VECTORS; v++) weights[v] = load_words(pair->weights[step] + v * 2 * LANES);
}

/* Multiply the rows of x with a compact panel. The instructions that unpack it run between the products. */
INLINE void compact_block(Work work, const int rows) {
    Floats sums[MAX_ROWS][PANEL_VECTORS];
    Rows x = rows_of(&work);
    clear(sums, rows, PANEL_VECTORS);
    const CompactPanel *panel = (const CompactPanel *)work.w;
    const Table table = load_table(panel->upper); /* the upper bytes of the panel's codes */
    const char *begin = work.w + sizeof *panel, *end = begin + work.depth / 4 * PAIR_BYTES;
    const WholePair *whole = first_whole_pair(panel);
    const char *whole_at = begin + (int64_t)panel->first_whole * PAIR_BYTES; /* before all pairs if there is none */
    ask_for_pair(whole);
    ask_for(&work, sizeof *panel);
    work.ahead += sizeof *panel;
    for (work.w = begin; work.w != end; work.w += PAIR_BYTES, work.ahead += work.ahead_step) {
        ask_for(&work, PAIR_BYTES);
        for (int64_t offset = 0; offset < 128; offset += 64) {
            Words weights[PANEL_VECTORS];
            /* Prevents unrolling: compilers would then move all sums between registers. */
            __asm__("" : "+r"(offset), "+r"(work.w));
            if (__builtin_expect(work.w == whole_at, 0)) {
                load_whole_step(weights, whole, offset / 64);
                if (offset) {
                    whole_at = begin + (int64_t)whole->next * PAIR_BYTES;
                    ask_for_pair(++whole);
                }
            } else if (UNPACKS == 1) {
                unpack_step(weights, work.w, offset, table);
            } else { /* products between the lookups; with one lookup, a second copy of them would spill the sums */
#pragma GCC unroll 4
                for (int part = 0; part < UNPACKS; part++) {
                    unpack_part(weights, work.w, offset, table, part);
                    multiply_vectors(sums, &x, weights, 4, rows, part, UNPACKS, PANEL_VECTORS, BFLOAT16);
                }
                x.x += 4, x.seventh += 4;
                continue;
            }
            multiply_step(sums, &x, weights, 4, rows, PANEL_VECTORS, BFLOAT16);
        }
    }
    store(&work, sums, rows, PANEL_VECTORS);
}
#endif

#endif
