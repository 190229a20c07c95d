/* Where samples say they come from: verifier, types, side of the norm. What most say is right; who says otherwise is
 * a finding. Who says nothing is none. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "validate/check.h"

enum { ATTRIBUTES = 6, MAX_VALUES = 16, MAX_LENGTH = 128, LEARN = 1024 };
static const char *const names[ATTRIBUTES] = {"verifier (metadata)",   "kv_dtype (metadata)", "hidden_norm",
                                              "type of hidden_states", "type of local K/V",   "type of global K/V"};

typedef struct value {
    char text[MAX_LENGTH];
    int64_t count;
} value;

/* Counted values of each attribute; after reading the first is the most frequent. */
struct mtp__check_origin {
    value values[ATTRIBUTES][MAX_VALUES];
    int count[ATTRIBUTES];
};

static const char *type_of(const mtp__field *field)
{
    return field->entry ? mtp_dtype_name(field->entry->dtype) : NULL;
}

/* NULL: the sample does not say. */
static void attributes_of(const mtp__dataset_entry *entry, const mtp__sample *sample, const char *said[ATTRIBUTES])
{
    for (int attribute = 0; attribute < ATTRIBUTES; attribute++) said[attribute] = NULL;
    if (entry->shard) return; /* packing made them one */
    said[0] = mtp_safetensors_metadata(sample->file, "verifier");
    said[1] = mtp_safetensors_metadata(sample->file, "kv_dtype");
    said[2] = entry->normalise ? "pre" : "post";
    said[3] = type_of(&sample->hidden);
    said[4] = type_of(&sample->kv[MTP_LAYER_SLIDING][MTP__K]);
    said[5] = type_of(&sample->kv[MTP_LAYER_FULL][MTP__K]);
}

static void count_value(struct mtp__check_origin *origin, int attribute, const char *text)
{
    char cut[MAX_LENGTH];
    int i = 0;
    snprintf(cut, sizeof cut, "%s", text);
    while (i < origin->count[attribute] && strcmp(origin->values[attribute][i].text, cut) != 0) i++;
    if (i == MAX_VALUES) return;
    value *at = &origin->values[attribute][i];
    if (i == origin->count[attribute]) {
        memcpy(at->text, cut, sizeof cut);
        origin->count[attribute]++;
    }
    at->count++;
}

static void put_most_first(struct mtp__check_origin *origin)
{
    for (int attribute = 0; attribute < ATTRIBUTES; attribute++) {
        value *values = origin->values[attribute];
        for (int i = 1; i < origin->count[attribute]; i++) {
            if (values[i].count <= values[0].count) continue;
            const value most = values[i];
            values[i] = values[0];
            values[0] = most;
        }
    }
}

mtp_status mtp__check_read_origin(mtp_check *check)
{
    const int64_t count = check->dataset->count, wanted = count < LEARN ? count : LEARN;
    check->origin = calloc(1, sizeof *check->origin);
    if (!check->origin) return MTP_FAIL(MTP_E_MEMORY, "no memory for what samples say about themselves");
    for (int64_t i = 0; i < wanted; i++) {
        const int64_t index = i * count / wanted;
        mtp_safetensors *file = NULL;
        mtp__sample sample;
        const char *said[ATTRIBUTES];
        const mtp__dataset_entry entry = mtp__dataset_at(check->dataset, index);
        if (entry.shard) continue;
        const mtp_status status = mtp__dataset_open_sample(check->dataset, index, &file, &sample);
        if (status != MTP_OK && mtp_status_exit_code(status) != 3) return status;
        if (status != MTP_OK) continue; /* found again, and reported, when the sample is checked */
        attributes_of(&entry, &sample, said);
        for (int attribute = 0; attribute < ATTRIBUTES; attribute++)
            if (said[attribute]) count_value(check->origin, attribute, said[attribute]);
        mtp_safetensors_close(file);
    }
    put_most_first(check->origin);
    return MTP_OK;
}

void mtp__check_test_origin(const mtp_check *check, const mtp__check_data *data, mtp_check_finding *finding)
{
    const char *said[ATTRIBUTES];
    attributes_of(&data->entry, &data->sample, said);
    for (int attribute = 0; attribute < ATTRIBUTES; attribute++) {
        if (!said[attribute] || check->origin->count[attribute] == 0) continue;
        const char *most = check->origin->values[attribute][0].text;
        if (strncmp(said[attribute], most, MAX_LENGTH - 1) == 0) continue;
        mtp__check_report(finding, MTP_CHECK_PROVENANCE, -1, "%s is %.100s, in most samples it is %.100s",
                          names[attribute], said[attribute], most);
        return;
    }
}

void mtp__check_free_origin(mtp_check *check)
{
    free(check->origin);
}
