/* Which experts a row of a routed MLP has (experts.h), and the weights of their results.
 *
 * An expert's score is the softmax or the sigmoid of its logit. Chosen are the experts with the largest scores; of equal
 * ones the lower number. With a correction (Wang et al. 2024, arXiv 2408.15664) the scores plus it are compared. With
 * groups (DeepSeek V2, arXiv 2405.04434) only experts of some groups of neighbours can be chosen: of those whose best ones
 * have the largest sum. A weight is the expert's score, without the correction; the weights of a row may be divided by their
 * sum, to which a small number may be added; then they are multiplied by the scaling, and by the expert's own scale.
 */
#ifndef ROUTING_H
#define ROUTING_H

#include <stdint.h>

typedef struct {
    const float *correction; /* [num_experts], added to the scores that are compared; or NULL */
    float scaling;           /* of the weights */
    int32_t num_experts, num_chosen;
    int32_t is_sigmoid; /* scores are sigmoids, otherwise a softmax */
    int32_t normalises; /* the weights of a row's chosen experts sum to 1 before they are scaled */
    int32_t num_groups, num_chosen_groups; /* equal numbers mean: there are no groups */
    int32_t best_of_group; /* how many of a group's largest compared numbers are added up: 1 or 2 */
    float added_to_sum;    /* of weights that are normalised */
    int32_t scales_inputs; /* weights are of what the experts read, and not of their results */
    const float *scales;   /* [num_experts] of the experts' weights; or NULL */
} Routing;

/* Choose the experts of a row with these logits [num_experts]: their numbers in ascending order and their weights, both
 * [num_chosen]. keys: room for num_experts + num_groups numbers, of which some may be written. If a logit is not finite all
 * weights are NaN. */
void choose_experts(const Routing *routing, const float *logits, float *keys, int32_t *chosen, float *weights);

/* Return the sigmoid of x. */
float sigmoid_of(float x);

#endif
