#include "sampling/sampling.h"

#include <math.h>
#include <stdlib.h>

#include "sampling/gumbel.h"
#include "threads/pool.h"

/* Logits in a group. A search for candidates reads each group's largest logit first. */
#define GROUP 64

/* Logits after which the largest of all lanes is computed. */
#define PIECE 512

/* Number of candidates to begin with if there is no top_k, and the factor for more if they are not enough. */
#define FIRST_CANDIDATES 64
#define MORE 8

typedef struct {
    float value; /* logit / temperature */
    int32_t id;
} Candidate;

/* The row that is being sampled. */
typedef struct {
    const float *logits;
    float temperature, largest; /* the largest logit / temperature */
    float min_p;
    int64_t size;
    Stream stream;
    float *group_maxima;  /* [number of groups] of logits */
    Candidate *candidates, *spare; /* [size] */
} Row;

/* Load a vector of logits from index on; minus infinity past the end. */
INLINE Floats load_logits(const float *logits, int64_t index, int64_t size) {
    if (index + LANES <= size) return load_floats(logits + index);
    float numbers[LANES];
    for (int i = 0; i < LANES; i++) numbers[i] = index + i < size ? logits[index + i] : -INFINITY;
    return load_floats(numbers);
}

/* Return the largest of logits [begin, end), ignoring NaN. Lanes of is_nan in which a NaN occurs become -1. */
INLINE float largest_between(const Row *row, int64_t begin, int64_t end, Signed *is_nan) {
    Floats maximum = all_floats(-INFINITY);
    for (int64_t i = begin; i < end && i < row->size; i += LANES) {
        Floats x = load_logits(row->logits, i, row->size);
        *is_nan |= x != x;
        maximum = larger(x, maximum);
    }
    return largest_of(maximum);
}

/* Return the index of the first NaN if there is one, otherwise of the largest logit, the first on a tie. */
static int64_t index_of_largest(const Row *row) {
    const float *logits = row->logits;
    int64_t index = 0;
    float best = -INFINITY;
    Signed is_nan = {0};
    for (int64_t begin = 0; begin < row->size; begin += PIECE) {
        float largest = largest_between(row, begin, begin + PIECE, &is_nan);
        if (largest > best) best = largest, index = begin;
    }
    if (sum_of(choose(is_nan, all_floats(1.0f), all_floats(0.0f))) > 0.0f)
        for (index = 0; logits[index] == logits[index];) index++;
    else
        while (index + 1 < row->size && logits[index] != best) index++;
    return index;
}

void find_largest(const float *logits, int64_t num_rows, int64_t vocab_size, int32_t *largest) {
    for (int64_t i = 0; i < num_rows; i++, logits += vocab_size) {
        const int64_t best = index_of_largest(&(Row){.logits = logits, .size = vocab_size});
        largest[i] = isfinite(logits[best]) ? (int32_t)best : -1;
    }
}

/* Return the weights of some logits: exp(logit / temperature - largest); exactly 0 for minus infinity and below
 * min_p. */
INLINE Floats weights_of(const Row *row, Floats logits) {
    Floats x = logits / row->temperature - row->largest;
    Floats weights = choose(x < -87.0f, all_floats(0.0f), exponential(x));
    return choose(weights < row->min_p, all_floats(0.0f), weights);
}

/* Return sum plus the sum of a group's weights, in a fixed order. */
INLINE double add_group(const Row *row, int64_t begin, double sum) {
    float weights[GROUP];
    for (int i = 0; i < GROUP; i += LANES) {
        if (begin + i >= row->size) break;
        store_floats(weights + i, weights_of(row, load_logits(row->logits, begin + i, row->size)));
    }
    double sums[4] = {0};
    int64_t count = row->size - begin < GROUP ? row->size - begin : GROUP;
    int64_t i = 0;
    for (; i + 4 <= count; i += 4)
        for (int j = 0; j < 4; j++) sums[j] += weights[i + j];
    for (; i < count; i++) sums[0] += weights[i];
    return sum + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

static double total_weight(const Row *row) {
    double total = 0.0;
    for (int64_t begin = 0; begin < row->size; begin += GROUP) total = add_group(row, begin, total);
    return total;
}

/* The winner of a race so far: the token with the largest logit / temperature + noise, the first on a tie. */
typedef struct {
    double sum;
    int64_t id;
} Winner;

/* Let a token take part in the race. high: its high bits. A token that cannot win with these is rejected early, and
 * so is one that min_p excludes. */
INLINE void enter(const Row *row, int64_t id, uint32_t high, Winner *winner) {
    const float x = row->logits[id] / row->temperature;
    if (x == -INFINITY || high >= limit_of_high_bits(winner->sum - x)) return;
    const double sum = x + gumbel_noise(&row->stream, id, high);
    if (sum < winner->sum || (sum == winner->sum && id > winner->id)) return;
    if (weights_of(row, all_floats(row->logits[id]))[0] >= row->min_p) *winner = (Winner){sum, id};
}

/* Enter the tokens from `begin` on that one call of high_bits_from() covers. limit: for the high bits of a token
 * that has the largest logit among them. */
static void enter_some(const Row *row, int64_t begin, const Words halves[4], uint32_t limit, Winner *winner) {
    for (int64_t i = 0; i < LANES * TOKENS_PER_BLOCK && begin + i < row->size; i++) {
        const uint32_t high = halves[i % 8 / 2][i / 8] >> 16 * (i % 2) & 0xffff;
        if (high < limit) enter(row, begin + i, high, winner);
    }
}

/* Draw from all tokens that min_p keeps. best: the index of the largest logit. Most tokens cannot win with their
 * high bits, so their noise is not computed. */
static int64_t draw_from_all(const Row *row, int64_t best) {
    const float lowest = row->min_p > 0.0f ? row->largest + logf(row->min_p) - 1.0f : -INFINITY; /* min_p keeps more */
    Winner winner = {-INFINITY, row->size};
    enter(row, best, high_bits_of(&row->stream, best), &winner);
    Signed is_nan = {0}; /* unused: index_of_largest() has excluded NaN */
    for (int64_t begin = 0; begin < row->size; begin += LANES * TOKENS_PER_BLOCK) {
        const float x = largest_between(row, begin, begin + LANES * TOKENS_PER_BLOCK, &is_nan) / row->temperature;
        if (x < lowest || x + MOST_NOISE < winner.sum) continue;
        const uint32_t limit = limit_of_high_bits(winner.sum - x);
        Words halves[4];
        high_bits_from(&row->stream, begin, halves);
        if (has_half_below(halves, limit)) enter_some(row, begin, halves, limit, &winner);
    }
    return winner.id;
}

/* Map floats to integers of the same order. */
INLINE int32_t ordered(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits < 0 ? (int32_t)(0x80000000u - (uint32_t)bits) : bits;
}

INLINE float unordered(int32_t key) {
    int32_t bits = key < 0 ? (int32_t)(0x80000000u - (uint32_t)key) : key;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static int64_t count_from(const float *x, int64_t size, float bound) {
    Signed counts = {0};
    for (int64_t i = 0; i < size; i += LANES) counts -= load_logits(x, i, size) >= bound;
    int64_t count = 0;
    for (int i = 0; i < LANES; i++) count += counts[i];
    return count;
}

/* Return the greatest bound that at least `wanted` numbers of x reach, by bisection. wanted <= size; x has no NaN. */
static float bound_of(const float *x, int64_t size, int64_t wanted) {
    int64_t low = ordered(-INFINITY), high = ordered(INFINITY);
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        if (count_from(x, size, unordered((int32_t)middle)) >= wanted)
            low = middle;
        else
            high = middle - 1;
    }
    return unordered((int32_t)low);
}

/* Return the lowest logit that equals `bound` after division by the temperature, which can make different logits
 * equal. */
static float lowest_alike(const Row *row, float bound) {
    int64_t low = ordered(-INFINITY), high = ordered(bound);
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (unordered((int32_t)middle) / row->temperature >= bound / row->temperature)
            high = middle;
        else
            low = middle + 1;
    }
    return unordered((int32_t)low);
}

static int compare(const void *left, const void *right) {
    const Candidate *a = left, *b = right;
    if (a->value != b->value) return a->value > b->value ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

/* Fewer candidates than this are sorted by comparisons. */
enum { RADIX_FROM = 256 };

/* Return a number that sorts like compare(), except for the ids. */
INLINE uint32_t descending(float value) { return ~((uint32_t)ordered(value) ^ 0x80000000u); }

/* Sort the row's candidates, which ascend by id, as compare() does. If nearly all tokens are candidates, because
 * many logits are equal or close, sorting by comparisons takes longer than the rest of a small model's step. */
static void sort_candidates(const Row *row, int64_t count) {
    if (count < RADIX_FROM) {
        qsort(row->candidates, count, sizeof *row->candidates, compare);
        return;
    }
    int64_t counts[4][256] = {{0}};
    for (int64_t i = 0; i < count; i++) {
        const uint32_t key = descending(row->candidates[i].value);
        for (int byte = 0; byte < 4; byte++) counts[byte][key >> 8 * byte & 255]++;
    }
    Candidate *from = row->candidates, *to = row->spare;
    for (int byte = 0; byte < 4; byte++) {
        if (counts[byte][descending(from[0].value) >> 8 * byte & 255] == count) continue;
        int64_t places[256], place = 0;
        for (int i = 0; i < 256; i++) places[i] = place, place += counts[byte][i];
        for (int64_t i = 0; i < count; i++) to[places[descending(from[i].value) >> 8 * byte & 255]++] = from[i];
        Candidate *swapped = from;
        from = to, to = swapped;
    }
    if (from != row->candidates) memcpy(row->candidates, from, count * sizeof *from);
}

/* Find all tokens whose logit / temperature reaches a bound that at least `wanted` tokens reach, in descending
 * order. Return their number. If there are at least `wanted` groups, the bound is the wanted-th largest of their
 * maxima: that many groups contain at least one such token each. */
static int64_t find_candidates(const Row *row, int64_t wanted) {
    const int64_t num_groups = (row->size + GROUP - 1) / GROUP;
    float bound = wanted >= row->size    ? -INFINITY
                  : wanted <= num_groups ? bound_of(row->group_maxima, num_groups, wanted)
                                         : bound_of(row->logits, row->size, wanted);
    bound = lowest_alike(row, bound);
    int64_t count = 0;
    for (int64_t group = 0; group < num_groups; group++) {
        if (row->group_maxima[group] < bound) continue;
        for (int64_t i = group * GROUP; i < (group + 1) * GROUP && i < row->size; i++) {
            if (row->logits[i] < bound) continue;
            row->candidates[count++] = (Candidate){row->logits[i] / row->temperature, (int32_t)i};
        }
    }
    sort_candidates(row, count);
    return count;
}

static float candidate_weight(const Row *row, int64_t i) {
    float x = row->candidates[i].value - row->largest;
    return x < -87.0f ? 0.0f : exponential(all_floats(x))[0];
}

static int64_t draw_from_largest(const Row *row, int64_t top_k, float top_p) {
    Signed is_nan = {0}; /* unused: index_of_largest() has excluded NaN */
    for (int64_t begin = 0; begin < row->size; begin += GROUP)
        row->group_maxima[begin / GROUP] = largest_between(row, begin, begin + GROUP, &is_nan);
    const double total = top_k ? 0.0 : total_weight(row);
    for (int64_t wanted = top_k ? top_k : FIRST_CANDIDATES;; wanted *= MORE) {
        const int64_t count = find_candidates(row, wanted < row->size ? wanted : row->size);
        /* Every filter keeps a prefix: tokens not below min_p, of these the first top_k and the ties of the last. */
        int64_t kept = 0;
        double sum = 0.0;
        for (; kept < count; kept++) {
            const Candidate *candidate = &row->candidates[kept];
            if (top_k && kept >= top_k && candidate->value < row->candidates[top_k - 1].value) break;
            float weight = candidate_weight(row, kept);
            if (weight < row->min_p || candidate->value == -INFINITY) break;
            sum += weight;
        }
        const double bound = top_p * (top_k ? sum : total);
        const int is_all = top_k || kept < count || count == row->size;
        if (!is_all && sum < bound) continue;
        if (top_p < 1.0f) { /* a token is kept if those before it sum to less than top_p; the first always is */
            int64_t by_p = 0;
            for (sum = 0.0; by_p < kept && (by_p == 0 || sum < bound); by_p++) sum += candidate_weight(row, by_p);
            kept = by_p;
        }
        Winner winner = {-INFINITY, row->size};
        for (int64_t i = 0; i < kept && row->candidates[i].value + MOST_NOISE >= winner.sum; i++) {
            const int64_t id = row->candidates[i].id;
            enter(row, id, high_bits_of(&row->stream, id), &winner);
        }
        return winner.id;
    }
}

static int32_t sample_row(const Sampling *args, int64_t index, char *scratch) {
    const int64_t size = args->vocab_size;
    const float temperature = args->temperature ? args->temperature[index] : 0.0f;
    Row row = {.logits = args->logits + index * size, .size = size};
    row.temperature = temperature > 0.0f ? temperature : 1.0f;
    int64_t best = args->largest ? args->largest[index] : UNKNOWN;
    if (best == UNKNOWN) best = index_of_largest(&row);
    if (best < 0) return -1;
    row.largest = row.logits[best] / row.temperature;
    if (!isfinite(row.largest)) return -1;
    if (temperature == 0.0f) return (int32_t)best;
    row.candidates = (Candidate *)scratch;
    row.spare = row.candidates + size;
    row.group_maxima = (float *)(scratch + 2 * size * sizeof(Candidate));
    row.min_p = args->min_p[index];
    row.stream = (Stream){args->seed[index], (uint32_t)args->position[index], (uint32_t)args->choice[index]};
    const int64_t top_k = args->top_k[index];
    const float top_p = args->top_p[index];
    const int has_top_k = top_k > 0 && top_k < size;
    if (has_top_k || top_p < 1.0f) return (int32_t)draw_from_largest(&row, has_top_k ? top_k : 0, top_p);
    return (int32_t)draw_from_all(&row, best);
}

EXPORT int64_t sampling_scratch_bytes(int64_t vocab_size) {
    return (2 * vocab_size * (int64_t)sizeof(Candidate) + (vocab_size / GROUP + 1) * 4 + 63) / 64 * 64;
}

void sample_part(const Sampling *args, int thread, int num_threads) {
    char *scratch = args->scratch + thread * sampling_scratch_bytes(args->vocab_size);
    for (int64_t i = thread; i < args->num_rows; i += num_threads) args->tokens[i] = sample_row(args, i, scratch);
}

static void sample_job(void *args, int thread, int num_threads) { sample_part(args, thread, num_threads); }

EXPORT void sample(const Sampling *args) {
    if (args->num_rows == 1)
        sample_part(args, 0, 1);
    else
        pool_run(sample_job, (void *)args);
}
