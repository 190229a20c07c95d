/* Inspecting drafters, verifiers, checkpoints and runs. */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "data/verifier_config.h"
#include "model/weights.h"
#include "mtp/export.h"
#include "run/checkpoint.h"
#include "run/inspect.h"

/* ---- drafters ------------------------------------------------------------------------------------------------- */

/* "sliding_attention x3, full_attention x1" says the layers shortly; the order is in config.json. */
static void add_layers(mtp__inspector *inspector, const mtp_drafter_config *config)
{
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        const mtp_layer_geometry *geometry = &config->geometry[type];
        int64_t count = 0;
        for (int64_t i = 0; i < config->num_layers; i++) count += (int)config->layer_types[i] == type;
        if (count)
            mtp__fact_text(inspector, mtp__layer_type_name((mtp_layer_type)type),
                           "%lld layers, head_dim %lld, %lld query and %lld K/V heads, rope %s theta %g",
                           (long long)count, (long long)geometry->head_dim, (long long)config->num_heads,
                           (long long)geometry->num_kv_heads, geometry->proportional ? "proportional" : "default",
                           geometry->rope_theta);
    }
}

static void add_geometry(mtp__inspector *inspector, const mtp_drafter_config *config)
{
    mtp__fact_text(inspector, "model_type", "%s", config->unified ? "gemma4_unified_assistant" : "gemma4_assistant");
    mtp__fact(inspector, "hidden_size", json_integer(config->hidden_size));
    mtp__fact(inspector, "backbone_hidden_size", json_integer(config->backbone_hidden_size));
    mtp__fact(inspector, "intermediate_size", json_integer(config->intermediate_size));
    mtp__fact(inspector, "vocab_size", json_integer(config->vocab_size));
    add_layers(inspector, config);
    mtp__fact(inspector, "sliding_window", json_integer(config->sliding_window));
    if (config->ordered)
        mtp__fact_text(inspector, "head", "ordered: the best %lld of %lld centroids of %lld tokens",
                       (long long)config->centroid_top_k, (long long)config->num_centroids,
                       (long long)(config->vocab_size / config->num_centroids));
    else
        mtp__fact_text(inspector, "head", "dense");
}

static const mtp_finding *first_fatal(const mtp_export_report *report)
{
    for (int64_t i = 0; i < report->num_findings; i++)
        if (report->findings[i].fatal) return &report->findings[i];
    return NULL;
}

/* What the export validator says, in one line: a drafter may be fine for training and not yet for every engine. */
static void add_export_state(mtp__inspector *inspector)
{
    mtp_export_report report = {0};
    const mtp_status status = mtp_validate_export(inspector->path, inspector->verifier, &report);
    const mtp_finding *fatal = first_fatal(&report);
    if (fatal)
        mtp__fact_text(inspector, "export", "not ready: %lld things to put right, first %s %s (--strict lists them)",
                       (long long)report.num_fatal, fatal->where, fatal->message);
    else if (status != MTP_OK)
        mtp__problem_last(inspector);
    else if (report.num_findings == 0)
        mtp__fact_text(inspector, "export", "ready for every engine");
    else
        mtp__fact_text(inspector, "export", "no fault found, %lld notes (--strict lists them)%s",
                       (long long)report.num_findings, inspector->verifier ? "" : "; not compared with a verifier");
    mtp_export_report_free(&report);
}

static mtp_status check_against_verifier(mtp__inspector *inspector, const mtp_drafter_config *config)
{
    mtp_verifier_config verifier;
    if (!inspector->verifier) return MTP_OK;
    MTP_TRY(mtp__verifier_config_read(inspector->verifier, &verifier));
    if (mtp__verifier_config_check(&verifier, inspector->verifier, config) != MTP_OK) mtp__problem_last(inspector);
    return MTP_OK;
}

static mtp_status add_weights(mtp__inspector *inspector, const mtp_drafter_config *config)
{
    char *path = NULL;
    mtp_safetensors *file = NULL;
    MTP_TRY(mtp__path_join(inspector->path, "model.safetensors", &path));
    if (mtp_safetensors_open(path, &file) != MTP_OK) {
        mtp__problem_last(inspector);
    } else {
        mtp__inspect_tensors(inspector, file);
        mtp__inspect_values(inspector, file);
        if (mtp__drafter_check_file(file, config) != MTP_OK) mtp__problem_last(inspector);
    }
    mtp_safetensors_close(file);
    free(path);
    return MTP_OK;
}

mtp_status mtp__inspect_drafter(mtp__inspector *inspector)
{
    mtp_drafter_config config;
    inspector->kind = MTP_INSPECT_DRAFTER;
    if (mtp_drafter_config_read(inspector->path, &config) != MTP_OK) {
        mtp__problem_last(inspector);
        return MTP_OK;
    }
    add_geometry(inspector, &config);
    mtp_status status = add_weights(inspector, &config);
    if (status == MTP_OK) status = check_against_verifier(inspector, &config);
    if (status == MTP_OK) add_export_state(inspector);
    mtp_drafter_config_free(&config);
    return status;
}

/* ---- verifiers ------------------------------------------------------------------------------------------------ */

static void add_kv(mtp__inspector *inspector, const mtp_verifier_config *config)
{
    static const char *const names[MTP_LAYER_TYPES] = {"kv_last_local", "kv_last_global"};
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        if (config->kv_layer[type] < 0)
            mtp__fact_text(inspector, names[type], "no layer of the type owns K/V");
        else
            mtp__fact_text(inspector, names[type], "layer %lld of %lld, %lld heads of %lld",
                           (long long)config->kv_layer[type], (long long)config->num_layers,
                           (long long)config->num_kv_heads[type], (long long)config->head_dim[type]);
    }
}

mtp_status mtp__inspect_verifier(mtp__inspector *inspector)
{
    mtp_verifier_config config;
    mtp_verifier *verifier = NULL;
    inspector->kind = MTP_INSPECT_VERIFIER;
    if (mtp__verifier_config_read(inspector->path, &config) != MTP_OK) {
        mtp__problem_last(inspector);
        return MTP_OK;
    }
    mtp__fact(inspector, "hidden_size", json_integer(config.hidden_size));
    mtp__fact(inspector, "vocab_size", json_integer(config.vocab_size));
    mtp__fact(inspector, "num_hidden_layers", json_integer(config.num_layers));
    add_kv(inspector, &config);
    mtp__fact(inspector, "sliding_window", json_integer(config.sliding_window));
    if (config.final_logit_softcapping > 0)
        mtp__fact_text(inspector, "final_logit_softcapping", "%g", config.final_logit_softcapping);
    mtp__fact_text(inspector, "nonfinite", "not looked for");
    if (mtp_verifier_open(inspector->path, NULL, &verifier) == MTP_OK)
        mtp__fact_text(inspector, "embedding", "%s [%lld, %lld]",
                       mtp_dtype_name(mtp_verifier_embedding(verifier).dtype), (long long)config.vocab_size,
                       (long long)config.hidden_size);
    else
        mtp__problem_last(inspector);
    mtp_verifier_close(verifier);
    return MTP_OK;
}

/* ---- checkpoints and runs ------------------------------------------------------------------------------------- */

static void add_manifest(mtp__inspector *inspector, const mtp__manifest *manifest)
{
    int64_t bytes = 0;
    json_t *settings = json_object();
    for (int64_t i = 0; i < manifest->num_shards; i++) bytes += (int64_t)manifest->shards[i].bytes;
    mtp__fact(inspector, "step", json_integer(manifest->step));
    mtp__fact(inspector, "total_steps", json_integer(manifest->total_steps));
    mtp__fact(inspector, "bad_steps", json_integer(manifest->bad_steps));
    mtp__fact(inspector, "world_size", json_integer(manifest->world_size));
    mtp__fact_text(inspector, "next_batch", "%lld of epoch %lld", (long long)manifest->batch,
                   (long long)manifest->epoch);
    mtp__fact_text(inspector, "drafter", "%s", manifest->drafter);
    mtp__fact(inspector, "samples", json_integer(manifest->num_samples));
    mtp__fact(inspector, "shards", json_integer(manifest->num_shards));
    mtp__fact(inspector, "bytes", json_integer(bytes));
    if (manifest->best_step >= 0)
        mtp__fact_text(inspector, "best", "step %lld, %.4f drafts accepted a round", (long long)manifest->best_step,
                       manifest->best_length);
    for (int64_t i = 0; i < manifest->num_settings; i++)
        if (json_object_set_new(settings, manifest->settings[i].key, json_string(manifest->settings[i].value)) != 0)
            inspector->failed = true;
    mtp__fact(inspector, "settings", settings);
}

mtp_status mtp__inspect_checkpoint(mtp__inspector *inspector)
{
    mtp__manifest *manifest = NULL;
    inspector->kind = MTP_INSPECT_CHECKPOINT;
    if (mtp__checkpoint_open(inspector->path, true, &manifest) == MTP_OK)
        add_manifest(inspector, manifest);
    else
        mtp__problem_last(inspector);
    mtp__manifest_free(manifest);
    return MTP_OK;
}

static void log_problem(void *user, mtp_log_level level, const char *line)
{
    if (level >= MTP_LOG_WARNING) mtp__problem(user, "%s", line);
}

static mtp_status list_checkpoints(mtp__inspector *inspector)
{
    char *path = NULL;
    mtp__name_list list = {0};
    json_t *names = json_array();
    MTP_TRY(mtp__path_join(inspector->path, "checkpoints", &path));
    const mtp_status status = mtp__dir_exists(path) ? mtp__dir_list(path, MTP__LIST_DIRECTORIES, NULL, &list) : MTP_OK;
    for (size_t i = 0; i < list.count; i++)
        if (list.names[i][0] != '.' && json_array_append_new(names, json_string(list.names[i])) != 0)
            inspector->failed = true;
    mtp__fact(inspector, "checkpoints", names);
    mtp__name_list_free(&list);
    free(path);
    return status;
}

mtp_status mtp__inspect_run(mtp__inspector *inspector)
{
    mtp__manifest *manifest = NULL;
    const mtp_logger logger = {.write = log_problem, .user = inspector, .min_level = MTP_LOG_WARNING};
    inspector->kind = MTP_INSPECT_RUN;
    MTP_TRY(list_checkpoints(inspector));
    if (mtp__checkpoint_find(inspector->path, &logger, &manifest) == MTP_OK) {
        mtp__fact_text(inspector, "newest", "%s", manifest->directory);
        add_manifest(inspector, manifest);
    } else {
        mtp__problem_last(inspector);
    }
    mtp__manifest_free(manifest);
    return MTP_OK;
}
