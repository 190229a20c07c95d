/* Every row of a sample: finite, not zero, not its neighbour's, and of the scale that the verifier's norms give. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/real.h"
#include "validate/check.h"

/* A row whose RMS is low can be honest (the norm's eps weighs in when there is next to nothing to normalise), but not
 * one in ten of them. */
static const double LOW_SHARE = 0.1;

/* One field as it streams by. */
typedef struct row_stream {
    const char *name;
    int field;
    const float *weight;   /* RMS is taken of row / weight; NULL: of the row */
    int64_t groups, width; /* a row is so many heads of so many values */
    double tolerance;
    float *last;                              /* [groups * width] the row before */
    int64_t high, low, first_high, first_low; /* rows whose RMS is off */
    double sum, sum_squares;                  /* of the RMS of each row */
} row_stream;

/* ---- rows ----------------------------------------------------------------------------------------------------- */

static double rms_of(const float *row, const float *weight, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const double value = weight ? (double)row[i] / (double)weight[i] : (double)row[i];
        sum += value * value;
    }
    return sqrt(sum / (double)n);
}

static void measure(row_stream *stream, const float *row, int64_t token)
{
    bool high = false, low = false;
    for (int64_t group = 0; group < stream->groups; group++) {
        const double rms = rms_of(row + group * stream->width, stream->weight, stream->width);
        stream->sum += rms / (double)stream->groups;
        stream->sum_squares += rms * rms / (double)stream->groups;
        high = high || rms > 1 + stream->tolerance;
        low = low || rms < 1 - stream->tolerance;
    }
    if (high && stream->high++ == 0) stream->first_high = token;
    if (low && stream->low++ == 0) stream->first_low = token;
}

static void look_at_row(const mtp_check *check, row_stream *stream, mtp__check_data *data, const float *row,
                        int64_t token, mtp_check_finding *finding)
{
    const int64_t n = stream->groups * stream->width;
    int64_t i = 0;
    while (i < n && row[i] == 0.0f) i++;
    if (i == n) {
        mtp__check_report(finding, MTP_CHECK_ZERO_ROWS, token,
                          "%s: every value of token %lld is zero; the extraction did not write this row", stream->name,
                          (long long)token);
        return;
    }
    /* equal tokens may have equal rows deep inside a long repetition; different ones never */
    if (token > 0 && !data->repeated.reason && data->ids[token] != data->ids[token - 1] &&
        memcmp(row, stream->last, (size_t)n * sizeof *row) == 0)
        mtp__check_report(&data->repeated, MTP_CHECK_REPEATED_ROWS, token,
                          "%s: tokens %lld and %lld are different but have the same row", stream->name,
                          (long long)token - 1, (long long)token);
    memcpy(stream->last, row, (size_t)n * sizeof *row);
    if (!check->options.structure_only) measure(stream, row, token);
}

/* ---- a field -------------------------------------------------------------------------------------------------- */

/* Stream a field; rows of the window go to `kept` [count, n]. */
static mtp_status stream_field(const mtp_check *check, row_stream *stream, mtp__check_data *data, float *kept,
                               mtp_check_finding *finding)
{
    const int64_t n = stream->groups * stream->width;
    float *block = malloc((size_t)((MTP__CHECK_BLOCK + 3) * n) * sizeof *block);
    if (!block) return MTP_FAIL(MTP_E_MEMORY, "no memory for %d rows of %s", MTP__CHECK_BLOCK, stream->name);
    float *scratch = block + MTP__CHECK_BLOCK * n;
    stream->last = scratch + 2 * n;
    mtp_status status = MTP_OK;
    for (int64_t first = 0; first < data->num_tokens && !finding->reason; first += MTP__CHECK_BLOCK) {
        const int64_t left = data->num_tokens - first, count = left < MTP__CHECK_BLOCK ? left : MTP__CHECK_BLOCK;
        status = mtp__check_read_rows(data, stream->field, first, count, n, block, scratch, finding);
        if (status != MTP_OK) break;
        for (int64_t i = 0; i < count && !finding->reason; i++) {
            const int64_t token = first + i;
            look_at_row(check, stream, data, block + i * n, token, finding);
            if (token >= data->begin && token < data->begin + data->count)
                memcpy(kept + (token - data->begin) * n, block + i * n, (size_t)n * sizeof *kept);
        }
    }
    free(block);
    stream->last = NULL;
    return status;
}

/* ---- verdicts over rows --------------------------------------------------------------------------------------- */

/* Before or after the final norm, or of no scale that either gives? */
static void judge_hidden(const row_stream *stream, const mtp__check_data *data, mtp_check_finding *finding)
{
    const double rows = (double)data->num_tokens, mean = stream->sum / rows;
    const double spread = sqrt(fmax(stream->sum_squares / rows - mean * mean, 0)) / mean;
    const int64_t off = stream->high + stream->low;
    if (data->entry.normalise) {
        if (off == 0)
            mtp__check_report(finding, MTP_CHECK_HIDDEN_NORM, 0,
                              "hidden_states count as before the final norm, but divided by its weight every row has "
                              "RMS 1: they are after it (hidden_norm = \"post\")");
        return;
    }
    const int64_t first = stream->high == 0 || (stream->low && stream->first_low < stream->first_high)
                              ? stream->first_low
                              : stream->first_high;
    if (stream->high == 0 && (double)stream->low <= LOW_SHARE * rows) return;
    if (2 * off > data->num_tokens && spread > stream->tolerance)
        mtp__check_report(finding, MTP_CHECK_HIDDEN_NORM, first,
                          "hidden_states count as after the final norm, but divided by its weight their RMS is %.3g "
                          "on average and differs by %.2g from row to row; after the norm it is 1: they are before it "
                          "(hidden_norm = \"pre\")",
                          mean, spread * mean);
    else
        mtp__check_report(finding, MTP_CHECK_SCALE, first,
                          "hidden_states: RMS over the final norm's weight is not 1 in %lld of %lld rows, on average "
                          "%.3g",
                          (long long)off, (long long)data->num_tokens, mean);
}

static void judge_values(const row_stream *stream, const mtp__check_data *data, mtp_check_finding *finding)
{
    if (stream->high == 0 && (double)stream->low <= LOW_SHARE * (double)data->num_tokens) return;
    mtp__check_report(finding, MTP_CHECK_SCALE, stream->high ? stream->first_high : stream->first_low,
                      "%s: the RMS of a head is 1 after the norm of V, here it is not in %lld of %lld rows, on average "
                      "%.3g",
                      stream->name, (long long)(stream->high + stream->low), (long long)data->num_tokens,
                      stream->sum / (double)data->num_tokens);
}

/* ---- a sample ------------------------------------------------------------------------------------------------- */

static bool weight_has_zero(const float *weight, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (fabsf(weight[i]) < 1e-6f) return true;
    return false;
}

/* The final norm on rows stored before it, for the tests that follow. */
static void normalise(const mtp_verifier *verifier, float *hidden, int64_t count)
{
    const mtp_verifier_config *config = mtp_verifier_get_config(verifier);
    const float *weight = mtp_verifier_norm(verifier);
    for (int64_t t = 0; t < count; t++) {
        float *row = hidden + t * config->hidden_size;
        const double rms = rms_of(row, NULL, config->hidden_size);
        const float factor = (float)(1 / sqrt(rms * rms + config->rms_norm_eps));
        for (int64_t i = 0; i < config->hidden_size; i++) row[i] *= factor * weight[i];
    }
}

static mtp_status read_hidden(const mtp_check *check, mtp__check_data *data, mtp_check_finding *finding)
{
    const int64_t width = mtp_verifier_get_config(check->verifier)->hidden_size;
    row_stream stream = {.name = "hidden_states",
                         .field = MTP__CHECK_HIDDEN,
                         .weight = mtp_verifier_norm(check->verifier),
                         .groups = 1,
                         .width = width,
                         .tolerance = mtp__check_tolerance(data, MTP__CHECK_HIDDEN)};
    const bool weighted = !weight_has_zero(stream.weight, width);
    if (!weighted) stream.weight = NULL;
    MTP_TRY(stream_field(check, &stream, data, data->hidden, finding));
    if (finding->reason || check->options.structure_only) return MTP_OK;
    if (weighted) judge_hidden(&stream, data, finding);
    if (data->entry.normalise) normalise(check->verifier, data->hidden, data->count);
    return MTP_OK;
}

/* K and V of every type. */
static mtp_status read_kv(const mtp_check *check, mtp__check_data *data, mtp_check_finding *finding)
{
    for (int field = 0; field < MTP__CHECK_FIELDS && !finding->reason; field++) {
        const int type = field / MTP__KV, part = field % MTP__KV;
        const mtp__verifier_key *key = &check->keys[type];
        if (!data->kv[field]) continue;
        row_stream stream = {.name = mtp__check_field_name(field),
                             .field = field,
                             .groups = key->heads,
                             .width = key->width,
                             .tolerance = mtp__check_tolerance(data, field)};
        MTP_TRY(stream_field(check, &stream, data, data->kv[field], finding));
        if (part == MTP__V && !check->options.structure_only && !data->v_scale.reason)
            judge_values(&stream, data, &data->v_scale);
    }
    return MTP_OK;
}

static mtp_status make_room(const mtp_check *check, mtp__check_data *data)
{
    const int64_t S = data->num_tokens, Hb = mtp_verifier_get_config(check->verifier)->hidden_size;
    data->count = S < MTP__CHECK_WINDOW ? S : MTP__CHECK_WINDOW;
    data->begin = data->entry.prompt_len - data->count / 2;
    if (data->begin > S - data->count) data->begin = S - data->count;
    if (data->begin < 0) data->begin = 0;
    data->ids = malloc((size_t)S * sizeof *data->ids);
    data->mask = malloc((size_t)S);
    data->hidden = malloc((size_t)(data->count * Hb) * sizeof *data->hidden);
    bool complete = data->ids && data->mask && data->hidden;
    for (int field = 0; field < MTP__CHECK_FIELDS; field++) {
        const mtp__verifier_key *key = &check->keys[field / MTP__KV];
        if (key->heads == 0) continue;
        data->kv[field] = malloc((size_t)(data->count * key->heads * key->width) * sizeof(float));
        complete = complete && data->kv[field];
    }
    return complete ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "no memory for a sample of %lld tokens", (long long)S);
}

mtp_status mtp__check_read(const mtp_check *check, int64_t index, const mtp_safetensors *file, mtp__check_data *data,
                           mtp_check_finding *finding)
{
    *finding = (mtp_check_finding){.index = -1};
    MTP_TRY(mtp__check_open(check, index, file, data, finding));
    if (finding->reason) return MTP_OK;
    MTP_TRY(make_room(check, data));
    mtp__check_test_origin(check, data, finding);
    if (!finding->reason) MTP_TRY(mtp__check_read_integers(check, data, finding));
    if (!finding->reason) MTP_TRY(read_hidden(check, data, finding));
    if (finding->reason && finding->reason != MTP_CHECK_HIDDEN_NORM && finding->reason != MTP_CHECK_SCALE)
        return MTP_OK;
    /* a NaN or a zero row in K/V outranks what was found about a scale */
    mtp_check_finding rows = {0};
    MTP_TRY(read_kv(check, data, &rows));
    if (rows.reason) *finding = rows;
    if (!finding->reason && !check->options.structure_only) MTP_TRY(mtp__check_test_keys(check, data, finding));
    return MTP_OK;
}

void mtp__check_settle(const mtp__check_data *data, mtp_check_finding *finding)
{
    static const bool explains_scale[MTP_CHECK_REASONS] = {
        [MTP_CHECK_SWAPPED] = true, [MTP_CHECK_K_ROPE] = true, [MTP_CHECK_K_SHIFTED] = true};
    const mtp_check_reason reason = finding->reason;
    if (reason != MTP_CHECK_GOOD && reason < MTP_CHECK_REPEATED_ROWS) return;
    if (data->v_scale.reason && reason != MTP_CHECK_HIDDEN_NORM && !explains_scale[reason]) *finding = data->v_scale;
    const bool explains_repeated = explains_scale[reason] || reason == MTP_CHECK_HIDDEN_NORM ||
                                   reason == MTP_CHECK_HIDDEN_SHIFTED || reason == MTP_CHECK_V_SHIFTED;
    if (data->repeated.reason && !explains_repeated) *finding = data->repeated;
}
