/* Forbids tokens: sets the logits of the tokens that a bit mask does not allow to minus infinity. */
#ifndef TOKEN_MASKS_H
#define TOKEN_MASKS_H

#include <stdint.h>

/* logits [..., vocab_size] float32. rows [num_masks]: the row of each mask; a row occurs once. masks [num_masks,
 * num_words]: bit i of word w allows token 32 * w + i. Tokens beyond the last word are forbidden. */
void mask_logits(float *logits, int64_t vocab_size, const int64_t *rows, const uint32_t *masks, int64_t num_words,
                 int64_t num_masks);

#endif
