/* The readers of GGUF blocks: a block's weights as float32, each product and sum rounded by itself. */
#ifndef BLOCK_READERS_H
#define BLOCK_READERS_H

#include "dequantize.h"
#include "vectors.h"

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

INLINE void read_q8_0(const uint8_t *block, float *out) {
    const float scale = half_at(block, 0);
    for (int i = 0; i < SMALL; i++) out[i] = (float)(int8_t)block[2 + i] * scale;
}

INLINE void read_q4_0(const uint8_t *block, float *out) {
    const float scale = half_at(block, 0);
    for (int i = 0; i < SMALL / 2; i++) {
        out[i] = (float)((block[2 + i] & 15) - 8) * scale;
        out[SMALL / 2 + i] = (float)((block[2 + i] >> 4) - 8) * scale;
    }
}

INLINE void read_q4_1(const uint8_t *block, float *out) {
    const float scale = half_at(block, 0), minimum = half_at(block, 2);
    for (int i = 0; i < SMALL / 2; i++) {
        out[i] = (float)(block[4 + i] & 15) * scale + minimum;
        out[SMALL / 2 + i] = (float)(block[4 + i] >> 4) * scale + minimum;
    }
}

INLINE void read_q5_0(const uint8_t *block, float *out) {
    const float scale = half_at(block, 0);
    const uint32_t fifth = fifth_bits_at(block, 2);
    for (int i = 0; i < SMALL / 2; i++) {
        out[i] = (float)((int)((block[6 + i] & 15) | (fifth >> i & 1) << 4) - 16) * scale;
        out[SMALL / 2 + i] = (float)((int)(block[6 + i] >> 4 | (fifth >> (i + 16) & 1) << 4) - 16) * scale;
    }
}

INLINE void read_q5_1(const uint8_t *block, float *out) {
    const float scale = half_at(block, 0), minimum = half_at(block, 2);
    const uint32_t fifth = fifth_bits_at(block, 4);
    for (int i = 0; i < SMALL / 2; i++) {
        out[i] = (float)((block[8 + i] & 15) | (fifth >> i & 1) << 4) * scale + minimum;
        out[SMALL / 2 + i] = (float)(block[8 + i] >> 4 | (fifth >> (i + 16) & 1) << 4) * scale + minimum;
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

/* The same, times the block's. */
INLINE void scale_of_group(const uint8_t *block, int group, float *scale, float *minimum) {
    int s, m;
    codes_of_scales(block, group, &s, &m);
    *scale = (float)s * half_at(block, 0);
    *minimum = (float)m * half_at(block, 2);
}

INLINE void read_q4_k(const uint8_t *block, float *out) {
    for (int group = 0; group < 8; group++) {
        const uint8_t *nibbles = block + 16 + group / 2 * 32;
        const int shift = group % 2 * 4;
        float scale, minimum;
        scale_of_group(block, group, &scale, &minimum);
        for (int i = 0; i < 32; i++) out[group * 32 + i] = (float)(nibbles[i] >> shift & 15) * scale - minimum;
    }
}

INLINE void read_q5_k(const uint8_t *block, float *out) {
    for (int group = 0; group < 8; group++) {
        const uint8_t *fifth = block + 16, *nibbles = block + 48 + group / 2 * 32;
        const int shift = group % 2 * 4;
        float scale, minimum;
        scale_of_group(block, group, &scale, &minimum);
        for (int i = 0; i < 32; i++) {
            int number = (nibbles[i] >> shift & 15) | (fifth[i] >> group & 1) << 4;
            out[group * 32 + i] = (float)number * scale - minimum;
        }
    }
}

INLINE void read_q6_k(const uint8_t *block, float *out) {
    const float factor = half_at(block, 208);
    for (int group = 0; group < 8; group++) { /* 32 weights; each half has its own scale */
        const int half = group / 4, part = group % 4;
        const uint8_t *low = block + half * 64 + part % 2 * 32, *high = block + 128 + half * 32;
        const int8_t *scales = (const int8_t *)block + 192 + group * 2;
        const float scale[2] = {(float)scales[0] * factor, (float)scales[1] * factor};
        for (int i = 0; i < 32; i++) {
            int number = (low[i] >> part / 2 * 4 & 15) | (high[i] >> part * 2 & 3) << 4;
            out[group * 32 + i] = (float)(number - 32) * scale[i / 16];
        }
    }
}

/* Weights and bytes of a block. */
static inline int block_weights(int32_t type) { return type < Q4_K ? SMALL : LARGE; }

static inline int block_bytes(int32_t type) {
    static const uint8_t BYTES[] = {34, 18, 20, 22, 24, 144, 176, 210};
    return BYTES[type];
}

/* Read the weights of a block of any type. */
static inline void read_block(const uint8_t *block, int32_t type, float *out) {
    switch (type) {
    case Q8_0: read_q8_0(block, out); break;
    case Q4_0: read_q4_0(block, out); break;
    case Q4_1: read_q4_1(block, out); break;
    case Q5_0: read_q5_0(block, out); break;
    case Q5_1: read_q5_1(block, out); break;
    case Q4_K: read_q4_k(block, out); break;
    case Q5_K: read_q5_k(block, out); break;
    case Q6_K: read_q6_k(block, out); break;
    }
}

#endif
