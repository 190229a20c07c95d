/* Internal: the part of a verifier's config.json that training needs. */
#ifndef MTP_DATA_VERIFIER_CONFIG_H
#define MTP_DATA_VERIFIER_CONFIG_H

#include "mtp/verifier.h"

/* Parse and check config.json of `directory`. */
mtp_status mtp__verifier_config_read(const char *directory, mtp_verifier_config *config);
/* mtp_verifier_check_drafter without tensors at hand; `directory` is the verifier's, for the message. */
mtp_status mtp__verifier_config_check(const mtp_verifier_config *config, const char *directory,
                                      const mtp_drafter_config *drafter);

/* "sliding_attention", "full_attention": the names of config.json, the verifier's and the drafter's. */
const char *mtp__layer_type_name(mtp_layer_type type);

#endif
