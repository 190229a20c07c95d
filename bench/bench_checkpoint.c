/* What a checkpoint costs: how long training waits for the copy it is written from, against one training step of an
 * official size, how long the thread beside it writes, and what steps cost meanwhile.
 *
 *   bench_checkpoint [--size e2b] [--rows 512] [--num-speculative-steps 3] [--vocab-size 262144] [--repeat 3]
 *                    [--threads 0] [--world-size 1] [--directory DIR] [--json]
 *
 * With --world-size N the share of rank 0 of N is copied and written. Checkpoints go to a directory made under DIR
 * (/tmp) and are removed. The best of the repeats, after a step and a save to warm up. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "model/step.h"
#include "options.h"
#include "run/saver.h"
#include "synthetic.h"

typedef struct settings {
    const char *size, *directory;
    int64_t rows, K, vocab_size, repeat, threads, world_size;
    bool json;
} settings;

typedef struct bench {
    settings s;
    mtp_context *context;
    mtp_drafter_config config;
    mtp_drafter *drafter;
    mtp_verifier *verifier;
    mtp_batch batch;
    mtp__rows rows;
    int64_t counts[MTP_MAX_SPECULATIVE_STEPS];
    mtp__step *step;
    mtp__optimizer *optimizer;
    mtp__saver *saver;
    char *directory;
    uint64_t bytes; /* of the shard */
} bench;

/* Seconds, each the best of the repeats. */
typedef struct timing {
    double step;    /* without a save under way */
    double copy;    /* the wait of training */
    double write;   /* from the copy to the durable shard */
    double beside;  /* a step meanwhile */
    double at_once; /* a save that training waits for */
} timing;

static mtp_status parse(int argc, char **argv, settings *s)
{
    *s = (settings){.size = "e2b", .directory = "/tmp", .rows = 512, .K = 3, .repeat = 3, .world_size = 1};
    const bench_option options[] = {
        {.name = "--size", .text = &s->size},
        {.name = "--directory", .text = &s->directory},
        {.name = "--rows", .number = &s->rows},
        {.name = "--num-speculative-steps", .number = &s->K},
        {.name = "--vocab-size", .number = &s->vocab_size},
        {.name = "--repeat", .number = &s->repeat},
        {.name = "--threads", .number = &s->threads},
        {.name = "--world-size", .number = &s->world_size},
        {.name = "--json", .flag = &s->json},
    };
    MTP_TRY(bench_options(argc, argv, options, sizeof options / sizeof *options));
    if (s->rows < 1 || s->K < 1 || s->K > MTP_MAX_SPECULATIVE_STEPS || s->repeat < 1 || s->world_size < 1)
        return MTP_FAIL(MTP_E_CONFIG, "the numbers of rows, draft steps, repeats and ranks start at 1");
    return MTP_OK;
}

static mtp_status setup(bench *b)
{
    const mtp_context_options options = {.num_threads = (int)b->s.threads};
    MTP_TRY(mtp_context_create(&options, &b->context));
    MTP_TRY(synthetic_config(b->s.size, b->s.vocab_size, &b->config));
    const mtp_step_config step = {.num_speculative_steps = (int32_t)b->s.K,
                                  .step_weight_beta = 0.6,
                                  .centroid_weight = 0.1,
                                  .rows_per_chunk = 512,
                                  .head_mode = b->config.ordered ? MTP_HEAD_MASKED : MTP_HEAD_FLAT};
    MTP_TRY(synthetic_batch(&b->config, b->s.rows + b->s.K + 1, &b->batch));
    MTP_TRY(synthetic_verifier(b->directory, &b->config, b->batch.token_ids, b->batch.seq, &b->verifier));
    MTP_TRY(synthetic_drafter(b->context, &b->config, &b->drafter));
    MTP_TRY(mtp_drafter_freeze(b->drafter, "*.layer_scalar"));
    MTP_TRY(mtp__drafter_alloc_grads(b->drafter));
    MTP_TRY(synthetic_optimizer(b->context, b->drafter, &b->optimizer));
    memset(b->batch.loss_mask, 0, (size_t)b->batch.seq);
    memset(b->batch.loss_mask + 2, 1, (size_t)b->s.rows);
    MTP_TRY(mtp__rows_create(b->batch.seq, (int32_t)b->s.K, &b->rows));
    MTP_TRY(mtp__rows_build(&b->batch, MTP__ROWS_SUPERVISED, NULL, &b->rows));
    mtp__rows_count(&b->rows, b->counts);
    MTP_TRY(mtp__step_create(b->drafter, b->verifier, &step, MTP__STEP_TRAIN, &b->step));
    const mtp__saver_options saver = {.run_directory = b->directory,
                                      .drafter = b->drafter,
                                      .optimizer = b->optimizer,
                                      .share = {.rank = 0, .world_size = b->s.world_size}};
    return mtp__saver_create(&saver, &b->saver);
}

static void keep_best(double *best, double seconds)
{
    if (*best == 0 || seconds < *best) *best = seconds;
}

static mtp_status one_step(bench *b, double *best)
{
    mtp__step_sums sums[MTP_MAX_SPECULATIVE_STEPS];
    mtp__optim_result result;
    const double start = synthetic_seconds();
    MTP_TRY(b->context->ops->memory_zero(b->context->device, b->drafter->grads,
                                         (size_t)b->drafter->num_grads * sizeof(float)));
    MTP_TRY(mtp__step_run(b->step, &b->batch, &b->rows, b->counts, sums, NULL));
    MTP_TRY(mtp__optimizer_step(b->optimizer, &(mtp__optim_update){.learning_rate = 1e-4}));
    MTP_TRY(mtp__optimizer_read(b->optimizer, &result)); /* waits */
    keep_best(best, synthetic_seconds() - start);
    return MTP_OK;
}

/* A save, and training steps until its shard is durable. */
static mtp_status one_save(bench *b, int64_t step, timing *t)
{
    const mtp__save save = {.step = step, .retention = {.best_step = -1}, .metrics = -1};
    mtp__save_report report;
    const double start = synthetic_seconds();
    MTP_TRY(mtp__saver_begin(b->saver, &save));
    const double copied = synthetic_seconds();
    keep_best(&t->copy, copied - start);
    mtp__saver_report(b->saver, &report);
    for (; report.state == MTP__SAVE_WRITING; mtp__saver_report(b->saver, &report)) MTP_TRY(one_step(b, &t->beside));
    const bool written = report.state == MTP__SAVE_WRITTEN;
    b->bytes = report.bytes;
    mtp__saver_cancel(b->saver);
    if (!written) return MTP_FAIL((mtp_status)report.status, "%s", report.reason);
    /* alone, for the time that the disk takes */
    const double begin = synthetic_seconds();
    MTP_TRY(mtp__saver_begin(b->saver, &save));
    const double ready = synthetic_seconds();
    mtp__saver_wait(b->saver, 3600, &report);
    const double end = synthetic_seconds();
    keep_best(&t->copy, ready - begin);
    keep_best(&t->write, end - ready);
    keep_best(&t->at_once, end - begin);
    mtp__saver_cancel(b->saver);
    return MTP_OK;
}

static void report(const bench *b, const timing *t)
{
    const mtp_context_info info = mtp_context_describe(b->context);
    if (b->s.json)
        printf("{\"bench\": \"checkpoint\", \"size\": \"%s\", \"rows\": %lld, \"num_speculative_steps\": %lld, "
               "\"vocab_size\": %lld, \"world_size\": %lld, \"threads\": %d, \"isa\": \"%s\", \"shard_bytes\": %llu, "
               "\"step_seconds\": %.4f, \"copy_seconds\": %.4f, \"copy_in_steps\": %.3f, \"write_seconds\": %.4f, "
               "\"step_beside_seconds\": %.4f, \"at_once_seconds\": %.4f}\n",
               b->s.size, (long long)b->rows.num_rows, (long long)b->s.K, (long long)b->config.vocab_size,
               (long long)b->s.world_size, info.num_threads, info.isa, (unsigned long long)b->bytes, t->step, t->copy,
               t->copy / t->step, t->write, t->beside, t->at_once);
    else
        printf(
            "%s: a step of %lld rows takes %.3f s; a checkpoint of %.1f MiB a rank (%lld ranks) stops training for "
            "%.3f s (%.2f steps), is written beside it in %.3f s (a step then takes %.3f s); at once it would stop it "
            "for %.3f s\n",
            b->s.size, (long long)b->rows.num_rows, t->step, (double)b->bytes / (1 << 20), (long long)b->s.world_size,
            t->copy, t->copy / t->step, t->write, t->beside, t->at_once);
}

static mtp_status run(bench *b)
{
    timing warm = {0}, t = {0};
    MTP_TRY(setup(b));
    MTP_TRY(one_step(b, &warm.step));
    MTP_TRY(one_save(b, 1, &warm));
    for (int64_t i = 0; i < b->s.repeat; i++) {
        MTP_TRY(one_step(b, &t.step));
        MTP_TRY(one_save(b, i + 2, &t));
    }
    report(b, &t);
    return MTP_OK;
}

static void cleanup(bench *b)
{
    static const char *const left[] = {"config.json", "model.safetensors"};
    char *path = NULL;
    mtp__saver_free(b->saver);
    mtp__step_free(b->step);
    mtp__optimizer_free(b->optimizer);
    mtp__rows_free(&b->rows);
    mtp_drafter_free(b->drafter);
    mtp_verifier_close(b->verifier);
    synthetic_batch_free(&b->batch);
    mtp_drafter_config_free(&b->config);
    mtp_context_free(b->context);
    for (size_t i = 0; i < sizeof left / sizeof *left; i++) {
        if (mtp__path_join(b->directory, left[i], &path) == MTP_OK) unlink(path);
        free(path);
    }
    if (mtp__path_join(b->directory, "checkpoints", &path) == MTP_OK) rmdir(path);
    free(path);
    rmdir(b->directory);
    free(b->directory);
}

int main(int argc, char **argv)
{
    bench b = {.directory = NULL};
    mtp_status status = parse(argc, argv, &b.s);
    if (status == MTP_OK) status = mtp__path_join(b.s.directory, "mtp-bench-XXXXXX", &b.directory);
    if (status == MTP_OK && !mkdtemp(b.directory)) status = MTP_FAIL(MTP_E_IO, "cannot make %s", b.directory);
    if (status == MTP_OK) {
        status = run(&b);
        cleanup(&b);
    }
    if (status != MTP_OK) fprintf(stderr, "bench_checkpoint: %s\n", mtp_last_error()->message);
    return mtp_status_exit_code(status);
}
