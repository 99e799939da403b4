#include "layers/decoder_share.h"

#include "threads/group.h"
#include "threads/pool.h"

void wait_for_group(const Share *share) { group_wait_all(&share->decoder->group->ranks, share->thread); }

void gather_columns(const Share *share, void *y, const Place *place, int64_t element, int to_first) {
    group_gather(&share->decoder->group->ranks, y, share->num_rows, place, element, to_first, share->thread);
}

/* Exchange the rows of `embedded` with ranks that share no memory: each has those of its part of the vocabulary. */
static void exchange_embedded(const Share *share) {
    const DecoderStep *step = share->step;
    const DecoderGroup *group = share->decoder->group;
    const int64_t *bounds = group->vocabulary.bounds, row_bytes = share->decoder->hidden_size * sizeof(float);
    char *room = group_room(group->ranks.streams, step->num_tokens * row_bytes);
    int64_t ends[MAX_RANKS + 1];
    for (int pass = 0; pass < 2; pass++) { /* own rows to the room, then those of others from it */
        int64_t at = 0;
        for (int rank = 0; rank < group->ranks.size; rank++) {
            ends[rank] = at;
            for (int64_t row = 0; row < step->num_tokens; row++) {
                const int64_t id = step->token_ids[row];
                if (id < bounds[rank] || id >= bounds[rank + 1]) continue;
                char *embedded = (char *)step->embedded + row * row_bytes;
                if (pass == 0 && rank == group->ranks.rank) memcpy(room + at, embedded, row_bytes);
                if (pass == 1 && rank != group->ranks.rank) memcpy(embedded, room + at, row_bytes);
                at += row_bytes;
            }
        }
        ends[group->ranks.size] = at;
        if (pass == 0) group_exchange(group->ranks.streams, ends, 0);
    }
}

/* Gather what all ranks have of a STATE_SPACE, and normalise it: each rank all of it. */
static void gather_common_norm(const Share *share) {
    const DecoderStep *step = share->step;
    const DecoderGroup *group = share->decoder->group;
    const Recurrence *layer = share->layer->recurrence;
    const Place *place = &share->layer->attended;
    const GroupNorm args = {step->recurred, layer->norm, step->own_attended, share->num_rows, place->width,
                            group->norm_size, layer->eps, layer->dtype};
    gather_columns(share, step->recurred, place, sizeof(float), 0);
    group_norm_part(&args, share->thread, share->num_threads);
    pool_barrier();
}

void gather_attended(const Share *share, const void *from) {
    const DecoderGroup *group = share->decoder->group;
    if (has_common_norm(share)) {
        gather_common_norm(share);
        return;
    }
    const Place *place = &share->layer->attended;
    const size_t bytes = element_bytes(share->decoder->dtype), stride = place->width * bytes;
    const size_t own = own_columns(group, place) * bytes;
    char *attended = attended_of(share);
    const int64_t *tokens = is_in_tail(share) ? share->tokens : NULL;
    Share parts = *share; /* a row of each turn is a row here */
    if (share->layer->recurrence) parts.num_rows *= group->num_turns;
    for (int64_t row = first_row(&parts, share->thread); row < first_row(&parts, share->thread + 1); row++)
        memcpy(attended + row * stride + place->first * bytes, (const char *)from + (tokens ? tokens[row] : row) * own, own);
    gather_columns(&parts, attended, place, bytes, 0);
}

void embed_in_group(const Share *share, Embedding args) {
    const DecoderStep *step = share->step;
    const int64_t begin = first_row(share, share->thread), end = first_row(share, share->thread + 1);
    args.num_rows = 1;
    for (int64_t row = begin; row < end; row++) {
        const int64_t id = step->token_ids[row] - share->decoder->group->vocabulary.first;
        if (id < 0 || id >= share->decoder->group->num_words) continue;
        args.ids = &id, args.out = step->embedded + row * args.width, args.positions = step->positions + row;
        embedding_part(&args, 0, 1);
    }
    if (share->decoder->group->ranks.streams) {
        pool_barrier();
        if (share->thread == 0) exchange_embedded(share);
        pool_barrier();
    } else {
        wait_for_group(share);
    }
    for (int64_t row = begin; row < end; row++) {
        const int64_t id = step->token_ids[row];
        const float *from = id < 0 ? step->given + (-1 - id) * args.width : step->embedded + row * args.width;
        memcpy(step->hidden + row * args.width, from, args.width * sizeof(float));
    }
}
