/* Times query-only attention, forward and backward, of one layer: documents of --document tokens packed one after the
 * other, every token a position. The rate counts the keys that a row sees: two products forward, three backward. */
#include "kernel_bench.h"

static int64_t tokens = 4096, document = 4096, heads = 4, kv_heads = 1, width = 256, window = 512;

typedef struct set {
    float *q, *kv, *dout; /* host */
    mtp_attention_args args;
} set;

typedef struct attention {
    kernel_bench b;
    set sets[KERNEL_SETS_MOST];
    int32_t *begin, *end, *doc;
    double keys; /* that all rows see */
} attention;

static mtp_status forward(void *context, int64_t i)
{
    attention *a = context;
    return a->b.base.ops->attention_fwd(a->b.base.device, &a->sets[i].args);
}

static mtp_status backward(void *context, int64_t i)
{
    attention *a = context;
    return a->b.base.ops->attention_bwd(a->b.base.device, &a->sets[i].args);
}

static void make_ranges(attention *a)
{
    a->begin = kernel_host((size_t)tokens * sizeof(int32_t));
    a->end = kernel_host((size_t)tokens * sizeof(int32_t));
    a->doc = kernel_host((size_t)tokens * sizeof(int32_t));
    for (int64_t t = 0; t < tokens; t++) {
        const int64_t doc = t / document * document, first = window ? t - window + 1 : 0;
        a->doc[t] = (int32_t)doc;
        a->begin[t] = (int32_t)(first > doc ? first : doc);
        a->end[t] = (int32_t)(t + 1);
        a->keys += (double)(a->end[t] - a->begin[t]);
    }
}

static mtp_view ints(const kernel_bench *b, const int32_t *x)
{
    return mtp_view_1d(kernel_upload(b, x, (size_t)tokens * sizeof *x), MTP_I32, tokens);
}

static mtp_view floats(const kernel_bench *b, const float *x)
{
    const size_t bytes = (size_t)(tokens * heads * width) * sizeof *x;
    return mtp_view_3d(x ? kernel_upload(b, x, bytes) : bench_alloc(&b->base, (int64_t)bytes, 1), MTP_F32, tokens,
                       heads, width);
}

static void make_set(attention *a, set *s)
{
    kernel_bench *b = &a->b;
    s->q = kernel_floats(b, tokens * heads * width, 6 / sqrtf((float)width), false);
    s->kv = kernel_floats(b, tokens * 2 * kv_heads * width, 1, true);
    s->dout = kernel_floats(b, tokens * heads * width, 1, false);
    void *kv = kernel_upload_bf16(b, s->kv, tokens * 2 * kv_heads * width);
    s->args = (mtp_attention_args){
        .q = floats(b, s->q),
        .kv = mtp_view_4d(kv, MTP_BF16, tokens, 2, kv_heads, width),
        .key_begin = ints(b, a->begin),
        .key_end = ints(b, a->end),
        .doc_begin = ints(b, a->doc),
        .o = floats(b, NULL),
        .lse = mtp_view_2d(bench_alloc(&b->base, tokens * heads, sizeof(float)), MTP_F32, tokens, heads),
        .do_ = floats(b, s->dout),
        .dq = floats(b, NULL)};
    const size_t forward_bytes = b->base.ops->attention_fwd_scratch(b->base.device, &s->args);
    const size_t backward_bytes = b->base.ops->attention_bwd_scratch(b->base.device, &s->args);
    s->args.scratch.size = forward_bytes > backward_bytes ? forward_bytes : backward_bytes;
    s->args.scratch.data = bench_alloc(&b->base, (int64_t)s->args.scratch.size, 1);
}

/* ---- the check --------------------------------------------------------------------------------------------------- */

static double dot(const float *x, const float *y)
{
    double sum = 0;
    for (int64_t i = 0; i < width; i++) sum += (double)x[i] * (double)y[i];
    return sum;
}

/* One row of one head in double: o, dq [width], and lse. */
static double expected(const attention *a, const set *s, int64_t r, int64_t h, double *o, double *dq)
{
    const int64_t g = h / (heads / kv_heads), begin = a->begin[r], n = a->end[r] - begin;
    const float *q = s->q + (r * heads + h) * width, *dout = s->dout + (r * heads + h) * width;
    double *weight = kernel_host((size_t)n * sizeof *weight), top = -INFINITY, sum = 0, delta = 0;
    for (int64_t i = 0; i < width; i++) o[i] = dq[i] = 0;
    for (int64_t j = 0; j < n; j++) {
        weight[j] = dot(q, s->kv + ((begin + j) * 2 * kv_heads + g) * width);
        top = weight[j] > top ? weight[j] : top;
    }
    for (int64_t j = 0; j < n; j++) sum += exp(weight[j] - top);
    for (int64_t j = 0; j < n; j++) {
        const float *v = s->kv + (((begin + j) * 2 + 1) * kv_heads + g) * width;
        weight[j] = exp(weight[j] - top) / sum;
        for (int64_t i = 0; i < width; i++) o[i] += weight[j] * (double)v[i];
        delta += weight[j] * dot(dout, v);
    }
    for (int64_t j = 0; j < n; j++) {
        const float *k = s->kv + ((begin + j) * 2 * kv_heads + g) * width, *v = k + kv_heads * width;
        const double ds = weight[j] * (dot(dout, v) - delta);
        for (int64_t i = 0; i < width; i++) dq[i] += ds * (double)k[i];
    }
    free(weight);
    return top + log(sum);
}

/* Rows over the whole batch, the first and the last among them. */
static void check(attention *a)
{
    set *s = &a->sets[0];
    const size_t bytes = (size_t)(tokens * heads * width) * sizeof(float);
    bench_need(forward(a, 0));
    bench_need(backward(a, 0));
    float *o = kernel_download(&a->b, s->args.o.data, bytes), *dq = kernel_download(&a->b, s->args.dq.data, bytes);
    float *lse = kernel_download(&a->b, s->args.lse.data, (size_t)(tokens * heads) * sizeof(float));
    double *want_o = kernel_host((size_t)width * sizeof *want_o),
           *want_dq = kernel_host((size_t)width * sizeof *want_dq);
    const double tolerance = a->b.fp32 ? 2e-5 : 2e-2;
    for (int64_t i = 0; i < 8; i++) {
        const int64_t r = (tokens - 1) * i / 7, h = i % heads, at = (r * heads + h) * width;
        kernel_check("lse", (double)lse[r * heads + h], expected(a, s, r, h, want_o, want_dq), 1,
                     a->b.fp32 ? 1e-4 : 0.1);
        for (int64_t j = 0; j < width; j++) {
            kernel_check("o", (double)o[at + j], want_o[j], 1, tolerance);
            kernel_check("dq", (double)dq[at + j], want_dq[j], 8, tolerance);
        }
    }
    free(o);
    free(dq);
    free(lse);
    free(want_o);
    free(want_dq);
}

int main(int argc, char **argv)
{
    const kernel_option options[] = {
        {"tokens", &tokens, 1, "tokens of the batch, each a position"},
        {"document", &document, 1, "tokens of a document"},
        {"heads", &heads, 1, "query heads"},
        {"kv-heads", &kv_heads, 1, "K/V heads"},
        {"width", &width, 16, "head width"},
        {"window", &window, 0, "sliding window, 0 for none"},
    };
    attention a = {.b = kernel_open(argc, argv, options, sizeof options / sizeof *options)};
    if (heads % kv_heads) kernel_usage(argv[0], options, sizeof options / sizeof *options);
    make_ranges(&a);
    for (int64_t i = 0; i < a.b.sets; i++) make_set(&a, &a.sets[i]);
    check(&a);
    char shape[160];
    snprintf(shape, sizeof shape, "%lld tokens in documents of %lld, %lld heads on %lld, width %lld, window %lld",
             (long long)tokens, (long long)document, (long long)heads, (long long)kv_heads, (long long)width,
             (long long)window);
    const double product = 2 * a.keys * (double)(heads * width);
    const void *memory = a.sets[0].args.lse.data;
    kernel_report(&a.b, "attention_fwd", shape, kernel_time(&a.b, forward, &a, memory), 2 * product, 0);
    kernel_report(&a.b, "attention_bwd", shape, kernel_time(&a.b, backward, &a, memory), 3 * product, 0);
    for (int64_t i = 0; i < a.b.sets; i++) {
        free(a.sets[i].q);
        free(a.sets[i].kv);
        free(a.sets[i].dout);
        mtp_attention_args *s = &a.sets[i].args;
        mtp_view *views[] = {&s->q, &s->kv, &s->key_begin, &s->key_end, &s->doc_begin, &s->o, &s->lse, &s->do_, &s->dq};
        for (size_t v = 0; v < sizeof views / sizeof *views; v++) bench_free(&a.b.base, views[v]->data);
        bench_free(&a.b.base, s->scratch.data);
    }
    free(a.begin);
    free(a.end);
    free(a.doc);
    a.b.base.ops->device_close(a.b.base.device);
    return 0;
}
