/* One shard: threads take samples and write them. Where a sample lies is known from the headers, so nothing depends on
 * who takes which sample when. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "data/pack.h"

mtp__store_layout mtp__pack_layout(const mtp_pack_options *options, const mtp_dataset *input, int64_t begin,
                                   int64_t end)
{
    const mtp_verifier_config *verifier = mtp_verifier_get_config(options->verifier);
    mtp__store_layout layout = mtp__store_layout_of(verifier);
    layout.fp8 = options->fp8;
    layout.global_v_only = options->global_v_only;
    if (options->teacher)
        layout.teacher_top = verifier->vocab_size < MTP__TEACHER_TOP ? verifier->vocab_size : MTP__TEACHER_TOP;
    for (int64_t i = begin; i < end; i++) {
        const mtp__dataset_entry entry = mtp__dataset_at(input, i);
        layout.num_tokens += entry.num_tokens;
        if (options->teacher) layout.num_teacher += mtp__pack_num_teacher(&entry);
    }
    return layout;
}

/* ---- threads -------------------------------------------------------------------------------------------------- */

static bool is_bad_sample(mtp_status status)
{
    return status == MTP_E_DATA || status == MTP_E_FORMAT || status == MTP_E_VERSION || status == MTP_E_NOT_FOUND;
}

static mtp_status refuse(mtp__pack_job *shared, int64_t index, const mtp_pack_refusal *refusal)
{
    shared->refused[index] = malloc(sizeof *refusal);
    if (!shared->refused[index]) return MTP_FAIL(MTP_E_MEMORY, "out of memory");
    *shared->refused[index] = *refusal;
    return MTP_OK;
}

/* What became of a sample; with the mutex. */
static void note(mtp__pack_job *shared, int64_t index, mtp_status status, mtp_pack_refusal *refusal)
{
    if (is_bad_sample(status)) {
        const mtp__dataset_entry entry = mtp__dataset_at(shared->input, shared->begin + index);
        *refusal = mtp__refusal_of(entry.path, mtp_last_error());
        status = MTP_OK;
    }
    if (status == MTP_OK && refusal->reason[0]) status = refuse(shared, index, refusal);
    shared->progress->done++;
    const mtp_pack_options *options = shared->options;
    if (status == MTP_OK && options->progress &&
        !options->progress(options->user, shared->progress->done, shared->progress->total))
        status = MTP_FAIL(MTP_E_INTERRUPTED, "interrupted; the same command goes on where it stopped");
    if (status != MTP_OK && shared->failure.status == MTP_OK) shared->failure = *mtp_last_error();
}

typedef struct thread {
    mtp__pack_job *job;
    mtp__pack_worker *worker;
    pthread_t id;
} thread;

static void *work(void *argument)
{
    const thread *self = argument;
    mtp__pack_job *shared = self->job;
    pthread_mutex_lock(&shared->mutex);
    while (shared->next < shared->count && shared->failure.status == MTP_OK) {
        const int64_t index = shared->next++;
        pthread_mutex_unlock(&shared->mutex);
        mtp_pack_refusal refusal = {.index = -1};
        const mtp_status status = mtp__pack_sample(self->worker, index, &refusal);
        pthread_mutex_lock(&shared->mutex);
        note(shared, index, status, &refusal);
    }
    pthread_mutex_unlock(&shared->mutex);
    return NULL;
}

static mtp_status start_thread(mtp__pack_job *shared, thread *t)
{
    t->job = shared;
    mtp_status status = mtp__pack_worker_create(shared, &t->worker);
    const int code = status == MTP_OK ? pthread_create(&t->id, NULL, work, t) : 0;
    if (code != 0) status = MTP_FAIL_FOREIGN(MTP_E_IO, code, "cannot start a worker: %s", strerror(code));
    if (status != MTP_OK) mtp__pack_worker_free(t->worker);
    return status;
}

/* All samples, on as many threads as are asked for and useful. */
static mtp_status run_threads(mtp__pack_job *shared, thread *threads, int64_t wanted)
{
    int64_t started = 0;
    mtp_status status = MTP_OK;
    while (started < wanted && status == MTP_OK) {
        status = start_thread(shared, &threads[started]);
        started += status == MTP_OK;
    }
    if (status != MTP_OK) { /* those that run stop at their next sample */
        pthread_mutex_lock(&shared->mutex);
        if (shared->failure.status == MTP_OK) shared->failure = *mtp_last_error();
        pthread_mutex_unlock(&shared->mutex);
    }
    for (int64_t i = 0; i < started; i++) {
        pthread_join(threads[i].id, NULL);
        mtp__pack_worker_free(threads[i].worker);
    }
    const mtp_error *failure = &shared->failure;
    if (failure->status == MTP_OK) return MTP_OK;
    return mtp__fail(failure->status, failure->foreign, failure->file, failure->line, "%s", failure->message);
}

static mtp_status run_workers(mtp__pack_job *shared)
{
    const int64_t wanted = shared->options->workers < shared->count ? shared->options->workers : shared->count;
    thread *threads = calloc((size_t)wanted, sizeof *threads);
    if (!threads) return MTP_FAIL(MTP_E_MEMORY, "no memory for workers");
    pthread_mutex_init(&shared->mutex, NULL);
    pthread_mutex_init(&shared->teacher_mutex, NULL);
    const mtp_status status = run_threads(shared, threads, wanted);
    pthread_mutex_destroy(&shared->mutex);
    pthread_mutex_destroy(&shared->teacher_mutex);
    free(threads);
    return status;
}

/* ---- the shard ------------------------------------------------------------------------------------------------ */

static mtp_status place_samples(mtp__pack_job *shared)
{
    uint64_t token = 0, teacher = 0;
    shared->rows = calloc((size_t)shared->count, sizeof *shared->rows);
    shared->checksums = calloc((size_t)shared->count * MTP__STORE_FIELDS, sizeof *shared->checksums);
    shared->refused = calloc((size_t)shared->count, sizeof *shared->refused);
    if (!shared->rows || !shared->checksums || !shared->refused)
        return MTP_FAIL(MTP_E_MEMORY, "no memory for an index of %lld samples", (long long)shared->count);
    for (int64_t i = 0; i < shared->count; i++) {
        const mtp__dataset_entry entry = mtp__dataset_at(shared->input, shared->begin + i);
        shared->rows[i] =
            (mtp__store_row){.sample_id = entry.sample_id,
                             .first_token = token,
                             .first_teacher = teacher,
                             .num_tokens = (uint32_t)entry.num_tokens,
                             .num_supervised = (uint32_t)entry.num_supervised,
                             .prompt_len = (uint32_t)entry.prompt_len,
                             .first_target = (uint32_t)entry.first_target,
                             .last_target = (uint32_t)entry.last_target,
                             .num_teacher = shared->teacher ? (uint32_t)mtp__pack_num_teacher(&entry) : 0};
        token += shared->rows[i].num_tokens;
        teacher += shared->rows[i].num_teacher;
    }
    return MTP_OK;
}

/* Move the stored samples to the front, collect names and the list of the others. */
static int64_t gather(mtp__pack_job *shared, mtp__text *sources, mtp__text *quarantine)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < shared->count; i++) {
        const mtp__dataset_entry entry = mtp__dataset_at(shared->input, shared->begin + i);
        if (shared->refused[i]) {
            mtp__quarantine_add(quarantine, entry.path, shared->refused[i]);
            continue;
        }
        shared->rows[kept] = shared->rows[i];
        shared->rows[kept].source = sources->length;
        memmove(&shared->checksums[kept * MTP__STORE_FIELDS], &shared->checksums[i * MTP__STORE_FIELDS],
                MTP__STORE_FIELDS * sizeof *shared->checksums);
        mtp__text_add(sources, "%s%c", mtp__path_name(entry.path), 0);
        kept++;
    }
    return kept;
}

static mtp_status finish(mtp__pack_job *shared)
{
    mtp__text sources = {0}, quarantine = {0};
    const mtp__store_tail tail = {.num_samples = gather(shared, &sources, &quarantine),
                                  .rows = shared->rows,
                                  .checksums = shared->checksums,
                                  .sources = mtp__text_get(&sources),
                                  .sources_size = sources.length,
                                  .quarantine = mtp__text_get(&quarantine),
                                  .quarantine_size = quarantine.length};
    mtp_status status = mtp__text_check(&sources);
    if (status == MTP_OK) status = mtp__text_check(&quarantine);
    if (status == MTP_OK) status = mtp__store_finish(shared->path, &tail);
    mtp__text_free(&sources);
    mtp__text_free(&quarantine);
    return status;
}

/* ".<name>.tmp" beside it. */
static mtp_status temporary_name(const char *path, char **temporary)
{
    const char *name = mtp__path_name(path);
    if (asprintf(temporary, "%.*s.%s.tmp", (int)(name - path), path, name) >= 0) return MTP_OK;
    *temporary = NULL;
    return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
}

static const char *verifier_name(const mtp_pack_options *options)
{
    return mtp__path_name(mtp_verifier_directory(options->verifier));
}

static mtp_status write_shard(mtp__pack_job *shared)
{
    MTP_TRY(place_samples(shared));
    MTP_TRY(mtp__store_create(shared->path, &shared->layout, verifier_name(shared->options), shared->offsets));
    shared->fd = open(shared->path, O_WRONLY | O_CLOEXEC);
    if (shared->fd < 0) return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: cannot open: %s", shared->path, strerror(errno));
    const mtp_status status = run_workers(shared);
    const int closed = close(shared->fd);
    MTP_TRY(status);
    if (closed != 0) return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: cannot close: %s", shared->path, strerror(errno));
    return finish(shared);
}

static mtp_status publish(const char *temporary, const char *path)
{
    if (rename(temporary, path) != 0)
        return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: cannot rename into place: %s", path, strerror(errno));
    char *directory = strndup(path, (size_t)(mtp__path_name(path) - path));
    if (!directory) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
    const mtp_status status = mtp__dir_sync(directory);
    free(directory);
    return status;
}

mtp_status mtp__pack_shard(const mtp__pack_means *means, const char *path, int64_t begin, int64_t end,
                           mtp__pack_progress *progress)
{
    char *temporary = NULL;
    MTP_TRY(temporary_name(path, &temporary));
    mtp__pack_job shared = {.means = means,
                            .options = means->options,
                            .input = means->input,
                            .teacher = means->teacher,
                            .begin = begin,
                            .count = end - begin,
                            .layout = mtp__pack_layout(means->options, means->input, begin, end),
                            .path = temporary,
                            .progress = progress};
    mtp_status status = write_shard(&shared);
    if (status == MTP_OK) status = publish(temporary, path);
    if (status != MTP_OK) unlink(temporary);
    for (int64_t i = 0; i < shared.count && shared.refused; i++) free(shared.refused[i]);
    free(shared.refused);
    free(shared.checksums);
    free(shared.rows);
    free(temporary);
    return status;
}
