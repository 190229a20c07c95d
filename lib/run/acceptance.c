#include "run/acceptance.h"

double mtp_acceptance_rate(const mtp_acceptance *acceptance, int32_t k)
{
    if (acceptance->count == 0) return 0;
    return (double)acceptance->accepted[k] / (double)acceptance->count;
}

double mtp_acceptance_conditional(const mtp_acceptance *acceptance, int32_t k)
{
    const int64_t given = k == 0 ? acceptance->count : acceptance->accepted[k - 1];
    return given == 0 ? 0 : (double)acceptance->accepted[k] / (double)given;
}

double mtp_acceptance_length(const mtp_acceptance *acceptance, int32_t num_speculative_steps)
{
    int64_t total = 0;
    for (int32_t k = 0; k < num_speculative_steps; k++) total += acceptance->accepted[k];
    return acceptance->count == 0 ? 0 : (double)total / (double)acceptance->count;
}

int32_t mtp__acceptance_kept(const int32_t *drafts, const int32_t *targets, int64_t R, int32_t K, int64_t r)
{
    int32_t kept = 0;
    while (kept < K && drafts[kept * R + r] == targets[kept * R + r]) kept++;
    return kept;
}

int64_t mtp__acceptance_first(int64_t prompt_len)
{
    return prompt_len > 0 ? prompt_len - 1 : 0;
}

int64_t mtp__acceptance_positions(int64_t prompt_len, int64_t num_tokens, int32_t K)
{
    const int64_t end = num_tokens - 1 - K; /* the first t with t + 1 + K = S */
    const int64_t first = mtp__acceptance_first(prompt_len);
    return end > first ? end - first : 0;
}

int32_t mtp__acceptance_bucket(int64_t value)
{
    int32_t bucket = 0;
    while (value > 0 && bucket < MTP_EVAL_BUCKETS - 1) {
        value /= 2;
        bucket++;
    }
    return bucket;
}

/* One round that kept `kept` drafts. */
static void add(mtp_acceptance *acceptance, int32_t kept)
{
    acceptance->count++;
    for (int32_t k = 0; k < kept; k++) acceptance->accepted[k]++;
}

void mtp__acceptance_document(mtp_evaluation *evaluation, int64_t sample, int64_t first, int64_t num_tokens,
                              const int32_t *kept, int64_t count)
{
    mtp_sample_figures *own = &evaluation->samples[sample];
    mtp_bucket_figures *length = &evaluation->by_length[mtp__acceptance_bucket(num_tokens)];
    int64_t next_round = 0;
    for (int64_t i = 0; i < count; i++) {
        mtp_bucket_figures *position = &evaluation->by_position[mtp__acceptance_bucket(first + i)];
        add(&own->positions, kept[i]);
        add(&evaluation->positions, kept[i]);
        add(&position->positions, kept[i]);
        add(&length->positions, kept[i]);
        if (i != next_round) continue;
        add(&own->rounds, kept[i]);
        add(&evaluation->rounds, kept[i]);
        add(&position->rounds, kept[i]);
        add(&length->rounds, kept[i]);
        next_round = i + kept[i] + 1;
    }
}

/* Bounds of every bucket; the number of buckets up to the last that counted something. */
static int32_t close_buckets(mtp_bucket_figures *buckets)
{
    int32_t used = 0;
    for (int32_t i = 0; i < MTP_EVAL_BUCKETS; i++) {
        buckets[i].begin = i == 0 ? 0 : INT64_C(1) << (i - 1);
        buckets[i].end = i == MTP_EVAL_BUCKETS - 1 ? INT64_MAX : INT64_C(1) << i;
        if (buckets[i].positions.count > 0) used = i + 1;
    }
    return used;
}

void mtp__acceptance_finish(mtp_evaluation *evaluation)
{
    const int32_t K = evaluation->num_speculative_steps;
    int64_t with_rounds = 0;
    for (int64_t i = 0; i < evaluation->num_samples; i++) {
        const mtp_sample_figures *sample = &evaluation->samples[i];
        if (sample->rounds.count == 0) continue;
        with_rounds++;
        for (int32_t k = 0; k < K; k++) {
            evaluation->rounds_sample_mean[k] += mtp_acceptance_rate(&sample->rounds, k);
            evaluation->positions_sample_mean[k] += mtp_acceptance_rate(&sample->positions, k);
        }
        evaluation->rounds_length_sample_mean += mtp_acceptance_length(&sample->rounds, K);
        evaluation->positions_length_sample_mean += mtp_acceptance_length(&sample->positions, K);
    }
    evaluation->num_short = evaluation->num_samples - with_rounds;
    const double divisor = with_rounds > 0 ? (double)with_rounds : 1;
    for (int32_t k = 0; k < K; k++) {
        evaluation->rounds_sample_mean[k] /= divisor;
        evaluation->positions_sample_mean[k] /= divisor;
    }
    evaluation->rounds_length_sample_mean /= divisor;
    evaluation->positions_length_sample_mean /= divisor;
    evaluation->num_position_buckets = close_buckets(evaluation->by_position);
    evaluation->num_length_buckets = close_buckets(evaluation->by_length);
}
