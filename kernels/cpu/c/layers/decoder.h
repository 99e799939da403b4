/* A decoder's whole step as one job of the pool: embedding, all layers, final norm and head.
 *
 * Each phase is the xxx_part() of a kernel, so the bits are the same as if the kernels were called one after the other.
 * There is a barrier between two phases, unless both give a thread the same rows. Kernels that work row by row divide
 * the rows in the same way, and so do products of many rows. Then only attention has barriers, before and after it.
 *
 * An encoder is a decoder without a head whose attention sees the whole prompt. Its prompts are computed in one step. So
 * all layers may have the same memory as their cache.
 */
#ifndef DECODER_H
#define DECODER_H

#include "attention/attention_plan.h"
#include "layers/experts.h"
#include "products/gemm.h"
#include "threads/group.h"
#include "attention/latent.h"
#include "products/lora.h"
#include "layers/norm.h"
#include "layers/per_layer.h"
#include "layers/recurrence.h"
#include "layers/rope.h"

/* The norms of a layer whose experts run alongside a dense MLP: hidden += mlp_out_norm(dense_norm(MLP) + output_norm(experts)),
 * and both read hidden as attention leaves it. */
typedef struct {
    NormWeights input_norm, router_norm; /* of what experts and router read */
    NormWeights dense_norm, output_norm;
} ExpertsBeside;

/* A layer of a model; made once. The Gemms have weights, bias, sizes and dtypes. */
typedef struct {
    Gemm qkv, o, gate_up, down;
    NormWeights input_norm, mlp_norm;         /* if one replaces hidden, norms come after the addition */
    NormWeights attention_out_norm, mlp_out_norm; /* of what is added; those without a weight are left out */
    const float *norms;                       /* of Q and K: see rope.h; or NULL */
    float scale, cap_factor;                  /* see attention.h */
    int32_t kind;                             /* kind of window and rotation: index into the step's kinds */
    int64_t tap;                              /* place + 1 among the taps of what the layer reads; 0 = none */
    int32_t norms_of_rows, centred_norms, norms_after, values; /* of heads: see rope.h */
    RowHeads row;
    float layer_scale;                        /* of hidden, at the layer's end; 0 = none */
    int32_t lacks_mlp;                        /* the layer ends once attention's output is added; mlp_norm is not used */
    const Experts *experts;                   /* instead of gate_up and down, or alongside them; or NULL */
    const ExpertsBeside *beside;              /* of experts alongside a dense MLP; or NULL */
    const PerLayer *per_layer;                /* what the layer's own inputs make, after the MLP; or NULL */
    const float *sinks;                       /* see attention.h; or NULL */
    const Latent *latent;                     /* around attention; qkv has the columns of LatentStep.qkv. Or NULL */
    const Recurrence *recurrence;             /* instead of attention, with qkv and o as its products; or NULL */
    const Gemm *output_gate;                  /* attention's output is multiplied by the sigmoid of this; or NULL */
    Place attended, gated;                    /* of a rank: of the output of attention, or of a turn of a recurrence; of gate_up */
} DecoderLayer;

/* A layer's products, as adapters number them: layer * LAYER_PRODUCTS + one of these. */
enum { QKV_PRODUCT = 0, O_PRODUCT = 1, GATE_UP_PRODUCT = 2, DOWN_PRODUCT = 3, OUTPUT_GATE_PRODUCT = 4, LAYER_PRODUCTS = 5 };

/* A group of ranks of which this process is one. The products of its layers have the rank's columns only, but take whole
 * inputs, and its heads are the rank's. The table of embeddings has the rank's part of the vocabulary. */
typedef struct {
    Ranks ranks;
    Place hidden, vocabulary; /* of o and down; of the head; a layer has those of its other products */
    Place expert_gated, shared_gated; /* of gate_up of experts, and of the shared one */
    int64_t num_words;    /* of the rank's part of the vocabulary, from vocabulary.first on */
    int64_t num_turns;    /* of recurrences: a row has so many parts, of which `attended` is one, with heads of all groups */
    int64_t norm_size;    /* of a STATE_SPACE of all ranks: numbers that are normalised together */
} DecoderGroup;

typedef struct {
    const DecoderLayer *layers;
    Gemm head;
    const void *embeddings; /* of dtype; see embedding.h */
    NormWeights norm;       /* the final norm */
    int64_t hidden_size;
    int32_t num_layers, num_heads, dtype;
    float eps, embedding_scale;
    int32_t embeddings_packing; /* see embedding.h, also for those below */
    const float *kinds, *places;
    int64_t num_words;
    const DecoderGroup *group; /* NULL = there is no group. Otherwise embedded, attended, tail_picked, gated, added, logits
                                * and largest of a step, and what experts gate, are in memory that all ranks share, or are
                                * exchanged by streams; then only rank 0 has logits and largest */
    float residual_multiplier; /* see norm.h */
    float logits_cap;          /* see soft_cap.h; 0 = none */
    const PerLayerInputs *per_layer; /* inputs of single layers; or NULL */
    int64_t num_tail;          /* last layers, all without K and V: they are computed for rows with logits only */
} Decoder;

/* A step's inputs for the layers of one kind. */
typedef struct {
    const float *cos, *sin, *query_cos, *query_sin; /* see rope.h; NULL = no rotation */
    AttentionPlan *plan;
    const int64_t *slots;   /* [T] where K and V of the step's tokens are stored, see rope.h */
    Attention attention;    /* has partials, scratch, shape and num_heads */
} DecoderKind;

/* One step: T tokens, logits for S rows. Its buffers are overwritten. */
typedef struct {
    const Decoder *decoder;
    const DecoderKind *kinds;
    void *const *cache;                 /* [num_layers] */
    const int64_t *token_ids, *positions; /* [T] */
    const int64_t *logits_rows;         /* [S] indices of tokens */
    float *hidden;                      /* [T, hidden_size]; after the step the last layer's input */
    void *x;                            /* [max(T, S), hidden_size] of dtype; those below have other widths */
    void *qkv, *q, *attended, *gated;
    void *queries, *values;             /* of latent attention: its queries; its heads' values; or NULL */
    float *embedded;                    /* of a group: [T, hidden_size], shared; or NULL */
    void *own_attended;                 /* of a rank of a group: attention's output for its heads, or all of a STATE_SPACE;
                                         * or NULL */
    float *recurred;                    /* of a group: [T, attended.width] gated results of a STATE_SPACE, shared; or NULL */
    void *added;                        /* of x's size: a layer's output that is added to hidden */
    float *normed;                      /* `added` normalised, float32; or NULL if no layer does that */
    float *last_hidden;                 /* [S, hidden_size]: the last layer's output */
    float *logits;                      /* [S, num_columns of head]; NULL = compute only last_hidden */
    int32_t *largest;                   /* [S] by find_largest() of sampling.h; or NULL */
    float *taps;                        /* [T, num_taps, hidden_size]: hidden before the layers with a tap */
    void *quantized;                    /* room for x of a product in 8 bits (gemm.h); or NULL */
    int64_t quantized_stride;           /* for the deepest product: threads are at different ones */
    const ExpertsRoom *experts_room;    /* or NULL if no layer has experts */
    int64_t num_tokens, num_logits, num_taps;
    int64_t is_narrow;                  /* out: the last layer's attention may lack rows without logits */
    const LoraProduct *const *adapters; /* [T] see lora.h; NULL = no row has one */
    const LoraProduct **picked;         /* [S] with adapters: room for those of the rows that have logits */
    float *lowered;                     /* [max(T, S), lowered_stride] with adapters */
    int64_t lowered_stride;
    const float *given; /* [.., hidden_size]: embeddings of token ids below 0, see embedding.h */
    const int64_t *rotations; /* [T]: rows of cos and sin; NULL = positions */
    const float *deep;  /* [.., num_deep, hidden_size]: for token ids below 0, what is added to hidden after the first layers */
    int64_t num_deep;   /* at most num_layers */
    const int64_t *words;    /* [T] of a model's later layers, if these have inputs of their own: the tokens' ids, as given */
    const float *embeddings; /* ids stand for what the layers before have made; [T, hidden_size]: their embeddings. Or NULL */
    void *output_gates; /* [T, numbers of attention's output] of dtype, of layers with an output_gate */
    float *mixed, *states; /* of layers with a recurrence, as all below: see recurrence.h */
    const int64_t *state_rows, *firsts, *saves;
    int64_t state_stride, mixed_stride, num_requests;
    void *projected;    /* [T, num_layers * width] of dtype: see per_layer.h; or NULL */
    void *own_inputs;   /* [max(T, S), width] of dtype: what a layer's gate makes; or NULL. Rows of `gated` are of other widths,
                         * and threads that divide rows do not wait for each other */
    void *router_x;     /* [max(T, S), hidden_size] of dtype: what routers alongside dense MLPs read; or NULL */
    float *beside;      /* [max(T, S), hidden_size]: what dense MLPs alongside experts yield; or NULL */
    void *tail_q, *tail_attended, *tail_picked; /* of layers in the tail, in place of q and attended (of a rank: own_attended),
                                                 * of which rows with logits are written only; and room for these rows of
                                                 * attended, of all ranks. Or NULL */
} DecoderStep;

void decoder_step(DecoderStep *args);

/* Compute logits of other rows of the last step. Its hidden, q, attended and projected must be unchanged. */
void decoder_logits(DecoderStep *args);

#endif
