#include "run/saver.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/pages.h"
#include "base/text.h"

struct mtp__saver {
    char *run_directory;
    mtp__share share;
    uint64_t computation;
    mtp__pieces pieces;
    char *values; /* the copy, piece behind piece */
    mtp__text warning;
    bool busy; /* a save is under way */
    bool has_thread;
    pthread_t thread;

    pthread_mutex_t mutex; /* of everything below */
    pthread_cond_t work;   /* WRITING or PUBLISHING was set, or `end` */
    pthread_cond_t rested; /* the thread has nothing more to do */
    bool end;
    mtp__save save;         /* of the save under way */
    mtp__save_report about; /* it */
};

/* ---- the thread ----------------------------------------------------------------------------------------------- */

/* The thread's failure, for another thread's record. */
static void note_failure(mtp__save_report *about, mtp_status status)
{
    const char *message = mtp_last_error()->message;
    about->state = MTP__SAVE_FAILED;
    about->status = (int32_t)status;
    strncpy(about->reason, message, sizeof about->reason - 1);
    about->reason[sizeof about->reason - 1] = '\0';
}

static void write_shard(mtp__saver *s, mtp__save_report *about)
{
    const mtp_status status = mtp__shard_write(s->run_directory, about->step, &s->share, &s->pieces, s->values,
                                               &about->bytes, &about->crc32c);
    about->state = MTP__SAVE_WRITTEN;
    if (status != MTP_OK) note_failure(about, status);
}

static mtp_status sync_metrics(const mtp__save *save)
{
    if (save->metrics_behind) return MTP_FAIL(MTP_E_IO, "the metrics of the run cannot be written");
    if (save->metrics < 0 || fsync(save->metrics) == 0) return MTP_OK;
    return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "the metrics of the run cannot be synced: %s", strerror(errno));
}

/* The checkpoint is there whatever becomes of this. */
static void keep_house(mtp__saver *s, const mtp__save *save)
{
    if (save->best && mtp__checkpoint_mark_best(s->run_directory, save->step) != MTP_OK)
        mtp__text_add(&s->warning, "%s", mtp_last_error()->message);
    if (mtp__checkpoint_prune(s->run_directory, &save->retention) != MTP_OK)
        mtp__text_add(&s->warning, "%s%s", s->warning.length ? "; " : "", mtp_last_error()->message);
}

static void publish(mtp__saver *s, const mtp__save *save, mtp__save_report *about)
{
    mtp_status status = sync_metrics(save);
    if (status == MTP_OK) status = mtp__checkpoint_publish(s->run_directory, save->manifest);
    about->state = MTP__SAVE_COMPLETE;
    if (status != MTP_OK)
        note_failure(about, status);
    else
        keep_house(s, save);
}

static bool has_work(const mtp__saver *s)
{
    return s->about.state == MTP__SAVE_WRITING || s->about.state == MTP__SAVE_PUBLISHING;
}

static void *run(void *argument)
{
    mtp__saver *s = argument;
    pthread_mutex_lock(&s->mutex);
    for (;;) {
        while (!s->end && !has_work(s)) pthread_cond_wait(&s->work, &s->mutex);
        if (!has_work(s)) break;
        mtp__save_report about = s->about;
        const mtp__save save = s->save;
        pthread_mutex_unlock(&s->mutex);
        if (about.state == MTP__SAVE_WRITING)
            write_shard(s, &about);
        else
            publish(s, &save, &about);
        pthread_mutex_lock(&s->mutex);
        s->about = about;
        pthread_cond_broadcast(&s->rested);
    }
    pthread_mutex_unlock(&s->mutex);
    return NULL;
}

/* ---- opening and closing -------------------------------------------------------------------------------------- */

uint64_t mtp__saver_bytes(uint64_t checkpoint_bytes, int64_t world_size)
{
    const uint64_t ranks = (uint64_t)world_size;
    return (checkpoint_bytes + ranks - 1) / ranks;
}

static void init_sync(mtp__saver *s)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&s->mutex, NULL);
    pthread_cond_init(&s->work, NULL);
    pthread_cond_init(&s->rested, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* Signals are for the threads of the program. */
static mtp_status start_thread(mtp__saver *s)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int code = pthread_create(&s->thread, NULL, run, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code != 0)
        return MTP_FAIL_FOREIGN(MTP_E_IO, code, "no thread for the checkpoints can be started: %s", strerror(code));
    s->has_thread = true;
    return MTP_OK;
}

static mtp_status prepare(const mtp__saver_options *options, mtp__saver *s)
{
    s->share = options->share;
    s->computation = mtp__checkpoint_computation(options->drafter);
    s->run_directory = strdup(options->run_directory);
    if (!s->run_directory) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a path");
    MTP_TRY(mtp__pieces_collect(options->drafter, options->optimizer, &s->share, &s->pieces));
    const size_t size = s->pieces.num_bytes;
    s->values = mtp__pages_alloc(size + 1);
    if (!s->values)
        return MTP_FAIL(MTP_E_MEMORY, "out of memory for the copy that checkpoints are written from (%.1f MiB)",
                        (double)size / (1 << 20));
    memset(s->values, 0, size); /* its pages are there before the first save waits for them */
    return start_thread(s);
}

mtp_status mtp__saver_create(const mtp__saver_options *options, mtp__saver **saver)
{
    *saver = NULL;
    mtp__saver *made = calloc(1, sizeof *made);
    if (!made) return MTP_FAIL(MTP_E_MEMORY, "out of memory for the writer of checkpoints");
    made->save.metrics = -1;
    init_sync(made);
    const mtp_status status = prepare(options, made);
    if (status != MTP_OK) {
        mtp__saver_free(made);
        return status;
    }
    *saver = made;
    return MTP_OK;
}

static void forget(mtp__saver *s)
{
    mtp__manifest_free(s->save.manifest);
    if (s->save.metrics >= 0) close(s->save.metrics);
    s->save = (mtp__save){.metrics = -1};
    s->busy = false;
    pthread_mutex_lock(&s->mutex);
    s->about = (mtp__save_report){.state = MTP__SAVE_IDLE};
    pthread_mutex_unlock(&s->mutex);
}

void mtp__saver_free(mtp__saver *s)
{
    if (!s) return;
    if (s->has_thread) {
        pthread_mutex_lock(&s->mutex);
        s->end = true;
        pthread_cond_signal(&s->work);
        pthread_mutex_unlock(&s->mutex);
        pthread_join(s->thread, NULL);
    }
    forget(s);
    pthread_cond_destroy(&s->rested);
    pthread_cond_destroy(&s->work);
    pthread_mutex_destroy(&s->mutex);
    mtp__pieces_free(&s->pieces);
    mtp__text_free(&s->warning);
    free(s->values);
    free(s->run_directory);
    free(s);
}

/* ---- a save --------------------------------------------------------------------------------------------------- */

static mtp_status copy(mtp__saver *s)
{
    mtp_context *context = s->pieces.context;
    char *next = s->values;
    for (int64_t i = 0; i < s->pieces.count; i++) {
        const mtp_view *view = &s->pieces.items[i].view;
        const size_t bytes = (size_t)mtp_view_count(*view) * mtp_dtype_size(view->dtype);
        MTP_TRY_AT(context->ops->download(context->device, next, view->data, bytes), "copy of %s for a checkpoint",
                   s->pieces.items[i].key);
        next += bytes;
    }
    return MTP_OK;
}

static mtp_status prepare_save(mtp__saver *s)
{
    if (s->save.metrics >= 0) { /* a descriptor of our own: the caller may close its file */
        s->save.metrics = fcntl(s->save.metrics, F_DUPFD_CLOEXEC, 0);
        if (s->save.metrics < 0)
            return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "the metrics of the run: %s", strerror(errno));
    }
    if (s->save.manifest) {
        s->save.manifest->computation = s->computation;
        s->save.manifest->world_size = s->share.world_size;
    }
    mtp__text_free(&s->warning);
    return copy(s);
}

static void set_about(mtp__saver *s, const mtp__save_report *about)
{
    pthread_mutex_lock(&s->mutex);
    s->about = *about;
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->mutex);
}

mtp_status mtp__saver_begin(mtp__saver *s, const mtp__save *save)
{
    if (mtp__saver_busy(s)) {
        mtp__manifest_free(save->manifest);
        return MTP_FAIL(MTP_E_INTERNAL, "a checkpoint is begun while another is under way");
    }
    s->save = *save; /* the thread does not look at it while the saver is idle */
    s->busy = true;
    const mtp_status status = prepare_save(s);
    if (status != MTP_OK) {
        forget(s);
        return status;
    }
    set_about(s, &(mtp__save_report){.state = MTP__SAVE_WRITING, .step = save->step});
    return MTP_OK;
}

bool mtp__saver_busy(const mtp__saver *s)
{
    return s->busy;
}

void mtp__saver_report(mtp__saver *s, mtp__save_report *report)
{
    pthread_mutex_lock(&s->mutex);
    *report = s->about;
    pthread_mutex_unlock(&s->mutex);
}

void mtp__saver_wait(mtp__saver *s, double seconds, mtp__save_report *report)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    const time_t whole = (time_t)seconds;
    until.tv_sec += whole;
    until.tv_nsec += (long)((seconds - (double)whole) * 1e9);
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&s->mutex);
    while (has_work(s) && pthread_cond_timedwait(&s->rested, &s->mutex, &until) == 0) continue;
    *report = s->about;
    pthread_mutex_unlock(&s->mutex);
}

/* ---- agreement ------------------------------------------------------------------------------------------------ */

static bool all_are(const mtp__save_report *reports, int64_t count, mtp__save_state state)
{
    for (int64_t i = 0; i < count; i++)
        if (reports[i].state != (int32_t)state) return false;
    return true;
}

static int64_t first_of(const mtp__save_report *reports, int64_t count, mtp__save_state state)
{
    int64_t i = 0;
    while (i < count && reports[i].state != (int32_t)state) i++;
    return i < count ? i : -1;
}

static mtp_status add_shards(mtp__saver *s, const mtp__save_report *reports)
{
    for (int64_t i = 0; i < s->share.world_size; i++) {
        char name[MTP__SHARD_NAME];
        mtp__shard_name(i, s->share.world_size, name);
        MTP_TRY(mtp__manifest_add_shard(s->save.manifest, name, reports[i].bytes, reports[i].crc32c));
    }
    return MTP_OK;
}

/* Rank 0: every shard is durable. */
static void begin_publishing(mtp__saver *s, const mtp__save_report *reports)
{
    mtp__save_report about = reports[0];
    const mtp_status status = add_shards(s, reports);
    about.state = MTP__SAVE_PUBLISHING;
    if (status != MTP_OK) note_failure(&about, status);
    set_about(s, &about);
}

static mtp_status lost(mtp__saver *s, const mtp__save_report *reports, int64_t rank)
{
    const mtp__save_report *report = &reports[rank];
    const long long step = report->step;
    const mtp_status status = (mtp_status)report->status;
    if (s->share.rank == 0) mtp__checkpoint_abandon(s->run_directory, s->save.step);
    if (s->share.world_size == 1)
        return MTP_FAIL(status, "checkpoint of step %lld not saved: %s", step, report->reason);
    return MTP_FAIL(status, "checkpoint of step %lld not saved: rank %lld: %s", step, (long long)rank, report->reason);
}

mtp__save_outcome mtp__saver_settle(mtp__saver *s, const mtp__save_report *reports, mtp_status *status)
{
    const int64_t ranks = s->share.world_size;
    *status = MTP_OK;
    if (first_of(reports, ranks, MTP__SAVE_WRITING) >= 0 || reports[0].state == MTP__SAVE_PUBLISHING)
        return MTP__SAVE_PENDING;
    if (all_are(reports, ranks, MTP__SAVE_WRITTEN)) {
        if (s->share.rank == 0) begin_publishing(s, reports);
        return MTP__SAVE_PENDING;
    }
    const int64_t failed = first_of(reports, ranks, MTP__SAVE_FAILED);
    if (failed >= 0) *status = lost(s, reports, failed);
    forget(s);
    return failed >= 0 ? MTP__SAVE_LOST : MTP__SAVE_DONE;
}

const char *mtp__saver_warning(const mtp__saver *s)
{
    return s->warning.length ? s->warning.data : NULL;
}

void mtp__saver_cancel(mtp__saver *s)
{
    mtp__save_report report;
    if (!s->busy) return;
    do mtp__saver_wait(s, 3600, &report);
    while (report.state == MTP__SAVE_WRITING || report.state == MTP__SAVE_PUBLISHING);
    if (s->share.rank == 0) mtp__checkpoint_abandon(s->run_directory, s->save.step);
    forget(s);
}
