/* From a trained drafter to a directory that engines load, and the check that they will.
 *
 * An export holds config.json, generation_config.json, model.safetensors and the tokenizer's files, in the one form
 * that transformers, vLLM, sglang, mlx-vlm and the llama.cpp converter all read correctly (lib/model/README.md has the
 * table). */
#ifndef MTP_EXPORT_H
#define MTP_EXPORT_H

#include "mtp/context.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- checking ------------------------------------------------------------------------------------------------- */

/* One thing that is wrong with an export. */
typedef struct mtp_finding {
    bool fatal;          /* an engine fails or computes something else, and the directory can be put right. Otherwise it
                            lies in the drafter's geometry or is only unusual */
    const char *where;   /* "config.json: text_config.head_dim", "model.safetensors: lm_head.weight" */
    const char *engines; /* whom it concerns and how: "vLLM (silently takes 1.0)" */
    const char *message; /* what is wrong and what to do */
} mtp_finding;

typedef struct mtp_export_report {
    mtp_finding *findings; /* [num_findings], in the order of files, keys and tensors */
    int64_t num_findings;
    int64_t num_fatal;
} mtp_export_report;

/* Check the export in `directory`. `verifier` is the directory of the verifier that it drafts for; NULL: what only the
 * verifier's config.json can tell (a wrong num_key_value_heads) is not checked, and the report says so. `report` may be
 * NULL. MTP_OK when nothing fatal was found; otherwise MTP_E_DATA, whose message lists the fatal findings. The report
 * is filled in both cases; free it with mtp_export_report_free. */
MTP_API mtp_status mtp_validate_export(const char *directory, const char *verifier, mtp_export_report *report);
/* {"directory": ..., "ready": true, "findings": [{"fatal": ..., "where": ..., "engines": ..., "message": ...}]} on one
 * line; free(*json). */
MTP_API mtp_status mtp_export_report_json(const mtp_export_report *report, const char *directory, char **json);
MTP_API void mtp_export_report_free(mtp_export_report *report); /* accepts a zeroed struct */

/* ---- exporting ------------------------------------------------------------------------------------------------ */

typedef struct mtp_export_options {
    const char *source;   /* a drafter directory, a checkpoint, or a run directory (its newest checkpoint) */
    const char *output;   /* the directory to make */
    const char *verifier; /* the verifier's directory: gives the tokenizer when the source drafter has none, and the
                             export is checked against it. NULL: the run's; a source that has neither does without */
    int64_t num_speculative_tokens; /* K that generation_config.json and the serve line name. 0: that of the source's
                                       generation_config.json, else the K the run trained with, else an error */
    bool force;                     /* replace an export that is at `output` */
    const mtp_logger *logger;
} mtp_export_options;

typedef struct mtp_export_result {
    char *serve_line; /* the command that serves verifier and drafter in vLLM */
    int64_t num_speculative_tokens;
    mtp_export_report report; /* of the export; nothing fatal */
} mtp_export_result;

/* Write `output` whole or not at all: everything goes to a temporary directory beside it, is synced and checked, and is
 * then renamed. An existing `output` is MTP_E_EXISTS, unless it is empty, or `force` is set and it is a drafter.
 * Weights are rounded to bf16; when nothing was trained the files are those of the source, byte for byte. Free `result`
 * with mtp_export_result_free. */
MTP_API mtp_status mtp_export(mtp_context *context, const mtp_export_options *options, mtp_export_result *result);
MTP_API void mtp_export_result_free(mtp_export_result *result); /* accepts a zeroed struct */

#ifdef __cplusplus
}
#endif
#endif
