/* Internal: checkpoints. One is a directory of shards and a manifest that is written last:
 *
 *   RUN/run.json                                   what makes a directory a run
 *   RUN/checkpoints/step-00000400/manifest.json    this file's subject
 *   RUN/checkpoints/step-00000400/shard-00000-of-00001.safetensors
 *                                                  F32 masters "param.<name>" of every parameter, "exp_avg.<name>" and
 *                                                  "exp_avg_sq.<name>" of the trained ones
 *   RUN/checkpoints/best                           a link to the best one by accepted length, with keep_best
 *
 * A directory appears whole: it is written under a temporary name, synced and renamed. It is a checkpoint when its
 * manifest is there, of a version this build knows and with its own CRC-32C right, and every shard it lists has the
 * size and the CRC-32C it says.
 * Random numbers are pure functions of (seed, position), so the seed and the position of the loader are all their
 * state. */
#ifndef MTP_RUN_CHECKPOINT_H
#define MTP_RUN_CHECKPOINT_H

#include "model/drafter.h"
#include "mtp/log.h"
#include "optim/optimizer.h"

#define MTP__CHECKPOINT_FORMAT "mtp-checkpoint"
enum { MTP__CHECKPOINT_VERSION = 2, MTP__CHECKPOINT_MAX_SHARDS = 65536 };

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

/* Overwrite the drafter's master weights. The names and shapes must be exactly the drafter's: MTP_E_DATA lists what is
 * missing, unknown or of another shape. MTP_E_DATA also when the drafter computes something else with them than it did
 * then: another config.json or token_ordering. */
mtp_status mtp__checkpoint_load_weights(const mtp__manifest *manifest, mtp_drafter *drafter);
/* Overwrite moments and step of an optimizer whose tensors bear the drafter's names. */
mtp_status mtp__checkpoint_load_optimizer(const mtp__manifest *manifest, mtp__optimizer *optimizer);

/* Write RUN/checkpoints/step-<manifest->step>; sets manifest->shards, computation and world_size 1. On failure nothing
 * new is there and what was there stays. An existing directory of that step is replaced. */
mtp_status mtp__checkpoint_save(const char *run_directory, mtp__manifest *manifest, const mtp_drafter *drafter,
                                const mtp__optimizer *optimizer);
/* Bytes that such a checkpoint takes on disk, within a few KiB. */
uint64_t mtp__checkpoint_bytes(const mtp_drafter *drafter);
/* Remove a checkpoint directory and the files in it; one that is not there is fine. */
mtp_status mtp__checkpoint_remove(const char *directory);
/* Point RUN/checkpoints/best to the checkpoint of `step`. */
mtp_status mtp__checkpoint_mark_best(const char *run_directory, int64_t step);
/* Remove what an interrupted save left in RUN/checkpoints: directories whose names begin with a dot. Only for who holds
 * the run's lock. */
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
