/* Evaluation: how many drafts a verifier would accept, and the teacher-fed loss, of a drafter in memory.
 *
 * Acceptance is measured as a greedy server would see it. A round at position t of a document takes the bonus token
 * x[t+1], the verifier's hidden state at t, and K/V up to t; the drafter drafts K tokens from its own argmax; draft k
 * is accepted when it and all earlier drafts of the round equal x[t+2+k]. That is the served acceptance only when the
 * continuation was written greedily by the verifier, which nothing in the data can show: the caller must know it.
 *
 * - rounds are walked as a server walks them: the first at t = prompt_len - 1 (0 when the whole document is
 *   supervised), the next at t + accepted + 1, while t+1+K < S
 * - positions have one round at every t that those could start from
 *
 * Both come from one computation, because a row's result does not depend on which rows it is computed with. Loss,
 * accuracy and centroid_miss are teacher-fed, over the supervised rows, as training reports them. */
#ifndef MTP_EVAL_H
#define MTP_EVAL_H

#include "mtp/data.h"
#include "mtp/loss.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MTP_EVAL_BUCKETS = 32 };

typedef struct mtp_evaluator_options {
    int32_t num_speculative_steps; /* K, 1..64; 0: 3 */
    int32_t position_offset;       /* 0 or 1 */
    /* Of this, head_mode, step_weight_beta, centroid_weight, rows_per_chunk and logits_budget are used, for the loss.
     * NULL: masked for ordered heads and flat for dense ones, beta 0.6, centroid_weight 1 for ordered heads, the
     * default sizes. */
    const mtp_step_config *loss;
    /* With MTP_EMBEDDING_AUTO the drafter's device gets the verifier's table when it fits. Not used when the device's
     * memory is that of the host. */
    mtp_embedding_place embedding_on_device;
    bool acceptance_only;     /* leave out loss, accuracy and centroid_miss (about half of the time) */
    int64_t tokens_per_batch; /* documents are packed up to this many tokens, a longer one stands alone; 0: 8192. No
                                 figure depends on it but for the float order of the loss sums */
    /* Called before each batch with the documents done so far; returning false ends the run with MTP_E_INTERRUPTED.
     * May be NULL. */
    bool (*progress)(void *user, int64_t documents_done, int64_t documents);
    void *user;
} mtp_evaluator_options;

/* Rounds and what they accepted. */
typedef struct mtp_acceptance {
    int64_t count;                               /* rounds */
    int64_t accepted[MTP_MAX_SPECULATIVE_STEPS]; /* [K]: rounds in which draft k was accepted */
} mtp_acceptance;

/* Share of rounds that accepted draft k; 0 without rounds. */
MTP_API double mtp_acceptance_rate(const mtp_acceptance *acceptance, int32_t k);
/* The same given that draft k-1 was accepted; for k = 0 the rate itself; 0 when there was no such round. */
MTP_API double mtp_acceptance_conditional(const mtp_acceptance *acceptance, int32_t k);
/* Mean accepted drafts a round over the first K, WITHOUT the bonus token (with it: one more). */
MTP_API double mtp_acceptance_length(const mtp_acceptance *acceptance, int32_t num_speculative_steps);

/* Teacher-fed figures of one draft step over its supervised rows. */
typedef struct mtp_step_figures {
    int64_t count;        /* supervised rows */
    double loss;          /* mean l_rk, nats */
    double centroid_loss; /* mean centroid cross-entropy; 0 where the loss has no such term */
    double accuracy;      /* share of rows where the argmax that serving takes is the target */
    double centroid_miss; /* share of targets whose centroid was not selected; 0 for dense heads */
} mtp_step_figures;

typedef struct mtp_sample_figures {
    int64_t sample; /* index in the data set */
    mtp_acceptance rounds, positions;
} mtp_sample_figures;

/* Acceptance of the rounds whose t (or whose document's length) is in [begin, end): 0, 1, 2..3, 4..7, ... */
typedef struct mtp_bucket_figures {
    int64_t begin, end;
    mtp_acceptance rounds, positions;
} mtp_bucket_figures;

typedef struct mtp_evaluation {
    int32_t num_speculative_steps; /* K */
    int32_t position_offset;
    bool ordered;                     /* a head restricted by centroids: centroid_miss means something */
    bool has_loss;                    /* false after acceptance_only: steps and loss are zero */
    mtp_head_mode head_mode;          /* of the loss */
    mtp_acceptance rounds, positions; /* pooled over all samples */
    /* Means over the samples that have a round, each sample counting once. */
    double rounds_sample_mean[MTP_MAX_SPECULATIVE_STEPS],
        positions_sample_mean[MTP_MAX_SPECULATIVE_STEPS];           /* [K] rates */
    double rounds_length_sample_mean, positions_length_sample_mean; /* accepted length without the bonus token */
    mtp_step_figures steps[MTP_MAX_SPECULATIVE_STEPS];              /* [K] */
    double loss; /* sum_k w_k (loss_k + centroid_weight centroid_loss_k), as training reports it */
    int64_t num_samples;
    mtp_sample_figures *samples; /* [num_samples], in the order of the data set; owned by the evaluation */
    /* Samples without a round: fewer than K + 2 tokens from the first supervised one on. */
    int64_t num_short;
    /* Samples with unsupervised tokens behind the first supervised one (several turns): the verifier did not write
     * those, but rounds are walked over them all the same. */
    int64_t num_gapped;
    int32_t num_position_buckets, num_length_buckets; /* those up to the last that is not empty */
    mtp_bucket_figures by_position[MTP_EVAL_BUCKETS]; /* by t */
    mtp_bucket_figures by_length[MTP_EVAL_BUCKETS];   /* by tokens of the document */
    double seconds;                                   /* wall time of the run */
} mtp_evaluation;

/* Gives back `samples`. Accepts NULL and a zeroed struct. */
MTP_API void mtp_evaluation_free(mtp_evaluation *evaluation);

typedef struct mtp_evaluator mtp_evaluator;

/* An evaluator of the drafter as it stands in memory at each run, over every sample of the data set. All three must
 * outlive it. Steps and batches are laid out here, so that a run does only the computing and the reading. MTP_E_CONFIG
 * for options out of range; MTP_E_DATA when no sample has a round or the drafter does not fit the verifier;
 * MTP_E_MEMORY with a table of who needs how much when the device has too little. */
MTP_API mtp_status mtp_evaluator_create(mtp_drafter *drafter, const mtp_verifier *verifier, const mtp_dataset *dataset,
                                        const mtp_evaluator_options *options, mtp_evaluator **evaluator);
MTP_API void mtp_evaluator_free(mtp_evaluator *evaluator); /* accepts NULL */
/* Evaluate now. `evaluation` is overwritten (free an earlier one first); free it with mtp_evaluation_free. */
MTP_API mtp_status mtp_evaluator_run(mtp_evaluator *evaluator, mtp_evaluation *evaluation);

/* What a report needs to know besides the figures. Each may be NULL. */
typedef struct mtp_evaluation_labels {
    const char *model, *verifier;
    const mtp_dataset *dataset; /* paths of the samples */
} mtp_evaluation_labels;

/* One JSON object on one line, without a newline; free() it. Arrays have K entries; a number that is not finite is
 * written as null. Keys:
 * - model, verifier: as labelled, or null
 * - num_speculative_steps, position_offset, head_mode
 * - rounds, positions: each with count, mean_accepted, accepted_length_with_bonus (one more), accepted (rounds that
 *   accepted draft k), acceptance (accepted / count), conditional (given the draft before), sample_mean (of acceptance)
 *   and sample_mean_accepted
 * - loss, accuracy, centroid_miss, centroid_loss, supervised (rows of step k): arrays, teacher-fed, or null when not
 *   computed; centroid_miss is null for dense heads too
 * - weighted_loss: the training loss, a number or null
 * - num_samples, short_samples, gapped_samples, seconds
 * - samples: path, tokens, prompt_len; rounds and positions with count, mean_accepted, accepted
 * - buckets: lists "position" and "length" of begin, end, rounds, positions as in samples, without empty buckets */
MTP_API mtp_status mtp_evaluation_json(const mtp_evaluation *evaluation, const mtp_evaluation_labels *labels,
                                       char **json);

/* A table for people: num_columns evaluations (of the same K) side by side under their titles, in lines that end in a
 * newline; free() it. */
MTP_API mtp_status mtp_evaluation_table(const mtp_evaluation *const *columns, const char *const *titles,
                                        int32_t num_columns, char **table);

#ifdef __cplusplus
}
#endif
#endif
