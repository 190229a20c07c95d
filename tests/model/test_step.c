/* Protects: what the reference cases do not cover of a training step: the cut chain, micro-batches and chunks, frozen
 * parameters, steps without supervised rows, and refusals of wrong settings. */
#include "fixture.h"

/* With the chain cut, step k is a single step whose state is a constant: its gradient must be that of a one-step run
 * that is given state_k as hidden state, weighted by w_k. */
static void cut_chain_equals_single_steps(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, "e2b_masked", MTP_HEAD_MASKED);
    const int64_t R = f.rows.num_rows, Hb = f.batch->hidden_states.shape[2];
    mtp_drafter *cut = fixture_drafter(&f, NULL), *sum = fixture_drafter(&f, NULL), *one = fixture_drafter(&f, NULL);
    mtp_step_config config = f.config;
    config.detach_state = true;
    float *states = calloc((size_t)(3 * R * Hb), sizeof *states);
    mtp__step_outputs outputs = {.state = states};
    fixture_train(&f, cut, &config, &f.rows, f.counts, &outputs);

    double weights[3];
    mtp__step_weights(&f.config, weights);
    float *hidden = f.batch->hidden_states.data;
    mtp__rows single;
    assert_ok(mtp__rows_create(R, 1, &single));
    for (int32_t k = 0; k < 3; k++) {
        config.num_speculative_steps = 1;
        single.num_rows = R;
        for (int64_t r = 0; r < R; r++) {
            single.document[r] = f.rows.document[r];
            single.position[r] = f.rows.position[r];
            single.place[r] = f.rows.place[r];
            single.doc_begin[r] = f.rows.doc_begin[r];
            single.input_token[r] = f.rows.input_token[k * R + r];
            single.target[r] = f.rows.target[k * R + r];
            single.valid[r] = f.rows.valid[k * R + r];
            single.supervised[r] = f.rows.supervised[k * R + r];
            if (k > 0)
                memcpy(hidden + single.place[r] * Hb, states + ((k - 1) * R + r) * Hb, (size_t)Hb * sizeof(float));
        }
        memset(one->grads, 0, (size_t)one->num_grads * sizeof(float));
        fixture_train(&f, one, &config, &single, &f.counts[k], NULL);
        for (int64_t i = 0; i < one->num_grads; i++)
            ((float *)sum->grads)[i] += (float)weights[k] * ((const float *)one->grads)[i];
    }
    assert_true(fixture_distance(sum, cut) < 1.5e-4); /* the gradient tolerance of the reference cases */
    for (int64_t i = 0; i < cut->post_projection->count; i++) assert_true(cut->post_projection->grad[i] == 0);
    mtp__rows_free(&single);
    free(states);
    mtp_drafter_free(cut), mtp_drafter_free(sum), mtp_drafter_free(one);
    fixture_close(&f);
}

static void chunks_and_micro_batches_add_up_to_the_whole(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        mtp_head_mode mode;
    } cases[] = {{"e2b_masked", MTP_HEAD_MASKED},
                 {"e2b_masked", MTP_HEAD_HIERARCHICAL},
                 {"e2b_masked", MTP_HEAD_FLAT},
                 {"m26b_flat", MTP_HEAD_FLAT}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        fixture f;
        fixture_open(&f, cases[c].name, cases[c].mode);
        mtp_drafter *whole = fixture_drafter(&f, NULL), *chunked = fixture_drafter(&f, NULL),
                    *micro = fixture_drafter(&f, NULL);
        const double loss = fixture_train(&f, whole, &f.config, &f.rows, f.counts, NULL);
        mtp_step_config config = f.config;
        for (config.rows_per_chunk = 5; config.rows_per_chunk >= 1; config.rows_per_chunk -= 4) {
            /* in chunks of one row no two rows share a token */
            memset(chunked->grads, 0, (size_t)chunked->num_grads * sizeof(float));
            assert_near(fixture_train(&f, chunked, &config, &f.rows, f.counts, NULL), loss, 1e-6 * loss);
            assert_true(fixture_distance(whole, chunked) < 1e-5);
        }
        /* a batch of one sample each, all normalised by the counts of the whole */
        double sum = 0;
        mtp_batch *together = f.batch;
        for (int64_t sample = 0; sample < 3; sample++) {
            mtp__rows rows;
            assert_ok(mtp_batch_collate(f.dataset, &sample, 1, true, &f.batch));
            assert_ok(mtp__rows_create(f.batch->seq, 3, &rows));
            assert_ok(mtp__rows_build(f.batch, MTP__ROWS_SUPERVISED, NULL, &rows));
            sum += fixture_train(&f, micro, &f.config, &rows, f.counts, NULL);
            mtp__rows_free(&rows);
            mtp_batch_free(f.batch);
        }
        f.batch = together;
        assert_near(sum, loss, 1e-6 * loss);
        assert_true(fixture_distance(whole, micro) < 1e-5);
        mtp_drafter_free(whole), mtp_drafter_free(chunked), mtp_drafter_free(micro);
        fixture_close(&f);
    }
}

/* Rows that stand far apart share no tokens, and some of their steps lie outside the document. */
static void scattered_rows_add_up_too(void **state)
{
    (void)state;
    static const mtp_feeding feedings[] = {MTP_FEED_TEACHER, MTP_FEED_SELF};
    for (int i = 0; i < 2; i++) {
        fixture f;
        fixture_open(&f, "e2b_masked", MTP_HEAD_MASKED);
        for (int64_t t = 0; t < f.batch->seq; t++) f.batch->loss_mask[t] = t % 5 == 2;
        for (int64_t d = 0; d < f.batch->num_documents; d++) f.batch->loss_mask[f.batch->document_end[d] - 1] = 1;
        fixture_rows(&f);
        mtp_step_config config = f.config;
        config.feeding = feedings[i];
        mtp_drafter *whole = fixture_drafter(&f, NULL), *single = fixture_drafter(&f, NULL);
        const double loss = fixture_train(&f, whole, &config, &f.rows, f.counts, NULL);
        config.rows_per_chunk = 1;
        assert_near(fixture_train(&f, single, &config, &f.rows, f.counts, NULL), loss, 1e-6 * loss);
        assert_true(fixture_distance(whole, single) < 1e-5);
        mtp_drafter_free(whole), mtp_drafter_free(single);
        fixture_close(&f);
    }
}

static void padded_batch_equals_packed_batch(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, "e4b_masked", MTP_HEAD_MASKED);
    mtp_drafter *packed = fixture_drafter(&f, NULL), *padded = fixture_drafter(&f, NULL);
    const int64_t all[3] = {0, 1, 2};
    const double loss = fixture_train(&f, packed, &f.config, &f.rows, f.counts, NULL);
    mtp_batch_free(f.batch);
    assert_ok(mtp_batch_collate(f.dataset, all, 3, false, &f.batch));
    assert_int_equal(f.batch->batch, 3);
    fixture_rows(&f);
    assert_true(fixture_train(&f, padded, &f.config, &f.rows, f.counts, NULL) == loss);
    assert_memory_equal(packed->grads, padded->grads, (size_t)packed->num_grads * sizeof(float));
    mtp_drafter_free(packed), mtp_drafter_free(padded);
    fixture_close(&f);
}

static void frozen_parameters_have_no_gradient_and_change_no_other(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, "e2b_masked", MTP_HEAD_MASKED);
    mtp_drafter *all = fixture_drafter(&f, NULL), *some = fixture_drafter(&f, "model.layers.1.*");
    fixture_train(&f, all, &f.config, &f.rows, f.counts, NULL);
    fixture_train(&f, some, &f.config, &f.rows, f.counts, NULL);
    int frozen = 0;
    for (int64_t p = 0; p < some->num_params; p++) {
        const mtp__param *param = &some->params[p];
        if (!param->trained) {
            assert_null(param->grad);
            assert_non_null(strstr(param->name, "model.layers.1."));
            frozen++;
        } else if (all->params[p].grad) {
            assert_memory_equal(param->grad, all->params[p].grad, (size_t)param->count * sizeof(float));
        }
    }
    assert_int_equal(frozen, 11);
    mtp_drafter_free(all), mtp_drafter_free(some);
    fixture_close(&f);
}

static void a_step_without_supervised_rows_leaves_its_term_out(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, "e2b_masked", MTP_HEAD_MASKED);
    memset(f.batch->loss_mask, 0, (size_t)f.batch->seq);
    f.batch->loss_mask[2] = 1; /* only t = 0, k = 0 of the first document */
    fixture_rows(&f);
    assert_int_equal(f.counts[0], 1);
    assert_int_equal(f.counts[1] + f.counts[2], 0);
    mtp_drafter *drafter = fixture_drafter(&f, NULL);
    float losses[3], centroid_losses[3];
    double weights[3];
    mtp__step_outputs outputs = {.loss = losses, .centroid_loss = centroid_losses};
    mtp__step_weights(&f.config, weights);
    const double total = fixture_train(&f, drafter, &f.config, &f.rows, f.counts, &outputs);
    assert_near(total, weights[0] * ((double)losses[0] + 0.1 * (double)centroid_losses[0]), 1e-6);
    assert_true(losses[0] > 0 && losses[1] == 0 && losses[2] == 0);
    for (int64_t i = 0; i < drafter->num_grads; i++) assert_true(isfinite(((const float *)drafter->grads)[i]));
    mtp_drafter_free(drafter);
    fixture_close(&f);
}

static void weights_are_the_normalised_powers_of_beta(void **state)
{
    (void)state;
    double weights[3];
    const mtp_step_config config = {.num_speculative_steps = 3, .step_weight_beta = 0.6};
    mtp__step_weights(&config, weights);
    assert_near(weights[0], 1 / 1.96, 1e-12);
    assert_near(weights[1], 0.6 / 1.96, 1e-12);
    assert_near(weights[2], 0.36 / 1.96, 1e-12);
}

static void wrong_settings_are_refused(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, "m26b_flat", MTP_HEAD_FLAT);
    mtp_drafter *drafter = fixture_drafter(&f, NULL);
    mtp__step *step;
    mtp_step_config config = f.config;
    config.head_mode = MTP_HEAD_MASKED;
    assert_fails(mtp__step_create(drafter, f.verifier, &config, MTP__STEP_TRAIN, &step), MTP_E_CONFIG,
                 "head = \"flat\"");
    config = f.config, config.num_speculative_steps = 0;
    assert_fails(mtp__step_create(drafter, f.verifier, &config, MTP__STEP_TRAIN, &step), MTP_E_CONFIG, "1 to 64");
    config = f.config, config.position_offset = 2;
    assert_fails(mtp__step_create(drafter, f.verifier, &config, MTP__STEP_TRAIN, &step), MTP_E_CONFIG,
                 "position_offset");
    config = f.config, config.step_weight_beta = 0;
    assert_fails(mtp__step_create(drafter, f.verifier, &config, MTP__STEP_TRAIN, &step), MTP_E_CONFIG,
                 "greater than 0");
    assert_null(step);
    mtp_drafter_free(drafter);
    assert_ok(mtp_drafter_load(f.context, test_path("%s/assistant", f.directory), &drafter));
    assert_fails(mtp__step_create(drafter, f.verifier, &f.config, MTP__STEP_TRAIN, &step), MTP_E_ARGUMENT, "gradients");
    mtp_drafter_free(drafter);
    fixture_close(&f);
}

static void the_plan_is_what_a_step_takes(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, "e2b_masked", MTP_HEAD_MASKED);
    mtp_drafter *drafter = fixture_drafter(&f, NULL);
    mtp__arena small, large, evaluation;
    mtp_step_config config = f.config;
    assert_ok(mtp__step_plan(&drafter->config, f.context, MTP_F32, &config, MTP__STEP_TRAIN, &large));
    assert_ok(mtp__step_plan(&drafter->config, f.context, MTP_F32, &config, MTP__STEP_EVALUATE, &evaluation));
    config.rows_per_chunk = 64;
    assert_ok(mtp__step_plan(&drafter->config, f.context, MTP_F32, &config, MTP__STEP_TRAIN, &small));
    assert_true(small.used < large.used);
    assert_true(evaluation.used < large.used);
    size_t labelled = 0;
    for (int i = 0; i < small.num_labels; i++) labelled += small.labels[i].bytes;
    assert_int_equal(labelled, small.used);
    mtp_drafter_free(drafter);
    fixture_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cut_chain_equals_single_steps),
        cmocka_unit_test(chunks_and_micro_batches_add_up_to_the_whole),
        cmocka_unit_test(scattered_rows_add_up_too),
        cmocka_unit_test(padded_batch_equals_packed_batch),
        cmocka_unit_test(frozen_parameters_have_no_gradient_and_change_no_other),
        cmocka_unit_test(a_step_without_supervised_rows_leaves_its_term_out),
        cmocka_unit_test(weights_are_the_normalised_powers_of_beta),
        cmocka_unit_test(wrong_settings_are_refused),
        cmocka_unit_test(the_plan_is_what_a_step_takes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
