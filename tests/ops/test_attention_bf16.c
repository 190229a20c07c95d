/* Protects: query-only attention of a device in bf16 mode at the head widths of the official drafters: within twice the
 * error of a plain loop that rounds the same factors to bf16, and every row with the bits it has alone. A device that
 * has no bf16 mode computes in fp32 and is held to the same. */
#include "attention_check.h"

static const attention_shape shapes[] = {
    {2, 1, 256, 0, MTP_BF16, 1, {{5, 5}}},                        /* one block of keys */
    {4, 1, 256, 40, MTP_BF16, 3, {{150, 150}, {1, 1}, {77, 20}}}, /* windows across key blocks, a text of one token */
    {4, 2, 256, 0, MTP_BF16, 2, {{131, 30}, {40, 3}}},
    {2, 1, 512, 30, MTP_BF16, 2, {{90, 40}, {70, 20}}},
    {16, 1, 512, 0, MTP_BF16, 1, {{130, 9}}},
    {68, 1, 512, 0, MTP_BF16, 1, {{40, 3}}}, /* more heads than a tile has rows */
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

/* Scores of a few units. */
static attention_problem make(test_rng *rng, attention_shape s)
{
    const attention_gaps gap = {.q = 6, .kv = 8, .o = 2, .lse = 1, .dout = 0, .dq = 4};
    return attention_make(rng, s, gap, 6 / sqrtf((float)s.D));
}

static mtp_status run(mtp_device *device, mtp_attention_args a)
{
    const int mark = ops_owned.count;
    a.scratch = ops_scratch(ops_backend()->attention_fwd_scratch(device, &a));
    mtp_status status = ops_backend()->attention_fwd(device, &a);
    a.scratch = ops_scratch(ops_backend()->attention_bwd_scratch(device, &a));
    if (status == MTP_OK) status = ops_backend()->attention_bwd(device, &a);
    ops_release_to(mark);
    return status;
}

/* ---- the formula, exact or with factors rounded to bf16 ---------------------------------------------------------- */

typedef struct result {
    double *o, *lse, *dq;
} result;

static double rounded(double x, bool plain)
{
    return plain ? (double)ops_rounded((float)x, MTP_BF16) : x;
}

static double dot(const float *x, const float *y, int64_t n, bool plain)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += rounded((double)x[i], plain) * (double)y[i];
    return sum;
}

/* `plain`: q, do, P (before it is divided by its sum) and dS are rounded before they are multiplied, and o and dq where
 * they are stored so. */
static void head(const attention_problem *p, int64_t r, int64_t h, bool plain, double *weight, const result *want)
{
    const attention_shape *s = &p->s;
    const int64_t at = (r * s->NH + h) * s->D, g = h / (s->NH / s->NKV);
    const float *q = p->q.values + at, *dout = p->dout.values + at, *kv = p->kv.values;
    const int64_t begin = p->key_begin[r], end = p->key_end[r];
    double top = -INFINITY, sum = 0, delta = 0;
    for (int64_t j = begin; j < end; j++) {
        weight[j] = dot(q, kv + (j * 2 * s->NKV + g) * s->D, s->D, plain);
        top = weight[j] > top ? weight[j] : top;
    }
    for (int64_t j = begin; j < end; j++) sum += exp(weight[j] - top);
    want->lse[r * s->NH + h] = top + log(sum);
    for (int64_t j = begin; j < end; j++) {
        const float *v = kv + ((j * 2 + 1) * s->NKV + g) * s->D;
        const double probability = rounded(exp(weight[j] - top), plain) / sum;
        for (int64_t i = 0; i < s->D; i++) want->o[at + i] += probability * (double)v[i];
    }
    const bool round_results = plain && p->stored == MTP_BF16;
    for (int64_t i = 0; i < s->D; i++) want->o[at + i] = rounded(want->o[at + i], round_results);
    for (int64_t i = 0; i < s->D; i++) delta += rounded((double)dout[i], plain) * want->o[at + i];
    for (int64_t j = begin; j < end; j++) {
        const float *k = kv + (j * 2 * s->NKV + g) * s->D, *v = kv + ((j * 2 + 1) * s->NKV + g) * s->D;
        const double ds = exp(weight[j] - top) / sum * (dot(dout, v, s->D, plain) - delta);
        for (int64_t i = 0; i < s->D; i++) want->dq[at + i] += rounded(ds, plain) * (double)k[i];
    }
    for (int64_t i = 0; i < s->D; i++) want->dq[at + i] = rounded(want->dq[at + i], round_results);
}

static result expected(const attention_problem *p, bool plain)
{
    const int64_t n = p->R * p->s.NH;
    const result want = {.o = ops_doubles(n * p->s.D), .lse = ops_doubles(n), .dq = ops_doubles(n * p->s.D)};
    double *weight = ops_doubles(p->S);
    for (int64_t r = 0; r < p->R; r++)
        for (int64_t h = 0; h < p->s.NH; h++) head(p, r, h, plain, weight, &want);
    return want;
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

/* Widths that the fused kernels leave to the general one. */
static const attention_shape general_shapes[] = {
    {4, 2, 48, 0, MTP_BF16, 2, {{31, 9}, {40, 3}}},
    {2, 1, 130, 20, MTP_F32, 1, {{70, 20}}},
};

static void check_errors(mtp_device *device, const attention_problem *problem)
{
    const attention_problem p = *problem;
    const result want = expected(&p, false), plain = expected(&p, true);
    mtp_attention_args a = attention_args(&p);
    assert_ok(run(device, a));
    ops_expect_bf16("o", &p.o, want.o, plain.o);
    if (p.stored == MTP_F32) /* else q needs no rounding, and the sum is fp32 */
        ops_expect_bf16("lse", &p.lse, want.lse, plain.lse);
    else
        ops_expect("lse", &p.lse, want.lse, 1e-6);
    ops_expect_bf16("dq", &p.dq, want.dq, plain.dq);
    const uint64_t bits = ops_hash(&p.dq, 0);
    a.dq = a.do_; /* allowed */
    assert_ok(run(device, a));
    assert_true(ops_hash(&p.dout, 0) == bits);
    ops_release_buffers();
}

/* As the device stores them; copies of 16 bytes want rows at multiples of 8 elements. */
static void stored_views(void **state)
{
    (void)state;
    mtp_device *device = ops_open_bf16();
    test_rng rng = {.state = 95};
    const attention_gaps gap = {.q = 8, .kv = 8, .o = 16, .lse = 1, .dout = 0, .dq = 24};
    for (size_t i = 1; i < NUM_SHAPES; i += 2) {
        const float scale = 6 / sqrtf((float)shapes[i].D);
        const attention_problem p = attention_make_stored(&rng, shapes[i], gap, scale, ops_stored(device));
        check_errors(device, &p);
    }
    const attention_gaps odd = {.q = 3, .kv = 2, .o = 1, .lse = 0, .dout = 5, .dq = 2};
    for (size_t i = 0; i < sizeof general_shapes / sizeof *general_shapes; i++) {
        const float scale = 6 / sqrtf((float)general_shapes[i].D);
        const attention_problem p = attention_make_stored(&rng, general_shapes[i], odd, scale, ops_stored(device));
        check_errors(device, &p);
    }
    if (ops_stored(device) == MTP_BF16) {
        const attention_gaps q_alone = {.q = 4, .kv = 8, .o = 8, .lse = 0, .dout = 8, .dq = 8};
        const attention_problem p = attention_make_stored(&rng, shapes[0], q_alone, 1.0f, MTP_BF16);
        assert_fails(run(device, attention_args(&p)), MTP_E_ARGUMENT, "attention_fwd: q is moved 16 bytes at a time");
    }
    ops_release();
}

static void errors_are_those_of_bf16(void **state)
{
    (void)state;
    mtp_device *device = ops_open_bf16();
    test_rng rng = {.state = 91};
    for (size_t i = 0; i < NUM_SHAPES; i++) {
        const attention_problem p = make(&rng, shapes[i]);
        check_errors(device, &p);
    }
    ops_release();
}

static void large_scores_stay_finite(void **state)
{
    (void)state;
    mtp_device *device = ops_open_bf16();
    test_rng rng = {.state = 92};
    const attention_problem p = make(&rng, shapes[3]);
    const int64_t stride = p.q.view.stride[0], width = ops_width(&p.q);
    for (int64_t i = 0; i < p.R * width; i++) {
        p.q.values[i] = ops_rounded(60 * p.q.values[i], MTP_BF16);
        ((float *)p.q.view.data)[i / width * stride + i % width] = p.q.values[i];
    }
    const result want = expected(&p, false);
    assert_ok(run(device, attention_args(&p)));
    ops_expect("lse", &p.lse, want.lse, 1e-6);
    for (int64_t r = 0; r < p.R; r++)
        for (int64_t i = 0; i < width; i++)
            assert_true(isfinite(ops_row(&p.o, r)[i]) && isfinite(ops_row(&p.dq, r)[i]));
    ops_release();
}

/* Every row of a packed batch against itself alone, in a K/V of its document alone. */
static void a_row_alone_has_the_same_bits(void **state)
{
    (void)state;
    mtp_device *device = ops_open_bf16();
    /* rows_exact of the cuda backend is about cuBLASLt, which has no part here */
    if (!ops_device_name() && !ops_backend()->device_info(device)->rows_exact) skip();
    test_rng rng = {.state = 93};
    const attention_problem all = make(&rng, shapes[3]);
    assert_ok(run(device, attention_args(&all)));
    const size_t bytes = (size_t)ops_width(&all.o) * sizeof(float);
    for (int64_t r = 0; r < all.R; r += 7) {
        const int mark = ops_owned.count;
        const ops_tensor o = ops_random(&rng, MTP_F32, 1, ops_width(&all.o), 0, 1);
        const ops_tensor dq = ops_random(&rng, MTP_F32, 1, ops_width(&all.o), 0, 1);
        const ops_tensor lse = ops_random(&rng, MTP_F32, 1, ops_width(&all.lse), 0, 1);
        const int32_t doc = all.doc_begin[r];
        int32_t zero = 0, begin = all.key_begin[r] - doc, end = all.key_end[r] - doc;
        mtp_attention_args a = attention_args(&all);
        a.q = mtp_view_rows(a.q, r, 1);
        a.do_ = mtp_view_rows(a.do_, r, 1);
        a.kv = mtp_view_rows(a.kv, doc, end);
        a.key_begin = mtp_view_1d(&begin, MTP_I32, 1);
        a.key_end = mtp_view_1d(&end, MTP_I32, 1);
        a.doc_begin = mtp_view_1d(&zero, MTP_I32, 1);
        a.o = attention_split(o.view, all.s.NH);
        a.dq = attention_split(dq.view, all.s.NH);
        a.lse = lse.view;
        assert_ok(run(device, a));
        assert_memory_equal(ops_row(&o, 0), ops_row(&all.o, r), bytes);
        assert_memory_equal(ops_row(&dq, 0), ops_row(&all.dq, r), bytes);
        assert_memory_equal(ops_row(&lse, 0), ops_row(&all.lse, r), (size_t)ops_width(&all.lse) * sizeof(float));
        ops_release_to(mark);
    }
    ops_release();
}

/* What stands in tokens that no row sees, not-a-number included, moves no bit. */
static void unseen_tokens_change_nothing(void **state)
{
    (void)state;
    mtp_device *device = ops_open_bf16();
    test_rng rng = {.state = 94};
    const attention_problem p = make(&rng, shapes[1]);
    const mtp_attention_args a = attention_rows(attention_args(&p), 151, 20);
    ops_tensor part[3] = {p.o, p.lse, p.dq};
    uint64_t bits[2] = {0, 0};
    for (int i = 0; i < 3; i++) part[i].view = mtp_view_rows(part[i].view, 151, 20);
    for (int n = 0; n < 2; n++) {
        assert_ok(run(device, a));
        for (int i = 0; i < 3; i++) bits[n] = ops_hash(&part[i], bits[n]);
        for (int64_t token = 0; token < p.key_begin[151]; token++)
            memset((uint16_t *)p.kv.view.data + token * p.kv.view.stride[0], 0xff,
                   (size_t)ops_width(&p.kv) * sizeof(uint16_t));
    }
    assert_true(bits[0] == bits[1]);
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(errors_are_those_of_bf16),     cmocka_unit_test(stored_views),
        cmocka_unit_test(large_scores_stay_finite),     cmocka_unit_test(a_row_alone_has_the_same_bits),
        cmocka_unit_test(unseen_tokens_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
