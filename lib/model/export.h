/* Internal: writing a drafter in memory as an export. */
#ifndef MTP_MODEL_EXPORT_H
#define MTP_MODEL_EXPORT_H

#include "formats/json.h"
#include "model/drafter.h"
#include "mtp/export.h"

typedef struct mtp__export_request {
    const char *source;   /* directory whose config.json, generation_config.json and tokenizer go along; NULL: none */
    const json_t *config; /* config.json in memory, in place of the source's; NULL: the source's */
    const char *output;   /* the directory to make */
    const char *verifier; /* may be NULL: no other place for a tokenizer, and no check against it */
    int64_t num_speculative_tokens; /* K to write and to serve with; 0: that of the source */
    int64_t default_tokens;         /* K when the source names none; 0: an error then */
    bool force;
    const mtp_logger *logger;
} mtp__export_request;

/* mtp_export of weights in memory: the final export of a run. See mtp/export.h for what is written and refused. */
mtp_status mtp__export_drafter(const mtp_drafter *drafter, const mtp__export_request *request,
                               mtp_export_result *result);

/* Everything of mtp__export_drafter that can fail before there are weights: the place is free, there is a tokenizer, K
 * is known. For what takes long and ends with an export. Makes the directory that `output` will lie in, nothing else.
 */
mtp_status mtp__export_preflight(const mtp__export_request *request);

/* Put a drafter's config.json, already parsed and checked as `config`, into the form that all engines read: dtype
 * bfloat16, the old geometry keys, keys that must be 0 written. Other keys stay. Nothing changes when it has that form.
 */
mtp_status mtp__export_config(json_t *json, const mtp_drafter_config *config);
/* "Gemma4AssistantForCausalLM" for "gemma4_assistant", ...; NULL for another model_type, and for NULL. */
const char *mtp__export_architecture(const char *model_type);

#endif
