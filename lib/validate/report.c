/* A whole data set: every bad sample collected, and the report as JSON. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "formats/json.h"
#include "validate/check.h"

/* ---- collecting ----------------------------------------------------------------------------------------------- */

static mtp_status add_bad(mtp_check_report *report, const char *path, const mtp_check_finding *finding)
{
    const int64_t count = report->num_bad;
    if ((count & (count - 1)) == 0) { /* full at every power of two */
        mtp_check_bad *bad = realloc(report->bad, (size_t)(count ? 2 * count : 1) * sizeof *bad);
        if (!bad) return MTP_FAIL(MTP_E_MEMORY, "no memory for %lld findings", (long long)count);
        report->bad = bad;
    }
    report->bad[count] = (mtp_check_bad){.path = strdup(path), .finding = *finding};
    if (!report->bad[count].path) return MTP_FAIL(MTP_E_MEMORY, "no memory for a path");
    report->num_bad++;
    report->num_samples++;
    report->counts[finding->reason]++;
    return MTP_OK;
}

/* Samples that opening the data set turns away. */
typedef struct collector {
    mtp_check_report *report;
    mtp_status status; /* of collecting */
} collector;

static void turned_away(void *user, const char *path, const mtp_error *error)
{
    collector *collected = user;
    mtp_check_finding finding = {.index = -1};
    mtp__check_report_error(&finding, path, error);
    if (collected->status == MTP_OK) collected->status = add_bad(collected->report, path, &finding);
}

static mtp_status check_all(mtp_check *check, const mtp_dataset *dataset,
                            bool (*progress)(void *user, int64_t done, int64_t total), void *user,
                            mtp_check_report *report)
{
    const int64_t count = mtp_dataset_size(dataset);
    for (int64_t i = 0; i < count; i++) {
        const mtp_sample_info info = mtp_dataset_sample(dataset, i);
        mtp_check_finding finding;
        if (progress && !progress(user, i, count))
            return MTP_FAIL(MTP_E_INTERRUPTED, "interrupted after %lld of %lld samples", (long long)i,
                            (long long)count);
        MTP_TRY_AT(mtp_check_sample(check, i, NULL, &finding), "%s", info.path);
        if (finding.reason) {
            MTP_TRY(add_bad(report, info.path, &finding));
            continue;
        }
        report->num_samples++;
        report->counts[MTP_CHECK_GOOD]++;
        report->num_tokens += info.num_tokens;
        report->num_supervised += info.num_supervised;
        report->num_unsupervised += info.num_supervised == 0;
    }
    return MTP_OK;
}

static mtp_status copy_evidence(const mtp_check *check, mtp_check_report *report)
{
    const int64_t count = mtp_check_num_evidence(check);
    report->evidence = malloc((size_t)(count + 1) * sizeof *report->evidence);
    if (!report->evidence) return MTP_FAIL(MTP_E_MEMORY, "no memory for a report");
    for (int64_t i = 0; i < count; i++) report->evidence[i] = *mtp_check_get_evidence(check, i);
    report->num_evidence = count;
    return MTP_OK;
}

mtp_status mtp_check_run(mtp_context *context, const char *const *paths, int64_t num_paths,
                         const mtp_verifier *verifier, const mtp_dataset_options *dataset_options,
                         const mtp_check_options *options, bool (*progress)(void *user, int64_t done, int64_t total),
                         void *user, mtp_check_report *report)
{
    MTP_REQUIRE(context && paths && verifier && dataset_options && options && report);
    collector collected = {report, MTP_OK};
    const mtp__dataset_quarantine quarantine = {turned_away, &collected};
    mtp_dataset *dataset = NULL;
    mtp_check *check = NULL;
    *report = (mtp_check_report){0};
    mtp_status status = mtp__dataset_open(paths, num_paths, verifier, dataset_options, &quarantine, &dataset);
    if (status == MTP_OK) status = collected.status;
    if (status == MTP_OK && mtp_dataset_size(dataset) > 0) {
        status = mtp_check_create(context, dataset, options, &check);
        if (status == MTP_OK) status = copy_evidence(check, report);
        if (status == MTP_OK) status = check_all(check, dataset, progress, user, report);
    }
    mtp_check_free(check);
    mtp_dataset_close(dataset);
    if (status != MTP_OK) mtp_check_report_free(report);
    return status;
}

void mtp_check_report_free(mtp_check_report *report)
{
    for (int64_t i = 0; i < report->num_bad; i++) free(report->bad[i].path);
    free(report->bad);
    free(report->evidence);
    *report = (mtp_check_report){0};
}

/* ---- JSON ----------------------------------------------------------------------------------------------------- */

static void put(json_t *object, const char *key, json_t *value, bool *ok)
{
    if (json_object_set_new(object, key, value) != 0) *ok = false;
}

static void append(json_t *array, json_t *value, bool *ok)
{
    if (json_array_append_new(array, value) != 0) *ok = false;
}

/* A path or a message may hold bytes that are no UTF-8. */
static json_t *text(const char *bytes)
{
    json_t *value = json_string(bytes);
    return value ? value : json_string("(not UTF-8)");
}

static json_t *counts_json(const mtp_check_report *report, bool *ok)
{
    json_t *object = json_object();
    for (int reason = MTP_CHECK_GOOD + 1; reason < MTP_CHECK_REASONS; reason++)
        if (report->counts[reason])
            put(object, mtp_check_reason_name((mtp_check_reason)reason), json_integer(report->counts[reason]), ok);
    return object;
}

static json_t *bad_json(const mtp_check_report *report, bool *ok)
{
    json_t *array = json_array();
    for (int64_t i = 0; i < report->num_bad; i++) {
        const mtp_check_finding *finding = &report->bad[i].finding;
        json_t *object = json_object();
        put(object, "path", text(report->bad[i].path), ok);
        put(object, "reason", json_string(mtp_check_reason_name(finding->reason)), ok);
        put(object, "index", finding->index >= 0 ? json_integer(finding->index) : json_null(), ok);
        put(object, "message", text(finding->message), ok);
        append(array, object, ok);
    }
    return array;
}

static json_t *tests_json(const mtp_check_report *report, bool *ok)
{
    json_t *array = json_array();
    for (int64_t i = 0; i < report->num_evidence; i++) {
        json_t *object = json_object();
        put(object, "test", json_string(report->evidence[i].test), ok);
        put(object, "possible", json_boolean(report->evidence[i].possible), ok);
        put(object, "note", text(report->evidence[i].note), ok);
        append(array, object, ok);
    }
    return array;
}

mtp_status mtp_check_report_json(const mtp_check_report *report, char **json)
{
    MTP_REQUIRE(report && json);
    bool ok = true;
    json_t *root = json_object();
    *json = NULL;
    put(root, "num_samples", json_integer(report->num_samples), &ok);
    put(root, "num_good", json_integer(report->counts[MTP_CHECK_GOOD]), &ok);
    put(root, "num_bad", json_integer(report->num_bad), &ok);
    put(root, "bad_share", json_real(report->num_samples ? (double)report->num_bad / (double)report->num_samples : 0),
        &ok);
    put(root, "num_tokens", json_integer(report->num_tokens), &ok);
    put(root, "num_supervised", json_integer(report->num_supervised), &ok);
    put(root, "num_unsupervised", json_integer(report->num_unsupervised), &ok);
    put(root, "counts", counts_json(report, &ok), &ok);
    put(root, "bad", bad_json(report, &ok), &ok);
    put(root, "tests", tests_json(report, &ok), &ok);
    const mtp_status status =
        ok ? mtp__json_dump(root, MTP__JSON_ONE_LINE, json) : MTP_FAIL(MTP_E_MEMORY, "no memory for a report");
    json_decref(root);
    return status;
}
