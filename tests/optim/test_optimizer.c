/* Protects: the optimizer over a list of tensors is AdamW with clipping by the global norm, decay only where it is
 * asked for, against a plain double loop; its plan is what it allocates. */
#include "support.h"

#include <math.h>

#include "base/real.h"
#include "optim/optimizer.h"

enum { TENSORS = 3, STEPS = 7, MOST = 35 };

typedef struct plain {
    double p[MOST], m[MOST], v[MOST];
} plain;

static const int64_t shapes[TENSORS][2] = {{5, 7}, {3, 1}, {1, 1}};
static const int32_t ranks[TENSORS] = {2, 1, 1};

static int64_t count_of(int i)
{
    return shapes[i][0] * shapes[i][1];
}

static mtp_context *open_context(void)
{
    mtp_context *context = NULL;
    const mtp_context_options options = {.num_threads = 2};
    assert_ok(mtp_context_create(&options, &context));
    return context;
}

static void reference_step(plain *state, const float *grad, int64_t n, const mtp_adamw_config *c, double lr,
                           double decay, double scale, int step)
{
    for (int64_t i = 0; i < n; i++) {
        const double g = scale * (double)grad[i];
        state->p[i] *= 1 - lr * decay;
        state->m[i] = c->beta1 * state->m[i] + (1 - c->beta1) * g;
        state->v[i] = c->beta2 * state->v[i] + (1 - c->beta2) * g * g;
        const double root = sqrt(state->v[i]) / sqrt(1 - pow(c->beta2, step)) + c->epsilon;
        state->p[i] -= lr / (1 - pow(c->beta1, step)) * state->m[i] / root;
    }
}

static void equals_a_plain_loop(void **unused)
{
    (void)unused;
    const mtp_adamw_config config = {
        .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1, .max_grad_norm = 1.5};
    static const char *const names[TENSORS] = {"matrix", "vector", "scalar"};
    mtp_context *context = open_context();
    mtp__optim_tensor tensors[TENSORS];
    plain reference[TENSORS] = {0};
    test_rng rng = {11};
    for (int i = 0; i < TENSORS; i++) {
        float *value = test_guarded(count_of(i)), *grad = test_guarded(count_of(i));
        test_fill(&rng, value, count_of(i), 1.0f);
        for (int64_t j = 0; j < count_of(i); j++) reference[i].p[j] = (double)value[j];
        tensors[i] = (mtp__optim_tensor){.name = names[i],
                                         .value = mtp_view_nd(value, MTP_F32, ranks[i], shapes[i]),
                                         .grad = mtp_view_nd(grad, MTP_F32, ranks[i], shapes[i]),
                                         .decays = i == 0};
    }
    mtp__optimizer *optimizer = NULL;
    assert_ok(mtp__optimizer_create(context, tensors, TENSORS, &config, NULL, &optimizer));
    for (int step = 1; step <= STEPS; step++) {
        double sum = 0;
        mtp__optim_result result;
        for (int i = 0; i < TENSORS; i++) {
            /* gradients small and large: clipped in some steps only */
            test_fill(&rng, tensors[i].grad.data, count_of(i), step % 2 ? 0.1f : 2.0f);
            for (int64_t j = 0; j < count_of(i); j++) {
                const double g = (double)((float *)tensors[i].grad.data)[j];
                sum += g * g;
            }
        }
        const double lr = 1e-2 * step;
        assert_ok(mtp__optimizer_step(optimizer, &(mtp__optim_update){.learning_rate = lr}));
        assert_ok(mtp__optimizer_read(optimizer, &result));
        const double scale = result.factor;
        assert_true(fabs(result.norm - sqrt(sum)) < 1e-12 * sqrt(sum));
        assert_true(fabs(scale - fmin(1.0, 1.5 / (result.norm + 1e-6))) < 1e-15);
        assert_true(step % 2 ? scale == 1 : scale < 1);
        assert_true(result.learning_rate == lr && !result.skipped);
        assert_int_equal(result.step, step);
        for (int i = 0; i < TENSORS; i++) {
            const float *value = tensors[i].value.data;
            reference_step(&reference[i], tensors[i].grad.data, count_of(i), &config, lr, i == 0 ? 0.1 : 0.0, scale,
                           step);
            for (int64_t j = 0; j < count_of(i); j++)
                if (fabs((double)value[j] - reference[i].p[j]) > 2e-6)
                    fail_msg("step %d, %s[%d]: %.9g, want %.9g", step, names[i], (int)j, (double)value[j],
                             reference[i].p[j]);
        }
    }
    mtp__optimizer_free(optimizer);
    for (int i = 0; i < TENSORS; i++) {
        test_guarded_check(tensors[i].value.data);
        test_guarded_check(tensors[i].grad.data);
        test_guarded_free(tensors[i].value.data);
        test_guarded_free(tensors[i].grad.data);
    }
    mtp_context_free(context);
}

/* One block of values, gradients and shadows with three tensors one behind the other. */
enum { PLACES = 112, BLOCK_TENSORS = 3 };
typedef struct block {
    float values[PLACES], grads[PLACES];
    uint16_t shadows[PLACES], rounded[PLACES]; /* rounded: values in place of `values` */
    mtp__optim_tensor tensors[BLOCK_TENSORS];
} block;

static void make_block(block *b, bool shadows, bool rounded)
{
    static const int64_t begins[BLOCK_TENSORS] = {0, 48, 64}, counts[BLOCK_TENSORS] = {35, 16, 47};
    static const char *const names[BLOCK_TENSORS] = {"a", "b", "c"};
    test_rng rng = {5};
    *b = (block){.values = {0}};
    for (int i = 0; i < BLOCK_TENSORS; i++) {
        const int64_t at = begins[i], n = counts[i];
        test_fill(&rng, b->values + at, n, 1.0f);
        test_fill(&rng, b->grads + at, n, 0.1f);
        b->tensors[i] = (mtp__optim_tensor){.name = names[i],
                                            .place = 160 + at,
                                            .value = rounded ? mtp_view_1d(b->rounded + at, MTP_BF16, n)
                                                             : mtp_view_1d(b->values + at, MTP_F32, n),
                                            .grad = mtp_view_1d(b->grads + at, MTP_F32, n),
                                            .decays = i != 1};
        if (shadows) b->tensors[i].shadow = mtp_view_1d(b->shadows + at, MTP_BF16, n);
    }
}

static const mtp_adamw_config ordinary = {
    .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.5, .max_grad_norm = 1, .seed = 99};

static void step(mtp__optimizer *optimizer, double learning_rate)
{
    mtp__optim_result result;
    assert_ok(mtp__optimizer_step(optimizer, &(mtp__optim_update){.learning_rate = learning_rate}));
    assert_ok(mtp__optimizer_read(optimizer, &result));
    assert_false(result.skipped);
}

/* What lies together is one span with one norm, and gets the same bits as tensors for themselves. */
static void neighbours_are_updated_at_once(void **state)
{
    (void)state;
    static block together, apart;
    mtp_context *context = open_context();
    for (int rounded = 0; rounded < 2; rounded++) {
        mtp__optimizer *one = NULL, *three[BLOCK_TENSORS];
        mtp_adamw_config config = ordinary;
        config.max_grad_norm = 0; /* the three know no norm of all */
        make_block(&together, !rounded, rounded);
        make_block(&apart, !rounded, rounded);
        assert_ok(mtp__optimizer_create(context, together.tensors, BLOCK_TENSORS, &config, NULL, &one));
        assert_int_equal(one->num_spans, 1);
        assert_int_equal(one->num_measured, 1);
        for (int i = 0; i < BLOCK_TENSORS; i++)
            assert_ok(mtp__optimizer_create(context, &apart.tensors[i], 1, &config, NULL, &three[i]));
        for (int n = 0; n < 4; n++) {
            step(one, 1e-2);
            for (int i = 0; i < BLOCK_TENSORS; i++) step(three[i], 1e-2);
            assert_memory_equal(together.values, apart.values, sizeof together.values);
            assert_memory_equal(together.rounded, apart.rounded, sizeof together.rounded);
            assert_memory_equal(together.shadows, apart.shadows, sizeof together.shadows);
        }
        for (int i = 0; i < PLACES; i++)
            assert_true(i < 35 || (i >= 48 && i < 111) || (together.values[i] == 0 && together.rounded[i] == 0));
        mtp__optimizer_free(one);
        for (int i = 0; i < BLOCK_TENSORS; i++) mtp__optimizer_free(three[i]);
    }
    mtp_context_free(context);
}

static void shadows_are_the_values_rounded(void **state)
{
    (void)state;
    static block b;
    mtp_context *context = open_context();
    mtp__optimizer *optimizer = NULL;
    uint16_t want[PLACES];
    make_block(&b, true, false);
    assert_ok(mtp__optimizer_create(context, b.tensors, BLOCK_TENSORS, &ordinary, NULL, &optimizer));
    step(optimizer, 1e-2);
    mtp__real_from_f32(want, MTP_BF16, b.values, PLACES);
    for (int i = 0; i < PLACES - 1; i++) assert_int_equal(b.shadows[i], want[i]);
    mtp__optimizer_free(optimizer);
    mtp_context_free(context);
}

/* Every reason for a skip leaves every bit of values, moments and number of the step. */
static void a_bad_update_changes_nothing(void **state)
{
    (void)state;
    static block b, before;
    mtp_context *context = open_context();
    mtp__optimizer *optimizer = NULL;
    mtp__optim_result result;
    double watched[3] = {1, 2, 3};
    const mtp_view watch = mtp_view_1d(watched, MTP_F64, 3);
    make_block(&b, true, false);
    assert_ok(mtp__optimizer_create(context, b.tensors, BLOCK_TENSORS, &ordinary, NULL, &optimizer));
    step(optimizer, 1e-2);
    char *moments = malloc(optimizer->moment_bytes);
    memcpy(moments, optimizer->moments, optimizer->moment_bytes);
    before = b;
    for (int reason = 0; reason < 5; reason++) {
        mtp__optim_update update = {.learning_rate = 1e-2, .watch = watch, .skip = reason == 0};
        b = before;
        watched[2] = reason == 1 ? (double)NAN : reason == 2 ? -(double)INFINITY : 3;
        if (reason == 3) b.grads[50] = NAN;
        if (reason == 4) b.grads[110] = INFINITY;
        assert_ok(mtp__optimizer_step(optimizer, &update));
        assert_ok(mtp__optimizer_read(optimizer, &result));
        assert_true(result.skipped);
        assert_int_equal(result.step, 1);
        assert_true(isfinite(result.norm) ? reason < 3 : reason >= 3);
        assert_memory_equal(b.values, before.values, sizeof b.values);
        assert_memory_equal(b.shadows, before.shadows, sizeof b.shadows);
        assert_memory_equal(moments, optimizer->moments, optimizer->moment_bytes);
    }
    /* and the next good one is the second */
    b = before;
    watched[2] = 3;
    assert_ok(mtp__optimizer_step(optimizer, &(mtp__optim_update){.learning_rate = 1e-2, .watch = watch}));
    assert_ok(mtp__optimizer_read(optimizer, &result));
    assert_int_equal(result.step, 2);
    assert_false(result.skipped);
    assert_true(memcmp(b.values, before.values, sizeof b.values) != 0);
    free(moments);
    mtp__optimizer_free(optimizer);
    mtp_context_free(context);
}

/* Bits depend on the number of the step, so one that goes on behind a number does what one that counted there does. */
static void it_goes_on_where_another_stopped(void **state)
{
    (void)state;
    static block a, b;
    mtp_context *context = open_context();
    mtp__optimizer *first = NULL, *second = NULL;
    make_block(&a, false, true);
    assert_ok(mtp__optimizer_create(context, a.tensors, BLOCK_TENSORS, &ordinary, NULL, &first));
    for (int i = 0; i < 3; i++) step(first, 1e-2);
    make_block(&b, false, true);
    assert_ok(mtp__optimizer_create(context, b.tensors, BLOCK_TENSORS, &ordinary, NULL, &second));
    memcpy(b.rounded, a.rounded, sizeof b.rounded);
    memcpy(second->moments, first->moments, first->moment_bytes);
    assert_ok(mtp__optimizer_set_step(second, 3));
    for (int i = 0; i < 3; i++) {
        step(first, 1e-2);
        step(second, 1e-2);
    }
    assert_memory_equal(a.rounded, b.rounded, sizeof a.rounded);
    mtp__optimizer_free(first);
    mtp__optimizer_free(second);
    mtp_context_free(context);
}

static void zero_means_no_clipping(void **state)
{
    (void)state;
    mtp_adamw_config config = {.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .max_grad_norm = 0};
    float value[2] = {1, 2}, grad[2] = {1e18f, 0};
    const mtp__optim_tensor tensor = {
        .name = "t", .value = mtp_view_1d(value, MTP_F32, 2), .grad = mtp_view_1d(grad, MTP_F32, 2)};
    mtp_context *context = open_context();
    mtp__optimizer *optimizer = NULL;
    mtp__optim_result result;
    assert_ok(mtp__optimizer_create(context, &tensor, 1, &config, NULL, &optimizer));
    step(optimizer, 1e-3);
    assert_ok(mtp__optimizer_read(optimizer, &result));
    assert_true(result.factor == 1.0 && fabs(result.norm / 1e18 - 1) < 1e-6);
    mtp__optimizer_free(optimizer);
    mtp_context_free(context);
}

static void plan_is_what_is_allocated(void **state)
{
    (void)state;
    const mtp_adamw_config config = {.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8};
    float value[35], grad[35];
    const int64_t shape[2] = {5, 7};
    const mtp__optim_tensor tensor = {
        .name = "t", .value = mtp_view_nd(value, MTP_F32, 2, shape), .grad = mtp_view_nd(grad, MTP_F32, 2, shape)};
    mtp_context *context = open_context();
    mtp__optimizer *optimizer = NULL;
    const mtp__optim_rank worlds[] = {{.rank = 0, .world_size = 1}, {.rank = 0, .world_size = 2}};
    for (int i = 0; i < 3; i++) {
        const mtp__optim_rank *rank = i ? &worlds[i - 1] : NULL;
        size_t moments = 0, extra = 0;
        assert_ok(mtp__optimizer_plan(context, &tensor, 1, rank, &moments, &extra));
        assert_ok(mtp__optimizer_create(context, &tensor, 1, &config, rank, &optimizer));
        assert_int_equal(moments, optimizer->moment_bytes);
        assert_int_equal(extra, optimizer->extra_bytes);
        assert_int_equal(moments, 2 * (i < 2 ? 192 : 64)); /* 35 floats in grains of 16 */
        mtp__optimizer_free(optimizer);
    }
    mtp_context_free(context);
}

static void wrong_arguments(void **state)
{
    (void)state;
    mtp_adamw_config config = {.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8};
    float value[4], grad[4];
    mtp__optim_tensor tensor = {
        .name = "odd", .value = mtp_view_1d(value, MTP_F32, 4), .grad = mtp_view_1d(grad, MTP_F32, 3)};
    mtp_context *context = open_context();
    mtp__optimizer *optimizer = NULL;
    assert_fails(mtp__optimizer_create(context, &tensor, 1, &config, NULL, &optimizer), MTP_E_ARGUMENT, "tensor odd");
    tensor.grad = tensor.value;
    config.beta2 = 1;
    assert_fails(mtp__optimizer_create(context, &tensor, 1, &config, NULL, &optimizer), MTP_E_ARGUMENT, "beta2");
    mtp_context_free(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_a_plain_loop),
        cmocka_unit_test(zero_means_no_clipping),
        cmocka_unit_test(neighbours_are_updated_at_once),
        cmocka_unit_test(shadows_are_the_values_rounded),
        cmocka_unit_test(a_bad_update_changes_nothing),
        cmocka_unit_test(it_goes_on_where_another_stopped),
        cmocka_unit_test(plan_is_what_is_allocated),
        cmocka_unit_test(wrong_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
