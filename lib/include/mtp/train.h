/* Training a drafter: the configuration, the run, and the plan of its memory. */
#ifndef MTP_TRAIN_H
#define MTP_TRAIN_H

#include "mtp/data.h"
#include "mtp/loss.h"
#include "mtp/optim.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- configuration -------------------------------------------------------------------------------------------- */

typedef struct mtp_strings {
    char **items;
    int64_t count;
} mtp_strings;

/* A source of training data with its weight. */
typedef struct mtp_source {
    char *path;
    double weight;
} mtp_source;
typedef struct mtp_sources {
    mtp_source *items;
    int64_t count;
} mtp_sources;

/* Factors of matrix products. */
typedef enum mtp_precision { MTP_PRECISION_FP32, MTP_PRECISION_BF16 } mtp_precision;

/* What ranks exchange gradients and weights by. */
typedef enum mtp_distributed_backend {
    MTP_DISTRIBUTED_AUTO,
    MTP_DISTRIBUTED_GLOO,
    MTP_DISTRIBUTED_NCCL
} mtp_distributed_backend;

/* What to do with checkpoints that the output directory already has. */
#define MTP_RESUME_NEVER "never" /* refuse a directory that holds a run */
#define MTP_RESUME_AUTO "auto"   /* go on from the newest good checkpoint; start when there is none */

/* A complete configuration. The fields bear the names of the TOML keys, in the tables named here; what each means, its
 * default and its range stand in configs/reference.toml, which mtp_train_config_reference writes from the same table.
 * Strings are owned by the configuration; "" is "not set". */
typedef struct mtp_train_config {
    /* [model] */
    char *drafter;
    char *verifier;
    char *embedding_from;
    mtp_strings freeze;
    /* [data] */
    mtp_strings train_data;
    mtp_sources sources; /* in place of train_data: several mixed by weights */
    mtp_strings eval_data;
    double validation_share; /* of the training data, in place of eval_data; 0: none */
    int32_t hidden_norm;     /* mtp_hidden_norm */
    int32_t overlong;        /* mtp_overlong */
    int64_t tokens_per_batch;
    bool shuffle;
    int64_t prefetch;
    int64_t num_workers;
    int32_t direct_io; /* mtp_direct_io */
    /* [loss] */
    int64_t num_speculative_steps;
    double step_weight_beta;
    int32_t head; /* mtp_head_mode */
    double centroid_weight;
    int32_t feeding; /* mtp_feeding */
    int64_t position_offset;
    bool detach_state;
    /* [optimizer] */
    double learning_rate;
    int32_t lr_scheduler_type; /* mtp_lr_scheduler */
    int64_t warmup_steps;
    double lr_decay_ratio;
    double min_lr_ratio;
    double adam_beta1;
    double adam_beta2;
    double adam_epsilon;
    double weight_decay;
    mtp_strings no_decay;
    double max_grad_norm;
    int32_t master_weights; /* mtp_precision */
    /* [train] */
    int64_t max_steps;
    int64_t num_train_epochs;
    int64_t gradient_accumulation_steps;
    int64_t seed;
    int64_t eval_steps;
    bool keep_best;
    int64_t patience;
    int64_t max_bad_steps;
    /* [output] */
    char *output_dir;
    char *resume;
    int64_t logging_steps;
    int64_t save_steps;
    int64_t keep_last;
    int64_t keep_every; /* 0: none */
    /* [device] */
    char *device;
    int32_t precision; /* mtp_precision */
    int64_t num_threads;
    char *isa;
    int64_t rows_per_chunk;
    int64_t logits_budget_mib;
    int32_t embedding_on_device; /* mtp_embedding_place */
    /* [distributed] */
    int32_t backend; /* mtp_distributed_backend */
    int64_t bucket_mib;
    int64_t zero_stage;
    double timeout_seconds;
    double heartbeat_seconds;

    struct mtp__config_places *places; /* where each key was set; for messages */
} mtp_train_config;

/* Read a TOML file and "key=value" overrides (`section.key` or the key alone), in this order; the last one wins.
 * Unknown keys, wrong types, values out of range and combinations that make no sense are MTP_E_CONFIG; the message
 * begins with "file:line:" or "--set key=value:". The drafter's config.json is read, for what depends on it: `head` and
 * `centroid_weight`. Weights and data are not looked at yet. Free with mtp_train_config_free. */
MTP_API mtp_status mtp_train_config_load(const char *path, const char *const *overrides, int64_t num_overrides,
                                         mtp_train_config **config);
MTP_API void mtp_train_config_free(mtp_train_config *config); /* accepts NULL */
/* Are the directories and files that a run reads there: MTP_E_CONFIG with the place of the key that names a missing
 * one. */
MTP_API mtp_status mtp_train_config_check_paths(const mtp_train_config *config);
/* Every key with its value, as TOML that loads to the same configuration; free() it. */
MTP_API mtp_status mtp_train_config_print(const mtp_train_config *config, char **toml);
/* The commented reference of every key, as TOML; free() it. */
MTP_API mtp_status mtp_train_config_reference(char **toml);

/* ---- plan ----------------------------------------------------------------------------------------------------- */

typedef struct mtp_plan_line {
    const char *what; /* "optimizer moments" */
    const char *note; /* one phrase; may be "" */
    uint64_t bytes;
    bool mapped;    /* a file's pages, which the system may drop: not in the total */
    bool on_device; /* memory of the device; false: of the host, as all of device "cpu" */
} mtp_plan_line;

/* Who needs how much memory in a training run. */
typedef struct mtp_plan {
    int64_t num_parameters, num_trained; /* values */
    int64_t num_lines;
    mtp_plan_line *lines;
    uint64_t total_bytes;
    uint64_t device_bytes, host_bytes;       /* of them */
    uint64_t checkpoint_bytes, export_bytes; /* on disk, each */
    bool has_device;                         /* there is a device with memory of its own */
    bool embedding_on_device;                /* it is to hold the verifier's embedding table */
    uint64_t device_free, device_total;      /* bytes of it, when the plan was made */
    char device[96];                         /* "NVIDIA H200, sm_90, 132 multiprocessors" */
    const char *remedy;                      /* what makes the plan smaller, a phrase for people; never NULL */
    int64_t rows_per_chunk, logits_budget;   /* as configured, or what the device has by default; bytes */
} mtp_plan;

/* Of one of `world_size` ranks. From the configurations of drafter and verifier alone; nothing of what it lists is
 * allocated and no weights are read. The output_dir is not touched. Free with mtp_plan_free. */
MTP_API mtp_status mtp_plan_create(const mtp_train_config *config, int64_t world_size, const mtp_logger *logger,
                                   mtp_plan **plan);
MTP_API void mtp_plan_free(mtp_plan *plan); /* accepts NULL */
/* The lines as a table in MiB, host and device apart, with totals and what is free; free() it. MTP_E_MEMORY. */
MTP_API mtp_status mtp_plan_table(const mtp_plan *plan, char **table);

/* ---- run ------------------------------------------------------------------------------------------------------ */

typedef struct mtp_train_options {
    const mtp_logger *logger;
    /* Asked after each step and each batch of an evaluation; true: finish the step, save a checkpoint, return
     * MTP_E_INTERRUPTED. May be NULL. Called from the thread that trains. With
     * several ranks one that says true stops all. */
    bool (*stop)(void *user);
    /* Progress: one line of the running step, without a newline. `live` lines may be overwritten by the next one (a
     * terminal), others stay (one for each logged step). May be NULL. */
    void (*progress)(void *user, const char *line, bool live);
    /* Tables for people: the acceptance before the first step, side by side with the trained one at the end. NULL:
     * none. */
    void (*report)(void *user, const char *text);
    /* With several ranks: as `failed` of mtp_comm_options. The thread that trains ends with the same failure as soon as
     * it comes to the next exchange, which may be late, or never when it hangs itself. May be NULL. */
    void (*ranks_failed)(void *user, const char *message);
    void *user;
    bool live_progress; /* `progress` shows a terminal: call it after every step */
    bool dry_run;       /* everything but the steps: open all, lay out all; write nothing */
} mtp_train_options;

typedef struct mtp_train_result {
    int64_t step;         /* updates done, over all resumes */
    int64_t total_steps;  /* of the run */
    int64_t bad_steps;    /* skipped because loss or gradient were not finite, over all resumes */
    int64_t resumed_from; /* step of the checkpoint; -1 when started afresh */
    int64_t best_step;    /* with keep_best; -1 when there is none */
    double best_length;   /* its accepted drafts a round */
    bool stopped_early;   /* patience ran out */
    double loss;          /* of the last step; 0 when none was made */
} mtp_train_result;

/* Train as configured, in a context of its own; as one of several ranks when the environment says so (mtp_comm_create):
 * all ranks call it with the same configuration, rank 0 alone calls `progress` and `report` and writes output_dir but
 * for the shards of checkpoints, and a failure of one is the failure of all. Files under output_dir: lib/run/README.md.
 * `result` may be NULL. Errors: MTP_E_CONFIG and MTP_E_DATA from what is read, MTP_E_EXISTS when output_dir holds
 * another run, MTP_E_IO when the last checkpoint cannot be written, as on a full disk (the last good one stays),
 * MTP_E_DATA naming step and samples when more than max_bad_steps steps were skipped because loss or gradient were not
 * finite, or all of them were. */
MTP_API mtp_status mtp_train(const mtp_train_config *config, const mtp_train_options *options,
                             mtp_train_result *result);

#ifdef __cplusplus
}
#endif
#endif
