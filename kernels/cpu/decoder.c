#include "decoder.h"

#include "activation.h"
#include "embedding.h"
#include "norm.h"
#include "pool.h"
#include "rope.h"

/* A thread's view of the step. */
typedef struct {
    const DecoderStep *step;
    const Decoder *decoder;
    int thread, num_threads;
} Share;

static void embed(const Share *share) {
    const Decoder *decoder = share->decoder;
    const Embedding args = {share->step->token_ids,   decoder->embeddings,  share->step->hidden,
                            share->step->num_tokens,  decoder->hidden_size, decoder->dtype,
                            decoder->embedding_scale, decoder->embeddings_are_packed};
    embedding_part(&args, share->thread, share->num_threads);
}

/* All tokens: y = x @ w^T + bias. */
static void multiply(const Share *share, const Gemm *weights, const void *x, void *y, const Gemm *next) {
    Gemm args = *weights;
    args.next = next;
    args.x = x, args.x_stride = args.depth;
    args.y = y, args.y_stride = args.num_columns;
    args.num_rows = share->step->num_tokens;
    gemm_part(&args, share->thread, share->num_threads);
}

/* Rows of the step's x: those of hidden, normalised. */
static void normalise_hidden(const Share *share, const float *weight) {
    const Decoder *decoder = share->decoder;
    const Norm args = {NULL,    share->step->hidden,  weight, share->step->x, share->step->num_tokens, decoder->hidden_size,
                       FLOAT32, decoder->dtype, decoder->eps};
    norm_part(&args, share->thread, share->num_threads);
}

/* hidden += what a layer's half has to add, normalised first by out_norm; then, if there is another half to come, x =
 * hidden normalised by next_norm. */
static void add(const Share *share, const float *out_norm, const float *next_norm) {
    const DecoderStep *step = share->step;
    const Decoder *decoder = share->decoder;
    Norm args = {.num_rows = step->num_tokens, .width = decoder->hidden_size, .eps = decoder->eps};
    args.x = step->added, args.x_dtype = decoder->dtype;
    if (out_norm) {
        args.weight = out_norm, args.out = step->normed, args.out_dtype = FLOAT32;
        norm_part(&args, share->thread, share->num_threads);
        args.x = step->normed, args.x_dtype = FLOAT32;
    }
    args.hidden = step->hidden;
    args.weight = next_norm, args.out = next_norm ? step->x : NULL, args.out_dtype = decoder->dtype;
    norm_part(&args, share->thread, share->num_threads);
}

static void rotate(const Share *share, const DecoderLayer *layer, void *cache) {
    const DecoderStep *step = share->step;
    const DecoderKind *kind = &step->kinds[layer->kind];
    const RopeKvWrite args = {
        .qkv = step->qkv,
        .cos = kind->cos,
        .sin = kind->sin,
        .positions = step->positions,
        .head_norms = layer->head_norms,
        .slots = step->slots,
        .q = step->q,
        .layer = cache,
        .shape = kind->attention.shape,
        .num_heads = share->decoder->num_heads,
        .num_tokens = (int32_t)step->num_tokens,
        .eps = share->decoder->eps,
    };
    rope_kv_write_part(&args, share->thread, share->num_threads);
}

static void attend(const Share *share, const DecoderLayer *layer, void *cache) {
    Attention args = share->step->kinds[layer->kind].attention;
    args.q = share->step->q, args.layer = cache, args.out = share->step->attended;
    args.scale = layer->scale;
    attention_part(&args, share->thread, share->num_threads);
}

static void activate(const Share *share) {
    const Decoder *decoder = share->decoder;
    const Activation args = {share->step->gate_up,       share->step->gated, share->step->num_tokens,
                             decoder->intermediate_size, decoder->dtype,     decoder->function};
    activation_part(&args, share->thread, share->num_threads);
}

static void run_layer(const Share *share, int index) {
    const DecoderStep *step = share->step;
    const DecoderLayer *layer = &share->decoder->layers[index];
    const int is_last = index + 1 == share->decoder->num_layers;
    multiply(share, &layer->qkv, step->x, step->qkv, &layer->o);
    pool_barrier();
    rotate(share, layer, step->cache[index]);
    pool_barrier();
    attend(share, layer, step->cache[index]);
    pool_barrier();
    multiply(share, &layer->o, step->attended, step->added, &layer->gate_up);
    pool_barrier();
    add(share, layer->attention_out_norm, layer->mlp_norm);
    pool_barrier();
    multiply(share, &layer->gate_up, step->x, step->gate_up, &layer->down);
    pool_barrier();
    activate(share);
    pool_barrier();
    multiply(share, &layer->down, step->gated, step->added, is_last ? &share->decoder->head : &layer[1].qkv);
    pool_barrier();
    add(share, layer->mlp_out_norm, is_last ? NULL : layer[1].input_norm);
    pool_barrier();
}

static void compute_logits(const Share *share) {
    const DecoderStep *step = share->step;
    const Decoder *decoder = share->decoder;
    const int64_t width = decoder->hidden_size, bytes = element_bytes(decoder->dtype);
    for (int64_t i = share->thread; i < step->num_logits; i += share->num_threads) {
        const float *hidden = step->hidden + step->logits_rows[i] * width;
        const Norm args = {NULL, hidden, decoder->norm, (char *)step->x + i * width * bytes, 1, width,
                           FLOAT32, decoder->dtype, decoder->eps};
        norm_part(&args, 0, 1);
    }
    pool_barrier();
    Gemm args = decoder->head;
    args.x = step->x, args.x_stride = width;
    args.y = step->logits, args.y_stride = args.num_columns;
    args.num_rows = step->num_logits;
    gemm_part(&args, share->thread, share->num_threads);
}

static void decoder_job(void *args, int thread, int num_threads) {
    const DecoderStep *step = args;
    const Share share = {step, step->decoder, thread, num_threads};
    embed(&share);
    normalise_hidden(&share, step->decoder->layers[0].input_norm);
    pool_barrier();
    for (int index = 0; index < step->decoder->num_layers; index++) run_layer(&share, index);
    if (step->num_logits > 0) compute_logits(&share);
}

EXPORT void decoder_step(const DecoderStep *args) { pool_run(decoder_job, (void *)args); }
