/* Protects: the floor that measured steps are given in percent of. The numbers are those of the performance model,
 * worked out apart from this code for the official sizes. */
#include <math.h>

#include "floor.h"
#include "support.h"
#include "synthetic.h"

static const char *const sizes[] = {"e2b", "e4b", "12b", "26b-a4b", "31b"};

/* Thousand positions a second at 790 TFLOP/s, rounded; 3, 5 and 7 draft steps in documents of 2, 4 and 8 thousand
 * tokens. */
static void positions_of_a_second(void **state)
{
    (void)state;
    static const double expected[5][3][3] = {
        {{2579, 2122, 1582}, {1544, 1271, 948}, {1102, 907, 677}},
        {{2510, 2076, 1555}, {1501, 1242, 931}, {1071, 886, 665}},
        {{98, 95, 89}, {59, 57, 53}, {42, 40, 38}},
        {{98, 95, 89}, {59, 57, 54}, {42, 41, 38}},
        {{84, 79, 71}, {50, 47, 43}, {36, 34, 31}},
    };
    for (int size = 0; size < 5; size++) {
        mtp_drafter_config config;
        assert_ok(synthetic_config(sizes[size], 0, &config));
        const mtp_head_mode head = config.ordered ? MTP_HEAD_MASKED : MTP_HEAD_FLAT;
        for (int k = 0; k < 3; k++)
            for (int t = 0; t < 3; t++) {
                const floor_count count = floor_operations(&config, head, 2048 << t, 3 + 2 * k);
                const double rate = 790e12 / count.total / 1e3;
                if (rate < expected[size][k][t] - 0.5 || rate > expected[size][k][t] + 0.5)
                    fail_msg("%s, K %d, T %d: %g, expected %g", sizes[size], 3 + 2 * k, 2048 << t, rate,
                             expected[size][k][t]);
            }
        mtp_drafter_config_free(&config);
    }
}

/* `mega` million, rounded to multiples of `unit`. */
static void near(double operations, double mega, double unit)
{
    if (fabs(operations / 1e6 - mega) > 0.501 * unit)
        fail_msg("%g million operations, expected %g", operations / 1e6, mega);
}

/* Million operations of a position by part, forward and backward: K 3, T 4096. */
static void parts_of_a_position(void **state)
{
    (void)state;
    static const struct {
        int size;
        double unit, forward[FLOOR_PARTS], backward[FLOOR_PARTS], total;
    } rows[] = {
        {0, 0.1, {3.1, 1.6, 15.7, 37.7, 17.7, 50.3, 9.6}, {4.7, 3.1, 31.5, 75.5, 26.5, 75.5, 19.5}, 372},
        {3, 1, {23, 12, 252, 604, 132, 201, 1611}, {35, 23, 503, 1208, 198, 302, 3221}, 8325},
        {4, 1, {44, 22, 503, 604, 264, 403, 1611}, {66, 44, 1007, 1208, 396, 604, 3221}, 9997},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mtp_drafter_config config;
        assert_ok(synthetic_config(sizes[rows[i].size], 0, &config));
        const floor_count count = floor_operations(&config, config.ordered ? MTP_HEAD_MASKED : MTP_HEAD_FLAT, 4096, 3);
        for (int part = 0; part < FLOOR_PARTS; part++) {
            near(count.forward[part], rows[i].forward[part], rows[i].unit);
            near(count.backward[part], rows[i].backward[part], rows[i].unit);
        }
        near(count.total, rows[i].total, 1);
        mtp_drafter_config_free(&config);
    }
}

/* Of E2B with the loss over the whole vocabulary: 1551 million. */
static void other_heads(void **state)
{
    (void)state;
    mtp_drafter_config config;
    assert_ok(synthetic_config("e2b", 0, &config));
    near(floor_operations(&config, MTP_HEAD_FLAT, 4096, 3).total, 1551, 1);
    const floor_count masked = floor_operations(&config, MTP_HEAD_MASKED, 4096, 3);
    const floor_count hierarchical = floor_operations(&config, MTP_HEAD_HIERARCHICAL, 4096, 3);
    assert_true(hierarchical.backward[FLOOR_HEAD] * 33 == masked.backward[FLOOR_HEAD]);
    /* within its window a document costs a sliding layer what it costs one that sees all */
    const floor_count within = floor_operations(&config, MTP_HEAD_MASKED, 512, 3);
    assert_true(within.forward[FLOOR_SLIDING] * 2 == within.forward[FLOOR_FULL] * 3); /* 3 of width 256 to 1 of 512 */
    mtp_drafter_config_free(&config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(positions_of_a_second), cmocka_unit_test(parts_of_a_position),
                                       cmocka_unit_test(other_heads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
