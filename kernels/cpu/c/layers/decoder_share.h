/* A thread's view of a decoder's step (decoder.c), and the exchange between the ranks of a group (decoder_group.c). */
#ifndef DECODER_SHARE_H
#define DECODER_SHARE_H

#include "layers/decoder.h"
#include "layers/embedding.h"

/* A thread's view of the step. */
typedef struct {
    const DecoderStep *step;
    const Decoder *decoder;
    const DecoderLayer *layer;
    void *const *cache; /* of this layer */
    float *hidden;      /* [num_rows, hidden_size]: the rows that are computed */
    int64_t num_rows;
    const int64_t *tokens; /* [num_rows] indices of the rows' tokens; NULL = row i is token i */
    const LoraProduct *const *adapters; /* [num_rows]; NULL = no row has one */
    int is_narrow;      /* attention in the tail is of the narrowed plans */
    int thread, num_threads; /* in run_by_rows(): index and number of pieces of the rows */
} Share;

/* Return the first row of a thread's share; the share ends at the next thread's first row. */
INLINE int64_t first_row(const Share *share, int thread) { return share->num_rows * thread / share->num_threads; }

INLINE const DecoderLayer *last_layer(const DecoderStep *step) {
    return step->decoder->layers + step->decoder->num_layers - 1;
}

/* Return the last layer that is computed up to its attention for all rows. Those behind it are the tail: later tokens need
 * nothing of them. Taps are of all rows. */
INLINE const DecoderLayer *last_of_all_rows(const DecoderStep *step) {
    return last_layer(step) - (step->num_taps ? 0 : step->decoder->num_tail);
}

INLINE int is_in_tail(const Share *share) { return share->tokens && share->layer > last_of_all_rows(share->step); }

/* Return how many columns the rank has at a place. */
INLINE int64_t own_columns(const DecoderGroup *group, const Place *place) {
    return place->bounds[group->ranks.rank + 1] - place->first;
}

/* Wait for all threads of all ranks. */
void wait_for_group(const Share *share);

/* Wait for all threads of all ranks, and for the columns of y, whose elements have so many bytes, that others have. to_first:
 * only rank 0 gets them, if ranks share no memory. */
void gather_columns(const Share *share, void *y, const Place *place, int64_t element, int to_first);

/* Return whether ranks exchange what the layer computes before its norm, which is of the heads of several ranks. */
INLINE int has_common_norm(const Share *share) {
    const Recurrence *recurrence = share->layer->recurrence;
    return share->decoder->group && recurrence && recurrence->kind == STATE_SPACE;
}

/* Return where the output of the layer's attention goes, of a rank that of its heads. */
INLINE char *own_attended_of(const Share *share) {
    if (is_in_tail(share)) return share->step->tail_attended;
    return share->decoder->group ? share->step->own_attended : share->step->attended;
}

/* Return the whole output of the layer's attention; of a rank in the tail that of the rows with logits. */
INLINE char *attended_of(const Share *share) {
    if (is_in_tail(share)) return share->decoder->group ? share->step->tail_picked : share->step->tail_attended;
    return has_common_norm(share) ? share->step->own_attended : share->step->attended;
}

/* Take what all ranks have of the layer's attention: into attended_of(). from: what this rank has. */
void gather_attended(const Share *share, const void *from);

/* Embed the tokens that this rank has; then take all tokens' embeddings. Some may be given: each rank has these. */
void embed_in_group(const Share *share, Embedding args);

#endif
