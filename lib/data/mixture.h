/* Internal: the documents of an epoch, in their order, of one source or several.
 *
 * Without weights an epoch is every document once, in the sampler's order.
 *
 * With them, let T_s be the tokens of source s that fit into batches, N_s its documents, w_s its share. An epoch has as
 * many tokens as all sources together, T = sum of T_s, as near as whole documents come to it: n_s = w_s T / (T_s / N_s)
 * documents of source s, rounded, at least one. The documents of a source are an endless sequence of passes, each of
 * them all its documents in the sampler's order of (seed, source, pass); epoch e takes numbers e n_s to (e + 1) n_s - 1
 * of it. So no document of a source comes again before all others of it have come, whatever the weights, and any epoch
 * is known without those before it. Within an epoch the next document is always of the source that is furthest behind
 * its share of the tokens so far. */
#ifndef MTP_DATA_MIXTURE_H
#define MTP_DATA_MIXTURE_H

#include "data/dataset.h"

enum { MTP__MIXTURE_PASSES = 1000 }; /* more of them in an epoch are taken for a mistake in the weights */

typedef struct mtp__mixture {
    int64_t *parts;    /* n_s, one a source; NULL: no mixing */
    int64_t documents; /* of an epoch */
} mtp__mixture;

/* Tokens of a document that go into a batch: all, the first of them, or 0 when it is left out. MTP_E_DATA: it is too
 * long and overlong is ERROR. */
mtp_status mtp__document_length(const mtp__dataset_entry *entry, const mtp_loader_options *options, int64_t *length);
/* MTP_E_DATA: a document as above; a source of which nothing fits; one that an epoch would repeat too often. */
mtp_status mtp__mixture_create(const mtp_dataset *dataset, const mtp_loader_options *options, mtp__mixture *mixture);
void mtp__mixture_free(mtp__mixture *mixture); /* accepts a zeroed struct and zeroes it */
/* The samples of an epoch in their order, [mixture->documents]. */
mtp_status mtp__mixture_order(const mtp__mixture *mixture, const mtp_dataset *dataset,
                              const mtp_loader_options *options, int64_t epoch, uint32_t *order);

#endif
