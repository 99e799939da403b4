#include "layers/recurrence.h"

#include "layers/gate.h"
#include "threads/pool.h"
#include "math/row_math.h"

/* Consecutive tokens of a request are convolved together, so that few pages are in use at a time. */
enum { RUN_TOKENS = 16 };

/* Channels of a block; GATED_DELTA has a block for each query and key instead. */
enum { BLOCK_CHANNELS = 64 };

/* For loops whose bodies stay in registers. */
#define UNROLLED _Pragma("GCC unroll 8")

/* Some of a step's tokens. A token's row of `mixed` is counted from `begin`. */
typedef struct {
    const RecurrenceStep *args;
    int64_t begin, end;
    int64_t first_request, end_request; /* those that have some of the tokens */
} Tile;

/* Return a thread's first unit of `count`, which are divided in whole numbers. */
static int64_t first_of(int64_t count, int thread, int num_threads) { return count * thread / num_threads; }

static float *state_at(const RecurrenceStep *args, int64_t row) {
    return args->states + row * args->state_stride + args->layer->state_offset;
}

static float *mixed_at(const Tile *tile, int64_t token) {
    return tile->args->mixed + (token - tile->begin) * tile->args->mixed_stride;
}

INLINE const void *input_at(const RecurrenceStep *args, int64_t token, const int dtype) {
    return (const char *)args->in + token * args->layer->width * element_bytes(dtype);
}

/* Return the row to which the state after a token is copied; below 0: none. */
INLINE int64_t save_of(const RecurrenceStep *args, int64_t token) { return args->saves ? args->saves[token] : -1; }

static int begins(const RecurrenceStep *args, int64_t request) {
    return args->positions[args->firsts[request]] == 0;
}

/* Return a request's first token in the tile, and the end of its tokens there. */
static int64_t first_in(const Tile *tile, int64_t request) {
    const int64_t first = tile->args->firsts[request];
    return first > tile->begin ? first : tile->begin;
}

static int64_t end_in(const Tile *tile, int64_t request) {
    const int64_t end = tile->args->firsts[request + 1];
    return end < tile->end ? end : tile->end;
}

/* --- the convolution --- */

/* Return the input of the convolution for LANES channels, starting at `channel`. */
INLINE Floats input_of(const Recurrence *layer, const void *row, int64_t channel, int64_t count, const int is_short,
                       const int dtype) {
    if (is_short)
        return load_some(row, channel, count, dtype) * load_some(row, 2 * layer->channels + channel, count, dtype);
    const int64_t first = layer->kind == STATE_SPACE ? (int64_t)layer->num_heads * layer->value_dim : 0;
    return load_some(row, first + channel, count, dtype);
}

/* The same for a token that may lie before the step: then it is in the state, or it is zero. */
INLINE Floats earlier_input(const RecurrenceStep *args, int64_t request, int64_t token, int64_t channel, int64_t count,
                            const int dtype) {
    const Recurrence *layer = args->layer;
    const int64_t before = args->firsts[request] - token;
    if (before <= 0)
        return input_of(layer, input_at(args, token, dtype), channel, count, layer->kind == SHORT_CONVOLUTION, dtype);
    if (begins(args, request)) return all_floats(0.0f);
    const float *state = state_at(args, args->rows[request]) + (layer->taps - 1 - before) * layer->channels;
    return load_some(state, channel, count, FLOAT32);
}

/* Write the last inputs of up to LANES channels, as they are after a token, into a row's state. */
INLINE void store_taps(const RecurrenceStep *args, int64_t request, int64_t token, int64_t row, int64_t channel,
                       int64_t count, const int dtype) {
    float *state = state_at(args, row);
    const int before = args->layer->taps - 1;
    for (int tap = 0; tap < before; tap++) {
        const Floats input = earlier_input(args, request, token - before + 1 + tap, channel, count, dtype);
        store_some(state + tap * args->layer->channels, channel, count, input, FLOAT32);
    }
}

/* Convolve up to LANES channels of a request's tokens from `token` to `end`. */
INLINE void convolve(const Tile *tile, int64_t request, int64_t token, int64_t end, int64_t channel, int64_t count,
                     const int taps, const int is_short, const int dtype) {
    const RecurrenceStep *args = tile->args;
    const Recurrence *layer = args->layer;
    const int64_t channels = layer->channels;
    Floats last[MAX_TAPS] = {{0}}, kernel[MAX_TAPS] = {{0}};
    UNROLLED
    for (int tap = 0; tap < taps; tap++)
        kernel[tap] = load_some(layer->kernel + tap * channels, channel, count, FLOAT32);
    UNROLLED
    for (int tap = 0; tap < taps - 1; tap++)
        last[tap] = earlier_input(args, request, token - taps + 1 + tap, channel, count, dtype);
    const Floats bias = layer->bias ? load_some(layer->bias, channel, count, FLOAT32) : all_floats(0.0f);
    const int64_t in_bytes = layer->width * element_bytes(dtype), out_bytes = channels * element_bytes(dtype);
    const int64_t stride = args->mixed_stride;
    const char *row = input_at(args, token, dtype);
    char *out = (char *)args->out + token * out_bytes;
    float *mixed = mixed_at(tile, token) + channel;
    for (; token < end; token++, row += in_bytes, out += out_bytes, mixed += stride) {
        last[taps - 1] = input_of(layer, row, channel, count, is_short, dtype);
        Floats sum = bias;
        UNROLLED
        for (int tap = 0; tap < taps; tap++) sum = multiply_add(kernel[tap], last[tap], sum);
        UNROLLED
        for (int tap = 0; tap < taps - 1; tap++) last[tap] = last[tap + 1];
        if (is_short)
            store_some(out, channel, count, sum * load_some(row, channels + channel, count, dtype), dtype);
        else
            store_some(mixed, 0, count, sum, FLOAT32);
    }
}

/* Convolve channels of a request's tokens from `token` to `end`. */
INLINE void convolve_block(const Tile *tile, int64_t request, int64_t token, int64_t end, int64_t channel,
                           int64_t end_channel, const int dtype) {
    const int taps = tile->args->layer->taps, is_short = tile->args->layer->kind == SHORT_CONVOLUTION;
    for (; channel < end_channel; channel += LANES) {
        const int64_t count = end_channel - channel;
        if (count >= LANES && taps == 4 && !is_short)
            convolve(tile, request, token, end, channel, LANES, 4, 0, dtype);
        else if (count >= LANES && taps == 3 && is_short)
            convolve(tile, request, token, end, channel, LANES, 3, 1, dtype);
        else
            convolve(tile, request, token, end, channel, count, taps, is_short, dtype);
    }
}

/* Apply the activation to a token's convolved channels. */
INLINE void activate(float *channels, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES)
        store_some(channels, i, count - i, activated(load_some(channels, i, count - i, FLOAT32), SILU), FLOAT32);
}

/* Scale a query or key to length 1, times factor. */
INLINE void to_unit(float *vector, int64_t width, float factor) {
    const float scale = 1.0f / sqrtf(sum_of_squares(vector, width, FLOAT32) + 1e-6f) * factor;
    for (int64_t i = 0; i < width; i += LANES)
        store_some(vector, i, width - i, load_some(vector, i, width - i, FLOAT32) * scale, FLOAT32);
}

/* Convolve a block's channels of all tokens of the tile; scale it if it is a query or key of GATED_DELTA. */
INLINE void run_block(const Tile *tile, int64_t block, int64_t size, const int dtype) {
    const RecurrenceStep *args = tile->args;
    const Recurrence *layer = args->layer;
    const int64_t channel = block * size, last = channel + size;
    const int64_t end_channel = last < layer->channels ? last : layer->channels;
    const int has_unit_length = layer->kind == GATED_DELTA && block < 2 * layer->num_groups;
    const float factor = block < layer->num_groups ? 1.0f / sqrtf((float)layer->key_dim) : 1.0f;
    for (int64_t request = tile->first_request; request < tile->end_request; request++) {
        const int64_t end = end_in(tile, request);
        for (int64_t token = first_in(tile, request); token < end; token += RUN_TOKENS) {
            const int64_t run_end = token + RUN_TOKENS < end ? token + RUN_TOKENS : end;
            convolve_block(tile, request, token, run_end, channel, end_channel, dtype);
            for (int64_t one = token; layer->kind != SHORT_CONVOLUTION && one < run_end; one++) {
                activate(mixed_at(tile, one) + channel, end_channel - channel);
                if (has_unit_length) to_unit(mixed_at(tile, one) + channel, size, factor);
            }
        }
        for (int64_t at = channel; at < end_channel; at += LANES) {
            for (int64_t token = first_in(tile, request); args->saves && token < end; token++)
                if (save_of(args, token) >= 0)
                    store_taps(args, request, token, save_of(args, token), at, end_channel - at, dtype);
            if (end == args->firsts[request + 1])
                store_taps(args, request, end - 1, args->rows[request], at, end_channel - at, dtype);
        }
    }
}

/* --- what is known of a token before its state --- */

/* Return ln(1 + exp(x)) to 2e-7: the series of 2 artanh(u / (2 + u)) for u = exp(-|x|). */
INLINE Floats softplus(Floats x) {
    const Floats u = exponential((Floats)((Signed)x | INT32_MIN)), s = u / (u + 2.0f), square = s * s;
    Floats sum = all_floats(1.0f / 15);
    for (int n = 13; n > 0; n -= 2) sum = multiply_add(sum, square, all_floats(1.0f / (float)n));
    return multiply_add(s + s, sum, choose(x > 0.0f, x, x * 0.0f)); /* NaN stays NaN */
}

/* Write each head's factors for one token after its channels: decay, then beta or the step. */
INLINE void find_factors(const Recurrence *layer, const void *row, float *mixed, const int dtype) {
    const int64_t heads = layer->num_heads;
    const int is_delta = layer->kind == GATED_DELTA;
    const int64_t first = layer->width - heads; /* a, or dt */
    float *decays = mixed + layer->channels, *others = decays + heads;
    for (int64_t head = 0; head < heads; head += LANES) {
        const int64_t count = heads - head;
        const Floats rate = load_some(layer->rates, head, count, FLOAT32);
        Floats step = softplus(load_some(row, first + head, count, dtype) +
                               load_some(layer->step_biases, head, count, FLOAT32));
        if (!is_delta) step = smaller(all_floats(layer->most_step), larger(all_floats(layer->least_step), step));
        store_some(decays, head, count, exponential(-(rate * step)), FLOAT32);
        if (is_delta) step = layer->most_beta / (1.0f + exponential(-load_some(row, first - heads + head, count, dtype)));
        store_some(others, head, count, step, FLOAT32);
    }
}

/* Divide the blocks of channels among threads. The last block is the factors. A thread has the same blocks in every tile,
 * and nothing else reads the last inputs in a state. */
INLINE void convolution_part(const Tile *tile, int thread, int num_threads, const int dtype) {
    const Recurrence *layer = tile->args->layer;
    const int64_t size = layer->kind == GATED_DELTA ? layer->key_dim : BLOCK_CHANNELS;
    const int64_t blocks = (layer->channels + size - 1) / size, all = blocks + (layer->kind != SHORT_CONVOLUTION);
    const int64_t end = first_of(all, thread + 1, num_threads);
    for (int64_t block = first_of(all, thread, num_threads); block < end; block++) {
        if (block < blocks) {
            run_block(tile, block, size, dtype);
            continue;
        }
        for (int64_t token = tile->begin; token < tile->end; token++)
            find_factors(layer, input_at(tile->args, token, dtype), mixed_at(tile, token), dtype);
    }
}

/* --- the state --- */

/* A strip is computed in parts whose sums fit the registers. Parts of a token take turns, so that one begins while the last
 * sums of the other are not there yet. */
#if defined(WITH_NEON)
enum { VECTORS = 4 };
#else
enum { VECTORS = 2 };
#endif
enum { COLUMNS = VECTORS * LANES, PARTS = STRIP / COLUMNS };

/* One number for each column of a part. */
typedef struct {
    Floats of[VECTORS];
} Part;

INLINE Part load_part(const float *from, int64_t count) {
    Part part;
    UNROLLED
    for (int i = 0; i < VECTORS; i++)
        part.of[i] = count > i * LANES ? load_some(from, i * LANES, count - i * LANES, FLOAT32) : all_floats(0.0f);
    return part;
}

INLINE void store_part(float *to, int64_t count, Part part) {
    for (int i = 0; i < VECTORS && count > i * LANES; i++)
        store_some(to, i * LANES, count - i * LANES, part.of[i], FLOAT32);
}

/* Return the sum over even keys plus that over odd ones. */
INLINE Part sum_of_both(const Part sums[2]) {
    Part sum;
    UNROLLED
    for (int i = 0; i < VECTORS; i++) sum.of[i] = sums[0].of[i] + sums[1].of[i];
    return sum;
}

/* Return key @ state of a part. */
INLINE Part recall(const float *state, const float *key, int64_t key_dim) {
    Part sums[2] = {{{{0}}}, {{{0}}}};
    for (int64_t k = 0; k < key_dim; k += 2)
        UNROLLED
        for (int odd = 0; odd < 2; odd++)
            UNROLLED
            for (int i = 0; i < VECTORS; i++)
                sums[odd].of[i] = multiply_add(all_floats(key[k + odd]),
                                               load_floats(state + (k + odd) * STRIP + i * LANES), sums[odd].of[i]);
    return sum_of_both(sums);
}

/* state = decay * state + key (outer) added; return query @ state, summed as in recall(). known, unless NULL, becomes
 * recall() of next_key. */
INLINE Part renew(float *state, float decay, const float *key, const float *query, Part added, const float *next_key,
                  Part *known, int64_t key_dim) {
    Part sums[2] = {{{{0}}}, {{{0}}}}, recalled[2] = {{{{0}}}, {{{0}}}};
    for (int64_t k = 0; k < key_dim; k += 2)
        UNROLLED
        for (int odd = 0; odd < 2; odd++) {
            /* Read once: as far as the compiler knows, the stores below may change them. */
            const Floats one_key = all_floats(key[k + odd]), one_query = all_floats(query[k + odd]);
            const Floats one_next = known ? all_floats(next_key[k + odd]) : one_key;
            UNROLLED
            for (int i = 0; i < VECTORS; i++) {
                float *place = state + (k + odd) * STRIP + i * LANES;
                const Floats next = multiply_add(one_key, added.of[i], load_floats(place) * decay);
                store_floats(place, next);
                sums[odd].of[i] = multiply_add(one_query, next, sums[odd].of[i]);
                if (known) recalled[odd].of[i] = multiply_add(one_next, next, recalled[odd].of[i]);
            }
        }
    if (known) *known = sum_of_both(recalled);
    return sum_of_both(sums);
}

/* Where the numbers of a head are in a row of `mixed`, and a strip of it in a state. */
typedef struct {
    int64_t query, key, value, count; /* count: columns of the strip */
    int64_t state;
} StripPlaces;

static StripPlaces places_of(const Recurrence *layer, int64_t head, int64_t strip) {
    const int64_t key_dim = layer->key_dim, heads = layer->num_heads, values = heads * layer->value_dim;
    const int64_t group = layer->takes_turns ? head % layer->num_groups : head / (heads / layer->num_groups);
    const int64_t keys = layer->num_groups * key_dim, own = group * key_dim;
    const int64_t strips = (layer->value_dim + STRIP - 1) / STRIP, count = layer->value_dim - strip * STRIP;
    const int is_delta = layer->kind == GATED_DELTA;
    return (StripPlaces){
        .query = (is_delta ? 0 : values + keys) + own,
        .key = (is_delta ? keys : values) + own,
        .value = (is_delta ? 2 * keys : 0) + head * layer->value_dim + strip * STRIP,
        .count = count < STRIP ? count : STRIP,
        .state = ((layer->taps - 1) * layer->channels + 15) / 16 * 16 + (head * strips + strip) * key_dim * STRIP,
    };
}

/* Compute one token of a part of a strip: its results replace the values. known: of the token; then of the next one. */
INLINE void run_part(const Recurrence *layer, float *mixed, int64_t head, const StripPlaces *at, int64_t column, float *state,
                     const float *next_key, Part *known, const int is_delta) {
    const float decay = mixed[layer->channels + head], other = mixed[layer->channels + layer->num_heads + head];
    float *value = mixed + at->value + column;
    const int64_t count = at->count - column;
    const Part given = load_part(value, count);
    Part added = given;
    UNROLLED
    for (int i = 0; i < VECTORS; i++) {
        if (is_delta) added.of[i] = added.of[i] - known->of[i] * decay;
        added.of[i] = added.of[i] * other;
    }
    Part result = renew(state + column, decay, mixed + at->key, mixed + at->query, added, next_key, is_delta ? known : NULL,
                        layer->key_dim);
    if (layer->skips)
        for (int i = 0; i < VECTORS; i++)
            result.of[i] = multiply_add(all_floats(layer->skips[head]), given.of[i], result.of[i]);
    store_part(value, count, result);
}

/* Compute one strip of a head for a request's tokens in the tile. */
INLINE void run_strip(const Tile *tile, int64_t request, int64_t head, int64_t strip, const int is_delta) {
    const RecurrenceStep *args = tile->args;
    const StripPlaces at = places_of(args->layer, head, strip);
    const int64_t key_dim = args->layer->key_dim, bytes = key_dim * STRIP * sizeof(float), end = end_in(tile, request);
    int64_t token = first_in(tile, request);
    float *state = state_at(args, args->rows[request]) + at.state, *mixed = mixed_at(tile, token);
    if (begins(args, request) && token == args->firsts[request]) memset(state, 0, bytes);
    Part known[PARTS];
    for (int part = 0; is_delta && part < PARTS; part++)
        known[part] = recall(state + part * COLUMNS, mixed + at.key, key_dim);
    for (; token < end; token++, mixed += args->mixed_stride) {
        const float *next_key = mixed + at.key + (token + 1 < end ? args->mixed_stride : 0);
        for (int part = 0; part < PARTS; part++)
            run_part(args->layer, mixed, head, &at, part * COLUMNS, state, next_key, &known[part], is_delta);
        const int64_t save = save_of(args, token);
        if (save >= 0) memcpy(state_at(args, save) + at.state, state, bytes);
    }
}

/* Divide the strips of all heads and requests among threads, by their numbers of tokens. */
static void states_part(const Tile *tile, int thread, int num_threads) {
    const Recurrence *layer = tile->args->layer;
    const int64_t strips = (layer->value_dim + STRIP - 1) / STRIP, total = tile->end - tile->begin;
    const int64_t work = layer->num_heads * strips * total;
    const int64_t begin = first_of(work, thread, num_threads), end = first_of(work, thread + 1, num_threads);
    for (int64_t one = begin / total; one * total < end; one++)
        for (int64_t request = tile->first_request; request < tile->end_request; request++) {
            const int64_t at = one * total + first_in(tile, request) - tile->begin;
            if (at < begin || at >= end) continue; /* another thread's */
            if (layer->kind == GATED_DELTA)
                run_strip(tile, request, one / strips, one % strips, 1);
            else
                run_strip(tile, request, one / strips, one % strips, 0);
        }
}

/* --- the results --- */

/* out = each head's results, normalised, times their gates: GATED_DELTA. */
INLINE void finish_delta_row(const Tile *tile, int64_t token, const int dtype) {
    const RecurrenceStep *args = tile->args;
    const Recurrence *layer = args->layer;
    const int64_t size = layer->value_dim, width = layer->num_heads * size;
    float *results = mixed_at(tile, token) + layer->channels - width;
    const void *row = input_at(args, token, dtype);
    char *out = (char *)args->out + token * width * element_bytes(dtype);
    for (int64_t first = 0; first < width; first += size) {
        float *part = results + first;
        normalise(part, FLOAT32, layer->norm, layer->eps, size, part, FLOAT32);
        for (int64_t i = 0; i < size; i += LANES) {
            const Floats gate = load_some(row, layer->channels + first + i, size - i, dtype);
            store_some(out, first + i, size - i, gated(gate, load_some(part, i, size - i, FLOAT32), SILU), dtype);
        }
    }
}

/* Write a row of results times their gates to `to`: STATE_SPACE. */
INLINE void gate_row(const Tile *tile, int64_t token, float *to, const int dtype) {
    const RecurrenceStep *args = tile->args;
    const Recurrence *layer = args->layer;
    const int64_t width = (int64_t)layer->num_heads * layer->value_dim;
    const float *results = mixed_at(tile, token);
    const void *row = input_at(args, token, dtype);
    for (int64_t i = 0; i < width; i += LANES) {
        const Floats gate = load_some(row, i, width - i, dtype);
        store_some(to, i, width - i, gated(gate, load_some(results, i, width - i, FLOAT32), SILU), FLOAT32);
    }
}

/* Normalise each group of a row of gated results; without weights it is only rounded. */
INLINE void norm_row(const float *gated, const float *weight, char *out, int64_t width, int64_t size, float eps,
                     const int dtype) {
    if (!weight) {
        convert(gated, width, out, dtype);
        return;
    }
    for (int64_t first = 0; first < width; first += size)
        normalise(gated + first, FLOAT32, weight + first, eps, size, out + first * element_bytes(dtype), dtype);
}

INLINE void finish_row(const Tile *tile, int64_t token, const int dtype) {
    const RecurrenceStep *args = tile->args;
    const Recurrence *layer = args->layer;
    if (layer->kind == GATED_DELTA) {
        finish_delta_row(tile, token, dtype);
        return;
    }
    const int64_t width = (int64_t)layer->num_heads * layer->value_dim;
    float *to = args->gated ? args->gated + token * args->gated_stride : mixed_at(tile, token);
    gate_row(tile, token, to, dtype);
    if (args->gated) return;
    char *out = (char *)args->out + token * width * element_bytes(dtype);
    norm_row(to, layer->norm, out, width, width / layer->num_groups, layer->eps, dtype);
}

INLINE void results_part(const Tile *tile, int thread, int num_threads, const int dtype) {
    const int64_t num_tokens = tile->end - tile->begin, end = tile->begin + first_of(num_tokens, thread + 1, num_threads);
    for (int64_t token = tile->begin + first_of(num_tokens, thread, num_threads); token < end; token++)
        finish_row(tile, token, dtype);
}

void group_norm_part(const GroupNorm *args, int thread, int num_threads) {
    const int64_t width = args->width, bytes = width * element_bytes(args->dtype);
    const int64_t end = first_of(args->num_rows, thread + 1, num_threads);
    for (int64_t row = first_of(args->num_rows, thread, num_threads); row < end; row++) {
        const float *gated = args->gated + row * width;
        char *out = (char *)args->out + row * bytes;
        if (args->dtype == BFLOAT16)
            norm_row(gated, args->weight, out, width, args->size, args->eps, BFLOAT16);
        else
            norm_row(gated, args->weight, out, width, args->size, args->eps, FLOAT32);
    }
}

INLINE void run_tile(const Tile *tile, int thread, int num_threads, const int dtype) {
    convolution_part(tile, thread, num_threads, dtype);
    if (tile->args->layer->kind == SHORT_CONVOLUTION) return;
    pool_barrier();
    states_part(tile, thread, num_threads);
    pool_barrier();
    results_part(tile, thread, num_threads, dtype);
}

void recurrence_part(const RecurrenceStep *args, int thread, int num_threads) {
    const int64_t total = args->firsts[args->num_requests];
    Tile tile = {.args = args};
    for (; tile.begin < total; tile.begin = tile.end) {
        if (tile.begin > 0 && args->layer->kind != SHORT_CONVOLUTION) pool_barrier(); /* `mixed` is used again */
        tile.end = tile.begin + MIXED_ROWS < total ? tile.begin + MIXED_ROWS : total;
        while (args->firsts[tile.first_request + 1] <= tile.begin) tile.first_request++;
        while (tile.end_request < args->num_requests && args->firsts[tile.end_request] < tile.end) tile.end_request++;
        if (args->layer->dtype == BFLOAT16)
            run_tile(&tile, thread, num_threads, BFLOAT16);
        else
            run_tile(&tile, thread, num_threads, FLOAT32);
    }
}

static void recurrence_job(void *args, int thread, int num_threads) { recurrence_part(args, thread, num_threads); }

EXPORT void recurrence(const RecurrenceStep *args) { pool_run(recurrence_job, (void *)args); }
