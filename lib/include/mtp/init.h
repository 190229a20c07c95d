/* An untrained drafter for a verifier. */
#ifndef MTP_INIT_H
#define MTP_INIT_H

#include "mtp/context.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Geometry that the verifier does not fix; 0: the default. */
typedef struct mtp_init_geometry {
    int64_t hidden_size;                 /* H; default 256 */
    int64_t intermediate_size;           /* I; default 8 H */
    int64_t num_hidden_layers;           /* default 4: sliding layers, the last one full */
    int64_t num_attention_heads;         /* NH; default max(4, twice the verifier's sliding K/V heads) */
    int64_t num_centroids;               /* C; divides V. Default 0: a dense head */
    int64_t centroid_intermediate_top_k; /* default 32; only with num_centroids */
} mtp_init_geometry;

typedef struct mtp_init_options {
    const char *verifier;       /* its directory: geometry, embedding, tokenizer */
    const char *embedding_from; /* see mtp_verifier_open; may be NULL */
    const char *config;         /* a config.json of a drafter; NULL: made from the verifier and `geometry` */
    mtp_init_geometry geometry; /* must be all 0 when `config` is given */
    const char *token_ordering; /* ordered heads: a safetensors file with masked_embedding.token_ordering (another
                                   drafter's model.safetensors); NULL: cluster the verifier's embedding */
    const char *output;         /* the directory to make */
    uint64_t seed;
    int64_t num_speculative_tokens; /* K for generation_config.json, >= 1 */
    bool force;                     /* replace a drafter that is at `output` */
    const mtp_logger *logger;
} mtp_init_options;

typedef struct mtp_init_result {
    int64_t num_parameters;
    double cluster_inertia; /* mean squared distance of the verifier's rows to their cluster's mean over that to the
                               mean of all; 0 when nothing was clustered */
} mtp_init_result;

/* Write an untrained drafter to `output`, whole or not at all, checked as an export is.
 *
 * Values, all functions of (verifier, config, seed): the drafter's embedding is the verifier's table on its leading
 * singular directions, scaled so that logits of hidden states of unit RMS have a standard deviation near 0.8; centroids
 * are the means of their tokens' embeddings; q_norm is 0.5 (attention has scale 1, so scores start moderate), other
 * norms and layer_scalar are 1; other matrices are normal with variance 1 / columns. The ordering is balanced k-means
 * of the verifier's rows. For the E2B size the products cost some 20e12 operations: minutes on a few cores. */
MTP_API mtp_status mtp_init(mtp_context *context, const mtp_init_options *options, mtp_init_result *result);

#ifdef __cplusplus
}
#endif
#endif
