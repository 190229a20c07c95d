/* Internal: the order of an epoch, and how its documents become batches. Pure functions: the same data set, options and
 * epoch give the same plan, so any position of a run can be started from. */
#ifndef MTP_DATA_SAMPLER_H
#define MTP_DATA_SAMPLER_H

#include "data/batch.h"

/* More samples than a window are shuffled by blocks of neighbours, so that a store is read in large pieces: windows of
 * eight blocks from anywhere, the samples of a window in any order. Fewer are permuted as a whole. */
enum { MTP__SHUFFLE_BLOCK = 64, MTP__SHUFFLE_WINDOW = 512 };

/* The order of `count` samples in an epoch: a permutation by (seed, epoch), or 0, 1, 2, ... */
void mtp__sampler_order(uint64_t seed, int64_t epoch, bool shuffle, uint32_t count, uint32_t *order);

/* A batch of the plan: items [begin, end), and what was passed over since the batch before. */
typedef struct mtp__plan_batch {
    int64_t begin, end;
    int64_t tokens;
    int64_t batches_skipped;                        /* nothing supervised */
    int64_t documents_truncated, documents_skipped; /* longer than the budget */
} mtp__plan_batch;

typedef struct mtp__plan {
    int64_t epoch;
    mtp__batch_item *items; /* documents in order, those skipped left out */
    mtp__plan_batch *batches;
    int64_t num_items, num_batches;
} mtp__plan;

/* Documents in the sampler's order go into a batch as long as they fit (next-fit). Batches without a target are left
 * out. MTP_E_DATA when a document is too long and overlong is ERROR, and when no batch remains. */
mtp_status mtp__plan_create(const mtp_dataset *dataset, const mtp_loader_options *options, int64_t epoch,
                            mtp__plan *plan);
void mtp__plan_free(mtp__plan *plan); /* accepts a zeroed struct and zeroes it */

#endif
