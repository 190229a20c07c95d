/* Times query-only attention, forward and backward, of one layer: documents of --document tokens packed one after the
 * other, every token a position. The rate counts the keys that a row sees: two products forward, three backward. On a
 * CUDA device in bf16 mode cuDNN's forward runs beside ours on the same inputs, or the reason why not is printed. */
#include "base/real.h"
#include "cuda/cudnn.h"
#include "kernel_bench.h"

static int64_t tokens = 4096, document = 4096, heads = 4, kv_heads = 1, width = 256, window = 512;

typedef struct set {
    float *q, *kv, *dout; /* host */
    mtp_attention_args args;
    cudnn_tensors cudnn;
} set;

typedef struct attention {
    kernel_bench b;
    set sets[KERNEL_SETS_MOST];
    int32_t *begin, *end, *doc;
    double keys; /* that all rows see */
    cudnn_attention *cudnn;
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

/* Of every head of every token, in the device's dtype for activations; x NULL: an output. */
static mtp_view stored(const kernel_bench *b, const float *x)
{
    const mtp_dtype dtype = b->base.ops->device_info(b->base.device)->stored;
    const int64_t count = tokens * heads * width;
    void *memory = !x                  ? bench_alloc(&b->base, count, mtp_dtype_size(dtype))
                   : dtype == MTP_BF16 ? kernel_upload_bf16(b, x, count)
                                       : kernel_upload(b, x, (size_t)count * sizeof *x);
    return mtp_view_3d(memory, dtype, tokens, heads, width);
}

static float *download(const kernel_bench *b, const void *memory, mtp_dtype dtype, int64_t count)
{
    void *values = kernel_download(b, memory, (size_t)count * mtp_dtype_size(dtype));
    float *floats = kernel_host((size_t)count * sizeof *floats);
    mtp__real_to_f32(floats, values, dtype, count);
    free(values);
    return floats;
}

static void make_set(attention *a, set *s)
{
    kernel_bench *b = &a->b;
    s->q = kernel_floats(b, tokens * heads * width, 6 / sqrtf((float)width), true);
    s->kv = kernel_floats(b, tokens * 2 * kv_heads * width, 1, true);
    s->dout = kernel_floats(b, tokens * heads * width, 1, true);
    void *kv = kernel_upload_bf16(b, s->kv, tokens * 2 * kv_heads * width);
    s->args = (mtp_attention_args){
        .q = stored(b, s->q),
        .kv = mtp_view_4d(kv, MTP_BF16, tokens, 2, kv_heads, width),
        .key_begin = ints(b, a->begin),
        .key_end = ints(b, a->end),
        .doc_begin = ints(b, a->doc),
        .o = stored(b, NULL),
        .lse = mtp_view_2d(bench_alloc(&b->base, tokens * heads, sizeof(float)), MTP_F32, tokens, heads),
        .do_ = stored(b, s->dout),
        .dq = stored(b, NULL)};
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
    const int64_t values = tokens * heads * width;
    bench_need(forward(a, 0));
    bench_need(backward(a, 0));
    float *o = download(&a->b, s->args.o.data, s->args.o.dtype, values);
    float *dq = download(&a->b, s->args.dq.data, s->args.dq.dtype, values);
    float *lse = download(&a->b, s->args.lse.data, MTP_F32, tokens * heads);
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

/* ---- beside cuDNN ------------------------------------------------------------------------------------------------ */

static mtp_status cudnn_forward(void *context, int64_t i)
{
    attention *a = context;
    return cudnn_attention_run(a->cudnn, &a->sets[i].cudnn);
}

/* What cuDNN takes: documents of one length, in bf16. */
static mtp_status cudnn_open(attention *a)
{
    const cudnn_shape shape = {tokens / document, document, heads, kv_heads, width, window < document ? window : 0};
    if (a->b.fp32) return MTP_FAIL(MTP_E_UNSUPPORTED, "cuDNN's attention has no fp32");
    if (tokens % document)
        return MTP_FAIL(MTP_E_UNSUPPORTED, "the documents are not of one length: %lld tokens, %lld a document",
                        (long long)tokens, (long long)document);
    return cudnn_attention_create(&shape, a->b.base.ops->device_info(a->b.base.device)->stream, &a->cudnn);
}

static void cudnn_tensors_make(attention *a, set *s)
{
    const kernel_bench *b = &a->b;
    s->cudnn = (cudnn_tensors){.q = kernel_upload_bf16(b, s->q, tokens * heads * width),
                               .kv = s->args.kv.data,
                               .o = bench_alloc(&b->base, tokens * heads * width, 2),
                               .lse = bench_alloc(&b->base, tokens * heads, sizeof(float)),
                               .workspace = bench_alloc(&b->base, (int64_t)cudnn_attention_workspace(a->cudnn), 1)};
}

/* Every output of both, of the first set. */
static void cudnn_check(attention *a)
{
    const set *s = &a->sets[0];
    const int64_t values = tokens * heads * width, rows = tokens * heads;
    bench_need(forward(a, 0));
    bench_need(cudnn_forward(a, 0));
    float *o = download(&a->b, s->args.o.data, s->args.o.dtype, values);
    float *lse = download(&a->b, s->args.lse.data, MTP_F32, rows);
    float *their_o = download(&a->b, s->cudnn.o, MTP_BF16, values);
    float *their_lse = download(&a->b, s->cudnn.lse, MTP_F32, rows);
    for (int64_t i = 0; i < values; i++) kernel_check("cuDNN's o", (double)their_o[i], (double)o[i], 1, 2e-2);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++)
            kernel_check("cuDNN's lse", (double)their_lse[(t / document * heads + h) * document + t % document],
                         (double)lse[t * heads + h], 1, 0.1);
    free(o);
    free(lse);
    free(their_o);
    free(their_lse);
}

static void cudnn_beside(attention *a, const char *shape, double flop, double ours)
{
    const mtp_status status = cudnn_open(a);
    if (status == MTP_E_UNSUPPORTED) {
        kernel_refused(&a->b, "attention_fwd_cudnn", shape, mtp_last_error()->message);
        return;
    }
    bench_need(status);
    for (int64_t i = 0; i < a->b.sets; i++) cudnn_tensors_make(a, &a->sets[i]);
    cudnn_check(a);
    const double seconds = kernel_time(&a->b, cudnn_forward, a, a->sets[0].cudnn.lse);
    kernel_report(&a->b, "attention_fwd_cudnn", shape, seconds, flop, 0);
    printf(
        "{\"op\": \"attention_fwd_against_cudnn\", \"case\": \"%s\", \"library\": \"%s\", \"seconds_ratio\": %.3f}\n",
        shape, cudnn_attention_name(a->cudnn), ours / seconds);
    for (int64_t i = 0; i < a->b.sets; i++) {
        const cudnn_tensors *t = &a->sets[i].cudnn;
        void *owned[] = {(void *)(uintptr_t)t->q, t->o, t->lse, t->workspace};
        for (size_t j = 0; j < sizeof owned / sizeof *owned; j++) bench_free(&a->b.base, owned[j]);
    }
    cudnn_attention_free(a->cudnn);
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
    const double ours = kernel_time(&a.b, forward, &a, memory);
    kernel_report(&a.b, "attention_fwd", shape, ours, 2 * product, 0);
    if (a.b.base.ops->device_info(a.b.base.device)->stream) cudnn_beside(&a, shape, 2 * product, ours);
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
