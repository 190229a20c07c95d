/* Internal: a drafter's configuration from parsed JSON. */
#ifndef MTP_MODEL_CONFIG_H
#define MTP_MODEL_CONFIG_H

#include "formats/json.h"
#include "mtp/drafter.h"

/* The checks of mtp_drafter_config_read on JSON at hand; `origin` is the path for messages. On failure *config is
 * freed. */
mtp_status mtp__drafter_config_parse(json_t *json, const char *origin, mtp_drafter_config *config);

#endif
