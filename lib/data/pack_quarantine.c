/* Samples that were refused: one JSON line each, counted by reason. */
#include <jansson.h>
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
    static const char damaged[] = "damaged file", other[] = "other";
    if (why->status == MTP_E_FORMAT || why->status == MTP_E_NOT_FOUND) return damaged;
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
        if (strstr(why->message, reasons[i].phrase)) return reasons[i].reason;
    return other;
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

void mtp__quarantine_add(mtp__text *lines, const char *path, const mtp_error *why)
{
    const char *name = mtp__path_name(path), *message = why->message;
    const size_t length = strlen(path); /* the message begins with the path, which the line says already */
    if (strncmp(message, path, length) == 0 && message[length] == ':')
        message += length + 1 + (message[length + 1] == ' ');
    json_t *file = json_string(name), *text = json_string(message);
    json_t *line =
        json_pack("{s:o, s:s, s:I, s:o}", "file", file ? file : json_string("(not UTF-8)"), "reason", reason_of(why),
                  "index", (json_int_t)index_of(message), "message", text ? text : json_string("(not UTF-8)"));
    char *dumped = line ? json_dumps(line, JSON_COMPACT) : NULL;
    if (dumped)
        mtp__text_add(lines, "%s\n", dumped);
    else
        lines->failed = true;
    free(dumped);
    json_decref(line);
}

static void count(mtp_pack_summary *summary, const char *reason)
{
    static const char *const fixed[] = {"damaged file", "other"};
    const char *literal = fixed[1];
    if (strcmp(reason, fixed[0]) == 0) literal = fixed[0];
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
        if (strcmp(reason, reasons[i].reason) == 0) literal = reasons[i].reason;
    summary->refused++;
    for (int i = 0; i < MTP_PACK_REASONS; i++) {
        if (summary->reasons[i].reason && strcmp(summary->reasons[i].reason, literal) != 0) continue;
        summary->reasons[i].reason = literal;
        summary->reasons[i].count++;
        return;
    }
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
