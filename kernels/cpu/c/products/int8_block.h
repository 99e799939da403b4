/* Some rows of 8-bit blocks times groups of a panel. int8_functions.h makes functions of it. */
#ifndef INT8_BLOCK_H
#define INT8_BLOCK_H

#include "products/int8.h"
#include "products/quantized_decode.h"

/* Prefetch distance: the hardware's own prefetch ends at each page. */
enum { INT8_PREFETCH_BYTES = 2048 };

/* Vectors of columns at once. */
#if defined(__AVX512F__)
enum { INT8_VECTORS = 2 };
#else
enum { INT8_VECTORS = 1 };
#endif

/* Return the logarithm of the code that means zero, for types without a minimum. */
INLINE int zero_bits_of(const int type) { return type == Q8_0 ? 7 : type == Q4_0 ? 3 : type == Q5_0 ? 4 : 5; }

/* Return four unsigned codes of each column, as bytes: step `s` of a group. */
INLINE Words codes_of_step(const char *codes, const int v, const int s, const int type) {
    const char *at = codes + v * VECTOR_BYTES;
    if (type == Q8_0) return load_words(at + s * ROW_BYTES) ^ 0x80808080;
    const Words word = load_words(at + s / 2 * ROW_BYTES);
    Words low = (s % 2 ? word >> 4 : word) & 0x0f0f0f0f;
    if (has_fifth_bit(type)) low |= moved(load_words(at + 4 * ROW_BYTES), s, 4) & 0x10101010;
    if (type == Q6_K) low |= moved(load_words(at + (4 + s / 4) * ROW_BYTES), s % 4 * 2, 4) & 0x30303030;
    return low;
}

/* Add the products of four adjacent codes to each lane: unsigned codes times signed ones of x. is_wide: codes have
 * eight bits, otherwise at most six. */
INLINE Signed add_products(Signed sums, const Words codes, const uint32_t x, const int is_wide) {
#if defined(__AVX512VNNI__)
    (void)is_wide;
    return (Signed)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32((int)x));
#elif defined(__AVX512BW__)
    const __m512i all = _mm512_set1_epi32((int)x), ones = _mm512_set1_epi16(1);
    if (!is_wide) return sums + (Signed)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)codes, all), ones);
    const __m512i low = _mm512_maddubs_epi16((__m512i)(codes & 0x0f0f0f0f), all);
    const __m512i high = _mm512_maddubs_epi16((__m512i)(codes >> 4 & 0x0f0f0f0f), all);
    return sums + (Signed)_mm512_madd_epi16(low, ones) + (Signed)_mm512_madd_epi16(high, _mm512_set1_epi16(16));
#elif defined(__AVXVNNI__)
    (void)is_wide;
    return (Signed)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32((int)x));
#elif defined(__AVX2__)
    const __m256i all = _mm256_set1_epi32((int)x), ones = _mm256_set1_epi16(1);
    if (!is_wide) return sums + (Signed)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)codes, all), ones);
    const __m256i low = _mm256_maddubs_epi16((__m256i)(codes & 0x0f0f0f0f), all);
    const __m256i high = _mm256_maddubs_epi16((__m256i)(codes >> 4 & 0x0f0f0f0f), all);
    return sums + (Signed)_mm256_madd_epi16(low, ones) + (Signed)_mm256_madd_epi16(high, _mm256_set1_epi16(16));
#else
    typedef int16_t Shorts __attribute__((vector_size(VECTOR_BYTES)));
    (void)is_wide; /* 255 * 127 fits 16 bits */
    const uint32_t even = (uint16_t)(int8_t)x | (uint32_t)(int8_t)(x >> 16) << 16;
    const uint32_t odd = (uint16_t)(int8_t)(x >> 8) | (uint32_t)(int8_t)(x >> 24) << 16;
    const Shorts first = (Shorts)(codes & 0x00ff00ff) * (Shorts)all_words(even);
    const Shorts second = (Shorts)(codes >> 8 & 0x00ff00ff) * (Shorts)all_words(odd);
    sums += ((Signed)first >> 16) + ((Signed)((Words)first << 16) >> 16);
    return sums + ((Signed)second >> 16) + ((Signed)((Words)second << 16) >> 16);
#endif
}

/* Codes and scales of one group. */
typedef struct {
    const char *codes; /* of the first of the vectors */
    Scales scales[INT8_VECTORS];
} GroupParts;

INLINE GroupParts parts_of_group(const Int8Work *work, const int64_t g, const int v, const int type,
                                 const int is_unpacked) {
    GroupParts parts;
    if (is_unpacked) {
        const Int8Group *group = (const Int8Group *)work->panel + (g - work->first);
        parts.codes = (const char *)group->codes + v * VECTOR_BYTES;
#pragma GCC unroll 2
        for (int i = 0; i < INT8_VECTORS; i++) {
            const int at = (v + i) * LANES;
            for (int half = 0; half < 2; half++) parts.scales[i].scale[half] = load_floats(group->scale[half] + at);
            parts.scales[i].minimum = load_floats(group->minimum + at);
        }
        return parts;
    }
    const QuantizedLayout layout = layout_of(type);
    const char *head = work->panel + head_offset(layout, g), *group = work->panel + group_offset(layout, g);
    for (int line = 0; line < layout.group_bytes; line += 64) __builtin_prefetch(group + INT8_PREFETCH_BYTES + line);
    parts.codes = group + layout.scale_bytes + v * VECTOR_BYTES;
#pragma GCC unroll 2
    for (int i = 0; i < INT8_VECTORS; i++) parts.scales[i] = load_scales(head, group, v + i, type);
    return parts;
}

/* Sum the products of steps [first, last) of a group. */
INLINE void sum_steps(Signed sums[INT8_ROWS][INT8_VECTORS], const GroupParts *parts, const Int8Work *work,
                      const int64_t block, const int half, const int rows, const int type, const int is_unpacked) {
    const int count = type == Q6_K ? 4 : 8, zero_bits = is_unpacked ? work->zero_bits : zero_bits_of(type);
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++) {
        const Int8Block *x = work->x + row * work->x_stride + block;
        const int32_t sum = type != Q6_K ? x->sum_of_codes : half ? x->sum_of_codes - x->sum_of_first : x->sum_of_first;
        const Signed zeros = has_minimum(type) ? (Signed){0} : -((Signed)all_words((uint32_t)sum) << zero_bits);
#pragma GCC unroll 2
        for (int i = 0; i < INT8_VECTORS; i++) sums[row][i] = zeros;
    }
#pragma GCC unroll 8
    for (int step = 0; step < count; step++) {
        const int s = half * count + step;
        Words codes[INT8_VECTORS];
#pragma GCC unroll 2
        for (int i = 0; i < INT8_VECTORS; i++)
            codes[i] = is_unpacked ? load_words(parts->codes + s * ROW_BYTES + i * VECTOR_BYTES)
                                   : codes_of_step(parts->codes, i, s, type);
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++) {
            uint32_t x;
            memcpy(&x, work->x[row * work->x_stride + block].codes + s * 4, sizeof x);
#pragma GCC unroll 2
            for (int i = 0; i < INT8_VECTORS; i++) sums[row][i] = add_products(sums[row][i], codes[i], x, type == Q8_0);
        }
    }
}

/* Add the products of one half of a group (of Q6_K; of other types of all of it), scaled, to values. */
INLINE void add_half(Floats values[INT8_ROWS][INT8_VECTORS], const GroupParts *parts, const Int8Work *work,
                     const int64_t block, const int half, const int rows, const int type, const int is_unpacked) {
    Signed sums[INT8_ROWS][INT8_VECTORS];
    sum_steps(sums, parts, work, block, half, rows, type, is_unpacked);
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int i = 0; i < INT8_VECTORS; i++) {
            const Floats value = __builtin_convertvector(sums[row][i], Floats) * parts->scales[i].scale[half];
            values[row][i] = half ? values[row][i] + value : value;
        }
}

/* Add a group's values to the rows' results. */
INLINE void multiply_group(Floats out[INT8_ROWS][INT8_VECTORS], const Int8Work *work, const int64_t g, const int v,
                           const int rows, const int type, const int is_unpacked) {
    const GroupParts parts = parts_of_group(work, g, v, type, is_unpacked);
    const int64_t block = g - work->first;
    Floats values[INT8_ROWS][INT8_VECTORS];
    add_half(values, &parts, work, block, 0, rows, type, is_unpacked);
    if (type == Q6_K) add_half(values, &parts, work, block, 1, rows, type, is_unpacked);
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++) {
        const Int8Block *x = work->x + row * work->x_stride + block;
        const Floats sum = all_floats(x->sum), scale = all_floats(x->scale);
#pragma GCC unroll 2
        for (int i = 0; i < INT8_VECTORS; i++) {
            if (has_minimum(type)) values[row][i] = values[row][i] + sum * parts.scales[i].minimum;
            out[row][i] = out[row][i] + values[row][i] * scale;
        }
    }
}

INLINE void multiply_groups(const Int8Work *work, const int rows, const int type, const int is_unpacked) {
    for (int v = 0; v < PANEL_VECTORS; v += INT8_VECTORS) {
        Floats out[INT8_ROWS][INT8_VECTORS];
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
            for (int i = 0; i < INT8_VECTORS; i++)
                out[row][i] = load_floats(work->out + row * PANEL_COLUMNS + (v + i) * LANES);
#pragma GCC unroll 1
        for (int64_t g = work->first; g < work->last; g++) multiply_group(out, work, g, v, rows, type, is_unpacked);
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
            for (int i = 0; i < INT8_VECTORS; i++)
                store_floats(work->out + row * PANEL_COLUMNS + (v + i) * LANES, out[row][i]);
    }
}

#endif
