#include "run/leak.h"
#include "base/text.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"

enum { DEFAULT_STEPS = 3, DEFAULT_ROWS = 64, DEFAULT_TOKENS = 4096, MAX_STEPS = 64 };
static const double FLOAT_ORDER_TOLERANCE = 1e-4;

/* ---- one batch ------------------------------------------------------------------------------------------------ */

/* A batch of other documents than the one at hand, or the same in another layout. */
static mtp_status probe_rows(const mtp__leak *leak, const mtp_batch *batch, mtp__rows *probed)
{
    mtp__rows all;
    MTP_TRY(mtp__rows_create(batch->batch * batch->seq, leak->config.num_speculative_steps, &all));
    mtp_status status = mtp__rows_create(all.capacity, all.K, probed);
    if (status == MTP_OK) status = mtp__leak_rows(batch, leak->options.rows_per_document, &all, probed);
    mtp__rows_free(&all);
    return status;
}

mtp_status mtp__leak_open(mtp__leak *leak, const int64_t *samples, int64_t num_samples)
{
    const int32_t K = leak->config.num_speculative_steps;
    MTP_TRY(mtp_batch_collate(leak->dataset, samples, num_samples, true, &leak->batch));
    const int64_t tokens = leak->batch->batch * leak->batch->seq;
    MTP_TRY(mtp__leak_copy(leak->batch, &leak->changed));
    MTP_TRY(mtp__rows_create(tokens, K, &leak->all));
    MTP_TRY(mtp__rows_create(tokens, K, &leak->probed));
    MTP_TRY(mtp__rows_create(tokens, K, &leak->moved));
    MTP_TRY(mtp__rows_create(tokens, K, &leak->picked));
    leak->index = malloc((size_t)tokens * sizeof *leak->index);
    if (!leak->index) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %lld rows", (long long)tokens);
    MTP_TRY(mtp__leak_rows(leak->batch, leak->options.rows_per_document, &leak->all, &leak->probed));
    mtp_step_config config = leak->config;
    config.rows_per_chunk = leak->probed.num_rows;
    return mtp__step_create(leak->drafter, leak->verifier, &config, MTP__STEP_EVALUATE, &leak->whole);
}

void mtp__leak_close(mtp__leak *leak)
{
    mtp__step_free(leak->whole);
    mtp__leak_copy_free(&leak->changed);
    mtp_batch_free(leak->batch);
    mtp__rows_free(&leak->all);
    mtp__rows_free(&leak->probed);
    mtp__rows_free(&leak->moved);
    mtp__rows_free(&leak->picked);
    free(leak->index);
    leak->whole = NULL;
    leak->batch = NULL;
    leak->index = NULL;
}

/* Everything about `rows` of `batch` into fresh outputs. */
static mtp_status compute(const mtp__leak *leak, mtp__step *step, const mtp_batch *batch, const mtp__rows *rows,
                          mtp__leak_outputs *outputs)
{
    mtp__step_sums sums[MAX_STEPS];
    int64_t counts[MAX_STEPS] = {0};
    mtp__rows_count(rows, counts);
    MTP_TRY(mtp__leak_outputs_create(&leak->drafter->config, rows->K, rows->num_rows, outputs));
    const mtp_status status = mtp__step_run(step, batch, rows, counts, sums, &outputs->arrays);
    if (status != MTP_OK) mtp__leak_outputs_free(outputs);
    return status;
}

/* Count a comparison of row r of `rows` (of the leak's batch); remember the first that is not as it should be. */
static void record(const mtp__leak *leak, const mtp__rows *rows, int64_t r, const mtp__leak_outputs *a, int64_t row_a,
                   const mtp__leak_outputs *b, int64_t row_b, double tolerance, bool must_move, const char *how,
                   mtp_leak_property *property)
{
    int32_t step = 0;
    const char *output = NULL;
    const bool same = mtp__leak_same(a, row_a, b, row_b, tolerance, &step, &output);
    property->rows++;
    property->moved += !same;
    if (same != must_move || property->first[0]) return;
    const int64_t sample = leak->batch->document_sample[rows->document[r]];
    const char *name = mtp_dataset_sample(leak->dataset, sample).path;
    if (same)
        snprintf(property->first, sizeof property->first, "%s, position %d: nothing moved", name, rows->position[r]);
    else
        snprintf(property->first, sizeof property->first, "%s, position %d, draft %d: %s%s", name, rows->position[r],
                 step + 1, output, how);
}

/* ---- tests that change what rows must not see ------------------------------------------------------------------ */

/* The rows listed in leak->index, from the batch and from the changed one. Both are computed in the same company, so
 * they are equal bit for bit on every machine. */
static mtp_status compare_picked(mtp__leak *leak, int64_t count, bool must_move, mtp_leak_property *property)
{
    mtp__leak_outputs before = {0}, after = {0};
    mtp__leak_pick(&leak->probed, leak->index, count, &leak->picked);
    MTP_TRY(compute(leak, leak->whole, leak->batch, &leak->picked, &before));
    mtp_status status = mtp__leak_rows(&leak->changed, leak->options.rows_per_document, &leak->all, &leak->moved);
    if (status == MTP_OK) {
        mtp__leak_pick(&leak->moved, leak->index, count, &leak->picked);
        status = compute(leak, leak->whole, &leak->changed, &leak->picked, &after);
    }
    for (int64_t i = 0; status == MTP_OK && i < count; i++)
        record(leak, &leak->picked, i, &before, i, &after, i, 0, must_move, "", property);
    mtp__leak_outputs_free(&before);
    mtp__leak_outputs_free(&after);
    return status;
}

/* One row of each document at a time: documents do not meet, so each can be changed as its row says. */
static mtp_status test_within_document(mtp__leak *leak, mtp_leak_kind kind, mtp_leak_property *property)
{
    const mtp__rows *probed = &leak->probed;
    bool more = true;
    for (int64_t turn = 0; more; turn++) {
        int64_t count = 0;
        more = false;
        mtp__leak_restore(leak->batch, &leak->changed);
        for (int64_t r = 0, first = 0; r < probed->num_rows; r++) {
            if (probed->document[r] != probed->document[first]) first = r;
            if (r - first != turn) continue;
            more = true;
            if (mtp__leak_change(&leak->changed, kind, probed, r, leak->rule, &leak->rng)) leak->index[count++] = r;
        }
        if (count > 0) MTP_TRY(compare_picked(leak, count, kind == MTP_LEAK_CONTROL, property));
    }
    return MTP_OK;
}

static mtp_status test_documents(mtp__leak *leak, mtp_leak_property *property)
{
    const mtp__rows *probed = &leak->probed;
    if (leak->batch->num_documents < 2) return MTP_OK;
    for (int64_t d = 0; d < leak->batch->num_documents; d++) {
        int64_t count = 0;
        for (int64_t r = 0; r < probed->num_rows; r++)
            if (probed->document[r] == d) leak->index[count++] = r;
        if (count == 0) continue;
        mtp__leak_restore(leak->batch, &leak->changed);
        mtp__leak_change_others(&leak->changed, d, &leak->rng);
        MTP_TRY(compare_picked(leak, count, false, property));
    }
    return MTP_OK;
}

/* ---- tests that change a row's company -------------------------------------------------------------------------- */

/* Rows [first, first + n) of the packed batch against the n rows of another batch of the same documents. */
static mtp_status compare_batch(mtp__leak *leak, const mtp_batch *other, int64_t first, const mtp__leak_outputs *packed,
                                mtp_leak_property *property)
{
    mtp__rows rows = {0};
    mtp__leak_outputs outputs = {0};
    mtp_status status = probe_rows(leak, other, &rows);
    if (status == MTP_OK) status = compute(leak, leak->whole, other, &rows, &outputs);
    for (int64_t r = 0; status == MTP_OK && r < rows.num_rows; r++)
        record(leak, &leak->probed, first + r, packed, first + r, &outputs, r, leak->tolerance, false, "", property);
    mtp__leak_outputs_free(&outputs);
    mtp__rows_free(&rows);
    return status;
}

static mtp_status test_alone(mtp__leak *leak, const mtp__leak_outputs *packed, mtp_leak_property *property)
{
    const mtp__rows *probed = &leak->probed;
    for (int64_t r = 0; r < probed->num_rows; r++) {
        if (r > 0 && probed->document[r] == probed->document[r - 1]) continue;
        mtp_batch *alone = NULL;
        MTP_TRY(mtp_batch_collate(leak->dataset, leak->batch->document_sample + probed->document[r], 1, true, &alone));
        const mtp_status status = compare_batch(leak, alone, r, packed, property);
        mtp_batch_free(alone);
        MTP_TRY(status);
    }
    return MTP_OK;
}

static mtp_status test_padded(mtp__leak *leak, const mtp__leak_outputs *packed, mtp_leak_property *property)
{
    mtp_batch *padded = NULL;
    MTP_TRY(mtp_batch_collate(leak->dataset, leak->batch->document_sample, leak->batch->num_documents, false, &padded));
    const mtp_status status = compare_batch(leak, padded, 0, packed, property);
    mtp_batch_free(padded);
    return status;
}

static mtp_status test_chunk(mtp__leak *leak, int64_t size, const mtp__leak_outputs *whole, mtp_leak_property *property)
{
    char how[32];
    mtp__step *step = NULL;
    mtp__leak_outputs outputs = {0};
    mtp_step_config config = leak->config;
    config.rows_per_chunk = size;
    MTP_TRY(mtp__step_create(leak->drafter, leak->verifier, &config, MTP__STEP_EVALUATE, &step));
    const mtp_status status = compute(leak, step, leak->batch, &leak->probed, &outputs);
    snprintf(how, sizeof how, " (chunks of %lld)", (long long)size);
    for (int64_t r = 0; status == MTP_OK && r < leak->probed.num_rows; r++)
        record(leak, &leak->probed, r, whole, r, &outputs, r, leak->tolerance, false, how, property);
    mtp__leak_outputs_free(&outputs);
    mtp__step_free(step);
    return status;
}

static mtp_status test_company(mtp__leak *leak, mtp_leak_kind kind, mtp_leak_property *property)
{
    static const int64_t chunks[] = {1, 7, 64, 512};
    mtp__leak_outputs packed = {0};
    MTP_TRY(compute(leak, leak->whole, leak->batch, &leak->probed, &packed));
    mtp_status status = MTP_OK;
    if (kind == MTP_LEAK_ALONE) status = test_alone(leak, &packed, property);
    if (kind == MTP_LEAK_PADDED) status = test_padded(leak, &packed, property);
    for (size_t i = 0; kind == MTP_LEAK_CHUNKS && status == MTP_OK && i < sizeof chunks / sizeof *chunks; i++)
        status = test_chunk(leak, chunks[i], &packed, property);
    mtp__leak_outputs_free(&packed);
    return status;
}

mtp_status mtp__leak_test(mtp__leak *leak, mtp_leak_kind kind, mtp_leak_property *property)
{
    mtp_status status;
    leak->rng = mtp__rng_make(1, (uint64_t)kind);
    if (kind == MTP_LEAK_DOCUMENTS)
        status = test_documents(leak, property);
    else if (kind == MTP_LEAK_ALONE || kind == MTP_LEAK_PADDED || kind == MTP_LEAK_CHUNKS)
        status = test_company(leak, kind, property);
    else
        status = test_within_document(leak, kind, property);
    property->holds = kind == MTP_LEAK_CONTROL ? property->moved > 0 : property->moved == 0;
    return status;
}

/* ---- all batches ------------------------------------------------------------------------------------------------ */

static mtp_status resolve(mtp__leak *leak, const mtp_leak_options *options, mtp_leak_report *report)
{
    static const char *const names[MTP_LEAK_KINDS][2] = {
        [MTP_LEAK_FUTURE] = {"future", "K/V after the row's position do not matter"},
        [MTP_LEAK_WINDOW] = {"window", "sliding K/V before the row's window do not matter"},
        [MTP_LEAK_ROWS] = {"other rows", "hidden states and tokens of other positions do not matter"},
        [MTP_LEAK_DOCUMENTS] = {"other documents", "nothing of another document in the batch matters"},
        [MTP_LEAK_ALONE] = {"packed = alone", "a document packed with others is computed as it is alone"},
        [MTP_LEAK_PADDED] = {"packed = padded", "one document a line, padded, is computed as packed"},
        [MTP_LEAK_CHUNKS] = {"chunks = whole", "rows in chunks of 1, 7, 64 and 512 are computed as all at once"},
        [MTP_LEAK_CONTROL] = {"control", "K/V at the row's own position do matter"}};
    const bool ordered = leak->drafter->config.ordered;
    const mtp_context_info info = mtp_context_describe(leak->drafter->context);
    leak->options = *options;
    if (options->rows_per_document == 0) leak->options.rows_per_document = DEFAULT_ROWS;
    if (options->tokens_per_batch == 0) leak->options.tokens_per_batch = DEFAULT_TOKENS;
    if (leak->options.rows_per_document < 0 || leak->options.tokens_per_batch < 0)
        return MTP_FAIL(MTP_E_CONFIG, "rows_per_document and tokens_per_batch must be 1 or more");
    const int32_t K = options->num_speculative_steps ? options->num_speculative_steps : DEFAULT_STEPS;
    if (K < 1 || K > MAX_STEPS)
        return MTP_FAIL(MTP_E_CONFIG, "num_speculative_steps is %d; it must be 1 to %d", K, MAX_STEPS);
    leak->config = (mtp_step_config){.num_speculative_steps = K,
                                     .position_offset = options->position_offset,
                                     .feeding = MTP_FEED_TEACHER,
                                     .head_mode = ordered ? MTP_HEAD_MASKED : MTP_HEAD_FLAT,
                                     .step_weight_beta = 0.6,
                                     .centroid_weight = ordered ? 1 : 0};
    leak->rule = (mtp__leak_rule){.window = leak->drafter->config.sliding_window, .future = 1};
    leak->tolerance = info.rows_exact ? 0 : FLOAT_ORDER_TOLERANCE;
    *report = (mtp_leak_report){
        .rows_exact = info.rows_exact, .rows_note = info.rows_note, .tolerance = FLOAT_ORDER_TOLERANCE};
    for (int kind = 0; kind < MTP_LEAK_KINDS; kind++) {
        const bool company = kind == MTP_LEAK_ALONE || kind == MTP_LEAK_PADDED || kind == MTP_LEAK_CHUNKS;
        report->properties[kind] = (mtp_leak_property){
            .name = names[kind][0], .claim = names[kind][1], .exact = info.rows_exact || !company, .holds = true};
    }
    return MTP_OK;
}

static mtp_status test_batch(mtp__leak *leak, const int64_t *samples, int64_t num_samples, mtp_leak_report *report)
{
    mtp_status status = mtp__leak_open(leak, samples, num_samples);
    for (int kind = 0; leak->probed.num_rows > 0 && status == MTP_OK && kind < MTP_LEAK_KINDS; kind++)
        status = mtp__leak_test(leak, (mtp_leak_kind)kind, &report->properties[kind]);
    mtp__leak_close(leak);
    return status;
}

/* Samples with a supervised position, into `samples`. */
static int64_t list_samples(const mtp_dataset *dataset, int64_t *samples)
{
    int64_t count = 0;
    for (int64_t i = 0; i < mtp_dataset_size(dataset); i++)
        if (mtp_dataset_sample(dataset, i).num_supervised > 0) samples[count++] = i;
    return count;
}

static mtp_status test_samples(mtp__leak *leak, const int64_t *samples, int64_t count, mtp_leak_report *report)
{
    for (int64_t first = 0, end; first < count; first = end) {
        int64_t tokens = 0;
        for (end = first; end < count; end++) {
            tokens += mtp_dataset_sample(leak->dataset, samples[end]).num_tokens;
            if (end > first && tokens > leak->options.tokens_per_batch) break;
        }
        if (leak->options.progress && !leak->options.progress(leak->options.user, first, count))
            return MTP_FAIL(MTP_E_INTERRUPTED, "leak test stopped after %lld of %lld samples", (long long)first,
                            (long long)count);
        MTP_TRY(test_batch(leak, samples + first, end - first, report));
    }
    report->holds = true;
    for (int kind = 0; kind < MTP_LEAK_KINDS; kind++) report->holds = report->holds && report->properties[kind].holds;
    return MTP_OK;
}

mtp_status mtp_leak_check(mtp_drafter *drafter, const mtp_verifier *verifier, const mtp_dataset *dataset,
                          const mtp_leak_options *options, mtp_leak_report *report)
{
    MTP_REQUIRE(drafter && verifier && dataset && options && report);
    mtp__leak leak = {.drafter = drafter, .verifier = verifier, .dataset = dataset};
    const int64_t num_samples = mtp_dataset_size(dataset);
    MTP_TRY(resolve(&leak, options, report));
    int64_t *samples = malloc((size_t)(num_samples + 1) * sizeof *samples);
    if (!samples) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a list of %lld samples", (long long)num_samples);
    report->documents = list_samples(dataset, samples);
    report->skipped = num_samples - report->documents;
    mtp_status status;
    if (report->documents == 0)
        status = MTP_FAIL(MTP_E_DATA, "nothing to test: of %lld sample%s none has a supervised position (loss_mask)",
                          (long long)num_samples, mtp__plural(num_samples));
    else
        status = test_samples(&leak, samples, report->documents, report);
    free(samples);
    return status;
}
