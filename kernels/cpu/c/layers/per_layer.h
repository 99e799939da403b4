/* Inputs of their own for each layer and token, alongside the residual stream (Gemma 3n, Gemma 4):
 *
 *     input[l] = norm(projection[l](embedding)) + table[token][l]; hidden += norm(out[l](f(gate[l](hidden)) * input[l]))
 *
 * Without a table that part is left out. The factors of the projection and of the sum are in the norm's weight, its eps and the table's scale. An input is made when
 * its layer needs it, in float32; so a step keeps the projection of its tokens only.
 */
#ifndef PER_LAYER_H
#define PER_LAYER_H

#include "layers/embedding.h"
#include "layers/norm.h"
#include "products/gemm.h"

enum { MAX_PER_LAYER_WIDTH = 4096 };

/* What all layers share; made once. */
typedef struct {
    Embedding table;    /* of [tokens * row_layers, width]: those of a token lie together; without ids and out; table.table
                         * NULL = there is none */
    Gemm projection;    /* of embeddings: to num_layers * width columns of dtype */
    const float *norm;  /* [width] of a layer's columns of the projection */
    int64_t width;      /* at most MAX_PER_LAYER_WIDTH */
    int32_t num_layers, dtype;
    float eps;
    int32_t first_layer; /* the place in the table of the first of the layers, which may be some of a model's */
    int64_t given_id;   /* the token whose rows of the table are those of ids below 0 */
    int64_t row_layers;  /* at least first_layer + num_layers */
} PerLayerInputs;

/* The products and the norm of one layer; made once. */
typedef struct {
    Gemm gate, out;     /* to width columns, with the activation; and from them */
    NormWeights norm;   /* of what is added to hidden */
} PerLayer;

/* Multiply rows by the inputs of their tokens. */
typedef struct {
    const PerLayerInputs *inputs;
    const int64_t *ids;    /* [tokens] of the step; below 0: a given row, see embedding.h */
    const int64_t *tokens; /* [num_rows] indices of the rows' tokens; NULL = row i is token i */
    const void *projected; /* [tokens, num_layers * width] of dtype: the projection's result */
    void *x;               /* [num_rows, width] of dtype */
    int64_t num_rows, layer;
} PerLayerStep;

void per_layer_part(const PerLayerStep *args, int thread, int num_threads);
void per_layer(const PerLayerStep *args);

#endif
