/* The centroid head: top-k of the centroid scores, and cross-entropy over the tokens of a few centroids.
 *
 *   z[j] = x . e[j]      loss = log sum exp z - z[target]      dz = scale (softmax(z) - onehot)
 *   dx = sum dz[j] e[j]      de[j] = sum over rows dz[j] x
 *
 * A pair is a (row, slot): slot s < k stands for the row's s-th selected centroid, slot k for the target's centroid
 * when it was not selected. A counting sort brings the pairs of a centroid together; its P rows of e, which lie one
 * behind the other, meet them in products of 64 to 256 rows. Everything between the products is kept per pair, and a
 * row adds up its pairs in the order of its slots, so neither the other rows nor the threads move a bit. One thread
 * writes all gradients of a centroid's rows of e. Rows are taken in chunks so that the pairs' logits and dx stay within
 * PAIR_BYTES (never less than 64 rows). head_hierarchical is the case k = 0 with every target's centroid forced. */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "check.h"
#include "check_args.h"
#include "cpu/cpu.h"

/* ---- top-k ------------------------------------------------------------------------------------------------------- */

enum { SCAN_BLOCK = 64 };

/* True when (a, id_a) ranks after (b, id_b): lower score, or the same score and a higher id. */
static bool ranks_after(float a, int32_t id_a, float b, int32_t id_b)
{
    return a < b || (!(a > b) && id_a > id_b);
}

/* Restore the heap (the entry that ranks last on top) below entry i. */
static void sift_down(float *score, int32_t *id, int64_t n, int64_t i)
{
    const float s = score[i];
    const int32_t d = id[i];
    for (int64_t child = 2 * i + 1; child < n; child = 2 * i + 1) {
        if (child + 1 < n && ranks_after(score[child + 1], id[child + 1], score[child], id[child])) child++;
        if (!ranks_after(score[child], id[child], s, d)) break;
        score[i] = score[child];
        id[i] = id[child];
        i = child;
    }
    score[i] = s;
    id[i] = d;
}

/* Ids of the k best of n scores into `id`, best first; `score` [k] is scratch. NaN counts as -infinity. */
static void select_row(const mtp__vec *vec, const float *x, int64_t n, int64_t k, float *score, int32_t *id)
{
    for (int64_t i = 0; i < k; i++) {
        score[i] = isnan(x[i]) ? -INFINITY : x[i];
        id[i] = (int32_t)i;
    }
    for (int64_t i = k / 2 - 1; i >= 0; i--) sift_down(score, id, k, i);
    for (int64_t block = k; block < n; block += SCAN_BLOCK) {
        const int64_t width = n - block < SCAN_BLOCK ? n - block : SCAN_BLOCK;
        if (vec->max(x + block, width) <= score[0]) continue;
        for (int64_t i = block; i < block + width; i++) {
            if (!(x[i] > score[0])) continue; /* an equal score has the higher id: it stays out */
            score[0] = x[i];
            id[0] = (int32_t)i;
            sift_down(score, id, k, 0);
        }
    }
    for (int64_t end = k - 1; end > 0; end--) {
        const float s = score[0];
        const int32_t d = id[0];
        score[0] = score[end];
        id[0] = id[end];
        score[end] = s;
        id[end] = d;
        sift_down(score, id, end, 0);
    }
}

size_t mtp__cpu_topk_scratch(const mtp_device *device, const mtp_topk_args *a)
{
    mtp__carver carver = {0};
    for (int i = 0; i < device->num_threads; i++) mtp__carve(&carver, a->selected.shape[1], sizeof(float));
    return carver.used;
}

mtp_status mtp__cpu_topk(mtp_device *device, const mtp_topk_args *a)
{
    const char *op = "topk";
    MTP__CHECK(op, scores, MTP_F32, -1, -1);
    const int64_t R = a->scores.shape[0], C = a->scores.shape[1];
    MTP__CHECK(op, selected, MTP_I32, R, -1);
    const int64_t k = a->selected.shape[1];
    if (k > C || C > INT32_MAX)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: selected asks for %lld of the %lld scores of a row", op, (long long)k,
                        (long long)C);
    const size_t needed = mtp__cpu_topk_scratch(device, a);
    MTP_TRY(mtp__check_scratch(op, &a->scratch, needed));
    const size_t each = needed / (size_t)device->num_threads;
#pragma omp parallel num_threads(device->num_threads)
    {
        float *score = (float *)((char *)a->scratch.data + (size_t)omp_get_thread_num() * each);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < R; r++)
            select_row(device->vec, mtp__row(&a->scores, r), C, k, score,
                       (int32_t *)a->selected.data + r * a->selected.stride[0]);
    }
    return MTP_OK;
}

/* ---- the grouped head: scratch ----------------------------------------------------------------------------------- */

static const size_t PAIR_BYTES = (size_t)256 << 20;

typedef struct grouped {
    int64_t R, H, V, C, P;
    int64_t k;        /* selected centroids of a row */
    int64_t slots;    /* k + 1 */
    int64_t chunk;    /* rows */
    int32_t *begin;   /* [C + 1]: first pair of each centroid */
    int32_t *mark;    /* [C]: last row that named the centroid; then the sort's cursor */
    int32_t *place;   /* [chunk, slots]: the slot's pair; -1: none */
    int32_t *row_of;  /* [pairs]: row of the chunk */
    float *logits;    /* [pairs, P] */
    float *top, *sum; /* [pairs]: maximum, sum of exp(z - maximum) */
    float *dx;        /* [pairs, H] */
    float *row_top;   /* [chunk] */
    float *factor;    /* [chunk]: scale / sum of exp(z - row_top) */
} grouped;

/* Scratch of one thread. */
typedef struct work {
    float *e;  /* [P, H]: rows of e converted */
    float *x;  /* [256, H] */
    float *z;  /* [256, P]: logits, then dz */
    float *dx; /* [256, H] */
} work;

static grouped carve_grouped(mtp__carver *carver, const mtp_head_args *a, int64_t k)
{
    grouped g = {.R = a->x.shape[0], .H = a->x.shape[1], .V = a->e.shape[0]};
    g.C = a->order.shape[0];
    g.P = a->order.shape[1];
    g.k = k;
    g.slots = k + 1;
    const size_t row_bytes = (size_t)(g.slots * (g.P + g.H)) * sizeof(float);
    const int64_t fit = (int64_t)(PAIR_BYTES / row_bytes) / MTP__TILE_MIN * MTP__TILE_MIN;
    g.chunk = fit < MTP__TILE_MIN ? MTP__TILE_MIN : fit;
    if (g.chunk > g.R) g.chunk = g.R;
    const int64_t pairs = g.chunk * g.slots;
    g.begin = mtp__carve(carver, g.C + 1, sizeof(int32_t));
    g.mark = mtp__carve(carver, g.C, sizeof(int32_t));
    g.place = mtp__carve(carver, pairs, sizeof(int32_t));
    g.row_of = mtp__carve(carver, pairs, sizeof(int32_t));
    g.logits = mtp__carve(carver, pairs * g.P, sizeof(float));
    g.top = mtp__carve(carver, pairs, sizeof(float));
    g.sum = mtp__carve(carver, pairs, sizeof(float));
    g.dx = mtp__carve(carver, pairs * g.H, sizeof(float));
    g.row_top = mtp__carve(carver, g.chunk, sizeof(float));
    g.factor = mtp__carve(carver, g.chunk, sizeof(float));
    return g;
}

static work carve_work(mtp__carver *carver, const grouped *g)
{
    work w;
    w.e = mtp__carve(carver, g->P * g->H, sizeof(float));
    w.x = mtp__carve(carver, MTP__TILE_MAX * g->H, sizeof(float));
    w.z = mtp__carve(carver, MTP__TILE_MAX * g->P, sizeof(float));
    w.dx = mtp__carve(carver, MTP__TILE_MAX * g->H, sizeof(float));
    return w;
}

static size_t grouped_scratch(const mtp_device *device, const mtp_head_args *a, int64_t k)
{
    mtp__carver carver = {0};
    const grouped g = carve_grouped(&carver, a, k);
    for (int i = 0; i < device->num_threads; i++) carve_work(&carver, &g);
    return carver.used;
}

/* ---- the grouped head: arguments --------------------------------------------------------------------------------- */

static const int32_t *selected_row(const mtp_head_args *a, int64_t row)
{
    return (const int32_t *)a->selected.data + row * a->selected.stride[0];
}

static mtp_status check_selected(const char *op, const mtp_head_args *a, const grouped *g)
{
    for (int64_t c = 0; c < g->C; c++) g->mark[c] = -1;
    for (int64_t r = 0; g->k && r < g->R; r++) {
        const int32_t *selected = selected_row(a, r);
        for (int64_t s = 0; s < g->k; s++) {
            const int32_t c = selected[s];
            if (c < 0 || c >= g->C)
                return MTP_FAIL(MTP_E_ARGUMENT, "%s: selected[%lld, %lld] is %d, outside [0, %lld)", op, (long long)r,
                                (long long)s, c, (long long)g->C);
            if (g->mark[c] == (int32_t)r)
                return MTP_FAIL(MTP_E_ARGUMENT, "%s: row %lld of selected names centroid %d twice", op, (long long)r,
                                c);
            g->mark[c] = (int32_t)r;
        }
    }
    return MTP_OK;
}

/* ---- the grouped head: passes over a chunk of rows --------------------------------------------------------------- */

/* Counting sort of the chunk's pairs by centroid, rows in order within a centroid. */
static void sort_pairs(const mtp_head_args *a, const grouped *g, int64_t row0, int64_t rows)
{
    memset(g->begin, 0, sizeof(int32_t) * (size_t)(g->C + 1));
    for (int64_t c = 0; c < g->C; c++) g->mark[c] = -1;
    for (int64_t r = 0; r < rows; r++) {
        int32_t *centroid = g->place + r * g->slots;
        for (int64_t s = 0; s < g->k; s++) {
            centroid[s] = selected_row(a, row0 + r)[s];
            g->mark[centroid[s]] = (int32_t)r;
        }
        const int64_t own = a->target.data ? mtp__cpu_target_slot(a, row0 + r) / g->P : -1;
        centroid[g->k] = own >= 0 && g->mark[own] != (int32_t)r ? (int32_t)own : -1;
        for (int64_t s = 0; s < g->slots; s++)
            if (centroid[s] >= 0) g->begin[centroid[s] + 1]++;
    }
    for (int64_t c = 0; c < g->C; c++) {
        g->begin[c + 1] += g->begin[c];
        g->mark[c] = g->begin[c];
    }
    for (int64_t i = 0; i < rows * g->slots; i++) {
        if (g->place[i] < 0) continue;
        const int32_t pair = g->mark[g->place[i]]++;
        g->place[i] = pair;
        g->row_of[pair] = (int32_t)(i / g->slots);
    }
}

/* Rows of the pairs [first, first + n), padded with zero rows; returns the padded number. */
static int64_t gather_rows(const mtp_device *device, const mtp_head_args *a, const grouped *g, int64_t row0,
                           int64_t first, int64_t n, float *x)
{
    const int64_t padded = mtp__cpu_tile_rows_of(n, g->P, g->H);
    for (int64_t i = 0; i < n; i++)
        device->vec->to_f32(x + i * g->H, mtp__row_any(&a->x, row0 + g->row_of[first + i]), a->x.dtype, g->H);
    memset(x + n * g->H, 0, sizeof(float) * (size_t)((padded - n) * g->H));
    return padded;
}

static int64_t tile_pairs(int64_t end, int64_t first)
{
    return end - first < MTP__TILE_MAX ? end - first : MTP__TILE_MAX;
}

static void centroid_forward(const mtp_device *device, const mtp_head_args *a, const grouped *g, int64_t row0,
                             int64_t c, const work *w)
{
    const int64_t end = g->begin[c + 1];
    if (g->begin[c] == end) return;
    int64_t stride;
    const float *e = mtp__cpu_rows_f32(device, &a->e, c * g->P, g->P, w->e, &stride);
    for (int64_t first = g->begin[c]; first < end; first += MTP__TILE_MAX) {
        const int64_t n = tile_pairs(end, first), padded = gather_rows(device, a, g, row0, first, n, w->x);
        mtp__cpu_gemm(false, true, padded, g->P, g->H, w->x, g->H, e, stride, 0, w->z, g->P);
        memcpy(g->logits + first * g->P, w->z, sizeof(float) * (size_t)(n * g->P));
        for (int64_t i = 0; i < n; i++) {
            g->top[first + i] = device->vec->max(w->z + i * g->P, g->P);
            g->sum[first + i] = device->vec->sum_exp(w->z + i * g->P, g->top[first + i], g->P);
        }
    }
}

/* The lowest token id among the best logits of the selected centroids. */
static int32_t best_token(const mtp_head_args *a, const grouped *g, int64_t row, const int32_t *place)
{
    const int32_t *order = a->order.data;
    float top = -INFINITY;
    for (int64_t s = 0; s < g->k; s++)
        if (g->top[place[s]] > top) top = g->top[place[s]];
    int32_t best = INT32_MAX;
    for (int64_t s = 0; s < g->k; s++) {
        if (g->top[place[s]] < top) continue;
        const float *z = g->logits + place[s] * g->P;
        const int32_t *token = order + selected_row(a, row)[s] * g->P;
        for (int64_t j = 0; j < g->P; j++)
            if (!(z[j] < top) && token[j] < best) best = token[j];
    }
    return best;
}

/* Row r of the chunk over its slots: loss, argmax, miss, logits, and what its gradient needs. */
static void combine_row(const mtp_head_args *a, const grouped *g, int64_t row0, int64_t r)
{
    const int32_t *place = g->place + r * g->slots;
    const int64_t row = row0 + r;
    float top = -INFINITY;
    double sum = 0;
    for (int64_t s = 0; s < g->slots; s++)
        if (place[s] >= 0 && g->top[place[s]] > top) top = g->top[place[s]];
    for (int64_t s = 0; s < g->slots; s++)
        if (place[s] >= 0) sum += (double)g->sum[place[s]] * exp((double)g->top[place[s]] - (double)top);
    g->row_top[r] = top;
    if (a->scale.data) g->factor[r] = (float)((double)((const float *)a->scale.data)[row] / sum);
    if (a->loss.data) {
        const int64_t own = mtp__cpu_target_slot(a, row);
        int64_t s = g->k;
        if (place[s] < 0)
            for (s = 0; selected_row(a, row)[s] != own / g->P;) s++;
        const float z = g->logits[place[s] * g->P + own % g->P];
        ((float *)a->loss.data)[row] = (float)(((double)top - (double)z) + log(sum));
    }
    if (!g->k) return;
    if (a->miss.data) ((uint8_t *)a->miss.data)[row] = place[g->k] >= 0;
    if (a->argmax.data) ((int32_t *)a->argmax.data)[row] = best_token(a, g, row, place);
    for (int64_t s = 0; a->logits.data && s < g->k; s++)
        memcpy(mtp__row(&a->logits, row) + s * g->P, g->logits + place[s] * g->P, sizeof(float) * (size_t)g->P);
}

/* dz of the pairs [first, first + n) of centroid c, padded with zero rows. */
static void tile_gradient(const mtp_device *device, const mtp_head_args *a, const grouped *g, int64_t row0, int64_t c,
                          int64_t first, int64_t n, int64_t padded, float *dz)
{
    for (int64_t i = 0; i < n; i++, dz += g->P) {
        const int64_t r = g->row_of[first + i], own = mtp__cpu_target_slot(a, row0 + r);
        device->vec->softmax_scaled(dz, g->logits + (first + i) * g->P, g->row_top[r], g->factor[r], g->P);
        if (own / g->P == c) dz[own % g->P] -= ((const float *)a->scale.data)[row0 + r];
    }
    memset(dz, 0, sizeof(float) * (size_t)((padded - n) * g->P));
}

static void centroid_backward(const mtp_device *device, const mtp_head_args *a, const grouped *g, int64_t row0,
                              int64_t c, const work *w)
{
    const int64_t begin = g->begin[c], end = g->begin[c + 1];
    const bool overwrite = a->de_write == MTP_OVERWRITE && row0 == 0;
    for (int64_t j = 0; begin == end && overwrite && a->de.data && j < g->P; j++)
        memset(mtp__row(&a->de, c * g->P + j), 0, sizeof(float) * (size_t)g->H);
    if (begin == end) return;
    int64_t stride = 0;
    const float *e = a->dx.data ? mtp__cpu_rows_f32(device, &a->e, c * g->P, g->P, w->e, &stride) : NULL;
    for (int64_t first = begin; first < end; first += MTP__TILE_MAX) {
        const int64_t n = tile_pairs(end, first), padded = gather_rows(device, a, g, row0, first, n, w->x);
        tile_gradient(device, a, g, row0, c, first, n, padded, w->z);
        if (a->dx.data) {
            mtp__cpu_gemm(false, false, padded, g->H, g->P, w->z, g->P, e, stride, 0, w->dx, g->H);
            memcpy(g->dx + first * g->H, w->dx, sizeof(float) * (size_t)(n * g->H));
        }
        if (a->de.data)
            mtp__cpu_gemm(true, false, g->P, g->H, n, w->z, g->P, w->x, g->H, !overwrite || first > begin,
                          mtp__row(&a->de, c * g->P), a->de.stride[0]);
    }
}

/* dx of row r of the chunk: its pairs in the order of the slots. */
static void sum_dx(const mtp_device *device, const mtp_head_args *a, const grouped *g, int64_t row0, int64_t r)
{
    const int32_t *place = g->place + r * g->slots;
    float *dx = mtp__row(&a->dx, row0 + r);
    bool empty = a->dx_write == MTP_OVERWRITE;
    for (int64_t s = 0; s < g->slots; s++) {
        if (place[s] < 0) continue;
        const float *part = g->dx + place[s] * g->H;
        if (empty)
            memcpy(dx, part, sizeof(float) * (size_t)g->H);
        else
            device->vec->axpy(dx, 1, part, g->H);
        empty = false;
    }
}

static mtp_status run_grouped(const char *op, mtp_device *device, const mtp_head_args *a, int64_t k)
{
    MTP_TRY(mtp__cpu_check_targets(op, a));
    MTP_TRY(mtp__check_scratch(op, &a->scratch, grouped_scratch(device, a, k)));
    mtp__carver carver = {.base = a->scratch.data};
    const grouped g = carve_grouped(&carver, a, k);
    MTP_TRY(check_selected(op, a, &g));
    mtp__carver one = {0};
    carve_work(&one, &g);
    for (int64_t row0 = 0; row0 < g.R; row0 += g.chunk) {
        const int64_t rows = g.R - row0 < g.chunk ? g.R - row0 : g.chunk;
        sort_pairs(a, &g, row0, rows);
#pragma omp parallel num_threads(device->num_threads)
        {
            mtp__carver own = carver;
            own.used += (size_t)omp_get_thread_num() * one.used;
            const work w = carve_work(&own, &g);
#pragma omp for schedule(dynamic, 1)
            for (int64_t c = 0; c < g.C; c++) centroid_forward(device, a, &g, row0, c, &w);
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++) combine_row(a, &g, row0, r);
            if (a->dx.data || a->de.data) {
#pragma omp for schedule(dynamic, 1)
                for (int64_t c = 0; c < g.C; c++) centroid_backward(device, a, &g, row0, c, &w);
            }
            if (a->dx.data) {
#pragma omp for schedule(static)
                for (int64_t r = 0; r < rows; r++) sum_dx(device, a, &g, row0, r);
            }
        }
    }
    return MTP_OK;
}

/* ---- the ops ----------------------------------------------------------------------------------------------------- */

mtp_status mtp__cpu_head_candidates(mtp_device *device, const mtp_head_args *a)
{
    const char *op = "head_candidates";
    MTP_TRY(mtp__check_head_candidates(op, a));
    return run_grouped(op, device, a, a->selected.shape[1]);
}

size_t mtp__cpu_head_candidates_scratch(const mtp_device *device, const mtp_head_args *a)
{
    return grouped_scratch(device, a, a->selected.shape[1]);
}

mtp_status mtp__cpu_head_hierarchical(mtp_device *device, const mtp_head_args *a)
{
    const char *op = "head_hierarchical";
    MTP_TRY(mtp__check_head_hierarchical(op, a));
    return run_grouped(op, device, a, 0);
}

size_t mtp__cpu_head_hierarchical_scratch(const mtp_device *device, const mtp_head_args *a)
{
    return grouped_scratch(device, a, 0);
}
