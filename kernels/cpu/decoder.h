/* A decoder's whole step as one job of the pool: embedding, all layers, final norm and head.
 *
 * Each phase is the xxx_part() of a kernel, so the bits are those of the kernels called one after the other. There is a
 * barrier between two phases, unless both give a thread the same rows. Kernels that work row by row divide the rows in
 * the same way, and so do products of many rows. Then only attention has barriers, before and after it.
 *
 * An encoder is a decoder without a head whose attention sees the whole prompt. Its prompts are computed in one step. So
 * all layers may have the same memory as their cache.
 */
#ifndef DECODER_H
#define DECODER_H

#include "attention_plan.h"
#include "gemm.h"
#include "norm.h"

/* A layer of a model; made once. The Gemms have weights, bias, sizes and dtypes. */
typedef struct {
    Gemm qkv, o, gate_up, down;
    NormWeights input_norm, mlp_norm;         /* where one replaces hidden, norms stand after the addition */
    NormWeights attention_out_norm, mlp_out_norm; /* of what is added; those without a weight are left out */
    const float *head_norms;                  /* see rope.h; or NULL */
    float scale;                              /* see attention.h */
    int32_t kind;                             /* kind of window and rotation: index into the step's kinds */
} DecoderLayer;

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
} Decoder;

/* A step's inputs for the layers of one kind. */
typedef struct {
    const float *cos, *sin; /* see rope.h; NULL = no rotation */
    AttentionPlan *plan;
    Attention attention;    /* has partials, scratch, shape and num_heads */
} DecoderKind;

/* One step: T tokens, logits for S rows. Its buffers are overwritten. */
typedef struct {
    const Decoder *decoder;
    const DecoderKind *kinds;
    void *const *cache;                 /* [num_layers] */
    const int64_t *token_ids, *positions, *slots; /* [T] */
    const int64_t *logits_rows;         /* [S] indices of tokens */
    float *hidden;                      /* [T, hidden_size]; after the step the last layer's input */
    void *x;                            /* [max(T, S), hidden_size] of dtype; those below have other widths */
    void *qkv, *q, *attended, *gated;
    void *added;                        /* of x's size: a layer's output that is added to hidden */
    float *normed;                      /* `added` normalised, float32; or NULL if no layer does that */
    float *last_hidden;                 /* [S, hidden_size]: the last layer's output */
    float *logits;                      /* [S, num_columns of head]; NULL = compute only last_hidden */
    int32_t *largest;                   /* [S] by find_largest() of sampling.h; or NULL */
    void *quantized;                    /* room for x of a product in 8 bits (gemm.h); or NULL */
    int64_t quantized_stride;           /* for the deepest product: threads are at different ones */
    int64_t num_tokens, num_logits;
    int64_t is_narrow;                  /* out: the last layer's attention may lack rows without logits */
} DecoderStep;

void decoder_step(DecoderStep *args);

/* Compute logits of other rows of the last step. Its hidden, q and attended must be unchanged. */
void decoder_logits(DecoderStep *args);

#endif
