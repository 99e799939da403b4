#include "decoder.h"

#include "embedding.h"
#include "norm.h"
#include "pool.h"
#include "rope.h"
#include "sampling.h"

/* A thread's view of the step. */
typedef struct {
    const DecoderStep *step;
    const Decoder *decoder;
    const DecoderLayer *layer;
    void *const *cache; /* of this layer */
    float *hidden;      /* [num_rows, hidden_size]: the rows that are computed */
    int64_t num_rows;
    int thread, num_threads; /* in run_by_rows(): index and number of pieces of the rows */
} Share;

/* Minimum rows of a piece. The intermediate results of a piece stay in a second level cache. But each piece reads the
 * weights again; the larger minimum is for weights that the caches do not keep. */
enum { PIECE_ROWS = 64, STREAMED_PIECE_ROWS = 192 };

/* Return the number of pieces of each thread's rows; 0 if products divide columns instead of rows among threads. */
static int pieces_of_thread(const Share *share) {
    const int num_threads = share->num_threads;
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

/* Return the first row of a thread's share; the share ends at the next thread's first row. */
static int64_t first_row(const Share *share, int thread) { return share->num_rows * thread / share->num_threads; }

static void embed(const Share *share) {
    const Decoder *decoder = share->decoder;
    const Embedding args = {share->step->token_ids,   decoder->embeddings,  share->step->hidden,
                            share->step->num_tokens,  decoder->hidden_size, decoder->dtype,
                            decoder->embedding_scale, decoder->embeddings_packing,
                            decoder->kinds, decoder->places, share->step->positions, decoder->num_words};
    embedding_part(&args, share->thread, share->num_threads);
}

/* Compute y = x @ w^T + bias for all rows of the share. */
static void multiply(const Share *share, const Gemm *weights, const void *x, void *y, const Gemm *next) {
    Gemm args = *weights;
    args.next = next;
    args.x = x, args.x_stride = args.depth;
    args.y = y, args.y_stride = args.gate ? args.num_columns / 2 : args.num_columns;
    args.num_rows = share->num_rows;
    args.quantized = share->step->quantized, args.quantized_stride = share->step->quantized_stride;
    gemm_part(&args, share->thread, share->num_threads);
}

/* Write the normalised rows of hidden to the step's x. */
static void normalise_hidden(const Share *share, const NormWeights *norm) {
    const Decoder *decoder = share->decoder;
    const Norm args = {share->hidden, NULL,  *norm, share->step->x, share->num_rows, decoder->hidden_size,
                       FLOAT32, decoder->dtype, decoder->eps};
    norm_part(&args, share->thread, share->num_threads);
}

/* hidden += added, normalised by out_norm first if there is one; then x = hidden normalised by next_norm, if given. */
static void add(const Share *share, const NormWeights *out_norm, const NormWeights *next_norm) {
    const DecoderStep *step = share->step;
    const Decoder *decoder = share->decoder;
    Norm args = {.num_rows = share->num_rows, .width = decoder->hidden_size, .eps = decoder->eps};
    args.x = step->added, args.x_dtype = decoder->dtype;
    if (out_norm->weight) {
        args.norm = *out_norm, args.out = step->normed, args.out_dtype = FLOAT32;
        norm_part(&args, share->thread, share->num_threads);
        args.x = step->normed, args.x_dtype = FLOAT32;
    }
    args.hidden = share->hidden;
    args.out = NULL;
    if (next_norm) args.norm = *next_norm, args.out = step->x, args.out_dtype = decoder->dtype;
    norm_part(&args, share->thread, share->num_threads);
}

static void rotate(const Share *share) {
    const DecoderStep *step = share->step;
    const DecoderLayer *layer = share->layer;
    const DecoderKind *kind = &step->kinds[layer->kind];
    const RopeKvWrite args = {
        .qkv = step->qkv,
        .cos = kind->cos,
        .sin = kind->sin,
        .positions = step->positions,
        .head_norms = layer->head_norms,
        .slots = step->slots,
        .q = step->q,
        .layer = *share->cache,
        .shape = kind->attention.shape,
        .num_heads = share->decoder->num_heads,
        .num_tokens = (int32_t)step->num_tokens,
        .eps = share->decoder->eps,
    };
    rope_kv_write_part(&args, share->thread, share->num_threads);
}

/* Run attention for all tokens; with is_narrow for those of the narrowed plan only. */
static void attend(const Share *share, int is_narrow) {
    const DecoderLayer *layer = share->layer;
    const DecoderKind *kind = &share->step->kinds[layer->kind];
    Attention args = kind->attention;
    use_plan(&args, kind->plan, is_narrow);
    args.q = share->step->q, args.layer = *share->cache, args.out = share->step->attended;
    args.scale = layer->scale;
    attention_part(&args, share->thread, share->num_threads);
}

/* Compute a layer up to attention from x: q, and K and V in the cache. */
static void begin_layer(const Share *share) {
    const DecoderLayer *layer = share->layer;
    multiply(share, &layer->qkv, share->step->x, share->step->qkv, &layer->o);
    go_on_by_rows(share);
    rotate(share);
}

static void begin_step(const Share *share) {
    embed(share);
    normalise_hidden(share, &share->layer->input_norm);
    go_on_by_rows(share);
    begin_layer(share);
}

/* Compute the rest of a layer from the output of attention. x is normalised by next_norm for `next`, the product that
 * follows. */
static void finish_layer(const Share *share, const void *attended, const NormWeights *next_norm, const Gemm *next) {
    const DecoderStep *step = share->step;
    const DecoderLayer *layer = share->layer;
    multiply(share, &layer->o, attended, step->added, &layer->gate_up);
    go_on_by_rows(share);
    add(share, &layer->attention_out_norm, &layer->mlp_norm);
    go_on_by_rows(share);
    multiply(share, &layer->gate_up, step->x, step->gated, &layer->down);
    go_on_by_rows(share);
    multiply(share, &layer->down, step->gated, step->added, next);
    go_on_by_rows(share);
    add(share, &layer->mlp_out_norm, next_norm);
    go_on_by_rows(share);
}

static void go_to_next_layer(const Share *share) {
    const DecoderLayer *layer = share->layer;
    finish_layer(share, share->step->attended, &layer[1].input_norm, &layer[1].qkv);
    Share next = *share;
    next.layer++, next.cache++;
    begin_layer(&next);
}

/* Copy the rows that have logits: hidden to last_hidden, and the last layer's attention output to qkv. */
static void pick_rows(const Share *share, size_t attended_bytes) {
    const DecoderStep *step = share->step;
    const int64_t width = share->decoder->hidden_size;
    for (int64_t i = first_row(share, share->thread); i < first_row(share, share->thread + 1); i++) {
        const int64_t row = step->logits_rows[i];
        memcpy(step->last_hidden + i * width, step->hidden + row * width, width * sizeof(float));
        memcpy((char *)step->qkv + i * attended_bytes, (const char *)step->attended + row * attended_bytes,
               attended_bytes);
    }
}

/* Find the largest logits now: if threads divide rows, they are still in the cache of the thread that wrote them. */
static void find_largest_logits(const Share *share) {
    const DecoderStep *step = share->step;
    const int64_t begin = first_row(share, share->thread), end = first_row(share, share->thread + 1);
    const int64_t size = share->decoder->head.num_columns;
    find_largest(step->logits + begin * size, end - begin, size, step->largest + begin);
}

/* Finish the step for the rows that have logits: last layer, final norm and head. */
static void finish_step(const Share *share) {
    const DecoderStep *step = share->step;
    const Decoder *decoder = share->decoder;
    pick_rows(share, share->layer->o.depth * element_bytes(decoder->dtype));
    go_on_by_rows(share);
    finish_layer(share, step->qkv, step->logits ? &decoder->norm : NULL, step->logits ? &decoder->head : NULL);
    if (!step->logits) return;
    multiply(share, &decoder->head, step->x, step->logits, NULL);
    if (step->largest) {
        go_on_by_rows(share);
        find_largest_logits(share);
    }
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

/* Compute the rest only for rows that have logits. For the other rows the last layer's K and V are enough: no later
 * result depends on more of them. */
static void compute_logits(const Share *share) {
    Share picked = *share;
    picked.hidden = share->step->last_hidden, picked.num_rows = share->step->num_logits;
    run_by_rows(&picked, finish_step);
}

static const DecoderLayer *last_layer(const DecoderStep *step) {
    return step->decoder->layers + step->decoder->num_layers - 1;
}

static Share share_of(const DecoderStep *step, int64_t layer, int thread, int num_threads) {
    const Decoder *decoder = step->decoder;
    return (Share){step,         decoder,          decoder->layers + layer, step->cache + layer,
                   step->hidden, step->num_tokens, thread,                  num_threads};
}

static void step_job(void *args, int thread, int num_threads) {
    const DecoderStep *step = args;
    const DecoderLayer *last = last_layer(step);
    Share share = share_of(step, 0, thread, num_threads);
    if (step->is_narrow && thread == 0)
        narrow_plan(step->kinds[last->kind].plan, step->logits_rows, step->num_logits);
    run_by_rows(&share, begin_step);
    for (;; share.layer++, share.cache++) {
        pool_barrier();
        attend(&share, share.layer == last && step->is_narrow);
        pool_barrier();
        if (share.layer == last) break;
        run_by_rows(&share, go_to_next_layer);
    }
    if (step->num_logits > 0) compute_logits(&share);
}

static void logits_job(void *args, int thread, int num_threads) {
    const DecoderStep *step = args;
    const Share share = share_of(step, step->decoder->num_layers - 1, thread, num_threads);
    if (step->is_narrow) {
        attend(&share, 0);
        pool_barrier();
    }
    compute_logits(&share);
}

EXPORT void decoder_step(DecoderStep *args) {
    args->is_narrow = args->num_logits < args->num_tokens;
    pool_run(step_job, args);
}

EXPORT void decoder_logits(DecoderStep *args) {
    pool_run(logits_job, args);
    args->is_narrow = 0;
}
