#include "model/directions.h"

#include <math.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/rng.h"
#include "model/table.h"

enum { ITERATIONS = 10, RNG_STREAM = 0x64697265 };

/* gram (device [width, width]) = table^T table. */
static mtp_status make_gram(mtp_context *context, mtp_view table, float *gram)
{
    const int64_t V = table.shape[0], width = table.shape[1];
    mtp__table blocks;
    MTP_TRY(mtp__table_open(context, table, 1, &blocks));
    mtp_status status = context->ops->memory_zero(context->device, gram, (size_t)(width * width) * sizeof *gram);
    for (int64_t first = 0; first < V && status == MTP_OK; first += MTP__TABLE_BLOCK) {
        const int64_t count = V - first < MTP__TABLE_BLOCK ? V - first : MTP__TABLE_BLOCK;
        status = mtp__table_read(&blocks, NULL, first, count);
        if (status == MTP_OK) status = mtp__table_gram(&blocks, count, gram);
    }
    mtp__table_close(&blocks);
    return status;
}

static double dot(const float *x, const float *y, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)y[i];
    return sum;
}

static void add_scaled(float *y, double factor, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = (float)((double)y[i] + factor * (double)x[i]);
}

static void random_row(float *row, int64_t width, mtp__rng *rng)
{
    for (int64_t i = 0; i < width; i++) row[i] = mtp__rng_normal(rng) / sqrtf((float)width);
}

/* Gram-Schmidt over the rows, twice, which makes them orthogonal to rounding. A row that vanishes (a table of lower
 * rank) becomes a random one. */
static void orthonormalise(float *rows, int64_t count, int64_t width, mtp__rng *rng)
{
    for (int64_t i = 0; i < count; i++) {
        float *row = rows + i * width;
        for (int attempt = 0; attempt < 4; attempt++) {
            const double before = sqrt(dot(row, row, width));
            for (int pass = 0; pass < 2; pass++)
                for (int64_t j = 0; j < i; j++)
                    add_scaled(row, -dot(row, rows + j * width, width), rows + j * width, width);
            const double norm = sqrt(dot(row, row, width));
            if (norm > 1e-4 * before && norm > 0) {
                for (int64_t n = 0; n < width; n++) row[n] = (float)((double)row[n] / norm);
                break;
            }
            random_row(row, width, rng);
        }
    }
}

/* rows = rows gram, on the device and back. */
static mtp_status apply_gram(mtp_context *context, const float *gram, int64_t width, float *rows, int64_t count)
{
    const mtp_view view = mtp_view_2d(rows, MTP_F32, count, width);
    float *result = malloc((size_t)(count * width) * sizeof *result);
    mtp__table blocks = {0};
    if (!result) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %lld directions", (long long)count);
    mtp_status status = mtp__table_open(context, view, width, &blocks);
    for (int64_t first = 0; first < count && status == MTP_OK; first += MTP__TABLE_BLOCK) {
        const int64_t n = count - first < MTP__TABLE_BLOCK ? count - first : MTP__TABLE_BLOCK;
        status = mtp__table_read(&blocks, NULL, first, n);
        if (status == MTP_OK) status = mtp__table_project(&blocks, n, gram, width, result + first * width);
    }
    for (int64_t i = 0; i < count * width && status == MTP_OK; i++) rows[i] = result[i];
    mtp__table_close(&blocks);
    free(result);
    return status;
}

mtp_status mtp__leading_directions(mtp_context *context, mtp_view table, int64_t count, uint64_t seed,
                                   float *directions)
{
    MTP_REQUIRE(context && table.rank == 2 && count >= 1 && directions);
    const int64_t width = table.shape[1], leading = count < width ? count : width;
    mtp__rng rng = mtp__rng_make(seed, RNG_STREAM);
    void *gram = NULL;
    for (int64_t i = 0; i < count; i++) random_row(directions + i * width, width, &rng);
    MTP_TRY(context->ops->memory_alloc(context->device, (size_t)(width * width) * sizeof(float), &gram));
    mtp_status status = make_gram(context, table, gram);
    for (int iteration = 0; iteration < ITERATIONS && status == MTP_OK; iteration++) {
        orthonormalise(directions, leading, width, &rng);
        status = apply_gram(context, gram, width, directions, leading);
    }
    if (status == MTP_OK) orthonormalise(directions, leading, width, &rng);
    context->ops->memory_free(context->device, gram);
    return status;
}
