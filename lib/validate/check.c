/* Checking a sample: the tests in their order. */
#include "validate/check.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

static const char *const reason_names[MTP_CHECK_REASONS] = {"good",
#define NAME_(symbol, name, text) name,
                                                            MTP_CHECK_LIST(NAME_)
#undef NAME_
};
static const char *const reason_texts[MTP_CHECK_REASONS] = {"nothing was found",
#define TEXT_(symbol, name, text) text,
                                                            MTP_CHECK_LIST(TEXT_)
#undef TEXT_
};

const char *mtp_check_reason_name(mtp_check_reason reason)
{
    return (unsigned)reason < MTP_CHECK_REASONS ? reason_names[reason] : "?";
}

const char *mtp_check_reason_text(mtp_check_reason reason)
{
    return (unsigned)reason < MTP_CHECK_REASONS ? reason_texts[reason] : "?";
}

void mtp__check_report(mtp_check_finding *finding, mtp_check_reason reason, int64_t index, const char *format, ...)
{
    va_list arguments;
    finding->reason = reason;
    finding->index = index;
    va_start(arguments, format);
    vsnprintf(finding->message, sizeof finding->message, format, arguments);
    va_end(arguments);
}

void mtp__check_report_error(mtp_check_finding *finding, const char *path, const mtp_error *error)
{
    const size_t length = strlen(path);
    const char *message = error->message;
    if (strncmp(message, path, length) == 0 && strncmp(message + length, ": ", 2) == 0) message += length + 2;
    mtp__check_report(finding, error->status == MTP_E_DATA ? MTP_CHECK_HEADER : MTP_CHECK_FILE, -1, "%s", message);
}

void mtp__check_note(mtp_check *check, const char *test, bool possible, const char *format, ...)
{
    if (check->num_evidence == MTP__CHECK_MAX_EVIDENCE) return;
    mtp_check_evidence *evidence = &check->evidence[check->num_evidence++];
    va_list arguments;
    evidence->test = test;
    evidence->possible = possible;
    va_start(arguments, format);
    vsnprintf(evidence->note, sizeof evidence->note, format, arguments);
    va_end(arguments);
}

static mtp_status prepare(mtp_check *check)
{
    MTP_TRY(mtp__check_read_weights(check));
    MTP_TRY(mtp__check_read_origin(check));
    if (check->options.structure_only) {
        mtp__check_note(check, "norms, positions, next tokens, K/V", false, "left out: structure only");
        return MTP_OK;
    }
    MTP_TRY(mtp__check_head_prepare(check));
    return mtp__check_learn(check);
}

mtp_status mtp_check_create(mtp_context *context, const mtp_dataset *dataset, const mtp_check_options *options,
                            mtp_check **check)
{
    MTP_REQUIRE(context && dataset && options && check);
    MTP_REQUIRE(options->head_positions >= 0 && options->head_samples >= 0);
    *check = NULL;
    mtp_check *made = calloc(1, sizeof *made);
    if (!made) return MTP_FAIL(MTP_E_MEMORY, "out of memory");
    pthread_mutex_init(&made->head, NULL);
    made->context = context;
    made->dataset = dataset;
    made->verifier = dataset->verifier;
    made->options = *options;
    if (made->options.head_positions == 0) made->options.head_positions = 32;
    if (made->options.head_samples == 0) made->options.head_samples = 1024;
    const mtp_status status = prepare(made);
    if (status != MTP_OK) {
        mtp_check_free(made);
        return status;
    }
    *check = made;
    return MTP_OK;
}

void mtp_check_free(mtp_check *check)
{
    if (!check) return;
    for (int type = 0; type < MTP_LAYER_TYPES; type++) mtp__verifier_key_free(&check->keys[type]);
    for (int field = 0; field < MTP__CHECK_FIELDS; field++) {
        free(check->relations[field].weight);
        free(check->relations[field].mean);
    }
    mtp__check_free_origin(check);
    free(check->logits);
    free(check->scratch);
    free(check->mix);
    pthread_mutex_destroy(&check->head);
    free(check);
}

mtp_status mtp_check_sample(mtp_check *check, int64_t index, const mtp_safetensors *file, mtp_check_finding *finding)
{
    MTP_REQUIRE(check && finding && index >= 0 && index < check->dataset->count);
    mtp__check_data data;
    mtp_status status = mtp__check_read(check, index, file, &data, finding);
    const bool more = !check->options.structure_only;
    if (status == MTP_OK && more && !finding->reason) status = mtp__check_test_head(check, &data, finding);
    if (status == MTP_OK && more && !finding->reason) status = mtp__check_test_relations(check, &data, finding);
    if (status == MTP_OK) mtp__check_settle(&data, finding);
    mtp__check_close(&data);
    return status;
}

int64_t mtp_check_num_evidence(const mtp_check *check)
{
    return check->num_evidence;
}

const mtp_check_evidence *mtp_check_get_evidence(const mtp_check *check, int64_t index)
{
    return index >= 0 && index < check->num_evidence ? &check->evidence[index] : NULL;
}
