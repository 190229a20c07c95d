/* An evaluation as one JSON object: mtp/eval.h describes it. */
#include <math.h>

#include "formats/json.h"
#include "mtp/eval.h"

/* Add a value that a jansson constructor gave; NULL (out of memory) and a failed insertion clear *ok. */
static void put(json_t *object, const char *key, json_t *value, bool *ok)
{
    if (json_object_set_new(object, key, value) != 0) *ok = false;
}

static void append(json_t *array, json_t *value, bool *ok)
{
    if (json_array_append_new(array, value) != 0) *ok = false;
}

/* JSON has no NaN and no infinity. */
static json_t *number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *text_or_null(const char *text)
{
    return text ? json_string(text) : json_null();
}

static json_t *reals(const double *values, int32_t count, bool *ok)
{
    json_t *array = json_array();
    for (int32_t i = 0; i < count; i++) append(array, number(values[i]), ok);
    return array;
}

static json_t *counts(const int64_t *values, int32_t count, bool *ok)
{
    json_t *array = json_array();
    for (int32_t i = 0; i < count; i++) append(array, json_integer(values[i]), ok);
    return array;
}

/* What samples, buckets and the pooled figures have in common. */
static json_t *short_acceptance(const mtp_acceptance *acceptance, int32_t K, bool *ok)
{
    json_t *object = json_object();
    put(object, "count", json_integer(acceptance->count), ok);
    put(object, "mean_accepted", number(mtp_acceptance_length(acceptance, K)), ok);
    put(object, "accepted", counts(acceptance->accepted, K, ok), ok);
    return object;
}

static json_t *pooled_acceptance(const mtp_acceptance *acceptance, const double *sample_mean, double length_sample_mean,
                                 int32_t K, bool *ok)
{
    double rates[MTP_MAX_SPECULATIVE_STEPS], conditional[MTP_MAX_SPECULATIVE_STEPS];
    for (int32_t k = 0; k < K; k++) {
        rates[k] = mtp_acceptance_rate(acceptance, k);
        conditional[k] = mtp_acceptance_conditional(acceptance, k);
    }
    json_t *object = short_acceptance(acceptance, K, ok);
    put(object, "accepted_length_with_bonus", number(mtp_acceptance_length(acceptance, K) + 1), ok);
    put(object, "acceptance", reals(rates, K, ok), ok);
    put(object, "conditional", reals(conditional, K, ok), ok);
    put(object, "sample_mean", reals(sample_mean, K, ok), ok);
    put(object, "sample_mean_accepted", number(length_sample_mean), ok);
    return object;
}

static json_t *bucket_list(const mtp_bucket_figures *buckets, int32_t num_buckets, int32_t K, bool *ok)
{
    json_t *array = json_array();
    for (int32_t i = 0; i < num_buckets; i++) {
        if (buckets[i].positions.count == 0) continue;
        json_t *object = json_object();
        put(object, "begin", json_integer(buckets[i].begin), ok);
        put(object, "end", json_integer(buckets[i].end), ok);
        put(object, "rounds", short_acceptance(&buckets[i].rounds, K, ok), ok);
        put(object, "positions", short_acceptance(&buckets[i].positions, K, ok), ok);
        append(array, object, ok);
    }
    return array;
}

static json_t *sample_list(const mtp_evaluation *evaluation, const mtp_dataset *dataset, bool *ok)
{
    json_t *array = json_array();
    for (int64_t i = 0; i < evaluation->num_samples; i++) {
        const mtp_sample_figures *sample = &evaluation->samples[i];
        json_t *object = json_object();
        if (dataset) {
            const mtp_sample_info info = mtp_dataset_sample(dataset, sample->sample);
            put(object, "path", json_string(info.path), ok);
            put(object, "tokens", json_integer(info.num_tokens), ok);
            put(object, "prompt_len", json_integer(info.prompt_len), ok);
        }
        put(object, "rounds", short_acceptance(&sample->rounds, evaluation->num_speculative_steps, ok), ok);
        put(object, "positions", short_acceptance(&sample->positions, evaluation->num_speculative_steps, ok), ok);
        append(array, object, ok);
    }
    return array;
}

static void put_loss(json_t *root, const mtp_evaluation *evaluation, bool *ok)
{
    const int32_t K = evaluation->num_speculative_steps;
    double loss[MTP_MAX_SPECULATIVE_STEPS], centroid_loss[MTP_MAX_SPECULATIVE_STEPS],
        accuracy[MTP_MAX_SPECULATIVE_STEPS], miss[MTP_MAX_SPECULATIVE_STEPS];
    int64_t supervised[MTP_MAX_SPECULATIVE_STEPS];
    for (int32_t k = 0; k < K; k++) {
        const mtp_step_figures *step = &evaluation->steps[k];
        loss[k] = step->loss;
        centroid_loss[k] = step->centroid_loss;
        accuracy[k] = step->accuracy;
        miss[k] = step->centroid_miss;
        supervised[k] = step->count;
    }
    const bool has = evaluation->has_loss;
    put(root, "loss", has ? reals(loss, K, ok) : json_null(), ok);
    put(root, "accuracy", has ? reals(accuracy, K, ok) : json_null(), ok);
    put(root, "centroid_miss", has && evaluation->ordered ? reals(miss, K, ok) : json_null(), ok);
    put(root, "centroid_loss", has ? reals(centroid_loss, K, ok) : json_null(), ok);
    put(root, "weighted_loss", has ? number(evaluation->loss) : json_null(), ok);
    put(root, "supervised", has ? counts(supervised, K, ok) : json_null(), ok);
}

static void put_acceptance(json_t *root, const mtp_evaluation *evaluation, bool *ok)
{
    const int32_t K = evaluation->num_speculative_steps;
    json_t *rounds = pooled_acceptance(&evaluation->rounds, evaluation->rounds_sample_mean,
                                       evaluation->rounds_length_sample_mean, K, ok);
    put(root, "rounds", rounds, ok);
    json_t *positions = pooled_acceptance(&evaluation->positions, evaluation->positions_sample_mean,
                                          evaluation->positions_length_sample_mean, K, ok);
    put(root, "positions", positions, ok);
}

static json_t *build(const mtp_evaluation *evaluation, const mtp_evaluation_labels *labels, bool *ok)
{
    static const char *const head_modes[] = {"flat", "masked", "hierarchical"};
    const int32_t K = evaluation->num_speculative_steps;
    json_t *root = json_object();
    put(root, "model", text_or_null(labels->model), ok);
    put(root, "verifier", text_or_null(labels->verifier), ok);
    put(root, "num_speculative_steps", json_integer(K), ok);
    put(root, "position_offset", json_integer(evaluation->position_offset), ok);
    put(root, "head_mode", json_string(head_modes[evaluation->head_mode]), ok);
    put_acceptance(root, evaluation, ok);
    put_loss(root, evaluation, ok);
    put(root, "num_samples", json_integer(evaluation->num_samples), ok);
    put(root, "short_samples", json_integer(evaluation->num_short), ok);
    put(root, "gapped_samples", json_integer(evaluation->num_gapped), ok);
    put(root, "seconds", number(evaluation->seconds), ok);
    put(root, "samples", sample_list(evaluation, labels->dataset, ok), ok);
    json_t *buckets = json_object();
    put(buckets, "position", bucket_list(evaluation->by_position, evaluation->num_position_buckets, K, ok), ok);
    put(buckets, "length", bucket_list(evaluation->by_length, evaluation->num_length_buckets, K, ok), ok);
    put(root, "buckets", buckets, ok);
    return root;
}

mtp_status mtp_evaluation_json(const mtp_evaluation *evaluation, const mtp_evaluation_labels *labels, char **json)
{
    MTP_REQUIRE(evaluation && labels && json);
    *json = NULL;
    bool ok = true;
    json_t *root = build(evaluation, labels, &ok);
    mtp_status status;
    if (!root || !ok)
        status =
            MTP_FAIL(MTP_E_MEMORY, "evaluation: the JSON report could not be built: out of memory, or a path that is "
                                   "not valid UTF-8 (rename it)");
    else
        status = mtp__json_dump(root, MTP__JSON_ONE_LINE, json);
    json_decref(root);
    return status;
}
