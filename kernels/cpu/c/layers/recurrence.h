/* Layers with a recurrent state instead of attention: what a token passes to the next one has a fixed size.
 *
 * All start with a causal convolution of each channel over the last tokens. Then, by kind:
 *
 *   SHORT_CONVOLUTION (Liquid AI 2025, arXiv 2511.23404): y = c * convolution(b * x).
 *   GATED_DELTA (Yang et al. 2024, arXiv 2412.06464), a state S [key_dim, value_dim] for each head:
 *       S = decay * S; S = S + k (beta * (v - k S))^T; y = norm(q S) * silu(z),
 *       decay = exp(-rate * softplus(a + step_bias)), beta = most_beta * sigmoid(b), q and k of length 1,
 *       q / sqrt(key_dim).
 *   STATE_SPACE (Mamba 2: Dao & Gu 2024, arXiv 2405.21060), the same state with k = B and q = C:
 *       S = decay * S + k (step * v)^T; y = norm((q S + skip * v) * silu(z)),
 *       step = softplus(dt + step_bias) within limits, decay = exp(-rate * step).
 *
 * A request's tokens are computed one after the other, in float32, in a fixed order of operations. So a token's bits
 * depend on its request's tokens up to it, whatever the steps, the neighbours and the threads. kernels/recurrence.py
 * has the definition in NumPy.
 */
#ifndef RECURRENCE_H
#define RECURRENCE_H

#include "math/elements.h"

enum { SHORT_CONVOLUTION = 0, GATED_DELTA = 1, STATE_SPACE = 2 };

/* Values of a head are computed in strips of STRIP columns, which the first level cache keeps. */
enum { STRIP = 32, MAX_TAPS = 8 };

/* A step's tokens are computed in tiles of this many, whose channels stay in the caches. */
enum { MIXED_ROWS = 64 };

/* A layer; made once. A row of its input has [b, c, x] (SHORT_CONVOLUTION), [q, k, v, z, b, a] (GATED_DELTA) or [z,
 * v, k, q, dt] (STATE_SPACE); the channels are the convolved ones, in their order. */
typedef struct {
    const float *kernel; /* [taps, channels]: the oldest token's first */
    const float *bias;   /* [channels]; or NULL */
    const float *rates, *step_biases, *skips; /* [num_heads]; skips may be NULL */
    const float *norm;   /* [value_dim], or of STATE_SPACE [num_heads * value_dim], or NULL: it has no norm */
    int64_t channels, width; /* width: of a row of the input */
    int64_t state_offset;    /* of the layer's state in a request's */
    int32_t kind, dtype, taps;
    int32_t num_heads, num_groups; /* heads of a group have the same keys and queries */
    int32_t takes_turns;           /* head h is in group h % num_groups; otherwise consecutive heads are in one group */
    int32_t key_dim, value_dim;    /* key_dim is even */
    float eps, least_step, most_step, most_beta;
} Recurrence;

/* One step's T tokens of some requests. */
typedef struct {
    const Recurrence *layer;
    const void *in; /* [T, width] of dtype */
    void *out;      /* [T, channels] of dtype for SHORT_CONVOLUTION; otherwise [T, num_heads * value_dim] */
    float *mixed;   /* [T, at most MIXED_ROWS; mixed_stride]: room for the channels, then two factors for each head */
    float *states;  /* [requests' rows, state_stride]: convolution's last inputs [taps - 1, channels], then at a multiple
                     * of 16 the heads' strips [num_heads, strips, key_dim, STRIP] */
    const int64_t *rows, *firsts; /* [R] row of each request's state; [R + 1] its first token */
    const int64_t *positions;     /* [T]; a request that starts at 0 starts with a state of zeros */
    const int64_t *saves;         /* [T] row to which the state after the token is copied, below 0: none; NULL: none */
    int64_t state_stride, mixed_stride, num_requests;
    float *gated; /* of STATE_SPACE: [T, gated_stride] results times their gates, instead of out; group_norm_part() does the
                   * rest. Otherwise NULL */
    int64_t gated_stride;
} RecurrenceStep;

/* What a step of STATE_SPACE leaves to do if it has written `gated`. */
typedef struct {
    const float *gated, *weight; /* [num_rows, width]; [width], or NULL: rows are only rounded */
    void *out;                   /* [num_rows, width] of dtype */
    int64_t num_rows, width, size; /* size: numbers that are normalised together */
    float eps;
    int32_t dtype;
} GroupNorm;

/* Compute out and the new states. All threads call this; there are barriers inside, but none at the end. */
void recurrence_part(const RecurrenceStep *args, int thread, int num_threads);
void recurrence(const RecurrenceStep *args);

/* Normalise rows of gated results. All threads call this. */
void group_norm_part(const GroupNorm *args, int thread, int num_threads);

#endif
