/* Protects: query-only attention forward and its dQ, over windows, packed documents and shared K/V heads; a row's bits
 * do not depend on its company, and nothing outside the keys a tile sees can reach them. */
#include "attention_check.h"

static const attention_shape shapes[] = {
    {1, 1, 16, 0, MTP_F32, 1, {{1, 1}}},
    {2, 1, 18, 1, MTP_BF16, 1, {{9, 9}}},                       /* a window of one key */
    {4, 1, 32, 40, MTP_F32, 3, {{150, 150}, {1, 1}, {77, 20}}}, /* windows across key blocks, a document of one token */
    {6, 2, 48, 1000, MTP_F16, 2, {{131, 60}, {260, 90}}},       /* a window beyond the text, heads not a power of two */
    {16, 1, 130, 0, MTP_BF16, 2, {{129, 40}, {140, 3}}},        /* sixteen heads a K/V head */
    {3, 3, 512, 100, MTP_F32, 2, {{300, 10}, {128, 30}}},       /* no sharing, the widest head */
    {34, 2, 16, 65, MTP_F32, 4, {{70, 70}, {64, 1}, {3, 2}, {200, 30}}},
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

static attention_problem make(test_rng *rng, attention_shape s, int64_t gap)
{
    return attention_make(rng, s, (attention_gaps){gap, gap, gap, gap, gap, gap}, 0.7f);
}

static mtp_status forward(mtp_device *device, mtp_attention_args a)
{
    const int mark = ops_owned.count;
    a.scratch = ops_scratch(ops_backend()->attention_fwd_scratch(device, &a));
    const mtp_status status = ops_backend()->attention_fwd(device, &a);
    ops_release_to(mark);
    return status;
}

static mtp_status backward(mtp_device *device, mtp_attention_args a)
{
    const int mark = ops_owned.count;
    a.scratch = ops_scratch(ops_backend()->attention_bwd_scratch(device, &a));
    const mtp_status status = ops_backend()->attention_bwd(device, &a);
    ops_release_to(mark);
    return status;
}

/* ---- the formula ------------------------------------------------------------------------------------------------- */

typedef struct result {
    double *o, *lse, *dq;
} result;

static double dot(const float *x, const float *y, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)y[i];
    return sum;
}

static void expected_head(const attention_problem *p, int64_t r, int64_t h, double *probability, const result *want)
{
    const attention_shape *s = &p->s;
    const int64_t at = (r * s->NH + h) * s->D, g = h / (s->NH / s->NKV);
    const float *q = p->q.values + at, *dout = p->dout.values + at;
    const float *kv = p->kv.values;
    const int64_t begin = p->key_begin[r], end = p->key_end[r];
    double top = -INFINITY, sum = 0, delta = 0;
    for (int64_t j = begin; j < end; j++) {
        probability[j] = dot(q, kv + (j * 2 * s->NKV + g) * s->D, s->D);
        top = probability[j] > top ? probability[j] : top;
    }
    for (int64_t j = begin; j < end; j++) sum += exp(probability[j] - top);
    want->lse[r * s->NH + h] = top + log(sum);
    for (int64_t j = begin; j < end; j++) {
        probability[j] = exp(probability[j] - top) / sum;
        const float *v = kv + ((j * 2 + 1) * s->NKV + g) * s->D;
        for (int64_t i = 0; i < s->D; i++) want->o[at + i] += probability[j] * (double)v[i];
        delta += probability[j] * dot(dout, v, s->D);
    }
    for (int64_t j = begin; j < end; j++) {
        const float *k = kv + (j * 2 * s->NKV + g) * s->D, *v = kv + ((j * 2 + 1) * s->NKV + g) * s->D;
        const double ds = probability[j] * (dot(dout, v, s->D) - delta);
        for (int64_t i = 0; i < s->D; i++) want->dq[at + i] += ds * (double)k[i];
    }
}

static result expected(const attention_problem *p)
{
    const int64_t n = p->R * p->s.NH;
    const result want = {.o = ops_doubles(n * p->s.D), .lse = ops_doubles(n), .dq = ops_doubles(n * p->s.D)};
    double *probability = ops_doubles(p->S);
    for (int64_t r = 0; r < p->R; r++)
        for (int64_t h = 0; h < p->s.NH; h++) expected_head(p, r, h, probability, &want);
    return want;
}

/* The rounding of a score is absolute, grows with the square root of the depth, and is the relative error of its
 * exponential; backward adds that of lse and of dP. */
static double tolerance(const attention_problem *p, bool backward_too)
{
    return (backward_too ? 0x1p-21 : 0x1p-22) * (8 + sqrt((double)p->s.D));
}

/* With one key everywhere dq is exactly zero, and what remains is the rounding of terms of size one. */
static void expect_dq(const attention_problem *p, const double *want)
{
    double largest = 0;
    const int64_t width = ops_width(&p->dq);
    for (int64_t i = 0; i < p->R * width; i++) largest = fabs(want[i]) > largest ? fabs(want[i]) : largest;
    if (largest > 0) {
        ops_expect("dq", &p->dq, want, tolerance(p, true));
        return;
    }
    for (int64_t r = 0; r < p->R; r++)
        for (int64_t i = 0; i < width; i++) assert_true(fabs((double)ops_row(&p->dq, r)[i]) < tolerance(p, true));
}

static void formula(mtp_device *device)
{
    test_rng rng = {.state = 71};
    for (size_t i = 0; i < NUM_SHAPES; i++) {
        const attention_problem p = make(&rng, shapes[i], i % 2 ? 6 : 0);
        const result want = expected(&p);
        mtp_attention_args a = attention_args(&p);
        assert_ok(forward(device, a));
        ops_expect("o", &p.o, want.o, tolerance(&p, false));
        ops_expect("lse", &p.lse, want.lse, tolerance(&p, false));
        assert_ok(backward(device, a));
        expect_dq(&p, want.dq);
        const uint64_t bits = ops_hash(&p.dq, 0);
        a.dq = a.do_; /* allowed */
        assert_ok(backward(device, a));
        assert_true(ops_hash(&p.dout, 0) == bits);
        ops_release_buffers();
    }
}

static void each_isa_follows_the_formula(void **state)
{
    (void)state;
    ops_each_isa(formula);
}

static void large_scores_stay_finite(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 2);
    test_rng rng = {.state = 72};
    const attention_problem p = make(&rng, shapes[2], 0);
    for (int64_t i = 0; i < p.R * p.s.NH * p.s.D; i++) ((float *)p.q.view.data)[i] = p.q.values[i] = 60 * p.q.values[i];
    const result want = expected(&p);
    assert_ok(forward(device, attention_args(&p)));
    ops_expect("lse", &p.lse, want.lse, tolerance(&p, false));
    ops_expect("o", &p.o, want.o, 1e-4); /* scores near 500: exp magnifies their rounding by as much */
    ops_release();
}

/* ---- gradient by differences ------------------------------------------------------------------------------------- */

typedef struct total {
    mtp_device *device;
    const attention_problem *p;
} total;

static double weighted_output(void *context)
{
    const total *t = context;
    assert_ok(forward(t->device, attention_args(t->p)));
    return ops_weighted_sum(&t->p->o, t->p->dout.values);
}

static void gradient_matches_differences(void **state)
{
    (void)state;
    total t = {.device = ops_open(NULL, 2)};
    test_rng rng = {.state = 73};
    const attention_shape s = {2, 1, 16, 3, MTP_F32, 2, {{6, 4}, {5, 5}}};
    const attention_problem p = make(&rng, s, 0);
    t.p = &p;
    assert_ok(forward(t.device, attention_args(&p)));
    assert_ok(backward(t.device, attention_args(&p)));
    const int64_t n = p.R * s.NH * s.D;
    double *gradient = ops_doubles(n);
    ops_differences(weighted_output, &t, p.q.view.data, n, gradient);
    ops_expect("dq by differences", &p.dq, gradient, 1e-3);
    ops_release();
}

/* ---- bits -------------------------------------------------------------------------------------------------------- */

static uint64_t run_once(mtp_device *device)
{
    test_rng rng = {.state = 74};
    const attention_problem p = make(&rng, shapes[2], 0);
    assert_ok(forward(device, attention_args(&p)));
    assert_ok(backward(device, attention_args(&p)));
    return ops_hash(&p.dq, ops_hash(&p.lse, ops_hash(&p.o, 0)));
}

static void threads_do_not_change_a_bit(void **state)
{
    (void)state;
    ops_same_bits(run_once);
}

static void same_row(const attention_problem *one, const attention_problem *all, int64_t r)
{
    const size_t bytes = (size_t)ops_width(&all->o) * sizeof(float);
    assert_memory_equal(ops_row(&one->o, 0), ops_row(&all->o, r), bytes);
    assert_memory_equal(ops_row(&one->lse, 0), ops_row(&all->lse, r), (size_t)ops_width(&all->lse) * sizeof(float));
    assert_memory_equal(ops_row(&one->dq, 0), ops_row(&all->dq, r), bytes);
}

/* Every row of a packed batch against itself alone: once in the same K/V, once with its document moved to the front of
 * a K/V of its own that ends at the row's last key. */
static void alone(mtp_device *device, attention_shape s)
{
    if (!ops_backend()->device_info(device)->rows_exact) return;
    test_rng rng = {.state = 75};
    const attention_problem all = make(&rng, s, 0);
    attention_problem one = all;
    one.o = ops_random(&rng, MTP_F32, 1, ops_width(&all.o), 0, 1);
    one.dq = ops_random(&rng, MTP_F32, 1, ops_width(&all.o), 0, 1);
    one.lse = ops_random(&rng, MTP_F32, 1, ops_width(&all.lse), 0, 1);
    assert_ok(forward(device, attention_args(&all)));
    assert_ok(backward(device, attention_args(&all)));
    for (int64_t r = 0; r < all.R; r++) {
        mtp_attention_args a = attention_rows(attention_args(&all), r, 1);
        a.o = attention_split(one.o.view, s.NH);
        a.dq = attention_split(one.dq.view, s.NH);
        a.lse = one.lse.view;
        assert_ok(forward(device, a));
        assert_ok(backward(device, a));
        same_row(&one, &all, r);

        const int32_t doc = all.doc_begin[r];
        int32_t zero = 0, begin = all.key_begin[r] - doc, end = all.key_end[r] - doc;
        a.kv = mtp_view_rows(a.kv, doc, end);
        a.key_begin = mtp_view_1d(&begin, MTP_I32, 1);
        a.key_end = mtp_view_1d(&end, MTP_I32, 1);
        a.doc_begin = mtp_view_1d(&zero, MTP_I32, 1);
        assert_ok(forward(device, a));
        assert_ok(backward(device, a));
        same_row(&one, &all, r);
    }
    ops_release_buffers();
}

static void windows_alone(mtp_device *device)
{
    alone(device, shapes[2]);
}

static void a_row_alone_has_the_same_bits(void **state)
{
    (void)state;
    ops_each_isa(windows_alone);
    mtp_device *device = ops_open(NULL, 2);
    for (size_t i = 3; i < NUM_SHAPES; i++) alone(device, shapes[i]);
    ops_release();
}

/* All of a token's keys and values, of F32 K/V. */
static void put_token(const attention_problem *p, int64_t token, float value)
{
    for (int64_t i = 0; i < ops_width(&p->kv); i++) ops_row(&p->kv, token)[i] = value;
}

static uint64_t bits_of_rows(const attention_problem *p, int64_t first, int64_t end)
{
    uint64_t hash = 0;
    for (int64_t r = first; r < end; r++) {
        ops_tensor part[3] = {p->o, p->lse, p->dq};
        for (int i = 0; i < 3; i++) {
            part[i].view = mtp_view_rows(part[i].view, r, 1);
            hash = ops_hash(&part[i], hash);
        }
    }
    return hash;
}

/* Documents of 150, 1 and 77 tokens, of the last one 20 rows with a window of 40: whatever stands in the other
 * documents and in the tokens that no row sees, not-a-number included, moves no bit of those rows. */
static void unseen(mtp_device *device)
{
    test_rng rng = {.state = 76};
    const attention_problem p = make(&rng, shapes[2], 0);
    const mtp_attention_args last = attention_rows(attention_args(&p), 151, 20);
    assert_ok(forward(device, last));
    assert_ok(backward(device, last));
    const uint64_t bits = bits_of_rows(&p, 151, 171);
    const float values[] = {NAN, INFINITY, 3};
    for (size_t i = 0; i < 3; i++) {
        for (int64_t token = 0; token < p.S; token++)
            if (token < 151 || token < p.key_begin[151]) put_token(&p, token, values[i]);
        assert_ok(forward(device, last));
        assert_ok(backward(device, last));
        assert_true(bits_of_rows(&p, 151, 171) == bits);
    }
}

/* A tile's rows that end earlier are not touched by finite keys that only later rows see, nor by any key after the
 * last. */
static void later_keys(mtp_device *device)
{
    test_rng rng = {.state = 77};
    const attention_shape s = {4, 1, 32, 40, MTP_F32, 1, {{90, 60}}};
    const attention_problem p = make(&rng, s, 0);
    const mtp_attention_args first = attention_rows(attention_args(&p), 0, 30);
    assert_ok(forward(device, first));
    assert_ok(backward(device, first));
    const uint64_t bits = bits_of_rows(&p, 0, 10), all = bits_of_rows(&p, 0, 30);
    for (int64_t token = p.key_end[29]; token < p.S; token++) put_token(&p, token, NAN);
    assert_ok(forward(device, first));
    assert_ok(backward(device, first));
    assert_true(bits_of_rows(&p, 0, 30) == all);
    for (int64_t token = p.key_end[9]; token < p.key_end[29]; token++) put_token(&p, token, 2);
    for (int64_t token = 0; token < p.key_begin[0]; token++) put_token(&p, token, -7);
    assert_ok(forward(device, first));
    assert_ok(backward(device, first));
    assert_true(bits_of_rows(&p, 0, 10) == bits);
    assert_true(bits_of_rows(&p, 0, 30) != all);
}

static void keys_that_a_row_does_not_see_change_nothing(void **state)
{
    (void)state;
    ops_each_isa(unseen);
    ops_each_isa(later_keys);
}

/* ---- arguments --------------------------------------------------------------------------------------------------- */

static void bad_arguments_are_named(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    test_rng rng = {.state = 78};
    const attention_shape s = {4, 2, 16, 0, MTP_F32, 2, {{5, 5}, {4, 4}}};
    const attention_problem p = make(&rng, s, 0);
    const mtp_attention_args good = attention_args(&p);
    mtp_attention_args a = good;
    a.o.data = NULL;
    assert_fails(forward(device, a), MTP_E_ARGUMENT, "attention_fwd: o is missing");
    a = good;
    a.do_.shape[2] = 15;
    assert_fails(backward(device, a), MTP_E_ARGUMENT,
                 "attention_bwd: do_ is F32 [9, 4, 15]; it must be F32 [9, 4, 16]");
    a = good;
    a.kv = mtp_view_4d(p.kv.view.data, MTP_F32, 3, 2, 3, 16);
    assert_fails(forward(device, a), MTP_E_ARGUMENT, "q has 4 heads, kv 3");
    a = good;
    a.q = mtp_view_3d(p.q.view.data, MTP_F32, 9, 8, 8);
    a.kv = mtp_view_4d(p.kv.view.data, MTP_F32, 9, 2, 4, 8);
    assert_fails(forward(device, a), MTP_E_ARGUMENT, "head width 8");
    p.key_end[8] = 10;
    assert_fails(forward(device, good), MTP_E_ARGUMENT, ops_found("row 8 sees keys [5, 10)", "key_begin or key_end"));
    p.key_end[8] = 9;
    p.key_end[4] = 6; /* into the next document */
    assert_fails(forward(device, good), MTP_E_ARGUMENT, ops_found("row 4 sees keys [0, 6)", "key_begin or key_end"));
    p.key_end[4] = 0; /* nothing */
    assert_fails(forward(device, good), MTP_E_ARGUMENT, ops_found("row 4 sees keys [0, 0)", "key_begin or key_end"));
    p.key_end[4] = 5;
    p.key_begin[6] = 4; /* before the document */
    assert_fails(forward(device, good), MTP_E_ARGUMENT, ops_found("row 6 sees keys [4, 7)", "key_begin or key_end"));
    p.key_begin[6] = 5;
    p.doc_begin[1] = 1;
    assert_fails(forward(device, good), MTP_E_ARGUMENT, ops_found("doc_begin decreases", "key_begin or key_end"));
    p.doc_begin[1] = 0;
    a = good;
    a.scratch = ops_scratch(128);
    assert_fails(ops_backend()->attention_fwd(device, &a), MTP_E_ARGUMENT, "scratch has 128 bytes");
    assert_ok(forward(device, good));
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_isa_follows_the_formula),  cmocka_unit_test(large_scores_stay_finite),
        cmocka_unit_test(gradient_matches_differences),  cmocka_unit_test(threads_do_not_change_a_bit),
        cmocka_unit_test(a_row_alone_has_the_same_bits), cmocka_unit_test(keys_that_a_row_does_not_see_change_nothing),
        cmocka_unit_test(bad_arguments_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
