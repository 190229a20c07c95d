/* A reference case opened for tests of the step: verifier, batch of all its samples, drafters from it. */
#ifndef MTP_TESTS_MODEL_FIXTURE_H
#define MTP_TESTS_MODEL_FIXTURE_H

#include "support.h"

#include <math.h>

#include "model/step.h"

typedef struct fixture {
    const char *directory;
    mtp_context *context;
    mtp_verifier *verifier;
    mtp_dataset *dataset;
    mtp_batch *batch;
    mtp__rows rows;
    int64_t counts[8];
    mtp_step_config config;
} fixture;

static inline void fixture_rows(fixture *f)
{
    mtp__rows_free(&f->rows);
    assert_ok(mtp__rows_create(f->batch->batch * f->batch->seq, f->config.num_speculative_steps, &f->rows));
    assert_ok(mtp__rows_build(f->batch, MTP__ROWS_SUPERVISED, NULL, &f->rows));
    memset(f->counts, 0, sizeof f->counts);
    mtp__rows_count(&f->rows, f->counts);
}

static inline void fixture_open(fixture *f, const char *name, mtp_head_mode mode)
{
    const mtp_context_options options = {.device = getenv("MTP_TEST_DEVICE"), .num_threads = 2};
    const mtp_dataset_options data = {.hidden_norm = MTP_HIDDEN_UNSET};
    *f = (fixture){.directory = test_path("%s/goldens/%s", MTP_TEST_DATA, name)};
    f->config = (mtp_step_config){
        .num_speculative_steps = 3, .head_mode = mode, .step_weight_beta = 0.6, .centroid_weight = 0.1};
    const char *samples = test_path("%s/samples", f->directory);
    assert_ok(mtp_context_create(&options, &f->context));
    assert_ok(mtp_verifier_open(test_path("%s/verifier", f->directory), NULL, &f->verifier));
    assert_ok(mtp_dataset_open(&samples, 1, f->verifier, &data, &f->dataset));
    const int64_t all[3] = {0, 1, 2};
    assert_ok(mtp_batch_collate(f->dataset, all, 3, true, &f->batch));
    fixture_rows(f);
}

static inline void fixture_close(fixture *f)
{
    mtp__rows_free(&f->rows);
    mtp_batch_free(f->batch);
    mtp_dataset_close(f->dataset);
    mtp_verifier_close(f->verifier);
    mtp_context_free(f->context);
}

static inline mtp_drafter *fixture_drafter(const fixture *f, const char *freeze)
{
    mtp_drafter *drafter;
    assert_ok(mtp_drafter_load(f->context, test_path("%s/assistant", f->directory), &drafter));
    if (freeze) assert_ok(mtp_drafter_freeze(drafter, freeze));
    assert_ok(mtp__drafter_alloc_grads(drafter));
    return drafter;
}

#define assert_near(got, want, tolerance) assert_true(fabs((got) - (want)) <= (tolerance))

/* One TRAIN run over `rows`; gradients are added to the drafter's. */
static inline double fixture_train(fixture *f, mtp_drafter *drafter, const mtp_step_config *config,
                                   const mtp__rows *rows, const int64_t *counts, mtp__step_outputs *outputs)
{
    mtp__step *step;
    mtp__step_sums sums[8];
    assert_ok(mtp__step_create(drafter, f->verifier, config, MTP__STEP_TRAIN, &step));
    assert_ok(mtp__step_run(step, f->batch, rows, counts, sums, outputs));
    mtp__step_free(step);
    return mtp__step_total(config, sums, counts);
}

/* Largest difference of two gradient blocks relative to the largest magnitude of each parameter's gradient. */
static inline double fixture_distance(const mtp_drafter *a, const mtp_drafter *b)
{
    double worst = 0, biggest = 0;
    for (int64_t i = 0; i < a->num_grads; i++) {
        const double x = fabs((double)((const float *)a->grads)[i]);
        if (x > biggest) biggest = x;
    }
    for (int64_t p = 0; p < a->num_params; p++) {
        double largest = 0.01 * biggest, error = 0;
        for (int64_t i = 0; i < a->params[p].count; i++) {
            const double x = (double)a->params[p].grad[i], y = (double)b->params[p].grad[i];
            if (fabs(x) > largest) largest = fabs(x);
            if (!(fabs(x - y) <= error)) error = fabs(x - y);
        }
        if (error / largest > worst) worst = error / largest;
    }
    return worst;
}

#endif
