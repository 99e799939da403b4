/* The readers of blocks: a block's codes and scales, and its weights as float32, each product and sum rounded by
 * itself. Nothing is read outside a block or a table, whatever a block's bytes are.
 */
#ifndef BLOCK_READERS_H
#define BLOCK_READERS_H

#include "blocks/dequantize.h"
#include "math/vector_math.h"

enum { PARTS = 16 };                                                /* most scales of a block */
enum { LOOKED_UP = VECTOR_BYTES < GROUP ? VECTOR_BYTES : GROUP }; /* codes that are looked up at once */

/* A block's scales as they are stored. */
typedef struct {
    uint16_t factor, factor_of_minima; /* float16; with FLOATS the scale and the minimum */
    float wide; /* with WIDE, the scale; with DIVIDED, what scales are divided by */
    uint8_t scales[PARTS], minima[PARTS];
} StoredScales;

INLINE uint16_t half_word_at(const uint8_t *block, int64_t offset) {
    uint16_t bits;
    memcpy(&bits, block + offset, sizeof bits);
    return bits;
}

INLINE uint32_t word_at(const uint8_t *block, int64_t offset) {
    uint32_t bits;
    memcpy(&bits, block + offset, sizeof bits);
    return bits;
}

/* Return half byte i of `bytes`, the low half of each byte first. */
INLINE int nibble_at(const uint8_t *bytes, int i) { return bytes[i / 2] >> i % 2 * 4 & 15; }

/* Read the lower halves of `count` bytes, and after them the upper ones. */
INLINE void read_nibbles(const uint8_t *bytes, const int count, uint8_t *codes) {
    for (int i = 0; i < count; i++) codes[i] = bytes[i] & 15;
    for (int i = 0; i < count; i++) codes[count + i] = bytes[i] >> 4;
}

/* Read both halves of each of 32 bytes, the upper one first if `is_upper_first`. */
INLINE void read_neighbours(const uint8_t *bytes, const int is_upper_first, uint8_t *codes) {
    for (int i = 0; i < GROUP; i++) {
        codes[2 * i + is_upper_first] = bytes[i] & 15;
        codes[2 * i + 1 - is_upper_first] = bytes[i] >> 4;
    }
}

/* Read the four 2-bit numbers of each of 64 bytes: of the first 32 the lowest bits, then the next ones. */
INLINE void read_quarters(const uint8_t *bytes, uint8_t *codes) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++, bytes += 32)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++, codes += 32)
            for (int i = 0; i < 32; i++) codes[i] = bytes[i] >> part * 2 & 3;
}

/* Add one bit to each of 256 codes: bit g of byte i belongs to code 32 g + i. */
INLINE void add_bits(const uint8_t *bytes, const int place, uint8_t *codes) {
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++)
        for (int i = 0; i < 32; i++) codes[g * 32 + i] |= (bytes[i] >> g & 1) << place;
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

/* Read digits of a TQ1_0 block: of each of `count` bytes the first one, then the next ones. A byte is a fraction of 256;
 * three times that has the next digit as its whole part. */
INLINE void read_digits(const uint8_t *bytes, const int count, const int digits, uint8_t *codes) {
    static const uint8_t POWERS[] = {1, 3, 9, 27, 81};
    for (int digit = 0; digit < digits; digit++, codes += count)
        for (int i = 0; i < count; i++) codes[i] = (uint8_t)(bytes[i] * POWERS[digit]) * 3 >> 8;
}

/* Return eight bytes, 8 for each bit of `signs` that is set, from the lowest one on. */
INLINE uint64_t spread_signs(const uint32_t signs) {
    const uint64_t bits = (signs & 255) * 0x0101010101010101 & 0x8040201008040201;
    return (bits + 0x7f7f7f7f7f7f7f7f) >> 4 & 0x0808080808080808;
}

/* Return signs of which seven bits are given: the number of those set is even. */
INLINE uint32_t eighth_sign(uint32_t seven) { return seven | (uint32_t)__builtin_parity(seven) << 7; }

/* Return the digits of a row of eight, or of two rows of four. */
INLINE uint64_t row_of_eight(const int rows, uint32_t number) {
    uint64_t digits;
    memcpy(&digits, block_grids + rows + number * 8, sizeof digits);
    return digits;
}

INLINE uint64_t rows_of_four(const int rows, uint32_t first, uint32_t second) {
    uint32_t digits[2];
    memcpy(&digits[0], block_grids + rows + first * 4, sizeof *digits);
    memcpy(&digits[1], block_grids + rows + second * 4, sizeof *digits);
    return digits[0] | (uint64_t)digits[1] << 32;
}

/* Return the codes of weights 8 i to 8 i + 7 of a block with a grid: digits, and 8 for a sign. No row is outside its
 * grid: the grids have 2 to the power of their numbers' bits rows. */
INLINE uint64_t eight_codes(const uint8_t *block, const int i, const int32_t type) {
    const int part = i / 4, place = i % 4;
    const uint8_t *index = block + 2 + i, *pair = block + 2 + 2 * i;
    if (type == IQ2_XXS)
        return row_of_eight(ROWS_OF_IQ2_XXS, block[2 + 8 * part + place]) |
               spread_signs(eighth_sign(word_at(block, 6 + 8 * part) >> 7 * place & 127));
    if (type == IQ2_XS)
        return row_of_eight(ROWS_OF_IQ2_XS, half_word_at(pair, 0) & 511) |
               spread_signs(eighth_sign(half_word_at(pair, 0) >> 9));
    if (type == IQ2_S)
        return row_of_eight(ROWS_OF_IQ2_S, *index | (block[66 + part] >> 2 * place & 3) << 8) |
               spread_signs(block[34 + i]);
    if (type == IQ3_XXS)
        return rows_of_four(ROWS_OF_IQ3_XXS, pair[0], pair[1]) |
               spread_signs(eighth_sign(word_at(block, 66 + 4 * part) >> 7 * place & 127));
    if (type == IQ3_S) {
        const uint32_t ninth = block[66 + part] >> 2 * place;
        return rows_of_four(ROWS_OF_IQ3_S, pair[0] | (ninth & 1) << 8, pair[1] | (ninth & 2) << 7) |
               spread_signs(block[74 + i]);
    }
    if (type == IQ1_S) {
        const uint32_t word = half_word_at(block, 34 + 2 * part);
        return row_of_eight(ROWS_OF_IQ1, *index | (word >> 3 * place & 7) << 8) | spread_signs(word >> 15 ? 255 : 0);
    }
    const uint32_t high = nibble_at(block + 32, i); /* IQ1_M */
    return row_of_eight(ROWS_OF_IQ1, block[i] | (high & 7) << 8) | spread_signs(high & 8 ? 255 : 0);
}

/* Read a block's codes, one byte each. Those with levels are not looked up, and those of Q8_0 have a sign. */
INLINE void read_codes(const uint8_t *block, const int32_t type, uint8_t *codes) {
    switch (type) {
    case Q8_0: memcpy(codes, block + 2, GROUP); return;
    case Q4_0:
    case IQ4_NL: read_nibbles(block + 2, 16, codes); return;
    case Q4_1: read_nibbles(block + 4, 16, codes); return;
    case MXFP4: read_nibbles(block + 1, 16, codes); return;
    case FP8: memcpy(codes, block + 4, 2 * GROUP); return;
    case NF4:
    case BNB_FP4: read_neighbours(block + 4, 1, codes); return;
    case NVFP4_F32: read_neighbours(block + 8, 0, codes); return;
    case Q5_0:
    case Q5_1: {
        const int first = type == Q5_0 ? 2 : 4;
        const uint32_t fifth = word_at(block, first);
        read_nibbles(block + first + 4, 16, codes);
        for (int i = 0; i < GROUP; i++) codes[i] |= (fifth >> i & 1) << 4;
        return;
    }
    case NVFP4:
        for (int i = 0; i < 4; i++) read_nibbles(block + 4 + i * 8, 8, codes + i * 16);
        return;
    case IQ4_XS:
        for (int i = 0; i < 8; i++) read_nibbles(block + 8 + i * 16, 16, codes + i * 32);
        return;
    case Q4_K:
    case Q5_K:
        for (int i = 0; i < 4; i++) read_nibbles(block + (type == Q4_K ? 16 : 48) + i * 32, 32, codes + i * 64);
        if (type == Q5_K) add_bits(block + 16, 4, codes);
        return;
    case Q6_K: read_codes_of_q6_k(block, codes); return;
    case Q2_K: read_quarters(block + 16, codes); return;
    case Q3_K:
        read_quarters(block + 32, codes);
        add_bits(block, 2, codes);
        return;
    case TQ2_0: read_quarters(block, codes); return;
    case TQ1_0:
        read_digits(block, 32, 5, codes);
        read_digits(block + 32, 16, 5, codes + 160);
        read_digits(block + 48, 4, 4, codes + 240);
        return;
    default:
        for (int i = 0; i < LARGE / 8; i++) {
            const uint64_t eight = eight_codes(block, i, type);
            memcpy(codes + 8 * i, &eight, sizeof eight);
        }
    }
}

/* Read the 6-bit scale and minimum of group `g` (0 to 7) of a Q4_K or Q5_K block. */
INLINE void read_six_bits(const uint8_t *block, const int g, StoredScales *to) {
    const uint8_t *first = block + 4, *last = block + 12;
    const int i = g & 3;
    to->scales[g] = first[i] & 63, to->minima[g] = first[4 + i] & 63;
    if (g >= 4) {
        to->scales[g] = (last[i] & 15) | (first[i] >> 6) << 4;
        to->minima[g] = last[i] >> 4 | (first[4 + i] >> 6) << 4;
    }
}

/* Return the number s that scale `part` of a block with a grid is made of. */
INLINE int grid_scale(const uint8_t *block, const int part, const int32_t type) {
    switch (type) {
    case IQ2_XXS: return (int)(word_at(block, 6 + part / 2 * 8) >> 28);
    case IQ2_XS: return nibble_at(block + 66, part);
    case IQ2_S: return nibble_at(block + 74, part);
    case IQ3_XXS: return (int)(word_at(block, 66 + part / 2 * 4) >> 28);
    case IQ3_S: return nibble_at(block + 106, part / 2);
    case IQ1_S: return half_word_at(block, 34 + part / 2 * 2) >> 12 & 7;
    default: return half_word_at(block, 48 + part / 4 * 2) >> part % 4 * 3 & 7; /* IQ1_M */
    }
}

/* Return the scale of an IQ1_M block: a quarter in the upper bits of each of four words. */
INLINE uint16_t scale_of_iq1_m(const uint8_t *block) {
    uint32_t bits = 0;
    for (int i = 0; i < 4; i++) bits |= (uint32_t)(half_word_at(block, 48 + 2 * i) >> 12) << 4 * i;
    return (uint16_t)bits;
}

/* Read the scales of a block of a K type or of IQ4_XS, and its factors. */
INLINE void read_large_scales(const uint8_t *block, const int32_t type, StoredScales *to) {
    const int factor = type == Q6_K ? 208 : type == Q3_K ? 108 : type == Q2_K ? 80 : 0;
    to->factor = half_word_at(block, factor);
    if (type == Q6_K) {
        memcpy(to->scales, block + 192, 16);
    } else if (type == Q3_K) {
        for (int i = 0; i < 16; i++) {
            const int low = block[96 + i % 8] >> i / 8 * 4 & 15, high = block[104 + i % 4] >> i / 4 * 2 & 3;
            to->scales[i] = (uint8_t)((low | high << 4) - 32);
        }
    } else if (type == IQ4_XS) {
        for (int i = 0; i < 8; i++)
            to->scales[i] = (uint8_t)((nibble_at(block + 4, i) | (half_word_at(block, 2) >> 2 * i & 3) << 4) - 32);
    } else {
        to->factor_of_minima = half_word_at(block, factor + 2);
        if (type == Q2_K) memcpy(to->scales, block, 16);
        for (int g = 0; type != Q2_K && g < 8; g++) read_six_bits(block, g, to);
    }
}

/* Read a block's scales. What a type does not have is not written. */
INLINE void read_scales(const uint8_t *block, const int32_t type, StoredScales *to) {
    switch (type) {
    case MXFP4: to->scales[0] = *block; return;
    case FP8:
    case NF4:
    case BNB_FP4: memcpy(&to->wide, block, sizeof to->wide); return;
    case NVFP4_F32:
        memcpy(&to->wide, block, sizeof to->wide);
        memcpy(to->scales, block + 4, 4);
        return;
    case NVFP4: /* seven bits count; and 0x7f, which is no number, is zero */
        for (int i = 0; i < 4; i++) to->scales[i] = block[i] == 0x7f ? 0 : block[i] & 0x7f;
        return;
    case TQ1_0: to->factor = half_word_at(block, 52); return;
    case TQ2_0: to->factor = half_word_at(block, 64); return;
    case Q2_K:
    case Q3_K:
    case Q4_K:
    case Q5_K:
    case Q6_K:
    case IQ4_XS: read_large_scales(block, type, to); return;
    default:
        to->factor = type == IQ1_M ? scale_of_iq1_m(block) : half_word_at(block, 0);
        if (type == Q4_1 || type == Q5_1) to->factor_of_minima = half_word_at(block, 2);
        for (int i = 0; type >= IQ2_XXS && i < PARTS; i++) to->scales[i] = (uint8_t)(2 * grid_scale(block, i, type) + 1);
    }
}

/* Return 2 ** (exponent - 128), which is below the least normal float32 for 0 and 1. */
INLINE float power_for_exponent(uint32_t exponent) {
    const uint32_t bits = exponent < 2 ? 0x200000u << exponent : (exponent - 1) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* Return scale `part` of a block. */
INLINE float scale_of(const StoredScales *from, const int part, const int32_t type) {
    const int code = from->scales[part];
    const float factor = float_of_float16(from->factor);
    switch (BLOCK_TYPES[type].scales) {
    case SIGNED: return (float)(int8_t)code * factor * BLOCK_TYPES[type].unit;
    case UNSIGNED: return (float)code * factor;
    case NIBBLES: return (float)(code & 15) * factor;
    case WIDE: return from->wide;
    case EXPONENTS: return power_for_exponent((uint32_t)code);
    case E4M3: return float_of_float16((uint16_t)(code << 7)) * 128.0f; /* its bias is 8 less; and a half */
    case DIVIDED: return float_of_float16((uint16_t)(code << 7)) * 128.0f / from->wide;
    default: return factor;
    }
}

/* Return what is added to the weights of a part. */
INLINE float minimum_of(const StoredScales *from, const int part, const int32_t type) {
    const float factor = float_of_float16(from->factor_of_minima);
    switch (BLOCK_TYPES[type].scales) {
    case UNSIGNED: return -((float)from->minima[part] * factor);
    case NIBBLES: return -((float)(from->scales[part] >> 4) * factor);
    default: return factor;
    }
}

/* Write what `count` codes stand for: (code - zero) * scale, plus a minimum if there is one. */
INLINE void write_numbers(const uint8_t *codes, const int count, const int zero, float scale, const int has_minimum,
                          float minimum, float *out) {
    for (int i = 0; i < count; i += LANES) {
        Floats numbers = (load_bytes(codes + i) - (float)zero) * scale;
        if (has_minimum) numbers = numbers + minimum;
        store_floats(out + i, numbers);
    }
}

/* Write what `count` bytes of E4M3 stand for, times a scale. */
INLINE void write_floats(const uint8_t *codes, const int count, float scale, float *out) {
    for (int i = 0; i < count; i += LANES) {
        const Words bytes = (Words)__builtin_convertvector(load_bytes(codes + i), Signed);
        const Words is_nan = (Words)((bytes & 0x7f) == 0x7f); /* all bits or none */
        const Floats numbers = float_bits_of_e4m3(bytes, 0) * 0x1p120f;
        store_floats(out + i, (Floats)((Words)numbers | (is_nan & 0x7fc00000)) * scale);
    }
}

/* Read the weights of a block. */
INLINE void read_block_of(const uint8_t *block, float *out, const int32_t type) {
    const BlockType traits = BLOCK_TYPES[type];
    const int width = traits.has_halves ? GROUP / 2 : GROUP, zero = traits.has_minimum ? 0 : 1 << traits.zero_bits;
    StoredScales scales;
    uint8_t codes[LARGE];
    read_scales(block, type, &scales);
    read_codes(block, type, codes);
    for (int i = 0; type == Q8_0 && i < GROUP; i++) codes[i] ^= 0x80;
    if (has_levels(type)) {
        const Table levels = load_table(LEVELS[traits.levels]);
        for (int i = 0; i < traits.weights; i += LOOKED_UP) {
            Words some = {0};
            memcpy(&some, codes + i, LOOKED_UP);
            some = look_up(levels, some);
            memcpy(codes + i, &some, LOOKED_UP);
        }
    }
    if (is_e4m3(type)) write_floats(codes, traits.weights, scales.wide, out);
    for (int i = 0; i < traits.weights && has_float_levels(type); i++)
        out[i] = float_levels(type)[codes[i]] * scales.wide;
    for (int part = 0; part < traits.weights / width && traits.levels < FLOATS_OF_E4M3; part++)
        write_numbers(codes + part * width, width, zero, scale_of(&scales, part, type), traits.has_minimum,
                      traits.has_minimum ? minimum_of(&scales, part, type) : 0, out + part * width);
}

#endif
