/* K against its norm and its position. K = RoPE(w n) with n of RMS 1, so K turned back by its own position and divided
 * by w has RMS 1 in every head, to the rounding of the stored type. Turned by another angle it has not, because w mixes
 * within the pairs. And where attention_k_eq_v, n is V itself. */
#include <math.h>
#include <stdlib.h>

#include "base/error.h"
#include "validate/check.h"

/* NOISE: below it K is taken as right. Medians of the sample data's 126 samples: right 0.0004 at most (bf16 rounding),
 * shifted by one 0.0040 or more, never turned 0.037 or more. Beyond it a hypothesis must win by a factor, so that the
 * power of the test, which the weights give, does not matter. */
static const double NOISE = 0.002, WINS = 0.5, LOW_SHARE = 0.1;
/* V against K, relative: 0.0037 at most when right, 0.18 or more when shifted by one. */
static const double SAME_V = 0.05;

void mtp__check_unrotate(const mtp__verifier_key *key, double position, const float *row, float *out)
{
    const int64_t pairs = key->width / 2;
    for (int64_t i = 0; i < pairs; i++) {
        const double angle = position * key->frequency[i];
        const double c = angle == 0 ? 1 : cos(angle), s = angle == 0 ? 0 : sin(angle);
        for (int64_t head = 0; head < key->heads; head++) {
            const float *in = row + head * key->width;
            float *turned = out + head * key->width;
            const double x = (double)in[i], y = (double)in[i + pairs];
            turned[i] = (float)(x * c + y * s);
            turned[i + pairs] = (float)(y * c - x * s);
        }
    }
}

static bool usable(const mtp__verifier_key *key)
{
    return key->heads && key->norm && key->frequency;
}

/* How far from 1 the RMS over w is in every head of the window. */
typedef struct deviations {
    double median;     /* of |RMS - 1| */
    int64_t high, low; /* rows with a head beyond the tolerance */
    int64_t first_high, first_low;
} deviations;

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Rows turned back by factor * (t + offset). A median, because one row in an odd place must not hide where the others
 * belong. */
static deviations deviate(const mtp__verifier_key *key, const mtp__check_data *data, const float *rows, double factor,
                          double offset, double tolerance, float *turned, double *off)
{
    const int64_t n = key->heads * key->width;
    deviations result = {.first_high = -1, .first_low = -1};
    for (int64_t t = 0; t < data->count; t++) {
        bool high = false, low = false;
        mtp__check_unrotate(key, factor * ((double)(data->begin + t) + offset), rows + t * n, turned);
        for (int64_t head = 0; head < key->heads; head++) {
            double square = 0;
            for (int64_t i = 0; i < key->width; i++) {
                const double value = (double)turned[head * key->width + i] / (double)key->norm[i];
                square += value * value;
            }
            const double deviation = sqrt(square / (double)key->width) - 1;
            off[t * key->heads + head] = fabs(deviation);
            high = high || deviation > tolerance;
            low = low || deviation < -tolerance;
        }
        if (high && result.high++ == 0) result.first_high = data->begin + t;
        if (low && result.low++ == 0) result.first_low = data->begin + t;
    }
    qsort(off, (size_t)(data->count * key->heads), sizeof *off, by_value);
    result.median = off[data->count * key->heads / 2];
    return result;
}

/* ---- verdicts ------------------------------------------------------------------------------------------------- */

/* dev: median when turned back by t, t + 1, t - 1, not at all; `other`: by t with the other kind of layer's norm and
 * rotation. */
static void judge_position(int type, const mtp__check_data *data, const double dev[4], double other, double tolerance,
                           mtp_check_finding *finding)
{
    const char *name = mtp__check_field_name(mtp__check_field(type, MTP__K));
    const double noise = tolerance > 0.05 ? tolerance : NOISE, best = dev[0] * WINS;
    if (dev[0] <= noise) return;
    if (other < best && other <= noise)
        mtp__check_report(finding, MTP_CHECK_SWAPPED, data->begin,
                          "%s fits norm and rotary embedding of the other kind of layer (deviation %.2g, of its own "
                          "%.2g): local and global are swapped",
                          name, other, dev[0]);
    else if (dev[3] < best && dev[3] <= fmin(dev[1], dev[2]))
        mtp__check_report(finding, MTP_CHECK_K_ROPE, data->begin,
                          "%s fits its norm without rotary embedding (deviation %.2g, with it %.2g): it was taken "
                          "before RoPE",
                          name, dev[3], dev[0]);
    else if (fmin(dev[1], dev[2]) < best)
        mtp__check_report(finding, MTP_CHECK_K_SHIFTED, data->begin,
                          "%s: row t fits rotary position t %s 1 (deviation %.2g, t itself %.2g): rows are shifted by "
                          "one token, or positions were counted from another start",
                          name, dev[1] < dev[2] ? "+" : "-", fmin(dev[1], dev[2]), dev[0]);
}

/* Rows that fit no position, a few or all. A low RMS alone can be honest, see rows.c. */
static void judge_scale(int type, const mtp__check_data *data, const deviations *own, mtp_check_finding *finding)
{
    const int64_t first = own->high ? own->first_high : own->first_low;
    if (own->high == 0 && (double)own->low <= LOW_SHARE * (double)data->count) return;
    mtp__check_report(finding, MTP_CHECK_SCALE, first,
                      "%s: turned back by its position and divided by k_norm's weight the RMS of a head is 1; in %lld "
                      "of %lld rows it is not, from token %lld on: not this layer's K, or not of these positions",
                      mtp__check_field_name(mtp__check_field(type, MTP__K)), (long long)(own->high + own->low),
                      (long long)data->count, (long long)first);
}

/* V of a full layer against K before its weight and rotation: mean relative distance, V of row t + lag. */
static double distance(const mtp__verifier_key *key, const mtp__check_data *data, int type, int64_t lag, float *turned)
{
    const int64_t n = key->heads * key->width;
    const float *k = data->kv[mtp__check_field(type, MTP__K)], *v = data->kv[mtp__check_field(type, MTP__V)];
    double sum = 0;
    int64_t rows = 0;
    for (int64_t t = 0; t < data->count; t++) {
        if (t + lag < 0 || t + lag >= data->count) continue;
        mtp__check_unrotate(key, (double)(data->begin + t), k + t * n, turned);
        double square = 0;
        for (int64_t i = 0; i < n; i++) {
            const double off = (double)turned[i] / (double)key->norm[i % key->width] - (double)v[(t + lag) * n + i];
            square += off * off;
        }
        sum += sqrt(square / (double)n);
        rows++;
    }
    return rows ? sum / (double)rows : INFINITY;
}

static void judge_pair(const mtp__verifier_key *key, const mtp__check_data *data, int type, double tolerance,
                       float *turned, mtp_check_finding *finding)
{
    const char *name = mtp__check_field_name(mtp__check_field(type, MTP__V));
    const double limit = fmax(SAME_V, tolerance), own = distance(key, data, type, 0, turned);
    if (own <= limit) return;
    const double after = distance(key, data, type, 1, turned), before = distance(key, data, type, -1, turned);
    if (fmin(after, before) <= limit)
        mtp__check_report(finding, MTP_CHECK_V_SHIFTED, data->begin,
                          "%s: K of token t, without weight and rotation, is V of row t %s 1 (attention_k_eq_v): rows "
                          "are shifted by one token",
                          name, after < before ? "+" : "-");
    else
        mtp__check_report(finding, MTP_CHECK_OTHER_KV, data->begin,
                          "%s is not K without weight and rotation, as attention_k_eq_v makes it (distance %.2g): K "
                          "and V are of different texts or layers",
                          name, own);
}

static void test_type(const mtp_check *check, const mtp__check_data *data, int type, float *turned, double *off,
                      mtp_check_finding *finding)
{
    const mtp__verifier_key *key = &check->keys[type], *twin = &check->keys[1 - type];
    const float *rows = data->kv[mtp__check_field(type, MTP__K)];
    const double tolerance = mtp__check_tolerance(data, mtp__check_field(type, MTP__K));
    const deviations own = deviate(key, data, rows, 1, 0, tolerance, turned, off);
    const double dev[4] = {own.median, deviate(key, data, rows, 1, 1, tolerance, turned, off).median,
                           deviate(key, data, rows, 1, -1, tolerance, turned, off).median,
                           deviate(key, data, rows, 0, 0, tolerance, turned, off).median};
    const bool comparable = usable(twin) && twin->heads * twin->width == key->heads * key->width;
    const double other = comparable ? deviate(twin, data, rows, 1, 0, tolerance, turned, off).median : INFINITY;
    judge_position(type, data, dev, other, tolerance, finding);
    if (!finding->reason) judge_scale(type, data, &own, finding);
    if (!finding->reason && key->is_value) judge_pair(key, data, type, tolerance, turned, finding);
}

mtp_status mtp__check_test_keys(const mtp_check *check, const mtp__check_data *data, mtp_check_finding *finding)
{
    if (data->count < MTP__CHECK_MIN_TOKENS) return MTP_OK;
    for (int type = 0; type < MTP_LAYER_TYPES && !finding->reason; type++) {
        const mtp__verifier_key *key = &check->keys[type], *twin = &check->keys[1 - type];
        const int64_t heads = key->heads > twin->heads ? key->heads : twin->heads;
        if (!usable(key)) continue;
        float *turned = malloc((size_t)(key->heads * key->width) * sizeof *turned);
        double *off = malloc((size_t)(data->count * heads) * sizeof *off);
        if (turned && off) test_type(check, data, type, turned, off, finding);
        const bool complete = turned && off;
        free(turned);
        free(off);
        if (!complete) return MTP_FAIL(MTP_E_MEMORY, "no memory for rows of K");
    }
    return MTP_OK;
}
