/* What the encoder of images adds to the hidden states of their tokens after the model's first layers (Meng et al. 2024,
 * arXiv 2406.04334). */
#ifndef DEEP_H
#define DEEP_H

#include "layers/decoder_share.h"

/* Add it to the thread's rows of hidden, at the end of the share's layer, which must be one of the first num_deep. */
INLINE void add_deep(const Share *share) {
    const DecoderStep *step = share->step;
    const int64_t width = share->decoder->hidden_size, layer = share->layer - share->decoder->layers;
    for (int64_t i = first_row(share, share->thread); i < first_row(share, share->thread + 1); i++) {
        const int64_t id = step->token_ids[share->tokens ? share->tokens[i] : i];
        if (id >= 0) continue;
        const float *from = step->deep + ((-1 - id) * step->num_deep + layer) * width;
        for (int64_t j = 0; j < width; j++) share->hidden[i * width + j] += from[j];
    }
}

#endif
