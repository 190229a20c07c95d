/* What is minimised and how drafts are fed: names of the configuration and of the literature. */
#ifndef MTP_LOSS_H
#define MTP_LOSS_H

#include "mtp/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Candidates of the softmax. Dense heads: FLAT only. */
typedef enum mtp_head_mode {
    MTP_HEAD_FLAT,        /* all V tokens */
    MTP_HEAD_MASKED,      /* tokens of the top-k centroids and of the target's centroid */
    MTP_HEAD_HIERARCHICAL /* -log p(centroid of y) - log p(y | its centroid) */
} mtp_head_mode;

/* Tokens that steps k >= 1 take in. */
typedef enum mtp_feeding {
    MTP_FEED_TEACHER, /* the data's */
    MTP_FEED_SELF     /* the drafter's own argmax, as serving takes it */
} mtp_feeding;

enum { MTP_MAX_SPECULATIVE_STEPS = 64 }; /* the most draft steps K anywhere */

/* Where the verifier's embedding table is read from by a device that has memory of its own. */
typedef enum mtp_embedding_place {
    MTP_EMBEDDING_AUTO, /* from there when it fits beside everything else, with a margin */
    MTP_EMBEDDING_ON,   /* from there; too little memory is an error */
    MTP_EMBEDDING_OFF   /* from host memory: the rows that are needed are brought */
} mtp_embedding_place;

/* One forward (and backward) of a drafter over rows. */
typedef struct mtp_step_config {
    int32_t num_speculative_steps; /* K, 1..MTP_MAX_SPECULATIVE_STEPS */
    int32_t position_offset;       /* rotary position is t + offset: 0 (vLLM, sglang) or 1 (transformers, llama.cpp) */
    mtp_feeding feeding;
    mtp_head_mode head_mode;
    double step_weight_beta; /* w_k = beta^k / sum of beta^j; > 0 */
    double centroid_weight;  /* weight of the centroid cross-entropy; ordered heads with flat or masked */
    bool detach_state;       /* cut the gradient between draft steps */
    int64_t rows_per_chunk; /* rows computed at once (memory), >= 1; results do not depend on it but for the float order
                               of sums over rows. 0: 512 on a CPU, 8192 on a GPU */
    size_t logits_budget;   /* bytes of logits that the flat head may hold, and on a GPU of what the other two hold of
                               their pairs of a row and a centroid; 0: 256 MiB on a CPU, 2 GiB on a GPU. That is 2048
                               rows of 262144 logits, or 49000 rows with 33 centroids of 128 tokens and 256 columns */
} mtp_step_config;

#ifdef __cplusplus
}
#endif
#endif
