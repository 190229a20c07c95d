/* A drafter and its optimizer with numbers of no meaning, for tests of checkpoints. */
#ifndef MTP_TESTS_RUN_FIXTURE_H
#define MTP_TESTS_RUN_FIXTURE_H

#include "support.h"

#include "run/checkpoint.h"

typedef struct fixture {
    mtp_context *context;
    mtp_drafter *drafter;
    mtp__optimizer *optimizer;
    const char *run;
} fixture;

/* The optimizer of rank `rank` of `ranks` that share the moments: every trained tensor is cut into equal parts (the
 * first ranks have one value more), and tensors of fewer values than ranks leave ranks out. */
static inline mtp__optimizer *open_part(const fixture *f, int64_t rank, int64_t ranks)
{
    const mtp_adamw_config adamw = {.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8};
    mtp__optim_tensor *tensors = calloc((size_t)f->drafter->num_params, sizeof *tensors);
    mtp__optimizer *optimizer = NULL;
    int64_t count = 0;
    for (int64_t i = 0; i < f->drafter->num_params; i++) {
        const mtp__param *param = &f->drafter->params[i];
        const int64_t first = param->count * rank / ranks, length = param->count * (rank + 1) / ranks - first;
        if (!param->trained || length == 0) continue;
        mtp__optim_tensor tensor = {
            .name = param->name, .first = first, .value = mtp__param_value(param), .grad = mtp__param_grad(param)};
        if (length < param->count) {
            tensor.value = mtp_view_nd((float *)param->value + first, MTP_F32, 1, &length);
            tensor.grad = mtp_view_nd(param->grad + first, MTP_F32, 1, &length);
        }
        tensors[count++] = tensor;
    }
    assert_ok(mtp__optimizer_create(f->context, tensors, count, &adamw, NULL, &optimizer));
    free(tensors);
    return optimizer;
}

/* Updates that an optimizer has made. */
static inline int64_t step_of(mtp__optimizer *optimizer)
{
    mtp__optim_result result;
    assert_ok(mtp__optimizer_read(optimizer, &result));
    return result.step;
}

static inline fixture open_fixture(void)
{
    fixture f = {.run = test_path("%s/run", test_dir())};
    const mtp_context_options options = {.num_threads = 1};
    assert_ok(mtp_context_create(&options, &f.context));
    assert_ok(mtp_drafter_load(f.context, MTP_TEST_DATA "/sample/drafter_init", &f.drafter));
    assert_ok(mtp_drafter_freeze(f.drafter, "*.layer_scalar"));
    assert_ok(mtp__drafter_alloc_grads(f.drafter));
    f.optimizer = open_part(&f, 0, 1);
    return f;
}

static inline void close_fixture(fixture *f)
{
    mtp__optimizer_free(f->optimizer);
    mtp_drafter_free(f->drafter);
    mtp_context_free(f->context);
}

static inline void scramble(fixture *f, uint64_t seed)
{
    test_rng rng = {seed};
    for (int64_t i = 0; i < f->drafter->num_params; i++)
        test_fill(&rng, f->drafter->params[i].value, f->drafter->params[i].count, 1.0f);
    test_fill(&rng, f->optimizer->moments, (int64_t)(f->optimizer->moment_bytes / sizeof(float)), 1.0f);
}

/* Every weight and every moment of the two are the same bits. */
static inline void assert_same_state(const fixture *f, const fixture *g)
{
    for (int64_t i = 0; i < f->drafter->num_params; i++)
        assert_memory_equal(f->drafter->params[i].value, g->drafter->params[i].value,
                            (size_t)f->drafter->params[i].count * sizeof(float));
    for (int64_t i = 0; i < f->optimizer->num_tensors; i++) {
        const size_t size = (size_t)mtp_view_count(f->optimizer->exp_avg[i]) * sizeof(float);
        assert_memory_equal(f->optimizer->exp_avg[i].data, g->optimizer->exp_avg[i].data, size);
        assert_memory_equal(f->optimizer->exp_avg_sq[i].data, g->optimizer->exp_avg_sq[i].data, size);
    }
}

/* A manifest of `step` without shards. */
static inline mtp__manifest *make_manifest(int64_t step)
{
    mtp__manifest *m = mtp__manifest_create();
    assert_non_null(m);
    m->step = step;
    m->total_steps = 100;
    m->epoch = 3;
    m->batch = 4;
    m->seed = 9007199254740991u;
    m->drafter = strdup("/models/a \"drafter\"");
    m->verifier = 0xfedcba9876543210u;
    m->dataset = 0x8000000000000001u;
    m->num_samples = 6;
    m->best_step = step;
    m->best_length = 0.1 + 0.2;
    m->evals_since_best = 2;
    m->last_eval_step = step;
    assert_ok(mtp__manifest_add_setting(m, "optimizer.learning_rate", "0.001"));
    return m;
}

/* Names in RUN/checkpoints. */
static inline int64_t count_directories(const char *run)
{
    int64_t count = 0;
    FILE *names = popen(test_path("ls -A '%s/checkpoints' | wc -l", run), "r");
    assert_non_null(names);
    assert_int_equal(fscanf(names, "%ld", &count), 1);
    pclose(names);
    return count;
}

#endif
