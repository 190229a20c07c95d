/* Protects: AdamW step for step against the formula in double; the sum of squares in double; both with the same bits
 * for any number of threads and beyond one block. */
#include "ops_check.h"

typedef struct state4 {
    ops_tensor p, m, v, g;
} state4;

static state4 make(int64_t n)
{
    test_rng rng = {41};
    state4 s = {.p = ops_random_vector(&rng, MTP_F32, n, 1.0f),
                .m = ops_random_vector(&rng, MTP_F32, n, 0.0f),
                .v = ops_random_vector(&rng, MTP_F32, n, 0.0f),
                .g = ops_random_vector(&rng, MTP_F32, n, 0.1f)};
    return s;
}

static mtp_adamw_args arguments(const state4 *s, int64_t step)
{
    return (mtp_adamw_args){.p = s->p.view,
                            .m = s->m.view,
                            .v = s->v.view,
                            .g = s->g.view,
                            .lr = 1e-3,
                            .beta1 = 0.9,
                            .beta2 = 0.999,
                            .eps = 1e-8,
                            .weight_decay = 0.1,
                            .grad_scale = 0.5,
                            .step = step};
}

static void steps(mtp_device *device)
{
    enum { n = 20000 + 37, last = 6 };
    const state4 s = make(n);
    double *p = ops_doubles(n), *m = ops_doubles(n), *v = ops_doubles(n);
    for (int i = 0; i < n; i++) p[i] = (double)s.p.values[i];
    test_rng rng = {42};
    for (int step = 1; step <= last; step++) {
        mtp_adamw_args a = arguments(&s, step);
        if (step > 1) test_fill(&rng, s.g.view.data, n, 0.1f);
        const float *g = s.g.view.data;
        for (int i = 0; i < n; i++) {
            const double gradient = a.grad_scale * (double)g[i];
            m[i] = 0.9 * m[i] + 0.1 * gradient;
            v[i] = 0.999 * v[i] + 0.001 * gradient * gradient;
            p[i] *= 1 - 1e-3 * 0.1;
            p[i] -= 1e-3 / (1 - pow(0.9, step)) * m[i] / (sqrt(v[i]) / sqrt(1 - pow(0.999, step)) + 1e-8);
        }
        assert_ok(ops_backend()->adamw(device, &a));
        ops_expect("m", &s.m, m, 1e-6);
        ops_expect("v", &s.v, v, 1e-6);
        ops_expect("p", &s.p, p, 1e-6);
    }
}

static void steps_on_every_isa(void **state)
{
    (void)state;
    ops_each_isa(steps);
}

/* The update itself, not only the parameter it is added to: from p = 0 it is the whole result. */
static void the_update_is_accurate(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    const state4 s = make(100);
    memset(s.p.view.data, 0, 100 * sizeof(float));
    double *want = ops_doubles(100);
    for (int i = 0; i < 100; i++) {
        const double gradient = 0.5 * (double)s.g.values[i];
        want[i] = -1e-3 * gradient / (fabs(gradient) + 1e-8);
    }
    const mtp_adamw_args a = arguments(&s, 1);
    assert_ok(ops_backend()->adamw(device, &a));
    ops_expect("update", &s.p, want, 2e-6);
    ops_release();
}

static void sum_of_squares(mtp_device *device)
{
    static const int64_t sizes[] = {1, 15, 16, 1000, 65536, 200001};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        test_rng rng = {43};
        const ops_tensor x = ops_random_vector(&rng, MTP_F32, sizes[k], 3.0f);
        double got = -1;
        long double want = 0;
        for (int64_t i = 0; i < sizes[k]; i++) want += (long double)x.values[i] * (long double)x.values[i];
        mtp_sumsq_args a = {.x = x.view, .result = &got};
        a.scratch = ops_scratch(ops_backend()->sumsq_scratch(device, &a));
        assert_ok(ops_backend()->sumsq(device, &a));
        assert_true(fabsl((long double)got - want) <= 1e-13L * want);
        ops_release_buffers();
    }
}

static void sum_of_squares_on_every_isa(void **state)
{
    (void)state;
    ops_each_isa(sum_of_squares);
}

static uint64_t hash_of_all(mtp_device *device)
{
    const state4 s = make(150001);
    const mtp_adamw_args a = arguments(&s, 3);
    assert_ok(ops_backend()->adamw(device, &a));
    double sum;
    mtp_sumsq_args squares = {.x = s.p.view, .result = &sum};
    squares.scratch = ops_scratch(ops_backend()->sumsq_scratch(device, &squares));
    assert_ok(ops_backend()->sumsq(device, &squares));
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    return ops_hash(&s.v, ops_hash(&s.m, ops_hash(&s.p, bits)));
}

static void threads_do_not_change_bits(void **state)
{
    (void)state;
    ops_same_bits(hash_of_all);
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    const state4 s = make(10);
    mtp_adamw_args a = arguments(&s, 0);
    assert_fails(ops_backend()->adamw(device, &a), MTP_E_ARGUMENT, "step is 0");
    a = arguments(&s, 1);
    a.m.shape[0] = 9;
    assert_fails(ops_backend()->adamw(device, &a), MTP_E_ARGUMENT, "adamw: m");
    a = arguments(&s, 1);
    a.beta2 = 1.0;
    assert_fails(ops_backend()->adamw(device, &a), MTP_E_ARGUMENT, "beta2 = 1");
    a = arguments(&s, 1);
    a.lr = NAN;
    assert_fails(ops_backend()->adamw(device, &a), MTP_E_ARGUMENT, "lr = ");
    test_rng rng = {1};
    const ops_tensor strided = ops_random(&rng, MTP_F32, 3, 4, 1, 1.0f);
    double sum;
    const mtp_sumsq_args squares = {.x = strided.view, .result = &sum, .scratch = ops_scratch(64)};
    assert_fails(ops_backend()->sumsq(device, &squares), MTP_E_ARGUMENT, "x is not contiguous");
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_on_every_isa),          cmocka_unit_test(the_update_is_accurate),
        cmocka_unit_test(sum_of_squares_on_every_isa), cmocka_unit_test(threads_do_not_change_bits),
        cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
