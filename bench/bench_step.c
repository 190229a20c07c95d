/* A whole training step of an official size: forward, backward, AdamW, timed by part.
 *
 *   bench_step [--size e2b] [--head masked|flat|hierarchical|none] [--rows 512] [--num-speculative-steps 3]
 *              [--vocab-size 262144] [--repeat 3] [--threads 0] [--rows-per-chunk 512] [--document 0]
 *              [--device cpu] [--bf16] [--peak-gflops 0] [--json]
 *
 * Every repeat is timed as a whole; then one more step runs through a timing backend for the seconds of each op, its
 * GFLOP/s and its share of the machine's FMA peak. `none` leaves the head out (the gradient of the hidden states is
 * made up) and fixes the embedding and the centroids: the body alone. Reports the best of the repeats after one step of
 * warm-up.
 *
 * Rows are supervised positions, in one document or in documents of --document tokens. positions_per_second is of the
 * median repeat, and percent_of_floor compares it with what the operations of a position alone would take at the peak
 * rate (floor.h): of the cpu as measured, of a GPU by its data sheet or --peak-gflops. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "device_peak.h"
#include "floor.h"
#include "model/embedding.h"
#include "model/workspace.h"
#include "op_timer.h"
#include "options.h"
#include "peak.h"
#include "synthetic.h"

enum { REPEATS_MOST = 1000 };

typedef struct settings {
    const char *size, *head, *device;
    int64_t rows, K, vocab_size, repeat, threads, rows_per_chunk, document;
    int64_t peak_gflops; /* 0: the FMA peak of the cpu, measured; what is known of a GPU */
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
    double median;         /* seconds of a step */
    double operations;     /* of products, in a step */
    double floor;          /* operations of a position that cannot be done without; 0 with --head none */
    double peak;           /* GFLOP/s, 0: not known */
    uint64_t device_bytes; /* of the device's memory that are taken; 0 where that is the host's */
    op_timer_graphs graphs;
    bool holds_embedding;
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
        {.name = "--document", .number = &s->document},
        {.name = "--peak-gflops", .number = &s->peak_gflops},
        {.name = "--device", .text = &s->device},
        {.name = "--json", .flag = &s->json},
        {.name = "--bf16", .flag = &s->bf16},
    };
    MTP_TRY(bench_options(argc, argv, options, sizeof options / sizeof *options));
    if (s->rows < 1 || s->K < 1 || s->K > 64 || s->repeat < 1 || s->repeat > REPEATS_MOST)
        return MTP_FAIL(MTP_E_CONFIG,
                        "--rows, --num-speculative-steps (at most 64) and --repeat (at most %d) start at 1",
                        REPEATS_MOST);
    if (s->document != 0 && s->document < 4)
        return MTP_FAIL(MTP_E_CONFIG, "--document: 0 for one document, or tokens of each, at least 4");
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
    if (b->s.document) MTP_TRY(synthetic_split(&b->batch, b->s.document));
    MTP_TRY(synthetic_verifier(b->directory, &b->config, b->batch.token_ids, b->batch.seq, &b->verifier));
    MTP_TRY(synthetic_drafter(b->context, &b->config, &b->drafter));
    MTP_TRY(mtp_drafter_freeze(b->drafter, "*.layer_scalar"));
    MTP_TRY(mtp__embedding_hold(b->drafter, b->verifier)); /* as a run does where it fits */
    b->holds_embedding = true;
    if (body_only(b)) {
        MTP_TRY(mtp_drafter_freeze(b->drafter, "model.embed_tokens.weight"));
        if (b->config.ordered) MTP_TRY(mtp_drafter_freeze(b->drafter, "masked_embedding.*"));
    }
    MTP_TRY(mtp__drafter_alloc_grads(b->drafter));
    MTP_TRY(synthetic_optimizer(b->context, b->drafter, &b->optimizer));
    MTP_TRY(mtp__rows_create(b->batch.seq, (int32_t)b->s.K, &b->rows));
    MTP_TRY(mtp__rows_build(&b->batch, MTP__ROWS_SUPERVISED, NULL, &b->rows));
    if (!b->s.document && b->rows.num_rows > b->s.rows) { /* exactly the rows asked for, all with K targets */
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
    MTP_TRY(mtp__stage_batch(&step->stage, &b->batch, step->kv, &step->hidden));
    for (int64_t first = 0; first < b->rows.num_rows; first += step->own_rows) {
        MTP_TRY(mtp__chunk_begin(step, first, b->counts));
        MTP_TRY(mtp__step_prepare(step));
        for (int32_t k = 0; k < step->config.num_speculative_steps; k++) {
            if (k > 0) MTP_TRY(mtp__step_project_state(step, k - 1, mtp__of_step(step, step->state, k)));
            MTP_TRY(mtp__step_forward(step, k));
        }
        float *dx = step->dx.data;
        const int64_t count = step->config.num_speculative_steps * step->num_rows * step->dx.shape[1];
        for (int64_t i = 0; i < count; i++) dx[i] = 1e-3f * (float)(i % 7 - 3);
        MTP_TRY(mtp__step_backward(step));
    }
    return MTP_OK;
}

static mtp_status one_step(bench *b, timing *t)
{
    mtp__step_sums sums[64];
    mtp__optim_result result;
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
    MTP_TRY(mtp__optimizer_step(b->optimizer, &(mtp__optim_update){.learning_rate = 1e-4}));
    MTP_TRY(mtp__optimizer_read(b->optimizer, &result)); /* waits */
    const double end = synthetic_seconds();
    *t = (timing){middle - start, end - middle, end - start};
    return MTP_OK;
}

static double percent_of_peak(double operations, double seconds, double peak)
{
    return seconds > 0 && peak > 0 ? 100e-9 * operations / seconds / peak : 0;
}

/* Percent of the rate that the floor allows. */
static double percent_of_floor(const bench *b)
{
    return percent_of_peak(b->floor * (double)b->rows.num_rows, b->median, b->peak);
}

static int64_t calls_of(const op_timer_row *rows, int count)
{
    int64_t calls = 0;
    for (int i = 0; i < count; i++) calls += rows[i].calls;
    return calls;
}

static void report_json(const bench *b, const timing *best)
{
    const mtp_context_info info = mtp_context_describe(b->context);
    const bool host = b->context->ops->memory_is_host;
    const double rows_of_step = (double)b->rows.num_rows;
    int count;
    const op_timer_row *rows = op_timer_rows(&count);
    printf(
        "{\"bench\": \"step\", \"size\": \"%s\", \"head\": \"%s\", \"rows\": %lld, \"num_speculative_steps\": %lld, "
        "\"vocab_size\": %lld, \"threads\": %d, \"isa\": \"%s\", \"blas\": \"%s\", \"seconds\": %.6f, "
        "\"forward_backward_seconds\": %.6f, \"optimizer_seconds\": %.6f, \"rows_per_second\": %.1f, "
        "\"peak_rss_bytes\": %.0f, \"optimizer_state_bytes\": %.0f, \"peak_gflops\": %.1f, \"percent_of_peak\": %.1f, "
        "\"loss\": %.6f, ",
        b->s.size, b->s.head, (long long)b->rows.num_rows, (long long)b->s.K, (long long)b->config.vocab_size,
        info.num_threads, info.isa, info.blas, best->total, best->forward_backward, best->optimizer,
        rows_of_step / best->total, b->peak_rss, 16.0 * (double)mtp_drafter_num_trained(b->drafter), b->peak,
        host ? percent_of_peak(b->operations, best->total, b->peak) : 0, b->loss);
    printf("\"document\": %lld, \"median_seconds\": %.6f, \"positions_per_second\": %.1f, "
           "\"draft_rows_per_second\": %.1f, \"floor_operations\": %.0f, \"percent_of_floor\": %.2f, "
           "\"op_calls\": %lld, \"graph_launches\": %lld, \"graph_nodes\": %lld, \"device_bytes\": %llu, \"ops\": {",
           (long long)b->s.document, b->median, rows_of_step / b->median, (double)b->s.K * rows_of_step / b->median,
           b->floor, percent_of_floor(b), (long long)calls_of(rows, count), (long long)b->graphs.launches,
           (long long)b->graphs.nodes, (unsigned long long)b->device_bytes);
    for (int i = 0, printed = 0; i < count; i++) {
        if (rows[i].calls == 0) continue;
        printf("%s\"%s\": {\"calls\": %lld", printed++ ? ", " : "", rows[i].op, (long long)rows[i].calls);
        if (host) printf(", \"seconds\": %.4f", rows[i].seconds);
        if (rows[i].operations > 0 && host)
            printf(", \"percent_of_peak\": %.1f", percent_of_peak(rows[i].operations, rows[i].seconds, b->peak));
        printf("}");
    }
    printf("}}\n");
}

static void report_text(const bench *b, const timing *best)
{
    const mtp_context_info info = mtp_context_describe(b->context);
    const bool host = b->context->ops->memory_is_host;
    const double rows_of_step = (double)b->rows.num_rows;
    int count;
    const op_timer_row *rows = op_timer_rows(&count);
    printf("%s %s: %lld rows, K %lld, V %lld, %d threads, %s: %.4f s (forward+backward %.4f, optimizer %.4f), %.0f "
           "rows/s",
           b->s.size, b->s.head, (long long)b->rows.num_rows, (long long)b->s.K, (long long)b->config.vocab_size,
           info.num_threads, info.isa, best->total, best->forward_backward, best->optimizer,
           rows_of_step / best->total);
    if (host)
        printf(", %.0f %% of the FMA peak (%.0f GFLOP/s)", percent_of_peak(b->operations, best->total, b->peak),
               b->peak);
    printf(", peak RSS %.3f GB (16 bytes a trained parameter: %.3f GB), loss %.4f\n", 1e-9 * b->peak_rss,
           16e-9 * (double)mtp_drafter_num_trained(b->drafter), b->loss);
    printf("  median %.4f s: %.0f positions/s, %.0f rows of a draft step/s", b->median, rows_of_step / b->median,
           (double)b->s.K * rows_of_step / b->median);
    if (b->floor > 0 && b->peak > 0) printf(", %.1f %% of the floor at %.0f GFLOP/s", percent_of_floor(b), b->peak);
    printf("\n  %lld ops launched one by one, %lld graphs of %lld nodes\n", (long long)calls_of(rows, count),
           (long long)b->graphs.launches, (long long)b->graphs.nodes);
    if (!host) printf("  %.3f GB of the device's memory are taken\n", 1e-9 * (double)b->device_bytes);
    for (int i = 0; i < count; i++) {
        if (rows[i].calls == 0) continue;
        printf("  %-20s %4lld calls", rows[i].op, (long long)rows[i].calls);
        /* a GPU only takes note of a launch: there is nothing to time */
        if (host) printf("  %.4f s", rows[i].seconds);
        if (rows[i].operations > 0 && host)
            printf("  %3.0f %% of the FMA peak", percent_of_peak(rows[i].operations, rows[i].seconds, b->peak));
        printf("\n");
    }
}

/* One step through the timing backend. */
static mtp_status time_ops(bench *b)
{
    const mtp_backend *real = b->context->ops;
    timing t;
    int count;
    b->context->ops = op_timer_wrap(real);
    const mtp_status status = one_step(b, &t);
    b->context->ops = real;
    b->graphs = op_timer_launched();
    const op_timer_row *rows = op_timer_rows(&count);
    b->operations = 0;
    for (int i = 0; i < count; i++) b->operations += rows[i].operations;
    return status;
}

static int compare_seconds(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* What the results are compared with, and the memory that they took. */
static mtp_status yardsticks(bench *b)
{
    const mtp_context_info info = mtp_context_describe(b->context);
    mtp_head_mode mode;
    uint64_t left, total;
    MTP_TRY(head_mode(b, &mode));
    const int64_t document = b->s.document && b->s.document < b->batch.seq ? b->s.document : b->batch.seq;
    if (!body_only(b)) b->floor = floor_operations(&b->config, mode, document, b->s.K).total;
    b->peak = (double)b->s.peak_gflops;
    b->peak_rss = synthetic_peak_rss();
    if (b->context->ops->memory_is_host) {
        if (b->peak == 0) b->peak = bench_peak_gflops(info.num_threads);
        return MTP_OK;
    }
    if (b->peak == 0 && b->s.bf16) b->peak = bench_device_peak_of(info.isa).gflops;
    MTP_TRY(b->context->ops->memory_info(b->context->device, &left, &total));
    b->device_bytes = total - left;
    return MTP_OK;
}

static mtp_status run(bench *b)
{
    double samples[REPEATS_MOST];
    timing best = {0}, t;
    MTP_TRY(setup(b));
    MTP_TRY(one_step(b, &t));
    for (int64_t i = 0; i < b->s.repeat; i++) {
        MTP_TRY(one_step(b, &t));
        samples[i] = t.total;
        if (i == 0 || t.total < best.total) best = t;
    }
    qsort(samples, (size_t)b->s.repeat, sizeof *samples, compare_seconds);
    b->median = samples[b->s.repeat / 2];
    MTP_TRY(yardsticks(b));
    MTP_TRY(time_ops(b));
    (b->s.json ? report_json : report_text)(b, &best);
    return MTP_OK;
}

static void cleanup(bench *b)
{
    char path[128];
    mtp__step_free(b->step);
    mtp__optimizer_free(b->optimizer);
    mtp__rows_free(&b->rows);
    if (b->holds_embedding) mtp__embedding_drop(b->drafter);
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
