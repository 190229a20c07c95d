/* Checkpoints of a run, written beside it; a save that fails costs the run nothing but that checkpoint. */
#include <stdlib.h>
#include <string.h>

#include "run/config.h"
#include "run/resume.h"
#include "run/train_run.h"

/* ---- what a checkpoint says of the run ------------------------------------------------------------------------ */

/* The micro-batch after the last one taken. */
static mtp_status next_position(const mtp__run *run, mtp__manifest *m)
{
    int64_t count = 0;
    MTP_TRY(mtp_loader_batches(run->trainer.loader, run->epoch, &count));
    m->epoch = run->epoch;
    m->batch = run->batch + 1;
    if (m->batch < count) return MTP_OK;
    m->epoch++;
    m->batch = 0;
    return MTP_OK;
}

static mtp_status fill_manifest(const mtp__run *run, mtp__manifest *m)
{
    const mtp__trainer *t = &run->trainer;
    m->step = run->step;
    m->bad_steps = run->bad_steps;
    m->total_steps = t->schedule.max_steps;
    m->seed = (uint64_t)run->config->seed;
    m->verifier = mtp__trainer_verifier_fingerprint(t->verifier);
    m->dataset = mtp_dataset_fingerprint(t->train_data);
    m->num_samples = mtp_dataset_size(t->train_data);
    m->best_step = run->best_step;
    m->best_length = run->best_length;
    m->evals_since_best = run->evals_since_best;
    m->last_eval_step = run->last_eval_step;
    m->drafter = strdup(run->drafter);
    if (!m->drafter) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a checkpoint's manifest");
    MTP_TRY(next_position(run, m));
    return mtp__resume_record(run->config, m);
}

/* ---- the end of a save ---------------------------------------------------------------------------------------- */

static void note_saved(mtp__run *run)
{
    const char *warning = mtp__saver_warning(run->saver);
    run->saved_step = run->begun_step;
    if (run->begun_best) {
        run->kept_best_step = run->begun_step;
        run->kept_best_length = run->begun_length;
    }
    if (warning)
        mtp_log(run->options->logger, MTP_LOG_WARNING, "the checkpoint of step %lld is saved, but: %s",
                (long long)run->saved_step, warning);
}

/* The best evaluation whose checkpoint did not come is not the best that the run can give out. */
static void note_lost(mtp__run *run)
{
    if (!run->begun_best || run->best_step != run->begun_step) return;
    run->best_step = run->kept_best_step;
    run->best_length = run->kept_best_length;
}

static void say_lost(const mtp__run *run)
{
    const char *message = mtp_last_error()->message;
    if (!mtp__run_writes(run)) return;
    if (run->saved_step >= 0)
        mtp_log(run->options->logger, MTP_LOG_WARNING,
                "%s. The run goes on, its last good checkpoint is that of step %lld; the next save tries again",
                message, (long long)run->saved_step);
    else
        mtp_log(run->options->logger, MTP_LOG_WARNING,
                "%s. The run goes on and has no checkpoint yet; the next save tries again", message);
}

/* The reports of all ranks; free() them. */
static mtp_status exchange(mtp__run *run, double seconds, mtp__save_report **reports)
{
    const int64_t ranks = run->ranks.world_size;
    mtp__save_report *all = calloc((size_t)ranks, sizeof *all), own;
    mtp__saver_wait(run->saver, seconds, &own);
    mtp_status status = all ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory for the reports of a checkpoint");
    status = mtp__ranks_exchange(&run->ranks, status, &own, sizeof own);
    for (int i = 0; status == MTP_OK && i < ranks; i++) memcpy(&all[i], mtp__ranks_said(&run->ranks, i), sizeof *all);
    if (status == MTP_OK)
        *reports = all;
    else
        free(all);
    return status;
}

/* What became of the save under way, if there is one; `wait`: until it has ended. *lost is its failure. */
static mtp_status settle(mtp__run *run, bool wait, mtp_status *lost)
{
    mtp__save_outcome outcome = MTP__SAVE_PENDING;
    *lost = MTP_OK;
    if (!run->saver || !mtp__saver_busy(run->saver)) return MTP_OK;
    do {
        mtp__save_report *reports = NULL;
        MTP_TRY(exchange(run, wait ? 1.0 : 0.0, &reports));
        outcome = mtp__saver_settle(run->saver, reports, lost);
        free(reports);
    } while (wait && outcome == MTP__SAVE_PENDING);
    if (outcome == MTP__SAVE_DONE) note_saved(run);
    if (outcome == MTP__SAVE_LOST) note_lost(run);
    return MTP_OK;
}

mtp_status mtp__run_settle(mtp__run *run, bool wait)
{
    mtp_status lost;
    MTP_TRY(settle(run, wait, &lost));
    if (lost != MTP_OK) say_lost(run);
    return MTP_OK;
}

/* ---- its begin ------------------------------------------------------------------------------------------------ */

static mtp_status wait_for_earlier(mtp__run *run)
{
    if (!mtp__saver_busy(run->saver)) return MTP_OK;
    mtp_log(run->options->logger, MTP_LOG_INFO,
            "a checkpoint is due at step %lld while that of step %lld is still being written: training waits for it",
            (long long)run->step, (long long)run->begun_step);
    return mtp__run_settle(run, true);
}

static mtp_status make_manifest(const mtp__run *run, mtp__manifest **manifest)
{
    *manifest = mtp__manifest_create();
    if (!*manifest) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a checkpoint's manifest");
    const mtp_status status = fill_manifest(run, *manifest);
    if (status == MTP_OK) return MTP_OK;
    mtp__manifest_free(*manifest);
    *manifest = NULL;
    return status;
}

static mtp_status begin(mtp__run *run)
{
    const mtp_train_config *c = run->config;
    const bool best = c->keep_best && run->best_step == run->step;
    mtp__save save = {.step = run->step,
                      .retention = {.last = c->keep_last,
                                    .every = c->keep_every,
                                    .best_step = best ? run->step : run->kept_best_step},
                      .best = best,
                      .metrics = run->metrics.lines.fd,
                      .metrics_behind = mtp__metrics_behind(&run->metrics)};
    mtp_status status = mtp__run_dir_check(&run->directory);
    if (status == MTP_OK && mtp__run_writes(run)) status = make_manifest(run, &save.manifest);
    if (status == MTP_OK) status = mtp__saver_begin(run->saver, &save);
    MTP_TRY(mtp__ranks_agree(&run->ranks, status));
    run->begun_step = run->step;
    run->begun_best = best;
    run->begun_length = run->best_length;
    return MTP_OK;
}

mtp_status mtp__run_save(mtp__run *run)
{
    const double start = mtp__clock();
    MTP_TRY(wait_for_earlier(run));
    MTP_TRY(begin(run));
    mtp__progress_skip(&run->progress, mtp__clock() - start);
    return MTP_OK;
}

mtp_status mtp__run_save_last(mtp__run *run)
{
    mtp_status lost;
    MTP_TRY(mtp__run_settle(run, true));
    if (run->saved_step == run->step) return MTP_OK;
    MTP_TRY(begin(run));
    MTP_TRY(settle(run, true, &lost));
    return lost;
}

mtp_status mtp__run_open_saver(mtp__run *run)
{
    const mtp__saver_options options = {.run_directory = run->directory.path,
                                        .drafter = run->trainer.drafter,
                                        .optimizer = run->trainer.optimizer,
                                        .share = {.rank = run->ranks.rank,
                                                  .world_size = run->ranks.world_size,
                                                  .sharded_moments = run->trainer.sharded_moments}};
    return mtp__saver_create(&options, &run->saver);
}

/* ---- going on ------------------------------------------------------------------------------------------------- */

/* Rank 0 looks. */
static mtp_status look_for_best(const mtp__run *run, bool *good)
{
    char *path = NULL;
    mtp__manifest *best = NULL;
    *good = true;
    if (!mtp__run_writes(run)) return MTP_OK;
    MTP_TRY(mtp__checkpoint_path(run->directory.path, run->resume->best_step, &path));
    const mtp_status status = mtp__checkpoint_open(path, true, &best);
    free(path);
    mtp__manifest_free(best);
    if (status == MTP_OK || status == MTP_E_MEMORY || status == MTP_E_IO) return status;
    *good = false;
    mtp_log(run->options->logger, MTP_LOG_WARNING,
            "the best checkpoint, of step %lld, is lost; the next evaluation counts as the best so far: %s",
            (long long)run->resume->best_step, mtp_last_error()->message);
    return MTP_OK;
}

mtp_status mtp__run_take_best(mtp__run *run)
{
    bool good = true;
    run->best_step = run->resume->best_step;
    run->best_length = run->resume->best_length;
    if (!run->config->keep_best || run->best_step < 0) return MTP_OK;
    const mtp_status status = look_for_best(run, &good);
    MTP_TRY(mtp__ranks_exchange(&run->ranks, status, &good, sizeof good));
    memcpy(&good, mtp__ranks_said(&run->ranks, 0), sizeof good);
    if (!good) {
        run->best_step = -1;
        return MTP_OK;
    }
    run->kept_best_step = run->best_step;
    run->kept_best_length = run->best_length;
    return MTP_OK;
}
