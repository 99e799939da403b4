#include "products/amx.h"

#if defined(__AMX_BF16__)

int amx_is_real = 0;

EXPORT void amx_use(int is_real) { amx_is_real = is_real; }

/* MXCSR: no exceptions, to nearest even, denormal inputs and results as zero. */
enum { AMX_MXCSR = 0x1f80 | 0x8000 | 0x0040 };

enum { BLOCK_ROWS = 4 }; /* rows whose sums are in registers */

static __mmask16 lanes_of(const Amx *amx, int tile) { return (__mmask16)((1u << amx->shapes.row_bytes[tile] / 4) - 1); }

void emulate_zero(Amx *amx, int tile) { memset(amx->tiles[tile], 0, sizeof amx->tiles[tile]); }

void emulate_load(Amx *amx, int tile, const void *from, int64_t stride) {
    const __mmask16 lanes = lanes_of(amx, tile);
    for (int row = 0; row < AMX_ROWS; row++) {
        const char *at = (const char *)from + row * stride;
        const __mmask16 some = row < amx->shapes.rows[tile] ? lanes : 0; /* lanes that are not read cannot fault */
        _mm512_store_si512(amx->tiles[tile][row], _mm512_maskz_loadu_epi32(some, at));
    }
}

void emulate_store(const Amx *amx, int tile, void *to, int64_t stride) {
    const __mmask16 lanes = lanes_of(amx, tile);
    for (int row = 0; row < amx->shapes.rows[tile]; row++)
        _mm512_mask_storeu_epi32((char *)to + row * stride, lanes, _mm512_load_si512(amx->tiles[tile][row]));
}

/* Return a * b + c. The instruction is fixed because it decides which of several NaN is the result. */
INLINE Floats chained(Floats a, Floats b, Floats c) {
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
}

/* Return a + b, for the same reason. */
INLINE Floats added(Floats a, Floats b) {
    Floats sum;
    __asm__("vaddps %2, %1, %0" : "=v"(sum) : "v"(a), "v"(b));
    return sum;
}

/* The product for BLOCK_ROWS rows; `pairs` rows of right are read. */
INLINE void multiply_rows(uint32_t sums[][AMX_ROWS], const uint32_t left[][AMX_ROWS],
                          const uint32_t right[][AMX_ROWS], int pairs) {
    Floats even[BLOCK_ROWS] = {0}, odd[BLOCK_ROWS] = {0};
    for (int pair = 0; pair < pairs; pair++) {
        const Words w = load_words(right[pair]);
        const Floats w_even = (Floats)(w << 16), w_odd = (Floats)(w & 0xffff0000);
#pragma GCC unroll 4
        for (int row = 0; row < BLOCK_ROWS; row++) {
            const Words x = all_words(left[row][pair]);
            even[row] = chained((Floats)(x << 16), w_even, even[row]);
            odd[row] = chained((Floats)(x & 0xffff0000), w_odd, odd[row]);
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < BLOCK_ROWS; row++)
        store_floats(sums[row], added(load_floats(sums[row]), added(even[row], odd[row])));
}

/* A separate function, so that no arithmetic is moved past a change of MXCSR. Tiles have zeros past their rows. */
static __attribute__((noinline)) void multiply_tiles(Amx *amx, int sums, int left, int right) {
    const int pairs = amx->shapes.row_bytes[left] / 4;
    for (int row = 0; row < amx->shapes.rows[sums]; row += BLOCK_ROWS)
        multiply_rows(amx->tiles[sums] + row, (const uint32_t(*)[AMX_ROWS])amx->tiles[left] + row,
                      (const uint32_t(*)[AMX_ROWS])amx->tiles[right], pairs);
}

void emulate_product(Amx *amx, int sums, int left, int right) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(AMX_MXCSR);
    multiply_tiles(amx, sums, left, right);
    _mm_setcsr(before);
}

void emulate_product_of_codes(Amx *amx, int sums, int left, int right) {
    const int steps = amx->shapes.row_bytes[left] / 4;
    for (int row = 0; row < amx->shapes.rows[sums]; row++) {
        Words sum = load_words(amx->tiles[sums][row]);
        for (int step = 0; step < steps; step++)
            for (int place = 0; place < 4; place++) {
                const int8_t x = (int8_t)(amx->tiles[left][row][step] >> 8 * place);
                const Words from_its_sign = load_words(amx->tiles[right][step]) << (24 - 8 * place);
                sum += all_words((uint32_t)x) * (Words)_mm512_srai_epi32((__m512i)from_its_sign, 24);
            }
        store_floats(amx->tiles[sums][row], (Floats)sum);
    }
}

#endif
