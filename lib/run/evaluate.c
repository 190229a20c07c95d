/* The evaluator: two passes over the data, one that drafts from its own argmax (acceptance), one fed by the data
 * (loss). */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "base/text.h"
#include "model/drafter.h"
#include "model/embedding.h"
#include "model/step.h"
#include "run/acceptance.h"
#include "run/evaluate.h"
#include "run/plan.h"

enum { DEFAULT_STEPS = 3, DEFAULT_TOKENS = 8192 };

struct mtp_evaluator {
    mtp_drafter *drafter;
    const mtp_dataset *dataset;
    mtp_evaluator_options options;  /* resolved: no zeros that mean a default, `loss` NULL */
    mtp_step_config loss;           /* teacher-fed */
    mtp__step *drafting, *teaching; /* teaching is NULL when only acceptance is wanted */
    int64_t num_batches;
    int64_t *batch_begin; /* [num_batches + 1] into samples */
    int64_t *samples;     /* indices in the data set, those with anything to compute */
    int64_t *prompt_len;  /* of the documents of the batch at hand */
    mtp__rows rows;
    int32_t *drafts;   /* [K, rows] */
    int32_t *kept;     /* [rows] */
    mtp__ranks *ranks; /* who shares the batches; NULL: alone */
    mtp_plan *plan;    /* of its device memory; NULL when that is somebody else's business */
    bool holds_embedding;
};

/* ---- layout --------------------------------------------------------------------------------------------------- */

static mtp_status resolve(mtp_evaluator *evaluator, const mtp_evaluator_options *options)
{
    const bool ordered = mtp_drafter_get_config(evaluator->drafter)->ordered;
    evaluator->options = *options;
    evaluator->options.loss = NULL;
    if (options->num_speculative_steps == 0) evaluator->options.num_speculative_steps = DEFAULT_STEPS;
    if (options->tokens_per_batch == 0) evaluator->options.tokens_per_batch = DEFAULT_TOKENS;
    const int32_t K = evaluator->options.num_speculative_steps;
    if (K < 1 || K > MTP_MAX_SPECULATIVE_STEPS)
        return MTP_FAIL(MTP_E_CONFIG, "num_speculative_steps is %d; it must be 1 to %d", K, MTP_MAX_SPECULATIVE_STEPS);
    if (options->tokens_per_batch < 0)
        return MTP_FAIL(MTP_E_CONFIG, "tokens_per_batch is %lld; it must be 1 or more",
                        (long long)options->tokens_per_batch);
    const mtp_step_config standard = {.head_mode = ordered ? MTP_HEAD_MASKED : MTP_HEAD_FLAT,
                                      .step_weight_beta = 0.6,
                                      .centroid_weight = ordered ? 1 : 0};
    evaluator->loss = options->loss ? *options->loss : standard;
    evaluator->loss.num_speculative_steps = K;
    evaluator->loss.position_offset = options->position_offset;
    evaluator->loss.feeding = MTP_FEED_TEACHER;
    return MTP_OK;
}

/* A sample that has neither a round nor a supervised step is never read. */
static bool wanted(const mtp_evaluator *evaluator, const mtp_sample_info *info)
{
    const int32_t K = evaluator->options.num_speculative_steps;
    if (mtp__acceptance_positions(info->prompt_len, info->num_tokens, K) > 0) return true;
    return !evaluator->options.acceptance_only && info->num_supervised > 0 && info->num_tokens > 2;
}

/* Batches of whole documents in the order of the data set, and the sizes of the largest. */
static mtp_status plan(mtp_evaluator *evaluator, int64_t *most_tokens, int64_t *most_documents)
{
    const int64_t num_samples = mtp_dataset_size(evaluator->dataset);
    int64_t rounds = 0, taken = 0, batches = 0, tokens = 0;
    for (int64_t i = 0; i < num_samples; i++) {
        const mtp_sample_info info = mtp_dataset_sample(evaluator->dataset, i);
        if (!wanted(evaluator, &info)) continue;
        rounds += mtp__acceptance_positions(info.prompt_len, info.num_tokens, evaluator->options.num_speculative_steps);
        if (taken == 0 || tokens + info.num_tokens > evaluator->options.tokens_per_batch) {
            evaluator->batch_begin[batches++] = taken;
            tokens = 0;
        }
        tokens += info.num_tokens;
        evaluator->samples[taken++] = i;
        const int64_t documents = taken - evaluator->batch_begin[batches - 1];
        if (tokens > *most_tokens) *most_tokens = tokens;
        if (documents > *most_documents) *most_documents = documents;
    }
    evaluator->batch_begin[batches] = taken;
    evaluator->num_batches = batches;
    if (rounds == 0)
        return MTP_FAIL(MTP_E_DATA,
                        "nothing to evaluate: of %lld sample%s none is long enough for a round of %d drafts, which "
                        "needs %d tokens from the first supervised one on (is loss_mask right?)",
                        (long long)num_samples, mtp__plural(num_samples), evaluator->options.num_speculative_steps,
                        evaluator->options.num_speculative_steps + 2);
    return MTP_OK;
}

static mtp_status allocate_plan(mtp_evaluator *evaluator)
{
    const size_t count = (size_t)mtp_dataset_size(evaluator->dataset);
    evaluator->batch_begin = malloc((count + 1) * sizeof *evaluator->batch_begin);
    evaluator->samples = malloc((count + 1) * sizeof *evaluator->samples);
    if (evaluator->batch_begin && evaluator->samples) return MTP_OK;
    return MTP_FAIL(MTP_E_MEMORY, "out of memory for an evaluation of %zu samples", count);
}

static mtp_status allocate_rows(mtp_evaluator *evaluator, int64_t most_tokens, int64_t most_documents)
{
    const int32_t K = evaluator->options.num_speculative_steps;
    MTP_TRY(mtp__rows_create(most_tokens, K, &evaluator->rows));
    evaluator->drafts = malloc((size_t)most_tokens * (size_t)K * sizeof *evaluator->drafts);
    evaluator->kept = malloc((size_t)most_tokens * sizeof *evaluator->kept);
    evaluator->prompt_len = malloc((size_t)most_documents * sizeof *evaluator->prompt_len);
    if (evaluator->drafts && evaluator->kept && evaluator->prompt_len) return MTP_OK;
    return MTP_FAIL(MTP_E_MEMORY, "out of memory for batches of %lld tokens", (long long)most_tokens);
}

static mtp_status create_steps(mtp_evaluator *evaluator, const mtp_verifier *verifier)
{
    mtp_step_config drafting = evaluator->loss;
    drafting.feeding = MTP_FEED_SELF;
    MTP_TRY(mtp__step_create(evaluator->drafter, verifier, &drafting, MTP__STEP_EVALUATE, &evaluator->drafting));
    if (evaluator->options.acceptance_only) return MTP_OK;
    return mtp__step_create(evaluator->drafter, verifier, &evaluator->loss, MTP__STEP_EVALUATE, &evaluator->teaching);
}

/* Does it fit beside what the device holds already, and the verifier's table too. */
static mtp_status plan_memory(mtp_evaluator *evaluator, const mtp_verifier *verifier, int64_t most_tokens)
{
    static const char remedy[] = "--embedding-on-device off (verifier embedding), fewer --num-speculative-steps, or "
                                 "another --device; the drafter itself is there already";
    const mtp_drafter *drafter = evaluator->drafter;
    const mtp_view table = mtp_verifier_embedding(verifier);
    const mtp__plan_verifier known = {.config = mtp_verifier_get_config(verifier),
                                      .embedding_value = mtp_dtype_size(table.dtype)};
    const int steps = evaluator->options.acceptance_only ? 1 : 2;
    MTP_TRY(mtp__plan_new(drafter->context, remedy, &evaluator->plan));
    uint64_t staging; /* host memory is not what is asked here */
    MTP_TRY(mtp__plan_evaluation(evaluator->plan, &drafter->config, drafter->context, drafter->masters,
                                 &evaluator->loss, steps, &staging));
    MTP_TRY(mtp__plan_kv(evaluator->plan, known.config, most_tokens, steps));
    MTP_TRY(mtp__plan_embedding(evaluator->plan, drafter->context, evaluator->options.embedding_on_device, &known));
    return mtp__plan_check(evaluator->plan);
}

static mtp_status place_embedding(mtp_evaluator *evaluator, const mtp_verifier *verifier, int64_t most_tokens)
{
    if (evaluator->drafter->context->ops->memory_is_host) return MTP_OK;
    MTP_TRY(plan_memory(evaluator, verifier, most_tokens));
    mtp__plan_log_embedding(evaluator->plan, evaluator->drafter->context->logger);
    if (!evaluator->plan->embedding_on_device) return MTP_OK;
    MTP_TRY(mtp__embedding_hold(evaluator->drafter, verifier));
    evaluator->holds_embedding = true;
    return MTP_OK;
}

static mtp_status build(mtp_evaluator *evaluator, const mtp_verifier *verifier, const mtp_evaluator_options *options,
                        bool planned)
{
    int64_t most_tokens = 0, most_documents = 0;
    MTP_TRY(resolve(evaluator, options));
    MTP_TRY(allocate_plan(evaluator));
    MTP_TRY(plan(evaluator, &most_tokens, &most_documents));
    /* a chunk never has more rows than a batch has tokens */
    if (evaluator->loss.rows_per_chunk == 0 && !evaluator->drafter->context->ops->memory_is_host)
        evaluator->loss.rows_per_chunk =
            most_tokens < MTP__ROWS_PER_CHUNK_DEVICE ? most_tokens : MTP__ROWS_PER_CHUNK_DEVICE;
    MTP_TRY(allocate_rows(evaluator, most_tokens, most_documents));
    if (!planned) MTP_TRY(place_embedding(evaluator, verifier, most_tokens));
    return create_steps(evaluator, verifier);
}

static mtp_status create(mtp_drafter *drafter, const mtp_verifier *verifier, const mtp_dataset *dataset,
                         const mtp_evaluator_options *options, bool planned, mtp_evaluator **evaluator)
{
    MTP_REQUIRE(drafter && verifier && dataset && options && evaluator);
    *evaluator = NULL;
    mtp_evaluator *created = calloc(1, sizeof *created);
    if (!created) return MTP_FAIL(MTP_E_MEMORY, "out of memory for an evaluator");
    created->drafter = drafter;
    created->dataset = dataset;
    mtp_status status = build(created, verifier, options, planned);
    if (status != MTP_OK) {
        status = mtp__plan_explain(created->plan, status);
        mtp_evaluator_free(created);
        return status;
    }
    *evaluator = created;
    return MTP_OK;
}

mtp_status mtp_evaluator_create(mtp_drafter *drafter, const mtp_verifier *verifier, const mtp_dataset *dataset,
                                const mtp_evaluator_options *options, mtp_evaluator **evaluator)
{
    return create(drafter, verifier, dataset, options, false, evaluator);
}

mtp_status mtp__evaluator_create(mtp_drafter *drafter, const mtp_verifier *verifier, const mtp_dataset *dataset,
                                 const mtp_evaluator_options *options, mtp_evaluator **evaluator)
{
    return create(drafter, verifier, dataset, options, true, evaluator);
}

void mtp_evaluator_free(mtp_evaluator *evaluator)
{
    if (!evaluator) return;
    mtp__step_free(evaluator->drafting);
    mtp__step_free(evaluator->teaching);
    if (evaluator->holds_embedding) mtp__embedding_drop(evaluator->drafter);
    mtp_plan_free(evaluator->plan);
    mtp__rows_free(&evaluator->rows);
    free(evaluator->batch_begin);
    free(evaluator->samples);
    free(evaluator->prompt_len);
    free(evaluator->drafts);
    free(evaluator->kept);
    free(evaluator);
}

/* ---- running -------------------------------------------------------------------------------------------------- */

/* Drafts at every position of the batch where a round can start; what a verifier keeps of them, document by document.
 */
static mtp_status accept_batch(mtp_evaluator *evaluator, const mtp_batch *batch, mtp_evaluation *evaluation)
{
    mtp__rows *rows = &evaluator->rows;
    mtp__step_sums sums[MTP_MAX_SPECULATIVE_STEPS];
    const int64_t no_losses[MTP_MAX_SPECULATIVE_STEPS] = {0};
    mtp__step_outputs outputs = {.argmax = evaluator->drafts};
    for (int64_t d = 0; d < batch->num_documents; d++)
        evaluator->prompt_len[d] = mtp_dataset_sample(evaluator->dataset, batch->document_sample[d]).prompt_len;
    MTP_TRY(mtp__rows_build(batch, MTP__ROWS_ROUNDS, evaluator->prompt_len, rows));
    if (rows->num_rows == 0) return MTP_OK;
    memset(rows->supervised, 0, (size_t)(rows->K * rows->num_rows)); /* no losses are wanted of these */
    MTP_TRY(mtp__step_run(evaluator->drafting, batch, rows, no_losses, sums, &outputs));
    for (int64_t r = 0; r < rows->num_rows; r++)
        evaluator->kept[r] = mtp__acceptance_kept(evaluator->drafts, rows->target, rows->num_rows, rows->K, r);
    for (int64_t first = 0, end; first < rows->num_rows; first = end) {
        const int32_t d = rows->document[first];
        for (end = first; end < rows->num_rows && rows->document[end] == d;) end++;
        mtp__acceptance_document(evaluation, batch->document_sample[d], rows->position[first],
                                 batch->document_end[d] - batch->document_begin[d], evaluator->kept + first,
                                 end - first);
    }
    return MTP_OK;
}

/* NaN and infinity have no place in figures; what made them is among few samples here. */
static mtp_status check_finite(const mtp_evaluator *evaluator, const mtp_batch *batch, const mtp__step_sums *sums)
{
    bool finite = true;
    for (int32_t k = 0; k < evaluator->rows.K; k++)
        finite = finite && isfinite(sums[k].loss) && isfinite(sums[k].centroid_loss);
    if (finite) return MTP_OK;
    const mtp_sample_info first = mtp_dataset_sample(evaluator->dataset, batch->document_sample[0]);
    return MTP_FAIL(MTP_E_DATA,
                    "the loss of a batch of %lld sample%s, first %s, is not finite: look at its samples (mtp "
                    "check), at the verifier's embedding and at the drafter's weights and config.json",
                    (long long)batch->num_documents, mtp__plural(batch->num_documents), first.name);
}

/* The batch's sums over supervised rows, added to `total`. */
static mtp_status teach_batch(mtp_evaluator *evaluator, const mtp_batch *batch, mtp__step_sums *total)
{
    mtp__rows *rows = &evaluator->rows;
    mtp__step_sums sums[MTP_MAX_SPECULATIVE_STEPS];
    int64_t counts[MTP_MAX_SPECULATIVE_STEPS] = {0};
    MTP_TRY(mtp__rows_build(batch, MTP__ROWS_SUPERVISED, NULL, rows));
    if (rows->num_rows == 0) return MTP_OK;
    mtp__rows_count(rows, counts);
    MTP_TRY(mtp__step_run(evaluator->teaching, batch, rows, counts, sums, NULL));
    MTP_TRY(check_finite(evaluator, batch, sums));
    for (int32_t k = 0; k < rows->K; k++) {
        total[k].loss += sums[k].loss;
        total[k].centroid_loss += sums[k].centroid_loss;
        total[k].count += sums[k].count;
        total[k].correct += sums[k].correct;
        total[k].missed += sums[k].missed;
    }
    return MTP_OK;
}

static mtp_status run_batch(mtp_evaluator *evaluator, int64_t index, mtp_evaluation *evaluation, mtp__step_sums *total)
{
    const int64_t begin = evaluator->batch_begin[index], end = evaluator->batch_begin[index + 1];
    mtp_batch *batch = NULL;
    MTP_TRY(mtp_batch_collate(evaluator->dataset, evaluator->samples + begin, end - begin, true, &batch));
    mtp_status status = accept_batch(evaluator, batch, evaluation);
    if (status == MTP_OK && evaluator->teaching) status = teach_batch(evaluator, batch, total);
    mtp_batch_free(batch);
    return status;
}

static void finish_losses(const mtp_evaluator *evaluator, const mtp__step_sums *total, mtp_evaluation *evaluation)
{
    int64_t counts[MTP_MAX_SPECULATIVE_STEPS] = {0};
    for (int32_t k = 0; k < evaluation->num_speculative_steps; k++) {
        counts[k] = total[k].count;
        if (counts[k] == 0) continue;
        const double count = (double)counts[k];
        evaluation->steps[k] = (mtp_step_figures){.count = counts[k],
                                                  .loss = total[k].loss / count,
                                                  .centroid_loss = total[k].centroid_loss / count,
                                                  .accuracy = (double)total[k].correct / count,
                                                  .centroid_miss = (double)total[k].missed / count};
    }
    evaluation->loss = mtp__step_total(&evaluator->loss, total, counts);
    evaluation->has_loss = true;
}

/* An evaluation of nothing yet, with the facts that need no computing. */
static mtp_status begin(const mtp_evaluator *evaluator, mtp_evaluation *evaluation)
{
    const mtp_drafter_config *config = mtp_drafter_get_config(evaluator->drafter);
    *evaluation = (mtp_evaluation){.num_speculative_steps = evaluator->options.num_speculative_steps,
                                   .position_offset = evaluator->options.position_offset,
                                   .ordered = config->ordered,
                                   .head_mode = evaluator->loss.head_mode,
                                   .num_samples = mtp_dataset_size(evaluator->dataset)};
    evaluation->samples = calloc((size_t)evaluation->num_samples, sizeof *evaluation->samples);
    if (!evaluation->samples)
        return MTP_FAIL(MTP_E_MEMORY, "out of memory for the figures of %lld samples",
                        (long long)evaluation->num_samples);
    for (int64_t i = 0; i < evaluation->num_samples; i++) {
        const mtp_sample_info info = mtp_dataset_sample(evaluator->dataset, i);
        evaluation->samples[i].sample = i;
        evaluation->num_gapped += info.num_supervised > 0 && info.prompt_len + info.num_supervised < info.num_tokens;
    }
    return MTP_OK;
}

void mtp__evaluator_share(mtp_evaluator *evaluator, mtp__ranks *ranks)
{
    evaluator->ranks = ranks->world_size > 1 ? ranks : NULL;
}

/* Sums of one batch, and whether somebody wants to stop. */
typedef struct batch_result {
    int64_t stop;
    mtp__step_sums sums[MTP_MAX_SPECULATIVE_STEPS];
} batch_result;

static void add_result(const batch_result *result, bool *stop, mtp__step_sums *total)
{
    *stop = *stop || result->stop;
    for (int32_t k = 0; k < MTP_MAX_SPECULATIVE_STEPS; k++) {
        total[k].loss += result->sums[k].loss;
        total[k].centroid_loss += result->sums[k].centroid_loss;
        total[k].count += result->sums[k].count;
        total[k].correct += result->sums[k].correct;
        total[k].missed += result->sums[k].missed;
    }
}

/* Batches [first, first + world size), one a rank; their sums are added in the order of the batches. */
static mtp_status run_round(mtp_evaluator *evaluator, int64_t first, mtp_evaluation *evaluation, bool *stop,
                            mtp__step_sums *total)
{
    mtp__ranks *ranks = evaluator->ranks;
    const int64_t documents = evaluator->batch_begin[evaluator->num_batches], done = evaluator->batch_begin[first];
    const int64_t index = first + (ranks ? ranks->rank : 0);
    batch_result own = {0};
    mtp_status status = MTP_OK;
    own.stop = evaluator->options.progress && !evaluator->options.progress(evaluator->options.user, done, documents);
    if (!own.stop && index < evaluator->num_batches) status = run_batch(evaluator, index, evaluation, own.sums);
    if (ranks) status = mtp__ranks_exchange(ranks, status, &own, sizeof own);
    if (status != MTP_OK) return status;
    if (!ranks) add_result(&own, stop, total);
    for (int rank = 0; ranks && rank < ranks->world_size; rank++) add_result(mtp__ranks_said(ranks, rank), stop, total);
    if (!*stop) return MTP_OK;
    return MTP_FAIL(MTP_E_INTERRUPTED, "evaluation stopped after %lld of %lld samples", (long long)done,
                    (long long)documents);
}

static mtp_status run_batches(mtp_evaluator *evaluator, mtp_evaluation *evaluation)
{
    mtp__step_sums total[MTP_MAX_SPECULATIVE_STEPS] = {{0}};
    const int64_t world_size = evaluator->ranks ? evaluator->ranks->world_size : 1;
    bool stop = false;
    MTP_TRY(begin(evaluator, evaluation));
    for (int64_t i = 0; i < evaluator->num_batches; i += world_size)
        MTP_TRY(run_round(evaluator, i, evaluation, &stop, total));
    if (evaluator->ranks) MTP_TRY(mtp__evaluation_merge(evaluator->ranks, evaluation));
    mtp__acceptance_finish(evaluation);
    if (evaluator->teaching) finish_losses(evaluator, total, evaluation);
    return MTP_OK;
}

mtp_status mtp_evaluator_run(mtp_evaluator *evaluator, mtp_evaluation *evaluation)
{
    MTP_REQUIRE(evaluator && evaluation);
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    const mtp_status status = run_batches(evaluator, evaluation);
    clock_gettime(CLOCK_MONOTONIC, &to);
    if (status != MTP_OK) {
        mtp_evaluation_free(evaluation);
        return mtp__plan_explain(evaluator->plan, status);
    }
    evaluation->seconds = (double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec);
    return MTP_OK;
}

void mtp_evaluation_free(mtp_evaluation *evaluation)
{
    if (!evaluation) return;
    free(evaluation->samples);
    *evaluation = (mtp_evaluation){0};
}
