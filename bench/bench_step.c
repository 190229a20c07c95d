/* A whole training step of an official size: forward, backward, AdamW, timed by part.
 *
 *   bench_step [--size e2b] [--head masked|flat|hierarchical|none] [--rows 512] [--num-speculative-steps 3]
 *              [--vocab-size 262144] [--repeat 3] [--threads 0] [--rows-per-chunk 512] [--json]
 *
 * Every repeat is timed as a whole; then one more step runs through a timing backend for the seconds of each op, its
 * GFLOP/s and its share of the machine's FMA peak. `none` leaves the head out (the gradient of the hidden states is
 * made up) and fixes the embedding and the centroids: the body alone. Reports the best of the repeats after one step of
 * warm-up. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "model/workspace.h"
#include "op_timer.h"
#include "options.h"
#include "peak.h"
#include "synthetic.h"

typedef struct settings {
    const char *size, *head, *device;
    int64_t rows, K, vocab_size, repeat, threads, rows_per_chunk;
    int64_t peak_gflops; /* 0: the FMA peak of the cpu, measured; of a GPU it has to be given */
    bool json, bf16;
} settings;

typedef struct timing {
    double forward_backward, optimizer, total;
} timing;

typedef struct bench {
    settings s;
    mtp_context *context;
    mtp_drafter_config config;
    mtp_drafter *drafter;
    mtp_verifier *verifier;
    mtp_batch batch;
    mtp__rows rows;
    int64_t counts[64];
    mtp__step *step;
    mtp__optimizer *optimizer;
    char directory[64];
    double loss, peak_rss;
} bench;

static mtp_status parse(int argc, char **argv, settings *s)
{
    *s = (settings){.size = "e2b", .head = "masked", .rows = 512, .K = 3, .repeat = 3, .rows_per_chunk = 512};
    const bench_option options[] = {
        {.name = "--size", .text = &s->size},
        {.name = "--head", .text = &s->head},
        {.name = "--rows", .number = &s->rows},
        {.name = "--num-speculative-steps", .number = &s->K},
        {.name = "--vocab-size", .number = &s->vocab_size},
        {.name = "--repeat", .number = &s->repeat},
        {.name = "--threads", .number = &s->threads},
        {.name = "--rows-per-chunk", .number = &s->rows_per_chunk},
        {.name = "--peak-gflops", .number = &s->peak_gflops},
        {.name = "--device", .text = &s->device},
        {.name = "--json", .flag = &s->json},
        {.name = "--bf16", .flag = &s->bf16},
    };
    MTP_TRY(bench_options(argc, argv, options, sizeof options / sizeof *options));
    if (s->rows < 1 || s->K < 1 || s->K > 64 || s->repeat < 1)
        return MTP_FAIL(MTP_E_CONFIG, "--rows, --num-speculative-steps (at most 64) and --repeat start at 1");
    return MTP_OK;
}

static bool body_only(const bench *b)
{
    return strcmp(b->s.head, "none") == 0;
}

static mtp_status head_mode(const bench *b, mtp_head_mode *mode)
{
    static const char *const names[] = {"flat", "masked", "hierarchical", "none"};
    for (int i = 0; i < 4; i++)
        if (strcmp(names[i], b->s.head) == 0) {
            *mode = i == 3 ? (b->config.ordered ? MTP_HEAD_MASKED : MTP_HEAD_FLAT) : (mtp_head_mode)i;
            return MTP_OK;
        }
    return MTP_FAIL(MTP_E_CONFIG, "--head \"%s\": use masked, flat, hierarchical or none", b->s.head);
}

static mtp_status setup(bench *b)
{
    const mtp_context_options options = {.device = b->s.device, .bf16 = b->s.bf16, .num_threads = (int)b->s.threads};
    MTP_TRY(mtp_context_create(&options, &b->context));
    if (body_only(b) && !b->context->ops->memory_is_host)
        return MTP_FAIL(MTP_E_CONFIG, "--head none writes to the memory of the ops: it needs --device cpu");
    MTP_TRY(synthetic_config(b->s.size, b->s.vocab_size, &b->config));
    mtp_step_config step = {.num_speculative_steps = (int32_t)b->s.K,
                            .step_weight_beta = 0.6,
                            .centroid_weight = 0.1,
                            .rows_per_chunk = b->s.rows_per_chunk};
    MTP_TRY(head_mode(b, &step.head_mode));
    MTP_TRY(synthetic_batch(&b->config, b->s.rows + b->s.K + 1, &b->batch));
    memset(b->batch.loss_mask, 1, (size_t)b->batch.seq);
    MTP_TRY(synthetic_verifier(b->directory, &b->config, b->batch.token_ids, b->batch.seq, &b->verifier));
    MTP_TRY(synthetic_drafter(b->context, &b->config, &b->drafter));
    MTP_TRY(mtp_drafter_freeze(b->drafter, "*.layer_scalar"));
    if (body_only(b)) {
        MTP_TRY(mtp_drafter_freeze(b->drafter, "model.embed_tokens.weight"));
        if (b->config.ordered) MTP_TRY(mtp_drafter_freeze(b->drafter, "masked_embedding.*"));
    }
    MTP_TRY(mtp__drafter_alloc_grads(b->drafter));
    MTP_TRY(synthetic_optimizer(b->context, b->drafter, &b->optimizer));
    MTP_TRY(mtp__rows_create(b->batch.seq, (int32_t)b->s.K, &b->rows));
    MTP_TRY(mtp__rows_build(&b->batch, MTP__ROWS_SUPERVISED, NULL, &b->rows));
    if (b->rows.num_rows > b->s.rows) { /* exactly the rows asked for, all with K targets */
        memset(b->batch.loss_mask, 0, (size_t)b->batch.seq);
        memset(b->batch.loss_mask + 2, 1, (size_t)(b->s.rows));
        MTP_TRY(mtp__rows_build(&b->batch, MTP__ROWS_SUPERVISED, NULL, &b->rows));
    }
    mtp__rows_count(&b->rows, b->counts);
    return mtp__step_create(b->drafter, b->verifier, &step, MTP__STEP_TRAIN, &b->step);
}

/* The body: what mtp__step_run does with the head's gradient given. */
static mtp_status run_body(bench *b)
{
    mtp__step *step = b->step;
    step->batch = &b->batch;
    step->rows = &b->rows;
    MTP_TRY(mtp__stage_kv(&step->stage, &b->batch, step->kv));
    for (int64_t first = 0; first < b->rows.num_rows; first += step->Rc) {
        step->first_row = first;
        step->num_rows = b->rows.num_rows - first < step->Rc ? b->rows.num_rows - first : step->Rc;
        MTP_TRY(mtp__step_begin_chunk(step));
        for (int32_t k = 0; k < step->config.num_speculative_steps; k++) {
            memcpy(step->tokens.data, b->rows.input_token + k * b->rows.num_rows + first,
                   (size_t)step->num_rows * sizeof(int32_t));
            if (k > 0) MTP_TRY(mtp__step_project_state(step, k - 1, step->drafts[k].state));
            MTP_TRY(mtp__step_forward(step, k));
        }
        float *dn = step->dn.data;
        for (int64_t i = 0; i < mtp_view_count(step->dn); i++) dn[i] = 1e-3f * (float)(i % 7 - 3);
        MTP_TRY(mtp__step_backward(step));
    }
    return MTP_OK;
}

static mtp_status one_step(bench *b, timing *t)
{
    mtp__step_sums sums[64];
    double norm;
    const double start = synthetic_seconds();
    MTP_TRY(b->context->ops->memory_zero(b->context->device, b->drafter->grads,
                                         (size_t)b->drafter->num_grads * sizeof(float)));
    if (body_only(b)) {
        MTP_TRY(run_body(b));
    } else {
        MTP_TRY(mtp__step_run(b->step, &b->batch, &b->rows, b->counts, sums, NULL));
        b->loss = mtp__step_total(&b->step->config, sums, b->counts);
    }
    const double middle = synthetic_seconds();
    MTP_TRY(mtp__optimizer_grad_norm(b->optimizer, &norm));
    MTP_TRY(mtp__optimizer_step(b->optimizer, 1e-4, mtp__optimizer_clip(&b->optimizer->config, norm)));
    float first;
    MTP_TRY(b->context->ops->download(b->context->device, &first, b->drafter->values, sizeof first)); /* waits */
    const double end = synthetic_seconds();
    *t = (timing){middle - start, end - middle, end - start};
    return MTP_OK;
}

static double percent_of_peak(double operations, double seconds, double peak)
{
    return seconds > 0 && peak > 0 ? 100e-9 * operations / seconds / peak : 0;
}

static void report_json(const bench *b, const timing *best, double operations, double peak)
{
    const mtp_context_info info = mtp_context_describe(b->context);
    int count;
    const op_timer_row *rows = op_timer_rows(&count);
    printf(
        "{\"bench\": \"step\", \"size\": \"%s\", \"head\": \"%s\", \"rows\": %lld, \"num_speculative_steps\": %lld, "
        "\"vocab_size\": %lld, \"threads\": %d, \"isa\": \"%s\", \"blas\": \"%s\", \"seconds\": %.4f, "
        "\"forward_backward_seconds\": %.4f, \"optimizer_seconds\": %.4f, \"rows_per_second\": %.1f, "
        "\"peak_rss_bytes\": %.0f, \"optimizer_state_bytes\": %.0f, \"peak_gflops\": %.1f, \"percent_of_peak\": %.1f, "
        "\"loss\": %.6f, \"ops\": {",
        b->s.size, b->s.head, (long long)b->rows.num_rows, (long long)b->s.K, (long long)b->config.vocab_size,
        info.num_threads, info.isa, info.blas, best->total, best->forward_backward, best->optimizer,
        (double)b->rows.num_rows / best->total, b->peak_rss, 16.0 * (double)mtp_drafter_num_trained(b->drafter), peak,
        percent_of_peak(operations, best->total, peak), b->loss);
    for (int i = 0, printed = 0; i < count; i++) {
        if (rows[i].calls == 0) continue;
        printf("%s\"%s\": {\"calls\": %lld", printed++ ? ", " : "", rows[i].op, (long long)rows[i].calls);
        if (b->context->ops->memory_is_host) printf(", \"seconds\": %.4f", rows[i].seconds);
        if (rows[i].operations > 0 && b->context->ops->memory_is_host)
            printf(", \"percent_of_peak\": %.1f", percent_of_peak(rows[i].operations, rows[i].seconds, peak));
        printf("}");
    }
    printf("}}\n");
}

static void report_text(const bench *b, const timing *best, double operations, double peak)
{
    const mtp_context_info info = mtp_context_describe(b->context);
    int count;
    const op_timer_row *rows = op_timer_rows(&count);
    printf(
        "%s %s: %lld rows, K %lld, V %lld, %d threads, %s: %.3f s (forward+backward %.3f, optimizer %.3f), %.0f "
        "rows/s, "
        "%.0f %% of the FMA peak (%.0f GFLOP/s), peak RSS %.3f GB (16 bytes a trained parameter: %.3f GB), loss %.4f\n",
        b->s.size, b->s.head, (long long)b->rows.num_rows, (long long)b->s.K, (long long)b->config.vocab_size,
        info.num_threads, info.isa, best->total, best->forward_backward, best->optimizer,
        (double)b->rows.num_rows / best->total, percent_of_peak(operations, best->total, peak), peak,
        1e-9 * b->peak_rss, 16e-9 * (double)mtp_drafter_num_trained(b->drafter), b->loss);
    for (int i = 0; i < count; i++) {
        if (rows[i].calls == 0) continue;
        printf("  %-20s %4lld calls", rows[i].op, (long long)rows[i].calls);
        /* a GPU only takes note of a launch: there is nothing to time */
        if (b->context->ops->memory_is_host) printf("  %.4f s", rows[i].seconds);
        if (rows[i].operations > 0 && b->context->ops->memory_is_host)
            printf("  %3.0f %% of the FMA peak", percent_of_peak(rows[i].operations, rows[i].seconds, peak));
        printf("\n");
    }
}

/* One step through the timing backend. */
static mtp_status time_ops(bench *b, double *operations)
{
    const mtp_backend *real = b->context->ops;
    timing t;
    int count;
    b->context->ops = op_timer_wrap(real);
    const mtp_status status = one_step(b, &t);
    b->context->ops = real;
    const op_timer_row *rows = op_timer_rows(&count);
    *operations = 0;
    for (int i = 0; i < count; i++) *operations += rows[i].operations;
    return status;
}

static mtp_status run(bench *b)
{
    timing best = {0}, t;
    MTP_TRY(setup(b));
    MTP_TRY(one_step(b, &t));
    for (int64_t i = 0; i < b->s.repeat; i++) {
        MTP_TRY(one_step(b, &t));
        if (i == 0 || t.total < best.total) best = t;
    }
    b->peak_rss = synthetic_peak_rss();
    double operations;
    MTP_TRY(time_ops(b, &operations));
    double peak = (double)b->s.peak_gflops;
    if (peak == 0 && b->context->ops->memory_is_host)
        peak = bench_peak_gflops(mtp_context_describe(b->context).num_threads);
    (b->s.json ? report_json : report_text)(b, &best, operations, peak);
    return MTP_OK;
}

static void cleanup(bench *b)
{
    char path[128];
    mtp__step_free(b->step);
    mtp__optimizer_free(b->optimizer);
    mtp__rows_free(&b->rows);
    mtp_drafter_free(b->drafter);
    mtp_verifier_close(b->verifier);
    synthetic_batch_free(&b->batch);
    mtp_drafter_config_free(&b->config);
    mtp_context_free(b->context);
    snprintf(path, sizeof path, "%s/config.json", b->directory);
    unlink(path);
    snprintf(path, sizeof path, "%s/model.safetensors", b->directory);
    unlink(path);
    rmdir(b->directory);
}

int main(int argc, char **argv)
{
    bench b = {.directory = "/tmp/mtp-bench-XXXXXX"};
    mtp_status status = parse(argc, argv, &b.s);
    if (status == MTP_OK && !mkdtemp(b.directory)) status = MTP_FAIL(MTP_E_IO, "cannot make %s", b.directory);
    if (status == MTP_OK) {
        status = run(&b);
        cleanup(&b);
    }
    if (status != MTP_OK) fprintf(stderr, "bench_step: %s\n", mtp_last_error()->message);
    return mtp_status_exit_code(status);
}
