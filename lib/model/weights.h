/* Internal: making drafters from other things than a directory. */
#ifndef MTP_MODEL_WEIGHTS_H
#define MTP_MODEL_WEIGHTS_H

#include "model/drafter.h"
#include "mtp/safetensors.h"

/* A drafter of this geometry with all parameters 0 and, when ordered, no token ordering yet. `directory` is kept as the
 * place it comes from; `masters`: MTP_F32, or MTP_BF16 for matrices that are trained in bf16. */
mtp_status mtp__drafter_create(mtp_context *context, const mtp_drafter_config *config, const char *directory,
                               mtp_dtype masters, mtp_drafter **drafter);
/* mtp_drafter_load with another type of master weights. */
mtp_status mtp__drafter_load(mtp_context *context, const char *directory, mtp_dtype masters, mtp_drafter **drafter);
/* Give an ordered drafter its ordering [V] (checked, copied, uploaded). Called once. `origin` is for messages. */
mtp_status mtp__drafter_set_ordering(mtp_drafter *drafter, const int64_t *ordering, const char *origin);
/* All disagreements between a weight file and a configuration as one MTP_E_DATA: names, shapes, dtypes; no values. */
mtp_status mtp__drafter_check_file(const mtp_safetensors *file, const mtp_drafter_config *config);
/* Rotary frequencies of a layer type, fp32, into inv_freq [head_dim / 2]. */
void mtp__inv_freq(const mtp_layer_geometry *geometry, float *inv_freq);

#endif
