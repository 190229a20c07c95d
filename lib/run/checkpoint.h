/* Internal: checkpoints. One is a directory of shards and a manifest that is written last:
 *
 *   RUN/run.json                                   what makes a directory a run
 *   RUN/checkpoints/step-00000400/manifest.json    this file's subject
 *   RUN/checkpoints/step-00000400/shard-00000-of-00002.safetensors
 *                                                  one of each rank: masters "param.<name>" of every parameter, F32,
 *                                                  or BF16 of the matrices of a run with master_weights = "bf16",
 *                                                  "exp_avg.<name>" and "exp_avg_sq.<name>" of the trained ones
 *   RUN/checkpoints/best                           a link to the best one by accepted length, with keep_best
 *
 * A tensor that no shard holds whole stands in parts, as "exp_avg.<name>[first:end]" with one axis: values [first, end)
 * of it in row-major order. Parts cover every value once, however many ranks wrote them; a checkpoint of any world size
 * loads into any other. Rows stand as memory has them (model/slots.h): those of an ordered drafter's embedding in the
 * order of token_ordering; up to version 2 of the format they stood in the order of the tokens.
 *
 * A directory appears whole: it is written under a temporary name (".step-00000400.tmp"), synced and renamed. It is a
 * checkpoint when its manifest is there, of a version this build knows and with its own CRC-32C right, and every shard
 * it lists has the size and the CRC-32C it says. Random numbers are pure functions of (seed, position), so the seed and
 * the position of the loader are all their state. */
#ifndef MTP_RUN_CHECKPOINT_H
#define MTP_RUN_CHECKPOINT_H

#include "model/drafter.h"
#include "mtp/log.h"
#include "optim/optimizer.h"

#define MTP__CHECKPOINT_FORMAT "mtp-checkpoint"
/* how names of tensors begin */
#define MTP__CHECKPOINT_PARAM "param."
#define MTP__CHECKPOINT_EXP_AVG "exp_avg."
#define MTP__CHECKPOINT_EXP_AVG_SQ "exp_avg_sq."
/* how the directory's name ends that a checkpoint has while another of its step takes its place */
#define MTP__CHECKPOINT_OLD ".old"
enum {
    MTP__CHECKPOINT_VERSION = 3,
    MTP__CHECKPOINT_BY_SLOT = 3, /* the first version whose rows stand as memory has them */
    MTP__CHECKPOINT_MAX_SHARDS = 65536
};

typedef struct mtp__shard {
    char *file; /* a plain name inside the directory */
    uint64_t bytes;
    uint32_t crc32c;
} mtp__shard;

/* A key of the configuration that the run had, as TOML: {"optimizer.learning_rate", "0.001"}. */
typedef struct mtp__setting {
    char *key, *value;
} mtp__setting;

/* What a manifest says. */
typedef struct mtp__manifest {
    char *directory;      /* where it was read from; not written */
    int64_t version;      /* of the format */
    int64_t step;         /* done, the skipped ones included */
    int64_t bad_steps;    /* of them skipped: the optimizer has made step - bad_steps updates */
    int64_t total_steps;  /* of the run that wrote it */
    int64_t epoch, batch; /* position of the loader: the next batch */
    uint64_t seed;
    int64_t world_size;
    char *drafter;          /* the directory that training started from, as an absolute path */
    uint64_t computation;   /* fingerprint of what the shards do not hold of it: config.json and token_ordering */
    uint64_t verifier;      /* fingerprint of the verifier's embedding and norm */
    uint64_t dataset;       /* fingerprint of the training data */
    int64_t num_samples;    /* in it */
    mtp__setting *settings; /* [num_settings] */
    int64_t num_settings;
    mtp__shard *shards; /* [num_shards] */
    int64_t num_shards;
    /* keep_best and patience */
    int64_t best_step;  /* of the best evaluation so far; -1 when there was none */
    double best_length; /* its accepted drafts a round */
    int64_t evals_since_best;
    int64_t last_eval_step; /* of the last evaluation that was finished; -1 when there was none */
} mtp__manifest;

void mtp__manifest_free(mtp__manifest *manifest); /* frees the struct too; accepts NULL */
/* An empty manifest to fill in; NULL when out of memory. */
mtp__manifest *mtp__manifest_create(void);
/* A setting at the end; both strings are copied. */
mtp_status mtp__manifest_add_setting(mtp__manifest *manifest, const char *key, const char *value);
/* The value of a setting; NULL when there is none. */
const char *mtp__manifest_setting(const mtp__manifest *manifest, const char *key);
/* As JSON text; free() it. */
mtp_status mtp__manifest_print(const mtp__manifest *manifest, char **text);
/* Write `path`, atomically. */
mtp_status mtp__manifest_write(const mtp__manifest *manifest, const char *path);
/* Parse the text of a manifest; `origin` is for messages. MTP_E_FORMAT, and MTP_E_VERSION for a newer one. */
mtp_status mtp__manifest_parse(const char *text, size_t size, const char *origin, mtp__manifest **manifest);

/* Read the manifest of a checkpoint directory and check that every shard is there in full size (verify: and has its
 * checksum). */
mtp_status mtp__checkpoint_open(const char *directory, bool verify, mtp__manifest **manifest);
/* `path` may be a checkpoint directory or a run directory; of a run the newest complete and undamaged checkpoint. What
 * was skipped, and why, goes to the logger as warnings. MTP_E_NOT_FOUND when the run has none. A checkpoint directory
 * that is damaged is refused, and the message names the newest good one beside it. */
mtp_status mtp__checkpoint_find(const char *path, const mtp_logger *logger, mtp__manifest **manifest);

/* Overwrite the drafter's master weights, which may be F32 where the checkpoint has BF16. The names and shapes must be
 * exactly the drafter's: MTP_E_DATA lists what is missing, unknown or of another shape. MTP_E_DATA also when the
 * drafter computes something else with them than it did then: another config.json or token_ordering. */
mtp_status mtp__checkpoint_load_weights(const mtp__manifest *manifest, mtp_drafter *drafter);
/* Overwrite moments and step of an optimizer of the drafter's trained parameters, or of parts of them. The moments must
 * be exactly those of the trained parameters: MTP_E_DATA as above. */
mtp_status mtp__checkpoint_load_optimizer(const mtp__manifest *manifest, const mtp_drafter *drafter,
                                          mtp__optimizer *optimizer);

/* ---- writing: lib/run/saver.h does it beside the training, mtp__checkpoint_save at once ------------------------ */

/* What one rank writes: device memory under names of the format. */
typedef struct mtp__piece {
    char *key;     /* "exp_avg.<name>" or "exp_avg.<name>[first:end]" */
    mtp_view view; /* F32, or BF16 of a master weight that is */
} mtp__piece;
typedef struct mtp__pieces {
    mtp_context *context;
    mtp__piece *items; /* [count] */
    int64_t count, capacity;
    size_t num_bytes; /* of all pieces */
} mtp__pieces;

/* Who writes what. */
typedef struct mtp__share {
    int64_t rank, world_size;
    bool sharded_moments; /* each rank's optimizer holds other moments; false: all hold the same ones */
} mtp__share;

/* The pieces of one rank: the moments that it alone holds, and an equal share, by position, of what all ranks hold. The
 * memory stays the drafter's and the optimizer's. Free with mtp__pieces_free, also after a failure. */
mtp_status mtp__pieces_collect(const mtp_drafter *drafter, const mtp__optimizer *optimizer, const mtp__share *share,
                               mtp__pieces *pieces);
void mtp__pieces_free(mtp__pieces *pieces); /* accepts a zeroed struct and zeroes it */

enum { MTP__SHARD_NAME = 64 };
void mtp__shard_name(int64_t rank, int64_t world_size, char name[MTP__SHARD_NAME]);
/* The directory in which the checkpoint of `step` is put together; free() it. */
mtp_status mtp__checkpoint_staging(const char *run_directory, int64_t step, char **path);
/* Write and sync this rank's shard into the staging directory, which is made when missing. `values` is a copy of all
 * pieces one behind the other, in host memory; NULL: read the device. Says what the manifest needs of it. */
mtp_status mtp__shard_write(const char *run_directory, int64_t step, const mtp__share *share, const mtp__pieces *pieces,
                            const void *values, uint64_t *bytes, uint32_t *crc32c);
/* Make a checkpoint of the staging directory: check that every shard of manifest->shards is there in full size, write
 * the manifest, give the directory its name. An existing directory of that step is replaced. */
mtp_status mtp__checkpoint_publish(const char *run_directory, const mtp__manifest *manifest);
/* Remove the staging directory of a save that failed; the thread's error record stays. */
void mtp__checkpoint_abandon(const char *run_directory, int64_t step);
/* Fingerprint for manifest->computation. */
uint64_t mtp__checkpoint_computation(const mtp_drafter *drafter);

/* All of it, of one process: RUN/checkpoints/step-<manifest->step>; sets manifest->shards, computation and
 * world_size 1. On failure nothing new is there and what was there stays. */
mtp_status mtp__checkpoint_save(const char *run_directory, mtp__manifest *manifest, const mtp_drafter *drafter,
                                const mtp__optimizer *optimizer);
/* Put one shard more at the end of the list. */
mtp_status mtp__manifest_add_shard(mtp__manifest *manifest, const char *file, uint64_t bytes, uint32_t crc32c);
/* Bytes that a checkpoint takes on disk, within a few KiB a shard. */
uint64_t mtp__checkpoint_bytes(const mtp_drafter *drafter);

/* ---- keeping house -------------------------------------------------------------------------------------------- */

/* Point RUN/checkpoints/best to the checkpoint of `step`. */
mtp_status mtp__checkpoint_mark_best(const char *run_directory, int64_t step);
/* Remove what an interrupted save left in RUN/checkpoints: directories whose names begin with a dot. A checkpoint that
 * was moved away for one that then did not come is put back. Only for who holds the run's lock. */
mtp_status mtp__checkpoint_remove_leftovers(const char *run_directory);
/* Which checkpoints stay. */
typedef struct mtp__retention {
    int64_t last;      /* the newest ones; 0: all */
    int64_t every;     /* those whose step is a multiple of it; 0: none */
    int64_t best_step; /* this one; -1: none */
} mtp__retention;
/* Remove the checkpoints that nothing of this keeps, and what an interrupted save left behind. Called when the newest
 * is complete. */
mtp_status mtp__checkpoint_prune(const char *run_directory, const mtp__retention *retention);
/* Set checkpoints of later steps than `step` aside as <name>.superseded: a run that goes on from `step` makes its own.
 */
mtp_status mtp__checkpoint_supersede(const char *run_directory, int64_t step, const mtp_logger *logger);
/* "RUN/checkpoints/step-00000400"; free() it. */
mtp_status mtp__checkpoint_path(const char *run_directory, int64_t step, char **path);

#endif
