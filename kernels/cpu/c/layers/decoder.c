#include "layers/decoder_share.h"

#include "layers/deep.h"
#include "layers/embedding.h"
#include "threads/group.h"
#include "layers/norm.h"
#include "layers/output_gate.h"
#include "threads/pool.h"
#include "layers/rope.h"
#include "sampling/sampling.h"
#include "layers/soft_cap.h"

/* Minimum rows of a piece. The intermediate results of a piece stay in a second level cache. But each piece reads the
 * weights again; the larger minimum is for weights that the caches do not keep. */
enum { PIECE_ROWS = 64, STREAMED_PIECE_ROWS = 192 };

/* Return the number of pieces of each thread's rows; 0 if products divide columns instead of rows among threads. */
static int pieces_of_thread(const Share *share) {
    const int num_threads = share->num_threads;
    if (share->decoder->group) return 0; /* ranks wait for each other within a phase, so each thread runs it once */
    if (num_threads == 1 || !gemm_splits_rows(share->num_rows, num_threads, share->decoder->dtype)) return 0;
    const int64_t least = share->decoder->head.streams ? STREAMED_PIECE_ROWS : PIECE_ROWS;
    const int pieces = (int)(share->num_rows / (least * num_threads));
    return pieces > 0 ? pieces : 1;
}

/* Separate two parts, the second of which reads row by row what the first wrote. A barrier is needed unless both give a
 * thread the same rows. */
static void go_on_by_rows(const Share *share) {
    if (!gemm_splits_rows(share->num_rows, share->num_threads, share->decoder->dtype)) pool_barrier();
}

/* Separate two parts, the second of which reads what all ranks wrote to y in the first: a product's result. */
static void gather(const Share *share, void *y, const Place *place, int y_dtype) {
    if (share->decoder->group)
        gather_columns(share, y, place, element_bytes(y_dtype), 0);
    else
        go_on_by_rows(share);
}

/* Return whether a token of the step has an embedding of the table's. */
static int has_words(const DecoderStep *step) {
    if (!step->given) return 1;
    for (int64_t i = 0; i < step->num_tokens; i++)
        if (step->token_ids[i] >= 0) return 1;
    return 0;
}

static void embed(const Share *share) {
    const Decoder *decoder = share->decoder;
    const Embedding args = {share->step->token_ids,   decoder->embeddings,  share->step->hidden,
                            share->step->num_tokens,  decoder->hidden_size, decoder->dtype,
                            decoder->embedding_scale, decoder->embeddings_packing,
                            decoder->kinds, decoder->places, share->step->positions, decoder->num_words,
                            share->step->given};
    if (decoder->group && has_words(share->step)) /* each rank has all given embeddings */
        embed_in_group(share, args);
    else
        embedding_part(&args, share->thread, share->num_threads);
}

/* Compute y = x @ w^T + bias for all rows of the share, whose x is complete. place: of the columns in y; NULL = they are
 * all of y. */
static void multiply(const Share *share, const Gemm *weights, const void *x, void *y, const Place *place,
                     const Gemm *next, const Lora *lora) {
    Gemm args = *weights;
    args.next = next;
    args.x = x, args.x_stride = args.depth;
    args.y = y, args.y_stride = args.gate ? args.num_columns / 2 : args.num_columns;
    if (place) args.y = (char *)y + place->first * element_bytes(args.y_dtype), args.y_stride = place->width;
    args.num_rows = share->num_rows;
    args.quantized = share->step->quantized, args.quantized_stride = share->step->quantized_stride;
    args.lora = lora;
    gemm_part(&args, share->thread, share->num_threads);
}

/* Compute one of the layer's products, to which the rows' adapters add; a rank of a group has none. */
static void multiply_adapted(const Share *share, const Gemm *weights, int which, const void *x, void *y,
                             const Place *place, const Gemm *next) {
    if (!share->adapters) {
        multiply(share, weights, x, y, place, next, NULL);
        return;
    }
    const DecoderStep *step = share->step;
    const int64_t layer = share->layer - share->decoder->layers;
    const Lora lora = {share->adapters, step->lowered, step->lowered_stride, layer * LAYER_PRODUCTS + which};
    const LoraLower lower = {
        .lora = &lora,
        .x = x,
        .num_rows = share->num_rows,
        .depth = weights->depth,
        .x_stride = weights->depth,
        .dtype = share->decoder->dtype,
        .by_rows = gemm_splits_rows(share->num_rows, share->num_threads, share->decoder->dtype),
    };
    lora_lower_part(&lower, share->thread, share->num_threads);
    if (!lower.by_rows) pool_barrier();
    multiply(share, weights, x, y, place, next, &lora);
}

/* Write the normalised rows of hidden to the step's x. */
static void normalise_hidden(const Share *share, const NormWeights *norm) {
    const Decoder *decoder = share->decoder;
    const Norm args = {share->hidden, NULL,  *norm, share->step->x, share->num_rows, decoder->hidden_size,
                       FLOAT32, decoder->dtype, decoder->eps, 1.0f, 0.0f};
    norm_part(&args, share->thread, share->num_threads);
}

/* Write x, rows of x_dtype, normalised to out. */
static void normalise_rows(const Share *share, const void *x, int x_dtype, const NormWeights *norm, void *out,
                           int out_dtype) {
    const Decoder *decoder = share->decoder;
    const Norm args = {NULL, x, *norm, out, share->num_rows, decoder->hidden_size, x_dtype, out_dtype, decoder->eps};
    norm_part(&args, share->thread, share->num_threads);
}

/* hidden += x, rows of x_dtype, times the layer's scale if it ends here; then the step's x = hidden normalised by next_norm,
 * if given. */
static void add_rows(const Share *share, const void *x, int x_dtype, const NormWeights *next_norm, float scale) {
    const Decoder *decoder = share->decoder;
    Norm args = {.hidden = share->hidden, .x = x, .x_dtype = x_dtype, .num_rows = share->num_rows};
    args.width = decoder->hidden_size, args.eps = decoder->eps;
    args.multiplier = decoder->residual_multiplier, args.scale = scale;
    if (next_norm) args.norm = *next_norm, args.out = share->step->x, args.out_dtype = decoder->dtype;
    norm_part(&args, share->thread, share->num_threads);
}

/* hidden += added, normalised by out_norm first if there is one; else as add_rows(). */
static void add(const Share *share, const NormWeights *out_norm, const NormWeights *next_norm, float scale) {
    const DecoderStep *step = share->step;
    if (!out_norm->weight) {
        add_rows(share, step->added, share->decoder->dtype, next_norm, scale);
        return;
    }
    normalise_rows(share, step->added, share->decoder->dtype, out_norm, step->normed, FLOAT32);
    add_rows(share, step->normed, FLOAT32, next_norm, scale);
}

static void rotate(const Share *share) {
    const DecoderStep *step = share->step;
    const DecoderLayer *layer = share->layer;
    const DecoderKind *kind = &step->kinds[layer->kind];
    const RopeKvWrite args = {
        .qkv = step->qkv,
        .cos = kind->cos,
        .sin = kind->sin,
        .query_cos = kind->query_cos,
        .query_sin = kind->query_sin,
        .positions = step->rotations ? step->rotations : step->positions,
        .norms = layer->norms,
        .norms_of_rows = layer->norms_of_rows,
        .is_centred = layer->centred_norms,
        .is_after = layer->norms_after,
        .values = layer->values,
        .row = layer->row,
        .slots = kind->slots,
        .tokens = share->tokens,
        .q = is_in_tail(share) ? step->tail_q : step->q,
        .layer = *share->cache,
        .shape = kind->attention.shape,
        .num_heads = share->decoder->num_heads,
        .num_tokens = (int32_t)share->num_rows,
        .eps = share->decoder->eps,
    };
    rope_kv_write_part(&args, share->thread, share->num_threads);
}

/* Compute q from the layer's first product, and write the cache: latent attention. */
static void begin_latent(const Share *share) {
    const DecoderStep *step = share->step;
    const DecoderKind *kind = &step->kinds[share->layer->kind];
    const LatentStep args = {
        .latent = share->layer->latent,
        .qkv = step->qkv,
        .queries = step->queries,
        .cos = kind->cos,
        .sin = kind->sin,
        .query_cos = kind->query_cos,
        .query_sin = kind->query_sin,
        .positions = step->rotations ? step->rotations : step->positions,
        .slots = kind->slots,
        .q = step->q,
        .layer = *share->cache,
        .shape = kind->attention.shape,
        .num_rows = step->num_tokens,
        .quantized = step->quantized,
        .quantized_stride = step->quantized_stride,
    };
    latent_begin_part(&args, share->thread, share->num_threads);
}

/* Compute and return the heads' values from latent attention's output, [num_rows, latent vectors of all heads]. */
static const void *expand_values(const Share *share, const void *attended) {
    const LatentValues args = {share->layer->latent, attended, share->step->values, share->num_rows};
    latent_values_part(&args, share->thread, share->num_threads);
    go_on_by_rows(share);
    return args.values;
}

/* Update the requests' states for all tokens. In this layer, it replaces attention. */
static void recur(const Share *share) {
    const DecoderStep *step = share->step;
    const RecurrenceStep args = {
        .layer = share->layer->recurrence,
        .in = step->qkv,
        .out = own_attended_of(share),
        .gated = has_common_norm(share) ? step->recurred + share->layer->attended.first : NULL,
        .gated_stride = share->layer->attended.width,
        .mixed = step->mixed,
        .states = step->states,
        .rows = step->state_rows,
        .firsts = step->firsts,
        .positions = step->positions,
        .saves = step->saves,
        .state_stride = step->state_stride,
        .mixed_stride = step->mixed_stride,
        .num_requests = step->num_requests,
    };
    recurrence_part(&args, share->thread, share->num_threads);
}

/* Run attention for all tokens; with is_narrow for those of the narrowed plan only. */
static void attend(const Share *share, int is_narrow) {
    const DecoderLayer *layer = share->layer;
    if (layer->recurrence) {
        recur(share);
        return;
    }
    const DecoderKind *kind = &share->step->kinds[layer->kind];
    Attention args = kind->attention;
    use_plan(&args, kind->plan, is_narrow);
    args.q = share->step->q, args.layer = *share->cache;
    args.out = own_attended_of(share);
    if (is_in_tail(share)) args.q = share->step->tail_q;
    args.scale = layer->scale, args.cap_factor = layer->cap_factor, args.sinks = layer->sinks;
    attention_part(&args, share->thread, share->num_threads);
}

/* Multiply attention's output, of a rank that for its heads, by the sigmoid of the rows' gates. */
static void apply_output_gate(const Share *share) {
    const DecoderStep *step = share->step;
    const DecoderGroup *group = share->decoder->group;
    const int64_t width = group ? own_columns(group, &share->layer->attended) : share->layer->o.depth;
    const int64_t bytes = element_bytes(share->decoder->dtype), count = share->layer->output_gate->num_columns;
    char *attended = own_attended_of(share);
    const char *gates = step->output_gates;
    for (int64_t row = first_row(share, share->thread); row < first_row(share, share->thread + 1); row++)
        output_gate_row(attended + row * width * bytes, gates + row * count * bytes, width, width / count,
                        share->decoder->dtype);
    pool_barrier();
}

/* End attention: attended_of() can be read then. What ranks gather of latent attention is the values of all heads. */
static void finish_attention(const Share *share) {
    pool_barrier();
    if (share->layer->output_gate) apply_output_gate(share);
    if (!share->decoder->group) return;
    const void *own = own_attended_of(share);
    gather_attended(share, share->layer->latent ? expand_values(share, own) : own);
}

/* Compute a layer up to attention from x: q, and K and V in the cache. */
static void begin_layer(const Share *share) {
    const DecoderLayer *layer = share->layer;
    multiply_adapted(share, &layer->qkv, QKV_PRODUCT, share->step->x, share->step->qkv, NULL, &layer->o);
    if (layer->recurrence) return;
    go_on_by_rows(share); /* needed between two products too: threads take their columns by counters */
    if (layer->output_gate) {
        multiply_adapted(share, layer->output_gate, OUTPUT_GATE_PRODUCT, share->step->x, share->step->output_gates, NULL,
                         &layer->o);
        go_on_by_rows(share);
    }
    if (layer->latent)
        begin_latent(share);
    else
        rotate(share);
}

/* Copy the rows of hidden, which the layer with this tap reads, to the step's taps. */
static void copy_tap(const Share *share, int64_t tap) {
    const DecoderStep *step = share->step;
    const int64_t width = share->decoder->hidden_size;
    for (int64_t i = first_row(share, share->thread); i < first_row(share, share->thread + 1); i++)
        memcpy(step->taps + (i * step->num_taps + tap - 1) * width, share->hidden + i * width, width * sizeof(float));
}

/* Compute the projection of the tokens' embeddings for the inputs of all layers (per_layer.h). */
static void project_inputs(const Share *share) {
    const DecoderStep *step = share->step;
    const NormWeights rounding = {0};
    const float *embeddings = step->embeddings ? step->embeddings : share->hidden;
    normalise_rows(share, embeddings, FLOAT32, &rounding, step->x, share->decoder->dtype);
    go_on_by_rows(share);
    multiply(share, &share->decoder->per_layer->projection, step->x, step->projected, NULL, NULL, NULL);
    go_on_by_rows(share);
}

static void begin_step(const Share *share) {
    embed(share);
    if (share->layer->tap) copy_tap(share, share->layer->tap);
    if (share->decoder->per_layer) project_inputs(share);
    normalise_hidden(share, &share->layer->input_norm);
    go_on_by_rows(share);
    begin_layer(share);
}

/* Return the norm of what follows the layer: the next one's, or that of the rows that have logits. */
static const NormWeights *norm_after(const Share *share) {
    if (share->layer != last_layer(share->step)) return &share->layer[1].input_norm;
    return share->step->logits ? &share->decoder->norm : NULL;
}

/* Add the output of attention to hidden; x is then the input of the MLP, or without one of what follows the layer. */
static void add_attention(const Share *share, const void *attended) {
    const DecoderLayer *layer = share->layer;
    const DecoderGroup *group = share->decoder->group;
    if (layer->latent && !group) attended = expand_values(share, attended);
    multiply_adapted(share, &layer->o, O_PRODUCT, attended, share->step->added, group ? &group->hidden : NULL,
                     layer->lacks_mlp || (layer->experts && !layer->beside) ? NULL : &layer->gate_up);
    gather(share, share->step->added, group ? &group->hidden : NULL, layer->o.y_dtype);
    if (layer->lacks_mlp)
        add(share, &layer->attention_out_norm, norm_after(share), layer->layer_scale);
    else
        add(share, &layer->attention_out_norm, &layer->mlp_norm, 0.0f);
}

/* Compute the MLP from x. `next` is the product that follows. */
static void run_mlp(const Share *share, const Gemm *next) {
    const DecoderStep *step = share->step;
    const DecoderLayer *layer = share->layer;
    if (layer->lacks_mlp) return;
    go_on_by_rows(share);
    const DecoderGroup *group = share->decoder->group;
    const Place *hidden = group ? &group->hidden : NULL, *gated = group ? &layer->gated : NULL;
    multiply_adapted(share, &layer->gate_up, GATE_UP_PRODUCT, step->x, step->gated, gated, &layer->down);
    gather(share, step->gated, gated, layer->gate_up.y_dtype);
    multiply_adapted(share, &layer->down, DOWN_PRODUCT, step->gated, step->added, hidden, next);
    gather(share, step->added, hidden, layer->down.y_dtype);
}

/* Compute the dense MLP alongside experts from x; then what experts and router read. */
static void run_dense_beside(const Share *share) {
    const DecoderStep *step = share->step;
    const ExpertsBeside *beside = share->layer->beside;
    const int dtype = share->decoder->dtype;
    run_mlp(share, NULL);
    normalise_rows(share, step->added, dtype, &beside->dense_norm, step->beside, FLOAT32);
    normalise_rows(share, share->hidden, FLOAT32, &beside->input_norm, step->x, dtype);
    normalise_rows(share, share->hidden, FLOAT32, &beside->router_norm, step->router_x, dtype);
}

/* Add what experts alongside a dense MLP yield to hidden, with what that MLP does; else as add_rows(). */
static void add_beside(const Share *share, const NormWeights *next_norm, float scale) {
    const DecoderStep *step = share->step;
    const DecoderLayer *layer = share->layer;
    const int64_t width = share->decoder->hidden_size;
    normalise_rows(share, step->added, share->decoder->dtype, &layer->beside->output_norm, step->normed, FLOAT32);
    Norm sum = {step->beside, step->normed, layer->mlp_out_norm, step->normed, share->num_rows, width, FLOAT32, FLOAT32};
    sum.eps = share->decoder->eps, sum.multiplier = 1.0f;
    norm_part(&sum, share->thread, share->num_threads);
    add_rows(share, step->normed, FLOAT32, next_norm, scale);
}

/* Multiply what the layer's gate makes of x by the layer's own inputs, and leave the product of that in x. Each rank does all
 * of this: `added` is shared, and others may still read it. */
static void use_own_inputs(const Share *share) {
    const DecoderStep *step = share->step;
    const PerLayer *own = share->layer->per_layer;
    const PerLayerStep args = {share->decoder->per_layer, step->words ? step->words : step->token_ids, share->tokens,
                               step->projected, step->own_inputs, share->num_rows, share->layer - share->decoder->layers};
    go_on_by_rows(share);
    multiply(share, &own->gate, step->x, step->own_inputs, NULL, &own->out, NULL);
    go_on_by_rows(share);
    per_layer_part(&args, share->thread, share->num_threads);
    go_on_by_rows(share);
    multiply(share, &own->out, step->own_inputs, step->x, NULL, NULL, NULL);
    go_on_by_rows(share);
}

/* Add what the MLP yields to hidden, and what the layer's own inputs make. x is hidden normalised for what follows then. */
static void end_layer(const Share *share) {
    const DecoderLayer *layer = share->layer;
    if (layer->lacks_mlp) return;
    const NormWeights *next_norm = norm_after(share);
    const NormWeights rounding = {0};
    const NormWeights *next = layer->per_layer ? &rounding : next_norm;
    const float scale = layer->per_layer ? 0.0f : layer->layer_scale;
    if (layer - share->decoder->layers < share->step->num_deep) add_deep(share);
    if (layer->beside)
        add_beside(share, next, scale);
    else
        add(share, &layer->mlp_out_norm, next, scale);
    if (!layer->per_layer) return;
    use_own_inputs(share);
    normalise_rows(share, share->step->x, share->decoder->dtype, &layer->per_layer->norm, share->step->normed, FLOAT32);
    add_rows(share, share->step->normed, FLOAT32, next_norm, layer->layer_scale);
}

/* Compute the routed MLP from x, for all rows together. */
static void run_experts(const Share *share) {
    const DecoderStep *step = share->step;
    const DecoderGroup *group = share->decoder->group;
    const void *router_x = share->layer->beside ? step->router_x : NULL;
    ExpertsGroup own = {0};
    if (group) own = (ExpertsGroup){&group->ranks, &group->hidden, &group->expert_gated, &group->shared_gated};
    const ExpertsStep args = {share->layer->experts, step->experts_room, step->x, step->added, share->num_rows, router_x,
                              group ? &own : NULL};
    pool_barrier();
    experts_part(&args, share->thread, share->num_threads);
    pool_barrier();
}

static void begin_next_layer(const Share *share) {
    const DecoderLayer *layer = share->layer;
    end_layer(share);
    go_on_by_rows(share);
    if (layer[1].tap) copy_tap(share, layer[1].tap);
    Share next = *share;
    next.layer++, next.cache++;
    begin_layer(&next);
}

/* Copy the rows that have logits: attention's output of the layer; and of the last layer of all rows, whose hidden is that of
 * all tokens, hidden to last_hidden, and their adapters. Return the first. Of a rank in the tail attention's output is of these
 * rows already. */
static const void *pick_rows(const Share *share) {
    const DecoderStep *step = share->step;
    if (is_in_tail(share) && share->decoder->group) return attended_of(share);
    const Latent *latent = share->decoder->group ? NULL : share->layer->latent;
    const int64_t width = latent ? (int64_t)latent->num_heads * latent->latent_dim : share->layer->o.depth;
    const int64_t bytes = width * element_bytes(share->decoder->dtype), hidden_size = share->decoder->hidden_size;
    const char *attended = attended_of(share);
    char *picked = share->decoder->num_tail && !share->decoder->group ? step->tail_picked : step->qkv;
    for (int64_t i = first_row(share, share->thread); i < first_row(share, share->thread + 1); i++) {
        const int64_t row = share->tokens[i];
        memcpy(picked + i * bytes, attended + row * bytes, bytes);
        if (is_in_tail(share)) continue;
        memcpy(step->last_hidden + i * hidden_size, step->hidden + row * hidden_size, hidden_size * sizeof(float));
        if (step->adapters) step->picked[i] = step->adapters[row];
    }
    go_on_by_rows(share);
    return picked;
}

/* Add attention's output; if the MLP runs alongside experts, compute it too. */
static void add_attention_output(const Share *share) {
    add_attention(share, share->tokens ? pick_rows(share) : attended_of(share));
    if (share->layer->beside) run_dense_beside(share);
}

static void go_to_next_layer(const Share *share) {
    add_attention_output(share);
    run_mlp(share, &share->layer[1].qkv);
    begin_next_layer(share);
}

/* Cap the logits and find the largest now: if threads divide rows, they are still in the cache of the thread that wrote
 * them. */
static void finish_logits(const Share *share) {
    const DecoderStep *step = share->step;
    const Decoder *decoder = share->decoder;
    const DecoderGroup *group = decoder->group;
    int64_t begin = first_row(share, share->thread), end = first_row(share, share->thread + 1);
    const int64_t size = group ? group->vocabulary.width : decoder->head.num_columns;
    if (group && !group->ranks.streams) { /* ranks divide the rows, then the rank's threads do */
        const int64_t first = share->num_rows * group->ranks.rank / group->ranks.size;
        const int64_t rows = share->num_rows * (group->ranks.rank + 1) / group->ranks.size - first;
        begin = first + rows * share->thread / share->num_threads;
        end = first + rows * (share->thread + 1) / share->num_threads;
    }
    float *logits = step->logits + begin * size;
    const SoftCap cap = {logits, end - begin, size, decoder->logits_cap};
    if (decoder->logits_cap != 0.0f) soft_cap_part(&cap, 0, 1);
    if (step->largest) find_largest(logits, end - begin, size, step->largest + begin);
}

/* Finish the step for the rows that have logits, after the last layer's MLP: final norm and head. */
static void run_head(const Share *share) {
    const DecoderStep *step = share->step;
    const Decoder *decoder = share->decoder;
    end_layer(share);
    if (!step->logits) return;
    const DecoderGroup *group = decoder->group;
    go_on_by_rows(share);
    multiply(share, &decoder->head, step->x, step->logits, group ? &group->vocabulary : NULL, NULL, NULL);
    if (group) gather_columns(share, step->logits, &group->vocabulary, sizeof(float), 1);
    const int is_split = group && !group->ranks.streams;
    if (group && !is_split && group->ranks.rank) return; /* only rank 0 has them */
    if (decoder->logits_cap == 0.0f && !step->largest) return;
    go_on_by_rows(share);
    finish_logits(share);
    if (is_split) wait_for_group(share);
}

static void finish_step(const Share *share) {
    add_attention_output(share);
    run_mlp(share, share->step->logits ? &share->decoder->head : NULL);
    run_head(share);
}

/* Run a phase that works row by row. Many rows are cut into pieces. A thread runs its own pieces, then those left of
 * the other threads. So a thread that has lost its core to another process delays the others by one piece at most. */
static void run_by_rows(const Share *share, void (*phase)(const Share *)) {
    const int num_threads = share->num_threads, num_pieces = pieces_of_thread(share);
    if (num_pieces == 0) {
        phase(share);
        return;
    }
    Share piece = *share;
    piece.num_threads = num_threads * num_pieces;
    for (int i = 0; i < num_threads; i++) {
        const int owner = (share->thread + i) % num_threads;
        for (int64_t number; (number = pool_take(owner)) < num_pieces;) {
            piece.thread = owner * num_pieces + (int)number;
            phase(&piece);
        }
    }
}

/* Compute the rest of a layer from the output of attention, and the next layer up to its attention. */
static void continue_layer(const Share *share) {
    if (!share->layer->experts) {
        run_by_rows(share, go_to_next_layer);
        return;
    }
    run_by_rows(share, add_attention_output);
    run_experts(share);
    run_by_rows(share, begin_next_layer);
}

/* Compute the rest only for rows that have logits. For the other rows the K and V of the last layer of all rows are enough:
 * no later result depends on more of them. */
static void compute_logits(const Share *share) {
    Share picked = *share;
    picked.hidden = share->step->last_hidden, picked.num_rows = share->step->num_logits;
    picked.tokens = share->step->logits_rows;
    if (picked.adapters) picked.adapters = share->step->picked;
    while (picked.layer != last_layer(share->step)) {
        continue_layer(&picked);
        picked.layer++, picked.cache++;
        pool_barrier();
        attend(&picked, picked.is_narrow);
        finish_attention(&picked);
    }
    if (!picked.layer->experts) {
        run_by_rows(&picked, finish_step);
        return;
    }
    run_by_rows(&picked, add_attention_output);
    run_experts(&picked);
    run_by_rows(&picked, run_head);
}

static Share share_of(const DecoderStep *step, int64_t layer, int thread, int num_threads) {
    const Decoder *decoder = step->decoder;
    return (Share){step,         decoder,          decoder->layers + layer, step->cache + layer, step->hidden,
                   step->num_tokens, NULL, step->adapters, (int)step->is_narrow, thread, num_threads};
}

/* Narrow the plans of the last layer of all rows, and of the tail, to the rows that have logits. */
static void narrow_plans(const DecoderStep *step) {
    const DecoderLayer *first = last_of_all_rows(step);
    for (const DecoderLayer *layer = first; layer <= last_layer(step); layer++) {
        const DecoderLayer *same = first;
        while (same->kind != layer->kind) same++;
        if (same == layer) narrow_plan(step->kinds[layer->kind].plan, step->logits_rows, step->num_logits);
    }
}

static void step_job(void *args, int thread, int num_threads) {
    const DecoderStep *step = args;
    const DecoderLayer *last = last_of_all_rows(step);
    Share share = share_of(step, 0, thread, num_threads);
    if (step->is_narrow && thread == 0) narrow_plans(step);
    run_by_rows(&share, begin_step);
    for (;; share.layer++, share.cache++) {
        pool_barrier();
        attend(&share, share.layer == last && step->is_narrow);
        finish_attention(&share);
        if (share.layer == last) break;
        continue_layer(&share);
    }
    if (step->num_logits > 0) compute_logits(&share);
}

static void logits_job(void *args, int thread, int num_threads) {
    const DecoderStep *step = args;
    Share share = share_of(step, last_of_all_rows(step) - step->decoder->layers, thread, num_threads);
    const DecoderGroup *group = step->decoder->group;
    if (group && !group->ranks.streams) wait_for_group(&share); /* others may still read what was computed before */
    if (step->is_narrow) {
        attend(&share, 0);
        finish_attention(&share);
    }
    if (share.layer != last_layer(step)) { /* the tail's attention is of these rows */
        share.is_narrow = 1;
        if (thread == 0) narrow_plans(step);
        pool_barrier();
    }
    compute_logits(&share);
}

EXPORT void decoder_step(DecoderStep *args) {
    args->is_narrow = args->num_logits < args->num_tokens && !last_of_all_rows(args)->recurrence;
    pool_run(step_job, args);
}

EXPORT void decoder_logits(DecoderStep *args) {
    pool_run(logits_job, args);
    args->is_narrow = 0;
}
