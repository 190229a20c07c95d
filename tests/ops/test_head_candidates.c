/* Protects: the centroid head gives loss, argmax, miss, logits and both gradients over the tokens of the selected
 * centroids and of the target's own, whatever else is computed with a row; the forced centroid is never drafted. */
#include "heads_check.h"

static const heads_shape shapes[] = {
    {HEADS_CANDIDATES, 1, 16, 1, 1, 1, MTP_F32, MTP_F32, MTP_OVERWRITE, 0, 0.5f, 0},
    {HEADS_CANDIDATES, 7, 20, 5, 3, 2, MTP_BF16, MTP_BF16, MTP_ACCUMULATE, 5, 0.5f, 0},
    {HEADS_CANDIDATES, 67, 33, 9, 7, 3, MTP_F16, MTP_F16, MTP_OVERWRITE, 2, 0.5f, 0},
    {HEADS_CANDIDATES, 50, 48, 13, 11, 13, MTP_BF16, MTP_F32, MTP_ACCUMULATE, 3, 0.5f, 0}, /* all centroids selected */
    {HEADS_CANDIDATES, 40, 144, 6, 130, 2, MTP_F32, MTP_F32, MTP_OVERWRITE, 0, 0.3f, 0},   /* tiles of 64 rows */
    {HEADS_CANDIDATES, 600, 16, 3, 5, 1, MTP_F32, MTP_F32, MTP_ACCUMULATE, 0, 0.5f,
     0}, /* several tiles of a centroid */
    {HEADS_CANDIDATES, 150, 20, 9, 7, 3, MTP_F32, MTP_F32, MTP_ACCUMULATE, 0, 0.5f,
     1}, /* chunks of the least size, on cuda */
    {HEADS_CANDIDATES, 2300, 16, 3, 2, 2, MTP_F32, MTP_F32, MTP_ACCUMULATE, 0, 0.5f,
     0}, /* a centroid of 2300 pairs is cut */
    {HEADS_CANDIDATES, 9, 16, 301, 3, 1, MTP_F32, MTP_BF16, MTP_OVERWRITE, 0, 0.5f,
     0}, /* most centroids without a row */
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

static void formula(mtp_device *device)
{
    heads_check_formulas(device, shapes, NUM_SHAPES);
}

static void properties(mtp_device *device)
{
    const heads_shape small = {HEADS_CANDIDATES, 5, 16, 6, 4, 2, MTP_F32, MTP_F32, MTP_OVERWRITE, 0, 0.5f, 0};
    const heads_shape alone[] = {shapes[2], shapes[4], shapes[3]};
    heads_check_properties(device, shapes[2], alone, sizeof alone / sizeof *alone, small);
}

static void each_isa_follows_the_formula(void **state)
{
    (void)state;
    ops_each_isa(formula);
}

static void optional_outputs_rows_and_differences(void **state)
{
    (void)state;
    ops_each_isa(properties);
}

static uint64_t run_once(mtp_device *device)
{
    return heads_hash(device, shapes[2]) * 31 + heads_hash(device, shapes[5]);
}

static void threads_do_not_change_a_bit(void **state)
{
    (void)state;
    ops_same_bits(run_once);
}

/* k = C = 4096 of one token each: the pairs of 1000 rows do not fit one chunk. */
static void rows_are_taken_in_chunks(void **state)
{
    (void)state;
    if (ops_device_name()) skip(); /* its chunks follow logits_budget: among the shapes above */
    mtp_device *device = ops_open(NULL, 2);
    const heads_shape s = {HEADS_CANDIDATES, 1000, 16, 4096, 1, 4096, MTP_F32, MTP_F32, MTP_OVERWRITE, 0, 0.5f, 0};
    heads_check_formula(device, s);
    ops_release();
}

static void ties(mtp_device *device)
{
    test_rng rng = {.state = 31};
    const heads_shape s = {HEADS_CANDIDATES, 40, 16, 12, 5, 4, MTP_F32, MTP_F32, MTP_OVERWRITE, 0, 1, 0};
    const heads h = heads_make(&rng, s);
    for (int64_t i = 0; i < s.R * s.H; i++) ops_row(&h.x, 0)[i] = h.x.values[i] = (float)(1 + test_below(&rng, 3));
    for (int64_t i = 0; i < h.V; i++) /* only two kinds of tokens: every row has many equal best ones */
        for (int64_t j = 0; j < s.H; j++) ops_row(&h.e, i)[j] = h.e.values[i * s.H + j] = i % 3 ? 1.0f : 0.0f;
    const heads_result want = heads_expected(&h);
    assert_ok(heads_run(device, s.mode, heads_args(&h)));
    for (int64_t r = 0; r < s.R; r++) assert_int_equal(h.argmax[r], want.argmax[r]);
}

static void equal_logits_give_the_lowest_id(void **state)
{
    (void)state;
    ops_each_isa(ties);
}

static void the_forced_centroid_is_not_drafted(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 2);
    test_rng rng = {.state = 32};
    const heads_shape s = {HEADS_CANDIDATES, 30, 16, 8, 3, 2, MTP_F32, MTP_F32, MTP_OVERWRITE, 0, 0.1f, 0};
    const heads h = heads_make(&rng, s);
    /* each row's target token is by far the best, and its centroid is selected or not */
    for (int64_t r = 0; r < s.R; r++) {
        ops_row(&h.x, r)[0] = 1;
        h.target[r] = h.order[7 * s.P + r % s.P];
    }
    for (int64_t i = 0; i < s.P; i++) ops_row(&h.e, 7 * s.P + i)[0] = 50;
    assert_ok(heads_run(device, s.mode, heads_args(&h)));
    int misses = 0;
    for (int64_t r = 0; r < s.R; r++) {
        const bool selected = h.selected[2 * r] == 7 || h.selected[2 * r + 1] == 7;
        assert_int_equal(h.miss[r], !selected);
        assert_int_equal(h.slot_of[h.argmax[r]] / s.P == 7, selected);
        misses += h.miss[r];
    }
    assert_true(misses > 0 && misses < s.R);
    ops_release();
}

static void argmax_alone_needs_no_target(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 2);
    test_rng rng = {.state = 33};
    const heads h = heads_make(&rng, shapes[2]);
    const heads_result want = heads_expected(&h);
    mtp_head_args a = heads_args(&h);
    a.target.data = a.scale.data = a.loss.data = a.miss.data = a.dx.data = a.de.data = NULL;
    assert_ok(heads_run(device, HEADS_CANDIDATES, a));
    ops_expect("logits", &h.logits, want.logits, heads_tolerance);
    for (int64_t r = 0; r < h.s.R; r++) assert_int_equal(h.argmax[r], want.argmax[r]);
    ops_release();
}

static void bad_arguments_are_named(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    test_rng rng = {.state = 34};
    const heads h = heads_make(&rng, shapes[1]);
    const mtp_head_args good = heads_args(&h);
    mtp_head_args a = good;
    a.target.data = NULL;
    assert_fails(heads_run(device, HEADS_CANDIDATES, a), MTP_E_ARGUMENT, "need target");
    a = good;
    a.selected = mtp_view_2d(h.selected, MTP_I32, 1, 14);
    assert_fails(heads_run(device, HEADS_CANDIDATES, a), MTP_E_ARGUMENT, "selected is I32 [1, 14]");
    a = good;
    a.order = mtp_view_2d(h.order, MTP_I32, 4, 3);
    assert_fails(heads_run(device, HEADS_CANDIDATES, a), MTP_E_ARGUMENT, "order is [4, 3]");
    h.target[2] = -1;
    assert_fails(heads_run(device, HEADS_CANDIDATES, good), MTP_E_ARGUMENT, "target[2] is -1");
    h.target[2] = 14;
    const int32_t kept = h.selected[3];
    h.selected[3] = 5;
    assert_fails(heads_run(device, HEADS_CANDIDATES, good), MTP_E_ARGUMENT,
                 ops_found("selected[1, 1] is 5", "selected[1] is 5"));
    h.selected[3] = h.selected[2];
    if (!ops_device_name()) /* a kernel does not look for it */
        assert_fails(heads_run(device, HEADS_CANDIDATES, good), MTP_E_ARGUMENT, "row 1 of selected names centroid");
    h.selected[3] = kept;
    int32_t *slot = &h.slot_of[h.target[4]];
    *slot = *slot ? *slot - 1 : 1; /* another token's */
    assert_fails(heads_run(device, HEADS_CANDIDATES, good), MTP_E_ARGUMENT,
                 ops_found("which order does not hold there", "order or slot_of"));
    *slot = 15;
    assert_fails(heads_run(device, HEADS_CANDIDATES, good), MTP_E_ARGUMENT,
                 ops_found("slot_of gives slot 15", "order or slot_of"));
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_isa_follows_the_formula),    cmocka_unit_test(optional_outputs_rows_and_differences),
        cmocka_unit_test(threads_do_not_change_a_bit),     cmocka_unit_test(rows_are_taken_in_chunks),
        cmocka_unit_test(equal_logits_give_the_lowest_id), cmocka_unit_test(the_forced_centroid_is_not_drafted),
        cmocka_unit_test(argmax_alone_needs_no_target),    cmocka_unit_test(bad_arguments_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
