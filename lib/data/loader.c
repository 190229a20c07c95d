/* The loader: a thread that reads batches ahead into a ring of slots.
 *
 * A slot is FREE, being FILLED by the thread, READY, or HELD by the caller. There are prefetch + 2: the thread keeps at
 * most `prefetch` ready ones, the caller may hold `prefetch` + 1, so one is always free or about to be. Everything
 * below `mutex` is guarded by it; the content of a slot belongs to the thread while FILLED and to the caller while
 * HELD. A seek raises `generation`: what was filled for an older one is dropped. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "data/sampler.h"

typedef enum slot_state { SLOT_FREE, SLOT_FILLED, SLOT_READY, SLOT_HELD } slot_state;

typedef struct slot {
    mtp__batch *batch;
    slot_state state;
    uint64_t ticket; /* order in which slots were filled */
    int64_t epoch, index;
    mtp__plan_batch plan; /* what the batch is made of, for the statistics */
} slot;

struct mtp_loader {
    const mtp_dataset *dataset;
    mtp_loader_options options;
    slot *slots;
    int64_t num_slots;
    pthread_t thread;
    mtp__plan plan; /* of the epoch being read; the thread's own */

    pthread_mutex_t mutex;
    pthread_cond_t slot_freed;      /* or a seek, or the end: the thread waits for it */
    pthread_cond_t slot_ready;      /* or a failure: the caller waits for it */
    int64_t next_epoch, next_index; /* what the thread reads next */
    uint64_t generation, next_ticket;
    bool stop, failed;
    mtp_error error; /* why, when failed */
    mtp_loader_stats stats;
};

/* ---- the thread ----------------------------------------------------------------------------------------------- */

static int64_t count_slots(const mtp_loader *loader, slot_state state)
{
    int64_t count = 0;
    for (int64_t i = 0; i < loader->num_slots; i++) count += loader->slots[i].state == state;
    return count;
}

static slot *find_slot(const mtp_loader *loader, slot_state state)
{
    slot *found = NULL;
    for (int64_t i = 0; i < loader->num_slots; i++) {
        slot *candidate = &loader->slots[i];
        if (candidate->state == state && (!found || candidate->ticket < found->ticket)) found = candidate;
    }
    return found;
}

/* Is there something to do for the thread? */
static bool can_fill(const mtp_loader *loader)
{
    return !loader->failed && count_slots(loader, SLOT_READY) < loader->options.prefetch &&
           find_slot(loader, SLOT_FREE) != NULL;
}

/* Read batch (epoch, index) into the slot; an index behind the last counts on in the next epoch. Without the mutex. */
static mtp_status fill_slot(mtp_loader *loader, slot *target)
{
    for (;;) {
        if (!loader->plan.items || loader->plan.epoch != target->epoch) {
            mtp__plan_free(&loader->plan);
            MTP_TRY(mtp__plan_create(loader->dataset, &loader->options, target->epoch, &loader->plan));
        }
        if (target->index < loader->plan.num_batches) break;
        target->index -= loader->plan.num_batches;
        target->epoch++;
    }
    target->plan = loader->plan.batches[target->index];
    return mtp__batch_fill(target->batch, loader->plan.items + target->plan.begin,
                           target->plan.end - target->plan.begin, true, true);
}

/* Fill one slot; called and left with the mutex held. */
static void fill_next(mtp_loader *loader)
{
    slot *target = find_slot(loader, SLOT_FREE);
    const uint64_t generation = loader->generation;
    target->state = SLOT_FILLED;
    target->epoch = loader->next_epoch;
    target->index = loader->next_index;
    pthread_mutex_unlock(&loader->mutex);
    const mtp_status status = fill_slot(loader, target);
    pthread_mutex_lock(&loader->mutex);
    target->state = SLOT_FREE;
    if (generation != loader->generation) return;
    if (status != MTP_OK) {
        loader->error = *mtp_last_error();
        loader->failed = true;
    } else {
        target->state = SLOT_READY;
        target->ticket = loader->next_ticket++;
        loader->next_epoch = target->epoch;
        loader->next_index = target->index + loader->options.world_size;
        loader->stats.tokens_read += target->plan.tokens;
    }
    pthread_cond_signal(&loader->slot_ready);
}

static void *read_ahead(void *argument)
{
    mtp_loader *loader = argument;
    pthread_mutex_lock(&loader->mutex);
    while (!loader->stop) {
        if (can_fill(loader))
            fill_next(loader);
        else
            pthread_cond_wait(&loader->slot_freed, &loader->mutex);
    }
    pthread_mutex_unlock(&loader->mutex);
    return NULL;
}

/* ---- life ----------------------------------------------------------------------------------------------------- */

/* The longest batch that can occur: memory is not taken for a budget that no batch can use. */
static int64_t most_tokens(const mtp_dataset *dataset, int64_t budget)
{
    return budget < dataset->num_tokens ? budget : dataset->num_tokens;
}

static mtp_status create_slots(mtp_loader *loader)
{
    const int64_t tokens = most_tokens(loader->dataset, loader->options.tokens_per_batch);
    const int64_t documents = tokens < loader->dataset->count ? tokens : loader->dataset->count;
    loader->slots = calloc((size_t)loader->options.prefetch + 2, sizeof *loader->slots);
    if (!loader->slots) return MTP_FAIL(MTP_E_MEMORY, "no memory for the loader");
    for (int64_t i = 0; i < loader->options.prefetch + 2; i++) {
        MTP_TRY_AT(mtp__batch_create(loader->dataset, tokens, documents, &loader->slots[i].batch),
                   "batch %lld of %lld that the loader keeps; lower prefetch or tokens_per_batch", (long long)i + 1,
                   (long long)loader->options.prefetch + 2);
        loader->num_slots++;
        loader->stats.memory_bytes += loader->slots[i].batch->bytes;
    }
    return MTP_OK;
}

static void free_parts(mtp_loader *loader)
{
    for (int64_t i = 0; i < loader->num_slots; i++) mtp__batch_free(loader->slots[i].batch);
    free(loader->slots);
    mtp__plan_free(&loader->plan);
    free(loader);
}

static mtp_status start(mtp_loader *loader)
{
    pthread_mutex_init(&loader->mutex, NULL);
    pthread_cond_init(&loader->slot_freed, NULL);
    pthread_cond_init(&loader->slot_ready, NULL);
    const int code = pthread_create(&loader->thread, NULL, read_ahead, loader);
    if (code == 0) return MTP_OK;
    pthread_mutex_destroy(&loader->mutex);
    pthread_cond_destroy(&loader->slot_freed);
    pthread_cond_destroy(&loader->slot_ready);
    return MTP_FAIL_FOREIGN(MTP_E_IO, code, "cannot start the loader's thread: %s", strerror(code));
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
    mtp_log(loader->options.logger, MTP_LOG_INFO, "loader: %lld batches in epoch 0, %lld left out for want of a target",
            (long long)plan->num_batches, (long long)sum.batches_skipped);
    if (sum.documents_truncated || sum.documents_skipped)
        mtp_log(loader->options.logger, MTP_LOG_WARNING,
                "loader: longer than %lld tokens: %lld samples truncated, %lld skipped",
                (long long)loader->options.tokens_per_batch, (long long)sum.documents_truncated,
                (long long)sum.documents_skipped);
}

mtp_status mtp_loader_create(const mtp_dataset *dataset, const mtp_loader_options *options, mtp_loader **loader)
{
    MTP_REQUIRE(dataset && options && loader);
    MTP_REQUIRE(options->tokens_per_batch >= 1);
    MTP_REQUIRE(options->rank >= 0 &&
                (options->rank < options->world_size || (!options->rank && !options->world_size)));
    MTP_REQUIRE(options->prefetch >= 1 && options->prefetch <= 65536);
    MTP_REQUIRE(options->overlong >= MTP_OVERLONG_ERROR && options->overlong <= MTP_OVERLONG_SKIP);
    *loader = NULL;
    mtp_loader *made = calloc(1, sizeof *made);
    if (!made) return MTP_FAIL(MTP_E_MEMORY, "no memory for the loader");
    made->dataset = dataset;
    made->options = *options;
    if (options->world_size == 0) made->options.world_size = 1;
    made->next_index = made->options.rank;
    mtp_status status =
        mtp__plan_create(dataset, options, 0, &made->plan); /* says now what is wrong with every epoch */
    if (status == MTP_OK) status = create_slots(made);
    if (status == MTP_OK) report(made);
    if (status == MTP_OK) status = start(made);
    if (status != MTP_OK) {
        free_parts(made);
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
    pthread_cond_signal(&loader->slot_freed);
    pthread_mutex_unlock(&loader->mutex);
    pthread_join(loader->thread, NULL);
    pthread_mutex_destroy(&loader->mutex);
    pthread_cond_destroy(&loader->slot_freed);
    pthread_cond_destroy(&loader->slot_ready);
    free_parts(loader);
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

mtp_status mtp_loader_seek(mtp_loader *loader, int64_t epoch, int64_t index)
{
    int64_t count = 0;
    MTP_REQUIRE(loader && epoch >= 0 && index >= 0);
    MTP_TRY(mtp_loader_batches(loader, epoch, &count));
    if (index > count)
        return MTP_FAIL(MTP_E_ARGUMENT, "batch %lld of epoch %lld, which has %lld", (long long)index, (long long)epoch,
                        (long long)count);
    pthread_mutex_lock(&loader->mutex);
    loader->generation++;
    loader->failed = false;
    loader->next_epoch = epoch;
    loader->next_index = index + loader->options.rank;
    for (int64_t i = 0; i < loader->num_slots; i++)
        if (loader->slots[i].state == SLOT_READY) loader->slots[i].state = SLOT_FREE;
    pthread_cond_signal(&loader->slot_freed);
    pthread_mutex_unlock(&loader->mutex);
    return MTP_OK;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

mtp_status mtp_loader_next(mtp_loader *loader, const mtp_batch **batch, int64_t *epoch, int64_t *index)
{
    MTP_REQUIRE(loader && batch && epoch && index);
    *batch = NULL;
    pthread_mutex_lock(&loader->mutex);
    if (count_slots(loader, SLOT_HELD) > loader->options.prefetch) {
        pthread_mutex_unlock(&loader->mutex);
        return MTP_FAIL(MTP_E_ARGUMENT, "%lld batches of the loader are held; release one first",
                        (long long)loader->options.prefetch + 1);
    }
    slot *found = find_slot(loader, SLOT_READY);
    if (!found && !loader->failed) {
        const double begin = now();
        while (!(found = find_slot(loader, SLOT_READY)) && !loader->failed)
            pthread_cond_wait(&loader->slot_ready, &loader->mutex);
        loader->stats.wait_seconds += now() - begin;
    }
    if (!found) {
        const mtp_error error = loader->error;
        pthread_mutex_unlock(&loader->mutex);
        return mtp__fail(error.status, error.foreign, error.file, error.line, "%s", error.message);
    }
    found->state = SLOT_HELD;
    loader->stats.batches_skipped += found->plan.batches_skipped;
    loader->stats.documents_truncated += found->plan.documents_truncated;
    loader->stats.documents_skipped += found->plan.documents_skipped;
    *batch = &found->batch->view;
    *epoch = found->epoch;
    *index = found->index;
    pthread_cond_signal(&loader->slot_freed);
    pthread_mutex_unlock(&loader->mutex);
    return MTP_OK;
}

void mtp_loader_release(mtp_loader *loader, const mtp_batch *batch)
{
    if (!loader || !batch) return;
    pthread_mutex_lock(&loader->mutex);
    for (int64_t i = 0; i < loader->num_slots; i++)
        if (&loader->slots[i].batch->view == batch && loader->slots[i].state == SLOT_HELD)
            loader->slots[i].state = SLOT_FREE;
    pthread_cond_signal(&loader->slot_freed);
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
