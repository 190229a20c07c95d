/* Protects: the same number of ranks gives the same bits, with any number of threads, with sharded moments too; an
 * evaluation is the same bits for any number; a run goes on at another number of ranks with the next sample. */
#include "dist.h"

static void assert_same_bits(const char *one, const char *other)
{
    char *a = test_train_metrics(one), *b = test_train_metrics(other);
    assert_string_equal(a, b);
    free(a);
    free(b);
}

/* ---- bits ----------------------------------------------------------------------------------------------------- */

static void the_same_number_of_ranks_gives_the_same_bits(void **state)
{
    (void)state;
    dist_needs_gloo();
    static const char *const threads[] = {"num_threads=1", "num_threads=1", "num_threads=3"};
    const char *runs[3];
    for (int i = 0; i < 3; i++) {
        runs[i] = dist_train_with(3, dist_max_steps(6), dist_budget(8), "save_steps=3", "keep_last=0", threads[i]);
        assert_same_bits(runs[0], runs[i]);
        for (int step = 3; step <= 6; step += 3)
            test_same_checkpoint(test_path("%s/checkpoints/step-%08d", runs[0], step),
                                 test_path("%s/checkpoints/step-%08d", runs[i], step));
    }
}

/* Sharded moments change no bit, with any number of ranks (five cut the tensors elsewhere than two), and a checkpoint
 * of them goes on without, and the other way round. */
static void sharded_moments_change_no_bit(void **state)
{
    (void)state;
    dist_needs_gloo();
    const int worlds[] = {2, 5};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        const char *whole =
            dist_train_with(worlds[i], dist_max_steps(6), dist_budget(6), "save_steps=3", "keep_last=0");
        const char *sharded = dist_train_with(worlds[i], dist_max_steps(6), dist_budget(6), "save_steps=3",
                                              "keep_last=0", "zero_stage=1");
        assert_same_bits(whole, sharded);
        for (int turn = 0; turn < 2; turn++) {
            const char *from = test_path("resume=%s/checkpoints/step-00000003", turn ? sharded : whole);
            const char *out = dist_train_with(worlds[i], dist_max_steps(6), dist_budget(6), "save_steps=3",
                                              "keep_last=0", from, turn ? "zero_stage=0" : "zero_stage=1");
            test_same_checkpoint(test_path("%s/checkpoints/step-00000006", turn ? whole : sharded),
                                 test_path("%s/checkpoints/step-00000006", out));
        }
    }
}

/* Rounded stochastically, by numbers that belong to places and not to ranks. */
static void sharded_bf16_weights_are_the_same_bits(void **state)
{
    (void)state;
    dist_needs_gloo();
    const char *whole = dist_train_with(2, dist_max_steps(3), dist_budget(6), "master_weights=bf16");
    assert_same_bits(whole,
                     dist_train_with(2, dist_max_steps(3), dist_budget(6), "master_weights=bf16", "zero_stage=1"));
}

static void an_evaluation_is_the_same_for_any_number_of_ranks(void **state)
{
    (void)state;
    dist_needs_gloo();
    const char *eval = test_path("eval_data=[\"%s\"]", dist_data(7, 900));
    json_t *alone = NULL;
    for (int world = 1; world <= 3; world++) {
        const char *run = dist_train_with(world, dist_max_steps(1), dist_budget(12), eval);
        json_t *lines = dist_lines(run, "eval");
        assert_int_equal(json_array_size(lines), 2);
        json_t *before = json_incref(json_array_get(lines, 0)); /* of the drafter before the first step */
        json_decref(lines);
        if (!alone)
            alone = before;
        else if (!json_equal(alone, before))
            fail_msg("%d ranks: %s\nalone: %s", world, json_dumps(before, 0), json_dumps(alone, 0));
        if (alone != before) json_decref(before);
    }
    assert_true(dist_number(json_object_get(alone, "rounds"), "count") > 7);
    json_decref(alone);
}

/* ---- going on ------------------------------------------------------------------------------------------------- */

static void a_run_goes_on_at_another_number_of_ranks(void **state)
{
    (void)state;
    dist_needs_gloo();
    const char *reference = dist_train_with(1, dist_max_steps(9), dist_budget(12), dist_accumulation(6));
    const int worlds[][2] = {{2, 3}, {3, 2}, {1, 6}};
    const char *out = test_path("%s/run", test_dir());
    for (int part = 0; part < 3; part++) {
        const char *const overrides[] = {dist_max_steps(3 * (part + 1)),
                                         dist_budget(12),
                                         dist_accumulation(worlds[part][1]),
                                         "resume=auto",
                                         "zero_stage=1",
                                         NULL};
        test_run run = dist_launch(worlds[part][0], NULL, out, overrides);
        if (run.exit_code != 0) fail_msg("part %d: %s", part, run.err);
        test_run_free(&run);
    }
    dist_same_training(reference, out, 9);
    /* another global batch is another run */
    const char *const overrides[] = {dist_max_steps(10), dist_budget(12), dist_accumulation(2), "resume=auto", NULL};
    test_expect(dist_launch(2, NULL, out, overrides), 2, "",
                "gradient_accumulation_steps: 6 then, 2 now (on 1 rank then, 2 now)");
    /* but more or fewer ranks may go on: what they take then is what is left */
    const char *const fewer[] = {dist_max_steps(10), dist_budget(12), dist_accumulation(6), "resume=auto", NULL};
    test_expect(dist_launch(2, NULL, out, fewer), 0, "", "the checkpoint is of 1 rank, now there are 2");
    json_t *lines = dist_lines(out, "train");
    assert_int_equal((int)dist_number(json_array_get(lines, 9), "tokens"), 2 * DIST_GLOBAL * DIST_TOKENS);
    json_decref(lines);
}

/* An epoch of 18 micro-batches: four updates of two, then the rest by three ranks at a time. */
static void a_run_of_epochs_goes_on_at_another_number_of_ranks(void **state)
{
    (void)state;
    dist_needs_gloo();
    const char *out = test_path("%s/run", test_dir());
    const char *const overrides[] = {dist_budget(8), "resume=auto", dist_max_steps(4), NULL};
    test_expect(dist_launch(2, NULL, out, overrides), 0, "", "");
    const char *const rest[] = {dist_budget(8), "resume=auto", "num_train_epochs=1", "max_steps=0", NULL};
    test_expect(dist_launch(3, NULL, out, rest), 0, "", "");
    json_t *lines = dist_lines(out, "train");
    double tokens = 0;
    for (size_t i = 0; i < json_array_size(lines); i++) tokens += dist_number(json_array_get(lines, i), "tokens");
    assert_int_equal(json_array_size(lines), 4 + 4); /* 10 are left: 3, 3, 3, 1 */
    assert_int_equal((int)tokens, DIST_DOCUMENTS * DIST_TOKENS);
    json_decref(lines);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_number_of_ranks_gives_the_same_bits),
        cmocka_unit_test(sharded_moments_change_no_bit),
        cmocka_unit_test(sharded_bf16_weights_are_the_same_bits),
        cmocka_unit_test(an_evaluation_is_the_same_for_any_number_of_ranks),
        cmocka_unit_test(a_run_goes_on_at_another_number_of_ranks),
        cmocka_unit_test(a_run_of_epochs_goes_on_at_another_number_of_ranks),
    };
    return cmocka_run_group_tests(tests, dist_setup, NULL);
}
