/* The layout of the KV cache.
 *
 * A unit is four bytes: a pair of bfloat16 (adjacent along the axis that a product sums over) or one float32. A layer
 * is [block][K or V][head][chunk][padded head_dim * 16 numbers]; a chunk is 16 tokens. K of a chunk is [pair of
 * dimensions][token] units, V is [pair of tokens][dimension] units. So both are right operands of their products
 * without a copy. Blocks of fewer than 16 tokens contain plain rows [token][dimension]; find_chunk() makes chunks of
 * them.
 *
 * A quantized cache has a byte for each number, in the same order, and 16 scales after each chunk; after the rows of a
 * small block as many scales as tokens (cache_codes.h). find_chunk() makes chunks of numbers of them.
 *
 * A cache of one side has K only: of a latent vector and a rotated part (latent.h), for all query heads. V is the latent
 * vector; values_of_keys() makes chunks of V of those of K. */
#ifndef CACHE_LAYOUT_H
#define CACHE_LAYOUT_H

#include "attention/cache_codes.h"

INLINE int padded_dim(int head_dim) { return (head_dim + 15) / 16 * 16; }

INLINE int number_bytes(const CacheShape *shape) { return shape->dtype == BFLOAT16 ? 2 : 4; }

INLINE size_t chunk_bytes(const CacheShape *shape) {
    return (size_t)CHUNK * padded_dim(shape->head_dim) * number_bytes(shape);
}

INLINE size_t value_chunk_bytes(const CacheShape *shape) {
    return (size_t)CHUNK * padded_dim(shape->value_dim) * number_bytes(shape);
}

/* Bytes that the cache has for `tokens` tokens of a head: of a chunk, or of a block. */
INLINE size_t stored_bytes(const CacheShape *shape, int tokens) {
    return (size_t)tokens * shape->token_bytes;
}

/* Byte offset of one head's K (is_value 0) or V (1) of a block within the layer. */
INLINE size_t head_offset(const CacheShape *shape, int64_t block, int is_value, int head) {
    const size_t place = (size_t)is_value * shape->num_kv_heads + head;
    return (size_t)block * shape->block_bytes + place * stored_bytes(shape, shape->block_size);
}

/* Copy one token's row of head_dim numbers, K or V of a head, into a chunk. */
INLINE void put_in_chunk(const CacheShape *shape, void *chunk, int is_value, int token, const void *row) {
    const int bytes = number_bytes(shape), width = padded_dim(shape->head_dim);
    if (!is_value) {
        for (int unit = 0; unit < shape->head_dim * bytes / 4; unit++)
            memcpy((char *)chunk + (unit * CHUNK + token) * 4, (const char *)row + unit * 4, 4);
    } else if (shape->dtype == FLOAT32) {
        memcpy((float *)chunk + token * width, row, shape->head_dim * sizeof(float));
    } else {
        uint16_t *pairs = (uint16_t *)chunk + token / 2 * width * 2;
        store_in_pairs(pairs, token % 2, row, shape->head_dim);
    }
}

/* Write K of all tokens of a chunk; the rows are `stride` bytes apart. */
INLINE void put_keys(void *chunk, const CacheShape *shape, const char *rows, size_t stride) {
    const int units = shape->head_dim * number_bytes(shape) / 4;
    int unit = 0;
    for (; unit + LANES <= units; unit += LANES)
        for (int token = 0; token < CHUNK; token += LANES) {
            Floats square[LANES]; /* units, not converted */
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) square[i] = load_floats(rows + (token + i) * stride + unit * 4);
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) store_floats((float *)chunk + (unit + i) * CHUNK + token, square[i]);
        }
    for (; unit < units; unit++)
        for (int token = 0; token < CHUNK; token++)
            memcpy((float *)chunk + unit * CHUNK + token, rows + token * stride + unit * 4, 4);
}

/* Write V of all tokens of a chunk; the rows are `stride` bytes apart. */
INLINE void put_values(void *chunk, const CacheShape *shape, const char *rows, size_t stride) {
    const int head_dim = shape->head_dim, width = padded_dim(head_dim);
    if (shape->dtype == FLOAT32) {
        for (int token = 0; token < CHUNK; token++)
            memcpy((float *)chunk + token * width, rows + token * stride, head_dim * sizeof(float));
        return;
    }
    for (int token = 0; token < CHUNK; token += 2, rows += 2 * stride) {
        const uint16_t *first = (const uint16_t *)rows, *second = (const uint16_t *)(rows + stride);
        uint32_t *units = (uint32_t *)chunk + token / 2 * width;
        int dim = 0;
        for (; dim + LANES <= head_dim; dim += LANES) {
            const Words low = (Words)load_bfloat16(first + dim) >> 16, high = (Words)load_bfloat16(second + dim);
            store_floats(units + dim, (Floats)(low | high));
        }
        for (; dim < head_dim; dim++) units[dim] = first[dim] | (uint32_t)second[dim] << 16;
    }
}

/* Write V of a chunk to room, from K of the same tokens: a cache of one side. */
static __attribute__((noinline)) const char *values_of_keys(const CacheShape *shape, const char *keys, char *room) {
    const int width = padded_dim(shape->value_dim), is_float = shape->dtype == FLOAT32;
    for (int unit = 0; unit < (is_float ? width : width / 2); unit += LANES) {
        uint32_t rows[CHUNK * LANES] __attribute__((aligned(64))); /* [token][LANES] units */
        for (int token = 0; token < CHUNK; token += LANES) {
            Floats square[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) square[i] = load_floats(keys + ((unit + i) * CHUNK + token) * 4);
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) store_floats(rows + (token + i) * LANES, square[i]);
        }
        if (is_float) {
            for (int token = 0; token < CHUNK; token++)
                memcpy(room + (token * width + unit) * 4, rows + token * LANES, LANES * 4);
            continue;
        }
        for (int token = 0; token < CHUNK; token += 2) {
            const uint32_t *first = rows + token * LANES, *second = first + LANES;
            uint32_t *out = (uint32_t *)room + token / 2 * width + unit * 2;
            for (int i = 0; i < LANES; i++) {
                out[2 * i] = (first[i] & 0xffff) | second[i] << 16;
                out[2 * i + 1] = first[i] >> 16 | (second[i] & 0xffff0000);
            }
        }
    }
    return room;
}

/* Quantize one token's row and store it at `token` of a chunk, or of a small block's rows. */
static __attribute__((noinline)) void put_codes(const CacheShape *shape, char *place, int is_value, int token,
                                                const void *row) {
    const int width = padded_dim(shape->head_dim), pair = 4 / number_bytes(shape);
    const int tokens = shape->block_size < CHUNK ? shape->block_size : CHUNK;
    int8_t codes[MAX_HEAD_DIM + LANES], *to = (int8_t *)place;
    const float scale = quantize_row(row, shape->head_dim, codes, shape->dtype);
    memcpy(place + tokens * width + token * sizeof scale, &scale, sizeof scale);
    if (tokens < CHUNK)
        memcpy(to + token * width, codes, shape->head_dim);
    else if (is_value)
        put_value_codes(to + token / pair * width * pair + token % pair, codes, shape->head_dim, pair);
    else
        put_key_codes(to + token * pair, codes, shape->head_dim, pair);
}

/* Store one head's row of the token at `offset` in its block. */
INLINE void put_in_cache(const CacheShape *shape, void *layer, int64_t block, int offset, int is_value, int head,
                         const void *row) {
    char *place = (char *)layer + head_offset(shape, block, is_value, head);
    const int is_chunked = shape->block_size >= CHUNK, token = is_chunked ? offset % CHUNK : offset;
    if (is_chunked) place += offset / CHUNK * stored_bytes(shape, CHUNK);
    if (shape->is_quantized)
        put_codes(shape, place, is_value, token, row);
    else if (is_chunked)
        put_in_chunk(shape, place, is_value, token, row);
    else
        memcpy(place + (size_t)offset * padded_dim(shape->head_dim) * number_bytes(shape), row,
               shape->head_dim * number_bytes(shape));
}

/* Write the numbers of a quantized chunk to room. */
static __attribute__((noinline)) const char *decoded_chunk(const CacheShape *shape, const char *chunk, int is_value,
                                                           char *room) {
    const int width = padded_dim(shape->head_dim);
    const float *scales = (const float *)(chunk + CHUNK * width);
    if (shape->dtype == FLOAT32)
        decode_chunk((const int8_t *)chunk, scales, is_value, shape->head_dim, width, room, FLOAT32);
    else
        decode_chunk((const int8_t *)chunk, scales, is_value, shape->head_dim, width, room, BFLOAT16);
    return room;
}

/* Write row `token` of a small block, as numbers, to `token_in_chunk` of a chunk. */
static void put_stored_row(const CacheShape *shape, const char *block, int token, int is_value, char *chunk,
                           int token_in_chunk) {
    const int width = padded_dim(shape->head_dim);
    if (!shape->is_quantized) {
        const char *row = block + (size_t)token * width * number_bytes(shape);
        put_in_chunk(shape, chunk, is_value, token_in_chunk, row);
        return;
    }
    char row[MAX_HEAD_DIM * 4] __attribute__((aligned(64)));
    float scale;
    memcpy(&scale, block + shape->block_size * width + token * sizeof scale, sizeof scale);
    if (shape->dtype == FLOAT32)
        decode_row(block + token * width, scale, width, row, FLOAT32);
    else
        decode_row(block + token * width, scale, width, row, BFLOAT16);
    put_in_chunk(shape, chunk, is_value, token_in_chunk, row);
}

/* Return the address of the chunk that contains the tokens from `first` on; blocks have 16 tokens or more. */
INLINE const char *stored_chunk(const CacheShape *shape, const void *layer, const int32_t *table, int is_value,
                                int head, int first) {
    return (const char *)layer + head_offset(shape, table[first / shape->block_size], is_value, head) +
           first % shape->block_size / CHUNK * stored_bytes(shape, CHUNK);
}

/* Return the chunk of tokens from `first` on (a multiple of 16) of a context with this block table: in the cache, or
 * gathered into room. The table must cover token `last`; room is not written for tokens after it. */
INLINE const char *find_chunk(const CacheShape *shape, const void *layer, const int32_t *table, int is_value,
                              int head, int first, int last, char *room) {
    int size = shape->block_size;
    if (size >= CHUNK) {
        const char *chunk = stored_chunk(shape, layer, table, is_value, head, first);
        return shape->is_quantized ? decoded_chunk(shape, chunk, is_value, room) : chunk;
    }
    for (int token = first; token <= last && token < first + CHUNK; token++) {
        const char *block = (const char *)layer + head_offset(shape, table[token / size], is_value, head);
        put_stored_row(shape, block, token % size, is_value, room, token - first);
    }
    return room;
}

#endif
