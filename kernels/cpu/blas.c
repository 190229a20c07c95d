/* The only file that sees CBLAS: the product of one tile, what library that is, and whether it can be trusted. */
#include <cblas.h>
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/cpu.h"

#if defined(__GNUC__)
/* Only OpenBLAS has these; with another library the addresses are NULL. */
extern int openblas_get_parallel(void) __attribute__((weak));
extern void openblas_set_num_threads(int num_threads) __attribute__((weak));
extern char *openblas_get_corename(void) __attribute__((weak));
extern char *openblas_get_config(void) __attribute__((weak));
#define MTP__HAS(function) ((function) != NULL)
#else
#define MTP__HAS(function) 0
#endif

enum { FLAVOUR_PTHREAD = 1, FLAVOUR_OPENMP = 2 }; /* what openblas_get_parallel returns; 0: sequential */

/* C = beta C + A op(B) in double precision, A in strips of 64 rows. */
static void small_product(CBLAS_TRANSPOSE trans_b, int64_t m, int64_t n, int64_t k, const float *a, int64_t lda,
                          const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    double strip[MTP__TILE_MIN * MTP__DOUBLE_WIDTH], product[MTP__TILE_MIN * MTP__DOUBLE_WIDTH];
    double factor[MTP__SMALL_FACTOR];
    const int64_t rows_b = trans_b == CblasTrans ? n : k, cols_b = trans_b == CblasTrans ? k : n;
    for (int64_t i = 0; i < rows_b; i++)
        for (int64_t j = 0; j < cols_b; j++) factor[i * cols_b + j] = (double)b[i * ldb + j];
    for (int64_t first = 0; first < m; first += MTP__TILE_MIN) {
        const float *x = a + first * lda;
        float *y = c + first * ldc;
        for (int64_t i = 0; i < MTP__TILE_MIN; i++)
            for (int64_t j = 0; j < k; j++) strip[i * k + j] = (double)x[i * lda + j];
        cblas_dgemm(CblasRowMajor, CblasNoTrans, trans_b, MTP__TILE_MIN, (int)n, (int)k, 1.0, strip, (int)k, factor,
                    (int)cols_b, 0.0, product, (int)n);
        for (int64_t i = 0; i < MTP__TILE_MIN; i++)
            for (int64_t j = 0; j < n; j++) { /* with beta 0, what stood in C does not count, NaN included */
                const double before = beta == 0.0f ? 0.0 : (double)beta * (double)y[i * ldc + j];
                y[i * ldc + j] = (float)(before + product[i * n + j]);
            }
    }
}

void mtp__cpu_gemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, const float *a, int64_t lda,
                   const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    const CBLAS_TRANSPOSE op_a = trans_a ? CblasTrans : CblasNoTrans, op_b = trans_b ? CblasTrans : CblasNoTrans;
    /* A BLAS with OpenMP threads runs on one thread inside an active parallel region, but not in a region of one
     * thread; there the calling thread's own setting keeps it to one. */
    const bool alone = !omp_in_parallel();
    const int threads = alone ? omp_get_max_threads() : 1;
    if (alone && threads > 1) omp_set_num_threads(1);
    if (!trans_a && m % MTP__TILE_MIN == 0 && mtp__cpu_in_double(n, k))
        small_product(op_b, m, n, k, a, lda, b, ldb, beta, c, ldc);
    else
        cblas_sgemm(CblasRowMajor, op_a, op_b, (int)m, (int)n, (int)k, 1.0f, a, (int)lda, b, (int)ldb, beta, c,
                    (int)ldc);
    if (alone && threads > 1) omp_set_num_threads(threads);
}

/* ---- the library ------------------------------------------------------------------------------------------------- */

static void describe(mtp_device *device)
{
    if (!MTP__HAS(openblas_get_config) || !MTP__HAS(openblas_get_corename) || !MTP__HAS(openblas_get_parallel)) {
        snprintf(device->blas, sizeof device->blas, "CBLAS of another vendor than OpenBLAS");
        return;
    }
    /* the configuration starts with the name and the version: "OpenBLAS 0.3.21 DYNAMIC_ARCH ..." */
    const char *config = openblas_get_config();
    const char *end = strchr(config, ' ');
    end = end ? strchr(end + 1, ' ') : NULL;
    const int length = end ? (int)(end - config) : (int)strlen(config);
    const int parallel = openblas_get_parallel();
    snprintf(device->blas, sizeof device->blas, "%.*s, kernel %s, %s", length > 80 ? 80 : length, config,
             openblas_get_corename(),
             parallel == FLAVOUR_PTHREAD  ? "pthread"
             : parallel == FLAVOUR_OPENMP ? "OpenMP"
                                          : "sequential");
}

static void make_single_threaded(void)
{
    /* Never in the OpenMP flavour: there the call sets the process's OpenMP threads, ours as well, to one. */
    if (MTP__HAS(openblas_get_parallel) && MTP__HAS(openblas_set_num_threads) &&
        openblas_get_parallel() == FLAVOUR_PTHREAD)
        openblas_set_num_threads(1);
}

/* ---- is it right? ------------------------------------------------------------------------------------------------ */

enum { TEST_FLOATS = MTP__GEMM_ROWS_MOST * 300 };
typedef struct workspace {
    float a[TEST_FLOATS], b[TEST_FLOATS], c[TEST_FLOATS];
} workspace;

static void fill(float *x, int64_t n, uint32_t seed)
{
    uint32_t state = seed;
    for (int64_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(int32_t)state * 0x1p-31f;
    }
}

typedef struct product {
    bool trans_a, trans_b;
    int64_t m, n, k;
    float beta;
} product;

static mtp_status check_product(workspace *w, const product *p, const char *blas)
{
    const int64_t lda = p->trans_a ? p->m : p->k, ldb = p->trans_b ? p->k : p->n;
    fill(w->a, p->m * p->k, 1);
    fill(w->b, p->k * p->n, 2);
    for (int64_t i = 0; i < p->m * p->n; i++) w->c[i] = p->beta == 0.0f ? NAN : 1.0f;
    mtp__cpu_gemm(p->trans_a, p->trans_b, p->m, p->n, p->k, w->a, lda, w->b, ldb, p->beta, w->c, p->n);
    for (int64_t i = 0; i < p->m; i++)
        for (int64_t j = 0; j < p->n; j++) {
            double sum = p->beta, magnitude = p->beta;
            for (int64_t l = 0; l < p->k; l++) {
                const double term = (double)w->a[p->trans_a ? l * lda + i : i * lda + l] *
                                    (double)w->b[p->trans_b ? j * ldb + l : l * ldb + j];
                sum += term;
                magnitude += fabs(term);
            }
            const double error = fabs((double)w->c[i * p->n + j] - sum);
            if (!(error <= (double)p->k * 0x1p-23 * magnitude)) /* NaN fails as well */
                return MTP_FAIL(
                    MTP_E_BACKEND,
                    "the BLAS library computes wrong products on this machine: element (%d, %d) of a "
                    "%dx%dx%d sgemm is %.9g, it should be %.9g (%s); install another BLAS, or with OpenBLAS "
                    "choose another kernel through OPENBLAS_CORETYPE",
                    (int)i, (int)j, (int)p->m, (int)p->n, (int)p->k, (double)w->c[i * p->n + j], sum, blas);
        }
    return MTP_OK;
}

static mtp_status check_products(workspace *w, const char *blas)
{
    static const product products[] = {
        {false, true, 64, 48, 130, 0.0f}, {false, true, 37, 19, 33, 1.0f},  {false, false, 64, 40, 100, 0.0f},
        {false, false, 29, 53, 31, 1.0f}, {true, false, 48, 64, 100, 0.0f}, {true, false, 17, 35, 64, 1.0f},
        {false, true, 64, 24, 450, 0.0f}, {true, true, 20, 30, 40, 0.0f},
    };
    for (size_t i = 0; i < sizeof products / sizeof *products; i++) MTP_TRY(check_product(w, &products[i], blas));
    return MTP_OK;
}

/* ---- do the bits of a row depend on where it stands? ------------------------------------------------------------- */

typedef enum product_form { FORM_NT, FORM_NN, FORM_TN, FORMS } product_form; /* of y, dx and dW */

typedef struct place {
    product_form form;
    int64_t rows, live;      /* of the tile; rows that are not zero */
    int64_t first_col, cols; /* of the tile among the n columns */
    int64_t n, k;
} place;

/* All live rows of A are the same, so all live rows of C must be the same bits as the reference, whatever tile they are
 * in. */
static void fill_rows(workspace *w, const place *p, const float *row)
{
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t l = 0; l < p->k; l++)
            w->a[p->form == FORM_TN ? l * p->rows + r : r * p->k + l] = r < p->live ? row[l] : 0.0f;
}

static bool row_agrees(workspace *w, const place *p, const float *row, const float *reference)
{
    fill_rows(w, p, row);
    const bool trans_a = p->form == FORM_TN, trans_b = p->form == FORM_NT;
    mtp__cpu_gemm(trans_a, trans_b, p->rows, p->cols, p->k, w->a, trans_a ? p->rows : p->k,
                  w->b + (trans_b ? p->first_col * p->k : p->first_col), trans_b ? p->k : p->n, 0.0f, w->c, p->cols);
    for (int64_t r = 0; r < p->live; r++)
        if (memcmp(w->c + r * p->cols, reference + p->first_col, (size_t)p->cols * sizeof(float)) != 0) return false;
    return true;
}

/* One width and depth: every tile size up to `most` rows, full and padded; then blocks of columns. */
static bool size_agrees(workspace *w, product_form form, int64_t n, int64_t k, int64_t most)
{
    float row[512], reference[256];
    fill(row, k, 3);
    fill(w->b, n * k, 4);
    place p = {.form = form, .rows = mtp__cpu_tile_rows_of(1, n, k), .live = 1, .cols = n, .n = n, .k = k};
    fill_rows(w, &p, row);
    mtp__cpu_gemm(form == FORM_TN, form == FORM_NT, p.rows, n, k, w->a, form == FORM_TN ? p.rows : k, w->b,
                  form == FORM_NT ? k : n, 0.0f, w->c, n);
    memcpy(reference, w->c, (size_t)n * sizeof(float));
    for (; p.rows <= most; p.rows += p.rows < MTP__TILE_MAX ? MTP__TILE_MIN : MTP__GEMM_ROWS_MOST - MTP__TILE_MAX) {
        p.live = p.rows;
        if (!row_agrees(w, &p, row, reference)) return false;
    }
    p.rows = MTP__TILE_MAX;
    p.live = p.rows - MTP__TILE_MIN + 1;
    if (n % 64 != 0 || 64 * k <= MTP__SMALL_FACTOR) return row_agrees(w, &p, row, reference);
    p.cols = 64;
    for (; p.first_col < n; p.first_col += p.cols)
        if (!row_agrees(w, &p, row, reference)) return false;
    return true;
}

static bool rows_exact(workspace *w)
{
    static const struct {
        int64_t n, k, most;
    } sizes[] = {{128, 272, MTP__GEMM_ROWS_MOST}, {130, 500, 256}, {64, 300, 256}, {32, 48, 256}, {16, 500, 256}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int f = 0; f < (i == 0 ? FORMS : FORM_TN); f++) /* dW is cut like this at large sizes only */
            if (!size_agrees(w, (product_form)f, sizes[i].n, sizes[i].k, sizes[i].most)) return false;
    return true;
}

mtp_status mtp__cpu_blas_open(mtp_device *device)
{
    make_single_threaded();
    describe(device);
    workspace *w = malloc(sizeof *w);
    if (!w) return MTP_FAIL(MTP_E_MEMORY, "out of memory opening the cpu backend (%zu bytes)", sizeof *w);
    const mtp_status status = check_products(w, device->blas);
    if (status == MTP_OK) {
        device->info.rows_exact = rows_exact(w);
        snprintf(
            device->note, sizeof device->note, "%s",
            device->info.rows_exact
                ? "measured: a row of a product has the same bits at every place of every tile"
                : "measured: with this BLAS the bits of a row of a product depend on its place in the tile; results "
                  "are equal to float rounding, but not bit for bit, when rows are packed differently");
    }
    free(w);
    return status;
}
