/* A decoder's whole step as one job of the pool: embedding, all layers, final norm and head.
 *
 * Each phase is the xxx_part() of a kernel, so that bits are those of the kernels called one after the other. Between
 * phases there is a barrier, but where a thread goes on with rows of its own: kernels that work row by row share out the
 * rows alike, and products of many rows do too. Then only attention has its barriers, before and after.
 */
#ifndef DECODER_H
#define DECODER_H

#include "attention_plan.h"
#include "gemm.h"

/* Of a model; made once. Of the Gemms: weights, bias, sizes and dtypes. */
typedef struct {
    Gemm qkv, o, gate_up, down;
    const float *input_norm, *mlp_norm;       /* [hidden_size] */
    const float *attention_out_norm, *mlp_out_norm; /* the same, of what is added, or NULL */
    const float *head_norms;                  /* see rope.h; or NULL */
    float scale;                              /* see attention.h */
    int32_t kind;                             /* of its window and rotation: index into the step's kinds */
} DecoderLayer;

typedef struct {
    const DecoderLayer *layers;
    Gemm head;
    const void *embeddings; /* see embedding.h; of dtype */
    const float *norm;      /* the final one's, [hidden_size] */
    int64_t hidden_size;
    int32_t num_layers, num_heads, dtype;
    float eps, embedding_scale;
    int32_t embeddings_packing; /* see embedding.h */
} Decoder;

/* What a step has for the layers of one kind. */
typedef struct {
    const float *cos, *sin; /* see rope.h */
    AttentionPlan *plan;
    Attention attention;    /* partials, scratch, shape and num_heads */
} DecoderKind;

/* Of one step, T tokens of which S have logits; the buffers are overwritten. */
typedef struct {
    const Decoder *decoder;
    const DecoderKind *kinds;
    void *const *cache;                 /* [num_layers] */
    const int64_t *token_ids, *positions, *slots; /* [T] */
    const int64_t *logits_rows;         /* [S] indices of tokens */
    float *hidden;                      /* [T, hidden_size]; of the last layer: its input */
    void *x;                            /* [max(T, S), hidden_size], below as many of other widths; of dtype */
    void *qkv, *q, *attended, *gated;
    void *added;                        /* the same size as x: what is added to hidden */
    float *normed;                      /* the same, normalised; or NULL where no layer does that */
    float *last_hidden;                 /* [S, hidden_size]: the last layer's output */
    float *logits;                      /* [S, num_columns of head] */
    int32_t *largest;                   /* [S] see find_largest() of sampling.h; or NULL */
    int64_t num_tokens, num_logits;
    int64_t is_narrow;                  /* out: in the last layer only rows that have logits have attended for sure */
} DecoderStep;

void decoder_step(DecoderStep *args);

/* Logits of other rows of the step before; of it hidden, q and attended are as they were. */
void decoder_logits(DecoderStep *args);

#endif
