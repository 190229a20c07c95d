/* Internal: checkpoints written beside the training. A save begins with a copy of this rank's part of weights and
 * moments, which is all that the training thread waits for; a thread of the saver writes the copy into the staging
 * directory. When every rank's shard is durable, the thread of rank 0 writes the manifest, gives the directory its
 * name, and removes what the retention does not keep.
 *
 *   begin    every rank, at the same step
 *   report   what became of this rank's part; the reports of all ranks go to all ranks (the caller's business: a saver
 *            knows no other process)
 *   settle   every rank, with the same reports: the same answer everywhere
 *
 * One process settles with its own report. At most one save is under way. All functions are called from one thread. */
#ifndef MTP_RUN_SAVER_H
#define MTP_RUN_SAVER_H

#include "run/checkpoint.h"

typedef struct mtp__saver mtp__saver;

typedef enum mtp__save_state {
    MTP__SAVE_IDLE,       /* no save under way */
    MTP__SAVE_WRITING,    /* this rank's shard is being written */
    MTP__SAVE_WRITTEN,    /* and is durable */
    MTP__SAVE_PUBLISHING, /* rank 0: all shards are durable, the checkpoint is being made of them */
    MTP__SAVE_COMPLETE,   /* rank 0: it is there */
    MTP__SAVE_FAILED      /* `reason` says why */
} mtp__save_state;

/* Plain data, to be sent between ranks of the same build. */
typedef struct mtp__save_report {
    int64_t step;
    uint64_t bytes; /* of the shard, when it is written */
    uint32_t crc32c;
    int32_t state;  /* mtp__save_state */
    int32_t status; /* mtp_status of a failure */
    char reason[492];
} mtp__save_report;

typedef struct mtp__saver_options {
    const char *run_directory;
    const mtp_drafter *drafter;      /* outlives the saver; so does the optimizer */
    const mtp__optimizer *optimizer; /* with the moments that this rank holds */
    mtp__share share;
} mtp__saver_options;

/* Takes the memory for the copy (mtp__saver_bytes) and starts the thread. */
mtp_status mtp__saver_create(const mtp__saver_options *options, mtp__saver **saver);
/* Waits for what the thread is writing, and leaves it unpublished unless it was being published. Accepts NULL. */
void mtp__saver_free(mtp__saver *saver);
/* Host memory of the copy on a rank, of a world of ranks that share the work: of all values of a checkpoint. */
uint64_t mtp__saver_bytes(uint64_t checkpoint_bytes, int64_t world_size);

typedef struct mtp__save {
    int64_t step;
    /* of rank 0 only; the others leave it out */
    mtp__manifest *manifest;  /* without shards, computation and world_size; taken by begin, also when it fails */
    mtp__retention retention; /* once the checkpoint is there */
    bool best;                /* point checkpoints/best to it */
    int metrics;              /* descriptor to sync first: a checkpoint never knows more than the metrics; -1: none */
    bool metrics_behind;      /* they cannot be written: nor can the checkpoint be saved */
} mtp__save;

/* Copy, and begin to write. A save must not be under way. Nothing has begun when this fails; with several ranks the
 * callers agree on whether it did before they go on, and mtp__saver_cancel where it did. */
mtp_status mtp__saver_begin(mtp__saver *saver, const mtp__save *save);
/* Is a save under way, the same on all ranks. */
bool mtp__saver_busy(const mtp__saver *saver);
/* Now; and after waiting until this rank's thread has nothing to do, but `seconds` at most. */
void mtp__saver_report(mtp__saver *saver, mtp__save_report *report);
void mtp__saver_wait(mtp__saver *saver, double seconds, mtp__save_report *report);

typedef enum mtp__save_outcome {
    MTP__SAVE_PENDING, /* a rank is still at it, or rank 0 publishes now: report and settle again */
    MTP__SAVE_DONE,    /* the checkpoint is there; mtp__saver_warning says what else went wrong */
    MTP__SAVE_LOST     /* it is not; *status, and the thread's error record, say why: "rank 2: disk full" */
} mtp__save_outcome;

/* reports [world_size], in the order of the ranks. After DONE and LOST the saver is idle again. */
mtp__save_outcome mtp__saver_settle(mtp__saver *saver, const mtp__save_report *reports, mtp_status *status);
/* Rank 0, after DONE: what of keeping house failed; NULL when nothing did. Valid until the next begin. */
const char *mtp__saver_warning(const mtp__saver *saver);
/* Give up a save that other ranks could not begin: waits for the thread, the saver is idle then. */
void mtp__saver_cancel(mtp__saver *saver);

#endif
