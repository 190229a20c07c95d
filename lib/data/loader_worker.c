/* Reading ahead: claiming positions of the order, and filling slots. */
#include <string.h>

#include "data/loader.h"

int64_t mtp__loader_count(const mtp_loader *loader, mtp__slot_state state)
{
    int64_t count = 0;
    for (int64_t i = 0; i < loader->num_slots; i++) count += loader->slots[i].state == state;
    return count;
}

static mtp__slot *free_slot(const mtp_loader *loader)
{
    for (int64_t i = 0; i < loader->num_slots; i++)
        if (loader->slots[i].state == MTP__SLOT_FREE) return &loader->slots[i];
    return NULL;
}

static bool may_claim(const mtp_loader *loader)
{
    const int64_t ahead = mtp__loader_count(loader, MTP__SLOT_READY) + mtp__loader_count(loader, MTP__SLOT_FILLED);
    return !loader->stop && !loader->failed && ahead < loader->options.prefetch && free_slot(loader);
}

static mtp__slot *take_slot(mtp_loader *loader, mtp__slot_state state)
{
    mtp__slot *slot = free_slot(loader);
    slot->state = state;
    slot->ticket = loader->next_ticket++;
    return slot;
}

static void fail_slot(mtp_loader *loader, mtp__slot *slot)
{
    slot->state = MTP__SLOT_FAILED;
    slot->error = *mtp_last_error();
    loader->failed = true;
    pthread_cond_signal(&loader->ready);
}

/* The plan of the epoch to claim from. Made without the mutex: it orders all documents, and batches that are ready can
 * be taken meanwhile. A failure takes the place of the batch. */
static void make_plan(mtp_loader *loader)
{
    const uint64_t generation = loader->generation;
    const int64_t epoch = loader->next_epoch;
    mtp__plan plan = {0};
    loader->planning = true;
    pthread_mutex_unlock(&loader->mutex);
    const mtp_status status = mtp__plan_create(loader->dataset, &loader->options, epoch, &plan);
    pthread_mutex_lock(&loader->mutex);
    loader->planning = false;
    if (status == MTP_OK) {
        mtp__plan_free(&loader->plan);
        loader->plan = plan;
    } else if (generation == loader->generation && may_claim(loader)) {
        fail_slot(loader, take_slot(loader, MTP__SLOT_FAILED));
    }
    pthread_cond_broadcast(&loader->work);
}

/* Is `plan` that of the position that comes next? Goes on to the next epoch where one is at its end. */
static bool find_position(mtp_loader *loader)
{
    while (loader->plan.items && loader->plan.epoch == loader->next_epoch) {
        if (loader->next_index < loader->plan.num_batches) return true;
        loader->next_index -= loader->plan.num_batches;
        loader->next_epoch++;
    }
    return false;
}

static mtp__slot *claim(mtp_loader *loader)
{
    while (may_claim(loader)) {
        if (find_position(loader)) {
            mtp__slot *slot = take_slot(loader, MTP__SLOT_FILLED);
            slot->epoch = loader->next_epoch;
            slot->index = loader->next_index;
            slot->plan = loader->plan.batches[slot->index];
            memcpy(slot->batch->items, loader->plan.items + slot->plan.begin,
                   (size_t)(slot->plan.end - slot->plan.begin) * sizeof *slot->batch->items);
            loader->next_index += loader->options.world_size;
            return slot;
        }
        if (loader->planning) return NULL;
        make_plan(loader);
    }
    return NULL;
}

bool mtp__loader_work(mtp_loader *loader)
{
    mtp__slot *slot = claim(loader);
    if (!slot) return false;
    const uint64_t generation = loader->generation;
    const int64_t documents = slot->plan.end - slot->plan.begin;
    pthread_mutex_unlock(&loader->mutex);
    const mtp_status status =
        mtp__batch_fill(slot->batch, slot->batch->items, documents, true, loader->options.num_speculative_steps);
    pthread_mutex_lock(&loader->mutex);
    loader->stats.bytes_read += slot->batch->bytes_read;
    if (generation != loader->generation) {
        slot->state = MTP__SLOT_FREE;
        pthread_cond_broadcast(&loader->work);
        return true;
    }
    if (status != MTP_OK) {
        fail_slot(loader, slot);
        return true;
    }
    slot->state = MTP__SLOT_READY;
    loader->stats.tokens_read += slot->plan.tokens;
    pthread_cond_signal(&loader->ready);
    return true;
}

void *mtp__loader_thread(void *argument)
{
    mtp_loader *loader = argument;
    pthread_mutex_lock(&loader->mutex);
    while (!loader->stop) { /* which may be set while the mutex was released for a plan: asked again before waiting */
        const bool worked = mtp__loader_work(loader);
        if (!worked && !loader->stop) pthread_cond_wait(&loader->work, &loader->mutex);
    }
    pthread_mutex_unlock(&loader->mutex);
    return NULL;
}
