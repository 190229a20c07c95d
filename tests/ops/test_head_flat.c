/* Protects: the flat head gives loss, argmax, logits and both gradients of the cross-entropy over the whole vocabulary,
 * whatever the size of the vocabulary, the chunk of rows, the type of e and the number of threads. */
#include "heads_check.h"

/* The vocabulary is prime in most: no block divides it. */
static const heads_shape shapes[] = {
    {HEADS_FLAT, 1, 16, 1, 1, 1, MTP_F32, MTP_F32, MTP_OVERWRITE, 0, 0.5f, 0},
    {HEADS_FLAT, 3, 20, 11, 1, 1, MTP_BF16, MTP_BF16, MTP_ACCUMULATE, 5, 0.5f, 0},
    {HEADS_FLAT, 65, 33, 1021, 1, 1, MTP_F16, MTP_F16, MTP_OVERWRITE, 0, 0.5f, 0},
    {HEADS_FLAT, 70, 48, 1543, 1, 1, MTP_F32, MTP_F32, MTP_ACCUMULATE, 3, 0.5f, 0},
    {HEADS_FLAT, 130, 40, 2579, 1, 1, MTP_F32, MTP_BF16, MTP_OVERWRITE, 1, 0.5f, 1}, /* chunks of the least size */
    {HEADS_FLAT, 700, 16, 1201, 1, 1, MTP_F32, MTP_F32, MTP_OVERWRITE, 0, 0.5f, 0},  /* tiles of one chunk */
    {HEADS_FLAT, 70, 16, 34129, 1, 1, MTP_F32, MTP_F32, MTP_ACCUMULATE, 0, 0.5f, 1}, /* more blocks than partial sums */
    {HEADS_FLAT, 67, 20, 149, 7, 1, MTP_F32, MTP_BF16, MTP_OVERWRITE, 3, 0.5f, 0},   /* slots in an order */
    {HEADS_FLAT, 70, 16, 431, 6, 1, MTP_BF16, MTP_F32, MTP_ACCUMULATE, 0, 0.5f, 1},
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

static void formula(mtp_device *device)
{
    heads_check_formulas(device, shapes, NUM_SHAPES);
}

static void properties(mtp_device *device)
{
    const heads_shape small = {HEADS_FLAT, 5, 16, 23, 1, 1, MTP_F32, MTP_F32, MTP_OVERWRITE, 0, 0.5f, 0};
    const heads_shape alone[] = {shapes[2], shapes[3], shapes[4]};
    heads_check_properties(device, shapes[4], alone, sizeof alone / sizeof *alone, small);
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
    return heads_hash(device, shapes[4]) * 31 + heads_hash(device, shapes[5]);
}

static void threads_do_not_change_a_bit(void **state)
{
    (void)state;
    ops_same_bits(run_once);
}

/* Whole numbers: every product is exact, so equal logits are equal to the bit. */
static void ties(mtp_device *device)
{
    test_rng rng = {.state = 21};
    const heads_shape s = {HEADS_FLAT, 40, 16, 3001, 1, 1, MTP_F32, MTP_F32, MTP_OVERWRITE, 0, 1, 0};
    const heads h = heads_make(&rng, s);
    for (int64_t i = 0; i < s.R * s.H; i++) ops_row(&h.x, 0)[i] = (float)(1 + test_below(&rng, 3));
    for (int64_t i = 0; i < h.V * s.H; i++) ops_row(&h.e, 0)[i] = (float)test_below(&rng, 2);
    static const int64_t best[] = {7, 2050, 17, 3000, 1025};
    for (size_t i = 0; i < 5; i++)
        for (int64_t j = 0; j < s.H; j++) ops_row(&h.e, best[i])[j] = 1;
    for (int64_t j = 0; j < s.H; j++) ops_row(&h.e, 3)[j] = j ? 1.0f : 0.0f; /* second best, before all of them */
    for (int64_t t = 0; t < 7; t++) ops_row(&h.e, t)[1] = 0;
    assert_ok(heads_run(device, HEADS_FLAT, heads_args(&h)));
    for (int64_t r = 0; r < s.R; r++) assert_int_equal(h.argmax[r], 7);
    for (int64_t j = 0; j < s.H; j++) ops_row(&h.e, 7)[j] = 0;
    assert_ok(heads_run(device, HEADS_FLAT, heads_args(&h)));
    for (int64_t r = 0; r < s.R; r++) assert_true(h.argmax[r] > 7 && h.argmax[r] <= 17);
}

/* The same with slots in an order, over several blocks: only two kinds of tokens. */
static void ties_by_slot(mtp_device *device)
{
    test_rng rng = {.state = 25};
    const heads_shape s = {HEADS_FLAT, 40, 16, 431, 6, 1, MTP_F32, MTP_F32, MTP_OVERWRITE, 0, 1, 0};
    const heads h = heads_make(&rng, s);
    for (int64_t i = 0; i < s.R * s.H; i++) ops_row(&h.x, 0)[i] = h.x.values[i] = (float)(1 + test_below(&rng, 3));
    for (int64_t i = 0; i < h.V; i++)
        for (int64_t j = 0; j < s.H; j++)
            ops_row(&h.e, i)[j] = h.e.values[i * s.H + j] = h.order[i] % 40 == 39 ? 1.0f : 0.0f;
    assert_ok(heads_run(device, HEADS_FLAT, heads_args(&h)));
    for (int64_t r = 0; r < s.R; r++) assert_int_equal(h.argmax[r], 39);
}

static void equal_logits_give_the_lowest_id(void **state)
{
    (void)state;
    ops_each_isa(ties);
    ops_each_isa(ties_by_slot);
}

static void large_logits_stay_finite(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 2);
    test_rng rng = {.state = 22};
    const heads_shape s = {HEADS_FLAT, 9, 16, 1100, 1, 1, MTP_F32, MTP_F32, MTP_OVERWRITE, 0, 60, 0};
    const heads h = heads_make(&rng, s);
    const heads_result want = heads_expected(&h);
    assert_ok(heads_run(device, s.mode, heads_args(&h)));
    ops_expect("loss", &h.loss, want.loss, heads_tolerance);
    ops_release();
}

static void argmax_alone_needs_no_target(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 2);
    test_rng rng = {.state = 23};
    const heads h = heads_make(&rng, shapes[3]);
    const heads_result want = heads_expected(&h);
    mtp_head_args a = heads_args(&h);
    a.target.data = a.scale.data = a.loss.data = a.dx.data = a.de.data = a.logits.data = NULL;
    assert_ok(heads_run(device, HEADS_FLAT, a));
    for (int64_t r = 0; r < h.s.R; r++) assert_int_equal(h.argmax[r], want.argmax[r]);
    ops_release();
}

static void bad_arguments_are_named(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    test_rng rng = {.state = 24};
    const heads h = heads_make(&rng, shapes[1]);
    const mtp_head_args good = heads_args(&h);
    mtp_head_args a = good;
    a.target.data = NULL;
    assert_fails(heads_run(device, HEADS_FLAT, a), MTP_E_ARGUMENT, "need target");
    a = good;
    a.scale.data = NULL;
    assert_fails(heads_run(device, HEADS_FLAT, a), MTP_E_ARGUMENT, "scale is missing");
    a = good;
    a.e.dtype = MTP_I32;
    assert_fails(heads_run(device, HEADS_FLAT, a), MTP_E_ARGUMENT, "e is I32");
    a = good;
    a.de = mtp_view_rows(a.de, 0, 5);
    assert_fails(heads_run(device, HEADS_FLAT, a), MTP_E_ARGUMENT, "de is F32 [5, 20]; it must be F32 [11, 20]");
    h.target[1] = 11;
    assert_fails(heads_run(device, HEADS_FLAT, good), MTP_E_ARGUMENT, "target[1] is 11");
    h.target[1] = 1;
    a = good;
    a.order = mtp_view_2d(h.order, MTP_I32, 11, 1);
    assert_fails(heads_run(device, HEADS_FLAT, a), MTP_E_ARGUMENT, "slot_of is missing");
    a = good;
    a.scratch = ops_scratch(64);
    assert_fails(ops_backend()->head_flat(device, &a), MTP_E_ARGUMENT, "scratch");
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_isa_follows_the_formula), cmocka_unit_test(optional_outputs_rows_and_differences),
        cmocka_unit_test(threads_do_not_change_a_bit),  cmocka_unit_test(equal_logits_give_the_lowest_id),
        cmocka_unit_test(large_logits_stay_finite),     cmocka_unit_test(argmax_alone_needs_no_target),
        cmocka_unit_test(bad_arguments_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
