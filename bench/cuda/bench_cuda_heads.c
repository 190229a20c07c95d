/* Times the heads, forward and backward together: --mode 0 the flat one, 1 the centroid head with --selected of
 * --centroids, 2 the hierarchical one; and with mode 1 the top-k of the centroid scores and the cross-entropy over
 * them. The rate counts three products of every row with its candidates. */
#include "kernel_bench.h"

static int64_t mode = 1, rows = 1024, hidden = 256, vocabulary = 262144, centroids = 2048, selected = 32;
static int64_t budget = 0;

typedef struct set {
    float *x, *e; /* host */
    int32_t *target, *selected;
    mtp_head_args args;
    mtp_topk_args topk;
    mtp_xent_args xent;
} set;

typedef struct heads {
    kernel_bench b;
    set sets[KERNEL_SETS_MOST];
    int32_t *order, *slot_of;
} heads;

static mtp_status head(void *context, int64_t i)
{
    heads *h = context;
    const mtp_backend *ops = h->b.base.ops;
    const mtp_head_args *a = &h->sets[i].args;
    return mode == 0   ? ops->head_flat(h->b.base.device, a)
           : mode == 1 ? ops->head_candidates(h->b.base.device, a)
                       : ops->head_hierarchical(h->b.base.device, a);
}

static size_t head_scratch(const heads *h, const mtp_head_args *a)
{
    const mtp_backend *ops = h->b.base.ops;
    return mode == 0   ? ops->head_flat_scratch(h->b.base.device, a)
           : mode == 1 ? ops->head_candidates_scratch(h->b.base.device, a)
                       : ops->head_hierarchical_scratch(h->b.base.device, a);
}

static mtp_status topk(void *context, int64_t i)
{
    heads *h = context;
    return h->b.base.ops->topk(h->b.base.device, &h->sets[i].topk);
}

static mtp_status xent(void *context, int64_t i)
{
    heads *h = context;
    return h->b.base.ops->xent(h->b.base.device, &h->sets[i].xent);
}

static int64_t below(kernel_bench *b, int64_t limit)
{
    return (int64_t)(bench_random(&b->random) % (uint64_t)limit);
}

/* A random order of the tokens, and its inverse. */
static void make_order(heads *h)
{
    h->order = kernel_host((size_t)vocabulary * sizeof(int32_t));
    h->slot_of = kernel_host((size_t)vocabulary * sizeof(int32_t));
    for (int64_t i = 0; i < vocabulary; i++) h->order[i] = (int32_t)i;
    for (int64_t i = vocabulary - 1; i > 0; i--) {
        const int64_t j = below(&h->b, i + 1);
        const int32_t kept = h->order[i];
        h->order[i] = h->order[j];
        h->order[j] = kept;
    }
    for (int64_t i = 0; i < vocabulary; i++) h->slot_of[h->order[i]] = (int32_t)i;
}

static mtp_view ints(const kernel_bench *b, const int32_t *x, int64_t n)
{
    return mtp_view_1d(kernel_upload(b, x, (size_t)n * sizeof *x), MTP_I32, n);
}

static mtp_view matrix(const kernel_bench *b, const float *x, int64_t n, int64_t width)
{
    const size_t bytes = (size_t)(n * width) * sizeof *x;
    return mtp_view_2d(x ? kernel_upload(b, x, bytes) : bench_alloc(&b->base, (int64_t)bytes, 1), MTP_F32, n, width);
}

static mtp_view vector(const kernel_bench *b, int64_t n)
{
    return mtp_view_1d(bench_alloc(&b->base, n, sizeof(float)), MTP_F32, n);
}

/* Distinct centroids a row: a random first one and a random odd step through a power of two, else neighbours. */
static void select_centroids(heads *h, set *s)
{
    const bool power = (centroids & (centroids - 1)) == 0;
    s->selected = kernel_host((size_t)(rows * selected) * sizeof(int32_t));
    for (int64_t r = 0; r < rows; r++) {
        const int64_t first = below(&h->b, centroids), step = power ? 2 * below(&h->b, centroids) + 1 : 1;
        for (int64_t j = 0; j < selected; j++)
            s->selected[r * selected + j] = (int32_t)((first + j * step) % centroids);
    }
}

static void make_set(heads *h, set *s)
{
    kernel_bench *b = &h->b;
    s->x = kernel_floats(b, rows * hidden, 1, b->stored == MTP_BF16);
    s->e = kernel_floats(b, vocabulary * hidden, 2 / sqrtf((float)hidden), true);
    s->target = kernel_host((size_t)rows * sizeof(int32_t));
    for (int64_t r = 0; r < rows; r++) s->target[r] = (int32_t)below(b, vocabulary);
    if (mode == 1) select_centroids(h, s);
    float *scale = kernel_floats(b, rows, 0, false);
    for (int64_t r = 0; r < rows; r++) scale[r] = 1 / (float)rows;
    s->args = (mtp_head_args){
        .x = mtp_view_2d(kernel_upload_as(b, s->x, rows * hidden, b->stored), b->stored, rows, hidden),
        .e = mtp_view_2d(kernel_upload_bf16(b, s->e, vocabulary * hidden), MTP_BF16, vocabulary, hidden),
        .target = ints(b, s->target, rows),
        .scale = mtp_view_1d(kernel_upload(b, scale, (size_t)rows * sizeof *scale), MTP_F32, rows),
        .loss = vector(b, rows),
        .dx = matrix(b, NULL, rows, hidden),
        .de = matrix(b, NULL, vocabulary, hidden),
        .logits_budget = (size_t)budget << 20};
    if (mode) {
        s->args.order = ints(b, h->order, vocabulary);
        s->args.order = mtp_view_2d(s->args.order.data, MTP_I32, centroids, vocabulary / centroids);
        s->args.slot_of = ints(b, h->slot_of, vocabulary);
    }
    if (mode == 1) {
        const mtp_view view = ints(b, s->selected, rows * selected);
        s->args.selected = mtp_view_2d(view.data, MTP_I32, rows, selected);
    }
    s->args.scratch.size = head_scratch(h, &s->args);
    s->args.scratch.data = bench_alloc(&b->base, (int64_t)s->args.scratch.size, 1);
    free(scale);
}

/* Scores of the centroids: what top-k and the cross-entropy over them take. */
static void make_scores(heads *h, set *s)
{
    kernel_bench *b = &h->b;
    float *scores = kernel_floats(b, rows * centroids, 4, false);
    int32_t *target = kernel_host((size_t)rows * sizeof *target);
    for (int64_t r = 0; r < rows; r++) target[r] = h->slot_of[s->target[r]] / (int32_t)(vocabulary / centroids);
    s->topk.scores = matrix(b, scores, rows, centroids);
    s->topk.selected = mtp_view_2d(bench_alloc(&b->base, rows * selected, sizeof(int32_t)), MTP_I32, rows, selected);
    s->topk.scratch.size = b->base.ops->topk_scratch(b->base.device, &s->topk);
    s->topk.scratch.data = bench_alloc(&b->base, (int64_t)s->topk.scratch.size, 1);
    s->xent = (mtp_xent_args){.logits = s->topk.scores,
                              .target = ints(b, target, rows),
                              .scale = s->args.scale,
                              .loss = vector(b, rows),
                              .dlogits = matrix(b, NULL, rows, centroids)};
    free(scores);
    free(target);
}

/* ---- the check --------------------------------------------------------------------------------------------------- */

/* The row of e that is a row's target. */
static int64_t target_slot(const heads *h, const set *s, int64_t r)
{
    return mode ? h->slot_of[s->target[r]] : s->target[r];
}

/* Candidates of a row, as rows of e, into `slot`. */
static int64_t candidates(const heads *h, const set *s, int64_t r, int32_t *slot)
{
    const int64_t P = vocabulary / centroids, own = target_slot(h, s, r) / P;
    int64_t n = 0;
    bool found = mode == 0;
    for (; mode == 0 && n < vocabulary; n++) slot[n] = (int32_t)n;
    for (int64_t j = 0; mode == 1 && j < selected; j++) {
        const int64_t c = s->selected[r * selected + j];
        found = found || c == own;
        for (int64_t i = 0; i < P; i++) slot[n++] = (int32_t)(c * P + i);
    }
    for (int64_t i = 0; !found && i < P; i++) slot[n++] = (int32_t)(own * P + i);
    return n;
}

static void check_row(const heads *h, const set *s, int64_t r, const float *loss, const float *dx, int32_t *slot,
                      double *z)
{
    const int64_t n = candidates(h, s, r, slot), target = target_slot(h, s, r);
    double top = -INFINITY, sum = 0, own = 0, largest = 0;
    for (int64_t j = 0; j < n; j++) {
        z[j] = 0;
        for (int64_t i = 0; i < hidden; i++)
            z[j] += (double)s->x[r * hidden + i] * (double)s->e[(int64_t)slot[j] * hidden + i];
        top = z[j] > top ? z[j] : top;
        if (slot[j] == target) own = z[j];
    }
    for (int64_t j = 0; j < n; j++) sum += exp(z[j] - top);
    kernel_check("loss", (double)loss[r], top + log(sum) - own, top + log(sum) - own + 1, h->b.fp32 ? 1e-5 : 2e-2);
    double *want = kernel_host((size_t)hidden * sizeof *want);
    for (int64_t i = 0; i < hidden; i++) {
        want[i] = 0;
        for (int64_t j = 0; j < n; j++)
            want[i] += (exp(z[j] - top) / sum - (slot[j] == target)) / (double)rows *
                       (double)s->e[(int64_t)slot[j] * hidden + i];
        largest = fabs(want[i]) > largest ? fabs(want[i]) : largest;
    }
    for (int64_t i = 0; i < hidden; i++)
        kernel_check("dx", (double)dx[r * hidden + i], want[i], largest, h->b.fp32 ? 1e-4 : 3e-2);
    free(want);
}

/* Some rows in full; and all of de through the identity sum of de e = sum of dx x, both being the sum of dz z. */
static void check(heads *h)
{
    set *s = &h->sets[0];
    bench_need(head(h, 0));
    float *loss = kernel_download(&h->b, s->args.loss.data, (size_t)rows * sizeof *loss);
    float *dx = kernel_download(&h->b, s->args.dx.data, (size_t)(rows * hidden) * sizeof *dx);
    float *de = kernel_download(&h->b, s->args.de.data, (size_t)(vocabulary * hidden) * sizeof *de);
    int32_t *slot = kernel_host((size_t)(vocabulary * 2) * sizeof *slot);
    double *z = kernel_host((size_t)(vocabulary * 2) * sizeof *z), by_dx = 0, by_de = 0, size = 0;
    for (int64_t i = 0; i < 4; i++) check_row(h, s, (rows - 1) * i / 3, loss, dx, slot, z);
    for (int64_t i = 0; i < rows * hidden; i++) {
        by_dx += (double)dx[i] * (double)s->x[i];
        size += fabs((double)dx[i] * (double)s->x[i]);
    }
    for (int64_t i = 0; i < vocabulary * hidden; i++) by_de += (double)de[i] * (double)s->e[i];
    kernel_check("the sum of de e", by_de, by_dx, size, h->b.fp32 ? 1e-5 : 1e-2);
    free(loss);
    free(dx);
    free(de);
    free(slot);
    free(z);
}

/* Every selected score is at least as large as the one after it, and as many are as large as the last one as must be.
 */
static void check_topk(heads *h)
{
    set *s = &h->sets[0];
    bench_need(topk(h, 0));
    int32_t *id = kernel_download(&h->b, s->topk.selected.data, (size_t)(rows * selected) * sizeof *id);
    float *x = kernel_download(&h->b, s->topk.scores.data, (size_t)(rows * centroids) * sizeof *x);
    for (int64_t r = 0; r < rows; r++) {
        const float *score = x + r * centroids;
        const int32_t *best = id + r * selected;
        int64_t larger = 0;
        for (int64_t j = 0; j < selected; j++)
            kernel_check("an id of top-k", best[j] >= 0 && best[j] < centroids, 1, 1, 0);
        for (int64_t c = 0; c < centroids; c++) larger += score[c] > score[best[selected - 1]];
        kernel_check("the number of scores above the last one selected", larger < selected, 1, 1, 0);
        for (int64_t j = 1; j < selected; j++)
            kernel_check("the order of top-k",
                         score[best[j - 1]] > score[best[j]] ||
                             (!(score[best[j - 1]] < score[best[j]]) && best[j - 1] < best[j]),
                         1, 1, 0);
    }
    free(id);
    free(x);
}

/* ---- the program ------------------------------------------------------------------------------------------------- */

static void release(heads *h)
{
    for (int64_t i = 0; i < h->b.sets; i++) {
        set *s = &h->sets[i];
        void *device[] = {s->args.x.data,        s->args.e.data,        s->args.target.data,  s->args.scale.data,
                          s->args.loss.data,     s->args.dx.data,       s->args.de.data,      s->args.order.data,
                          s->args.slot_of.data,  s->args.selected.data, s->args.scratch.data, s->topk.scores.data,
                          s->topk.selected.data, s->topk.scratch.data,  s->xent.target.data,  s->xent.loss.data,
                          s->xent.dlogits.data};
        void *host[] = {s->x, s->e, s->target, s->selected};
        for (size_t n = 0; n < sizeof device / sizeof *device; n++) bench_free(&h->b.base, device[n]);
        for (size_t n = 0; n < sizeof host / sizeof *host; n++) free(host[n]);
    }
    free(h->order);
    free(h->slot_of);
    h->b.base.ops->device_close(h->b.base.device);
}

int main(int argc, char **argv)
{
    static const char *const names[] = {"head_flat", "head_candidates", "head_hierarchical"};
    const kernel_option options[] = {
        {"mode", &mode, 0, "0 flat, 1 the centroid head, 2 hierarchical"},
        {"rows", &rows, 1, "rows of the batch"},
        {"hidden", &hidden, 1, "drafter hidden size"},
        {"vocabulary", &vocabulary, 1, "tokens"},
        {"centroids", &centroids, 1, "centroids, a divisor of the vocabulary"},
        {"selected", &selected, 1, "centroids of a row"},
        {"budget", &budget, 0, "MiB of logits of the flat head, 0 for the default"},
    };
    const size_t count = sizeof options / sizeof *options;
    heads h = {.b = kernel_open(argc, argv, options, count)};
    if (mode > 2 || vocabulary % centroids || (mode == 1 && selected > centroids))
        kernel_usage(argv[0], options, count);
    make_order(&h);
    for (int64_t i = 0; i < h.b.sets; i++) make_set(&h, &h.sets[i]);
    check(&h);
    char shape[160];
    snprintf(shape, sizeof shape, "%lld rows of %lld, %lld tokens, %lld of %lld centroids", (long long)rows,
             (long long)hidden, (long long)vocabulary, (long long)(mode == 1 ? selected : mode == 2),
             (long long)(mode ? centroids : 0));
    const double width =
        mode == 0 ? (double)vocabulary : (double)(vocabulary / centroids) * (double)(mode == 1 ? selected + 1 : 1);
    const double flop = 6 * (double)(rows * hidden) * width;
    kernel_report(&h.b, names[mode], shape, kernel_time(&h.b, head, &h, h.sets[0].args.loss.data), flop, 0);
    if (mode == 1) {
        for (int64_t i = 0; i < h.b.sets; i++) make_scores(&h, &h.sets[i]);
        const double bytes = (double)(rows * centroids) * sizeof(float);
        check_topk(&h);
        kernel_report(&h.b, "topk", shape, kernel_time(&h.b, topk, &h, h.sets[0].topk.selected.data), 0, bytes);
        kernel_report(&h.b, "xent", shape, kernel_time(&h.b, xent, &h, h.sets[0].xent.loss.data), 0, 2 * bytes);
    }
    release(&h);
    return 0;
}
