/* A routed MLP (Shazeer et al. 2017, arXiv 1701.06538): a router chooses a few experts, gated MLPs, for each row; the row's
 * result is the weighted sum of theirs.
 *
 *     logits = x @ router^T; y = sum over the chosen e of weights[e] * (f(x @ gate_e^T) * (x @ up_e^T)) @ down_e^T
 *
 * routing.h says which experts are chosen and what their weights are. A shared expert is one more gated MLP, used by
 * all rows; its weight is 1, or the sigmoid of the router's last logit. A row's sum is in float32 and ordered by
 * expert, the shared one last, so its bits do not depend on other rows. Weights of experts that no row has chosen are
 * not read. If one of a row's logits is not finite, its whole result is NaN.
 *
 * Ranks of a group (group.h) route all rows. Each has some columns of every expert's products, so their shares of the
 * work are equal, whichever experts are chosen.
 */
#ifndef EXPERTS_H
#define EXPERTS_H

#include "products/gemm.h"
#include "layers/routing.h"
#include "threads/group.h"

/* Rows are computed in batches of at most this many, which bounds the memory. */
enum { EXPERT_ROWS = 512 };

typedef struct {
    Gemm router;                /* to float32: one column per expert, then the shared expert's gate, if it has one */
    const Gemm *gate_up, *down; /* [num_experts]; the first ones have a gate, the second ones give float32 */
    const Gemm *shared;         /* [2] the shared expert's gate_up and down; or NULL */
    Routing routing;
    int32_t has_shared_gate;
    int32_t width; /* of x and the result, of all ranks */
} Experts;

/* A group of ranks of which this process is one, and its columns. y and what gate_up of the experts and of the shared one
 * yield are in memory that all ranks share, or are exchanged by streams. */
typedef struct {
    const Ranks *ranks;
    const Place *y, *gated, *shared_gated;
} ExpertsGroup;

/* What threads share during the computation, for min(num_rows, EXPERT_ROWS) rows. */
typedef struct {
    float *logits;    /* [rows, num_columns of the router] */
    float *keys;      /* [rows, num_experts + num_groups]: see choose_experts() */
    int32_t *chosen;  /* [rows, num_chosen], ascending */
    float *weights;   /* [rows, num_chosen] */
    int32_t *places;  /* [rows, num_chosen]: of the row in `gathered` */
    int32_t *starts;  /* [num_experts + 1]: places of each expert's first row */
    int32_t *active;  /* [num_experts + 1]: the experts with rows; the last number is how many there are */
    void *gathered;   /* [rows * num_chosen, width] of dtype: x, expert after expert */
    void *gated;      /* [rows * num_chosen, depth of down] of dtype */
    float *results;   /* [rows * num_chosen, columns of down] */
    void *shared_gated;    /* [rows, depth of the shared down] of dtype; or NULL */
    float *shared_results; /* [rows, columns of down]; or NULL */
    void *quantized;  /* room for rows * (num_chosen + 1) rows of a product in 8 bits (gemm.h); or NULL */
    int64_t quantized_stride;
} ExpertsRoom;

typedef struct {
    const Experts *experts;
    const ExpertsRoom *room;
    const void *x; /* [num_rows, width] of dtype */
    void *y;       /* [num_rows, width] of dtype */
    int64_t num_rows;
    const void *router_x; /* [num_rows, width] of dtype: what the router multiplies; NULL = x */
    const ExpertsGroup *group; /* NULL = this process computes whole results */
} ExpertsStep;

/* Compute y. All threads call this; there are barriers inside, but none at the end. */
void experts_part(const ExpertsStep *args, int thread, int num_threads);
void experts(const ExpertsStep *args);

#endif
