/* Query-only attention: forward, and backward with respect to the queries.
 *
 *   S = q K^T (scale 1)      P = softmax over the keys the row sees      o = P V      lse = log sum exp S
 *   dP = do V^T              dS = P (dP - rowsum(do o))                  dq = dS K
 *
 * A tile is up to 256 rows of products: consecutive positions of one document times the query heads that share one K/V
 * head, padded with zero rows to a size of mtp__cpu_tile_rows_of. It walks the keys in blocks of KEY_BLOCK counted from
 * the document's first token, with the running maximum and sum of the online softmax kept per row. That is what makes a
 * row independent of its company: blocks, product shapes and order are the same wherever the row stands, and a block of
 * which a row sees nothing adds zeros. Keys that no row of the tile sees are never multiplied: they count as zero. */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "check.h"
#include "cpu/cpu.h"

enum { KEY_BLOCK = 128 };

typedef struct tile {
    int64_t row, num_rows;      /* positions */
    int64_t doc;                /* first token of the document */
    int64_t key_begin, key_end; /* what its rows see together */
} tile;

typedef struct shape {
    int64_t R, NH, NKV, D, S;
    int64_t group;     /* query heads of a K/V head */
    int64_t positions; /* of a full tile */
} shape;

/* Scratch of one thread. */
typedef struct work {
    float *q;     /* [256, D] */
    float *out;   /* [256, D]: o; backward: dq */
    float *dout;  /* [256, D]: backward: do */
    float *score; /* [256, KEY_BLOCK]: S, then P */
    float *grad;  /* [256, KEY_BLOCK]: backward: dP, then dS */
    float *k, *v; /* [KEY_BLOCK, D] */
    float *top;   /* [256]: running maximum; backward: lse */
    double *sum;  /* [256]: running sum; backward: rowsum(do o) */
} work;

static shape shape_of(const mtp_attention_args *a)
{
    shape s = {.R = a->q.shape[0], .NH = a->q.shape[1], .NKV = a->kv.shape[2], .D = a->q.shape[2], .S = a->kv.shape[0]};
    s.group = s.NKV > 0 && s.NH > s.NKV ? s.NH / s.NKV : 1;
    s.positions = s.group < MTP__TILE_MAX ? MTP__TILE_MAX / s.group : 1;
    return s;
}

/* ---- arguments ------------------------------------------------------------------------------------------------- */

static mtp_status check_ranges(const char *op, const mtp_attention_args *a, const shape *s)
{
    const int32_t *begin = a->key_begin.data, *end = a->key_end.data, *doc = a->doc_begin.data;
    int64_t next_doc = s->S;
    for (int64_t r = s->R - 1; r >= 0; r--) {
        if (r + 1 < s->R && doc[r] != doc[r + 1]) next_doc = doc[r + 1];
        if (doc[r] > next_doc)
            return MTP_FAIL(MTP_E_ARGUMENT, "%s: doc_begin decreases from %d at row %lld", op, doc[r], (long long)r);
        if (doc[r] < 0 || begin[r] < doc[r] || end[r] <= begin[r] || end[r] > next_doc)
            return MTP_FAIL(MTP_E_ARGUMENT,
                            "%s: row %lld sees keys [%d, %d) of a document at [%d, %lld); key_begin and key_end must "
                            "name at least one key inside it",
                            op, (long long)r, begin[r], end[r], doc[r], (long long)next_doc);
    }
    return MTP_OK;
}

static mtp_status check(const char *op, const mtp_attention_args *a, bool backward)
{
    MTP__CHECK(op, q, MTP_F32, -1, -1, -1);
    MTP__CHECK(op, kv, MTP__REAL, -1, 2, -1, a->q.shape[2]);
    const shape s = shape_of(a);
    if (s.D < 16 || s.D > 512 || s.D % 2)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: head width %lld of q; it must be even and 16 to 512", op, (long long)s.D);
    if (s.NH % s.NKV || s.group > MTP__TILE_MAX)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: q has %lld heads, kv %lld; 1 to %d query heads must share each K/V head",
                        op, (long long)s.NH, (long long)s.NKV, MTP__TILE_MAX);
    MTP__CHECK(op, key_begin, MTP_I32, s.R);
    MTP__CHECK(op, key_end, MTP_I32, s.R);
    MTP__CHECK(op, doc_begin, MTP_I32, s.R);
    MTP__CHECK(op, o, MTP_F32, s.R, s.NH, s.D);
    MTP__CHECK(op, lse, MTP_F32, s.R, s.NH);
    if (backward) {
        MTP__CHECK(op, do_, MTP_F32, s.R, s.NH, s.D);
        MTP__CHECK(op, dq, MTP_F32, s.R, s.NH, s.D);
    }
    return check_ranges(op, a, &s);
}

/* ---- scratch: the list of tiles, then one work area a thread ----------------------------------------------------- */

static work carve_work(mtp__carver *carver, int64_t width, bool backward)
{
    work w = {0};
    w.q = mtp__carve(carver, MTP__TILE_MAX * width, sizeof(float));
    w.out = mtp__carve(carver, MTP__TILE_MAX * width, sizeof(float));
    w.score = mtp__carve(carver, MTP__TILE_MAX * KEY_BLOCK, sizeof(float));
    w.k = mtp__carve(carver, KEY_BLOCK * width, sizeof(float));
    w.v = mtp__carve(carver, KEY_BLOCK * width, sizeof(float));
    w.top = mtp__carve(carver, MTP__TILE_MAX, sizeof(float));
    w.sum = mtp__carve(carver, MTP__TILE_MAX, sizeof(double));
    if (backward) {
        w.dout = mtp__carve(carver, MTP__TILE_MAX * width, sizeof(float));
        w.grad = mtp__carve(carver, MTP__TILE_MAX * KEY_BLOCK, sizeof(float));
    }
    return w;
}

static size_t scratch_bytes(const mtp_device *device, const mtp_attention_args *a, bool backward)
{
    mtp__carver carver = {0};
    mtp__carve(&carver, a->q.shape[0], sizeof(tile)); /* at most one tile a row */
    mtp__carver one = {0};
    carve_work(&one, a->q.shape[2], backward);
    return carver.used + (size_t)device->num_threads * one.used;
}

static work work_of(const mtp_attention_args *a, const shape *s, int thread, bool backward)
{
    mtp__carver carver = {.base = a->scratch.data}, one = {0};
    mtp__carve(&carver, s->R, sizeof(tile));
    carve_work(&one, s->D, backward);
    carver.used += (size_t)thread * one.used;
    return carve_work(&carver, s->D, backward);
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

static int64_t list_tiles(const mtp_attention_args *a, const shape *s, tile *tiles)
{
    const int32_t *begin = a->key_begin.data, *end = a->key_end.data, *doc = a->doc_begin.data;
    int64_t count = 0;
    for (int64_t r = 0; r < s->R; r++) {
        tile *t = count ? &tiles[count - 1] : NULL;
        if (!t || t->doc != doc[r] || t->num_rows == s->positions) {
            t = &tiles[count++];
            *t = (tile){.row = r, .doc = doc[r], .key_begin = begin[r], .key_end = end[r]};
        }
        t->num_rows++;
        if (begin[r] < t->key_begin) t->key_begin = begin[r];
        if (end[r] > t->key_end) t->key_end = end[r];
    }
    return count;
}

/* First block of the tile that starts at `first` or later and of which a row sees something; -1 after the last. */
static int64_t next_block(const mtp_attention_args *a, const tile *t, int64_t first)
{
    const int32_t *begin = a->key_begin.data, *end = a->key_end.data;
    for (; first < t->key_end; first += KEY_BLOCK)
        for (int64_t r = t->row; r < t->row + t->num_rows; r++)
            if (begin[r] < first + KEY_BLOCK && end[r] > first) return first;
    return -1;
}

static int64_t first_block(const mtp_attention_args *a, const tile *t)
{
    return next_block(a, t, t->doc + (t->key_begin - t->doc) / KEY_BLOCK * KEY_BLOCK);
}

static float *head_row(const mtp_view *view, int64_t row, int64_t head)
{
    return (float *)view->data + row * view->stride[0] + head * view->stride[1];
}

/* Heads of K/V head g of the tile's rows, one under the other, padded with zeros to `padded` rows. */
static void gather_heads(const mtp_view *src, const shape *s, const tile *t, int64_t g, int64_t padded, float *dst)
{
    for (int64_t i = 0; i < t->num_rows; i++)
        for (int64_t h = 0; h < s->group; h++, dst += s->D)
            memcpy(dst, head_row(src, t->row + i, g * s->group + h), sizeof(float) * (size_t)s->D);
    memset(dst, 0, sizeof(float) * (size_t)((padded - t->num_rows * s->group) * s->D));
}

/* K (which = 0) or V (which = 1) of head g for keys [first, first + KEY_BLOCK) in fp32, in place when it can be, else
 * in `copy` with zeros for the keys that no row of the tile sees. *stride is that from key to key. */
static const float *key_block(const mtp_device *device, const mtp_attention_args *a, const tile *t, int64_t which,
                              int64_t g, int64_t first, float *copy, int64_t *stride)
{
    const mtp_view *kv = &a->kv;
    const int64_t width = kv->shape[3];
    const int64_t offset = which * kv->stride[1] + g * kv->stride[2];
    const int64_t begin = first > t->key_begin ? first : t->key_begin;
    const int64_t end = first + KEY_BLOCK < t->key_end ? first + KEY_BLOCK : t->key_end;
    if (kv->dtype == MTP_F32 && end - begin == KEY_BLOCK) {
        *stride = kv->stride[0];
        return (const float *)kv->data + offset + first * kv->stride[0];
    }
    const size_t element = mtp_dtype_size(kv->dtype);
    memset(copy, 0, sizeof(float) * (size_t)(KEY_BLOCK * width));
    for (int64_t j = begin; j < end; j++)
        device->vec->to_f32(copy + (j - first) * width,
                            (const char *)kv->data + (size_t)(offset + j * kv->stride[0]) * element, kv->dtype, width);
    *stride = width;
    return copy;
}

/* Keys [*begin, *end) of the block at `first` that the row sees, counted from `first`; false when there is none.
 * Entries of x outside them become zero. */
static bool clip(const mtp_attention_args *a, int64_t row, int64_t first, float *x, int64_t *begin, int64_t *end)
{
    const int64_t key_begin = ((const int32_t *)a->key_begin.data)[row] - first;
    const int64_t key_end = ((const int32_t *)a->key_end.data)[row] - first;
    *begin = key_begin > 0 ? key_begin : 0;
    *end = key_end < KEY_BLOCK ? key_end : KEY_BLOCK;
    if (*begin >= *end) {
        memset(x, 0, sizeof(float) * KEY_BLOCK);
        return false;
    }
    memset(x, 0, sizeof(float) * (size_t)*begin);
    memset(x + *end, 0, sizeof(float) * (size_t)(KEY_BLOCK - *end));
    return true;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* Scores of one block into probabilities against the running maximum; what was summed before shrinks with it. */
static void online_softmax(const mtp_device *device, const mtp_attention_args *a, const shape *s, const tile *t,
                           int64_t first, work *w)
{
    for (int64_t i = 0; i < t->num_rows * s->group; i++) {
        float *x = w->score + i * KEY_BLOCK;
        int64_t begin, end;
        if (!clip(a, t->row + i / s->group, first, x, &begin, &end)) continue;
        const float top = device->vec->max(x + begin, end - begin);
        if (top > w->top[i]) {
            const float shrink = expf(w->top[i] - top); /* 0 at the first block */
            w->sum[i] *= (double)shrink;
            device->vec->scale(w->out + i * s->D, shrink, w->out + i * s->D, s->D);
            w->top[i] = top;
        }
        w->sum[i] += (double)device->vec->exp_shift_sum(x + begin, w->top[i], end - begin);
    }
}

static void forward_tile(const mtp_device *device, const mtp_attention_args *a, const shape *s, const tile *t,
                         int64_t g, work *w)
{
    const int64_t rows = t->num_rows * s->group, padded = mtp__cpu_tile_rows_of(rows, KEY_BLOCK, s->D);
    gather_heads(&a->q, s, t, g, padded, w->q);
    memset(w->out, 0, sizeof(float) * (size_t)(padded * s->D));
    for (int64_t i = 0; i < rows; i++) {
        w->top[i] = -INFINITY;
        w->sum[i] = 0;
    }
    for (int64_t first = first_block(a, t); first >= 0; first = next_block(a, t, first + KEY_BLOCK)) {
        int64_t stride;
        const float *k = key_block(device, a, t, 0, g, first, w->k, &stride);
        mtp__cpu_gemm(false, true, padded, KEY_BLOCK, s->D, w->q, s->D, k, stride, 0, w->score, KEY_BLOCK);
        online_softmax(device, a, s, t, first, w);
        const float *v = key_block(device, a, t, 1, g, first, w->v, &stride);
        mtp__cpu_gemm(false, false, padded, s->D, KEY_BLOCK, w->score, KEY_BLOCK, v, stride, 1, w->out, s->D);
    }
    for (int64_t i = 0; i < rows; i++) {
        const int64_t row = t->row + i / s->group, head = g * s->group + i % s->group;
        float *o = head_row(&a->o, row, head);
        const float inverse = (float)(1 / w->sum[i]);
        /* + 0: a sum that underflowed to -0 keeps or loses its sign by the blocks that follow; end with +0 either way
         */
        for (int64_t j = 0; j < s->D; j++) o[j] = w->out[i * s->D + j] * inverse + 0.0F;
        mtp__row(&a->lse, row)[head] = (float)((double)w->top[i] + log(w->sum[i]));
    }
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

static void backward_tile(const mtp_device *device, const mtp_attention_args *a, const shape *s, const tile *t,
                          int64_t g, work *w)
{
    const int64_t rows = t->num_rows * s->group, padded = mtp__cpu_tile_rows_of(rows, KEY_BLOCK, s->D);
    gather_heads(&a->q, s, t, g, padded, w->q);
    gather_heads(&a->do_, s, t, g, padded, w->dout);
    memset(w->out, 0, sizeof(float) * (size_t)(padded * s->D));
    for (int64_t i = 0; i < rows; i++) {
        const int64_t row = t->row + i / s->group, head = g * s->group + i % s->group;
        w->top[i] = mtp__row(&a->lse, row)[head];
        w->sum[i] = (double)device->vec->dot(w->dout + i * s->D, head_row(&a->o, row, head), s->D);
    }
    for (int64_t first = first_block(a, t); first >= 0; first = next_block(a, t, first + KEY_BLOCK)) {
        int64_t k_stride, v_stride;
        const float *k = key_block(device, a, t, 0, g, first, w->k, &k_stride);
        const float *v = key_block(device, a, t, 1, g, first, w->v, &v_stride);
        mtp__cpu_gemm(false, true, padded, KEY_BLOCK, s->D, w->q, s->D, k, k_stride, 0, w->score, KEY_BLOCK);
        mtp__cpu_gemm(false, true, padded, KEY_BLOCK, s->D, w->dout, s->D, v, v_stride, 0, w->grad, KEY_BLOCK);
        for (int64_t i = 0; i < rows; i++) {
            int64_t begin, end;
            float *ds = w->grad + i * KEY_BLOCK;
            if (clip(a, t->row + i / s->group, first, ds, &begin, &end))
                device->vec->attention_ds(ds + begin, w->score + i * KEY_BLOCK + begin, w->top[i], (float)w->sum[i],
                                          end - begin);
        }
        mtp__cpu_gemm(false, false, padded, s->D, KEY_BLOCK, w->grad, KEY_BLOCK, k, k_stride, 1, w->out, s->D);
    }
    for (int64_t i = 0; i < rows; i++)
        memcpy(head_row(&a->dq, t->row + i / s->group, g * s->group + i % s->group), w->out + i * s->D,
               sizeof(float) * (size_t)s->D);
}

/* ---- the ops ----------------------------------------------------------------------------------------------------- */

static mtp_status run(const char *op, mtp_device *device, const mtp_attention_args *a, bool backward)
{
    MTP_TRY(check(op, a, backward));
    MTP_TRY(mtp__check_scratch(op, &a->scratch, scratch_bytes(device, a, backward)));
    const shape s = shape_of(a);
    tile *tiles = a->scratch.data;
    const int64_t count = list_tiles(a, &s, tiles);
    const int64_t items = count * s.NKV;
#pragma omp parallel num_threads(device->num_threads)
    {
        work w = work_of(a, &s, omp_get_thread_num(), backward);
        /* from the end: late tiles of a document see the most keys, so the short ones are left to even out the finish
         */
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < items; i++) {
            const tile *t = &tiles[count - 1 - i / s.NKV];
            if (backward)
                backward_tile(device, a, &s, t, i % s.NKV, &w);
            else
                forward_tile(device, a, &s, t, i % s.NKV, &w);
        }
    }
    return MTP_OK;
}

mtp_status mtp__cpu_attention_fwd(mtp_device *device, const mtp_attention_args *a)
{
    return run("attention_fwd", device, a, false);
}

size_t mtp__cpu_attention_fwd_scratch(const mtp_device *device, const mtp_attention_args *a)
{
    return scratch_bytes(device, a, false);
}

mtp_status mtp__cpu_attention_bwd(mtp_device *device, const mtp_attention_args *a)
{
    return run("attention_bwd", device, a, true);
}

size_t mtp__cpu_attention_bwd_scratch(const mtp_device *device, const mtp_attention_args *a)
{
    return scratch_bytes(device, a, true);
}
