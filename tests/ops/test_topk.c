/* Protects: top-k returns the ids of the k largest scores, best first, ties by the lowest id, for every k up to the
 * width. */
#include "ops_check.h"

static int32_t *run(mtp_device *device, const ops_tensor *scores, int64_t k)
{
    const int64_t R = ops_rows(scores);
    int32_t *selected = ops_bytes((size_t)(R * k) * sizeof(int32_t));
    mtp_topk_args a = {.scores = scores->view, .selected = mtp_view_2d(selected, MTP_I32, R, k)};
    a.scratch = ops_scratch(ops_backend()->topk_scratch(device, &a));
    assert_ok(ops_backend()->topk(device, &a));
    return selected;
}

/* Selection by counting: token i has rank = number of scores that come before it. */
static void check(const ops_tensor *scores, const int32_t *selected, int64_t k)
{
    const int64_t R = ops_rows(scores), C = ops_width(scores);
    for (int64_t r = 0; r < R; r++) {
        const float *x = ops_row(scores, r);
        for (int64_t i = 0; i < C; i++) {
            int64_t rank = 0;
            for (int64_t j = 0; j < C; j++) rank += x[j] > x[i] || (x[j] == x[i] && j < i);
            if (rank < k && selected[r * k + rank] != i)
                fail_msg("row %d: place %d holds %d, want %d", (int)r, (int)rank, selected[r * k + rank], (int)i);
        }
    }
}

static const struct {
    int64_t R, C, k, gap;
} sizes[] = {{1, 1, 1, 0},   {3, 7, 1, 2},    {3, 7, 7, 0},     {5, 64, 3, 0},   {2, 65, 64, 1},
             {9, 129, 2, 0}, {4, 300, 33, 5}, {3, 513, 513, 0}, {6, 2048, 32, 0}};

static void sizes_of(mtp_device *device)
{
    test_rng rng = {.state = 51};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const ops_tensor scores = ops_random(&rng, MTP_F32, sizes[i].R, sizes[i].C, sizes[i].gap, 3);
        check(&scores, run(device, &scores, sizes[i].k), sizes[i].k);
        for (int64_t r = 0; r < sizes[i].R; r++) /* many ties, and -inf and +inf among them */
            for (int64_t c = 0; c < sizes[i].C; c++) {
                const int64_t kind = test_below(&rng, 7);
                ops_row(&scores, r)[c] = kind == 5 ? -INFINITY : kind == 6 ? INFINITY : (float)(kind % 3);
            }
        check(&scores, run(device, &scores, sizes[i].k), sizes[i].k);
    }
}

static void every_size_with_and_without_ties(void **state)
{
    (void)state;
    ops_each_isa(sizes_of);
}

static void ordered_and_constant_rows(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 3);
    test_rng rng = {.state = 52};
    const ops_tensor scores = ops_random(&rng, MTP_F32, 4, 500, 0, 1);
    for (int64_t c = 0; c < 500; c++) {
        ops_row(&scores, 0)[c] = (float)c;
        ops_row(&scores, 1)[c] = (float)-c;
        ops_row(&scores, 2)[c] = 2;
        ops_row(&scores, 3)[c] = c % 2 ? 0.0f : -0.0f; /* equal, so the order of the ids */
    }
    const int32_t *selected = run(device, &scores, 40);
    check(&scores, selected, 40);
    for (int32_t i = 0; i < 40; i++) {
        assert_int_equal(selected[i], 499 - i);
        assert_int_equal(selected[40 + i], i);
        assert_int_equal(selected[80 + i], i);
        assert_int_equal(selected[120 + i], i);
    }
    ops_release();
}

/* Not a promise about which, but the ids are valid and distinct whatever the scores are. */
static void not_a_number_gives_valid_ids(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 2);
    test_rng rng = {.state = 53};
    const ops_tensor scores = ops_random(&rng, MTP_F32, 2, 200, 0, 1);
    for (int64_t c = 0; c < 200; c++) {
        ops_row(&scores, 0)[c] = NAN;
        if (c % 3 == 0) ops_row(&scores, 1)[c] = NAN;
    }
    const int32_t *selected = run(device, &scores, 70);
    for (int64_t r = 0; r < 2; r++) {
        bool seen[200] = {false};
        for (int64_t i = 0; i < 70; i++) {
            const int32_t id = selected[r * 70 + i];
            assert_true(id >= 0 && id < 200 && !seen[id]);
            seen[id] = true;
        }
    }
    ops_release();
}

static void bad_arguments_are_named(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    float scores[6] = {0};
    int32_t selected[8];
    mtp_topk_args a = {.scores = mtp_view_2d(scores, MTP_F32, 2, 3), .selected = mtp_view_2d(selected, MTP_I32, 2, 4)};
    a.scratch = ops_scratch(1024);
    assert_fails(ops_backend()->topk(device, &a), MTP_E_ARGUMENT, "4 of the 3 scores");
    a.selected = mtp_view_2d(selected, MTP_I32, 1, 2);
    assert_fails(ops_backend()->topk(device, &a), MTP_E_ARGUMENT, "selected is I32 [1, 2]; it must be I32 [2, any]");
    a.selected = mtp_view_2d(selected, MTP_I32, 2, 2);
    a.scratch.size = 0;
    assert_fails(ops_backend()->topk(device, &a), MTP_E_ARGUMENT, "scratch");
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_size_with_and_without_ties),
        cmocka_unit_test(ordered_and_constant_rows),
        cmocka_unit_test(not_a_number_gives_valid_ids),
        cmocka_unit_test(bad_arguments_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
