/* Protects: the second level of the hierarchical head is the cross-entropy over the tokens of the target's centroid,
 * with both gradients, whatever else is computed with a row. */
#include "heads_check.h"

static const heads_shape shapes[] = {
    {HEADS_HIERARCHICAL, 1, 16, 1, 1, 1, MTP_F32, MTP_F32, MTP_OVERWRITE, 0, 0.5f, 0},
    {HEADS_HIERARCHICAL, 7, 20, 5, 3, 2, MTP_BF16, MTP_BF16, MTP_ACCUMULATE, 5, 0.5f, 0},
    {HEADS_HIERARCHICAL, 900, 33, 3, 7, 3, MTP_F32, MTP_F16, MTP_OVERWRITE, 2, 0.5f, 0},
    {HEADS_HIERARCHICAL, 90, 144, 7, 131, 2, MTP_F32, MTP_F32, MTP_ACCUMULATE, 0, 0.3f, 0},
    {HEADS_HIERARCHICAL, 9, 16, 301, 3, 1, MTP_F32, MTP_F32, MTP_OVERWRITE, 0, 0.5f, 0},
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

static void formula(mtp_device *device)
{
    heads_check_formulas(device, shapes, NUM_SHAPES);
}

static void properties(mtp_device *device)
{
    const heads_shape small = {HEADS_HIERARCHICAL, 5, 16, 3, 5, 1, MTP_F32, MTP_F32, MTP_OVERWRITE, 0, 0.5f, 0};
    const heads_shape alone[] = {shapes[2], shapes[3]};
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
    return heads_hash(device, shapes[2]) * 31 + heads_hash(device, shapes[3]);
}

static void threads_do_not_change_a_bit(void **state)
{
    (void)state;
    ops_same_bits(run_once);
}

static void target_is_needed(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    test_rng rng = {.state = 41};
    const heads h = heads_make(&rng, shapes[1]);
    mtp_head_args a = heads_args(&h);
    a.target.data = NULL;
    assert_fails(heads_run(device, HEADS_HIERARCHICAL, a), MTP_E_ARGUMENT, "target is missing");
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_isa_follows_the_formula),
        cmocka_unit_test(optional_outputs_rows_and_differences),
        cmocka_unit_test(threads_do_not_change_a_bit),
        cmocka_unit_test(target_is_needed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
