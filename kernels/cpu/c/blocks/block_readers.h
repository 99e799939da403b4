/* The readers of GGUF blocks: a block's weights as float32, with each product and sum rounded separately. */
#ifndef BLOCK_READERS_H
#define BLOCK_READERS_H

#include "blocks/dequantize.h"
#include "math/vector_math.h"

enum { SMALL = 32, LARGE = 256 }; /* weights in a block */

INLINE float half_at(const uint8_t *block, int64_t offset) {
    uint16_t bits;
    memcpy(&bits, block + offset, sizeof bits);
    return float_of_float16(bits);
}

INLINE uint32_t fifth_bits_at(const uint8_t *block, int64_t offset) {
    uint32_t bits;
    memcpy(&bits, block + offset, sizeof bits);
    return bits;
}

/* Read the lower halves of `count` bytes, and after them the upper ones. */
INLINE void read_nibbles(const uint8_t *bytes, const int count, uint8_t *codes) {
    for (int i = 0; i < count; i++) codes[i] = bytes[i] & 15;
    for (int i = 0; i < count; i++) codes[count + i] = bytes[i] >> 4;
}

/* Read the codes of a Q6_K block. */
INLINE void read_codes_of_q6_k(const uint8_t *block, uint8_t *codes) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++, codes += 128)
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            const uint8_t *low = block + half * 64 + part * 32, *high = block + 128 + half * 32;
            for (int i = 0; i < 32; i++) codes[part * 32 + i] = (low[i] & 15) | (high[i] >> part * 2 & 3) << 4;
            for (int i = 0; i < 32; i++)
                codes[64 + part * 32 + i] = low[i] >> 4 | (high[i] >> (4 + part * 2) & 3) << 4;
        }
}

/* Read a block's codes, one byte each. */
INLINE void read_codes(const uint8_t *block, const int32_t type, uint8_t *codes) {
    const int first = type == Q4_0 ? 2 : type == Q4_1 ? 4 : type == Q5_0 ? 6 : 8; /* of SMALL blocks */
    if (type == Q8_0) {
        memcpy(codes, block + 2, SMALL);
    } else if (type == Q6_K) {
        read_codes_of_q6_k(block, codes);
    } else if (type == Q4_K || type == Q5_K) {
        const uint8_t *nibbles = block + (type == Q4_K ? 16 : 48);
        for (int i = 0; i < LARGE / 64; i++) read_nibbles(nibbles + i * 32, 32, codes + i * 64);
        if (type == Q4_K) return;
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++)
            for (int i = 0; i < 32; i++) codes[g * 32 + i] |= (block[16 + i] >> g & 1) << 4;
    } else {
        read_nibbles(block + first, 16, codes);
        if (type == Q5_0 || type == Q5_1)
            for (int i = 0; i < SMALL; i++) codes[i] |= (fifth_bits_at(block, first - 4) >> i & 1) << 4;
    }
}

/* Read the 6-bit scale and minimum of 32-weight group `group` (0 to 7) of a Q4_K or Q5_K block. */
INLINE void codes_of_scales(const uint8_t *block, int group, int *scale, int *minimum) {
    const uint8_t *first = block + 4, *last = block + 12;
    const int i = group & 3;
    *scale = first[i] & 63, *minimum = first[4 + i] & 63;
    if (group >= 4) {
        *scale = (last[i] & 15) | (first[i] >> 6) << 4;
        *minimum = last[i] >> 4 | (first[4 + i] >> 6) << 4;
    }
}

/* Write the values of `count` codes: (code - zero) * scale, plus a minimum if there is one. */
INLINE void write_numbers(const uint8_t *codes, const int count, const int zero, float scale, const int has_minimum,
                          float minimum, float *out) {
    for (int i = 0; i < count; i += LANES) {
        Floats numbers = (load_bytes(codes + i) - (float)zero) * scale;
        if (has_minimum) numbers = numbers + minimum;
        store_floats(out + i, numbers);
    }
}

INLINE void read_q8_0(const uint8_t *block, float *out) {
    const float scale = half_at(block, 0);
    for (int i = 0; i < SMALL; i += LANES) store_floats(out + i, load_signed_bytes(block + 2 + i) * scale);
}

/* Read a block of Q4_0, Q4_1, Q5_0 or Q5_1. */
INLINE void read_small(const uint8_t *block, float *out, const int32_t type) {
    const int has_minimum = type == Q4_1 || type == Q5_1;
    uint8_t codes[SMALL];
    read_codes(block, type, codes);
    write_numbers(codes, SMALL, type == Q4_0 ? 8 : type == Q5_0 ? 16 : 0, half_at(block, 0), has_minimum,
                  has_minimum ? half_at(block, 2) : 0, out);
}

/* Read a block of Q4_K or Q5_K. */
INLINE void read_large(const uint8_t *block, float *out, const int32_t type) {
    const float scale = half_at(block, 0), minimum = half_at(block, 2);
    uint8_t codes[LARGE];
    read_codes(block, type, codes);
    for (int group = 0; group < 8; group++) {
        int s, m;
        codes_of_scales(block, group, &s, &m);
        write_numbers(codes + group * 32, 32, 0, (float)s * scale, 1, -((float)m * minimum), out + group * 32);
    }
}

INLINE void read_q6_k(const uint8_t *block, float *out) {
    const float factor = half_at(block, 208);
    const int8_t *scales = (const int8_t *)block + 192; /* of each 16 weights */
    uint8_t codes[LARGE];
    read_codes(block, Q6_K, codes);
    for (int i = 0; i < LARGE / 16; i++)
        write_numbers(codes + i * 16, 16, 32, (float)scales[i] * factor, 0, 0, out + i * 16);
}

/* Weights and bytes of a block. */
static inline int block_weights(int32_t type) { return type < Q4_K ? SMALL : LARGE; }

static inline int block_bytes(int32_t type) {
    static const uint8_t BYTES[] = {34, 18, 20, 22, 24, 144, 176, 210};
    return BYTES[type];
}

/* Read the weights of a block. */
INLINE void read_block_of(const uint8_t *block, float *out, const int32_t type) {
    if (type == Q8_0)
        read_q8_0(block, out);
    else if (type == Q6_K)
        read_q6_k(block, out);
    else if (type == Q4_K || type == Q5_K)
        read_large(block, out, type);
    else
        read_small(block, out, type);
}

/* Read the weights of a block of any type. */
static inline void read_block(const uint8_t *block, int32_t type, float *out) {
    switch (type) {
    case Q8_0: read_block_of(block, out, Q8_0); break;
    case Q4_0: read_block_of(block, out, Q4_0); break;
    case Q4_1: read_block_of(block, out, Q4_1); break;
    case Q5_0: read_block_of(block, out, Q5_0); break;
    case Q5_1: read_block_of(block, out, Q5_1); break;
    case Q4_K: read_block_of(block, out, Q4_K); break;
    case Q5_K: read_block_of(block, out, Q5_K); break;
    case Q6_K: read_block_of(block, out, Q6_K); break;
    }
}

#endif
