/* Internal: an evaluation that ranks do together. */
#ifndef MTP_RUN_EVALUATE_H
#define MTP_RUN_EVALUATE_H

#include "mtp/eval.h"
#include "run/ranks.h"

/* mtp_evaluator_create for a caller who has planned the memory of all that it makes, and has decided where the
 * verifier's table lies. */
mtp_status mtp__evaluator_create(mtp_drafter *drafter, const mtp_verifier *verifier, const mtp_dataset *dataset,
                                 const mtp_evaluator_options *options, mtp_evaluator **evaluator);

/* From now on mtp_evaluator_run is a collective: rank r computes batches r, r + world size, ..., and every rank gets
 * the figures of all of them, the same bits as one process alone gets. `ranks` outlives the evaluator. */
void mtp__evaluator_share(mtp_evaluator *evaluator, mtp__ranks *ranks);

/* Add the counts of all ranks, each of which has counted other documents. */
mtp_status mtp__evaluation_merge(mtp__ranks *ranks, mtp_evaluation *evaluation);

#endif
