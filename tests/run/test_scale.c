/* Protects: mtp plan --world-size: parameters, operations and rates of the official sizes are those of the cost model
 * that was worked out beside it; the all-reduce costs what its formula says and hides behind the backward pass. */
#include "support.h"

#include <jansson.h>

#include "mtp/pack.h"
#include "mtp/scale.h"

static void assert_near(double got, double want, double share, const char *what)
{
    if (got < want * (1 - share) || got > want * (1 + share)) fail_msg("%s: %g, not %g", what, got, want);
}

static mtp_scale predict(int64_t index, mtp_scale_options options)
{
    mtp_scale scale;
    assert_ok(mtp_scale_predict(index, &options, &scale));
    return scale;
}

/* Millions of parameters, millions of operations a position (K 3, 4096 tokens), thousand positions a second (K 3 with
 * 4096 tokens, K 7 with 2048). */
static const struct {
    double parameters, operations, rate_3, rate_7;
} known[] = {{77.73, 372, 1050, 542},
             {78.52, 381, 1027, 527},
             {422.8, 8358, 69, 31},
             {419.7, 8325, 69, 31},
             {469.5, 9997, 56, 26}};

static void known_sizes(void **state)
{
    (void)state;
    for (int64_t i = 0; mtp_pack_official(i); i++) {
        const mtp_scale three = predict(i, (mtp_scale_options){.world_size = 1});
        const mtp_scale seven =
            predict(i, (mtp_scale_options){.world_size = 1, .length = 2048, .num_speculative_steps = 7});
        assert_string_equal(three.name, mtp_pack_official(i));
        assert_near((double)three.num_parameters / 1e6, known[i].parameters, 0.001, three.name);
        assert_near(three.operations / 1e6, known[i].operations, 0.003, three.name);
        assert_near(16384 / three.compute_seconds / 1e3, known[i].rate_3, 0.01, three.name);
        assert_near(16384 / seven.compute_seconds / 1e3, known[i].rate_7, 0.02, three.name);
        /* masters, gradients and two moments at least */
        assert_true(three.memory_bytes > 16 * (uint64_t)three.num_parameters);
        const mtp_scale sharded = predict(i, (mtp_scale_options){.world_size = 4, .bandwidth = 1e11, .zero_stage = 1});
        const double saved = (double)(three.memory_bytes - sharded.memory_bytes);
        assert_near(saved, 0.75 * 8 * (double)three.num_parameters, 1e-3, "moments of three other ranks");
        const double token = (double)mtp_pack_official_bytes(i, false, false, false, 1000000) / 1e6;
        assert_near(three.data_bytes_per_second, token * three.positions_per_second, 1e-9, "data rate");
    }
}

static void all_reduce(void **state)
{
    (void)state;
    mtp_scale_options options = {.world_size = 1, .bucket_bytes = 1};
    const mtp_scale alone = predict(0, options);
    assert_true(alone.all_reduce_seconds == 0 && alone.exposed_seconds == 0 && alone.efficiency == 1);
    options.world_size = 8;
    options.bandwidth = 400e9;
    const mtp_scale fast = predict(0, options);
    assert_near(fast.all_reduce_seconds, 4 * (double)fast.num_parameters * 1.75 / 400e9, 1e-9, "all-reduce");
    /* all but the last bucket travels while backward works */
    assert_true(fast.exposed_seconds < 1e-9);
    assert_near(fast.positions_per_second, 8 * alone.positions_per_second, 1e-6, "positions/s");
    /* so slow that it lasts longer than the step */
    options.bandwidth = 4e9;
    const mtp_scale slow = predict(0, options);
    assert_true(slow.exposed_seconds > 0 && slow.exposed_seconds < slow.all_reduce_seconds);
    assert_near(slow.step_seconds, slow.compute_seconds + slow.optimizer_seconds + slow.exposed_seconds, 1e-9, "step");
    assert_true(slow.efficiency < 0.2);
    /* more work for each rank hides more */
    options.positions = 1 << 20;
    assert_true(predict(0, options).efficiency > slow.efficiency);
}

static void wrong_numbers(void **state)
{
    (void)state;
    mtp_scale scale;
    assert_fails(mtp_scale_predict(5, &(mtp_scale_options){.world_size = 1}, &scale), MTP_E_NOT_FOUND, "size 5");
    assert_fails(mtp_scale_predict(0, &(mtp_scale_options){.world_size = 2}, &scale), MTP_E_CONFIG, "need one");
    assert_fails(mtp_scale_predict(0, &(mtp_scale_options){.world_size = 0}, &scale), MTP_E_CONFIG, "0 ranks");
    assert_fails(mtp_scale_predict(0, &(mtp_scale_options){.world_size = 1, .num_speculative_steps = 65}, &scale),
                 MTP_E_CONFIG, "draft steps");
}

static void command(void **state)
{
    (void)state;
    test_expect(test_mtp("plan", "--world-size", "8"), 2, "", "--world-size 8 needs --bandwidth");
    test_expect(test_mtp("plan", "--world-size", "8", "--bandwidth", "400", "x.toml"), 2, "", "takes no CONFIG");
    test_expect(test_mtp("plan", "--world-size", "8", "--bandwidth", "400"), 0, "\nE2B ", "");
    test_run run = test_mtp("plan", "--world-size=8", "--bandwidth=400", "--positions=8192", "--json");
    json_t *all = json_loads(run.out, 0, NULL), *sizes = json_object_get(all, "scale");
    const mtp_scale scale = predict(4, (mtp_scale_options){.world_size = 8, .bandwidth = 400e9, .positions = 8192});
    assert_int_equal(json_array_size(sizes), 5);
    const json_t *last = json_array_get(sizes, 4);
    assert_string_equal(json_string_value(json_object_get(last, "size")), "31B");
    assert_near(json_number_value(json_object_get(last, "step_seconds")), scale.step_seconds, 1e-5, "step_seconds");
    json_decref(all);
    test_run_free(&run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(known_sizes), cmocka_unit_test(all_reduce),
                                       cmocka_unit_test(wrong_numbers), cmocka_unit_test(command)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
