/* Times top-k, the centroid cross-entropy and the three heads, forward and backward, at the size of the E2B drafter
 * with 512 positions of 3 draft steps. The rate counts the useful products only: three for a head with gradients. */
#include "bench.h"

enum { R = 1536, H = 256, V = 262144, C = 2048, P = V / C, K_SELECTED = 32 };

typedef struct data {
    float *x, *e, *scores, *scale, *loss, *dx, *de, *dscores;
    int32_t *order, *slot_of, *target, *selected, *argmax;
    uint8_t *miss;
} data;

static data make_data(const bench *b)
{
    data d = {.x = bench_floats(b, R * H, 1), .e = bench_floats(b, (int64_t)V * H, 0.1f)};
    d.scores = bench_floats(b, R * C, 4);
    d.dscores = bench_alloc(b, R * C, sizeof(float));
    d.scale = bench_alloc(b, R, sizeof(float));
    d.loss = bench_alloc(b, R, sizeof(float));
    d.dx = bench_alloc(b, R * H, sizeof(float));
    d.de = bench_alloc(b, (int64_t)V * H, sizeof(float));
    d.order = bench_alloc(b, V, sizeof(int32_t));
    d.slot_of = bench_alloc(b, V, sizeof(int32_t));
    d.target = bench_alloc(b, R, sizeof(int32_t));
    d.selected = bench_alloc(b, R * K_SELECTED, sizeof(int32_t));
    d.argmax = bench_alloc(b, R, sizeof(int32_t));
    d.miss = bench_alloc(b, R, 1);
    uint64_t state = 362436069;
    for (int32_t i = 0; i < V; i++) d.order[i] = i;
    for (int32_t i = V - 1; i > 0; i--) {
        const int32_t j = (int32_t)(bench_random(&state) % (uint64_t)(i + 1)), token = d.order[i];
        d.order[i] = d.order[j];
        d.order[j] = token;
    }
    for (int32_t i = 0; i < V; i++) d.slot_of[d.order[i]] = i;
    for (int r = 0; r < R; r++) {
        d.target[r] = (int32_t)(bench_random(&state) % V);
        d.scale[r] = 1.0f / R;
    }
    return d;
}

static mtp_head_args head_args(const data *d)
{
    return (mtp_head_args){.x = mtp_view_2d(d->x, MTP_F32, R, H),
                           .e = mtp_view_2d(d->e, MTP_F32, V, H),
                           .order = mtp_view_2d(d->order, MTP_I32, C, P),
                           .slot_of = mtp_view_1d(d->slot_of, MTP_I32, V),
                           .selected = mtp_view_2d(d->selected, MTP_I32, R, K_SELECTED),
                           .target = mtp_view_1d(d->target, MTP_I32, R),
                           .scale = mtp_view_1d(d->scale, MTP_F32, R),
                           .loss = mtp_view_1d(d->loss, MTP_F32, R),
                           .argmax = mtp_view_1d(d->argmax, MTP_I32, R),
                           .dx = mtp_view_2d(d->dx, MTP_F32, R, H),
                           .de = mtp_view_2d(d->de, MTP_F32, V, H)};
}

typedef mtp_status (*head_op)(mtp_device *, const mtp_head_args *);
typedef size_t (*head_size)(const mtp_device *, const mtp_head_args *);

static void time_head(const bench *b, const char *name, head_op op, head_size size, mtp_head_args a, double product)
{
    a.scratch.size = size(b->device, &a);
    a.scratch.data = bench_alloc(b, (int64_t)a.scratch.size, 1);
    double seconds;
    BENCH_BEST(*b, seconds, op(b->device, &a));
    bench_report(b, name, "E2B, 1536 rows, forward and backward", seconds, 3 * product);
    a.dx.data = NULL;
    a.de.data = NULL;
    BENCH_BEST(*b, seconds, op(b->device, &a));
    bench_report(b, name, "E2B, 1536 rows, forward", seconds, product);
    bench_free(b, a.scratch.data);
}

static void time_scores(const bench *b, const data *d)
{
    double seconds;
    mtp_topk_args topk = {.scores = mtp_view_2d(d->scores, MTP_F32, R, C),
                          .selected = mtp_view_2d(d->selected, MTP_I32, R, K_SELECTED)};
    topk.scratch.size = b->ops->topk_scratch(b->device, &topk);
    topk.scratch.data = bench_alloc(b, (int64_t)topk.scratch.size, 1);
    BENCH_BEST(*b, seconds, b->ops->topk(b->device, &topk));
    bench_report(b, "topk", "1536 rows, 32 of 2048", seconds, (double)R * C);
    bench_free(b, topk.scratch.data);

    for (int r = 0; r < R; r++) d->target[r] = d->target[r] % C;
    const mtp_xent_args xent = {.logits = mtp_view_2d(d->scores, MTP_F32, R, C),
                                .target = mtp_view_1d(d->target, MTP_I32, R),
                                .scale = mtp_view_1d(d->scale, MTP_F32, R),
                                .loss = mtp_view_1d(d->loss, MTP_F32, R),
                                .dlogits = mtp_view_2d(d->dscores, MTP_F32, R, C)};
    BENCH_BEST(*b, seconds, b->ops->xent(b->device, &xent));
    bench_report(b, "xent", "1536 rows of 2048", seconds, 2.0 * R * C);
}

int main(int argc, char **argv)
{
    const bench b = bench_open(argc, argv);
    const data d = make_data(&b);
    time_scores(&b, &d);
    uint64_t state = 521288629;
    for (int r = 0; r < R; r++) d.target[r] = (int32_t)(bench_random(&state) % V);

    mtp_head_args a = head_args(&d);
    time_head(&b, "head_candidates", b.ops->head_candidates, b.ops->head_candidates_scratch, a,
              2.0 * R * (K_SELECTED + 1) * P * H);
    time_head(&b, "head_hierarchical", b.ops->head_hierarchical, b.ops->head_hierarchical_scratch, a, 2.0 * R * P * H);
    time_head(&b, "head_flat", b.ops->head_flat, b.ops->head_flat_scratch, a, 2.0 * R * V * H);
    b.ops->device_close(b.device);
    return 0;
}
