#include "model/kmeans.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/rng.h"
#include "model/table.h"

enum { MAX_ITERATIONS = 12, CANDIDATES = 32, RNG_STREAM = 0x6b6d6561 };

typedef struct candidate {
    float distance; /* |c|^2 - 2 x c: the squared distance but for |x|^2, which is the same for all centroids */
    int32_t centroid;
} candidate;

typedef struct kmeans {
    mtp__table table;
    int64_t V, C, width, capacity;
    float *centers;          /* [C, width] */
    void *device_centers;    /* the same on the device */
    float *norms;            /* [C] squared norms */
    float *products;         /* [MTP__TABLE_BLOCK, C] */
    candidate *candidates;   /* [V, CANDIDATES]: the nearest open centroids of pending rows, nearest first */
    int32_t *num_candidates; /* [V] */
    int64_t *pending;        /* [V] rows without a centroid, then in the order of choice */
    float *regret;           /* [V] by row: first minus second distance */
    int64_t *left;           /* [C] places left */
    int32_t *assigned;       /* [V] */
    int32_t *previous;       /* [V] */
    double *sums;            /* [C, width] */
    double *mean;            /* [width] sum of all rows */
    double squares;          /* sum of |x|^2 */
} kmeans;

static mtp_status allocate(kmeans *k, mtp_context *context)
{
    const size_t V = (size_t)k->V, C = (size_t)k->C, width = (size_t)k->width;
    k->centers = malloc(C * width * sizeof *k->centers);
    k->norms = malloc(C * sizeof *k->norms);
    k->products = malloc(MTP__TABLE_BLOCK * C * sizeof *k->products);
    k->candidates = malloc(V * CANDIDATES * sizeof *k->candidates);
    k->num_candidates = malloc(V * sizeof *k->num_candidates);
    k->pending = malloc(V * sizeof *k->pending);
    k->regret = malloc(V * sizeof *k->regret);
    k->left = malloc(C * sizeof *k->left);
    k->assigned = malloc(V * sizeof *k->assigned);
    k->previous = malloc(V * sizeof *k->previous);
    k->sums = malloc(C * width * sizeof *k->sums);
    k->mean = malloc(width * sizeof *k->mean);
    if (!k->centers || !k->norms || !k->products || !k->candidates || !k->num_candidates || !k->pending || !k->regret ||
        !k->left || !k->assigned || !k->previous || !k->sums || !k->mean)
        return MTP_FAIL(MTP_E_MEMORY, "out of memory for clustering %lld rows", (long long)k->V);
    return context->ops->memory_alloc(context->device, C * width * sizeof(float), &k->device_centers);
}

static void release(kmeans *k, const mtp_context *context)
{
    mtp__table_close(&k->table);
    context->ops->memory_free(context->device, k->device_centers);
    free(k->centers);
    free(k->norms);
    free(k->products);
    free(k->candidates);
    free(k->num_candidates);
    free(k->pending);
    free(k->regret);
    free(k->left);
    free(k->assigned);
    free(k->previous);
    free(k->sums);
    free(k->mean);
}

/* ---- centroids ------------------------------------------------------------------------------------------------ */

static mtp_status publish_centers(kmeans *k)
{
    const mtp_context *context = k->table.context;
    for (int64_t c = 0; c < k->C; c++) {
        double sum = 0;
        for (int64_t i = 0; i < k->width; i++)
            sum += (double)k->centers[c * k->width + i] * (double)k->centers[c * k->width + i];
        k->norms[c] = (float)sum;
    }
    return context->ops->upload(context->device, k->device_centers, k->centers,
                                (size_t)(k->C * k->width) * sizeof *k->centers);
}

/* The first centroids: distinct random rows. */
static mtp_status seed_centers(kmeans *k, uint64_t seed)
{
    uint32_t *order = malloc((size_t)k->V * sizeof *order);
    mtp__rng rng = mtp__rng_make(seed, RNG_STREAM);
    mtp_status status = MTP_OK;
    if (!order) return MTP_FAIL(MTP_E_MEMORY, "out of memory for clustering %lld rows", (long long)k->V);
    mtp__rng_permutation(&rng, (uint32_t)k->V, order);
    for (int64_t c = 0; c < k->C && status == MTP_OK; c++) {
        status = mtp__table_read(&k->table, NULL, order[c], 1);
        memcpy(k->centers + c * k->width, k->table.host, (size_t)k->width * sizeof(float));
    }
    free(order);
    return status == MTP_OK ? publish_centers(k) : status;
}

/* Centroids become the means of their rows; every centroid has exactly `capacity` of them. */
static mtp_status move_centers(kmeans *k)
{
    memset(k->sums, 0, (size_t)(k->C * k->width) * sizeof *k->sums);
    memset(k->mean, 0, (size_t)k->width * sizeof *k->mean);
    k->squares = 0;
    for (int64_t first = 0; first < k->V; first += MTP__TABLE_BLOCK) {
        const int64_t count = k->V - first < MTP__TABLE_BLOCK ? k->V - first : MTP__TABLE_BLOCK;
        MTP_TRY(mtp__table_read(&k->table, NULL, first, count));
        for (int64_t row = 0; row < count; row++) {
            double *sum = k->sums + k->assigned[first + row] * k->width;
            const float *x = k->table.host + row * k->width;
            for (int64_t i = 0; i < k->width; i++) {
                sum[i] += (double)x[i];
                k->mean[i] += (double)x[i];
                k->squares += (double)x[i] * (double)x[i];
            }
        }
    }
    for (int64_t i = 0; i < k->C * k->width; i++) k->centers[i] = (float)(k->sums[i] / (double)k->capacity);
    return publish_centers(k);
}

/* sum |x - c(x)|^2 / sum |x - mean|^2, from the sums of move_centers. */
static double inertia(const kmeans *k)
{
    double own = k->squares, all = k->squares;
    for (int64_t i = 0; i < k->C * k->width; i++) own -= k->sums[i] * k->sums[i] / (double)k->capacity;
    for (int64_t i = 0; i < k->width; i++) all -= k->mean[i] * k->mean[i] / (double)k->V;
    return all > 0 ? own / all : 0;
}

/* ---- assignment ----------------------------------------------------------------------------------------------- */

/* The nearest open centroids of one row; equal distances: the lower centroid first. */
static int32_t nearest(const kmeans *k, const float *products, candidate *list)
{
    int32_t count = 0;
    for (int32_t c = 0; c < (int32_t)k->C; c++) {
        if (k->left[c] == 0) continue;
        const float distance = k->norms[c] - 2 * products[c];
        if (count == CANDIDATES && !(distance < list[count - 1].distance)) continue;
        int32_t at = count < CANDIDATES ? count++ : count - 1;
        for (; at > 0 && distance < list[at - 1].distance; at--) list[at] = list[at - 1];
        list[at] = (candidate){distance, c};
    }
    return count;
}

static mtp_status find_candidates(kmeans *k, int64_t num_pending)
{
    for (int64_t first = 0; first < num_pending; first += MTP__TABLE_BLOCK) {
        const int64_t count = num_pending - first < MTP__TABLE_BLOCK ? num_pending - first : MTP__TABLE_BLOCK;
        MTP_TRY(mtp__table_read(&k->table, k->pending + first, 0, count));
        MTP_TRY(mtp__table_project(&k->table, count, k->device_centers, k->C, k->products));
        for (int64_t i = 0; i < count; i++) {
            const int64_t row = k->pending[first + i];
            candidate *list = k->candidates + row * CANDIDATES;
            k->num_candidates[row] = nearest(k, k->products + i * k->C, list);
            k->regret[row] = k->num_candidates[row] > 1 ? list[0].distance - list[1].distance : 0;
        }
    }
    return MTP_OK;
}

typedef struct choice {
    float regret;
    int64_t row;
} choice;

static int by_regret(const void *a, const void *b)
{
    const choice *x = a, *y = b;
    if (x->regret != y->regret) return x->regret < y->regret ? -1 : 1;
    return x->row < y->row ? -1 : x->row > y->row;
}

static mtp_status sort_pending(kmeans *k, int64_t num_pending)
{
    choice *choices = malloc((size_t)num_pending * sizeof *choices);
    if (!choices) return MTP_FAIL(MTP_E_MEMORY, "out of memory for clustering %lld rows", (long long)k->V);
    for (int64_t i = 0; i < num_pending; i++) choices[i] = (choice){k->regret[k->pending[i]], k->pending[i]};
    qsort(choices, (size_t)num_pending, sizeof *choices, by_regret);
    for (int64_t i = 0; i < num_pending; i++) k->pending[i] = choices[i].row;
    free(choices);
    return MTP_OK;
}

/* Rows whose candidates all filled up before their turn stay pending; each round places at least one row. */
static int64_t choose(kmeans *k, int64_t num_pending)
{
    int64_t still = 0;
    for (int64_t i = 0; i < num_pending; i++) {
        const int64_t row = k->pending[i];
        const candidate *list = k->candidates + row * CANDIDATES;
        int32_t at = 0;
        while (at < k->num_candidates[row] && k->left[list[at].centroid] == 0) at++;
        if (at == k->num_candidates[row]) {
            k->pending[still++] = row;
            continue;
        }
        k->assigned[row] = list[at].centroid;
        k->left[list[at].centroid]--;
    }
    return still;
}

static mtp_status assign(kmeans *k)
{
    int64_t num_pending = k->V;
    for (int64_t c = 0; c < k->C; c++) k->left[c] = k->capacity;
    for (int64_t row = 0; row < k->V; row++) k->pending[row] = row;
    while (num_pending > 0) {
        MTP_TRY(find_candidates(k, num_pending));
        MTP_TRY(sort_pending(k, num_pending));
        num_pending = choose(k, num_pending);
    }
    return MTP_OK;
}

/* ---- the whole ------------------------------------------------------------------------------------------------ */

static mtp_status iterate(kmeans *k, uint64_t seed, mtp__kmeans_result *result)
{
    const size_t bytes = (size_t)k->V * sizeof *k->assigned;
    MTP_TRY(seed_centers(k, seed));
    for (int iteration = 0; iteration < MAX_ITERATIONS; iteration++) {
        memcpy(k->previous, k->assigned, bytes);
        MTP_TRY(assign(k));
        MTP_TRY(move_centers(k));
        result->iterations = iteration + 1;
        result->inertia = inertia(k);
        if (iteration > 0 && memcmp(k->previous, k->assigned, bytes) == 0) break;
    }
    return MTP_OK;
}

static mtp_status write_ordering(const kmeans *k, int64_t **ordering)
{
    int64_t *next = calloc((size_t)k->C, sizeof *next);
    *ordering = malloc((size_t)k->V * sizeof **ordering);
    if (!next || !*ordering) {
        free(next);
        free(*ordering);
        *ordering = NULL;
        return MTP_FAIL(MTP_E_MEMORY, "out of memory for an ordering of %lld tokens", (long long)k->V);
    }
    for (int64_t row = 0; row < k->V; row++) {
        const int32_t c = k->assigned[row];
        (*ordering)[c * k->capacity + next[c]++] = row;
    }
    free(next);
    return MTP_OK;
}

mtp_status mtp__balanced_kmeans(mtp_context *context, mtp_view table, int64_t num_centroids, uint64_t seed,
                                mtp__kmeans_result *result)
{
    MTP_REQUIRE(context && table.rank == 2 && result && num_centroids >= 1 && table.shape[0] % num_centroids == 0);
    kmeans k = {
        .V = table.shape[0], .C = num_centroids, .width = table.shape[1], .capacity = table.shape[0] / num_centroids};
    *result = (mtp__kmeans_result){0};
    mtp_status status = mtp__table_open(context, table, num_centroids, &k.table);
    if (status == MTP_OK) status = allocate(&k, context);
    if (status == MTP_OK) {
        memset(k.assigned, 0, (size_t)k.V * sizeof *k.assigned);
        status = iterate(&k, seed, result);
    }
    if (status == MTP_OK) status = write_ordering(&k, &result->ordering);
    release(&k, context);
    return status;
}
