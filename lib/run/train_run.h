/* Internal: the state of one run, shared by train_begin.c (from a configuration to the first step), train.c (the loop)
 * and train_finish.c (the comparison and the export). */
#ifndef MTP_RUN_TRAIN_RUN_H
#define MTP_RUN_TRAIN_RUN_H

#include "run/bad_steps.h"
#include "run/checkpoint.h"
#include "run/progress.h"
#include "run/run_dir.h"
#include "run/saver.h"
#include "run/trainer.h"

typedef struct mtp__run {
    const mtp_train_config *config;
    const mtp_train_options *options; /* on other ranks than 0: silent but for warnings */
    mtp__ranks ranks;
    mtp__trainer trainer;
    mtp__run_dir directory;
    mtp__metrics metrics;
    mtp__saver *saver;
    mtp__progress progress;
    mtp__manifest *resume; /* the checkpoint to go on from; NULL: from the start */
    bool resume_is_ours;   /* it lies in output_dir */
    char *drafter;         /* absolute path of the drafter that training started from */

    int64_t step;         /* done, the skipped ones included */
    int64_t bad_steps;    /* of them skipped */
    int64_t total_steps;  /* of the run */
    int64_t epoch, batch; /* last micro-batch taken; batch -1: none */
    int64_t saved_step;   /* of the newest complete checkpoint of this run; -1: none */
    int64_t begun_step;   /* of the newest one that was begun; -1: none */
    bool begun_best;      /* it is to be the best one, with begun_length */
    double begun_length;
    double loss; /* of the last update */
    int64_t best_step, evals_since_best, last_eval_step;
    double best_length;
    int64_t kept_best_step; /* the best one whose checkpoint is complete, with keep_best; -1: none */
    double kept_best_length;
    bool stopped_early;

    mtp_evaluation start, trained; /* for the comparison */
    bool has_start;
    int64_t trained_step; /* of `trained`; -1: none */
} mtp__run;

/* Does this process write the run directory. */
static inline bool mtp__run_writes(const mtp__run *run)
{
    return run->ranks.rank == 0;
}

/* Open everything and find the checkpoint to go on from; nothing is written. */
mtp_status mtp__run_open(mtp__run *run);
/* Is what must be the same on all ranks the same: configuration, data, verifier, weights, position. MTP_E_CONFIG on
 * all, naming every difference and its rank. */
mtp_status mtp__run_check_ranks(mtp__run *run);
/* Make the directory ours: lock, run.json, config.toml, metrics; evaluate the drafter as it is; load the checkpoint. */
mtp_status mtp__run_begin(mtp__run *run);
void mtp__run_close(mtp__run *run);

/* Was this process asked to stop. */
bool mtp__run_stopped(const mtp__run *run);
/* Evaluate the drafter in memory, over all ranks, into `evaluation` (freed first), outside the clock of training. */
mtp_status mtp__run_evaluate(mtp__run *run, mtp_evaluation *evaluation);

/* Memory and thread for checkpoints. */
mtp_status mtp__run_open_saver(mtp__run *run);
/* Begin a checkpoint of now; waits for one that is still being written. */
mtp_status mtp__run_save(mtp__run *run);
/* Look after the checkpoint under way; `wait`: until it has ended. One that could not be saved is said in the log. */
mtp_status mtp__run_settle(mtp__run *run, bool wait);
/* Have a checkpoint of now, complete; a failure when it cannot be saved. */
mtp_status mtp__run_save_last(mtp__run *run);
/* The best evaluation so far, as the checkpoint says that the run goes on from. With keep_best one whose own checkpoint
 * is damaged is forgotten. */
mtp_status mtp__run_take_best(mtp__run *run);

/* Count and record a bad step; more of them than max_bad_steps are MTP_E_DATA naming the samples. */
mtp_status mtp__run_skip(mtp__run *run, const mtp__update *update);
/* Say how many steps were skipped; MTP_E_DATA when all of them were. */
mtp_status mtp__run_check_trained(const mtp__run *run);

/* Compare start and end. */
mtp_status mtp__run_compare(mtp__run *run);
/* Export the last step, or the best one with keep_best. The trainer is closed then. */
mtp_status mtp__run_export(mtp__run *run);

#endif
