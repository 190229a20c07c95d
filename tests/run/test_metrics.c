/* Protects: metrics.jsonl and the TensorBoard events say the same, with known values; going on from a step drops
 * exactly what will be done again; the progress line shows what it promises. */
#include "support.h"

#include <jansson.h>
#include <unistd.h>

#include "base/file.h"
#include "run/progress.h"

static mtp__update update_of(int64_t step)
{
    mtp__update u = {
        .step = step, .epoch = 2, .rows = 100, .tokens = 130, .loss = 2.5, .grad_norm = 0.75, .learning_rate = 1e-3};
    for (int k = 0; k < 2; k++) {
        u.counts[k] = 80 - 40 * k;
        u.sums[k] =
            (mtp__step_sums){.loss = 160, .centroid_loss = 40, .count = u.counts[k], .correct = 20, .missed = 8};
    }
    return u;
}

static mtp__metrics open_metrics(const char *run, int64_t step, int64_t last_eval_step, bool ordered)
{
    mtp__metrics metrics = {.lines = {.fd = -1}, .K = 2, .ordered = ordered, .centroid_term = ordered};
    assert_ok(mtp__metrics_open(run, step, last_eval_step, &metrics));
    return metrics;
}

static json_t *line_of(const char *run, int number)
{
    char *text = test_read(test_path("%s/metrics.jsonl", run), NULL), *line = text;
    for (int i = 1; i < number && line; i++) line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL;
    json_t *value = line ? json_loads(line, JSON_DISABLE_EOF_CHECK, NULL) : NULL;
    free(text);
    return value;
}

static double number_at(const json_t *array, size_t index)
{
    return json_number_value(json_array_get(array, index));
}

static const mtp__pace pace = {.rows_per_second = 800, .data_wait = 0.25, .peak_memory_mib = 64};

static void a_line_has_the_figures(void **state)
{
    (void)state;
    const char *run = test_dir();
    mtp__metrics metrics = open_metrics(run, -1, -1, true);
    const mtp__update u = update_of(7);
    assert_ok(mtp__metrics_train(&metrics, &u, &pace));
    assert_ok(mtp__metrics_close(&metrics));
    json_t *line = line_of(run, 1);
    assert_string_equal(json_string_value(json_object_get(line, "kind")), "train");
    assert_int_equal(json_integer_value(json_object_get(line, "step")), 7);
    assert_int_equal(json_integer_value(json_object_get(line, "epoch")), 2);
    assert_int_equal(json_integer_value(json_object_get(line, "rows")), 100);
    assert_int_equal(json_integer_value(json_object_get(line, "tokens")), 130);
    assert_true(json_real_value(json_object_get(line, "loss")) == 2.5);
    assert_true(json_real_value(json_object_get(line, "grad_norm")) == 0.75);
    assert_true(json_real_value(json_object_get(line, "learning_rate")) == 1e-3);
    assert_true(number_at(json_object_get(line, "step_loss"), 0) == 2);
    assert_true(number_at(json_object_get(line, "step_loss"), 1) == 4);
    assert_true(number_at(json_object_get(line, "centroid_loss"), 1) == 1);
    assert_true(number_at(json_object_get(line, "accuracy"), 0) == 0.25);
    assert_true(number_at(json_object_get(line, "accuracy"), 1) == 0.5);
    assert_true(number_at(json_object_get(line, "centroid_miss"), 0) == 0.1);
    assert_true(number_at(json_object_get(line, "supervised"), 1) == 40);
    assert_true(json_real_value(json_object_get(json_object_get(line, "time"), "rows_per_second")) == 800);
    json_decref(line);
}

/* A step without a supervised row divides by nothing, and a dense head has no centroids. */
static void empty_steps_and_dense_heads(void **state)
{
    (void)state;
    const char *run = test_dir();
    mtp__metrics metrics = open_metrics(run, -1, -1, false);
    mtp__update u = update_of(1);
    u.counts[1] = 0;
    u.sums[1] = (mtp__step_sums){0};
    assert_ok(mtp__metrics_train(&metrics, &u, &pace));
    assert_ok(mtp__metrics_close(&metrics));
    json_t *line = line_of(run, 1);
    assert_true(number_at(json_object_get(line, "accuracy"), 1) == 0);
    assert_true(json_is_null(json_object_get(line, "centroid_miss")));
    assert_true(json_is_null(json_object_get(line, "centroid_loss")));
    json_decref(line);
}

static bool events_have(const char *run, const char *tag)
{
    mtp__name_list names;
    assert_ok(mtp__dir_list(test_path("%s/tb", run), MTP__LIST_FILES, NULL, &names));
    assert_int_equal(names.count, 1);
    size_t size;
    char *bytes = test_read(test_path("%s/tb/%s", run, names.names[0]), &size);
    const bool found = memmem(bytes, size, tag, strlen(tag)) != NULL;
    free(bytes);
    mtp__name_list_free(&names);
    return found;
}

static void events_bear_the_names_of_the_lines(void **state)
{
    (void)state;
    static const char *const tags[] = {"train/loss",
                                       "train/accuracy/1",
                                       "train/time/data_wait",
                                       "eval/rounds/mean_accepted",
                                       "eval/rounds/acceptance/0",
                                       "eval/positions/conditional/1",
                                       "eval/weighted_loss"};
    const char *run = test_dir();
    mtp__metrics metrics = open_metrics(run, -1, -1, true);
    const mtp__update u = update_of(3);
    const mtp_evaluation e = {.num_speculative_steps = 2, .rounds = {.count = 4, .accepted = {2, 1}}};
    assert_ok(mtp__metrics_train(&metrics, &u, &pace));
    assert_ok(mtp__metrics_eval(&metrics, 3, &e));
    assert_ok(mtp__metrics_close(&metrics));
    for (size_t i = 0; i < sizeof tags / sizeof *tags; i++)
        if (!events_have(run, tags[i])) fail_msg("no event with the tag %s", tags[i]);
    assert_false(events_have(run, "unix"));
    assert_false(events_have(run, "train/step\025")); /* a tag ends where the value begins */
    json_t *line = line_of(run, 2), *rounds = json_object_get(line, "rounds");
    assert_true(json_real_value(json_object_get(rounds, "mean_accepted")) == 0.75);
    assert_true(number_at(json_object_get(rounds, "acceptance"), 0) == 0.5);
    assert_true(number_at(json_object_get(rounds, "conditional"), 1) == 0.5);
    json_decref(line);
}

/* Three steps and two evaluations; on from step 2, whose evaluation was not finished; the last line was cut by a kill.
 */
static void going_on_drops_what_will_be_done_again(void **state)
{
    (void)state;
    const char *run = test_dir(), *path = test_path("%s/metrics.jsonl", run);
    mtp__metrics metrics = open_metrics(run, -1, -1, true);
    const mtp_evaluation e = {.num_speculative_steps = 2};
    for (int64_t step = 1; step <= 3; step++) {
        const mtp__update u = update_of(step);
        assert_ok(mtp__metrics_train(&metrics, &u, &pace));
        if (step < 3) assert_ok(mtp__metrics_eval(&metrics, step, &e));
    }
    assert_ok(mtp__metrics_close(&metrics));
    size_t size;
    char *text = test_read(path, &size), *third = text;
    for (int i = 0; i < 3; i++) third = strchr(third, '\n') + 1;
    test_write(path, text, size - 40);
    metrics = open_metrics(run, 2, 1, true);
    assert_ok(mtp__metrics_close(&metrics));
    size_t kept_size;
    char *kept = test_read(path, &kept_size);
    assert_int_equal(kept_size, third - text); /* step 1, its evaluation, step 2 */
    assert_memory_equal(kept, text, kept_size);
    free(kept);
    free(text);
    metrics = open_metrics(run, -1, -1, true); /* and afresh there is nothing */
    assert_ok(mtp__metrics_close(&metrics));
    text = test_read(path, &size);
    assert_int_equal(size, 0);
    free(text);
}

static void the_progress_line(void **state)
{
    (void)state;
    mtp__progress progress;
    mtp__metrics metrics = {.K = 2, .ordered = true};
    const mtp__update u = update_of(120);
    char line[MTP__PROGRESS_LINE];
    mtp__progress_start(&progress, 20);
    mtp__progress_skip(&progress, -200); /* as if begun 200 seconds ago: 2 seconds a step */
    mtp__progress_line(&progress, &metrics, &u, &pace, 2120, line);
    assert_string_equal(line, "step 120/2120  loss 2.5000  acc 0.250 0.500  miss 0.100 0.200  lr 1.00e-03  800 rows/s  "
                              "wait 25%  64 MiB  ETA 1:06:40");
    metrics.ordered = false;
    mtp__progress_line(&progress, &metrics, &u, &pace, 180, line);
    assert_string_equal(line, "step 120/180  loss 2.5000  acc 0.250 0.500  lr 1.00e-03  800 rows/s  wait 25%  64 MiB  "
                              "ETA 2:00");
}

/* Many draft steps and absurd numbers stay inside the line. */
static void the_progress_line_has_an_end(void **state)
{
    (void)state;
    mtp__progress progress;
    mtp__metrics metrics = {.K = 64, .ordered = true};
    mtp__update u = {.step = INT64_MAX / 2, .loss = 1e300, .learning_rate = 1e-300};
    char line[MTP__PROGRESS_LINE + 1];
    line[MTP__PROGRESS_LINE] = 'x';
    mtp__progress_start(&progress, 0);
    const mtp__pace absurd = {1e300, 1e300, 1e300};
    mtp__progress_line(&progress, &metrics, &u, &absurd, INT64_MAX, line);
    assert_true(strlen(line) < MTP__PROGRESS_LINE);
    assert_int_equal(line[MTP__PROGRESS_LINE], 'x');
}

static void pace_counts_since_the_last_line(void **state)
{
    (void)state;
    mtp__progress progress;
    mtp__progress_start(&progress, 0);
    mtp__progress_skip(&progress, -10);
    progress.rows = 500;
    const mtp__pace first = mtp__progress_pace(&progress, 5, true);
    assert_true(first.rows_per_second > 45 && first.rows_per_second <= 50);
    assert_true(first.data_wait > 0.45 && first.data_wait <= 0.5);
    assert_true(first.peak_memory_mib > 1);
    progress.last -= 10;
    progress.rows = 100;
    const mtp__pace second = mtp__progress_pace(&progress, 6, true);
    assert_true(second.rows_per_second > 9 && second.rows_per_second <= 10);
    assert_true(second.data_wait > 0.09 && second.data_wait <= 0.1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_line_has_the_figures),
        cmocka_unit_test(empty_steps_and_dense_heads),
        cmocka_unit_test(events_bear_the_names_of_the_lines),
        cmocka_unit_test(going_on_drops_what_will_be_done_again),
        cmocka_unit_test(the_progress_line),
        cmocka_unit_test(the_progress_line_has_an_end),
        cmocka_unit_test(pace_counts_since_the_last_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
