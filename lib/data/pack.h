/* Internal: the parts of packing. */
#ifndef MTP_DATA_PACK_H
#define MTP_DATA_PACK_H

#include <pthread.h>

#include "base/text.h"
#include "data/dataset.h"
#include "mtp/pack.h"

/* ---- one packer at a time (pack_owner.c) ---------------------------------------------------------------------- */

/* A file of this name, made with O_EXCL, says which process packs into the directory. One left by a process of this
 * machine that is gone is replaced. */
typedef struct mtp__pack_owner {
    char *path;
} mtp__pack_owner;
mtp_status mtp__pack_own(const char *directory, mtp__pack_owner *owner);
void mtp__pack_disown(mtp__pack_owner *owner); /* accepts a zeroed struct */

/* ---- refused samples (pack_quarantine.c) ---------------------------------------------------------------------- */

/* What reading the sample `path` said, as a refusal: the path in front of the message goes. */
mtp_pack_refusal mtp__refusal_of(const char *path, const mtp_error *why);
/* A line of the quarantine list. */
void mtp__quarantine_add(mtp__text *lines, const char *path, const mtp_pack_refusal *refusal);
/* Count the lines by reason. */
void mtp__quarantine_count(const char *lines, mtp_pack_summary *summary);

/* ---- the teacher (pack_teacher.c) ----------------------------------------------------------------------------- */

enum { MTP__TEACHER_ROWS = 256 };
typedef struct mtp__teacher mtp__teacher;
mtp_status mtp__teacher_create(const mtp_context *context, const mtp_verifier *verifier, int64_t top,
                               mtp__teacher **teacher);
void mtp__teacher_free(mtp__teacher *teacher); /* accepts NULL */
/* Up to MTP__TEACHER_ROWS rows of hidden states after the norm, bf16 [rows, Hb]: lse [rows], ids and logits
 * [rows, top]. One thread at a time. */
mtp_status mtp__teacher_rows(mtp__teacher *teacher, void *hidden, int64_t rows, float *lse, int32_t *ids,
                             float *logits);

/* ---- one sample (pack_sample.c) ------------------------------------------------------------------------------- */

typedef struct mtp__pack_progress {
    int64_t done, total; /* samples */
} mtp__pack_progress;

/* What every shard of a packing is made with. */
typedef struct mtp__pack_means {
    const mtp_pack_options *options;
    mtp_dataset *input;
    mtp__teacher *teacher; /* NULL: none */
    mtp__verifier_key key; /* with global_v_only: that of the full layer */
} mtp__pack_means;

/* A shard as it is written: what all workers share. */
typedef struct mtp__pack_job {
    const mtp__pack_means *means;
    const mtp_pack_options *options;
    const mtp_dataset *input;
    mtp__teacher *teacher;
    int64_t begin, count;
    mtp__store_layout layout;
    uint64_t offsets[MTP__STORE_FIELDS];
    const char *path; /* temporary name */
    int fd;
    mtp__store_row *rows;       /* [count] where each sample goes */
    uint32_t *checksums;        /* [count, MTP__STORE_FIELDS] */
    mtp_pack_refusal **refused; /* [count] why; NULL: stored */
    mtp__pack_progress *progress;
    pthread_mutex_t mutex; /* guards what follows, and the progress */
    int64_t next;
    mtp_error failure; /* status MTP_OK: none */
    pthread_mutex_t teacher_mutex;
} mtp__pack_job;

/* The memory of one thread, for pieces of rows: whatever a sample's length. */
typedef struct mtp__pack_worker mtp__pack_worker;
mtp_status mtp__pack_worker_create(mtp__pack_job *job, mtp__pack_worker **worker);
void mtp__pack_worker_free(mtp__pack_worker *worker); /* accepts NULL */
/* Sample `index` of the shard: read it, test it, write its rows to their place. `refusal` gets a reason when the tests
 * refuse it; what is wrong with its form and values is a status. */
mtp_status mtp__pack_sample(mtp__pack_worker *worker, int64_t index, mtp_pack_refusal *refusal);
/* Supervised tokens that have a token before them. */
int64_t mtp__pack_num_teacher(const mtp__dataset_entry *entry);

/* ---- one shard (pack_shard.c) --------------------------------------------------------------------------------- */

/* Write samples [begin, end) of the input as one shard at `path`, temporary name first. Those whose values are bad go
 * into the quarantine list inside the shard. */
mtp_status mtp__pack_shard(const mtp__pack_means *means, const char *path, int64_t begin, int64_t end,
                           mtp__pack_progress *progress);
/* The layout of samples [begin, end). */
mtp__store_layout mtp__pack_layout(const mtp_pack_options *options, const mtp_dataset *input, int64_t begin,
                                   int64_t end);

#endif
