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

/* Wait for all threads of all ranks. */
void wait_for_group(const Share *share);

/* Wait for all threads of all ranks, and for the columns of y, whose elements have so many bytes, that others have. to_first:
 * only rank 0 gets them, if ranks share no memory. */
void gather_columns(const Share *share, void *y, const Place *place, int64_t element, int to_first);

/* Embed the tokens that this rank has; then take all tokens' embeddings. */
void embed_in_group(const Share *share, Embedding args);

#endif
