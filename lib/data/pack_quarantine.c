/* Samples that were refused: one JSON line each, counted by reason. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "data/pack.h"

/* Reasons by what the readers of samples say (lib/data/sample.c, sample_read.c, dataset.c); the first that fits. */
static const struct {
    const char *phrase, *reason;
} reasons[] = {
    {"NaN or Inf", "NaN or infinity"},
    {"is zero", "row of zeros"},
    {"outside the vocabulary", "token id outside the vocabulary"},
    {"must have the same length", "keys of different lengths"},
    {"is not what V gives", "global K not made of V"},
    {"scale", "bad fp8 scales"},
    {"no loss mask", "no loss mask"},
    {"loss_mask", "bad loss mask"},
    {"prompt_len", "bad loss mask"},
    {"missing ", "missing keys"},
    {"unknown tensor", "unknown keys"},
    {"expected", "wrong type or shape"},
    {"metadata", "metadata of another verifier or form"},
    {"changed since", "changed while packing"},
};

static const char *reason_of(const mtp_error *why)
{
    if (why->status == MTP_E_FORMAT || why->status == MTP_E_NOT_FOUND) return "damaged file";
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
        if (strstr(why->message, reasons[i].phrase)) return reasons[i].reason;
    return "other";
}

/* The number behind "token " or in the first brackets: where the sample is bad. -1: the whole file is. */
static int64_t index_of(const char *message)
{
    const char *at = strstr(message, "token ");
    if (at) at += strlen("token ");
    if (!at || *at < '0' || *at > '9') at = strchr(message, '[') ? strchr(message, '[') + 1 : NULL;
    if (!at || *at < '0' || *at > '9') return -1;
    char *end;
    const long long value = strtoll(at, &end, 10);
    return *end == ',' && end[1] == ' ' && strchr(end, ']') ? -1 : value; /* a shape is no index */
}

mtp_pack_refusal mtp__refusal_of(const char *path, const mtp_error *why)
{
    const char *message = why->message;
    const size_t length = strlen(path);
    if (strncmp(message, path, length) == 0 && message[length] == ':')
        message += length + 1 + (message[length + 1] == ' ');
    mtp_pack_refusal refusal = {.index = index_of(message)};
    snprintf(refusal.reason, sizeof refusal.reason, "%s", reason_of(why));
    snprintf(refusal.message, sizeof refusal.message, "%.1023s", message);
    return refusal;
}

void mtp__quarantine_add(mtp__text *lines, const char *path, const mtp_pack_refusal *refusal)
{
    json_t *file = json_string(mtp__path_name(path)), *text = json_string(refusal->message);
    json_t *line =
        json_pack("{s:o, s:s, s:I, s:o}", "file", file ? file : json_string("(not UTF-8)"), "reason", refusal->reason,
                  "index", (json_int_t)refusal->index, "message", text ? text : json_string("(not UTF-8)"));
    char *dumped = line ? json_dumps(line, JSON_COMPACT) : NULL;
    if (dumped)
        mtp__text_add(lines, "%s\n", dumped);
    else
        lines->failed = true;
    free(dumped);
    json_decref(line);
}

/* The last place takes what finds no other. */
static void count(mtp_pack_summary *summary, const char *reason)
{
    int i = 0;
    summary->refused++;
    while (i < MTP_PACK_REASONS - 1 && summary->reasons[i].count && strcmp(summary->reasons[i].reason, reason) != 0)
        i++;
    snprintf(summary->reasons[i].reason, sizeof summary->reasons[i].reason, "%s",
             i < MTP_PACK_REASONS - 1 ? reason : "other");
    summary->reasons[i].count++;
}

void mtp__quarantine_count(const char *lines, mtp_pack_summary *summary)
{
    for (const char *line = lines; *line;) {
        const size_t length = strcspn(line, "\n");
        json_t *value = json_loadb(line, length, 0, NULL);
        const char *reason = json_string_value(json_object_get(value, "reason"));
        count(summary, reason ? reason : "other");
        json_decref(value);
        line += length + (line[length] == '\n');
    }
}
