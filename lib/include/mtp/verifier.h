/* The verifier's directory: its geometry, its embedding table and its final norm.
 *
 * Nothing else is read, and the table is mapped, not copied (2.8 GB for the largest). config.json may be a plain text
 * model or a multimodal wrapper with text_config; tensors may carry the prefixes "model.", "model.language_model." or
 * "language_model.model."; one model.safetensors or a sharded index. */
#ifndef MTP_VERIFIER_H
#define MTP_VERIFIER_H

#include "mtp/drafter.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mtp_verifier_config {
    int64_t vocab_size;  /* V */
    int64_t hidden_size; /* Hb */
    int64_t num_layers;
    int64_t head_dim[MTP_LAYER_TYPES];     /* of the last layer of each type that owns K/V */
    int64_t num_kv_heads[MTP_LAYER_TYPES]; /* of the same; 0 when there is no layer of the type */
    int64_t kv_layer[MTP_LAYER_TYPES];     /* its index; -1 when there is none */
    int64_t sliding_window;                /* W; 0 when no sliding layer owns K/V */
    double rms_norm_eps;                   /* of the final norm */
    double final_logit_softcapping;        /* 0 when null or absent */
} mtp_verifier_config;

typedef struct mtp_verifier mtp_verifier;

/* Open `directory`. A quantised embedding (AWQ, GPTQ, bitsandbytes, compressed-tensors: packed or integer weights in
 * the table's place) is refused with `embedding_from` as the way out: then table and norm come from that directory,
 * whose shapes must agree. embedding_from may be NULL. Of a sharded model only the shards of these two tensors are
 * opened. MTP_E_NOT_FOUND; MTP_E_FORMAT: a damaged file; MTP_E_DATA: no Gemma 4 verifier, or what it says is
 * contradictory. */
MTP_API mtp_status mtp_verifier_open(const char *directory, const char *embedding_from, mtp_verifier **verifier);
MTP_API void mtp_verifier_close(mtp_verifier *verifier); /* accepts NULL */
MTP_API const mtp_verifier_config *mtp_verifier_get_config(const mtp_verifier *verifier);
MTP_API const char *mtp_verifier_directory(const mtp_verifier *verifier);
/* The embedding table, F32, BF16 or F16 [V, Hb], mapped from the file. */
MTP_API mtp_view mtp_verifier_embedding(const mtp_verifier *verifier);
/* The final norm's weight as fp32 [Hb]. */
MTP_API const float *mtp_verifier_norm(const mtp_verifier *verifier);
/* Is this drafter made for this verifier: backbone width, vocabulary, K/V geometry and window of each type. One
 * MTP_E_DATA that names every disagreement. */
MTP_API mtp_status mtp_verifier_check_drafter(const mtp_verifier *verifier, const mtp_drafter_config *drafter);

#ifdef __cplusplus
}
#endif
#endif
