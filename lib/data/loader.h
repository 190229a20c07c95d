/* Internal: the state of a loader, shared by loader.c (its life and the caller's side) and loader_worker.c (reading).
 *
 * A slot is FREE, being FILLED by a thread, READY, FAILED, or HELD by the caller. There are prefetch + 2: at most
 * `prefetch` are filled, ready or failed, the caller may hold `prefetch` + 1, so one is always free or about to be. A
 * thread claims the next position of the order with a free slot, in one step under the mutex, and gets a ticket; the
 * caller is given slots in the order of the tickets, whichever thread was done first. Everything is guarded by `mutex`
 * but the content of a slot's batch, which belongs to the thread while FILLED and to the caller while HELD. A seek
 * raises `generation`: what was claimed for an older one is dropped. */
#ifndef MTP_DATA_LOADER_H
#define MTP_DATA_LOADER_H

#include <pthread.h>

#include "base/error.h"
#include "data/sampler.h"

typedef enum mtp__slot_state {
    MTP__SLOT_FREE,
    MTP__SLOT_FILLED,
    MTP__SLOT_READY,
    MTP__SLOT_FAILED,
    MTP__SLOT_HELD
} mtp__slot_state;

typedef struct mtp__slot {
    mtp__batch *batch; /* `items` are its documents from the claim on */
    mtp__slot_state state;
    uint64_t ticket;
    int64_t epoch, index;
    mtp__plan_batch plan; /* what was passed over before it, for the statistics */
    mtp_error error;      /* why, when FAILED */
} mtp__slot;

struct mtp_loader {
    const mtp_dataset *dataset;
    mtp_loader_options options; /* settled: no zeros that stand for something, direct_io ON or OFF */
    mtp__slot *slots;
    int64_t num_slots;
    pthread_t *threads;
    int64_t num_threads;

    pthread_mutex_t mutex;
    pthread_cond_t work;            /* a slot was freed, a plan was made, a seek, the end: threads wait for it */
    pthread_cond_t ready;           /* a slot was filled or failed: the caller waits for it */
    mtp__plan plan;                 /* of the epoch that is being claimed */
    bool planning;                  /* a thread makes the next plan */
    int64_t next_epoch, next_index; /* what is claimed next; an index behind the last counts on in the next epoch */
    uint64_t generation, next_ticket, due_ticket;
    bool stop, failed; /* failed: some slot is FAILED, so nothing more is claimed */
    mtp_loader_stats stats;
};

int64_t mtp__loader_count(const mtp_loader *loader, mtp__slot_state state);
/* Claim the next batch and read it; false when nothing can be claimed now. Called and left with the mutex held, which
 * is released while reading. */
bool mtp__loader_work(mtp_loader *loader);
/* A thread: work until the loader stops. */
void *mtp__loader_thread(void *loader);

#endif
