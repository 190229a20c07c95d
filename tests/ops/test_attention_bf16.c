/* Protects: query-only attention of a device in bf16 mode at the head widths of the official drafters: within twice the
 * error of a plain loop that rounds the same factors to bf16, and every row with the bits it has alone. A device that
 * has no bf16 mode computes in fp32 and is held to the same. */
#include "ops_check.h"

typedef struct document {
    int64_t tokens, rows; /* the last `rows` tokens are positions of the batch */
} document;

typedef struct shape {
    int64_t NH, NKV, D, window; /* window 0: all tokens up to the position */
    int num_documents;
    document documents[4];
} shape;

static const shape shapes[] = {
    {2, 1, 256, 0, 1, {{5, 5}}},                        /* one block of keys */
    {4, 1, 256, 40, 3, {{150, 150}, {1, 1}, {77, 20}}}, /* windows across key blocks, a document of one token */
    {4, 2, 256, 0, 2, {{131, 30}, {40, 3}}},
    {2, 1, 512, 30, 2, {{90, 40}, {70, 20}}},
    {16, 1, 512, 0, 1, {{130, 9}}},
    {68, 1, 512, 0, 1, {{40, 3}}}, /* more heads than a tile has rows */
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

typedef struct problem {
    shape s;
    int64_t R, S;
    ops_tensor q, kv, o, lse, dout, dq;
    int32_t *key_begin, *key_end, *doc_begin;
} problem;

static problem make(test_rng *rng, shape s)
{
    problem p = {.s = s};
    for (int i = 0; i < s.num_documents; i++) {
        p.R += s.documents[i].rows;
        p.S += s.documents[i].tokens;
    }
    p.q = ops_random(rng, MTP_F32, p.R, s.NH * s.D, 6, 6 / sqrtf((float)s.D)); /* scores of a few units */
    p.kv = ops_random(rng, MTP_BF16, p.S, 2 * s.NKV * s.D, 8, 1);
    p.o = ops_random(rng, MTP_F32, p.R, s.NH * s.D, 2, 1);
    p.lse = ops_random(rng, MTP_F32, p.R, s.NH, 1, 1);
    p.dout = ops_random(rng, MTP_F32, p.R, s.NH * s.D, 0, 1);
    p.dq = ops_random(rng, MTP_F32, p.R, s.NH * s.D, 4, 1);
    p.key_begin = ops_bytes((size_t)p.R * sizeof(int32_t));
    p.key_end = ops_bytes((size_t)p.R * sizeof(int32_t));
    p.doc_begin = ops_bytes((size_t)p.R * sizeof(int32_t));
    int64_t row = 0, doc = 0;
    for (int i = 0; i < s.num_documents; i++) {
        const document d = s.documents[i];
        for (int64_t t = d.tokens - d.rows; t < d.tokens; t++, row++) {
            p.doc_begin[row] = (int32_t)doc;
            p.key_begin[row] = (int32_t)(doc + (s.window && t >= s.window ? t - s.window + 1 : 0));
            p.key_end[row] = (int32_t)(doc + t + 1);
        }
        doc += d.tokens;
    }
    return p;
}

/* [R, NH * D] as [R, NH, D] */
static mtp_view split(mtp_view v, int64_t heads)
{
    mtp_view w = mtp_view_3d(v.data, v.dtype, v.shape[0], heads, v.shape[1] / heads);
    w.stride[0] = v.stride[0];
    return w;
}

static mtp_attention_args args(const problem *p)
{
    mtp_attention_args a = {.q = split(p->q.view, p->s.NH),
                            .kv = mtp_view_4d(p->kv.view.data, MTP_BF16, p->S, 2, p->s.NKV, p->s.D),
                            .key_begin = mtp_view_1d(p->key_begin, MTP_I32, p->R),
                            .key_end = mtp_view_1d(p->key_end, MTP_I32, p->R),
                            .doc_begin = mtp_view_1d(p->doc_begin, MTP_I32, p->R),
                            .o = split(p->o.view, p->s.NH),
                            .lse = p->lse.view,
                            .do_ = split(p->dout.view, p->s.NH),
                            .dq = split(p->dq.view, p->s.NH)};
    a.kv.stride[0] = p->kv.view.stride[0];
    return a;
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

/* `plain`: q, do, P (before it is divided by its sum) and dS are rounded before they are multiplied. */
static void head(const problem *p, int64_t r, int64_t h, bool plain, double *weight, const result *want)
{
    const shape *s = &p->s;
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
    for (int64_t i = 0; i < s->D; i++) delta += rounded((double)dout[i], plain) * want->o[at + i];
    for (int64_t j = begin; j < end; j++) {
        const float *k = kv + (j * 2 * s->NKV + g) * s->D, *v = kv + ((j * 2 + 1) * s->NKV + g) * s->D;
        const double ds = exp(weight[j] - top) / sum * (dot(dout, v, s->D, plain) - delta);
        for (int64_t i = 0; i < s->D; i++) want->dq[at + i] += rounded(ds, plain) * (double)k[i];
    }
}

static result expected(const problem *p, bool plain)
{
    const int64_t n = p->R * p->s.NH;
    const result want = {.o = ops_doubles(n * p->s.D), .lse = ops_doubles(n), .dq = ops_doubles(n * p->s.D)};
    double *weight = ops_doubles(p->S);
    for (int64_t r = 0; r < p->R; r++)
        for (int64_t h = 0; h < p->s.NH; h++) head(p, r, h, plain, weight, &want);
    return want;
}

/* Largest error against `want` of the op at most twice that of the plain loop. */
static void expect(const char *name, const ops_tensor *got, const double *want, const double *plain)
{
    const int64_t width = ops_width(got);
    double error = 0, allowed = 0;
    for (int64_t i = 0; i < ops_rows(got) * width; i++) {
        const double e = fabs((double)ops_row(got, i / width)[i % width] - want[i]);
        if (!(e <= error)) error = e; /* NaN stays */
        if (fabs(plain[i] - want[i]) > allowed) allowed = fabs(plain[i] - want[i]);
    }
    if (!(error <= 2 * allowed)) fail_msg("%s: error %.3g, of a plain loop in bf16 %.3g", name, error, allowed);
}

static mtp_device *open_bf16(void)
{
    const mtp_device_options options = {.num_threads = 2, .bf16 = true};
    mtp_device *device = NULL;
    assert_ok(ops_backend()->device_open(&options, &device));
    ops_owned.devices[ops_owned.num_devices++] = device;
    return device;
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

static void errors_are_those_of_bf16(void **state)
{
    (void)state;
    mtp_device *device = open_bf16();
    test_rng rng = {.state = 91};
    for (size_t i = 0; i < NUM_SHAPES; i++) {
        const problem p = make(&rng, shapes[i]);
        const result want = expected(&p, false), plain = expected(&p, true);
        mtp_attention_args a = args(&p);
        assert_ok(run(device, a));
        expect("o", &p.o, want.o, plain.o);
        expect("lse", &p.lse, want.lse, plain.lse);
        expect("dq", &p.dq, want.dq, plain.dq);
        const uint64_t bits = ops_hash(&p.dq, 0);
        a.dq = a.do_; /* allowed */
        assert_ok(run(device, a));
        assert_true(ops_hash(&p.dout, 0) == bits);
        ops_release_buffers();
    }
    ops_release();
}

static void large_scores_stay_finite(void **state)
{
    (void)state;
    mtp_device *device = open_bf16();
    test_rng rng = {.state = 92};
    const problem p = make(&rng, shapes[3]);
    const int64_t stride = p.q.view.stride[0], width = ops_width(&p.q);
    for (int64_t i = 0; i < p.R * width; i++) {
        p.q.values[i] = ops_rounded(60 * p.q.values[i], MTP_BF16);
        ((float *)p.q.view.data)[i / width * stride + i % width] = p.q.values[i];
    }
    const result want = expected(&p, false);
    assert_ok(run(device, args(&p)));
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
    mtp_device *device = open_bf16();
    /* rows_exact of the cuda backend is about cuBLASLt, which has no part here */
    if (!ops_device_name() && !ops_backend()->device_info(device)->rows_exact) skip();
    test_rng rng = {.state = 93};
    const problem all = make(&rng, shapes[3]);
    assert_ok(run(device, args(&all)));
    const size_t bytes = (size_t)ops_width(&all.o) * sizeof(float);
    for (int64_t r = 0; r < all.R; r += 7) {
        const int mark = ops_owned.count;
        const ops_tensor o = ops_random(&rng, MTP_F32, 1, ops_width(&all.o), 0, 1);
        const ops_tensor dq = ops_random(&rng, MTP_F32, 1, ops_width(&all.o), 0, 1);
        const ops_tensor lse = ops_random(&rng, MTP_F32, 1, ops_width(&all.lse), 0, 1);
        const int32_t doc = all.doc_begin[r];
        int32_t zero = 0, begin = all.key_begin[r] - doc, end = all.key_end[r] - doc;
        mtp_attention_args a = args(&all);
        a.q = mtp_view_rows(a.q, r, 1);
        a.do_ = mtp_view_rows(a.do_, r, 1);
        a.kv = mtp_view_rows(a.kv, doc, end);
        a.key_begin = mtp_view_1d(&begin, MTP_I32, 1);
        a.key_end = mtp_view_1d(&end, MTP_I32, 1);
        a.doc_begin = mtp_view_1d(&zero, MTP_I32, 1);
        a.o = split(o.view, all.s.NH);
        a.dq = split(dq.view, all.s.NH);
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
    mtp_device *device = open_bf16();
    test_rng rng = {.state = 94};
    const problem p = make(&rng, shapes[1]);
    mtp_attention_args a = args(&p);
    mtp_view *views[] = {&a.q, &a.key_begin, &a.key_end, &a.doc_begin, &a.o, &a.lse, &a.do_, &a.dq};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++) *views[i] = mtp_view_rows(*views[i], 151, 20);
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
        cmocka_unit_test(errors_are_those_of_bf16),
        cmocka_unit_test(large_scores_stay_finite),
        cmocka_unit_test(a_row_alone_has_the_same_bits),
        cmocka_unit_test(unseen_tokens_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
