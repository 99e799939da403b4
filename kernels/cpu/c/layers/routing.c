#include "layers/routing.h"

#include <math.h>

#include "math/vector_math.h"

/* Sums of scores below this count as this. */
static const float LEAST_SUM = 1e-20f;

/* Return exp(x) as the other kernels compute it, for x <= 0. */
static float power(float x) { return exponential(all_floats(x))[0]; }

float sigmoid_of(float x) {
    const float small = power(x < 0.0f ? x : -x);
    return (x < 0.0f ? small : 1.0f) / (1.0f + small);
}

/* Find the largest of some numbers, the first ones on a tie, and write their indices in ascending order. */
static void choose_largest(const float *numbers, int count, int32_t *chosen, int num_chosen) {
    int found = 0;
    for (int i = 0; i < count; i++) {
        int at = found;
        while (at > 0 && numbers[i] > numbers[chosen[at - 1]]) at--;
        if (at >= num_chosen) continue;
        if (found < num_chosen) found++;
        for (int j = found - 1; j > at; j--) chosen[j] = chosen[j - 1];
        chosen[at] = i;
    }
    for (int i = 1; i < num_chosen; i++) {
        const int32_t number = chosen[i];
        int at = i;
        for (; at > 0 && chosen[at - 1] > number; at--) chosen[at] = chosen[at - 1];
        chosen[at] = number;
    }
}

/* Return the sum of the largest number and, with best 2, of the second largest one. */
static float best_of(const float *numbers, int count, int best) {
    float first = -INFINITY, second = -INFINITY;
    for (int i = 0; i < count; i++) {
        if (numbers[i] > first)
            second = first, first = numbers[i];
        else if (numbers[i] > second)
            second = numbers[i];
    }
    return best == 2 ? first + second : first;
}

/* Set the keys of experts in groups that are not chosen to the minimum. The room for chosen experts is first used
 * for groups. */
static void leave_groups(const Routing *routing, float *keys, int32_t *chosen) {
    const int num_groups = routing->num_groups, size = routing->num_experts / num_groups;
    float *groups = keys + routing->num_experts;
    for (int group = 0; group < num_groups; group++)
        groups[group] = best_of(keys + group * size, size, routing->best_of_group);
    choose_largest(groups, num_groups, chosen, routing->num_chosen_groups);
    for (int group = 0, next = 0; group < num_groups; group++) {
        if (next < routing->num_chosen_groups && chosen[next] == group) {
            next++;
            continue;
        }
        for (int i = 0; i < size; i++) keys[group * size + i] = -INFINITY;
    }
}

void choose_experts(const Routing *routing, const float *logits, float *keys, int32_t *chosen, float *weights) {
    const int num_experts = routing->num_experts, num_chosen = routing->num_chosen;
    const int by_groups = routing->num_chosen_groups < routing->num_groups;
    float largest = -INFINITY, total = 0.0f, sum = 0.0f;
    int is_finite = 1;
    for (int i = 0; i < num_experts; i++) {
        is_finite &= isfinite(logits[i]) != 0;
        largest = logits[i] > largest ? logits[i] : largest;
    }
    if (!is_finite) { /* no comparison with a NaN is true */
        for (int i = 0; i < num_chosen; i++) chosen[i] = i, weights[i] = NAN;
        return;
    }
    const int needs_total = !routing->is_sigmoid && (routing->correction || !routing->normalises);
    for (int i = 0; needs_total && i < num_experts; i++) total += power(logits[i] - largest);
    if (routing->correction) {
        for (int i = 0; i < num_experts; i++) {
            const float score = routing->is_sigmoid ? sigmoid_of(logits[i]) : power(logits[i] - largest) / total;
            keys[i] = score + routing->correction[i];
        }
    } else if (by_groups) {
        memcpy(keys, logits, num_experts * sizeof *keys); /* their order is that of the scores */
    }
    if (by_groups) leave_groups(routing, keys, chosen);
    choose_largest(routing->correction || by_groups ? keys : logits, num_experts, chosen, num_chosen);
    for (int i = 0; i < num_chosen; i++) {
        const float logit = logits[chosen[i]];
        weights[i] = routing->is_sigmoid ? sigmoid_of(logit) : power(logit - largest);
        if (needs_total) weights[i] /= total;
        sum += weights[i];
    }
    if (routing->normalises)
        for (int i = 0; i < num_chosen; i++) weights[i] /= (sum < LEAST_SUM ? LEAST_SUM : sum) + routing->added_to_sum;
    if (routing->scaling != 1.0f)
        for (int i = 0; i < num_chosen; i++) weights[i] *= routing->scaling;
    if (routing->scales)
        for (int i = 0; i < num_chosen; i++) weights[i] *= routing->scales[chosen[i]];
}
