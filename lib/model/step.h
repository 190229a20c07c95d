/* Internal: one training or evaluation step of a drafter over a batch: forward through K draft steps, heads and losses,
 * backward through the state chain, gradients accumulated in the drafter's gradient block.
 *
 * Memory is laid out once, by a dry run: mtp__step_plan measures (for `mtp plan`), mtp__step_create measures and
 * allocates; a run allocates nothing. */
#ifndef MTP_MODEL_STEP_H
#define MTP_MODEL_STEP_H

#include "base/arena.h"
#include "model/drafter.h"
#include "model/rows.h"
#include "mtp/loss.h"
#include "mtp/verifier.h"

typedef struct mtp__step mtp__step;

/* Sizes of a step whose configuration leaves them to the device (0): one that is kept busy by few rows, in memory that
 * others need too, and one that wants many at once. */
enum { MTP__ROWS_PER_CHUNK_HOST = 512, MTP__ROWS_PER_CHUNK_DEVICE = 8192 };
enum { MTP__LOGITS_MIB_HOST = 256, MTP__LOGITS_MIB_DEVICE = 2048 };

/* Sums of one run over its supervised rows, per step k. */
typedef struct mtp__step_sums {
    double loss;          /* sum of l_rk */
    double centroid_loss; /* sum of c_rk; 0 for dense heads and hierarchical (contained in loss) */
    int64_t count;        /* supervised rows */
    int64_t correct;      /* argmax as serving takes it = target */
    int64_t missed;       /* target's centroid not selected; 0 for dense heads */
} mtp__step_sums;

/* What a run can hand out per row, for evaluation and the reference cases. Host arrays [K, R] or [K, R, n], step-major;
 * each may be NULL. R is rows->num_rows. Places of steps that do not exist are zero. */
typedef struct mtp__step_outputs {
    int32_t *argmax;      /* [K, R]: drafted token as serving takes it, at every valid step */
    int32_t *input_token; /* [K, R]: what was fed */
    float *loss;          /* [K, R]: l_rk, zero where not supervised */
    float *centroid_loss; /* [K, R] */
    uint8_t *miss;        /* [K, R] */
    float *hidden;        /* [K, R, H]: after the final norm */
    float *state;         /* [K, R, Hb]: after the post-projection */
    int32_t *selected;    /* [K, R, k]: ordered heads */
    float *logits;        /* [K, R, V] dense, [K, R, k * P] ordered: of the selected centroids in that order */
} mtp__step_outputs;

typedef enum mtp__step_mode {
    MTP__STEP_EVALUATE, /* forward and losses */
    MTP__STEP_TRAIN     /* and backward: gradients are ADDED to the drafter's gradient block */
} mtp__step_mode;

/* A step for batches of the verifier's geometry. config is checked against the drafter (head mode, K, ...):
 * MTP_E_CONFIG. The drafter and verifier must outlive it. For TRAIN the drafter must have gradients
 * (mtp__drafter_alloc_grads). */
mtp_status mtp__step_create(mtp_drafter *drafter, const mtp_verifier *verifier, const mtp_step_config *config,
                            mtp__step_mode mode, mtp__step **step);
void mtp__step_free(mtp__step *step); /* accepts NULL */
/* What mtp__step_create would allocate, by label, for a drafter with such master weights. No device memory is touched.
 */
mtp_status mtp__step_plan(const mtp_drafter_config *drafter, const mtp_context *context, mtp_dtype masters,
                          const mtp_step_config *config, mtp__step_mode mode, mtp__arena *measured);

/* Told during a run which gradients are final, so that they can be summed over ranks while the rest is computed: those
 * in front of place `final` (in floats) of the drafter's gradient block, which lies in the order in which the backward
 * pass finishes. */
typedef struct mtp__step_watch {
    void (*ready)(void *user, int64_t final);
    void *user;
} mtp__step_watch;
/* The runs that follow are watched; NULL ends it. Only the last run of an update may be: earlier ones leave gradients
 * that later ones add to. */
void mtp__step_set_watch(mtp__step *step, const mtp__step_watch *watch);

/* Run over all rows. counts [K] are the N_k of the global batch (all micro-batches, all ranks): the loss that is
 * differentiated is sum_k w_k (sum_r l_rk + centroid_weight c_rk) / N_k; N_k = 0 leaves the term out. outputs may be
 * NULL. rows must have the step's K and at least one row.
 *
 * sums [K]: of this run; then all is done on return, after one wait for the device. NULL: they are added to the step's
 * own on the device, and the run need not be over on return: the batch must stay as it is until a mark behind the run
 * has been passed (mtp_backend.mark). */
mtp_status mtp__step_run(mtp__step *step, const mtp_batch *batch, const mtp__rows *rows, const int64_t *counts,
                         mtp__step_sums *sums, mtp__step_outputs *outputs);
/* The sums of the runs since mtp__step_begin_update or a run with sums, F64 [K, MTP_TALLY_COLUMNS] in device memory. */
mtp_view mtp__step_device_sums(const mtp__step *step);
mtp_status mtp__step_begin_update(mtp__step *step); /* clears them; nothing waits */
/* Their numbers as sums [K]. */
void mtp__step_sums_of(const double *numbers, int32_t K, mtp__step_sums *sums);

/* How chunks have been run: call by call, or as graphs where the device has them (graphs.h). */
typedef struct mtp__step_counts {
    int64_t called, captured, launched;
    int64_t refused; /* could not be captured */
    int64_t nodes;   /* kernels, copies and fills of the graph launched last */
} mtp__step_counts;
mtp__step_counts mtp__step_counted(const mtp__step *step);

/* Loss of the global batch from sums and counts: sum_k w_k (loss_k + centroid_weight centroid_k) / N_k. */
double mtp__step_total(const mtp_step_config *config, const mtp__step_sums *sums, const int64_t *counts);
/* w_k into weights [K]. */
void mtp__step_weights(const mtp_step_config *config, double *weights);

#endif
