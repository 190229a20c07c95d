/* What ranks counted, put together. Integers only, so the order does not matter. */
#include <stdlib.h>
#include <string.h>

#include "run/evaluate.h"

enum { SAMPLES_AT_ONCE = 4096 }; /* of all ranks together */

/* What a rank counted over all its documents. */
typedef struct pooled {
    mtp_acceptance rounds, positions;
    mtp_bucket_figures by_position[MTP_EVAL_BUCKETS], by_length[MTP_EVAL_BUCKETS];
} pooled;

static void add(mtp_acceptance *to, const mtp_acceptance *from)
{
    to->count += from->count;
    for (int k = 0; k < MTP_MAX_SPECULATIVE_STEPS; k++) to->accepted[k] += from->accepted[k];
}

static void add_buckets(mtp_bucket_figures *to, const mtp_bucket_figures *from)
{
    for (int i = 0; i < MTP_EVAL_BUCKETS; i++) {
        add(&to[i].rounds, &from[i].rounds);
        add(&to[i].positions, &from[i].positions);
    }
}

static mtp_status merge_pooled(mtp__ranks *ranks, pooled *own, mtp_evaluation *evaluation)
{
    own->rounds = evaluation->rounds;
    own->positions = evaluation->positions;
    memcpy(own->by_position, evaluation->by_position, sizeof own->by_position);
    memcpy(own->by_length, evaluation->by_length, sizeof own->by_length);
    MTP_TRY(mtp__ranks_exchange(ranks, MTP_OK, own, sizeof *own));
    for (int rank = 0; rank < ranks->world_size; rank++) {
        const pooled *other = mtp__ranks_said(ranks, rank);
        if (rank == ranks->rank) continue;
        add(&evaluation->rounds, &other->rounds);
        add(&evaluation->positions, &other->positions);
        add_buckets(evaluation->by_position, other->by_position);
        add_buckets(evaluation->by_length, other->by_length);
    }
    return MTP_OK;
}

/* Those of [first, first + count). */
static mtp_status merge_samples(mtp__ranks *ranks, int64_t first, int64_t count, mtp_evaluation *evaluation)
{
    mtp_sample_figures *samples = evaluation->samples + first;
    MTP_TRY(mtp__ranks_exchange(ranks, MTP_OK, samples, (size_t)count * sizeof *samples));
    for (int rank = 0; rank < ranks->world_size; rank++) {
        const mtp_sample_figures *others = mtp__ranks_said(ranks, rank);
        for (int64_t i = 0; rank != ranks->rank && i < count; i++) {
            add(&samples[i].rounds, &others[i].rounds);
            add(&samples[i].positions, &others[i].positions);
        }
    }
    return MTP_OK;
}

mtp_status mtp__evaluation_merge(mtp__ranks *ranks, mtp_evaluation *evaluation)
{
    pooled *own = calloc(1, sizeof *own);
    mtp_status status =
        mtp__ranks_agree(ranks, own ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory for an evaluation"));
    if (status == MTP_OK) status = merge_pooled(ranks, own, evaluation);
    free(own);
    const int64_t most = SAMPLES_AT_ONCE / ranks->world_size + 1;
    for (int64_t first = 0; status == MTP_OK && first < evaluation->num_samples; first += most) {
        const int64_t left = evaluation->num_samples - first;
        status = merge_samples(ranks, first, left < most ? left : most, evaluation);
    }
    return status;
}
