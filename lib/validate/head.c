/* The verifier's head on supervised positions: does argmax(head(h_t)) meet token t + 1 as often as it should?
 *
 * The head is the embedding table (tied); its soft-cap is monotone and moves no argmax. In a greedy continuation nearly
 * every position hits (99 % and more on the sample data, the rest are ties of bf16), in given text perhaps half. In
 * the sample data a wrong lag hits 4 % at most, but where text repeats itself any lag may hit: so a lag is believed
 * only when it hits twice as often as lag 1. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/real.h"
#include "validate/check.h"

enum { LAGS = 3, MIN_POSITIONS = 16, ALIGNMENT = 64 };
/* Fewer hits than LEAST say that tokens and hidden states have nothing to do with each other; a lag needs CLEAR. */
static const double LEAST = 0.1, CLEAR = 0.2;

static mtp_linear_args project(const mtp_check *check, float *rows, int64_t count)
{
    const mtp_view head = mtp_verifier_embedding(check->verifier);
    return (mtp_linear_args){.x = mtp_view_2d(rows, MTP_F32, count, head.shape[1]),
                             .w = head,
                             .y = mtp_view_2d(check->logits, MTP_F32, count, head.shape[0]),
                             .write = MTP_OVERWRITE,
                             .scratch = {check->scratch, check->scratch_size}};
}

mtp_status mtp__check_head_prepare(mtp_check *check)
{
    const mtp_verifier_config *config = mtp_verifier_get_config(check->verifier);
    const int64_t positions = check->options.head_positions, samples = check->options.head_samples;
    check->logits = malloc((size_t)(positions * config->vocab_size) * sizeof *check->logits);
    const mtp_linear_args args = project(check, NULL, positions);
    check->scratch_size = check->context->ops->linear_fwd_scratch(check->context->device, &args);
    check->scratch_size = (check->scratch_size / ALIGNMENT + 1) * ALIGNMENT; /* as aligned_alloc wants it */
    check->scratch = aligned_alloc(ALIGNMENT, check->scratch_size);
    if (!check->logits || !check->scratch)
        return MTP_FAIL(MTP_E_MEMORY, "no memory for the logits of %lld positions", (long long)positions);
    mtp__check_note(check, "next token from hidden states", true, "the head on %lld positions of %lld samples",
                    (long long)positions,
                    (long long)(check->dataset->count < samples ? check->dataset->count : samples));
    return MTP_OK;
}

/* Is sample `index` one of the evenly spread ones that get the test? */
static bool chosen(const mtp_check *check, int64_t index)
{
    const int64_t count = check->dataset->count, samples = check->options.head_samples;
    return count <= samples || index == 0 || index * samples / count != (index - 1) * samples / count;
}

/* Positions t of the window whose token t + 1 is supervised and that have both neighbours; `positions` at most. */
static int64_t pick(const mtp__check_data *data, int64_t positions, int64_t *picked)
{
    int64_t total = 0, seen = 0, count = 0;
    const int64_t first = data->begin, last = data->begin + data->count;
    for (int64_t t = first; t < last && t + 2 < data->num_tokens; t++) total += data->mask[t + 1];
    const int64_t wanted = total < positions ? total : positions;
    for (int64_t t = first; t < last && t + 2 < data->num_tokens; t++) {
        if (!data->mask[t + 1]) continue;
        if (count < wanted && seen == count * total / wanted) picked[count++] = t;
        seen++;
    }
    return count;
}

static int64_t argmax(const float *logits, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static void judge(const mtp__check_data *data, const int64_t *picked, const int64_t *found, int64_t count,
                  mtp_check_finding *finding)
{
    int64_t hits[LAGS] = {0}, first = -1;
    for (int64_t i = 0; i < count; i++) {
        for (int lag = 0; lag < LAGS; lag++) hits[lag] += found[i] == data->ids[picked[i] + lag];
        if (first < 0 && found[i] != data->ids[picked[i] + 1]) first = picked[i];
    }
    const int best = hits[2] > hits[0] ? 2 : 0;
    if ((double)hits[best] >= CLEAR * (double)count && hits[best] > 2 * hits[1])
        mtp__check_report(finding, MTP_CHECK_HIDDEN_SHIFTED, first,
                          "hidden_states: the verifier's head on row t gives token %s in %lld of %lld rows and token "
                          "t+1 in %lld: row t holds position t%s1",
                          best ? "t+2" : "t", (long long)hits[best], (long long)count, (long long)hits[1],
                          best ? "+" : "-");
    else if ((double)hits[1] < LEAST * (double)count)
        mtp__check_report(finding, MTP_CHECK_TOKENS, first,
                          "the verifier's head on hidden_states gives the next token in %lld of %lld supervised rows: "
                          "token_ids are of another tokenizer, or of another text or verifier than hidden_states",
                          (long long)hits[1], (long long)count);
}

mtp_status mtp__check_test_head(mtp_check *check, const mtp__check_data *data, mtp_check_finding *finding)
{
    const int64_t positions = check->options.head_positions;
    const mtp_verifier_config *config = mtp_verifier_get_config(check->verifier);
    if (!chosen(check, data->index)) return MTP_OK;
    int64_t *picked = malloc(2 * (size_t)positions * sizeof *picked);
    float *rows = malloc((size_t)(positions * config->hidden_size) * sizeof *rows);
    mtp_status status = picked && rows ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "no memory for rows of hidden_states");
    const int64_t count = status == MTP_OK ? pick(data, positions, picked) : 0;
    if (count >= MIN_POSITIONS) {
        const int64_t Hb = config->hidden_size;
        for (int64_t i = 0; i < count; i++)
            memcpy(rows + i * Hb, data->hidden + (picked[i] - data->begin) * Hb, (size_t)Hb * sizeof *rows);
        const mtp_linear_args args = project(check, rows, count);
        pthread_mutex_lock(&check->head);
        status = check->context->ops->linear_fwd(check->context->device, &args);
        for (int64_t i = 0; i < count && status == MTP_OK; i++)
            picked[positions + i] = argmax(check->logits + i * config->vocab_size, config->vocab_size);
        pthread_mutex_unlock(&check->head);
        if (status == MTP_OK) judge(data, picked, picked + positions, count, finding);
    }
    free(picked);
    free(rows);
    return status;
}
