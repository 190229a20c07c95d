/* Internal: everything a run has open, and one optimizer update with it. */
#ifndef MTP_RUN_TRAINER_H
#define MTP_RUN_TRAINER_H

#include "model/step.h"
#include "mtp/eval.h"
#include "mtp/train.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"
#include "run/bad_steps.h"

typedef struct mtp__trainer {
    const mtp_train_config *config;
    const mtp_logger *logger;
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
    int64_t total_batches;     /* micro-batches of a run given in epochs; 0: given in steps */
    int64_t accumulation;      /* micro-batches of an update */
    mtp__rows *rows;           /* [accumulation] */
    const mtp_batch **batches; /* [accumulation] of the update at hand */
    int64_t held;              /* of them */
    mtp__sample_list bad;      /* samples of the last update, when it was bad; with several ranks those of all */
} mtp__trainer;

typedef struct mtp__trainer_options {
    const mtp_logger *logger;
    bool (*progress)(void *user, int64_t done, int64_t total); /* of evaluations; see mtp_evaluator_options */
    void *user;
} mtp__trainer_options;

/* Open and lay out all that a run needs; nothing is written. Close with mtp__trainer_close, also after a failure. */
mtp_status mtp__trainer_open(const mtp_train_config *config, const mtp__trainer_options *options,
                             mtp__trainer *trainer);
void mtp__trainer_close(mtp__trainer *trainer); /* accepts a zeroed struct */
/* A stable identity of the verifier's embedding and norm: shapes, dtype, the norm, some rows of the table. */
uint64_t mtp__trainer_verifier_fingerprint(const mtp_verifier *verifier);

/* One step: micro-batches, gradients, clipping, AdamW. `done` are the steps before it. When loss or gradient norm are
 * not finite, update->bad is set, trainer->bad names the samples, and weights and moments are those of before. */
mtp_status mtp__trainer_update(mtp__trainer *trainer, int64_t done, mtp__update *update);

#endif
