/* Protects: the optimizer over a list of tensors is AdamW with clipping by the global norm, decay only where it is
 * asked for, against a plain double loop; its plan is what it allocates. */
#include "support.h"

#include <math.h>

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
    assert_ok(mtp__optimizer_create(context, tensors, TENSORS, &config, &optimizer));
    for (int step = 1; step <= STEPS; step++) {
        double sum = 0, norm = 0;
        for (int i = 0; i < TENSORS; i++) {
            /* gradients small and large: clipped in some steps only */
            test_fill(&rng, tensors[i].grad.data, count_of(i), step % 2 ? 0.1f : 2.0f);
            for (int64_t j = 0; j < count_of(i); j++) {
                const double g = (double)((float *)tensors[i].grad.data)[j];
                sum += g * g;
            }
        }
        assert_ok(mtp__optimizer_grad_norm(optimizer, &norm));
        assert_true(fabs(norm - sqrt(sum)) < 1e-12 * sqrt(sum));
        const double scale = mtp__optimizer_clip(&config, norm);
        assert_true(fabs(scale - fmin(1.0, 1.5 / (norm + 1e-6))) < 1e-15);
        const double lr = 1e-2 * step;
        assert_ok(mtp__optimizer_step(optimizer, lr, scale));
        assert_int_equal(optimizer->step, step);
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

static void zero_means_no_clipping(void **state)
{
    (void)state;
    const mtp_adamw_config config = {.max_grad_norm = 0};
    assert_true(mtp__optimizer_clip(&config, 1e30) == 1.0);
}

static void a_gradient_that_is_not_finite_shows_in_the_norm(void **state)
{
    (void)state;
    const mtp_adamw_config config = {.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .max_grad_norm = 1};
    float value[4] = {1, 2, 3, 4}, grad[4] = {0, NAN, 0, 0};
    const mtp__optim_tensor tensor = {
        .name = "t", .value = mtp_view_1d(value, MTP_F32, 4), .grad = mtp_view_1d(grad, MTP_F32, 4)};
    mtp_context *context = open_context();
    mtp__optimizer *optimizer = NULL;
    double norm = 0;
    assert_ok(mtp__optimizer_create(context, &tensor, 1, &config, &optimizer));
    assert_ok(mtp__optimizer_grad_norm(optimizer, &norm));
    assert_true(isfinite(norm) == 0);
    grad[1] = INFINITY;
    assert_ok(mtp__optimizer_grad_norm(optimizer, &norm));
    assert_true(isfinite(norm) == 0);
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
    size_t moments = 0, scratch = 0;
    mtp__optimizer_plan(context, &tensor, 1, &moments, &scratch);
    assert_ok(mtp__optimizer_create(context, &tensor, 1, &config, &optimizer));
    assert_int_equal(moments, optimizer->moment_bytes);
    assert_int_equal(scratch, optimizer->scratch.size);
    assert_int_equal(moments, 2 * 192); /* 35 floats, rounded up to whole lines of 64 bytes */
    mtp__optimizer_free(optimizer);
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
    assert_fails(mtp__optimizer_create(context, &tensor, 1, &config, &optimizer), MTP_E_ARGUMENT, "tensor odd");
    tensor.grad = tensor.value;
    config.beta2 = 1;
    assert_fails(mtp__optimizer_create(context, &tensor, 1, &config, &optimizer), MTP_E_ARGUMENT, "beta2");
    mtp_context_free(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_a_plain_loop),
        cmocka_unit_test(zero_means_no_clipping),
        cmocka_unit_test(a_gradient_that_is_not_finite_shows_in_the_norm),
        cmocka_unit_test(plan_is_what_is_allocated),
        cmocka_unit_test(wrong_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
