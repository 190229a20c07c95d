#include "data/sampler.h"

#include <stdlib.h>

#include "base/error.h"
#include "base/rng.h"
#include "data/mixture.h"

/* Keeps the sampler's numbers apart from those of other users of the seed. */
static const uint64_t SAMPLER_STREAM = UINT64_C(0x73616d706c657200); /* "sampler" */

/* Blocks of neighbours in a random order, then the samples of each window of blocks in a random order. `order` holds
 * 0, 1, 2, ...; what is written is never behind what is read, since a window is taken out before it is filled. */
static void shuffle_blocks(mtp__rng *rng, uint32_t count, uint32_t *order)
{
    const uint32_t num_blocks = (count + MTP__SHUFFLE_BLOCK - 1) / MTP__SHUFFLE_BLOCK;
    uint32_t window[MTP__SHUFFLE_WINDOW], place[MTP__SHUFFLE_WINDOW], written = 0;
    uint32_t *blocks = order + count - num_blocks; /* the end of the order is free until the last window */
    mtp__rng_permutation(rng, num_blocks, blocks);
    for (uint32_t block = 0; block < num_blocks;) {
        uint32_t length = 0;
        for (int i = 0; i < MTP__SHUFFLE_WINDOW / MTP__SHUFFLE_BLOCK && block < num_blocks; i++, block++) {
            const uint32_t first = blocks[block] * MTP__SHUFFLE_BLOCK;
            for (uint32_t j = first; j < count && j < first + MTP__SHUFFLE_BLOCK; j++) window[length++] = j;
        }
        mtp__rng_permutation(rng, length, place);
        for (uint32_t i = 0; i < length; i++) order[written++] = window[place[i]];
    }
}

void mtp__sampler_order(uint64_t seed, int64_t epoch, bool shuffle, uint32_t count, uint32_t *order)
{
    for (uint32_t i = 0; i < count; i++) order[i] = i;
    if (!shuffle) return;
    mtp__rng rng = mtp__rng_make(seed, SAMPLER_STREAM + (uint64_t)epoch);
    if (count <= MTP__SHUFFLE_WINDOW)
        mtp__rng_permutation(&rng, count, order);
    else
        shuffle_blocks(&rng, count, order);
}

/* What stands in the batch that is being filled. */
typedef struct open_batch {
    mtp__plan_batch batch;
    bool supervised;
} open_batch;

/* Keep the open batch or count it as skipped, and begin the next. */
static void close_batch(mtp__plan *plan, open_batch *open)
{
    mtp__plan_batch next = {.begin = plan->num_items, .end = plan->num_items};
    open->batch.end = plan->num_items;
    if (open->supervised) {
        plan->batches[plan->num_batches++] = open->batch;
    } else if (open->batch.end > open->batch.begin) {
        next.batches_skipped = open->batch.batches_skipped + 1;
        next.documents_truncated = open->batch.documents_truncated;
        next.documents_skipped = open->batch.documents_skipped;
    } else {
        return; /* nothing in it yet */
    }
    *open = (open_batch){.batch = next};
}

static mtp_status fill(const mtp_dataset *dataset, const mtp_loader_options *options, const uint32_t *order,
                       int64_t count, mtp__plan *plan)
{
    const int64_t budget = options->tokens_per_batch;
    open_batch open = {.supervised = false};
    for (int64_t i = 0; i < count; i++) {
        const mtp__dataset_entry found = mtp__dataset_at(dataset, order[i]), *entry = &found;
        int64_t length;
        MTP_TRY(mtp__document_length(entry, options, &length));
        if (length == 0) {
            open.batch.documents_skipped++;
            continue;
        }
        if (open.batch.tokens + length > budget) close_batch(plan, &open);
        plan->items[plan->num_items++] = (mtp__batch_item){order[i], length};
        open.batch.tokens += length;
        open.batch.documents_truncated += length < entry->num_tokens;
        open.supervised = open.supervised || entry->first_target < length;
    }
    close_batch(plan, &open);
    if (plan->num_batches == 0)
        return MTP_FAIL(
            MTP_E_DATA,
            "none of the %lld documents of epoch %lld has a token that could be a target within %lld tokens; "
            "check the loss masks and tokens_per_batch",
            (long long)count, (long long)plan->epoch, (long long)budget);
    /* what came after the last kept batch is counted with it, so that an epoch's counts are complete */
    mtp__plan_batch *last = &plan->batches[plan->num_batches - 1];
    last->batches_skipped += open.batch.batches_skipped;
    last->documents_truncated += open.batch.documents_truncated;
    last->documents_skipped += open.batch.documents_skipped;
    return MTP_OK;
}

static mtp_status make_plan(const mtp_dataset *dataset, const mtp_loader_options *options, const mtp__mixture *mixture,
                            mtp__plan *plan)
{
    const size_t count = (size_t)mixture->documents;
    uint32_t *order = malloc(count * sizeof *order);
    plan->items = malloc(count * sizeof *plan->items);
    plan->batches = malloc(count * sizeof *plan->batches);
    mtp_status status = MTP_OK;
    if (!order || !plan->items || !plan->batches)
        status = MTP_FAIL(MTP_E_MEMORY, "no memory to order %zu documents", count);
    if (status == MTP_OK) status = mtp__mixture_order(mixture, dataset, options, plan->epoch, order);
    if (status == MTP_OK) status = fill(dataset, options, order, mixture->documents, plan);
    free(order);
    MTP_TRY(status);
    mtp__plan_batch *fewer = realloc(plan->batches, (size_t)plan->num_batches * sizeof *fewer);
    if (fewer) plan->batches = fewer;
    return MTP_OK;
}

mtp_status mtp__plan_create(const mtp_dataset *dataset, const mtp_loader_options *options, int64_t epoch,
                            mtp__plan *plan)
{
    mtp__mixture mixture;
    *plan = (mtp__plan){.epoch = epoch};
    MTP_TRY(mtp__mixture_create(dataset, options, &mixture));
    const mtp_status status = make_plan(dataset, options, &mixture, plan);
    mtp__mixture_free(&mixture);
    if (status != MTP_OK) mtp__plan_free(plan);
    return status;
}

void mtp__plan_free(mtp__plan *plan)
{
    free(plan->items);
    free(plan->batches);
    *plan = (mtp__plan){0};
}
