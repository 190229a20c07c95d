/* mtp_export: what to export (a drafter directory, or the weights of a checkpoint over the drafter that its run started
 * from), then lib/model/export.c. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "formats/toml.h"
#include "model/export.h"
#include "run/checkpoint.h"

/* The text of a string setting, which stands in the manifest as TOML. free(*text); NULL when the run has no such key.
 */
static mtp_status string_setting(const mtp__manifest *manifest, const char *key, char **text)
{
    const char *value = mtp__manifest_setting(manifest, key);
    mtp__toml *toml = NULL;
    *text = NULL;
    if (!value) return MTP_OK;
    char *assignment = NULL;
    if (asprintf(&assignment, "value=%s", value) < 0) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a setting");
    mtp_status status = mtp__toml_override(assignment, &toml);
    if (status == MTP_OK) {
        const mtp__toml_node *node = mtp__toml_find(toml, &toml->nodes[0], "value");
        if (!node || node->kind != MTP__TOML_STRING)
            status = MTP_FAIL(MTP_E_FORMAT, "the setting %s is %s, expected a string", key, value);
        else if (!(*text = strdup(node->string)))
            status = MTP_FAIL(MTP_E_MEMORY, "out of memory for a setting");
    }
    mtp__toml_free(toml);
    free(assignment);
    return status == MTP_OK ? MTP_OK : mtp__fail_prefix(status, "%s/manifest.json", manifest->directory);
}

/* K of the run; 0 when its manifest does not say. */
static mtp_status trained_tokens(const mtp__manifest *manifest, int64_t *tokens)
{
    const char *key = "loss.num_speculative_steps", *value = mtp__manifest_setting(manifest, key);
    char *end;
    *tokens = 0;
    if (!value) return MTP_OK;
    errno = 0;
    *tokens = strtoll(value, &end, 10);
    if (errno || *end || *tokens < 1)
        return MTP_FAIL(MTP_E_FORMAT, "%s/manifest.json: the setting %s is %s, expected a positive integer",
                        manifest->directory, key, value);
    return MTP_OK;
}

/* The verifier of the run, when it is still where it was. */
static mtp_status run_verifier(const mtp__manifest *manifest, const mtp_logger *logger, char **directory)
{
    MTP_TRY(string_setting(manifest, "model.verifier", directory));
    if (!*directory || mtp__dir_exists(*directory)) return MTP_OK;
    mtp_log(
        logger, MTP_LOG_WARNING,
        "the verifier of the run, %s, is not there any more; the export is not checked against it. --verifier names "
        "another place",
        *directory);
    free(*directory);
    *directory = NULL;
    return MTP_OK;
}

static mtp_status export_checkpoint(mtp_context *context, mtp__export_request *request, const mtp__manifest *manifest,
                                    mtp_export_result *result)
{
    mtp_drafter *drafter = NULL;
    char *verifier = NULL;
    request->source = manifest->drafter;
    MTP_TRY(trained_tokens(manifest, &request->default_tokens));
    if (!request->verifier) {
        MTP_TRY(run_verifier(manifest, request->logger, &verifier));
        request->verifier = verifier;
    }
    mtp_status status = mtp_drafter_load(context, manifest->drafter, &drafter);
    if (status != MTP_OK)
        mtp__fail_prefix(status, "%s: the drafter that the run started from gives config.json and tokenizer",
                         manifest->directory);
    if (status == MTP_OK) status = mtp__checkpoint_load_weights(manifest, drafter);
    if (status == MTP_OK) status = mtp__export_drafter(drafter, request, result);
    mtp_drafter_free(drafter);
    free(verifier);
    return status;
}

static mtp_status export_drafter(mtp_context *context, const mtp__export_request *request, mtp_export_result *result)
{
    mtp_drafter *drafter = NULL;
    MTP_TRY(mtp_drafter_load(context, request->source, &drafter));
    const mtp_status status = mtp__export_drafter(drafter, request, result);
    mtp_drafter_free(drafter);
    return status;
}

static bool is_drafter(const char *directory)
{
    char *path = NULL;
    const bool there = mtp__path_join(directory, "config.json", &path) == MTP_OK && mtp__file_exists(path);
    free(path);
    return there;
}

mtp_status mtp_export(mtp_context *context, const mtp_export_options *options, mtp_export_result *result)
{
    MTP_REQUIRE(context && options && options->source && options->output && result);
    MTP_REQUIRE(options->num_speculative_tokens >= 0);
    mtp__export_request request = {.source = options->source,
                                   .output = options->output,
                                   .verifier = options->verifier,
                                   .num_speculative_tokens = options->num_speculative_tokens,
                                   .force = options->force,
                                   .logger = options->logger};
    mtp__manifest *manifest = NULL;
    *result = (mtp_export_result){0};
    if (!mtp__dir_exists(options->source))
        return MTP_FAIL(MTP_E_NOT_FOUND, "%s: no such directory; name a drafter, a run or a checkpoint",
                        options->source);
    if (is_drafter(options->source)) return export_drafter(context, &request, result);
    MTP_TRY(mtp__checkpoint_find(options->source, options->logger, &manifest));
    const mtp_status status = export_checkpoint(context, &request, manifest, result);
    mtp__manifest_free(manifest);
    return status;
}
