#include "run/resume.h"
#include "base/text.h"

#include <stdlib.h>
#include <string.h>

static mtp_status record(const mtp_train_config *config, const mtp__field *field, mtp__manifest *manifest)
{
    mtp__text key = {0}, value = {0};
    mtp__text_add(&key, "%s.%s", field->section, field->key);
    mtp__config_value(&value, config, field);
    mtp_status status = mtp__text_check(&key);
    if (status == MTP_OK) status = mtp__text_check(&value);
    if (status == MTP_OK) status = mtp__manifest_add_setting(manifest, key.data, value.data);
    mtp__text_free(&key);
    mtp__text_free(&value);
    return status;
}

mtp_status mtp__resume_record(const mtp_train_config *config, mtp__manifest *manifest)
{
    size_t count;
    const mtp__field *fields = mtp__config_fields(&count);
    for (size_t i = 0; i < count; i++) MTP_TRY(record(config, &fields[i], manifest));
    return MTP_OK;
}

/* A line "key: <then> then, <now> now" for a field that differs. A checkpoint from before there was such a key fits the
 * default, which nobody set to something else now. */
static void compare(const mtp_train_config *config, const mtp__field *field, const mtp__manifest *manifest,
                    mtp__text *differences)
{
    mtp__text key = {0}, value = {0};
    mtp__text_add(&key, "%s.%s", field->section, field->key);
    mtp__config_value(&value, config, field);
    const char *then = mtp__manifest_setting(manifest, mtp__text_get(&key));
    const bool comparable = then || config->places->origin[mtp__config_find(field->key)];
    if (comparable && (!then || strcmp(then, mtp__text_get(&value)) != 0))
        mtp__text_add(differences, "\n  %s: %s then, %s now", mtp__text_get(&key), then ? then : "not known",
                      mtp__text_get(&value));
    if (key.failed || value.failed) differences->failed = true;
    mtp__text_free(&key);
    mtp__text_free(&value);
}

static void compare_all(const mtp_train_config *config, mtp__field_resume rule, const mtp__manifest *manifest,
                        mtp__text *differences)
{
    size_t count;
    const mtp__field *fields = mtp__config_fields(&count);
    for (size_t i = 0; i < count; i++)
        if (fields[i].resume == rule) compare(config, &fields[i], manifest, differences);
}

static void compare_facts(const mtp__resume_facts *facts, const mtp__manifest *manifest, mtp__text *differences)
{
    if (facts->verifier != manifest->verifier)
        mtp__text_add(differences, "\n  the verifier's embedding or norm: fingerprint %016llx then, %016llx now",
                      (unsigned long long)manifest->verifier, (unsigned long long)facts->verifier);
    if (facts->dataset != manifest->dataset)
        mtp__text_add(differences,
                      "\n  the training data: %lld samples (fingerprint of documents and weights %016llx) then, %lld "
                      "(%016llx) now",
                      (long long)manifest->num_samples, (unsigned long long)manifest->dataset,
                      (long long)facts->num_samples, (unsigned long long)facts->dataset);
}

/* Micro-batches of an update on all ranks together may be shared out in another way, or become others because there
 * are more or fewer ranks now; not because somebody set them so. */
static void compare_batch(const mtp_train_config *config, const mtp__resume_facts *facts, const mtp__manifest *manifest,
                          mtp__text *differences)
{
    const char *accumulation = mtp__manifest_setting(manifest, "train.gradient_accumulation_steps");
    const int64_t then = accumulation ? strtoll(accumulation, NULL, 10) * manifest->world_size : 0;
    const size_t before = differences->length;
    if (then == config->gradient_accumulation_steps * facts->world_size) return;
    compare_all(config, MTP__RESUME_BATCH, manifest, differences);
    if (differences->length > before)
        mtp__text_add(differences, " (on %lld rank%s then, %lld now)", (long long)manifest->world_size,
                      mtp__plural(manifest->world_size), (long long)facts->world_size);
}

/* Would the steps already done have had the learning rates that they had. */
static bool same_history(const mtp__schedule *now, const mtp__manifest *manifest)
{
    const char *ratio = mtp__manifest_setting(manifest, "optimizer.lr_decay_ratio");
    mtp__schedule then = *now;
    then.max_steps = manifest->total_steps;
    then.decay_steps = mtp__schedule_decay_steps(ratio ? strtod(ratio, NULL) : 0, manifest->total_steps);
    for (int64_t step = 0; step < manifest->step; step++)
        if (mtp__schedule_lr(now, step) != mtp__schedule_lr(&then, step)) return false;
    return true;
}

static mtp_status refuse(const mtp__manifest *manifest, const mtp__text *differences, const char *advice)
{
    MTP_TRY(mtp__text_check(differences));
    return MTP_FAIL(MTP_E_CONFIG, "checkpoint %s belongs to a run with other settings:%s\n%s", manifest->directory,
                    mtp__text_get(differences), advice);
}

static mtp_status check(const mtp_train_config *config, const mtp__resume_facts *facts, const mtp__manifest *manifest,
                        mtp__text *differences)
{
    compare_all(config, MTP__RESUME_SAME, manifest, differences);
    compare_batch(config, facts, manifest, differences);
    compare_facts(facts, manifest, differences);
    if (differences->length || differences->failed)
        return refuse(manifest, differences,
                      "Go on with the settings and the data of then, or start a new run from an export of this one "
                      "(mtp export).");
    if (facts->schedule.max_steps < manifest->step)
        return MTP_FAIL(MTP_E_CONFIG, "checkpoint %s has done %lld step%s, the run shall have %lld",
                        manifest->directory, (long long)manifest->step, mtp__plural(manifest->step),
                        (long long)facts->schedule.max_steps);
    compare_all(config, MTP__RESUME_SCHEDULE, manifest, differences);
    if (differences->length && !same_history(&facts->schedule, manifest))
        return refuse(
            manifest, differences,
            "This schedule spreads the learning rate over the whole run, so the steps already done would have "
            "had other rates. Only lr_scheduler_type = \"constant\", and \"wsd\" before its decay, can change "
            "their length; start a new run from an export of this one (mtp export) instead.");
    return MTP_OK;
}

mtp_status mtp__resume_check(const mtp_train_config *config, const mtp__resume_facts *facts,
                             const mtp__manifest *manifest)
{
    mtp__text differences = {0};
    const mtp_status status = check(config, facts, manifest, &differences);
    mtp__text_free(&differences);
    return status;
}
