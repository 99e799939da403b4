#include "layers/rope.h"

#include "attention/cache_layout.h"
#include "threads/pool.h"
#include "math/row_math.h"

enum {
    CHUNK_HEAD_DIM = 512, /* limit for rotating a whole chunk's heads on the stack */
};

INLINE void normalise_numbers(const RopeKvWrite *args, const void *x, const int dtype, const float *weight,
                              int64_t width, void *out, const int out_dtype) {
    if (args->is_centred)
        normalise_centred(x, dtype, weight, NULL, args->eps, width, out, out_dtype);
    else
        normalise(x, dtype, weight, args->eps, width, out, out_dtype);
}

INLINE void rotate_numbers(const RopeKvWrite *args, int token, int head, const void *x, void *out, const int dtype) {
    const int head_dim = args->shape.head_dim;
    const int64_t at = args->cos ? args->positions[token] * head_dim : 0;
    const float *cos = (head < args->num_heads ? args->query_cos : args->cos) + at;
    const float *sin = (head < args->num_heads ? args->query_sin : args->sin) + at;
    if (!args->norms || args->norms_of_rows) {
        if (args->cos)
            rotate(x, dtype, cos, sin, head_dim / 2, out, dtype);
        else
            memcpy(out, x, head_dim * element_bytes(dtype));
        return;
    }
    const float *weight = args->norms + (size_t)head * head_dim;
    if (!args->cos) {
        normalise_numbers(args, x, dtype, weight, head_dim, out, dtype);
        return;
    }
    float between[MAX_HEAD_DIM];
    if (args->is_after) {
        rotate(x, dtype, cos, sin, head_dim / 2, between, FLOAT32);
        normalise_numbers(args, between, FLOAT32, weight, head_dim, out, dtype);
    } else {
        normalise_numbers(args, x, dtype, weight, head_dim, between, FLOAT32);
        rotate(between, FLOAT32, cos, sin, head_dim / 2, out, dtype);
    }
}

/* Normalise and rotate one head of Q or K: x [head_dim] to out, both of the cache's dtype; they must not overlap. */
static __attribute__((noinline)) void rotate_head(const RopeKvWrite *args, int token, int head, const void *x,
                                                  void *out) {
    if (args->shape.dtype == FLOAT32)
        rotate_numbers(args, token, head, x, out, FLOAT32);
    else
        rotate_numbers(args, token, head, x, out, BFLOAT16);
}

static int is_finite_head(const CacheShape *shape, const char *x) {
    const int bytes = shape->head_dim * number_bytes(shape);
    return shape->dtype == FLOAT32 ? is_finite_row(x, bytes, FLOAT32) : is_finite_row(x, bytes, BFLOAT16);
}

/* Return how many heads of Q, or of K, a row of qkv has. */
static int queries_of_row(const RopeKvWrite *args) { return args->row.heads ? args->row.heads : args->num_heads; }

static int keys_of_row(const RopeKvWrite *args) {
    return args->row.heads ? args->row.kv_heads : args->shape.num_kv_heads;
}

/* Return how many heads a row of qkv has. */
static int heads_of_row(const RopeKvWrite *args) {
    const int num_keys = args->values == SHARED_VALUES ? 0 : keys_of_row(args);
    return queries_of_row(args) + num_keys + (args->values == OWN_VALUES || args->values == NORMALISED_VALUES
                                                  ? args->shape.num_kv_heads : 0);
}

/* Return the head of a token's row of qkv with this place in it: Q heads come first, then K, then V. */
static const char *at_place(const RopeKvWrite *args, int token, int place) {
    const size_t num_heads = heads_of_row(args);
    return (const char *)args->qkv + (token * num_heads + place) * args->shape.head_dim * number_bytes(&args->shape);
}

/* Return a used head of a token's row of qkv. */
static const char *head_of(const RopeKvWrite *args, int token, int head) {
    const int num_heads = args->num_heads, num_kv_heads = args->shape.num_kv_heads;
    if (!args->row.heads) return at_place(args, token, head);
    if (head < num_heads) return at_place(args, token, args->row.first_head + head);
    head -= num_heads;
    if (head < num_kv_heads) return at_place(args, token, args->row.heads + args->row.first_kv_head + head);
    return at_place(args, token, args->row.heads + args->row.kv_heads + head - num_kv_heads);
}

/* Return V of a token's KV head for the cache: in qkv, or made in `room`. */
static const char *make_value(const RopeKvWrite *args, int token, int kv_head, char *room) {
    const int num_kv_heads = args->shape.num_kv_heads, behind = args->num_heads + num_kv_heads + kv_head;
    if (args->values == OWN_VALUES) return head_of(args, token, behind);
    const char *value = head_of(args, token, args->values == KEY_VALUES ? behind - num_kv_heads : behind);
    const float *weight = args->norms + (size_t)behind * args->shape.head_dim;
    if (args->shape.dtype == FLOAT32)
        normalise_numbers(args, value, FLOAT32, weight, args->shape.head_dim, room, FLOAT32);
    else
        normalise_numbers(args, value, BFLOAT16, weight, args->shape.head_dim, room, BFLOAT16);
    return room;
}

/* Normalise some heads of a token together, in place: all of Q, or all of K, of its row. */
static void normalise_heads(const RopeKvWrite *args, int token, int first, int count) {
    char *x = (char *)args->qkv + (at_place(args, token, first) - (const char *)args->qkv);
    const float *weight = args->norms + (size_t)first * args->shape.head_dim;
    const int64_t width = (int64_t)count * args->shape.head_dim;
    if (args->shape.dtype == FLOAT32)
        normalise_numbers(args, x, FLOAT32, weight, width, x, FLOAT32);
    else
        normalise_numbers(args, x, BFLOAT16, weight, width, x, BFLOAT16);
}

static void normalise_rows(const RopeKvWrite *args, int token, int end) {
    for (; token < end; token++) {
        normalise_heads(args, token, 0, queries_of_row(args));
        normalise_heads(args, token, queries_of_row(args), keys_of_row(args));
    }
}

/* Compute a token's rotated K for the cache. value: its V there. */
static void make_key(const RopeKvWrite *args, int token, int kv_head, const char *value, char *key) {
    const int head = args->num_heads + kv_head;
    rotate_head(args, token, head, head_of(args, token, head), key);
    if (!is_finite_head(&args->shape, key) || !is_finite_head(&args->shape, value)) memset(key, 0xff, 4);
}

/* Write Q of a row of qkv. token: its row of positions and q. */
static void write_q(const RopeKvWrite *args, int row, int token) {
    const size_t head_bytes = args->shape.head_dim * number_bytes(&args->shape);
    char *q = (char *)args->q + (size_t)token * args->num_heads * head_bytes;
    for (int head = 0; head < args->num_heads; head++)
        rotate_head(args, token, head, head_of(args, row, head), q + head * head_bytes);
}

/* Write K and V of one token to the cache. */
static void write_kv(const RopeKvWrite *args, int token) {
    const CacheShape *shape = &args->shape;
    const int64_t slot = args->slots[token];
    if (slot < 0) return;
    for (int head = 0; head < shape->num_kv_heads; head++) {
        char key[MAX_HEAD_DIM * 4] __attribute__((aligned(64))), made[MAX_HEAD_DIM * 4] __attribute__((aligned(64)));
        const char *value = make_value(args, token, head, made);
        make_key(args, token, head, value, key);
        const int64_t block = slot / shape->block_size;
        const int offset = (int)(slot % shape->block_size);
        put_in_cache(shape, args->layer, block, offset, 0, head, key);
        put_in_cache(shape, args->layer, block, offset, 1, head, value);
    }
}

/* Return whether the tokens from `token` on fill exactly one chunk of the cache. */
static int is_chunk(const RopeKvWrite *args, int token, int end) {
    const int64_t *slots = args->slots + token;
    if (end - token < CHUNK || args->shape.block_size < CHUNK || args->shape.head_dim > CHUNK_HEAD_DIM) return 0;
    if (args->shape.is_quantized) return 0;
    if (slots[0] < 0 || slots[0] % CHUNK) return 0;
    for (int i = 1; i < CHUNK; i++)
        if (slots[i] != slots[0] + i) return 0;
    return 1;
}

/* Prefetch a chunk that will be written: the cache reads its lines first, while the rows for it are computed. */
static void fetch_chunk(const char *chunk, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(chunk + i, 1);
}

/* Write K and V of all tokens of a chunk to the cache. */
static void write_chunk(const RopeKvWrite *args, int token) {
    const CacheShape *shape = &args->shape;
    const int num_heads = heads_of_row(args), block_size = shape->block_size;
    const size_t head_bytes = shape->head_dim * number_bytes(shape), bytes = chunk_bytes(shape);
    const int64_t block = args->slots[token] / block_size;
    char *place = (char *)args->layer + args->slots[token] % block_size / CHUNK * bytes;
    for (int head = 0; head < shape->num_kv_heads; head++) {
        char rows[CHUNK * CHUNK_HEAD_DIM * 4] __attribute__((aligned(64)));
        char *keys = place + head_offset(shape, block, 0, head), *values = place + head_offset(shape, block, 1, head);
        fetch_chunk(keys, bytes);
        fetch_chunk(values, bytes);
        char made[CHUNK * CHUNK_HEAD_DIM * 4] __attribute__((aligned(64)));
        for (int i = 0; i < CHUNK; i++) {
            const char *value = make_value(args, token + i, head, made + i * head_bytes);
            make_key(args, token + i, head, value, rows + i * head_bytes);
        }
        put_keys(keys, shape, rows, head_bytes);
        const int is_own = args->values == OWN_VALUES;
        const char *value_rows = is_own ? head_of(args, token, args->num_heads + shape->num_kv_heads + head) : made;
        put_values(values, shape, value_rows, is_own ? num_heads * head_bytes : head_bytes);
    }
}

static void write_tokens(const RopeKvWrite *args, int token, int end) {
    if (args->values == SHARED_VALUES) {
        for (; token < end; token++) write_q(args, token, args->tokens ? (int)args->tokens[token] : token);
        return;
    }
    while (token < end) {
        const int is_whole = is_chunk(args, token, end);
        if (is_whole) write_chunk(args, token);
        for (const int after = token + (is_whole ? CHUNK : 1); token < after; token++) {
            write_q(args, token, token);
            if (!is_whole) write_kv(args, token);
        }
    }
}

void rope_kv_write_part(const RopeKvWrite *args, int thread, int num_threads) {
    const int64_t count = args->num_tokens;
    const int begin = (int)(count * thread / num_threads), end = (int)(count * (thread + 1) / num_threads);
    if (args->norms && args->norms_of_rows) normalise_rows(args, begin, end);
    write_tokens(args, begin, end);
}

static void rope_kv_write_job(void *args, int thread, int num_threads) {
    rope_kv_write_part(args, thread, num_threads);
}

EXPORT void rope_kv_write(const RopeKvWrite *args) {
    const int64_t width = (int64_t)heads_of_row(args) * args->shape.head_dim;
    if (args->num_tokens * width <= NOT_SHARED)
        rope_kv_write_part(args, 0, 1);
    else
        pool_run(rope_kv_write_job, (void *)args);
}
