/* Protects: the three heads of a device in bf16 mode are within twice the error of a plain loop that rounds the same
 * factors to bf16, for every type of e and size of tile; argmax belongs to the logits that were computed. A device that
 * has no bf16 mode computes in fp32 and is held to the same. */
#include "heads_check.h"

static const heads_shape shapes[] = {
    {HEADS_FLAT, 70, 48, 1543, 1, 1, MTP_F32, MTP_F32, MTP_ACCUMULATE, 3, 0.5f, 0},
    {HEADS_FLAT, 130, 40, 193, 3, 1, MTP_BF16, MTP_BF16, MTP_OVERWRITE, 1, 0.5f, 1}, /* chunks of the least size */
    {HEADS_FLAT, 9, 36, 100, 1, 1, MTP_F32, MTP_F16, MTP_OVERWRITE, 0, 0.5f, 0},
    {HEADS_CANDIDATES, 7, 20, 5, 3, 2, MTP_F32, MTP_BF16, MTP_ACCUMULATE, 5, 0.5f, 0},
    {HEADS_CANDIDATES, 67, 33, 9, 7, 3, MTP_F32, MTP_F16, MTP_OVERWRITE, 2, 0.5f, 0},
    {HEADS_CANDIDATES, 40, 144, 6, 130, 2, MTP_BF16, MTP_BF16, MTP_OVERWRITE, 0, 0.3f,
     0}, /* tiles across tokens and columns */
    {HEADS_CANDIDATES, 300, 16, 3, 5, 1, MTP_F32, MTP_F32, MTP_ACCUMULATE, 0, 0.5f,
     0}, /* several tiles of a centroid */
    {HEADS_CANDIDATES, 200, 72, 3, 70, 1, MTP_BF16, MTP_BF16, MTP_ACCUMULATE, 0, 0.3f, 0}, /* the tallest tiles */
    {HEADS_HIERARCHICAL, 150, 32, 4, 12, 1, MTP_BF16, MTP_BF16, MTP_OVERWRITE, 0, 0.5f, 0},
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

static double bf16(double x)
{
    return (double)ops_rounded((float)x, MTP_BF16);
}

/* One row with x, e and dz rounded before they are multiplied, logits added up in fp32, onto `sum`. */
static void add_row(const heads *h, int64_t row, int32_t *slot, double *z, const heads_result *sum)
{
    const int64_t H = h->s.H;
    const float *x = h->x.values + row * H;
    const double scale = (double)ops_row(&h->scale, 0)[row];
    int64_t num_open;
    const int64_t n = heads_candidates(h, row, slot, &num_open);
    const int32_t target = h->slot_of[h->target[row]];
    double top = -INFINITY, total = 0;
    for (int64_t j = 0; j < n; j++) {
        const float *e = h->e.values + slot[j] * H;
        float product = 0;
        for (int64_t i = 0; i < H; i++) product += (float)(bf16((double)x[i]) * bf16((double)e[i]));
        z[j] = (double)product;
        top = z[j] > top ? z[j] : top;
        if (j < num_open && h->s.mode != HEADS_HIERARCHICAL) sum->logits[row * ops_width(&h->logits) + j] = z[j];
    }
    for (int64_t j = 0; j < n; j++) total += exp(z[j] - top);
    for (int64_t j = 0; j < n; j++) {
        const bool own = slot[j] == target;
        const double dz = bf16(scale * (exp(z[j] - top) / total - own));
        if (own) sum->loss[row] = (double)(float)(top + log(total) - z[j]);
        for (int64_t i = 0; i < H; i++) {
            sum->dx[row * H + i] += dz * bf16((double)h->e.values[slot[j] * H + i]);
            sum->de[slot[j] * H + i] += dz * bf16((double)x[i]);
        }
    }
}

static heads_result plain_result(const heads *h)
{
    const heads_result plain = {.loss = ops_doubles(h->s.R),
                                .logits = ops_doubles(h->s.R * ops_width(&h->logits)),
                                .dx = ops_doubles(h->s.R * h->s.H),
                                .de = ops_doubles(h->V * h->s.H)};
    int32_t *slot = ops_bytes((size_t)h->V * sizeof(int32_t));
    double *z = ops_doubles(h->V);
    if (h->s.write == MTP_ACCUMULATE) {
        memcpy(plain.dx, h->old_dx, (size_t)(h->s.R * h->s.H) * sizeof(double));
        memcpy(plain.de, h->old_de, (size_t)(h->V * h->s.H) * sizeof(double));
    }
    for (int64_t r = 0; r < h->s.R; r++) add_row(h, r, slot, z, &plain);
    return plain;
}

/* The lowest of the best tokens by the logits that the op gave. */
static void expect_argmax(const heads *h, int64_t row)
{
    const float *z = ops_row(&h->logits, row);
    int32_t best = -1;
    float top = -INFINITY;
    for (int64_t j = 0; j < ops_width(&h->logits); j++) {
        const int64_t P = h->s.P, slot = h->s.mode == HEADS_FLAT ? j : h->selected[row * h->s.k + j / P] * P + j % P;
        const int32_t token = h->order[slot];
        if (best >= 0 && (z[j] < top || (!(z[j] > top) && token > best))) continue;
        best = token;
        top = z[j];
    }
    assert_int_equal(h->argmax[row], best);
}

static void errors_are_those_of_bf16(void **state)
{
    (void)state;
    mtp_device *device = ops_open_bf16();
    for (size_t i = 0; i < NUM_SHAPES; i++) {
        test_rng rng = {.state = 41 + i};
        const heads h = heads_make(&rng, shapes[i]);
        const heads_result want = heads_expected(&h), plain = plain_result(&h);
        assert_ok(heads_run(device, shapes[i].mode, heads_args(&h)));
        ops_expect_bf16("loss", &h.loss, want.loss, plain.loss);
        ops_expect_bf16("dx", &h.dx, want.dx, plain.dx);
        ops_expect_bf16("de", &h.de, want.de, plain.de);
        if (shapes[i].mode != HEADS_HIERARCHICAL) {
            ops_expect_bf16("logits", &h.logits, want.logits, plain.logits);
            for (int64_t r = 0; r < h.s.R; r++) expect_argmax(&h, r);
        }
        for (int64_t r = 0; shapes[i].mode == HEADS_CANDIDATES && r < h.s.R; r++)
            assert_int_equal(h.miss[r], want.miss[r]);
        ops_release_buffers();
    }
    ops_release();
}

static void rows_and_repetition(void **state)
{
    (void)state;
    mtp_device *device = ops_open_bf16();
    heads_check_rows(device, shapes[4]);
    for (size_t i = 0; i < NUM_SHAPES; i++) {
        const uint64_t bits = heads_hash(device, shapes[i]);
        assert_true(heads_hash(device, shapes[i]) == bits);
        ops_release_buffers();
    }
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(errors_are_those_of_bf16),
        cmocka_unit_test(rows_and_repetition),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
