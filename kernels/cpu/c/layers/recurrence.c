#include "layers/recurrence.h"

#include "layers/gate.h"
#include "threads/pool.h"
#include "math/row_math.h"

/* Channels are divided among threads in units of this many, which fill cache lines. */
enum { LINE_CHANNELS = 32 };

/* For loops whose bodies stay in registers. */
#define UNROLLED _Pragma("GCC unroll 8")

/* Return a thread's first unit of `count`, which are divided in whole parts of `unit`. */
static int64_t first_of(int64_t count, int64_t unit, int thread, int num_threads) {
    const int64_t units = (count + unit - 1) / unit, first = units * thread / num_threads * unit;
    return first < count ? first : count;
}

static float *state_at(const RecurrenceStep *args, int64_t row) {
    return args->states + row * args->state_stride + args->layer->state_offset;
}

/* Return the row to which the state after a token is copied; below 0: none. */
INLINE int64_t save_of(const RecurrenceStep *args, int64_t token) { return args->saves ? args->saves[token] : -1; }

static int begins(const RecurrenceStep *args, int64_t request) {
    return args->positions[args->firsts[request]] == 0;
}

/* --- the convolution --- */

/* Return the input of the convolution for LANES channels, starting at `channel`. */
INLINE Floats input_of(const Recurrence *layer, const void *row, int64_t channel, int64_t count, const int dtype) {
    const int64_t width = layer->channels;
    if (layer->kind == SHORT_CONVOLUTION)
        return load_some(row, channel, count, dtype) * load_some(row, 2 * width + channel, count, dtype);
    const int64_t first = layer->kind == STATE_SPACE ? (int64_t)layer->num_heads * layer->value_dim : 0;
    return load_some(row, first + channel, count, dtype);
}

/* Write the last inputs of up to LANES channels into a row's state. */
INLINE void store_taps(const RecurrenceStep *args, int64_t row, int64_t channel, int64_t count, const Floats *last) {
    float *state = state_at(args, row);
    for (int tap = 0; tap < args->layer->taps - 1; tap++)
        store_some(state + tap * args->layer->channels, channel, count, last[tap], FLOAT32);
}

/* Convolve up to LANES channels of one request. */
INLINE void convolve(const RecurrenceStep *args, int64_t request, int64_t channel, int64_t count, const int dtype) {
    const Recurrence *layer = args->layer;
    const int64_t channels = layer->channels, bytes = layer->width * element_bytes(dtype);
    const int before = layer->taps - 1;
    float *state = state_at(args, args->rows[request]);
    Floats last[MAX_TAPS], kernel[MAX_TAPS];
    for (int tap = 0; tap < layer->taps; tap++)
        kernel[tap] = load_some(layer->kernel + tap * channels, channel, count, FLOAT32);
    for (int tap = 0; tap < before; tap++)
        last[tap] = begins(args, request) ? all_floats(0.0f)
                                          : load_some(state + tap * channels, channel, count, FLOAT32);
    const Floats bias = layer->bias ? load_some(layer->bias, channel, count, FLOAT32) : all_floats(0.0f);
    for (int64_t token = args->firsts[request]; token < args->firsts[request + 1]; token++) {
        const char *row = (const char *)args->in + token * bytes;
        last[before] = input_of(layer, row, channel, count, dtype);
        Floats sum = bias;
        for (int tap = 0; tap <= before; tap++) sum = multiply_add(kernel[tap], last[tap], sum);
        for (int tap = 0; tap < before; tap++) last[tap] = last[tap + 1];
        if (layer->kind == SHORT_CONVOLUTION) {
            sum = sum * load_some(row, channels + channel, count, dtype);
            store_some((char *)args->out + token * channels * element_bytes(dtype), channel, count, sum, dtype);
        } else {
            store_some(args->mixed + token * args->mixed_stride, channel, count, activated(sum, SILU), FLOAT32);
        }
        if (save_of(args, token) >= 0) store_taps(args, save_of(args, token), channel, count, last);
    }
    store_taps(args, args->rows[request], channel, count, last);
}

static void convolution_part(const RecurrenceStep *args, int thread, int num_threads) {
    const int64_t channels = args->layer->channels;
    const int64_t end = first_of(channels, LINE_CHANNELS, thread + 1, num_threads);
    for (int64_t channel = first_of(channels, LINE_CHANNELS, thread, num_threads); channel < end; channel += LANES)
        for (int64_t request = 0; request < args->num_requests; request++) {
            if (args->layer->dtype == BFLOAT16)
                convolve(args, request, channel, end - channel, BFLOAT16);
            else
                convolve(args, request, channel, end - channel, FLOAT32);
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

/* Scale a query or key to length 1, times factor. */
static void to_unit(float *vector, int64_t width, float factor) {
    const float scale = 1.0f / sqrtf(sum_of_squares(vector, width, FLOAT32) + 1e-6f) * factor;
    for (int64_t i = 0; i < width; i++) vector[i] *= scale;
}

static void factors_part(const RecurrenceStep *args, int thread, int num_threads) {
    const Recurrence *layer = args->layer;
    const int64_t num_tokens = args->firsts[args->num_requests], key_dim = layer->key_dim;
    const int64_t end = first_of(num_tokens, 1, thread + 1, num_threads);
    const float factor = 1.0f / sqrtf((float)key_dim);
    for (int64_t token = first_of(num_tokens, 1, thread, num_threads); token < end; token++) {
        float *mixed = args->mixed + token * args->mixed_stride;
        const char *row = (const char *)args->in + token * layer->width * element_bytes(layer->dtype);
        if (layer->dtype == BFLOAT16)
            find_factors(layer, row, mixed, BFLOAT16);
        else
            find_factors(layer, row, mixed, FLOAT32);
        if (layer->kind != GATED_DELTA) continue;
        for (int64_t group = 0; group < layer->num_groups; group++) {
            to_unit(mixed + group * key_dim, key_dim, factor);
            to_unit(mixed + (layer->num_groups + group) * key_dim, key_dim, 1.0f);
        }
    }
}

/* --- the state --- */

enum { VECTORS = STRIP / LANES };

/* Start one sum for each number of a strip of values. */
typedef struct {
    Floats of[VECTORS];
} Strip;

INLINE Strip load_strip(const float *from, int64_t count) {
    Strip strip;
    UNROLLED
    for (int i = 0; i < VECTORS; i++)
        strip.of[i] = count > i * LANES ? load_some(from, i * LANES, count - i * LANES, FLOAT32) : all_floats(0.0f);
    return strip;
}

INLINE void store_strip(float *to, int64_t count, Strip strip) {
    for (int i = 0; i < VECTORS && count > i * LANES; i++)
        store_some(to, i * LANES, count - i * LANES, strip.of[i], FLOAT32);
}

/* Return key @ state of a strip: the sum over even keys, plus that over odd ones. */
INLINE Strip recall(const float *state, const float *key, int64_t key_dim) {
    Strip sums[2] = {{{{0}}}, {{{0}}}};
    for (int64_t k = 0; k < key_dim; k += 2)
        UNROLLED
        for (int odd = 0; odd < 2; odd++)
            UNROLLED
            for (int i = 0; i < VECTORS; i++)
                sums[odd].of[i] = multiply_add(all_floats(key[k + odd]),
                                               load_floats(state + (k + odd) * STRIP + i * LANES), sums[odd].of[i]);
    UNROLLED
    for (int i = 0; i < VECTORS; i++) sums[0].of[i] = sums[0].of[i] + sums[1].of[i];
    return sums[0];
}

/* state = decay * state + key (outer) added; return query @ state, summed as in recall(). */
INLINE Strip renew(float *state, float decay, const float *key, const float *query, Strip added, int64_t key_dim) {
    Strip sums[2] = {{{{0}}}, {{{0}}}};
    for (int64_t k = 0; k < key_dim; k += 2)
        UNROLLED
        for (int odd = 0; odd < 2; odd++) {
            /* Read once: as far as the compiler knows, the stores below may change them. */
            const Floats one_key = all_floats(key[k + odd]), one_query = all_floats(query[k + odd]);
            UNROLLED
            for (int i = 0; i < VECTORS; i++) {
                float *place = state + (k + odd) * STRIP + i * LANES;
                const Floats next = multiply_add(one_key, added.of[i], load_floats(place) * decay);
                store_floats(place, next);
                sums[odd].of[i] = multiply_add(one_query, next, sums[odd].of[i]);
            }
        }
    UNROLLED
    for (int i = 0; i < VECTORS; i++) sums[0].of[i] = sums[0].of[i] + sums[1].of[i];
    return sums[0];
}

/* Compute one strip of a head for all tokens of a request: results replace the values. */
INLINE void run_strip(const RecurrenceStep *args, int64_t request, int64_t head, int64_t strip, const int is_delta) {
    const Recurrence *layer = args->layer;
    const int64_t key_dim = layer->key_dim, heads = layer->num_heads, values = heads * layer->value_dim;
    const int64_t group = layer->takes_turns ? head % layer->num_groups : head / (heads / layer->num_groups);
    const int64_t keys = layer->num_groups * key_dim, own = group * key_dim;
    const int64_t query = (is_delta ? 0 : values + keys) + own, key = (is_delta ? keys : values) + own;
    const int64_t value = (is_delta ? 2 * keys : 0) + head * layer->value_dim + strip * STRIP;
    const int64_t count = layer->value_dim - strip * STRIP, strips = (layer->value_dim + STRIP - 1) / STRIP;
    const int64_t size = key_dim * STRIP;
    const int64_t place = ((layer->taps - 1) * layer->channels + 15) / 16 * 16 + (head * strips + strip) * size;
    float *state = state_at(args, args->rows[request]) + place;
    if (begins(args, request)) memset(state, 0, size * sizeof(float));
    for (int64_t token = args->firsts[request]; token < args->firsts[request + 1]; token++) {
        float *mixed = args->mixed + token * args->mixed_stride;
        const float decay = mixed[layer->channels + head], other = mixed[layer->channels + heads + head];
        const Strip given = load_strip(mixed + value, count);
        Strip added = given;
        if (is_delta) {
            const Strip known = recall(state, mixed + key, key_dim);
            UNROLLED
            for (int i = 0; i < VECTORS; i++) added.of[i] = added.of[i] - known.of[i] * decay;
        }
        UNROLLED
        for (int i = 0; i < VECTORS; i++) added.of[i] = added.of[i] * other;
        Strip result = renew(state, decay, mixed + key, mixed + query, added, key_dim);
        if (layer->skips)
            for (int i = 0; i < VECTORS; i++)
                result.of[i] = multiply_add(all_floats(layer->skips[head]), given.of[i], result.of[i]);
        store_strip(mixed + value, count, result);
        const int64_t save = save_of(args, token);
        if (save >= 0) memcpy(state_at(args, save) + place, state, size * sizeof(float));
    }
}

/* Divide the strips of all heads and requests among threads, by their numbers of tokens. */
static void states_part(const RecurrenceStep *args, int thread, int num_threads) {
    const Recurrence *layer = args->layer;
    const int64_t strips = (layer->value_dim + STRIP - 1) / STRIP, total = args->firsts[args->num_requests];
    const int64_t work = layer->num_heads * strips * total;
    const int64_t begin = work * thread / num_threads, end = work * (thread + 1) / num_threads;
    for (int64_t one = total ? begin / total : 0; one * total < end; one++)
        for (int64_t request = 0; request < args->num_requests; request++) {
            const int64_t at = one * total + args->firsts[request];
            if (at < begin || at >= end) continue; /* another thread's */
            if (layer->kind == GATED_DELTA)
                run_strip(args, request, one / strips, one % strips, 1);
            else
                run_strip(args, request, one / strips, one % strips, 0);
        }
}

/* --- the results --- */

/* out = each head's results, normalised, times their gates: GATED_DELTA. */
INLINE void finish_delta_row(const RecurrenceStep *args, int64_t token, const int dtype) {
    const Recurrence *layer = args->layer;
    const int64_t size = layer->value_dim, width = layer->num_heads * size;
    float *results = args->mixed + token * args->mixed_stride + layer->channels - width;
    const char *row = (const char *)args->in + token * layer->width * element_bytes(dtype);
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
INLINE void gate_row(const RecurrenceStep *args, int64_t token, float *to, const int dtype) {
    const Recurrence *layer = args->layer;
    const int64_t width = (int64_t)layer->num_heads * layer->value_dim;
    const float *results = args->mixed + token * args->mixed_stride;
    const char *row = (const char *)args->in + token * layer->width * element_bytes(dtype);
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

INLINE void finish_row(const RecurrenceStep *args, int64_t token, const int dtype) {
    const Recurrence *layer = args->layer;
    if (layer->kind == GATED_DELTA) {
        finish_delta_row(args, token, dtype);
        return;
    }
    const int64_t width = (int64_t)layer->num_heads * layer->value_dim;
    float *to = args->gated ? args->gated + token * args->gated_stride : args->mixed + token * args->mixed_stride;
    gate_row(args, token, to, dtype);
    if (args->gated) return;
    char *out = (char *)args->out + token * width * element_bytes(dtype);
    norm_row(to, layer->norm, out, width, width / layer->num_groups, layer->eps, dtype);
}

static void results_part(const RecurrenceStep *args, int thread, int num_threads) {
    const int64_t num_tokens = args->firsts[args->num_requests];
    const int64_t end = first_of(num_tokens, 1, thread + 1, num_threads);
    for (int64_t token = first_of(num_tokens, 1, thread, num_threads); token < end; token++) {
        if (args->layer->dtype == BFLOAT16)
            finish_row(args, token, BFLOAT16);
        else
            finish_row(args, token, FLOAT32);
    }
}

void group_norm_part(const GroupNorm *args, int thread, int num_threads) {
    const int64_t width = args->width, bytes = width * element_bytes(args->dtype);
    const int64_t end = first_of(args->num_rows, 1, thread + 1, num_threads);
    for (int64_t row = first_of(args->num_rows, 1, thread, num_threads); row < end; row++) {
        const float *gated = args->gated + row * width;
        char *out = (char *)args->out + row * bytes;
        if (args->dtype == BFLOAT16)
            norm_row(gated, args->weight, out, width, args->size, args->eps, BFLOAT16);
        else
            norm_row(gated, args->weight, out, width, args->size, args->eps, FLOAT32);
    }
}

void recurrence_part(const RecurrenceStep *args, int thread, int num_threads) {
    convolution_part(args, thread, num_threads);
    if (args->layer->kind == SHORT_CONVOLUTION) return;
    pool_barrier();
    factors_part(args, thread, num_threads);
    pool_barrier();
    states_part(args, thread, num_threads);
    pool_barrier();
    results_part(args, thread, num_threads);
}

static void recurrence_job(void *args, int thread, int num_threads) { recurrence_part(args, thread, num_threads); }

EXPORT void recurrence(const RecurrenceStep *args) { pool_run(recurrence_job, (void *)args); }
