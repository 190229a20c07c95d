/* Protects: the cross-entropy of dense rows and its gradient, in place or not, for every width and size of logit. */
#include "ops_check.h"

static const struct {
    int64_t R, N, gap;
    float scale;
} sizes[] = {{1, 1, 0, 1},    {3, 5, 2, 1},    {4, 17, 0, 80},    {7, 64, 3, 3},
             {2, 1021, 0, 9}, {5, 2048, 0, 3}, {3, 10007, 1, 20}, {30, 33, 0, 1e-3f}};
enum { NUM_SIZES = sizeof sizes / sizeof *sizes };
static const double tolerance = 1e-6;

typedef struct problem {
    ops_tensor logits, scale, loss, dlogits, target;
} problem;

static problem make(test_rng *rng, size_t i)
{
    const int64_t R = sizes[i].R, N = sizes[i].N;
    return (problem){.logits = ops_random(rng, MTP_F32, R, N, sizes[i].gap, sizes[i].scale),
                     .scale = ops_random_vector(rng, MTP_F32, R, 1),
                     .loss = ops_random_vector(rng, MTP_F32, R, 1),
                     .dlogits = ops_random(rng, MTP_F32, R, N, sizes[i].gap, 1),
                     .target = ops_indices(rng, R, N)};
}

static mtp_xent_args args(const problem *p)
{
    return (mtp_xent_args){.logits = p->logits.view,
                           .target = p->target.view,
                           .scale = p->scale.view,
                           .loss = p->loss.view,
                           .dlogits = p->dlogits.view};
}

static void check(const problem *p, const ops_tensor *gradient)
{
    const int64_t R = ops_rows(&p->logits), N = ops_width(&p->logits);
    double *loss = ops_doubles(R), *dz = ops_doubles(R * N);
    for (int64_t r = 0; r < R; r++) {
        const float *z = p->logits.values + r * N;
        const int32_t target = ((const int32_t *)p->target.view.data)[r];
        double top = -INFINITY, sum = 0;
        for (int64_t i = 0; i < N; i++) top = (double)z[i] > top ? (double)z[i] : top;
        for (int64_t i = 0; i < N; i++) sum += exp((double)z[i] - top);
        loss[r] = top + log(sum) - (double)z[target];
        for (int64_t i = 0; i < N; i++)
            dz[r * N + i] = (double)p->scale.values[r] * (exp((double)z[i] - top) / sum - (i == target));
    }
    ops_expect("loss", &p->loss, loss, tolerance);
    ops_expect("dlogits", gradient, dz, tolerance);
}

static void formula(mtp_device *device)
{
    test_rng rng = {.state = 61};
    for (size_t i = 0; i < NUM_SIZES; i++) {
        const problem p = make(&rng, i);
        mtp_xent_args a = args(&p);
        assert_ok(ops_backend()->xent(device, &a));
        check(&p, &p.dlogits);
        const uint64_t loss = ops_hash(&p.loss, 0), gradient = ops_hash(&p.dlogits, 0);
        a.dlogits = a.logits; /* in place, with the same bits */
        assert_ok(ops_backend()->xent(device, &a));
        check(&p, &p.logits);
        assert_true(ops_hash(&p.loss, 0) == loss && ops_hash(&p.logits, 0) == gradient);
        ops_release_buffers();
    }
}

static void each_isa_follows_the_formula(void **state)
{
    (void)state;
    ops_each_isa(formula);
}

/* A confident row: the loss is far smaller than a unit of its logits. */
static void small_losses_keep_their_digits(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    float logits[2] = {100, 90}, loss = 0;
    int32_t target = 0;
    const mtp_xent_args a = {.logits = mtp_view_2d(logits, MTP_F32, 1, 2),
                             .target = mtp_view_1d(&target, MTP_I32, 1),
                             .loss = mtp_view_1d(&loss, MTP_F32, 1)};
    assert_ok(ops_backend()->xent(device, &a));
    const double want = log1p(exp(-10.0));
    assert_true(fabs((double)loss - want) < 1e-2 * want); /* 1 + e^-10 has 2^-24 of resolution in the sum */
    ops_release();
}

static uint64_t run_once(mtp_device *device)
{
    test_rng rng = {.state = 62};
    const problem p = make(&rng, 7);
    const mtp_xent_args a = args(&p);
    assert_ok(ops_backend()->xent(device, &a));
    return ops_hash(&p.dlogits, ops_hash(&p.loss, 0));
}

static void threads_do_not_change_a_bit(void **state)
{
    (void)state;
    ops_same_bits(run_once);
}

static void a_row_alone_has_the_same_bits(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 2);
    test_rng rng = {.state = 63};
    const problem all = make(&rng, 5);
    const mtp_xent_args a = args(&all);
    assert_ok(ops_backend()->xent(device, &a));
    for (int64_t r = 0; r < sizes[5].R; r++) {
        float loss;
        float *gradient = ops_bytes((size_t)sizes[5].N * sizeof(float));
        const mtp_xent_args one = {.logits = mtp_view_rows(a.logits, r, 1),
                                   .target = mtp_view_rows(a.target, r, 1),
                                   .scale = mtp_view_rows(a.scale, r, 1),
                                   .loss = mtp_view_1d(&loss, MTP_F32, 1),
                                   .dlogits = mtp_view_2d(gradient, MTP_F32, 1, sizes[5].N)};
        assert_ok(ops_backend()->xent(device, &one));
        assert_memory_equal(&loss, ops_row(&all.loss, 0) + r, sizeof loss);
        assert_memory_equal(gradient, ops_row(&all.dlogits, r), (size_t)sizes[5].N * sizeof(float));
    }
    ops_release();
}

typedef struct total {
    mtp_device *device;
    const problem *p;
} total;

static double weighted_loss(void *context)
{
    const total *t = context;
    mtp_xent_args a = args(t->p);
    a.dlogits.data = NULL;
    assert_ok(ops_backend()->xent(t->device, &a));
    return ops_weighted_sum(&t->p->loss, t->p->scale.values);
}

static void gradient_matches_differences(void **state)
{
    (void)state;
    total t = {.device = ops_open(NULL, 2)};
    test_rng rng = {.state = 64};
    const problem p = make(&rng, 3);
    t.p = &p;
    const mtp_xent_args a = args(&p);
    assert_ok(ops_backend()->xent(t.device, &a));
    double *gradient = ops_doubles(ops_rows(&p.logits) * ops_width(&p.logits));
    for (int64_t r = 0; r < ops_rows(&p.logits); r++)
        ops_differences(weighted_loss, &t, ops_row(&p.logits, r), ops_width(&p.logits),
                        gradient + r * ops_width(&p.logits));
    ops_expect("dlogits by differences", &p.dlogits, gradient, 1e-3);
    ops_release();
}

static void bad_arguments_are_named(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    test_rng rng = {.state = 65};
    const problem p = make(&rng, 1);
    mtp_xent_args a = args(&p);
    a.scale.data = NULL;
    assert_fails(ops_backend()->xent(device, &a), MTP_E_ARGUMENT, "xent: scale is missing");
    a = args(&p);
    a.loss = mtp_view_1d(a.loss.data, MTP_F32, 2);
    assert_fails(ops_backend()->xent(device, &a), MTP_E_ARGUMENT, "loss is F32 [2]; it must be F32 [3]");
    a = args(&p);
    ((int32_t *)a.target.data)[2] = 5;
    assert_fails(ops_backend()->xent(device, &a), MTP_E_ARGUMENT, "target[2] is 5, outside [0, 5)");
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_isa_follows_the_formula), cmocka_unit_test(small_losses_keep_their_digits),
        cmocka_unit_test(threads_do_not_change_a_bit),  cmocka_unit_test(a_row_alone_has_the_same_bits),
        cmocka_unit_test(gradient_matches_differences), cmocka_unit_test(bad_arguments_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
