#include "rope.h"

#include "pool.h"
#include "row_math.h"

enum { MAX_HEAD_DIM = 4096 }; /* a head is rotated on the stack */

/* One head of Q or K: x [head_dim] of dtype -> out, the same dtype. */
INLINE void rotate_head(const RopeKvWrite *args, int token, int head, const void *x, void *out, const int dtype) {
    const int head_dim = args->shape.head_dim, half = head_dim / 2;
    float numbers[MAX_HEAD_DIM + LANES], rotated[MAX_HEAD_DIM + LANES];
    if (args->head_norms) {
        normalise(x, dtype, args->head_norms + (size_t)head * head_dim, args->eps, head_dim, numbers, FLOAT32);
    } else {
        int i = 0;
        for (; i + LANES <= head_dim; i += LANES) store_floats(numbers + i, load_numbers(x, i, dtype));
        if (i < head_dim) store_floats(numbers + i, load_tail(x, i, head_dim - i, dtype));
    }
    const float *result = numbers;
    if (args->cos) {
        const float *cos = args->cos + args->positions[token] * head_dim;
        const float *sin = args->sin + args->positions[token] * head_dim;
        for (int i = 0; i < half; i++) rotated[i] = numbers[i] * cos[i] + numbers[i + half] * sin[i];
        for (int i = half; i < head_dim; i++) rotated[i] = numbers[i] * cos[i] + numbers[i - half] * sin[i];
        result = rotated;
    }
    int i = 0;
    for (; i + LANES <= head_dim; i += LANES) store_numbers(out, i, load_floats(result + i), dtype);
    if (i < head_dim) store_tail(out, i, head_dim - i, load_tail(result, i, head_dim - i, FLOAT32), dtype);
}

INLINE int is_finite_row(const void *x, int width, const int dtype) {
    uint32_t found = 0;
    for (int i = 0; i < width; i++) {
        if (dtype == FLOAT32)
            found |= (((const uint32_t *)x)[i] & 0x7f800000) == 0x7f800000;
        else
            found |= (((const uint16_t *)x)[i] & 0x7f80) == 0x7f80;
    }
    return !found;
}

INLINE void write_token(const RopeKvWrite *args, int token, const int dtype) {
    const CacheShape *shape = &args->shape;
    const int num_heads = args->num_heads, num_kv_heads = shape->num_kv_heads;
    const size_t head_bytes = shape->head_dim * element_bytes(dtype);
    const char *x = (const char *)args->qkv + (size_t)token * (num_heads + 2 * num_kv_heads) * head_bytes;
    char *q = (char *)args->q + (size_t)token * num_heads * head_bytes;
    for (int head = 0; head < num_heads; head++)
        rotate_head(args, token, head, x + head * head_bytes, q + head * head_bytes, dtype);
    const int64_t slot = args->slots[token];
    if (slot < 0) return;
    for (int head = 0; head < num_kv_heads; head++) {
        float key[MAX_HEAD_DIM]; /* of dtype */
        const char *value = x + (num_heads + num_kv_heads + head) * head_bytes;
        rotate_head(args, token, num_heads + head, x + (num_heads + head) * head_bytes, key, dtype);
        if (!is_finite_row(key, shape->head_dim, dtype) || !is_finite_row(value, shape->head_dim, dtype))
            memset(key, 0xff, 4);
        const int64_t block = slot / shape->block_size;
        const int offset = (int)(slot % shape->block_size);
        put_in_cache(shape, args->layer, block, offset, 0, head, key);
        put_in_cache(shape, args->layer, block, offset, 1, head, value);
    }
}

void rope_kv_write_part(const RopeKvWrite *args, int thread, int num_threads) {
    const int64_t count = args->num_tokens;
    const int end = (int)(count * (thread + 1) / num_threads);
    for (int token = (int)(count * thread / num_threads); token < end; token++) {
        if (args->shape.dtype == FLOAT32)
            write_token(args, token, FLOAT32);
        else
            write_token(args, token, BFLOAT16);
    }
}

static void rope_kv_write_job(void *args, int thread, int num_threads) {
    rope_kv_write_part(args, thread, num_threads);
}

EXPORT void rope_kv_write(const RopeKvWrite *args) {
    const int64_t width = (int64_t)(args->num_heads + 2 * args->shape.num_kv_heads) * args->shape.head_dim;
    if (args->num_tokens * width <= NOT_SHARED)
        rope_kv_write_part(args, 0, 1);
    else
        pool_run(rope_kv_write_job, (void *)args);
}
