/* Internal: everything a run has open, and one optimizer update with it. */
#ifndef MTP_RUN_TRAINER_H
#define MTP_RUN_TRAINER_H

#include "comm/buckets.h"
#include "model/step.h"
#include "mtp/eval.h"
#include "mtp/train.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"
#include "run/bad_steps.h"
#include "run/ranks.h"

/* A place in a run. */
typedef struct mtp__position {
    int64_t step;         /* updates done */
    int64_t epoch, batch; /* the next micro-batch, of all ranks together */
} mtp__position;

/* A step whose results are not read yet: what they are the results of, and what the device may still copy from. */
typedef struct mtp__flight {
    mtp__update update;
    mtp__rows *rows;           /* [accumulation] */
    const mtp_batch **batches; /* [accumulation] this rank's */
    int64_t held;              /* of them */
    double *sums;              /* [K, MTP_TALLY_COLUMNS] and */
    double *control;           /* [MTP_CONTROL] of the optimizer, from host_alloc; there when */
    mtp_mark *mark;            /* is passed. Alone; with several ranks `update` is complete from the launch on */
} mtp__flight;

enum { MTP__FLIGHTS = 2 }; /* most steps launched whose results are not read */

/* Steps that are launched before the results of an earlier one are read: one where the device works beside the host and
 * nothing is agreed with other ranks on the way. */
static inline int64_t mtp__trainer_lag(bool memory_is_host, int64_t world_size)
{
    return !memory_is_host && world_size == 1 ? MTP__FLIGHTS - 1 : 0;
}

typedef struct mtp__trainer {
    const mtp_train_config *config;
    const mtp_logger *logger;
    mtp__ranks *ranks; /* who trains together */
    mtp_context *context;
    mtp_verifier *verifier;
    mtp_drafter *drafter;
    mtp_dataset *train_data;
    mtp_dataset *eval_data;   /* NULL without eval_data */
    mtp_evaluator *evaluator; /* NULL without eval_data */
    mtp_loader *loader;
    mtp__step *step;
    mtp__optimizer *optimizer;
    mtp__schedule schedule; /* max_steps: all updates of the run */
    mtp_step_config step_config;
    mtp__position begin;  /* where this process went on */
    int64_t batches_left; /* micro-batches from there to the end, of a run given in epochs; -1: given in steps */
    int64_t accumulation; /* micro-batches of an update on each rank */
    mtp__flight flights[MTP__FLIGHTS];
    int64_t lag;            /* steps that may be launched before the results of one are read: 0 or 1 */
    int64_t launched, read; /* steps, of this process; their difference is under way */
    mtp__sample_list bad;   /* samples of the last step read, when it was bad; with several ranks those of all */
    mtp_comm *device_comm;  /* for gradients and weights: that of the ranks, or between GPUs; NULL for one rank */
    bool staged;            /* it takes host memory, and the device's is another */
    mtp__buckets *buckets;  /* of the gradients; NULL for one rank */
    mtp_plan *plan;         /* of the memory; NULL before it is made, and where device memory is that of the host */
    bool holds_embedding;   /* of the verifier, on the device */
    bool sharded_moments;   /* the optimizer has this rank's share of them only (zero_stage 1) */
} mtp__trainer;

typedef struct mtp__trainer_options {
    const mtp_logger *logger;
    mtp__ranks *ranks;                                         /* outlives the trainer */
    mtp__position begin;                                       /* of the checkpoint that the run goes on from */
    bool (*progress)(void *user, int64_t done, int64_t total); /* of evaluations; see mtp_evaluator_options */
    void *user;
} mtp__trainer_options;

/* Open and lay out all that a run needs; nothing is written, and no rank waits for another. Close with
 * mtp__trainer_close, also after a failure. */
mtp_status mtp__trainer_open(const mtp_train_config *config, const mtp__trainer_options *options,
                             mtp__trainer *trainer);
/* Connect the devices of all ranks. A collective. */
mtp_status mtp__trainer_connect(mtp__trainer *trainer);
void mtp__trainer_close(mtp__trainer *trainer); /* accepts a zeroed struct */
/* A stable identity of the verifier's embedding and norm: shapes, dtype, the norm, some rows of the table. */
uint64_t mtp__trainer_verifier_fingerprint(const mtp_verifier *verifier);

/* Steps are launched, and their results read in the same order. */

/* One step on all ranks: micro-batches, gradients, clipping, AdamW. `done` are the steps before it, those under way
 * included. With W ranks and accumulation A the update takes the next A * W micro-batches of the run (at the end of a
 * run given in epochs those that are left), number i of them on rank i mod W; a rank may have none. Counts, sums and
 * gradients are those of all ranks. `stop` on any rank: nothing is done on all, and *stopped is true. At most
 * trainer->lag steps may be under way already. */
mtp_status mtp__trainer_launch(mtp__trainer *trainer, int64_t done, bool stop, bool *stopped);
/* Steps under way. */
int64_t mtp__trainer_flying(const mtp__trainer *trainer);
/* The results of the oldest step under way. When loss or gradient norm are not finite, update->bad is set, trainer->bad
 * names the samples of all ranks, and the step has left weights and moments as they were. */
mtp_status mtp__trainer_read(mtp__trainer *trainer, mtp__update *update);

#endif
