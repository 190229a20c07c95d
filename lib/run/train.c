/* The loop of training: update, look, save (train_save.c). */
#include <string.h>

#include "base/text.h"
#include "run/config.h"
#include "run/train_run.h"

bool mtp__run_stopped(const mtp__run *run)
{
    return run->options->stop && run->options->stop(run->options->user);
}

/* ---- looking -------------------------------------------------------------------------------------------------- */

mtp_status mtp__run_evaluate(mtp__run *run, mtp_evaluation *evaluation)
{
    const double begin = mtp__clock();
    mtp_evaluation_free(evaluation);
    MTP_TRY(mtp_evaluator_run(run->trainer.evaluator, evaluation));
    mtp__progress_skip(&run->progress, mtp__clock() - begin);
    return MTP_OK;
}

static bool evaluation_due(const mtp__run *run)
{
    const int64_t every = run->config->eval_steps;
    if (!run->trainer.evaluator || run->step == 0 || run->last_eval_step >= run->step) return false;
    return run->step == run->total_steps || (every > 0 && run->step % every == 0);
}

static mtp_status evaluate(mtp__run *run)
{
    const mtp_train_config *c = run->config;
    run->trained_step = -1;
    MTP_TRY(mtp__run_evaluate(run, &run->trained));
    run->trained_step = run->last_eval_step = run->step;
    if (mtp__run_writes(run)) MTP_TRY(mtp__metrics_eval(&run->metrics, run->step, &run->trained));
    const double length = mtp_acceptance_length(&run->trained.rounds, run->metrics.K);
    const bool better = run->best_step < 0 || length > run->best_length;
    run->evals_since_best = better ? 0 : run->evals_since_best + 1;
    if (better) {
        run->best_step = run->step;
        run->best_length = length;
    }
    mtp_log(run->options->logger, MTP_LOG_INFO, "evaluation at step %lld: %.4f accepted drafts a round, loss %.4f%s",
            (long long)run->step, length, run->trained.loss, better ? ", the best so far" : "");
    if (better && c->keep_best) MTP_TRY(mtp__run_save(run));
    return MTP_OK;
}

static bool out_of_patience(mtp__run *run)
{
    const int64_t patience = run->config->patience;
    if (patience == 0 || run->evals_since_best < patience) return false;
    if (!run->stopped_early)
        mtp_log(run->options->logger, MTP_LOG_INFO,
                "no longer accepted length in %lld evaluation%s: the run ends at step %lld, the best was step %lld",
                (long long)run->evals_since_best, mtp__plural(run->evals_since_best), (long long)run->step,
                (long long)run->best_step);
    run->stopped_early = true;
    return true;
}

static mtp_status show(mtp__run *run, const mtp__update *update)
{
    const mtp_train_options *o = run->options;
    const bool logged = update->step % run->config->logging_steps == 0;
    if (!mtp__run_writes(run)) return MTP_OK;
    run->progress.rows += update->rows;
    if (update->bad) return MTP_OK; /* it was said */
    const bool live = o->live_progress && mtp__clock() - run->progress.last_live > 0.1;
    if (!logged && !live) return MTP_OK;
    const mtp_loader_stats stats = mtp_loader_get_stats(run->trainer.loader);
    const mtp__pace pace = mtp__progress_pace(&run->progress, stats.wait_seconds, logged);
    if (logged) MTP_TRY(mtp__run_dir_check(&run->directory));
    if (logged) MTP_TRY(mtp__metrics_train(&run->metrics, update, &pace));
    if (!o->progress) return MTP_OK;
    char line[MTP__PROGRESS_LINE];
    mtp__progress_line(&run->progress, &run->metrics, update, &pace, run->total_steps, line);
    o->progress(o->user, line, !logged);
    run->progress.last_live = mtp__clock();
    return MTP_OK;
}

/* ---- the loop ------------------------------------------------------------------------------------------------- */

static mtp_status interrupted(mtp__run *run)
{
    MTP_TRY_AT(mtp__run_save_last(run), "interrupted at step %lld", (long long)run->step);
    return MTP_FAIL(MTP_E_INTERRUPTED,
                    "interrupted at step %lld of %lld; a checkpoint is saved, --resume auto goes on from it",
                    (long long)run->step, (long long)run->total_steps);
}

static mtp_status look(mtp__run *run)
{
    if (!evaluation_due(run)) return MTP_OK;
    const mtp_status status = evaluate(run);
    return status == MTP_E_INTERRUPTED ? interrupted(run) : status;
}

/* Results of the oldest step under way. */
static mtp_status read_step(mtp__run *run)
{
    mtp__update update;
    MTP_TRY(mtp__trainer_read(&run->trainer, &update));
    if (update.bad) MTP_TRY(mtp__run_skip(run, &update));
    run->step = update.step;
    run->epoch = update.epoch;
    run->batch = update.batch;
    if (!update.bad) run->loss = update.loss;
    MTP_TRY(show(run, &update));
    return mtp__run_settle(run, false);
}

/* Those of all of them: `run` is then where the weights are. */
static mtp_status read_all(mtp__run *run)
{
    while (mtp__trainer_flying(&run->trainer) > 0) MTP_TRY(read_step(run));
    return MTP_OK;
}

/* A step could not be launched. What those before it have to say comes first. */
static mtp_status launch_failed(mtp__run *run)
{
    const mtp_error first = *mtp_last_error();
    MTP_TRY(read_all(run));
    return mtp__fail_again(&first);
}

static bool save_due(const mtp__run *run, int64_t step)
{
    const int64_t every = run->config->save_steps;
    return every > 0 && step % every == 0;
}

/* Is there something to be done behind this step that needs the weights that it leaves. */
static bool pause_due(const mtp__run *run, int64_t step)
{
    const int64_t every = run->config->eval_steps;
    const bool evaluated = run->trainer.evaluator && every > 0 && step % every == 0;
    return step == run->total_steps || evaluated || save_due(run, step);
}

static mtp_status one_step(mtp__run *run)
{
    bool stopped = false;
    const int64_t done = run->step + mtp__trainer_flying(&run->trainer);
    if (mtp__trainer_launch(&run->trainer, done, mtp__run_stopped(run), &stopped) != MTP_OK) return launch_failed(run);
    if (stopped) {
        MTP_TRY(read_all(run));
        return interrupted(run);
    }
    if (!pause_due(run, done + 1))
        return mtp__trainer_flying(&run->trainer) > run->trainer.lag ? read_step(run) : MTP_OK;
    MTP_TRY(read_all(run));
    MTP_TRY(look(run));
    if (save_due(run, run->step) && run->begun_step != run->step) MTP_TRY(mtp__run_save(run));
    return MTP_OK;
}

static mtp_status loop(mtp__run *run)
{
    mtp__progress_start(&run->progress, run->step);
    const int64_t evaluated = run->last_eval_step;
    MTP_TRY(look(run)); /* an evaluation that was interrupted at the step we go on from */
    if (run->last_eval_step != evaluated) MTP_TRY(mtp__run_save(run));
    while (run->step < run->total_steps && !out_of_patience(run)) {
        MTP_TRY(one_step(run));
    }
    MTP_TRY(mtp__run_check_trained(run));
    return mtp__run_save_last(run);
}

/* A run that fails says what is left of it; alone it may still wait for that. */
static mtp_status with_last_good(mtp__run *run, mtp_status status)
{
    if (status == MTP_OK || status == MTP_E_INTERRUPTED) return status;
    const mtp_error first = *mtp_last_error();
    if (run->ranks.world_size == 1 && mtp__run_settle(run, true) != MTP_OK) return mtp__fail_again(&first);
    if (run->saved_step < 0 || mtp__run_dir_check(&run->directory) != MTP_OK) return mtp__fail_again(&first);
    /* the fingerprint of the data is one of token ids: a sample that is left out makes another run */
    const bool data = status == MTP_E_DATA || status == MTP_E_FORMAT;
    return mtp__fail(status, first.foreign, first.file, first.line,
                     "%s; the last good checkpoint is that of step %lld, --resume auto goes on from it%s",
                     first.message, (long long)run->saved_step,
                     data ? " once that is repaired in place: the run needs the same documents" : "");
}

static void describe(const mtp__run *run)
{
    const mtp__trainer *t = &run->trainer;
    const mtp_logger *logger = run->options->logger;
    int64_t batches = 0;
    if (mtp_loader_batches(t->loader, 0, &batches) != MTP_OK) batches = 0;
    mtp_log(logger, MTP_LOG_INFO, "drafter %s: %lld trained values, %lld tensors", run->config->drafter,
            (long long)mtp_drafter_num_trained(t->drafter), (long long)mtp_drafter_num_parameters(t->drafter));
    mtp_log(logger, MTP_LOG_INFO, "data: %lld sample%s, %lld micro-batch%s in the first epoch; the run has %lld step%s",
            (long long)mtp_dataset_size(t->train_data), mtp__plural(mtp_dataset_size(t->train_data)),
            (long long)batches, batches == 1 ? "" : "es", (long long)t->schedule.max_steps,
            mtp__plural(t->schedule.max_steps));
}

static mtp_status train(mtp__run *run)
{
    MTP_TRY(mtp__run_open(run));
    run->total_steps = run->trainer.schedule.max_steps;
    describe(run);
    if (run->options->dry_run) return MTP_OK;
    MTP_TRY(mtp__run_begin(run));
    MTP_TRY(with_last_good(run, loop(run)));
    MTP_TRY(mtp__run_compare(run));
    MTP_TRY(mtp__ranks_agree(&run->ranks, MTP_OK));
    mtp__ranks_leave(&run->ranks, MTP_OK);
    if (!mtp__run_writes(run)) return MTP_OK;
    MTP_TRY(mtp__run_export(run));
    return mtp__run_dir_check(&run->directory);
}

/* Only rank 0 talks about the run; the others say what is wrong. */
static mtp_train_options quiet(const mtp_train_options *options, mtp_logger *logger)
{
    mtp_train_options made = {.stop = options->stop, .user = options->user, .dry_run = options->dry_run};
    if (!options->logger) return made;
    *logger = *options->logger;
    if (logger->min_level < MTP_LOG_WARNING) logger->min_level = MTP_LOG_WARNING;
    made.logger = logger;
    return made;
}

mtp_status mtp_train(const mtp_train_config *config, const mtp_train_options *options, mtp_train_result *result)
{
    MTP_REQUIRE(config && options);
    mtp__run run = {.config = config,
                    .options = options,
                    .metrics = {.lines = {.fd = -1}},
                    .batch = -1,
                    .saved_step = -1,
                    .begun_step = -1,
                    .kept_best_step = -1,
                    .best_step = -1,
                    .last_eval_step = -1,
                    .trained_step = -1};
    const mtp_comm_options comm = {.seconds = config->timeout_seconds,
                                   .heartbeat_seconds = config->heartbeat_seconds,
                                   .logger = options->logger,
                                   .failed = options->ranks_failed,
                                   .user = options->user};
    mtp_logger logger;
    mtp_train_options others;
    mtp_status status = mtp__ranks_open(&comm, &run.ranks);
    if (run.ranks.rank > 0) {
        others = quiet(options, &logger);
        run.options = &others;
    }
    if (status == MTP_OK) status = mtp__ranks_leave(&run.ranks, train(&run));
    if (status == MTP_OK)
        status = mtp__metrics_close(&run.metrics);
    else
        mtp__metrics_abandon(&run.metrics);
    if (result)
        *result = (mtp_train_result){.step = run.step,
                                     .total_steps = run.total_steps,
                                     .bad_steps = run.bad_steps,
                                     .resumed_from = run.resume ? run.resume->step : -1,
                                     .best_step = config->keep_best ? run.best_step : -1,
                                     .best_length = run.best_length,
                                     .stopped_early = run.stopped_early,
                                     .loss = run.loss};
    mtp__run_close(&run);
    return status;
}
