/* K and V against the sample's tokens and hidden states, by ridge regression.
 *
 * K and V of a token are functions of the residual stream, which is not stored; but its two ends are: the token's
 * embedding at the start, the hidden state at the end. A linear map from both, learnt on up to 64 samples of the data
 * set, predicts V, and K turned back by its position, at the token itself far better than at its neighbours, and those
 * of another sample not at all. Figures: README. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/real.h"
#include "base/rng.h"
#include "base/text.h"
#include "validate/check.h"

enum { LAGS = 3, AT_ONCE = 4, MIN_FEATURES = 24, ROWS_PER_FEATURE = 5, MIN_SAMPLES = 4 };
static const int lag_of[LAGS] = {0, 1, -1};
/* Strength of the ridge, of the mean eigenvalue; the least R^2 that a relation is used with; of the typical R^2, what a
 * sample must reach, and by what a lag must win. */
static const double RIDGE = 1e-3, LEAST = 0.05, REACH = 0.25, MARGIN = 0.1;

static const char *const tests[MTP__CHECK_FIELDS] = {"local K follows from the text", "local V follows from the text",
                                                     "global K follows from the text",
                                                     "global V follows from the text"};

/* ---- features and targets ------------------------------------------------------------------------------------- */

static int64_t num_inputs(const mtp_check *check)
{
    return 2 * check->features + 1;
}

/* A row of length 1; beyond `features` values each of them is added to SPREAD features or taken from them. */
static void normalised(const float *row, int64_t width, const mtp__check_mix *mix, int64_t features, double *out)
{
    double square = 1e-30;
    for (int64_t i = 0; i < width; i++) square += (double)row[i] * (double)row[i];
    const double factor = 1 / sqrt(square);
    for (int64_t f = 0; f < features; f++) out[f] = mix ? 0 : (double)row[f];
    for (int64_t i = 0; i < width * MTP__CHECK_SPREAD && mix; i++)
        out[mix[i].feature] += (double)(mix[i].sign * row[i / MTP__CHECK_SPREAD]);
    for (int64_t f = 0; f < features; f++) out[f] *= factor;
}

/* [count, inputs]: embedding and hidden state of each token of the window, each of length 1, and a constant. */
static mtp_status make_inputs(const mtp_check *check, const mtp__check_data *data, double **inputs)
{
    const mtp_view table = mtp_verifier_embedding(check->verifier);
    const int64_t Hb = table.shape[1], n = num_inputs(check);
    float *row = malloc((size_t)Hb * sizeof *row);
    *inputs = malloc((size_t)(data->count * n) * sizeof **inputs);
    if (!row || !*inputs) {
        free(row);
        free(*inputs);
        *inputs = NULL;
        return MTP_FAIL(MTP_E_MEMORY, "no memory for features of %lld tokens", (long long)data->count);
    }
    for (int64_t t = 0; t < data->count; t++) {
        double *to = *inputs + t * n;
        const size_t at = (size_t)(data->ids[data->begin + t] * table.stride[0]) * mtp_dtype_size(table.dtype);
        mtp__real_to_f32(row, (const char *)table.data + at, table.dtype, Hb);
        normalised(row, Hb, check->mix, check->features, to);
        normalised(data->hidden + t * Hb, Hb, check->mix, check->features, to + check->features);
        to[n - 1] = 0.1;
    }
    free(row);
    return MTP_OK;
}

static int64_t num_targets(const mtp__verifier_key *key)
{
    const int64_t width = key->heads * key->width;
    return width < MTP__CHECK_TARGETS ? width : MTP__CHECK_TARGETS;
}

/* Some dimensions of row t of a field; of K turned back as if it were the row of token t + lag. */
static void make_targets(const mtp_check *check, const mtp__check_data *data, int field, int64_t t, int lag,
                         float *scratch, double *out)
{
    const mtp__verifier_key *key = &check->keys[field / MTP__KV];
    const int64_t width = key->heads * key->width, targets = num_targets(key);
    const float *row = data->kv[field] + t * width;
    if (field % MTP__KV == MTP__K) {
        mtp__check_unrotate(key, (double)(data->begin + t + lag), row, scratch);
        row = scratch;
    }
    for (int64_t i = 0; i < targets; i++) out[i] = (double)row[i * width / targets];
}

/* ---- learning ------------------------------------------------------------------------------------------------- */

/* Sums over the rows of the learning samples. */
typedef struct moments {
    double *inputs;                            /* [n, n] sum of f f' (lower half) */
    double *products[MTP__CHECK_FIELDS][LAGS]; /* [targets, n] sum of y_t f_{t+lag}' */
    double *totals[MTP__CHECK_FIELDS][LAGS];   /* [targets] sum of y; [targets] sum of y^2 */
    int64_t rows[LAGS];
} moments;

static void free_sums(moments *sums)
{
    free(sums->inputs);
    for (int field = 0; field < MTP__CHECK_FIELDS; field++)
        for (int lag = 0; lag < LAGS; lag++) {
            free(sums->products[field][lag]);
            free(sums->totals[field][lag]);
        }
}

static bool has_field(const mtp_check *check, int field)
{
    const mtp__verifier_key *key = &check->keys[field / MTP__KV];
    return key->heads && (field % MTP__KV == MTP__V || key->frequency);
}

static mtp_status make_sums(const mtp_check *check, moments *sums)
{
    const size_t n = (size_t)num_inputs(check);
    bool complete = (sums->inputs = calloc(n * n, sizeof(double))) != NULL;
    for (int field = 0; field < MTP__CHECK_FIELDS; field++) {
        if (!has_field(check, field)) continue;
        const size_t targets = (size_t)num_targets(&check->keys[field / MTP__KV]);
        for (int lag = 0; lag < LAGS; lag++) {
            sums->products[field][lag] = calloc(targets * n, sizeof(double));
            sums->totals[field][lag] = calloc(2 * targets, sizeof(double));
            complete = complete && sums->products[field][lag] && sums->totals[field][lag];
        }
    }
    return complete ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "no memory to learn how K/V follow from tokens");
}

/* products += y x' of AT_ONCE tokens: what is added up passes through the cache once for all of them. */
static void add_products(double y[AT_ONCE][MTP__CHECK_TARGETS], const double *const x[AT_ONCE], int64_t targets,
                         int64_t n, double *products)
{
    for (int64_t i = 0; i < targets; i++) {
        double *to = products + i * n;
        const double a = y[0][i], b = y[1][i], c = y[2][i], d = y[3][i];
        for (int64_t j = 0; j < n; j++) to[j] += (a * x[0][j] + b * x[1][j]) + (c * x[2][j] + d * x[3][j]);
    }
}

static void add_field(const mtp_check *check, const mtp__check_data *data, const double *inputs, int field,
                      float *scratch, moments *sums)
{
    const int64_t n = num_inputs(check), targets = num_targets(&check->keys[field / MTP__KV]);
    for (int lag = 0; lag < LAGS; lag++) {
        double *totals = sums->totals[field][lag];
        for (int64_t t = 0; t < data->count; t += AT_ONCE) {
            double y[AT_ONCE][MTP__CHECK_TARGETS] = {{0}};
            const double *x[AT_ONCE] = {inputs, inputs, inputs, inputs};
            for (int64_t k = 0; k < AT_ONCE; k++) {
                const int64_t from = t + k + lag_of[lag];
                if (t + k >= data->count || from < 0 || from >= data->count) continue;
                x[k] = inputs + from * n;
                make_targets(check, data, field, t + k, lag_of[lag], scratch, y[k]);
                for (int64_t i = 0; i < targets; i++) {
                    totals[i] += y[k][i];
                    totals[targets + i] += y[k][i] * y[k][i];
                }
            }
            add_products(y, x, targets, n, sums->products[field][lag]);
        }
    }
}

static mtp_status add_sample(const mtp_check *check, const mtp__check_data *data, moments *sums)
{
    const int64_t n = num_inputs(check);
    double *inputs = NULL;
    MTP_TRY(make_inputs(check, data, &inputs));
    for (int64_t t = 0; t < data->count; t++) {
        const double *f = inputs + t * n;
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j <= i; j++) sums->inputs[i * n + j] += f[i] * f[j];
    }
    for (int lag = 0; lag < LAGS; lag++) sums->rows[lag] += data->count - abs(lag_of[lag]);
    mtp_status status = MTP_OK;
    for (int field = 0; field < MTP__CHECK_FIELDS && status == MTP_OK; field++) {
        if (!has_field(check, field)) continue;
        const mtp__verifier_key *key = &check->keys[field / MTP__KV];
        float *scratch = malloc((size_t)(key->heads * key->width) * sizeof *scratch);
        if (scratch)
            add_field(check, data, inputs, field, scratch, sums);
        else
            status = MTP_FAIL(MTP_E_MEMORY, "no memory for a row of K");
        free(scratch);
    }
    free(inputs);
    return status;
}

/* Cholesky factor, in place, of the lower half of a [n, n] with the ridge added. */
static void factorise(double *a, int64_t n)
{
    double trace = 0;
    for (int64_t i = 0; i < n; i++) trace += a[i * n + i];
    for (int64_t i = 0; i < n; i++) a[i * n + i] += RIDGE * trace / (double)n;
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = j; i < n; i++) {
            double sum = a[i * n + j];
            for (int64_t k = 0; k < j; k++) sum -= a[i * n + k] * a[j * n + k];
            a[i * n + j] = i == j ? sqrt(fmax(sum, 1e-30)) : sum / a[j * n + j];
        }
    }
}

/* x becomes (L L')^-1 x. */
static void solve(const double *factor, int64_t n, double *x)
{
    for (int64_t i = 0; i < n; i++) {
        for (int64_t k = 0; k < i; k++) x[i] -= factor[i * n + k] * x[k];
        x[i] /= factor[i * n + i];
    }
    for (int64_t i = n - 1; i >= 0; i--) {
        for (int64_t k = i + 1; k < n; k++) x[i] -= factor[k * n + i] * x[k];
        x[i] /= factor[i * n + i];
    }
}

/* Turn sums of products into weights; the share of variance that they explain: with (A + r) w = b it is w'b less what
 * the mean explains, to the order of the ridge. */
static double solve_lag(const double *factor, int64_t n, int64_t targets, int64_t rows, double *products,
                        const double *totals)
{
    double explained = 0, variance = 1e-30;
    for (int64_t i = 0; i < targets; i++) {
        double *w = products + i * n, square = 0;
        const double mean = totals[i] / (double)rows;
        double *b = malloc((size_t)n * sizeof *b);
        if (!b) return -1;
        memcpy(b, w, (size_t)n * sizeof *b);
        solve(factor, n, w);
        for (int64_t j = 0; j < n; j++) square += w[j] * b[j];
        free(b);
        explained += square - mean * totals[i];
        variance += totals[targets + i] - mean * totals[i];
    }
    return explained / variance;
}

/* The lag at which this field follows best becomes the relation. */
static mtp_status settle(mtp_check *check, int field, moments *sums)
{
    const int64_t n = num_inputs(check), targets = num_targets(&check->keys[field / MTP__KV]);
    mtp__check_relation *relation = &check->relations[field];
    double best = -INFINITY;
    relation->mean = malloc((size_t)targets * sizeof *relation->mean);
    relation->weight = malloc((size_t)(targets * n) * sizeof *relation->weight);
    if (!relation->mean || !relation->weight) return MTP_FAIL(MTP_E_MEMORY, "no memory for a relation");
    for (int lag = 0; lag < LAGS; lag++) {
        double *totals = sums->totals[field][lag];
        const double share = solve_lag(sums->inputs, n, targets, sums->rows[lag], sums->products[field][lag], totals);
        if (share <= best) continue;
        best = share;
        for (int64_t i = 0; i < targets; i++) {
            relation->mean[i] = totals[i] / (double)sums->rows[lag];
            for (int64_t j = 0; j < n; j++) relation->weight[j * targets + i] = sums->products[field][lag][i * n + j];
        }
    }
    relation->possible = true;
    return MTP_OK;
}

/* ---- a sample against the relations --------------------------------------------------------------------------- */

/* R^2 at each lag: 1 - residual / variance around the data set's mean. */
static void compare(const mtp_check *check, const mtp__check_data *data, const double *inputs, int field,
                    float *scratch, double share[LAGS])
{
    const int64_t n = num_inputs(check), targets = num_targets(&check->keys[field / MTP__KV]);
    const mtp__check_relation *relation = &check->relations[field];
    double y[MTP__CHECK_TARGETS], residual[LAGS] = {0}, variance[LAGS] = {0};
    for (int64_t from = 0; from < data->count; from++) {
        double predicted[MTP__CHECK_TARGETS] = {0};
        for (int64_t j = 0; j < n; j++)
            for (int64_t i = 0; i < targets; i++)
                predicted[i] += relation->weight[j * targets + i] * inputs[from * n + j];
        for (int lag = 0; lag < LAGS; lag++) {
            const int64_t t = from - lag_of[lag];
            if (t < 0 || t >= data->count) continue;
            make_targets(check, data, field, t, lag_of[lag], scratch, y);
            for (int64_t i = 0; i < targets; i++) {
                residual[lag] += (y[i] - predicted[i]) * (y[i] - predicted[i]);
                variance[lag] += (y[i] - relation->mean[i]) * (y[i] - relation->mean[i]);
            }
        }
    }
    for (int lag = 0; lag < LAGS; lag++) share[lag] = 1 - residual[lag] / fmax(variance[lag], 1e-30);
}

static mtp_status compare_all(const mtp_check *check, const mtp__check_data *data,
                              double share[MTP__CHECK_FIELDS][LAGS])
{
    double *inputs = NULL;
    MTP_TRY(make_inputs(check, data, &inputs));
    mtp_status status = MTP_OK;
    for (int field = 0; field < MTP__CHECK_FIELDS && status == MTP_OK; field++) {
        if (!check->relations[field].possible) continue;
        const mtp__verifier_key *key = &check->keys[field / MTP__KV];
        float *scratch = malloc((size_t)(key->heads * key->width) * sizeof *scratch);
        if (scratch)
            compare(check, data, inputs, field, scratch, share[field]);
        else
            status = MTP_FAIL(MTP_E_MEMORY, "no memory for a row of K");
        free(scratch);
    }
    free(inputs);
    return status;
}

static void judge(const mtp_check *check, int field, const mtp__check_data *data, const double share[LAGS],
                  mtp_check_finding *finding)
{
    const double typical = check->relations[field].typical;
    const int best = share[1] > share[2] ? 1 : 2;
    const char *name = mtp__check_field_name(field);
    if (share[best] > share[0] + MARGIN * typical && share[best] >= REACH * typical)
        mtp__check_report(
            finding, field % MTP__KV == MTP__K ? MTP_CHECK_K_SHIFTED : MTP_CHECK_V_SHIFTED, data->begin,
            "%s: row t follows from token and hidden state t%s1 (R^2 %.2f), not t (%.2f): rows are shifted "
            "by one token",
            name, best == 1 ? "+" : "-", share[best], share[0]);
    else if (share[0] < REACH * typical)
        mtp__check_report(finding, MTP_CHECK_OTHER_KV, data->begin,
                          "%s does not follow from this sample's tokens and hidden states (R^2 %.2f, %.2f in most "
                          "samples): it is of another text or layer",
                          name, share[0], typical);
}

mtp_status mtp__check_test_relations(const mtp_check *check, const mtp__check_data *data, mtp_check_finding *finding)
{
    double share[MTP__CHECK_FIELDS][LAGS];
    if (data->count < MTP__CHECK_MIN_TOKENS || check->features == 0) return MTP_OK;
    MTP_TRY(compare_all(check, data, share));
    for (int field = 0; field < MTP__CHECK_FIELDS && !finding->reason; field++)
        if (check->relations[field].possible) judge(check, field, data, share[field], finding);
    return MTP_OK;
}

/* ---- learning, the whole -------------------------------------------------------------------------------------- */

/* The samples to learn from: evenly spread, long enough. */
static int64_t pick_samples(const mtp_check *check, int64_t picked[MTP__CHECK_LEARN], int64_t *rows)
{
    const int64_t count = check->dataset->count, wanted = count < MTP__CHECK_LEARN ? count : MTP__CHECK_LEARN;
    int64_t found = 0;
    *rows = 0;
    for (int64_t i = 0; i < wanted; i++) {
        const int64_t index = i * count / wanted, tokens = mtp__dataset_at(check->dataset, index).num_tokens;
        if (tokens < MTP__CHECK_MIN_TOKENS) continue;
        picked[found++] = index;
        *rows += tokens < MTP__CHECK_WINDOW ? tokens : MTP__CHECK_WINDOW;
    }
    return found;
}

static mtp_status make_mix(mtp_check *check)
{
    const int64_t Hb = mtp_verifier_get_config(check->verifier)->hidden_size;
    if (check->features == Hb) return MTP_OK;
    mtp__rng rng = mtp__rng_make(5, 0);
    check->mix = malloc((size_t)(Hb * MTP__CHECK_SPREAD) * sizeof *check->mix);
    if (!check->mix) return MTP_FAIL(MTP_E_MEMORY, "no memory for a projection");
    for (int64_t i = 0; i < Hb * MTP__CHECK_SPREAD; i++) {
        const uint32_t word = mtp__rng_u32(&rng);
        check->mix[i].sign = word >> 31 ? 1.0f : -1.0f;
        check->mix[i].feature = (int32_t)((word & 0x7fffffff) % (uint32_t)check->features);
    }
    return MTP_OK;
}

/* What a pass over the learning samples does with one of them. */
typedef mtp_status (*visit_sample)(mtp_check *check, const mtp__check_data *data, void *user);

/* Every picked sample that is whole. */
static mtp_status visit(mtp_check *check, const int64_t *picked, int64_t count, visit_sample each, void *user)
{
    mtp_status status = MTP_OK;
    for (int64_t i = 0; i < count && status == MTP_OK; i++) {
        mtp__check_data data;
        mtp_check_finding finding;
        status = mtp__check_read(check, picked[i], NULL, &data, &finding);
        if (status == MTP_OK) mtp__check_settle(&data, &finding);
        if (status == MTP_OK && !finding.reason) status = each(check, &data, user);
        mtp__check_close(&data);
    }
    return status;
}

static mtp_status visit_sums(mtp_check *check, const mtp__check_data *data, void *user)
{
    return add_sample(check, data, user);
}

/* R^2 of every field at its best lag, sample after sample. */
typedef struct share_list {
    double of[MTP__CHECK_FIELDS][MTP__CHECK_LEARN];
    int64_t count;
} share_list;

static mtp_status visit_shares(mtp_check *check, const mtp__check_data *data, void *user)
{
    share_list *all = user;
    double share[MTP__CHECK_FIELDS][LAGS] = {{0}};
    MTP_TRY(compare_all(check, data, share));
    for (int field = 0; field < MTP__CHECK_FIELDS; field++)
        all->of[field][all->count] = fmax(share[field][0], fmax(share[field][1], share[field][2]));
    all->count++;
    return MTP_OK;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static mtp_status settle_all(mtp_check *check, moments *sums, const int64_t *picked, int64_t count)
{
    share_list all = {.count = 0};
    factorise(sums->inputs, num_inputs(check));
    for (int field = 0; field < MTP__CHECK_FIELDS; field++)
        if (has_field(check, field)) MTP_TRY(settle(check, field, sums));
    MTP_TRY(visit(check, picked, count, visit_shares, &all));
    for (int field = 0; field < MTP__CHECK_FIELDS; field++) {
        mtp__check_relation *relation = &check->relations[field];
        if (!relation->possible) continue;
        if (all.count == 0) {
            relation->possible = false;
            continue;
        }
        qsort(all.of[field], (size_t)all.count, sizeof(double), by_value);
        relation->typical = all.of[field][all.count / 2];
        relation->possible = relation->typical >= LEAST;
        mtp__check_note(check, tests[field], relation->possible, "R^2 %.2f in the median of %lld samples",
                        relation->typical, (long long)all.count);
    }
    return MTP_OK;
}

mtp_status mtp__check_learn(mtp_check *check)
{
    const int64_t Hb = mtp_verifier_get_config(check->verifier)->hidden_size;
    int64_t picked[MTP__CHECK_LEARN], rows = 0;
    const int64_t count = pick_samples(check, picked, &rows);
    int64_t features = rows / (2 * ROWS_PER_FEATURE);
    if (features > MTP__CHECK_FEATURES) features = MTP__CHECK_FEATURES;
    if (features > Hb) features = Hb;
    if (count < MIN_SAMPLES || features < MIN_FEATURES) {
        mtp__check_note(check, "K/V follow from the text", false,
                        "not enough evidence: %lld sample%s of %d tokens or more, %lld tokens", (long long)count,
                        mtp__plural(count), MTP__CHECK_MIN_TOKENS, (long long)rows);
        return MTP_OK;
    }
    check->features = features;
    MTP_TRY(make_mix(check));
    moments sums = {0};
    mtp_status status = make_sums(check, &sums);
    if (status == MTP_OK) status = visit(check, picked, count, visit_sums, &sums);
    if (status == MTP_OK && sums.rows[0] < rows / 2) {
        check->features = 0;
        mtp__check_note(check, "K/V follow from the text", false,
                        "not enough evidence: too few of %lld samples are whole", (long long)count);
    } else if (status == MTP_OK) {
        status = settle_all(check, &sums, picked, count);
    }
    free_sums(&sums);
    return status;
}
