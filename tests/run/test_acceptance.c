/* Protects: the arithmetic of acceptance: what a greedy verifier keeps, the walk of a server, conditional rates, means
 * per sample against pooled, length buckets, and that the JSON and the table say the same numbers. Every expected
 * number is worked out by hand. */
#include "support.h"

#include <jansson.h>
#include <math.h>

#include "run/acceptance.h"

static void keeps_up_to_first_mismatch(void **state)
{
    (void)state;
    /* [K = 3, R = 4]: row 0 all right, row 1 none, row 2 the first, row 3 right again after a mistake */
    const int32_t targets[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    const int32_t drafts[] = {1, 0, 3, 4, 5, 6, 0, 0, 9, 10, 11, 12};
    const int32_t want[] = {3, 0, 1, 1};
    for (int64_t r = 0; r < 4; r++) assert_int_equal(mtp__acceptance_kept(drafts, targets, 4, 3, r), want[r]);
}

static void rounds_start_at_the_prompts_end(void **state)
{
    (void)state;
    assert_int_equal(mtp__acceptance_first(7), 6);
    assert_int_equal(mtp__acceptance_first(1), 0);
    assert_int_equal(mtp__acceptance_first(0), 0);
    /* prompt 7, K 3: t from 6 while t + 4 < S */
    assert_int_equal(mtp__acceptance_positions(7, 10, 3), 0);
    assert_int_equal(mtp__acceptance_positions(7, 11, 3), 1);
    assert_int_equal(mtp__acceptance_positions(7, 20, 3), 10);
    assert_int_equal(mtp__acceptance_positions(0, 5, 3), 1);
    assert_int_equal(mtp__acceptance_positions(20, 20, 3), 0); /* nothing supervised */
    assert_int_equal(mtp__acceptance_positions(0, 1, 64), 0);
}

static void buckets_are_powers_of_two(void **state)
{
    (void)state;
    const int64_t values[] = {0, 1, 2, 3, 4, 7, 8, 262143, 262144, INT64_MAX};
    const int32_t want[] = {0, 1, 2, 2, 3, 3, 4, 18, 19, MTP_EVAL_BUCKETS - 1};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        assert_int_equal(mtp__acceptance_bucket(values[i]), want[i]);
}

/* Two documents, K = 2. The first starts at t = 6 and keeps 1 0 2 0 0 1: rounds at 6 (keeps 1), 8 (keeps 2), 11 (keeps
 * 1). The second is too short for a round at all; the third starts at 0 and keeps 0 0: rounds at 0 and 1. */
static mtp_evaluation walked(mtp_sample_figures samples[3])
{
    mtp_evaluation evaluation = {.num_speculative_steps = 2, .num_samples = 3, .samples = samples, .ordered = true};
    memset(samples, 0, 3 * sizeof *samples);
    for (int64_t i = 0; i < 3; i++) samples[i].sample = i;
    mtp__acceptance_document(&evaluation, 0, 6, 15, (const int32_t[]){1, 0, 2, 0, 0, 1}, 6);
    mtp__acceptance_document(&evaluation, 2, 0, 5, (const int32_t[]){0, 0}, 2);
    mtp__acceptance_finish(&evaluation);
    return evaluation;
}

static void walks_as_a_server_does(void **state)
{
    (void)state;
    mtp_sample_figures samples[3];
    const mtp_evaluation e = walked(samples);
    assert_int_equal(e.rounds.count, 5);
    assert_int_equal(e.rounds.accepted[0], 3);
    assert_int_equal(e.rounds.accepted[1], 1);
    assert_int_equal(e.positions.count, 8);
    assert_int_equal(e.positions.accepted[0], 3);
    assert_int_equal(e.positions.accepted[1], 1);
    assert_int_equal(samples[0].rounds.count, 3);
    assert_int_equal(samples[0].rounds.accepted[0], 3);
    assert_int_equal(samples[0].positions.count, 6);
    assert_int_equal(samples[1].positions.count, 0);
    assert_int_equal(samples[2].rounds.count, 2);
    assert_int_equal(samples[2].rounds.accepted[0], 0);
    assert_int_equal(e.num_short, 1);
}

static void rates_are_of_what_they_say(void **state)
{
    (void)state;
    mtp_sample_figures samples[3];
    const mtp_evaluation e = walked(samples);
    assert_float_equal(mtp_acceptance_rate(&e.rounds, 0), 3.0 / 5, 1e-15);
    assert_float_equal(mtp_acceptance_rate(&e.rounds, 1), 1.0 / 5, 1e-15);
    assert_float_equal(mtp_acceptance_conditional(&e.rounds, 0), 3.0 / 5, 1e-15);
    assert_float_equal(mtp_acceptance_conditional(&e.rounds, 1), 1.0 / 3, 1e-15);
    assert_float_equal(mtp_acceptance_length(&e.rounds, 2), 4.0 / 5, 1e-15);
    /* per sample: document 0 has 3/3 and 1/3, the last one 0; the one without rounds does not count */
    assert_float_equal(e.rounds_sample_mean[0], (1.0 + 0) / 2, 1e-15);
    assert_float_equal(e.rounds_sample_mean[1], (1.0 / 3 + 0) / 2, 1e-15);
    assert_float_equal(e.rounds_length_sample_mean, (4.0 / 3 + 0) / 2, 1e-15);
    assert_float_equal(e.positions_sample_mean[0], (3.0 / 6 + 0) / 2, 1e-15);
    assert_float_equal(e.positions_length_sample_mean, (4.0 / 6 + 0) / 2, 1e-15);
    const mtp_acceptance none = {0};
    assert_float_equal(mtp_acceptance_rate(&none, 0), 0, 0);
    assert_float_equal(mtp_acceptance_conditional(&none, 1), 0, 0);
    assert_float_equal(mtp_acceptance_length(&none, 3), 0, 0);
}

static void buckets_split_the_pool(void **state)
{
    (void)state;
    mtp_sample_figures samples[3];
    const mtp_evaluation e = walked(samples);
    assert_int_equal(e.num_position_buckets, 5); /* up to 8..15 */
    assert_int_equal(e.num_length_buckets, 5);   /* length 15 */
    assert_int_equal(e.by_position[4].begin, 8);
    assert_int_equal(e.by_position[4].end, 16);
    assert_int_equal(e.by_position[0].begin, 0);
    assert_int_equal(e.by_position[0].end, 1);
    assert_int_equal(e.by_position[3].positions.count, 2); /* t = 6, 7 */
    assert_int_equal(e.by_position[3].rounds.count, 1);
    assert_int_equal(e.by_position[4].positions.count, 4); /* t = 8 .. 11 */
    assert_int_equal(e.by_position[4].rounds.count, 2);
    assert_int_equal(e.by_position[4].rounds.accepted[0], 2);
    assert_int_equal(e.by_length[3].positions.count, 2); /* length 5 */
    assert_int_equal(e.by_length[4].positions.count, 6);
    int64_t rounds = 0, accepted = 0;
    for (int32_t i = 0; i < MTP_EVAL_BUCKETS; i++) {
        rounds += e.by_position[i].rounds.count;
        accepted += e.by_position[i].rounds.accepted[0];
    }
    assert_int_equal(rounds, e.rounds.count);
    assert_int_equal(accepted, e.rounds.accepted[0]);
}

static double real_at(json_t *root, const char *object, const char *key, size_t index)
{
    json_t *value = json_object_get(object ? json_object_get(root, object) : root, key);
    if (json_is_array(value)) value = json_array_get(value, index);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

static void json_says_the_numbers(void **state)
{
    (void)state;
    mtp_sample_figures samples[3];
    mtp_evaluation e = walked(samples);
    e.has_loss = true;
    e.steps[0] = (mtp_step_figures){.count = 9, .loss = 2.5, .accuracy = 0.25, .centroid_miss = 0.125};
    e.steps[1] = (mtp_step_figures){.count = 8, .loss = NAN};
    e.loss = 1.5;
    char *text = NULL;
    assert_ok(mtp_evaluation_json(&e, &(mtp_evaluation_labels){.model = "a \"model\""}, &text));
    assert_null(strchr(text, '\n'));
    json_t *root = json_loads(text, 0, NULL);
    assert_non_null(root);
    assert_string_equal(json_string_value(json_object_get(root, "model")), "a \"model\"");
    assert_true(json_is_null(json_object_get(root, "verifier")));
    assert_float_equal(real_at(root, "rounds", "count", 0), 5, 0);
    assert_float_equal(real_at(root, "rounds", "mean_accepted", 0), 0.8, 1e-15);
    assert_float_equal(real_at(root, "rounds", "accepted_length_with_bonus", 0), 1.8, 1e-15);
    assert_float_equal(real_at(root, "rounds", "accepted", 1), 1, 0);
    assert_float_equal(real_at(root, "rounds", "conditional", 1), 1.0 / 3, 1e-15);
    assert_float_equal(real_at(root, "positions", "acceptance", 0), 3.0 / 8, 1e-15);
    assert_float_equal(real_at(root, NULL, "loss", 0), 2.5, 0);
    assert_true(json_is_null(json_array_get(json_object_get(root, "loss"), 1)));
    assert_float_equal(real_at(root, NULL, "centroid_miss", 0), 0.125, 0);
    assert_float_equal(real_at(root, NULL, "weighted_loss", 0), 1.5, 0);
    assert_float_equal(real_at(root, NULL, "short_samples", 0), 1, 0);
    assert_int_equal(json_array_size(json_object_get(root, "samples")), 3);
    json_t *positions = json_object_get(json_object_get(root, "buckets"), "position");
    assert_int_equal(json_array_size(positions), 4); /* 0, 1, 4..7, 8..15; 2..3 is empty and left out */
    json_decref(root);
    free(text);

    e.ordered = e.has_loss = false;
    assert_ok(mtp_evaluation_json(&e, &(mtp_evaluation_labels){0}, &text));
    assert_non_null(strstr(text, "\"loss\": null"));
    assert_non_null(strstr(text, "\"centroid_miss\": null"));
    free(text);
}

static void table_says_the_numbers(void **state)
{
    (void)state;
    mtp_sample_figures samples[3];
    const mtp_evaluation before = walked(samples);
    mtp_evaluation after = before;
    after.rounds.accepted[0] = 4;
    const mtp_evaluation *columns[] = {&before, &after};
    const char *titles[] = {"before", "after"};
    char *text = NULL;
    assert_ok(mtp_evaluation_table(columns, titles, 2, &text));
    assert_non_null(strstr(text, "      before       after\n"));
    assert_non_null(strstr(text, "accepted length without the bonus token          0.800       1.000\n"));
    assert_non_null(strstr(text, "accepted length with the bonus token             1.800       2.000\n"));
    assert_non_null(strstr(text, "given the draft before, draft 2                  0.333       0.250\n"));
    assert_null(strstr(text, "loss"));
    free(text);

    after.num_speculative_steps = 3;
    assert_fails(mtp_evaluation_table(columns, titles, 2, &text), MTP_E_ARGUMENT, "num_speculative_steps");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keeps_up_to_first_mismatch), cmocka_unit_test(rounds_start_at_the_prompts_end),
        cmocka_unit_test(buckets_are_powers_of_two),  cmocka_unit_test(walks_as_a_server_does),
        cmocka_unit_test(rates_are_of_what_they_say), cmocka_unit_test(buckets_split_the_pool),
        cmocka_unit_test(json_says_the_numbers),      cmocka_unit_test(table_says_the_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
