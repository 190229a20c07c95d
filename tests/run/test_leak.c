/* Protects: the leak test itself. On the sample and on reference cases it holds for every row; it notices a key that a
 * row sees (the newest one, the oldest of the window) when that key is changed, names the row, and counts what it
 * compared; it compares every output, to the bit or to the stated tolerance. */
#include "support.h"

#include "opened.h"
#include "run/leak.h"

static test_opened open_case(const char *name)
{
    return test_open(test_path("goldens/%s/assistant", name), test_path("goldens/%s/verifier", name),
                     test_path("goldens/%s/samples", name));
}

static void assert_holds(const mtp_leak_report *report)
{
    for (int kind = 0; kind < MTP_LEAK_KINDS; kind++)
        if (!report->properties[kind].holds)
            fail_msg("%s: %s", report->properties[kind].name, report->properties[kind].first);
    assert_true(report->holds);
}

static void holds_on_reference_cases(void **state)
{
    (void)state;
    static const char *const cases[] = {"e2b_masked", "e2b_bf16_data", "m12b_flat", "e2b_position_plus_one"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_opened o = open_case(cases[i]);
        mtp_leak_report report;
        const mtp_leak_options options = {.rows_per_document = 1 << 20, .position_offset = i == 3};
        assert_ok(mtp_leak_check(o.drafter, o.verifier, o.dataset, &options, &report));
        assert_holds(&report);
        const int64_t rows = report.properties[MTP_LEAK_FUTURE].rows;
        assert_true(rows >= 40); /* every row of every document */
        assert_int_equal(report.documents, 3);
        assert_int_equal(report.properties[MTP_LEAK_ROWS].rows, rows);
        assert_int_equal(report.properties[MTP_LEAK_DOCUMENTS].rows, rows);
        assert_int_equal(report.properties[MTP_LEAK_ALONE].rows, rows);
        assert_int_equal(report.properties[MTP_LEAK_PADDED].rows, rows);
        assert_int_equal(report.properties[MTP_LEAK_CHUNKS].rows, 4 * rows);
        assert_int_equal(report.properties[MTP_LEAK_CONTROL].rows, rows);
        assert_int_equal(report.properties[MTP_LEAK_CONTROL].moved, rows);
        assert_true(report.properties[MTP_LEAK_WINDOW].rows > 0);
        assert_true(report.properties[MTP_LEAK_WINDOW].rows < rows); /* the first ones see their whole past */
        test_close(&o);
    }
}

static void holds_on_the_sample(void **state)
{
    (void)state;
    test_opened o = test_open("sample/drafter_reference", "sample/verifier", "sample/eval");
    mtp_leak_report report;
    const mtp_leak_options options = {.rows_per_document = 9, .tokens_per_batch = 1500};
    assert_ok(mtp_leak_check(o.drafter, o.verifier, o.dataset, &options, &report));
    assert_holds(&report);
    assert_int_equal(report.documents, 20);
    assert_int_equal(report.skipped, 0);
    assert_int_equal(report.properties[MTP_LEAK_FUTURE].rows, 180);
    test_close(&o);
}

/* The pieces as mtp_leak_check uses them, over all samples of the data set at once. */
static mtp__leak open_leak(const test_opened *o, int64_t per_document)
{
    const int64_t samples[] = {0, 1, 2};
    mtp__leak leak = {.drafter = o->drafter, .verifier = o->verifier, .dataset = o->dataset};
    leak.options = (mtp_leak_options){.rows_per_document = per_document};
    leak.config = (mtp_step_config){
        .num_speculative_steps = 3, .head_mode = MTP_HEAD_MASKED, .step_weight_beta = 0.6, .centroid_weight = 1};
    leak.rule = (mtp__leak_rule){.window = o->drafter->config.sliding_window, .future = 1};
    assert_ok(mtp__leak_open(&leak, samples, 3));
    return leak;
}

/* A rule narrower by one key than what the drafter reads makes that key forbidden: the drafter "leaks". */
static void finds_a_planted_leak(void **state)
{
    (void)state;
    test_opened o = open_case("e2b_masked");
    mtp__leak leak = open_leak(&o, 1 << 20);
    mtp_leak_property property = {.holds = true};
    leak.rule.future = 0; /* key j = t counts as the future */
    assert_ok(mtp__leak_test(&leak, MTP_LEAK_FUTURE, &property));
    assert_false(property.holds);
    assert_int_equal(property.moved, property.rows);
    assert_non_null(strstr(property.first, "sample_0000.safetensors, position "));
    assert_non_null(strstr(property.first, ", draft 1: hidden"));

    leak.rule.future = 1;
    leak.rule.window--; /* key j = t - W + 1 counts as outside */
    property = (mtp_leak_property){.holds = true};
    assert_ok(mtp__leak_test(&leak, MTP_LEAK_WINDOW, &property));
    assert_false(property.holds);
    assert_int_equal(property.moved, property.rows);
    assert_true(property.rows > 0);
    assert_non_null(strstr(property.first, ", draft 1: hidden"));

    leak.rule.window++;
    property = (mtp_leak_property){.holds = true};
    assert_ok(mtp__leak_test(&leak, MTP_LEAK_WINDOW, &property));
    assert_true(property.holds);
    assert_int_equal(property.moved, 0);
    mtp__leak_close(&leak);
    test_close(&o);
}

/* A control that moves nothing is a failure: the drafter reads no K/V when its attention's output has no weight. */
static void control_must_move(void **state)
{
    (void)state;
    test_opened o = open_case("e2b_masked");
    mtp__leak leak = open_leak(&o, 4);
    mtp_leak_property property = {.holds = true};
    assert_ok(mtp__leak_test(&leak, MTP_LEAK_CONTROL, &property));
    assert_true(property.holds);
    assert_int_equal(property.rows, 12);
    assert_int_equal(property.moved, 12);
    assert_string_equal(property.first, "");

    for (int64_t l = 0; l < o.drafter->config.num_layers; l++)
        memset(o.drafter->layers[l].o_proj->value, 0, (size_t)o.drafter->layers[l].o_proj->count * sizeof(float));
    property = (mtp_leak_property){.holds = true};
    assert_ok(mtp__leak_test(&leak, MTP_LEAK_CONTROL, &property));
    assert_false(property.holds);
    assert_int_equal(property.moved, 0);
    assert_non_null(strstr(property.first, "sample_0000.safetensors, position "));
    assert_non_null(strstr(property.first, ": nothing moved"));
    mtp__leak_close(&leak);
    test_close(&o);
}

static void rows_are_spread(void **state)
{
    (void)state;
    test_opened o = open_case("e2b_masked");
    mtp__leak all = open_leak(&o, 1 << 20), some = open_leak(&o, 3), one = open_leak(&o, 1);
    assert_int_equal(some.probed.num_rows, 9);
    assert_int_equal(one.probed.num_rows, 3);
    for (int64_t d = 0, first = 0, end; d < 3; d++, first = end) {
        for (end = first; end < all.probed.num_rows && all.probed.document[end] == d;) end++;
        assert_int_equal(some.probed.position[3 * d], all.probed.position[first]);
        assert_int_equal(some.probed.position[3 * d + 2], all.probed.position[end - 1]);
        assert_int_equal(one.probed.position[d], all.probed.position[first]);
    }
    mtp__leak_close(&all);
    mtp__leak_close(&some);
    mtp__leak_close(&one);
    test_close(&o);
}

/* Two rows of two steps that are equal; then each output moves alone, by one unit in the last place. */
static void compares_every_output(void **state)
{
    (void)state;
    const mtp_drafter_config config = {.hidden_size = 4,
                                       .backbone_hidden_size = 6,
                                       .vocab_size = 12,
                                       .ordered = true,
                                       .num_centroids = 6,
                                       .centroid_top_k = 2};
    mtp__leak_outputs a, b;
    int32_t step = -1;
    const char *output = NULL;
    assert_ok(mtp__leak_outputs_create(&config, 2, 2, &a));
    assert_ok(mtp__leak_outputs_create(&config, 2, 2, &b));
    assert_true(mtp__leak_same(&a, 1, &b, 0, 0, &step, &output));
    const struct {
        void *place;
        const char *name;
    } places[] = {{&b.arrays.hidden[(2 + 1) * 4 + 3], "hidden"},
                  {&b.arrays.state[(2 + 1) * 6 + 5], "state"},
                  {&b.arrays.selected[(2 + 1) * 2 + 1], "selected centroids"},
                  {&b.arrays.logits[(2 + 1) * 4 + 3], "logits"},
                  {&b.arrays.argmax[2 + 1], "argmax"},
                  {&b.arrays.miss[2 + 1], "centroid_miss"},
                  {&b.arrays.loss[2 + 1], "loss"},
                  {&b.arrays.centroid_loss[2 + 1], "centroid loss"}};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        *(uint8_t *)places[i].place = 1;
        assert_true(mtp__leak_same(&a, 0, &b, 0, 0, &step, &output));
        assert_false(mtp__leak_same(&a, 1, &b, 1, 0, &step, &output));
        assert_int_equal(step, 1);
        assert_string_equal(output, places[i].name);
        assert_true(mtp__leak_same(&a, 1, &b, 1, 1e-4, &step, &output));
        *(uint8_t *)places[i].place = 0;
    }
    b.arrays.state[0] = 2e-4F;
    assert_false(mtp__leak_same(&a, 0, &b, 0, 1e-4, &step, &output));
    assert_string_equal(output, "state");
    a.arrays.state[0] = 100.005F, b.arrays.state[0] = 100;
    assert_true(mtp__leak_same(&a, 0, &b, 0, 1e-4, &step, &output));
    mtp__leak_outputs_free(&a);
    mtp__leak_outputs_free(&b);
}

static void refuses(void **state)
{
    (void)state;
    test_opened o = open_case("e2b_masked");
    mtp_leak_report report;
    assert_fails(
        mtp_leak_check(o.drafter, o.verifier, o.dataset, &(mtp_leak_options){.num_speculative_steps = 65}, &report),
        MTP_E_CONFIG, "num_speculative_steps is 65");
    assert_fails(
        mtp_leak_check(o.drafter, o.verifier, o.dataset, &(mtp_leak_options){.rows_per_document = -1}, &report),
        MTP_E_CONFIG, "rows_per_document");
    test_close(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(holds_on_reference_cases),
        cmocka_unit_test(holds_on_the_sample),
        cmocka_unit_test(finds_a_planted_leak),
        cmocka_unit_test(control_must_move),
        cmocka_unit_test(rows_are_spread),
        cmocka_unit_test(compares_every_output),
        cmocka_unit_test(refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
