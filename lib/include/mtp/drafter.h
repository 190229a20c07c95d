/* The drafter: geometry, weights, and the way to and from a Hugging Face directory.
 *
 * A drafter directory holds config.json (`gemma4_assistant` or `gemma4_unified_assistant`) and model.safetensors.
 * Loading accepts fp32, bf16 and f16 weights, the old geometry keys (global_head_dim, num_global_key_value_heads) and
 * per_layer_config, any number of layers in any order of types; the key set is exact. Master weights live in the
 * context's device memory, in fp32 (in a run with master_weights = "bf16" matrices in bf16); what is not trained is
 * written back bit for bit. */
#ifndef MTP_DRAFTER_H
#define MTP_DRAFTER_H

#include "mtp/context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mtp_layer_type { MTP_LAYER_SLIDING, MTP_LAYER_FULL, MTP_LAYER_TYPES } mtp_layer_type;

/* What layers of one type share: the K/V of the verifier's last layer of that type that owns K/V. */
typedef struct mtp_layer_geometry {
    int64_t head_dim;     /* D */
    int64_t num_kv_heads; /* NKV; divides num_heads */
    double rope_theta;
    double partial_rotary_factor; /* share of the D/2 pairs that rotate, from the first; 1 for rope_type "default" */
    double rope_factor;           /* frequencies are divided by it; 1 in every official config */
    bool proportional;            /* rope_type "proportional" */
} mtp_layer_geometry;

typedef struct mtp_drafter_config {
    bool unified;                 /* gemma4_unified_assistant */
    int64_t vocab_size;           /* V */
    int64_t hidden_size;          /* H */
    int64_t backbone_hidden_size; /* Hb */
    int64_t intermediate_size;    /* I */
    int64_t num_heads;            /* NH */
    int64_t num_layers;
    mtp_layer_type *layer_types;                  /* [num_layers], owned by the config */
    mtp_layer_geometry geometry[MTP_LAYER_TYPES]; /* of a type without layers: zeros */
    int64_t sliding_window;                       /* W: keys t - W < j <= t */
    double rms_norm_eps;
    bool ordered;          /* use_ordered_embeddings: a head restricted by centroids */
    int64_t num_centroids; /* C, divides V; 0 when not ordered */
    int64_t centroid_top_k;
    int64_t max_position_embeddings;
    mtp_dtype dtype; /* "dtype" of config.json, the type an export is compared with */
} mtp_drafter_config;

/* Parse and check config.json in `directory`. On success free with mtp_drafter_config_free. Errors name the key. */
MTP_API mtp_status mtp_drafter_config_read(const char *directory, mtp_drafter_config *config);
MTP_API void mtp_drafter_config_free(mtp_drafter_config *config); /* accepts a zeroed struct */

typedef struct mtp_drafter mtp_drafter;

/* Config and weights of `directory`, in device memory of `context`, which must outlive the drafter. Every parameter is
 * trainable but those matched by freezing later. Missing, unknown or wrongly shaped tensors: one MTP_E_DATA that lists
 * them all. */
MTP_API mtp_status mtp_drafter_load(mtp_context *context, const char *directory, mtp_drafter **drafter);
MTP_API void mtp_drafter_free(mtp_drafter *drafter); /* accepts NULL */
MTP_API const mtp_drafter_config *mtp_drafter_get_config(const mtp_drafter *drafter);

/* One parameter as callers may see it. */
typedef struct mtp_parameter {
    const char *name; /* the tensor's name in model.safetensors */
    int32_t rank;     /* 1 or 2 */
    int64_t shape[2];
    mtp_dtype stored; /* dtype in the file it came from */
    bool trained;
    mtp_dtype dtype; /* of the master weights: MTP_F32, or MTP_BF16 in a run with master_weights = "bf16" */
    void *value;     /* master weights, device memory; an ordered head has the rows of model.embed_tokens.weight in the
                      * order of token_ordering, so that the tokens of a centroid lie together */
} mtp_parameter;

MTP_API int64_t mtp_drafter_num_parameters(const mtp_drafter *drafter);
/* index in 0..num-1, in the order of names as an export writes them (token_ordering is not a parameter). */
MTP_API mtp_parameter mtp_drafter_parameter(const mtp_drafter *drafter, int64_t index);
/* Fix every parameter whose name matches the shell pattern (fnmatch: `*` and `?`, e.g. "*.layer_scalar"). A pattern
 * that matches nothing is MTP_E_CONFIG with the names there are. Call before an optimizer or a trainer is made. */
MTP_API mtp_status mtp_drafter_freeze(mtp_drafter *drafter, const char *pattern);
/* Number of trained values. */
MTP_API int64_t mtp_drafter_num_trained(const mtp_drafter *drafter);

/* Write the current weights to `path` (one model.safetensors, atomically): exact names, bf16 round-to-nearest-even,
 * token_ordering I64, layer_scalar [1], metadata {"format": "pt"}, tensors in the order in which the Python safetensors
 * package writes them. */
MTP_API mtp_status mtp_drafter_save_weights(const mtp_drafter *drafter, const char *path);

#ifdef __cplusplus
}
#endif
#endif
