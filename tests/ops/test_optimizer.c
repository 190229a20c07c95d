/* Protects: AdamW step for step against the formula in double, its numbers taken from the control block; bf16 master
 * weights, whose rounding is Philox's and has the right mean; shadows and marks of decay; what a skipped update leaves
 * alone; the sum of squares in double and what is decided by it; all with the same bits for any number of threads and
 * however the values are cut. */
#include "ops_check.h"

#include "philox.h"

enum { BETWEEN = 1 << 16 }; /* more than any op's block */

typedef struct state5 {
    ops_tensor p, m, v, g;
    double *control; /* [MTP_CONTROL] */
} state5;

static state5 make(int64_t n, mtp_dtype dtype)
{
    test_rng rng = {41};
    state5 s = {.p = ops_random_vector(&rng, dtype, n, 1.0f),
                .m = ops_random_vector(&rng, MTP_F32, n, 0.0f),
                .v = ops_random_vector(&rng, MTP_F32, n, 0.0f),
                .g = ops_random_vector(&rng, MTP_F32, n, 0.1f)};
    s.control = ops_doubles(MTP_CONTROL);
    return s;
}

static mtp_view block_of(const state5 *s)
{
    return mtp_view_1d(s->control, MTP_F64, MTP_CONTROL);
}

/* What clip would say: lr 1e-3, gradients halved, step. */
static void set_control(const state5 *s, int64_t step)
{
    s->control[MTP_CONTROL_LR] = 1e-3;
    s->control[MTP_CONTROL_FACTOR] = 0.5;
    s->control[MTP_CONTROL_STEP] = (double)step;
    s->control[MTP_CONTROL_BIAS1] = 1 - pow(0.9, (double)step);
    s->control[MTP_CONTROL_BIAS2] = 1 - pow(0.999, (double)step);
}

static mtp_adamw_args arguments(const state5 *s)
{
    return (mtp_adamw_args){.p = s->p.view,
                            .m = s->m.view,
                            .v = s->v.view,
                            .g = s->g.view,
                            .control = block_of(s),
                            .beta1 = 0.9,
                            .beta2 = 0.999,
                            .eps = 1e-8,
                            .weight_decay = 0.1,
                            .seed = 0x123456789abcdefu};
}

static void steps(mtp_device *device)
{
    enum { n = 20000 + 37, last = 6 };
    const state5 s = make(n, MTP_F32);
    double *p = ops_doubles(n), *m = ops_doubles(n), *v = ops_doubles(n);
    for (int i = 0; i < n; i++) p[i] = (double)s.p.values[i];
    test_rng rng = {42};
    for (int step = 1; step <= last; step++) {
        const mtp_adamw_args a = arguments(&s);
        set_control(&s, step);
        if (step > 1) test_fill(&rng, s.g.view.data, n, 0.1f);
        const float *g = s.g.view.data;
        for (int i = 0; i < n; i++) {
            const double gradient = 0.5 * (double)g[i];
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
    const state5 s = make(100, MTP_F32);
    memset(s.p.view.data, 0, 100 * sizeof(float));
    set_control(&s, 1);
    double *want = ops_doubles(100);
    for (int i = 0; i < 100; i++) {
        const double gradient = 0.5 * (double)s.g.values[i];
        want[i] = -1e-3 * gradient / (fabs(gradient) + 1e-8);
    }
    const mtp_adamw_args a = arguments(&s);
    assert_ok(ops_backend()->adamw(device, &a));
    ops_expect("update", &s.p, want, 2e-6);
    ops_release();
}

/* Marks decide for 16 values each; a shadow is p rounded. */
static void marks_and_shadows(mtp_device *device)
{
    static const int64_t sizes[] = {1, 16, 50, 20000 + 37};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        const int64_t n = sizes[k], grains = (n + 15) / 16;
        const state5 s = make(n, MTP_F32), all = make(n, MTP_F32), none = make(n, MTP_F32);
        uint8_t *marks = ops_bytes((size_t)grains);
        uint16_t *shadow = ops_bytes((size_t)n * sizeof *shadow);
        for (int64_t i = 0; i < grains; i++) marks[i] = i % 3 == 0;
        mtp_adamw_args a = arguments(&s), with = arguments(&all), without = arguments(&none);
        a.decays = mtp_view_1d(marks, MTP_U8, grains);
        a.shadow = mtp_view_1d(shadow, MTP_BF16, n);
        without.weight_decay = 0;
        set_control(&s, 2);
        set_control(&all, 2);
        set_control(&none, 2);
        assert_ok(ops_backend()->adamw(device, &a));
        assert_ok(ops_backend()->adamw(device, &with));
        assert_ok(ops_backend()->adamw(device, &without));
        const float *got = s.p.view.data, *decayed = all.p.view.data, *plain = none.p.view.data;
        for (int64_t i = 0; i < n; i++) {
            assert_true(decayed[i] != plain[i] || decayed[i] == 0);
            assert_true(got[i] == (marks[i / 16] ? decayed[i] : plain[i]));
            assert_int_equal(shadow[i], ops_bits16(ops_rounded(got[i], MTP_BF16), MTP_BF16));
        }
        ops_release_buffers();
    }
}

static void marks_and_shadows_on_every_isa(void **state)
{
    (void)state;
    ops_each_isa(marks_and_shadows);
}

/* ---- bf16 master weights ----------------------------------------------------------------------------------------- */

static void philox_gives_the_known_answers(void **state)
{
    (void)state;
    /* Random123, kat_vectors: philox4x32, 10 rounds */
    static const struct {
        mtp__philox counter;
        uint32_t key[2];
        uint32_t want[4];
    } known[] = {
        {{{0, 0, 0, 0}}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const mtp__philox got = mtp__philox_10(known[i].counter, known[i].key[0], known[i].key[1]);
        for (int j = 0; j < 4; j++) assert_int_equal(got.word[j], known[i].want[j]);
    }
    /* the words of seed, step and place: low words first */
    const mtp__philox counter = {{7, 5, 3, 2}};
    const mtp__philox want = mtp__philox_10(counter, 13, 11);
    const mtp__philox got = mtp__random_block(11ull << 32 | 13, 2ull << 32 | 3, 5ull << 32 | 7);
    assert_memory_equal(&got, &want, sizeof got);
    for (int i = 0; i < 8; i++)
        assert_int_equal(mtp__random_bits(&got, i), (i % 2 ? got.word[i / 2] >> 16 : got.word[i / 2] & 0xffff));
}

static float as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void rounding_is_up_with_the_right_share(void **state)
{
    (void)state;
    /* over all 2^16 random numbers the mean is the number itself, exactly */
    static const uint32_t cases[] = {0x3f800000, 0x3f800001, 0x3f808000, 0xbf81ffff,
                                     0x00000001, 0x80012345, 0x7f7f8000};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t up = 0;
        for (uint32_t random = 0; random < 65536; random++) {
            const uint32_t rounded = mtp__round_to_bf16(cases[i], random), low = cases[i] & 0xffff0000;
            assert_true(rounded == low || rounded == low + 0x10000);
            up += rounded != low;
        }
        assert_int_equal(up, cases[i] & 0xffff);
    }
    for (uint32_t random = 0; random < 65536; random += 4369) {
        assert_true(isinf(as_float(mtp__round_to_bf16(0x7f800000, random))));
        assert_true(isnan(as_float(mtp__round_to_bf16(0x7f800001, random))));
        assert_true(isnan(as_float(mtp__round_to_bf16(0xffffffff, random))));
    }
}

/* The result is the one of fp32 values, rounded by the numbers of (seed, step, place); moments are those of fp32. */
static void rounded_steps(mtp_device *device)
{
    static const int64_t sizes[] = {1, 5, 8, 36, 20000 + 37};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        const int64_t n = sizes[k], place = 48 + ((int64_t)k << 33);
        const state5 s = make(n, MTP_BF16), exact = make(n, MTP_F32);
        memcpy(exact.p.view.data, s.p.values, (size_t)n * sizeof(float));
        set_control(&s, 3);
        set_control(&exact, 3);
        mtp_adamw_args a = arguments(&s);
        const mtp_adamw_args in_fp32 = arguments(&exact);
        a.place = place;
        assert_ok(ops_backend()->adamw(device, &a));
        assert_ok(ops_backend()->adamw(device, &in_fp32));
        const uint16_t *got = s.p.view.data;
        for (int64_t i = 0; i < n; i++) {
            const mtp__philox random = mtp__random_block(a.seed, 3, (uint64_t)(place + i) / 8);
            uint32_t bits;
            memcpy(&bits, (const float *)exact.p.view.data + i, sizeof bits);
            assert_int_equal(got[i], mtp__round_to_bf16(bits, mtp__random_bits(&random, (int)((place + i) % 8))) >> 16);
        }
        assert_memory_equal(s.m.view.data, exact.m.view.data, (size_t)n * sizeof(float));
        assert_memory_equal(s.v.view.data, exact.v.view.data, (size_t)n * sizeof(float));
        ops_release_buffers();
    }
}

static void rounded_steps_on_every_isa(void **state)
{
    (void)state;
    ops_each_isa(rounded_steps);
}

/* Updates far below half a unit in the last place, which rounding to nearest would lose each time, arrive in the mean.
 * p = 1 moves by 2^-14 a step, a 64th of the distance to its neighbour below 1: after 16 steps a value has moved by
 * 2^-10 in the mean, with the standard deviation of a sum of 16 decisions. */
static void small_updates_arrive(void **state)
{
    (void)state;
    enum { n = 4096, last = 16 };
    mtp_device *device = ops_open(NULL, 2);
    const state5 s = make(n, MTP_BF16);
    for (int i = 0; i < n; i++) {
        ((uint16_t *)s.p.view.data)[i] = 0x3f80;
        ((float *)s.g.view.data)[i] = 1;
    }
    mtp_adamw_args a = arguments(&s);
    a.weight_decay = 0;
    for (int step = 1; step <= last; step++) {
        set_control(&s, step);
        s.control[MTP_CONTROL_LR] = 0x1p-14; /* a constant gradient: the step is lr */
        assert_ok(ops_backend()->adamw(device, &a));
    }
    double mean = 0;
    const uint16_t *p = s.p.view.data;
    for (int i = 0; i < n; i++) mean += (double)as_float((uint32_t)p[i] << 16) / n;
    /* one decision: unit 2^-8, probability 1/64; five standard deviations of the mean of n sums of 16 */
    const double unit = 0x1p-8, deviation = unit * sqrt(last * (1.0 / 64) * (63.0 / 64) / n);
    assert_true(fabs(mean - (1 - last * 0x1p-14)) < 5 * deviation);
    assert_true(5 * deviation < 0.2 * last * 0x1p-14); /* and that says something */
    ops_release();
}

/* ---- one decision for all ---------------------------------------------------------------------------------------- */

static void sum_of_squares(mtp_device *device)
{
    static const int64_t sizes[] = {1, 15, 16, 1000, 65536, 200001};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        test_rng rng = {43};
        const ops_tensor x = ops_random_vector(&rng, MTP_F32, sizes[k], 3.0f);
        double *got = ops_doubles(1);
        long double want = 0;
        for (int64_t i = 0; i < sizes[k]; i++) want += (long double)x.values[i] * (long double)x.values[i];
        mtp_sumsq_args a = {.x = x.view, .result = mtp_view_1d(got, MTP_F64, 1)};
        a.scratch = ops_scratch(ops_backend()->sumsq_scratch(device, &a));
        *got = -1;
        assert_ok(ops_backend()->sumsq(device, &a));
        assert_true(fabsl((long double)*got - want) <= 1e-13L * want);
        const double once = *got;
        a.write = MTP_ACCUMULATE;
        assert_ok(ops_backend()->sumsq(device, &a));
        assert_true(*got == once + once);
        ops_release_buffers();
    }
}

static void sum_of_squares_on_every_isa(void **state)
{
    (void)state;
    ops_each_isa(sum_of_squares);
}

static void clip_decides(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    static const struct {
        double sum, max_norm, watched;
        bool skip;
        double factor;
        bool good;
    } cases[] = {
        {9, 0, 1, false, 1, true},
        {9, 1.5, 1, false, 1.5 / (3 + 1e-6), true},
        {9, 3.5, 1, false, 1, true},
        {0, 1, 1, false, 1, true},
        {9, 1, (double)NAN, false, 0, false},
        {9, 1, (double)INFINITY, false, 0, false},
        {(double)NAN, 1, 1, false, 0, false},
        {(double)INFINITY, 1, 1, false, 0, false},
        {9, 1, 1, true, 0, false},
    };
    double *control = ops_doubles(MTP_CONTROL), *watched = ops_doubles(70);
    const mtp_view block = mtp_view_1d(control, MTP_F64, MTP_CONTROL);
    double step = 40;
    control[MTP_CONTROL_STEP] = step;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const mtp_clip_args a = {.control = block,
                                 .watch = mtp_view_1d(watched, MTP_F64, 70),
                                 .lr = 0.25,
                                 .max_norm = cases[i].max_norm,
                                 .beta1 = 0.9,
                                 .beta2 = 0.999,
                                 .skip = cases[i].skip};
        watched[69] = cases[i].watched; /* behind the first warp */
        control[MTP_CONTROL_SUM] = cases[i].sum;
        assert_ok(ops_backend()->clip(device, &a));
        step += cases[i].good;
        assert_true(control[MTP_CONTROL_STEP] == step);
        assert_true(control[MTP_CONTROL_SKIP] == !cases[i].good);
        assert_true(control[MTP_CONTROL_LR] == 0.25);
        const double norm = sqrt(cases[i].sum);
        assert_true(control[MTP_CONTROL_NORM] == norm || (isnan(norm) && isnan(control[MTP_CONTROL_NORM])));
        if (!cases[i].good) continue;
        assert_true(fabs(control[MTP_CONTROL_FACTOR] - cases[i].factor) < 1e-15);
        assert_true(fabs(control[MTP_CONTROL_BIAS1] - (1 - pow(0.9, step))) < 1e-14);
        assert_true(fabs(control[MTP_CONTROL_BIAS2] - (1 - pow(0.999, step))) < 1e-14);
    }
    ops_release();
}

static void a_skipped_update_writes_nothing(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 2);
    for (int rounded = 0; rounded < 2; rounded++) {
        enum { n = 1000 };
        const state5 s = make(n, rounded ? MTP_BF16 : MTP_F32), same = make(n, rounded ? MTP_BF16 : MTP_F32);
        uint16_t *shadow = ops_bytes(n * sizeof *shadow), *untouched = ops_bytes(n * sizeof *shadow);
        mtp_adamw_args a = arguments(&s);
        if (!rounded) a.shadow = mtp_view_1d(shadow, MTP_BF16, n);
        set_control(&s, 4);
        s.control[MTP_CONTROL_SKIP] = 1;
        s.control[MTP_CONTROL_FACTOR] = (double)NAN;
        assert_ok(ops_backend()->adamw(device, &a));
        assert_memory_equal(s.p.view.data, same.p.view.data, n * mtp_dtype_size(s.p.view.dtype));
        assert_memory_equal(s.m.view.data, same.m.view.data, n * sizeof(float));
        assert_memory_equal(s.v.view.data, same.v.view.data, n * sizeof(float));
        assert_memory_equal(shadow, untouched, n * sizeof *shadow);
    }
    ops_release();
}

/* ---- determinism ------------------------------------------------------------------------------------------------- */

static uint64_t hash_of_all(mtp_device *device)
{
    const state5 s = make(150001, MTP_F32), r = make(150001, MTP_BF16);
    set_control(&s, 3);
    set_control(&r, 3);
    const mtp_adamw_args a = arguments(&s), b = arguments(&r);
    assert_ok(ops_backend()->adamw(device, &a));
    assert_ok(ops_backend()->adamw(device, &b));
    mtp_sumsq_args squares = {.x = s.p.view, .result = mtp_view_1d(s.control, MTP_F64, 1)};
    squares.scratch = ops_scratch(ops_backend()->sumsq_scratch(device, &squares));
    assert_ok(ops_backend()->sumsq(device, &squares));
    uint64_t bits;
    memcpy(&bits, s.control, sizeof bits);
    const ops_tensor rounded = {.view = mtp_view_1d(r.p.view.data, MTP_F32, 75000)};
    return ops_hash(&rounded, ops_hash(&s.v, ops_hash(&s.m, ops_hash(&s.p, bits))));
}

static void threads_do_not_change_bits(void **state)
{
    (void)state;
    ops_same_bits(hash_of_all);
}

/* One call, and many on parts that begin at multiples of 16. */
static void cuts_do_not_change_bits(void **state)
{
    (void)state;
    static const int64_t cuts[] = {0, 16, 48, 1600, 16400, BETWEEN + 32, BETWEEN + 1000 - 7};
    mtp_device *device = ops_open(NULL, 2);
    for (int rounded = 0; rounded < 2; rounded++) {
        const int64_t n = BETWEEN + 1000 - 7;
        const mtp_dtype dtype = rounded ? MTP_BF16 : MTP_F32;
        const size_t element = mtp_dtype_size(dtype);
        const state5 whole = make(n, dtype), parts = make(n, dtype);
        mtp_adamw_args a = arguments(&whole);
        set_control(&whole, 9);
        set_control(&parts, 9);
        a.place = 32;
        assert_ok(ops_backend()->adamw(device, &a));
        for (size_t i = 0; i + 1 < sizeof cuts / sizeof *cuts; i++) {
            const int64_t at = cuts[i], count = cuts[i + 1] - at;
            mtp_adamw_args b = arguments(&parts);
            b.p = mtp_view_1d((char *)parts.p.view.data + (size_t)at * element, dtype, count);
            b.m = mtp_view_1d((float *)parts.m.view.data + at, MTP_F32, count);
            b.v = mtp_view_1d((float *)parts.v.view.data + at, MTP_F32, count);
            b.g = mtp_view_1d((float *)parts.g.view.data + at, MTP_F32, count);
            b.place = 32 + at;
            assert_ok(ops_backend()->adamw(device, &b));
        }
        assert_memory_equal(whole.p.view.data, parts.p.view.data, (size_t)n * element);
        assert_memory_equal(whole.v.view.data, parts.v.view.data, (size_t)n * sizeof(float));
    }
    ops_release();
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    const state5 s = make(20, MTP_F32), r = make(20, MTP_BF16);
    mtp_adamw_args a = arguments(&s);
    a.m.shape[0] = 9;
    assert_fails(ops_backend()->adamw(device, &a), MTP_E_ARGUMENT, "adamw: m");
    a = arguments(&s);
    a.beta2 = 1.0;
    assert_fails(ops_backend()->adamw(device, &a), MTP_E_ARGUMENT, "beta2 = 1");
    a = arguments(&s);
    a.weight_decay = NAN;
    assert_fails(ops_backend()->adamw(device, &a), MTP_E_ARGUMENT, "weight_decay = ");
    a = arguments(&s);
    a.decays = mtp_view_1d(s.v.view.data, MTP_U8, 1);
    assert_fails(ops_backend()->adamw(device, &a), MTP_E_ARGUMENT, "adamw: decays");
    a = arguments(&s);
    a.control.shape[0] = 7;
    assert_fails(ops_backend()->adamw(device, &a), MTP_E_ARGUMENT, "adamw: control");
    a = arguments(&r);
    a.place = 8;
    assert_fails(ops_backend()->adamw(device, &a), MTP_E_ARGUMENT, "place is 8");
    a = arguments(&r);
    a.shadow = r.p.view;
    assert_fails(ops_backend()->adamw(device, &a), MTP_E_ARGUMENT, "has no shadow");
    const mtp_clip_args clip = {.control = block_of(&s), .lr = (double)NAN};
    assert_fails(ops_backend()->clip(device, &clip), MTP_E_ARGUMENT, "lr = ");
    test_rng rng = {1};
    const ops_tensor strided = ops_random(&rng, MTP_F32, 3, 4, 1, 1.0f);
    mtp_sumsq_args squares = {
        .x = strided.view, .result = mtp_view_1d(s.control, MTP_F64, 1), .scratch = ops_scratch(64)};
    assert_fails(ops_backend()->sumsq(device, &squares), MTP_E_ARGUMENT, "x is not contiguous");
    squares.x = s.p.view;
    squares.result.dtype = MTP_F32;
    assert_fails(ops_backend()->sumsq(device, &squares), MTP_E_ARGUMENT, "sumsq: result");
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_on_every_isa),
        cmocka_unit_test(the_update_is_accurate),
        cmocka_unit_test(marks_and_shadows_on_every_isa),
        cmocka_unit_test(philox_gives_the_known_answers),
        cmocka_unit_test(rounding_is_up_with_the_right_share),
        cmocka_unit_test(rounded_steps_on_every_isa),
        cmocka_unit_test(small_updates_arrive),
        cmocka_unit_test(sum_of_squares_on_every_isa),
        cmocka_unit_test(clip_decides),
        cmocka_unit_test(a_skipped_update_writes_nothing),
        cmocka_unit_test(threads_do_not_change_bits),
        cmocka_unit_test(cuts_do_not_change_bits),
        cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
