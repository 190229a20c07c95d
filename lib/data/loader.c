/* The loader: its life, and the caller's side of the ring (loader.h says how it works). */
#include "data/loader.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/text.h"
#include "data/mixture.h"
#include "mtp/loss.h"

/* ---- life ----------------------------------------------------------------------------------------------------- */

/* The largest batch that can occur: memory is not taken for a budget that no batch can use. A mixture may repeat
 * documents. */
static void most_that_fit(const mtp_loader *loader, int64_t *tokens, int64_t *documents)
{
    const mtp_dataset *dataset = loader->dataset;
    *tokens = loader->options.tokens_per_batch;
    if (!dataset->mixed && dataset->num_tokens < *tokens) *tokens = dataset->num_tokens;
    *documents = !dataset->mixed && dataset->count < *tokens ? dataset->count : *tokens;
}

/* Does the page cache hold the shards without pushing out everything else? */
static bool fit_in_memory(const mtp_dataset *dataset)
{
    uint64_t bytes = 0;
    for (int64_t i = 0; i < dataset->num_parts; i++)
        if (dataset->parts[i].shard) bytes += dataset->parts[i].shard->file_size;
    const long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
    return pages <= 0 || size <= 0 || bytes <= (uint64_t)pages * (uint64_t)size / 2;
}

/* Settle direct_io: ON or OFF. Every file system of the shards is asked. */
static mtp_status choose_direct(mtp_loader *loader)
{
    mtp_direct_io *choice = &loader->options.direct_io;
    const bool is_auto = *choice == MTP_DIRECT_IO_AUTO;
    if (is_auto) *choice = fit_in_memory(loader->dataset) ? MTP_DIRECT_IO_OFF : MTP_DIRECT_IO_ON;
    for (int64_t i = 0; i < loader->dataset->num_parts && *choice == MTP_DIRECT_IO_ON; i++) {
        int fd;
        const mtp__shard *shard = loader->dataset->parts[i].shard;
        if (!shard) continue;
        const mtp_status status = mtp__shard_file_direct(shard, &fd);
        if (status == MTP_OK) close(fd);
        if (is_auto && status == MTP_E_UNSUPPORTED)
            *choice = MTP_DIRECT_IO_OFF;
        else
            MTP_TRY(status);
    }
    if (is_auto && *choice == MTP_DIRECT_IO_ON)
        mtp_log(loader->options.logger, MTP_LOG_INFO,
                "loader: the shards are larger than half the memory and are read past the page cache (direct_io)");
    return MTP_OK;
}

static mtp_status create_slots(mtp_loader *loader)
{
    int64_t tokens, documents;
    most_that_fit(loader, &tokens, &documents);
    const int64_t wanted = loader->options.prefetch + 2;
    mtp__batch_shape shape = mtp__batch_shape_of(loader->dataset, tokens, documents);
    shape.direct = loader->options.direct_io == MTP_DIRECT_IO_ON;
    loader->slots = calloc((size_t)wanted, sizeof *loader->slots);
    if (!loader->slots) return MTP_FAIL(MTP_E_MEMORY, "no memory for the loader");
    for (int64_t i = 0; i < wanted; i++) {
        MTP_TRY_AT(mtp__batch_create(loader->dataset, &shape, loader->options.allocator, &loader->slots[i].batch),
                   "batch %lld of %lld that the loader keeps; lower prefetch or tokens_per_batch", (long long)i + 1,
                   (long long)wanted);
        loader->num_slots++;
        loader->stats.memory_bytes += loader->slots[i].batch->bytes;
    }
    return MTP_OK;
}

/* Start the threads: as many as can have something to do. */
static mtp_status start(mtp_loader *loader)
{
    const mtp_loader_options *options = &loader->options;
    const int64_t wanted = options->num_workers < options->prefetch ? options->num_workers : options->prefetch;
    if (wanted == 0) return MTP_OK;
    loader->threads = calloc((size_t)wanted, sizeof *loader->threads);
    if (!loader->threads) return MTP_FAIL(MTP_E_MEMORY, "no memory for the loader's threads");
    for (; loader->num_threads < wanted; loader->num_threads++) {
        const int code = pthread_create(&loader->threads[loader->num_threads], NULL, mtp__loader_thread, loader);
        if (code != 0)
            return MTP_FAIL_FOREIGN(MTP_E_IO, code,
                                    "cannot start thread %lld of %lld of the loader: %s; lower num_workers",
                                    (long long)loader->num_threads + 1, (long long)wanted, strerror(code));
    }
    return MTP_OK;
}

/* What a mixture comes to, at the beginning of a run. */
static mtp_status report_sources(const mtp_loader *loader)
{
    const mtp_dataset *dataset = loader->dataset;
    mtp__mixture mixture;
    if (!dataset->mixed || !loader->options.logger) return MTP_OK;
    MTP_TRY(mtp__mixture_create(dataset, &loader->options, &mixture));
    for (int64_t i = 0; i < dataset->num_sources; i++) {
        const mtp_source_info info = mtp_dataset_source(dataset, i);
        mtp_log(loader->options.logger, MTP_LOG_INFO,
                "source %s: %.4g %% of the tokens; it has %lld sample%s, %lld tokens, %lld supervised, and an epoch "
                "takes %lld of its documents (%.4g passes)",
                info.path, 100 * info.share, (long long)info.num_samples, mtp__plural(info.num_samples),
                (long long)info.num_tokens, (long long)info.num_supervised, (long long)mixture.parts[i],
                (double)mixture.parts[i] / (double)info.num_samples);
    }
    mtp__mixture_free(&mixture);
    return MTP_OK;
}

static void report(const mtp_loader *loader)
{
    const mtp__plan *plan = &loader->plan;
    mtp_loader_stats sum = {0};
    for (int64_t i = 0; i < plan->num_batches; i++) {
        sum.batches_skipped += plan->batches[i].batches_skipped;
        sum.documents_truncated += plan->batches[i].documents_truncated;
        sum.documents_skipped += plan->batches[i].documents_skipped;
    }
    mtp_log(loader->options.logger, MTP_LOG_INFO, "loader: %lld batch%s in epoch 0, %lld left out for want of a target",
            (long long)plan->num_batches, plan->num_batches == 1 ? "" : "es", (long long)sum.batches_skipped);
    if (sum.documents_truncated || sum.documents_skipped)
        mtp_log(loader->options.logger, MTP_LOG_WARNING,
                "loader: longer than %lld tokens: %lld sample%s truncated, %lld skipped",
                (long long)loader->options.tokens_per_batch, (long long)sum.documents_truncated,
                mtp__plural(sum.documents_truncated), (long long)sum.documents_skipped);
}

static mtp_status check_options(const mtp_loader_options *options)
{
    MTP_REQUIRE(options->tokens_per_batch >= 1);
    MTP_REQUIRE(options->rank >= 0 &&
                (options->rank < options->world_size || (!options->rank && !options->world_size)));
    MTP_REQUIRE(options->num_speculative_steps >= 0 && options->num_speculative_steps <= MTP_MAX_SPECULATIVE_STEPS);
    MTP_REQUIRE(options->prefetch >= 1 && options->prefetch <= 65536);
    MTP_REQUIRE(options->num_workers >= 0 && options->num_workers <= 65536);
    MTP_REQUIRE(options->overlong >= MTP_OVERLONG_ERROR && options->overlong <= MTP_OVERLONG_SKIP);
    MTP_REQUIRE(options->direct_io >= MTP_DIRECT_IO_AUTO && options->direct_io <= MTP_DIRECT_IO_OFF);
    MTP_REQUIRE(!options->allocator || (options->allocator->alloc && options->allocator->free));
    return MTP_OK;
}

static mtp_status fill_loader(mtp_loader *loader)
{
    /* the first plan says now what is wrong with every epoch */
    MTP_TRY(mtp__plan_create(loader->dataset, &loader->options, 0, &loader->plan));
    MTP_TRY(choose_direct(loader));
    MTP_TRY(create_slots(loader));
    loader->options.allocator = NULL; /* the batches have it */
    MTP_TRY(report_sources(loader));
    report(loader);
    return start(loader);
}

mtp_status mtp_loader_create(const mtp_dataset *dataset, const mtp_loader_options *options, mtp_loader **loader)
{
    MTP_REQUIRE(dataset && options && loader);
    *loader = NULL;
    MTP_TRY(check_options(options));
    mtp_loader *made = calloc(1, sizeof *made);
    if (!made) return MTP_FAIL(MTP_E_MEMORY, "no memory for the loader");
    made->dataset = dataset;
    made->options = *options;
    if (options->world_size == 0) made->options.world_size = 1;
    if (options->num_speculative_steps == 0) made->options.num_speculative_steps = MTP_MAX_SPECULATIVE_STEPS;
    made->next_index = made->options.rank;
    pthread_mutex_init(&made->mutex, NULL);
    pthread_cond_init(&made->work, NULL);
    pthread_cond_init(&made->ready, NULL);
    const mtp_status status = fill_loader(made);
    if (status != MTP_OK) {
        mtp_loader_free(made);
        return status;
    }
    *loader = made;
    return MTP_OK;
}

void mtp_loader_free(mtp_loader *loader)
{
    if (!loader) return;
    pthread_mutex_lock(&loader->mutex);
    loader->stop = true;
    pthread_cond_broadcast(&loader->work);
    pthread_mutex_unlock(&loader->mutex);
    for (int64_t i = 0; i < loader->num_threads; i++) pthread_join(loader->threads[i], NULL);
    pthread_mutex_destroy(&loader->mutex);
    pthread_cond_destroy(&loader->work);
    pthread_cond_destroy(&loader->ready);
    for (int64_t i = 0; i < loader->num_slots; i++) mtp__batch_free(loader->slots[i].batch);
    free(loader->slots);
    free(loader->threads);
    mtp__plan_free(&loader->plan);
    free(loader);
}

/* ---- the caller's side ---------------------------------------------------------------------------------------- */

mtp_status mtp_loader_batches(const mtp_loader *loader, int64_t epoch, int64_t *count)
{
    MTP_REQUIRE(loader && epoch >= 0 && count);
    mtp__plan plan;
    MTP_TRY(mtp__plan_create(loader->dataset, &loader->options, epoch, &plan));
    *count = plan.num_batches;
    mtp__plan_free(&plan);
    return MTP_OK;
}

/* What was read ahead is dropped; a slot that is being filled is freed by its thread. */
static void drop_ready(mtp_loader *loader)
{
    for (int64_t i = 0; i < loader->num_slots; i++) {
        mtp__slot *slot = &loader->slots[i];
        if (slot->state == MTP__SLOT_READY || slot->state == MTP__SLOT_FAILED) slot->state = MTP__SLOT_FREE;
    }
    loader->generation++;
    loader->failed = false;
    loader->due_ticket = loader->next_ticket;
}

mtp_status mtp_loader_seek(mtp_loader *loader, int64_t epoch, int64_t index)
{
    int64_t count = 0;
    MTP_REQUIRE(loader && epoch >= 0 && index >= 0);
    MTP_TRY(mtp_loader_batches(loader, epoch, &count));
    if (index > count)
        return MTP_FAIL(MTP_E_ARGUMENT, "batch %lld of epoch %lld, which has %lld", (long long)index, (long long)epoch,
                        (long long)count);
    pthread_mutex_lock(&loader->mutex);
    drop_ready(loader);
    loader->next_epoch = epoch;
    loader->next_index = index + loader->options.rank;
    pthread_cond_broadcast(&loader->work);
    pthread_mutex_unlock(&loader->mutex);
    return MTP_OK;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* The slot whose turn it is, when it is done. */
static mtp__slot *due_slot(const mtp_loader *loader)
{
    for (int64_t i = 0; i < loader->num_slots; i++) {
        mtp__slot *slot = &loader->slots[i];
        const bool done = slot->state == MTP__SLOT_READY || slot->state == MTP__SLOT_FAILED;
        if (done && slot->ticket == loader->due_ticket) return slot;
    }
    return NULL;
}

static mtp__slot *wait_for_slot(mtp_loader *loader)
{
    mtp__slot *slot = due_slot(loader);
    if (slot) return slot;
    const double begin = now();
    while (!(slot = due_slot(loader))) {
        if (loader->num_threads == 0)
            mtp__loader_work(loader);
        else
            pthread_cond_wait(&loader->ready, &loader->mutex);
    }
    loader->stats.wait_seconds += now() - begin;
    return slot;
}

mtp_status mtp_loader_next(mtp_loader *loader, const mtp_batch **batch, int64_t *epoch, int64_t *index)
{
    MTP_REQUIRE(loader && batch && epoch && index);
    *batch = NULL;
    pthread_mutex_lock(&loader->mutex);
    if (mtp__loader_count(loader, MTP__SLOT_HELD) > loader->options.prefetch) {
        pthread_mutex_unlock(&loader->mutex);
        return MTP_FAIL(MTP_E_ARGUMENT, "%lld batches of the loader are held; release one first",
                        (long long)loader->options.prefetch + 1);
    }
    mtp__slot *slot = wait_for_slot(loader);
    if (slot->state == MTP__SLOT_FAILED) {
        const mtp_error error = slot->error;
        pthread_mutex_unlock(&loader->mutex);
        return mtp__fail(error.status, error.foreign, error.file, error.line, "%s", error.message);
    }
    slot->state = MTP__SLOT_HELD;
    loader->due_ticket++;
    loader->stats.batches_skipped += slot->plan.batches_skipped;
    loader->stats.documents_truncated += slot->plan.documents_truncated;
    loader->stats.documents_skipped += slot->plan.documents_skipped;
    *batch = &slot->batch->view;
    *epoch = slot->epoch;
    *index = slot->index;
    pthread_cond_broadcast(&loader->work);
    pthread_mutex_unlock(&loader->mutex);
    return MTP_OK;
}

void mtp_loader_release(mtp_loader *loader, const mtp_batch *batch)
{
    if (!loader || !batch) return;
    pthread_mutex_lock(&loader->mutex);
    for (int64_t i = 0; i < loader->num_slots; i++)
        if (&loader->slots[i].batch->view == batch && loader->slots[i].state == MTP__SLOT_HELD)
            loader->slots[i].state = MTP__SLOT_FREE;
    pthread_cond_broadcast(&loader->work);
    pthread_mutex_unlock(&loader->mutex);
}

mtp_loader_stats mtp_loader_get_stats(const mtp_loader *loader)
{
    pthread_mutex_t *mutex = (pthread_mutex_t *)(uintptr_t)&loader->mutex; /* locking changes nothing that is seen */
    pthread_mutex_lock(mutex);
    const mtp_loader_stats stats = loader->stats;
    pthread_mutex_unlock(mutex);
    return stats;
}
