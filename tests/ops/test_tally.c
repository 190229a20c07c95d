/* Protects: the sums over rows of the head by draft step: every column, rows that are none, optional results, joined
 * losses; that padding changes no bit; what is refused. */
#include "ops_check.h"

enum { STEPS = 3, PER_STEP = 700, MOST = 2100 };

typedef struct problem {
    int64_t rows;
    ops_tensor index, target, argmax, loss, centroid_loss, miss, sums;
} problem;

/* `rows` rows of random draft steps, every fifth of them none. */
static problem make(int64_t rows)
{
    test_rng rng = {.state = 71};
    problem p = {.rows = rows,
                 .index = ops_indices(&rng, rows, STEPS * PER_STEP),
                 .target = ops_indices(&rng, rows, 3),
                 .argmax = ops_indices(&rng, rows, 3),
                 .loss = ops_random_vector(&rng, MTP_F32, rows, 9.0f),
                 .centroid_loss = ops_random_vector(&rng, MTP_F32, rows, 2.0f),
                 .miss = {.view = mtp_view_1d(ops_bytes((size_t)rows), MTP_U8, rows)},
                 .sums = {.view = mtp_view_2d(ops_bytes(STEPS * MTP_TALLY_COLUMNS * sizeof(double)), MTP_F64, STEPS,
                                              MTP_TALLY_COLUMNS)}};
    for (int64_t i = 0; i < rows; i++) ((uint8_t *)p.miss.view.data)[i] = (uint8_t)(test_below(&rng, 4) == 0);
    for (int64_t i = 0; i < rows; i += 5) ((int32_t *)p.index.view.data)[i] = MTP_NO_ROW;
    for (int i = 0; i < STEPS * MTP_TALLY_COLUMNS; i++) ((double *)p.sums.view.data)[i] = i;
    return p;
}

static mtp_tally_args args(const problem *p)
{
    return (mtp_tally_args){.index = p->index.view,
                            .target = p->target.view,
                            .argmax = p->argmax.view,
                            .loss = p->loss.view,
                            .centroid_loss = p->centroid_loss.view,
                            .miss = p->miss.view,
                            .sums = p->sums.view,
                            .rows_per_step = PER_STEP};
}

/* sums began as 0, 1, 2, ... */
static void check(const problem *p, const mtp_tally_args *a)
{
    double want[STEPS][MTP_TALLY_COLUMNS];
    for (int i = 0; i < STEPS * MTP_TALLY_COLUMNS; i++) want[i / MTP_TALLY_COLUMNS][i % MTP_TALLY_COLUMNS] = i;
    for (int64_t i = 0; i < p->rows; i++) {
        const int32_t index = ((const int32_t *)p->index.view.data)[i];
        if (index == MTP_NO_ROW) continue;
        double *sums = want[index / PER_STEP];
        const float centroid = a->centroid_loss.data ? p->centroid_loss.values[i] : 0;
        const float joined = p->loss.values[i] + centroid;
        sums[0] += (double)(a->joined ? joined : p->loss.values[i]);
        sums[1] += a->joined ? 0 : (double)centroid;
        sums[2] += 1;
        sums[3] += ((const int32_t *)p->argmax.view.data)[i] == ((const int32_t *)p->target.view.data)[i];
        sums[4] += a->miss.data && ((const uint8_t *)p->miss.view.data)[i];
    }
    for (int k = 0; k < STEPS; k++)
        for (int c = 0; c < MTP_TALLY_COLUMNS; c++) {
            const double got = ((const double *)p->sums.view.data)[k * MTP_TALLY_COLUMNS + c];
            if (!(fabs(got - want[k][c]) <= 1e-11 * fabs(want[k][c]))) /* two orders of double sums */
                fail_msg("step %d, column %d is %.17g, want %.17g", k, c, got, want[k][c]);
        }
}

static void every_column(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 2);
    for (int variant = 0; variant < 4; variant++) {
        const problem p = make(variant == 3 ? 1 : MOST);
        if (variant == 3) *(int32_t *)p.index.view.data = PER_STEP;
        mtp_tally_args a = args(&p);
        a.joined = variant == 1;
        if (variant == 2) a.centroid_loss = a.miss = (mtp_view){0};
        assert_ok(ops_backend()->tally(device, &a));
        check(&p, &a);
        ops_release_buffers();
    }
    ops_release();
}

/* Rows that are none, behind the others: the same bits. */
static void padding_changes_no_bit(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 2);
    problem p = make(MOST);
    for (int64_t i = 1500; i < MOST; i++) ((int32_t *)p.index.view.data)[i] = MTP_NO_ROW;
    const mtp_tally_args all = args(&p);
    double sums[STEPS * MTP_TALLY_COLUMNS];
    for (int i = 0; i < STEPS * MTP_TALLY_COLUMNS; i++) sums[i] = i;
    mtp_tally_args a = all;
    a.sums.data = sums;
    a.index = mtp_view_rows(all.index, 0, 1500);
    a.target = mtp_view_rows(all.target, 0, 1500);
    a.argmax = mtp_view_rows(all.argmax, 0, 1500);
    a.loss = mtp_view_rows(all.loss, 0, 1500);
    a.centroid_loss = mtp_view_rows(all.centroid_loss, 0, 1500);
    a.miss = mtp_view_rows(all.miss, 0, 1500);
    assert_ok(ops_backend()->tally(device, &all));
    assert_ok(ops_backend()->tally(device, &a));
    assert_memory_equal(sums, p.sums.view.data, sizeof sums);
    ops_release();
}

static void bad_arguments_are_named(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    problem p = make(7);
    mtp_tally_args a = args(&p);
    a.rows_per_step = 0;
    assert_fails(ops_backend()->tally(device, &a), MTP_E_ARGUMENT, "tally: rows_per_step is 0");
    a = args(&p);
    a.target = mtp_view_rows(a.target, 0, 6);
    assert_fails(ops_backend()->tally(device, &a), MTP_E_ARGUMENT, "target is I32 [6]; it must be I32 [7]");
    a = args(&p);
    a.sums.shape[1] = 4;
    assert_fails(ops_backend()->tally(device, &a), MTP_E_ARGUMENT, "it must be F64 [any, 5]");
    ((int32_t *)p.index.view.data)[3] = STEPS * PER_STEP;
    a = args(&p);
    assert_fails(ops_backend()->tally(device, &a), MTP_E_ARGUMENT,
                 "tally: index / rows_per_step[3] is 3, outside [0, 3)");
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_column),
        cmocka_unit_test(padding_changes_no_bit),
        cmocka_unit_test(bad_arguments_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
