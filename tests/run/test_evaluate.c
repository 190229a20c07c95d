/* Protects: served acceptance as an independent implementation measures it (the counts below are those of the plain
 * PyTorch replay that made the table in tests/data/sample/README.md, to the last round), loss against the reference
 * cases, evaluation of the weights as they are in memory, and that no figure depends on batches or repetition. */
#include "support.h"

#include <math.h>

#include "edit.h"
#include "mtp/eval.h"
#include "opened.h"

static test_opened open_sample(const char *drafter)
{
    return test_open(test_path("sample/%s", drafter), "sample/verifier", "sample/eval");
}

static mtp_evaluation evaluate(const test_opened *o, mtp_evaluator_options options)
{
    mtp_evaluator *evaluator = NULL;
    mtp_evaluation evaluation;
    assert_ok(mtp_evaluator_create(o->drafter, o->verifier, o->dataset, &options, &evaluator));
    assert_ok(mtp_evaluator_run(evaluator, &evaluation));
    mtp_evaluator_free(evaluator);
    return evaluation;
}

static void assert_counts(const mtp_acceptance *acceptance, int64_t count, const int64_t *accepted, int32_t K)
{
    assert_int_equal(acceptance->count, count);
    for (int32_t k = 0; k < K; k++) assert_int_equal(acceptance->accepted[k], accepted[k]);
}

static void counts_of_the_reference(void **state)
{
    (void)state;
    static const struct {
        const char *drafter;
        int32_t K, position_offset;
        int64_t rounds, rounds_accepted[5], positions, positions_accepted[5];
    } cases[] = {
        {"drafter_reference", 3, 0, 2567, {570, 231, 109}, 3462, {959, 424, 197}},
        {"drafter_reference", 3, 1, 2570, {570, 222, 113}, 3462, {959, 414, 202}},
        {"drafter_reference", 5, 0, 2522, {545, 215, 100, 45, 17}, 3422, {941, 412, 195, 90, 37}},
        {"drafter_init", 3, 0, 3454, {8, 0, 0}, 3462, {8, 0, 0}},
        {"drafter_init_dense", 3, 0, 3455, {7, 0, 0}, 3462, {7, 0, 0}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_opened o = open_sample(cases[i].drafter);
        mtp_evaluation e = evaluate(&o, (mtp_evaluator_options){.num_speculative_steps = cases[i].K,
                                                                .position_offset = cases[i].position_offset,
                                                                .acceptance_only = true});
        assert_counts(&e.rounds, cases[i].rounds, cases[i].rounds_accepted, cases[i].K);
        assert_counts(&e.positions, cases[i].positions, cases[i].positions_accepted, cases[i].K);
        mtp_evaluation_free(&e);
        test_close(&o);
    }
}

/* Rounded to three digits as the table of the README has them. */
static void assert_table(const mtp_acceptance *acceptance, double mean, double first, double second, double third)
{
    const double want[] = {mean, first, second, third};
    const double got[] = {mtp_acceptance_length(acceptance, 3), mtp_acceptance_rate(acceptance, 0),
                          mtp_acceptance_rate(acceptance, 1), mtp_acceptance_rate(acceptance, 2)};
    for (int i = 0; i < 4; i++) assert_float_equal(got[i], want[i], 0.0005);
}

static void table_of_the_reference(void **state)
{
    (void)state;
    test_opened o = open_sample("drafter_reference");
    mtp_evaluation e = evaluate(&o, (mtp_evaluator_options){0});
    assert_int_equal(e.num_speculative_steps, 3);
    assert_table(&e.rounds, .354, .222, .090, .042);
    assert_table(&e.positions, .456, .277, .122, .057);
    /* per sample, pooled otherwise: the same replay's numbers */
    const double sample_mean[] = {.22984337662064944, .0957434801135588, .045286209331401026};
    for (int k = 0; k < 3; k++) assert_float_equal(e.rounds_sample_mean[k], sample_mean[k], 1e-12);
    assert_float_equal(e.rounds_length_sample_mean, .3708730660656093, 1e-12);
    assert_float_equal(e.positions_length_sample_mean, .46171129392214494, 1e-12);
    assert_counts(&e.samples[0].rounds, 76, (const int64_t[]){22, 7, 3}, 3);
    assert_counts(&e.samples[1].rounds, 88, (const int64_t[]){23, 11, 5}, 3);
    assert_counts(&e.samples[1].positions, 127, (const int64_t[]){44, 20, 9}, 3);
    assert_counts(&e.samples[19].rounds, 80, (const int64_t[]){14, 8, 3}, 3);
    assert_int_equal(e.num_samples, 20);
    assert_int_equal(e.num_short, 0);
    assert_int_equal(e.num_gapped, 0);
    /* what is drafted at step 0 does not depend on feeding: teacher accuracy and acceptance there are of nearly the
     * same rows (supervised ones reach to the end of the text) */
    assert_true(e.has_loss && e.ordered);
    assert_float_equal(e.steps[0].accuracy, mtp_acceptance_rate(&e.positions, 0), 0.01);
    for (int k = 0; k < 3; k++) {
        assert_true(e.steps[k].loss > 0 && e.steps[k].loss < 12);
        assert_true(e.steps[k].centroid_miss > 0 && e.steps[k].centroid_miss + e.steps[k].accuracy <= 1);
    }
    mtp_evaluation_free(&e);
    e = evaluate(&o, (mtp_evaluator_options){.position_offset = 1, .acceptance_only = true});
    assert_table(&e.rounds, .352, .222, .086, .044);
    mtp_evaluation_free(&e);
    test_close(&o);
}

/* The same rows in other batches: equal counts; sums of losses in another order. */
static void batches_change_nothing(void **state)
{
    (void)state;
    test_opened o = open_sample("drafter_reference");
    mtp_evaluation a = evaluate(&o, (mtp_evaluator_options){0});
    mtp_evaluation b = evaluate(&o, (mtp_evaluator_options){.tokens_per_batch = 1});
    mtp_evaluation c = evaluate(&o, (mtp_evaluator_options){.tokens_per_batch = 700});
    assert_memory_equal(&a.rounds, &b.rounds, sizeof a.rounds);
    assert_memory_equal(&a.positions, &b.positions, sizeof a.positions);
    assert_memory_equal(&a.positions, &c.positions, sizeof a.positions);
    assert_memory_equal(a.by_position, b.by_position, sizeof a.by_position);
    assert_memory_equal(a.samples, c.samples, (size_t)a.num_samples * sizeof *a.samples);
    for (int k = 0; k < 3; k++) {
        assert_int_equal(a.steps[k].count, b.steps[k].count);
        assert_float_equal(a.steps[k].loss, b.steps[k].loss, 1e-6);
        assert_float_equal(a.steps[k].accuracy, b.steps[k].accuracy, 0);
        assert_float_equal(a.steps[k].centroid_miss, c.steps[k].centroid_miss, 0);
    }
    mtp_evaluation_free(&a);
    mtp_evaluation_free(&b);
    mtp_evaluation_free(&c);
    test_close(&o);
}

/* One evaluator sees the weights as they are at each run. */
static void evaluates_what_is_in_memory(void **state)
{
    (void)state;
    test_opened o = open_sample("drafter_reference");
    mtp_evaluator *evaluator = NULL;
    mtp_evaluation first, again, changed;
    assert_ok(mtp_evaluator_create(o.drafter, o.verifier, o.dataset, &(mtp_evaluator_options){0}, &evaluator));
    assert_ok(mtp_evaluator_run(evaluator, &first));
    assert_ok(mtp_evaluator_run(evaluator, &again));
    again.seconds = first.seconds;
    assert_memory_equal(first.samples, again.samples, (size_t)first.num_samples * sizeof *first.samples);
    mtp_sample_figures *samples = again.samples;
    again.samples = first.samples;
    assert_memory_equal(&first, &again, sizeof first);
    again.samples = samples;

    for (int64_t i = 0; i < mtp_drafter_num_parameters(o.drafter); i++) {
        const mtp_parameter p = mtp_drafter_parameter(o.drafter, i);
        if (strcmp(p.name, "model.norm.weight") == 0)
            for (int64_t j = 0; j < p.shape[0]; j++)
                ((float *)p.value)[j] *= -1; /* device memory of the CPU is host memory */
    }
    assert_ok(mtp_evaluator_run(evaluator, &changed));
    assert_true(mtp_acceptance_length(&changed.positions, 3) < 0.1 * mtp_acceptance_length(&first.positions, 3));
    assert_true(changed.loss > first.loss + 1);
    mtp_evaluation_free(&first);
    mtp_evaluation_free(&again);
    mtp_evaluation_free(&changed);
    mtp_evaluator_free(evaluator);
    test_close(&o);
}

/* loss.step, loss.centroid_step and loss.total of the reference cases. */
static void loss_of_the_reference_cases(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        double centroid_weight, loss[3], centroid_loss[3], total;
    } cases[] = {
        {"e2b_masked",
         0.1,
         {5.160769462585449, 5.005396842956543, 4.885046005249023},
         {3.321960687637329, 3.314697504043579, 3.3200361728668213},
         5.394501686096191},
        {"m12b_flat", 0, {6.223121643066406, 5.846078395843506, 6.164706707000732}, {0, 0, 0}, 6.096971035003662},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_opened o =
            test_open(test_path("goldens/%s/assistant", cases[i].name), test_path("goldens/%s/verifier", cases[i].name),
                      test_path("goldens/%s/samples", cases[i].name));
        const bool ordered = cases[i].centroid_weight > 0;
        const mtp_step_config loss = {.head_mode = ordered ? MTP_HEAD_MASKED : MTP_HEAD_FLAT,
                                      .step_weight_beta = 0.6,
                                      .centroid_weight = cases[i].centroid_weight};
        mtp_evaluation e = evaluate(&o, (mtp_evaluator_options){.loss = &loss});
        for (int k = 0; k < 3; k++) {
            assert_float_equal(e.steps[k].loss, cases[i].loss[k], 2e-5);
            assert_float_equal(e.steps[k].centroid_loss, cases[i].centroid_loss[k], 2e-5);
        }
        assert_float_equal(e.loss, cases[i].total, 2e-5);
        assert_int_equal(e.ordered, ordered);
        mtp_evaluation_free(&e);
        test_close(&o);
    }
}

/* Lengths 23, 14, 19 with prompts of 7, 4, 6, masks with gaps. */
static void short_samples_are_counted(void **state)
{
    (void)state;
    test_opened o =
        test_open("goldens/e2b_masked/assistant", "goldens/e2b_masked/verifier", "goldens/e2b_masked/samples");
    mtp_evaluation e = evaluate(&o, (mtp_evaluator_options){.num_speculative_steps = 10});
    assert_int_equal(e.positions.count, 6 + 3);
    assert_int_equal(e.samples[0].positions.count, 6);
    assert_int_equal(e.samples[1].positions.count, 0);
    assert_int_equal(e.num_short, 1);
    assert_int_equal(e.num_gapped, 3);
    assert_true(e.steps[0].count > 0); /* of all three: the short one has a loss */
    assert_int_equal(e.steps[0].count, 31);
    mtp_evaluation_free(&e);

    mtp_evaluator *evaluator = NULL;
    assert_fails(mtp_evaluator_create(o.drafter, o.verifier, o.dataset,
                                      &(mtp_evaluator_options){.num_speculative_steps = 16}, &evaluator),
                 MTP_E_DATA, "of 3 samples none is long enough for a round of 16 drafts");
    assert_null(evaluator);
    test_close(&o);
}

static bool stop_at_once(void *user, int64_t done, int64_t total)
{
    *(int64_t *)user = total;
    return done > 0;
}

static void refuses_and_stops(void **state)
{
    (void)state;
    test_opened o = open_sample("drafter_init");
    mtp_evaluator *evaluator = NULL;
    mtp_evaluation evaluation;
    assert_fails(mtp_evaluator_create(o.drafter, o.verifier, o.dataset,
                                      &(mtp_evaluator_options){.num_speculative_steps = 65}, &evaluator),
                 MTP_E_CONFIG, "num_speculative_steps is 65");
    assert_fails(mtp_evaluator_create(o.drafter, o.verifier, o.dataset, &(mtp_evaluator_options){.position_offset = 2},
                                      &evaluator),
                 MTP_E_CONFIG, "position_offset is 2");
    assert_fails(mtp_evaluator_create(o.drafter, o.verifier, o.dataset,
                                      &(mtp_evaluator_options){.tokens_per_batch = -1}, &evaluator),
                 MTP_E_CONFIG, "tokens_per_batch is -1");
    int64_t total = 0;
    const mtp_evaluator_options options = {.progress = stop_at_once, .user = &total};
    assert_ok(mtp_evaluator_create(o.drafter, o.verifier, o.dataset, &options, &evaluator));
    assert_fails(mtp_evaluator_run(evaluator, &evaluation), MTP_E_INTERRUPTED, "after 0 of 20 samples");
    assert_int_equal(total, 20);
    assert_null(evaluation.samples);
    mtp_evaluator_free(evaluator);
    mtp_evaluator_free(NULL);
    mtp_evaluation_free(NULL);
    test_close(&o);

    o = test_open("goldens/e2b_masked/assistant", "sample/verifier", "sample/eval");
    assert_fails(mtp_evaluator_create(o.drafter, o.verifier, o.dataset, &(mtp_evaluator_options){0}, &evaluator),
                 MTP_E_DATA, "verifier");
    test_close(&o);
}

/* A verifier whose embedding holds a NaN: every file is well-formed, and the figures would be NaN. */
static void figures_are_finite(void **state)
{
    (void)state;
    const char *verifier = test_path("%s/verifier", test_dir());
    test_copy(MTP_TEST_DATA "/sample/verifier", verifier);
    test_tensors tensors = test_tensors_open(MTP_TEST_DATA "/sample/verifier/model.safetensors");
    const int64_t shape[] = {2048, 128};
    float *table = test_tensors_put(&tensors, "model.embed_tokens.weight", MTP_F32, 2, shape);
    for (int64_t i = 0; i < 2048 * 128; i++) table[i] = NAN;
    test_tensors_write(&tensors, test_path("%s/model.safetensors", verifier));
    test_tensors_close(&tensors);
    test_opened o = open_sample("drafter_init");
    mtp_verifier *damaged = NULL; /* beside the sound one, which the data set goes on using */
    assert_ok(mtp_verifier_open(verifier, NULL, &damaged));
    mtp_evaluator *evaluator = NULL;
    mtp_evaluation evaluation;
    assert_ok(mtp_evaluator_create(o.drafter, damaged, o.dataset, &(mtp_evaluator_options){0}, &evaluator));
    assert_fails(mtp_evaluator_run(evaluator, &evaluation), MTP_E_DATA, "sample_0100.safetensors, is not finite");
    mtp_evaluator_free(evaluator);
    mtp_verifier_close(damaged);
    test_close(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_of_the_reference),     cmocka_unit_test(table_of_the_reference),
        cmocka_unit_test(batches_change_nothing),      cmocka_unit_test(evaluates_what_is_in_memory),
        cmocka_unit_test(loss_of_the_reference_cases), cmocka_unit_test(short_samples_are_counted),
        cmocka_unit_test(refuses_and_stops),           cmocka_unit_test(figures_are_finite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
