/* Internal: the configuration of a drafter made for a verifier. */
#ifndef MTP_MODEL_INIT_H
#define MTP_MODEL_INIT_H

#include "formats/json.h"
#include "mtp/init.h"
#include "mtp/verifier.h"

/* config.json of a drafter for `verifier` (its parsed config and its directory). json_decref(*json). */
mtp_status mtp__init_config(const mtp_verifier_config *verifier, const char *directory,
                            const mtp_init_geometry *geometry, json_t **json);

#endif
