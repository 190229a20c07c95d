/* Times query-only attention, forward and backward, at the head sizes of the official drafters. The rate counts the
 * keys that a row sees: two products forward, three backward. */
#include "bench.h"

typedef struct layer {
    const char *name;
    int64_t tokens, heads, kv_heads, width, window; /* window 0: all tokens up to the position */
    mtp_dtype dtype;
} layer;

static const layer layers[] = {
    {"E2B sliding, 512 tokens", 512, 4, 1, 256, 512, MTP_F32},
    {"E2B full, 512 tokens", 512, 4, 1, 512, 0, MTP_F32},
    {"E2B sliding, 2048 tokens", 2048, 4, 1, 256, 512, MTP_F32},
    {"E2B sliding, 2048 tokens, bf16 K/V", 2048, 4, 1, 256, 512, MTP_BF16},
    {"E2B full, 2048 tokens", 2048, 4, 1, 512, 0, MTP_F32},
    {"12B sliding, 2048 tokens", 2048, 16, 8, 256, 1024, MTP_F32},
    {"12B full, 2048 tokens", 2048, 16, 1, 512, 0, MTP_F32},
};

static void time_layer(const bench *b, const layer *l)
{
    const int64_t R = l->tokens, rows = R * l->heads, width = l->width;
    float *q = bench_floats(b, rows * width, 0.3f), *o = bench_alloc(b, rows * width, sizeof(float));
    float *dq = bench_alloc(b, rows * width, sizeof(float)), *dout = bench_floats(b, rows * width, 1);
    float *lse = bench_alloc(b, rows, sizeof(float)), *kv32 = bench_floats(b, R * 2 * l->kv_heads * width, 0.3f);
    void *kv = bench_alloc(b, R * 2 * l->kv_heads * width, mtp_dtype_size(l->dtype));
    int32_t *range = bench_alloc(b, 3 * R, sizeof(int32_t));
    double keys = 0;
    for (int64_t r = 0; r < R; r++) {
        range[r] = (int32_t)(l->window && r >= l->window ? r - l->window + 1 : 0);
        range[R + r] = (int32_t)(r + 1);
        keys += range[R + r] - range[r];
    }
    const mtp_view kv_view = mtp_view_4d(kv, l->dtype, R, 2, l->kv_heads, width);
    const mtp_convert_args convert = {.src = mtp_view_4d(kv32, MTP_F32, R, 2, l->kv_heads, width), .dst = kv_view};
    bench_need(b->ops->convert(b->device, &convert));
    mtp_attention_args a = {.q = mtp_view_3d(q, MTP_F32, R, l->heads, width),
                            .kv = kv_view,
                            .key_begin = mtp_view_1d(range, MTP_I32, R),
                            .key_end = mtp_view_1d(range + R, MTP_I32, R),
                            .doc_begin = mtp_view_1d(range + 2 * R, MTP_I32, R),
                            .o = mtp_view_3d(o, MTP_F32, R, l->heads, width),
                            .lse = mtp_view_2d(lse, MTP_F32, R, l->heads),
                            .do_ = mtp_view_3d(dout, MTP_F32, R, l->heads, width),
                            .dq = mtp_view_3d(dq, MTP_F32, R, l->heads, width)};
    a.scratch.size = b->ops->attention_bwd_scratch(b->device, &a);
    a.scratch.data = bench_alloc(b, (int64_t)a.scratch.size, 1);
    const double product = 2 * keys * (double)(l->heads * width);
    double seconds;
    BENCH_BEST(*b, seconds, b->ops->attention_fwd(b->device, &a));
    bench_report(b, "attention_fwd", l->name, seconds, 2 * product);
    BENCH_BEST(*b, seconds, b->ops->attention_bwd(b->device, &a));
    bench_report(b, "attention_bwd", l->name, seconds, 3 * product);
    void *all[] = {q, o, dq, dout, lse, kv32, kv, range, a.scratch.data};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) bench_free(b, all[i]);
}

int main(int argc, char **argv)
{
    const bench b = bench_open(argc, argv);
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) time_layer(&b, &layers[i]);
    b.ops->device_close(b.device);
    return 0;
}
