/* What the tests of the three heads share: a random problem, the double-precision result over each row's candidate
 * slots, and the properties every head has (same formula, same bits, rows independent, gradients by differences). */
#ifndef MTP_TESTS_HEADS_CHECK_H
#define MTP_TESTS_HEADS_CHECK_H

#include "ops_check.h"

typedef enum heads_mode { HEADS_FLAT, HEADS_CANDIDATES, HEADS_HIERARCHICAL } heads_mode;

typedef struct heads_shape {
    heads_mode mode;
    int64_t R, H, C, P, k;    /* V = C * P; flat: with P > 1 the slots have an order, with P = 1 they are tokens */
    mtp_dtype x_dtype, dtype; /* dtype: of e */
    mtp_write write;          /* of dx and de */
    int64_t gap;              /* between the rows of x, e, dx and de */
    float scale;              /* of e */
    size_t budget;
} heads_shape;

typedef struct heads {
    heads_shape s;
    int64_t V;
    ops_tensor x, e, loss, logits, dx, de, scale;
    int32_t *order, *slot_of, *selected, *target, *argmax;
    uint8_t *miss;
    double *old_dx, *old_de; /* what dx and de held before */
} heads;

static inline void heads_shuffle(test_rng *rng, int32_t *x, int64_t n)
{
    for (int64_t i = n - 1; i > 0; i--) {
        const int64_t j = test_below(rng, i + 1);
        const int32_t kept = x[i];
        x[i] = x[j];
        x[j] = kept;
    }
}

static inline double *heads_copy(const ops_tensor *t)
{
    double *x = ops_doubles(ops_rows(t) * ops_width(t));
    for (int64_t r = 0; r < ops_rows(t); r++)
        for (int64_t c = 0; c < ops_width(t); c++) x[r * ops_width(t) + c] = (double)ops_row(t, r)[c];
    return x;
}

static inline bool heads_ordered(const heads_shape *s)
{
    return s->mode != HEADS_FLAT || s->P > 1;
}

/* A random problem: every other target lies in a selected centroid. */
static inline heads heads_make(test_rng *rng, heads_shape s)
{
    heads h = {.s = s, .V = s.C * s.P};
    h.x = ops_random(rng, s.x_dtype, s.R, s.H, s.gap, 1);
    h.e = ops_random(rng, s.dtype, h.V, s.H, s.gap, s.scale);
    h.loss = ops_random_vector(rng, MTP_F32, s.R, 1);
    h.scale = ops_random_vector(rng, MTP_F32, s.R, 0.5f);
    h.logits = ops_random(rng, MTP_F32, s.R, s.mode == HEADS_FLAT ? h.V : s.k * s.P, s.gap, 1);
    h.dx = ops_random(rng, MTP_F32, s.R, s.H, s.gap, 1);
    h.de = ops_random(rng, MTP_F32, h.V, s.H, s.gap, 1);
    h.old_dx = heads_copy(&h.dx);
    h.old_de = heads_copy(&h.de);
    h.order = ops_bytes((size_t)h.V * sizeof(int32_t));
    h.slot_of = ops_bytes((size_t)h.V * sizeof(int32_t));
    h.selected = ops_bytes((size_t)(s.R * s.k) * sizeof(int32_t));
    h.target = ops_bytes((size_t)s.R * sizeof(int32_t));
    h.argmax = ops_bytes((size_t)s.R * sizeof(int32_t));
    h.miss = ops_bytes((size_t)s.R);
    int32_t *centroids = ops_bytes((size_t)s.C * sizeof(int32_t));
    for (int32_t i = 0; i < h.V; i++) h.order[i] = i;
    for (int32_t i = 0; i < s.C; i++) centroids[i] = i;
    if (heads_ordered(&s)) heads_shuffle(rng, h.order, h.V);
    for (int32_t i = 0; i < h.V; i++) h.slot_of[h.order[i]] = i;
    for (int64_t r = 0; r < s.R; r++) {
        heads_shuffle(rng, centroids, s.C);
        memcpy(h.selected + r * s.k, centroids, (size_t)s.k * sizeof(int32_t));
        const int64_t centroid = r % 2 ? test_below(rng, s.C) : h.selected[r * s.k + test_below(rng, s.k)];
        h.target[r] = h.order[centroid * s.P + test_below(rng, s.P)];
    }
    return h;
}

static inline mtp_head_args heads_args(const heads *h)
{
    const heads_shape *s = &h->s;
    mtp_head_args a = {.x = h->x.view,
                       .e = h->e.view,
                       .target = mtp_view_1d(h->target, MTP_I32, s->R),
                       .scale = h->scale.view,
                       .loss = h->loss.view,
                       .dx = h->dx.view,
                       .de = h->de.view,
                       .dx_write = s->write,
                       .de_write = s->write,
                       .logits_budget = s->budget};
    if (heads_ordered(s)) {
        a.order = mtp_view_2d(h->order, MTP_I32, s->C, s->P);
        a.slot_of = mtp_view_1d(h->slot_of, MTP_I32, h->V);
    }
    if (s->mode != HEADS_HIERARCHICAL) {
        a.argmax = mtp_view_1d(h->argmax, MTP_I32, s->R);
        a.logits = h->logits.view;
    }
    if (s->mode == HEADS_CANDIDATES) {
        a.selected = mtp_view_2d(h->selected, MTP_I32, s->R, s->k);
        a.miss = mtp_view_1d(h->miss, MTP_U8, s->R);
    }
    return a;
}

static inline mtp_status heads_run(mtp_device *device, heads_mode mode, mtp_head_args a)
{
    const mtp_backend *ops = ops_backend();
    size_t (*size)(const mtp_device *, const mtp_head_args *) = mode == HEADS_FLAT ? ops->head_flat_scratch
                                                                : mode == HEADS_CANDIDATES
                                                                    ? ops->head_candidates_scratch
                                                                    : ops->head_hierarchical_scratch;
    mtp_status (*op)(mtp_device *, const mtp_head_args *) = mode == HEADS_FLAT         ? ops->head_flat
                                                            : mode == HEADS_CANDIDATES ? ops->head_candidates
                                                                                       : ops->head_hierarchical;
    const int mark = ops_owned.count;
    a.scratch = ops_scratch(size(device, &a));
    const mtp_status status = op(device, &a);
    ops_release_to(mark);
    return status;
}

/* ---- the double-precision result --------------------------------------------------------------------------------- */

typedef struct heads_result {
    double *loss, *logits, *dx, *de;
    int32_t *argmax;
    uint8_t *miss;
} heads_result;

static inline double heads_dot(const heads *h, int64_t row, int64_t slot)
{
    double sum = 0;
    for (int64_t i = 0; i < h->s.H; i++)
        sum += (double)h->x.values[row * h->s.H + i] * (double)h->e.values[slot * h->s.H + i];
    return sum;
}

/* Candidate slots of a row; the first *num_open of them take part in the argmax. */
static inline int64_t heads_candidates(const heads *h, int64_t row, int32_t *slot, int64_t *num_open)
{
    const heads_shape *s = &h->s;
    int64_t n = 0;
    const int64_t own = h->slot_of[h->target[row]] / s->P;
    bool found = false;
    if (s->mode == HEADS_FLAT)
        for (; n < h->V; n++) slot[n] = (int32_t)n;
    for (int64_t j = 0; s->mode == HEADS_CANDIDATES && j < s->k; j++) {
        const int64_t c = h->selected[row * s->k + j];
        found = found || c == own;
        for (int64_t i = 0; i < s->P; i++) slot[n++] = (int32_t)(c * s->P + i);
    }
    *num_open = n;
    if (s->mode != HEADS_FLAT && !found)
        for (int64_t i = 0; i < s->P; i++) slot[n++] = (int32_t)(own * s->P + i);
    return n;
}

static inline heads_result heads_expected(const heads *h)
{
    const heads_shape *s = &h->s;
    const int64_t width = ops_width(&h->logits);
    heads_result want = {.loss = ops_doubles(s->R),
                         .logits = ops_doubles(s->R * width),
                         .dx = ops_doubles(s->R * s->H),
                         .de = ops_doubles(h->V * s->H),
                         .argmax = ops_bytes((size_t)s->R * sizeof(int32_t)),
                         .miss = ops_bytes((size_t)s->R)};
    int32_t *slot = ops_bytes((size_t)h->V * sizeof(int32_t));
    double *z = ops_doubles(h->V);
    if (s->write == MTP_ACCUMULATE) {
        memcpy(want.dx, h->old_dx, (size_t)(s->R * s->H) * sizeof(double));
        memcpy(want.de, h->old_de, (size_t)(h->V * s->H) * sizeof(double));
    }
    for (int64_t r = 0; r < s->R; r++) {
        int64_t num_open;
        const int64_t n = heads_candidates(h, r, slot, &num_open);
        const int32_t target = h->slot_of[h->target[r]];
        double top = -INFINITY, sum = 0, own = 0;
        int64_t best = 0;
        for (int64_t j = 0; j < n; j++) {
            z[j] = heads_dot(h, r, slot[j]);
            if (z[j] > top) top = z[j];
            if (slot[j] == target) own = z[j];
            const bool lower = h->order[slot[j]] < h->order[slot[best]];
            if (j < num_open && (z[j] > z[best] || (z[j] == z[best] && lower))) best = j;
            if (j < num_open) want.logits[r * width + j] = z[j];
        }
        for (int64_t j = 0; j < n; j++) sum += exp(z[j] - top);
        want.loss[r] = top + log(sum) - own;
        want.argmax[r] = h->order[slot[best]];
        want.miss[r] = num_open < n;
        for (int64_t j = 0; j < n; j++) {
            const double scale = (double)ops_row(&h->scale, 0)[r];
            const double dz = scale * (exp(z[j] - top) / sum - (slot[j] == target));
            for (int64_t i = 0; i < s->H; i++) {
                want.dx[r * s->H + i] += dz * (double)h->e.values[slot[j] * s->H + i];
                want.de[slot[j] * s->H + i] += dz * (double)h->x.values[r * s->H + i];
            }
        }
    }
    return want;
}

/* ---- properties of every head ------------------------------------------------------------------------------------ */

/* fp32 products of depth H, then a softmax: the error is some units of 2^-24 times the largest logit. */
static const double heads_tolerance = 4e-6;

static inline void heads_check_formula(mtp_device *device, heads_shape s)
{
    test_rng rng = {.state = (uint64_t)(s.R * 1000 + s.H)};
    const heads h = heads_make(&rng, s);
    const heads_result want = heads_expected(&h);
    assert_ok(heads_run(device, s.mode, heads_args(&h)));
    ops_expect("loss", &h.loss, want.loss, heads_tolerance);
    ops_expect("dx", &h.dx, want.dx, heads_tolerance);
    ops_expect("de", &h.de, want.de, heads_tolerance);
    if (s.mode == HEADS_HIERARCHICAL) return;
    ops_expect("logits", &h.logits, want.logits, heads_tolerance);
    for (int64_t r = 0; r < s.R; r++) assert_int_equal(h.argmax[r], want.argmax[r]);
    for (int64_t r = 0; s.mode == HEADS_CANDIDATES && r < s.R; r++) assert_int_equal(h.miss[r], want.miss[r]);
}

/* Gradients asked for one at a time are those asked for together, and the loss does not need them. */
static inline void heads_check_optional(mtp_device *device, heads_shape s)
{
    test_rng rng = {.state = 11};
    const heads h = heads_make(&rng, s);
    const mtp_head_args all = heads_args(&h);
    assert_ok(heads_run(device, s.mode, all));
    const uint64_t loss = ops_hash(&h.loss, 0), dx = ops_hash(&h.dx, 0), de = ops_hash(&h.de, 0);
    for (int only = 0; only < 3; only++) {
        mtp_head_args a = all;
        for (int64_t r = 0; r < s.R; r++) ops_row(&h.loss, 0)[r] = -1;
        ops_row(&h.dx, 0)[0] = -1;
        ops_row(&h.de, 0)[0] = -1;
        if (only != 0) a.dx.data = NULL;
        if (only != 1) a.de.data = NULL;
        assert_ok(heads_run(device, s.mode, a));
        assert_true(ops_hash(&h.loss, 0) == loss);
        if (only == 0) assert_true(ops_hash(&h.dx, 0) == dx);
        if (only == 1) assert_true(ops_hash(&h.de, 0) == de);
        if (only == 2) assert_true(ops_row(&h.dx, 0)[0] == -1 && ops_row(&h.de, 0)[0] == -1);
    }
}

/* A row computed with others has the bits of the row computed alone. */
static inline void heads_check_rows(mtp_device *device, heads_shape s)
{
    if (!ops_backend()->device_info(device)->rows_exact) return;
    s.write = MTP_OVERWRITE;
    test_rng rng = {.state = 12};
    const heads h = heads_make(&rng, s);
    const mtp_head_args all = heads_args(&h);
    assert_ok(heads_run(device, s.mode, all));
    ops_tensor dx = ops_random(&rng, MTP_F32, 1, s.H, 0, 1), loss = ops_random_vector(&rng, MTP_F32, 1, 1);
    ops_tensor logits = ops_random(&rng, MTP_F32, 1, ops_width(&h.logits), 0, 1);
    int32_t *argmax = ops_bytes(sizeof *argmax);
    for (int64_t r = 0; r < s.R; r++) {
        mtp_head_args a = all;
        a.x = mtp_view_rows(all.x, r, 1);
        a.target = mtp_view_rows(all.target, r, 1);
        a.scale = mtp_view_rows(all.scale, r, 1);
        if (all.selected.data) a.selected = mtp_view_rows(all.selected, r, 1);
        if (all.miss.data) a.miss = mtp_view_rows(all.miss, r, 1);
        if (all.argmax.data) a.argmax = mtp_view_1d(argmax, MTP_I32, 1);
        if (all.logits.data) a.logits = logits.view;
        a.dx = dx.view;
        a.de.data = NULL;
        a.loss = loss.view;
        assert_ok(heads_run(device, s.mode, a));
        assert_memory_equal(ops_row(&dx, 0), ops_row(&h.dx, r), (size_t)s.H * sizeof(float));
        assert_memory_equal(ops_row(&loss, 0), &ops_row(&h.loss, 0)[r], sizeof(float));
        if (all.argmax.data) assert_int_equal(*argmax, h.argmax[r]);
        if (all.logits.data)
            assert_memory_equal(ops_row(&logits, 0), ops_row(&h.logits, r),
                                (size_t)ops_width(&h.logits) * sizeof(float));
    }
}

/* Hash of everything the head computes. */
static inline uint64_t heads_hash(mtp_device *device, heads_shape s)
{
    test_rng rng = {.state = 13};
    const heads h = heads_make(&rng, s);
    assert_ok(heads_run(device, s.mode, heads_args(&h)));
    uint64_t hash = ops_hash(&h.loss, 0);
    hash = ops_hash(&h.dx, hash);
    hash = ops_hash(&h.de, hash);
    if (s.mode != HEADS_HIERARCHICAL) {
        hash = ops_hash(&h.logits, hash);
        for (int64_t r = 0; r < s.R; r++) hash = hash * 31 + (uint64_t)h.argmax[r];
    }
    return hash;
}

typedef struct heads_loss {
    mtp_device *device;
    const heads *h;
    mtp_head_args args;
} heads_loss;

/* sum of scale * loss. */
static inline double heads_total(void *context)
{
    heads_loss *l = context;
    assert_ok(heads_run(l->device, l->h->s.mode, l->args));
    double sum = 0;
    for (int64_t r = 0; r < l->h->s.R; r++)
        sum += (double)ops_row(&l->h->scale, 0)[r] * (double)ops_row(&l->h->loss, 0)[r];
    return sum;
}

/* dx and de against central differences of the op's own loss (contiguous F32 tensors). */
static inline void heads_check_differences(mtp_device *device, heads_shape s)
{
    s.x_dtype = s.dtype = MTP_F32;
    s.gap = 0;
    s.write = MTP_OVERWRITE;
    test_rng rng = {.state = 14};
    const heads h = heads_make(&rng, s);
    assert_ok(heads_run(device, s.mode, heads_args(&h)));
    heads_loss context = {.device = device, .h = &h, .args = heads_args(&h)};
    context.args.dx.data = context.args.de.data = NULL;
    double *dx = ops_doubles(s.R * s.H), *de = ops_doubles(h.V * s.H);
    ops_differences(heads_total, &context, ops_row(&h.x, 0), s.R * s.H, dx);
    ops_differences(heads_total, &context, ops_row(&h.e, 0), h.V * s.H, de);
    ops_expect("dx by differences", &h.dx, dx, 1e-3);
    ops_expect("de by differences", &h.de, de, 1e-3);
}

/* ---- groups of checks -------------------------------------------------------------------------------------------- */

/* The formula at every shape. */
static inline void heads_check_formulas(mtp_device *device, const heads_shape *shapes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        heads_check_formula(device, shapes[i]);
        ops_release_buffers();
    }
}

/* Optional outputs at one shape, rows alone at some, gradients by differences at a small one. */
static inline void heads_check_properties(mtp_device *device, heads_shape optional, const heads_shape *alone,
                                          size_t num_alone, heads_shape small)
{
    heads_check_optional(device, optional);
    ops_release_buffers();
    for (size_t i = 0; i < num_alone; i++) {
        heads_check_rows(device, alone[i]);
        ops_release_buffers();
    }
    heads_check_differences(device, small);
}

#endif
