/* From a configuration to the state before the first step. */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "base/file.h"
#include "base/text.h"
#include "run/config.h"
#include "run/resume.h"
#include "run/train_run.h"

/* ---- which checkpoint ----------------------------------------------------------------------------------------- */

/* Does the checkpoint lie in RUN/checkpoints of output_dir. */
static bool is_ours(const mtp__run *run, const mtp__manifest *manifest)
{
    struct stat there, here;
    char *parent = NULL;
    if (mtp__path_join(manifest->directory, "../..", &parent) != MTP_OK) return false;
    const bool same = stat(parent, &there) == 0 && stat(run->config->output_dir, &here) == 0 &&
                      there.st_dev == here.st_dev && there.st_ino == here.st_ino;
    free(parent);
    return same;
}

static mtp_status find_named(mtp__run *run, bool is_run)
{
    const mtp_train_config *c = run->config;
    MTP_TRY_AT(mtp__checkpoint_find(c->resume, run->options->logger, &run->resume), "resume");
    run->resume_is_ours = is_ours(run, run->resume);
    if (is_run && !run->resume_is_ours)
        return MTP_FAIL(MTP_E_EXISTS,
                        "%s holds another run than the one that the checkpoint %s belongs to; use another "
                        "output_dir",
                        c->output_dir, run->resume->directory);
    return MTP_OK;
}

static mtp_status find_newest(mtp__run *run)
{
    const char *directory = run->config->output_dir;
    const mtp_status status = mtp__checkpoint_find(directory, run->options->logger, &run->resume);
    run->resume_is_ours = true;
    if (status != MTP_E_NOT_FOUND) return status;
    mtp_log(run->options->logger, MTP_LOG_INFO, "run %s has no checkpoint yet; it starts from the beginning",
            directory);
    return MTP_OK;
}

static mtp_status find_alone(mtp__run *run)
{
    const mtp_train_config *c = run->config;
    bool is_run = false;
    MTP_TRY(mtp__run_dir_inspect(c->output_dir, &is_run));
    if (is_run && strcmp(c->resume, MTP_RESUME_NEVER) == 0)
        return MTP_FAIL(MTP_E_EXISTS,
                        "output_dir %s holds a run; go on with it (--resume auto) or use another output_dir",
                        c->output_dir);
    if (is_run && !run->options->dry_run) {
        MTP_TRY(mtp__run_dir_open(c->output_dir, false, &run->directory));
        /* before the free disk is counted */
        MTP_TRY(mtp__run_dir_remove_leftovers(&run->directory));
        MTP_TRY(mtp__checkpoint_remove_leftovers(c->output_dir));
    }
    if (strcmp(c->resume, MTP_RESUME_NEVER) == 0) return MTP_OK;
    if (strcmp(c->resume, MTP_RESUME_AUTO) != 0) return find_named(run, is_run);
    return is_run ? find_newest(run) : MTP_OK;
}

/* Rank 0 looks; the others take what it found. */
static mtp_status find_checkpoint(mtp__run *run)
{
    char *found = NULL;
    MTP_TRY(mtp__ranks_agree(&run->ranks, mtp__run_writes(run) ? find_alone(run) : MTP_OK));
    if (run->resume) found = run->resume->directory;
    MTP_TRY(mtp__ranks_share_text(&run->ranks, &found));
    if (mtp__run_writes(run) || !found) return mtp__ranks_agree(&run->ranks, MTP_OK);
    mtp_status status = mtp__checkpoint_open(found, false, &run->resume);
    if (status != MTP_OK)
        status = mtp__fail_prefix(
            status, "all ranks need to see the same output_dir, and this one does not see what rank 0 found");
    run->resume_is_ours = run->resume && is_ours(run, run->resume);
    free(found);
    return mtp__ranks_agree(&run->ranks, status);
}

static mtp_status check_resume(mtp__run *run)
{
    const mtp__trainer *t = &run->trainer;
    const mtp__resume_facts facts = {.dataset = mtp_dataset_fingerprint(t->train_data),
                                     .verifier = mtp__trainer_verifier_fingerprint(t->verifier),
                                     .num_samples = mtp_dataset_size(t->train_data),
                                     .world_size = run->ranks.world_size,
                                     .schedule = t->schedule};
    return run->resume ? mtp__resume_check(run->config, &facts, run->resume) : MTP_OK;
}

/* ---- room on disk --------------------------------------------------------------------------------------------- */

/* Checkpoints that will lie there at one time, the one being written included. */
static int64_t num_checkpoints(const mtp__run *run)
{
    const mtp_train_config *c = run->config;
    const int64_t done = run->resume ? run->resume->step : 0;
    const int64_t left = run->trainer.schedule.max_steps - done;
    const int64_t saves = c->save_steps > 0 ? left / c->save_steps + 1 : 1;
    const int64_t every = c->keep_every > 0 ? left / c->keep_every + 1 : 0;
    const int64_t kept = c->keep_last > 0 ? c->keep_last + 1 + (c->keep_best ? 1 : 0) + every : INT64_MAX;
    const int64_t present = run->resume && run->resume_is_ours ? 1 : 0; /* at least the one we go on from */
    const int64_t most = saves < kept - present ? saves : kept - present;
    return most < 1 ? 1 : most;
}

static mtp_status check_space(const mtp__run *run)
{
    const uint64_t checkpoint = mtp__checkpoint_bytes(run->trainer.drafter);
    const uint64_t count = (uint64_t)num_checkpoints(run);
    uint64_t weights = 65536;
    for (int64_t i = 0; i < run->trainer.drafter->num_params; i++)
        weights += (uint64_t)run->trainer.drafter->params[i].count * 4;
    const uint64_t most = (UINT64_MAX - weights) / checkpoint;
    const uint64_t bytes = count < most ? count * checkpoint + weights : UINT64_MAX;
    mtp__text what = {0};
    mtp__text_add(&what, "%llu checkpoint%s of %.1f MiB and the export", (unsigned long long)count,
                  mtp__plural((int64_t)count), (double)checkpoint / (1 << 20));
    mtp_status status = mtp__text_check(&what);
    if (status == MTP_OK) status = mtp__run_dir_check_space(run->config->output_dir, bytes, what.data);
    mtp__text_free(&what);
    return status;
}

/* ---- opening -------------------------------------------------------------------------------------------------- */

/* Asked by evaluations between batches. */
static bool keep_going(void *user, int64_t done, int64_t total)
{
    (void)done;
    (void)total;
    return !mtp__run_stopped(user);
}

static mtp_status absolute_drafter(mtp__run *run)
{
    char path[PATH_MAX];
    if (!realpath(run->config->drafter, path))
        return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "drafter %s: %s", run->config->drafter, strerror(errno));
    run->drafter = strdup(path);
    return run->drafter ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory for a path");
}

/* The first batch of a run, read as a rehearsal: what is wrong with the data shows before a directory is made. */
static mtp_status read_a_batch(mtp__run *run)
{
    const mtp_batch *batch = NULL;
    int64_t epoch, index;
    MTP_TRY(mtp_loader_next(run->trainer.loader, &batch, &epoch, &index));
    mtp_loader_release(run->trainer.loader, batch);
    return mtp_loader_seek(run->trainer.loader, 0, 0);
}

static mtp_status open_trainer(mtp__run *run)
{
    mtp__trainer_options options = {
        .logger = run->options->logger, .ranks = &run->ranks, .progress = keep_going, .user = run};
    if (run->resume)
        options.begin =
            (mtp__position){.step = run->resume->step, .epoch = run->resume->epoch, .batch = run->resume->batch};
    MTP_TRY(absolute_drafter(run));
    MTP_TRY(mtp__trainer_open(run->config, &options, &run->trainer));
    MTP_TRY(check_resume(run));
    MTP_TRY(read_a_batch(run));
    return mtp__run_writes(run) ? check_space(run) : MTP_OK;
}

mtp_status mtp__run_open(mtp__run *run)
{
    MTP_TRY(mtp__ranks_agree(&run->ranks, mtp_train_config_check_paths(run->config)));
    MTP_TRY(find_checkpoint(run));
    MTP_TRY(mtp__ranks_agree(&run->ranks, open_trainer(run)));
    MTP_TRY(mtp__trainer_connect(&run->trainer));
    return mtp__run_check_ranks(run);
}

/* ---- beginning ------------------------------------------------------------------------------------------------ */

static mtp_status write_config(const mtp__run *run)
{
    char *text = NULL, *path = NULL;
    mtp_status status = mtp_train_config_print(run->config, &text);
    if (status == MTP_OK) status = mtp__path_join(run->directory.path, "config.toml", &path);
    if (status == MTP_OK) status = mtp__file_write(path, text, strlen(text));
    free(text);
    free(path);
    return status;
}

static mtp_status open_metrics(mtp__run *run)
{
    const mtp_train_config *c = run->config;
    const mtp__manifest *from = run->resume_is_ours ? run->resume : NULL;
    run->metrics.logger = run->options->logger;
    run->metrics.ordered = mtp_drafter_get_config(run->trainer.drafter)->ordered;
    run->metrics.centroid_term = run->metrics.ordered && c->head != MTP_HEAD_HIERARCHICAL;
    MTP_TRY(mtp__bad_steps_cut_back(run->directory.path, from ? from->step : -1));
    return mtp__metrics_open(run->directory.path, from ? from->step : -1, from ? from->last_eval_step : -1,
                             &run->metrics);
}

static mtp_status evaluate_start(mtp__run *run)
{
    if (!run->trainer.evaluator) return MTP_OK;
    MTP_TRY(mtp__run_evaluate(run, &run->start));
    run->has_start = true;
    if (run->resume) return MTP_OK; /* shown and written when the run began */
    run->last_eval_step = 0;
    if (mtp__run_writes(run)) MTP_TRY(mtp__metrics_eval(&run->metrics, 0, &run->start));
    if (!run->options->report) return MTP_OK;
    const mtp_evaluation *const columns[] = {&run->start};
    static const char *const titles[] = {"before training"};
    char *table = NULL;
    MTP_TRY(mtp_evaluation_table(columns, titles, 1, &table));
    run->options->report(run->options->user, table);
    free(table);
    return MTP_OK;
}

static mtp_status load_checkpoint(mtp__run *run)
{
    const mtp__manifest *m = run->resume;
    if (!m) return MTP_OK;
    MTP_TRY(mtp__checkpoint_load_weights(m, run->trainer.drafter));
    MTP_TRY(mtp__checkpoint_load_optimizer(m, run->trainer.drafter, run->trainer.optimizer));
    MTP_TRY(mtp_loader_seek(run->trainer.loader, m->epoch, m->batch));
    run->step = m->step;
    run->bad_steps = m->bad_steps;
    run->epoch = m->epoch;
    run->batch = m->batch - 1;
    if (run->resume_is_ours) {
        run->saved_step = run->begun_step = m->step;
        run->evals_since_best = m->evals_since_best;
        run->last_eval_step = m->last_eval_step;
        if (mtp__run_writes(run))
            MTP_TRY(mtp__checkpoint_supersede(run->directory.path, m->step, run->options->logger));
    }
    if (m->world_size != run->ranks.world_size)
        mtp_log(run->options->logger, MTP_LOG_INFO, "the checkpoint is of %lld rank%s, now there %s %d",
                (long long)m->world_size, mtp__plural(m->world_size), run->ranks.world_size == 1 ? "is" : "are",
                run->ranks.world_size);
    mtp_log(run->options->logger, MTP_LOG_INFO, "going on from %s: step %lld of %lld", m->directory, (long long)m->step,
            (long long)run->trainer.schedule.max_steps);
    return MTP_OK;
}

/* The directory, and what stands in it from the first moment on. */
static mtp_status claim_directory(mtp__run *run)
{
    if (!run->directory.path) MTP_TRY(mtp__run_dir_open(run->config->output_dir, true, &run->directory));
    MTP_TRY(write_config(run));
    return open_metrics(run);
}

static mtp_status know_directory(mtp__run *run)
{
    run->directory.path = strdup(run->config->output_dir);
    return run->directory.path ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory for a path");
}

/* What rank 0 has made is there for this rank too; a network file system may take a moment. */
static mtp_status see_directory(const mtp__run *run)
{
    enum { PAUSE_MS = 50, PAUSES = 100 };
    const struct timespec pause = {.tv_nsec = PAUSE_MS * 1000000L};
    char *name = NULL;
    bool there = false;
    MTP_TRY(mtp__path_join(run->directory.path, "run.json", &name));
    for (int i = 0; i < PAUSES && !(there = mtp__path_exists(name)); i++) nanosleep(&pause, NULL);
    free(name);
    if (there) return MTP_OK;
    return MTP_FAIL(MTP_E_NOT_FOUND,
                    "all ranks need to see the same output_dir, and this one does not see the run that rank 0 began in "
                    "%s; put it on a file system that all machines share",
                    run->directory.path);
}

mtp_status mtp__run_begin(mtp__run *run)
{
    run->metrics.K = (int32_t)run->config->num_speculative_steps;
    MTP_TRY(mtp__ranks_agree(&run->ranks, mtp__run_writes(run) ? claim_directory(run) : know_directory(run)));
    MTP_TRY(mtp__ranks_agree(&run->ranks, mtp__run_writes(run) ? MTP_OK : see_directory(run)));
    MTP_TRY(evaluate_start(run));
    MTP_TRY(mtp__ranks_agree(&run->ranks, load_checkpoint(run)));
    if (run->resume) MTP_TRY(mtp__run_check_ranks(run));
    if (run->resume && run->resume_is_ours) MTP_TRY(mtp__run_take_best(run));
    return mtp__ranks_agree(&run->ranks, mtp__run_open_saver(run));
}

void mtp__run_close(mtp__run *run)
{
    mtp_evaluation_free(&run->start);
    mtp_evaluation_free(&run->trained);
    mtp__manifest_free(run->resume);
    mtp__saver_free(run->saver);
    mtp__trainer_close(&run->trainer);
    mtp__run_dir_close(&run->directory);
    mtp__ranks_close(&run->ranks);
    free(run->drafter);
}
