/* Protects: gradients that a watched step calls final do not change any more until its end: they are summed over ranks
 * at that moment. And that it says so early: of each part of the drafter when the backward pass leaves it. */
#include "fixture.h"

enum { MOST_CALLS = 64 };

/* What was called final, and what the gradients were then. */
typedef struct seen {
    const mtp_drafter *drafter;
    int calls;
    int64_t final[MOST_CALLS];
    float *then; /* [num_grads] each place as it was when it was first called final */
} seen;

static void note(void *user, int64_t final)
{
    seen *s = user;
    const int64_t before = s->calls ? s->final[s->calls - 1] : 0;
    assert_true(s->calls < MOST_CALLS);
    assert_true(final > before && final <= s->drafter->num_grads);
    memcpy(s->then + before, (const float *)s->drafter->grads + before, (size_t)(final - before) * sizeof(float));
    s->final[s->calls++] = final;
}

static void watch_one(fixture *f, const mtp_step_config *config, const char *freeze, int expected)
{
    mtp_drafter *drafter = fixture_drafter(f, freeze);
    mtp__step *step = NULL;
    mtp__step_sums sums[8];
    seen s = {.drafter = drafter, .then = calloc((size_t)drafter->num_grads, sizeof(float))};
    const mtp__step_watch watch = {.ready = note, .user = &s};
    assert_ok(mtp__step_create(drafter, f->verifier, config, MTP__STEP_TRAIN, &step));
    /* an earlier micro-batch of the update, which is not watched */
    assert_ok(mtp__step_run(step, f->batch, &f->rows, f->counts, sums, NULL));
    assert_int_equal(s.calls, 0);
    mtp__step_set_watch(step, &watch);
    assert_ok(mtp__step_run(step, f->batch, &f->rows, f->counts, sums, NULL));
    assert_int_equal(s.calls, expected);
    const int64_t final = s.final[s.calls - 1];
    assert_memory_equal(s.then, drafter->grads, (size_t) final * sizeof(float));
    /* all but the last part, which is final when the run returns */
    if (drafter->pre_projection->trained)
        assert_int_equal(final <= drafter->num_grads - drafter->pre_projection->count, 1);
    mtp__step_set_watch(step, NULL);
    assert_ok(mtp__step_run(step, f->batch, &f->rows, f->counts, sums, NULL));
    assert_int_equal(s.calls, expected);
    mtp__step_free(step);
    mtp_drafter_free(drafter);
    free(s.then);
}

static void what_is_final_stays(void **state)
{
    (void)state;
    static const struct {
        const char *name, *freeze;
        mtp_head_mode mode;
        bool detach;
        int32_t K;
        int64_t rows_per_chunk;
        int less; /* calls that the frozen parameters leave out */
    } cases[] = {{"e2b_masked", NULL, MTP_HEAD_MASKED, false, 3, 0, 0},
                 {"e2b_masked", NULL, MTP_HEAD_HIERARCHICAL, false, 3, 5, 0},
                 {"e2b_masked", "*.layer_scalar", MTP_HEAD_FLAT, true, 3, 7, 0},
                 {"e2b_masked", "model.layers.1.*", MTP_HEAD_MASKED, false, 2, 0, 1},
                 {"e2b_masked", "pre_projection.weight", MTP_HEAD_MASKED, false, 1, 0, 0},
                 {"m26b_flat", NULL, MTP_HEAD_FLAT, false, 3, 0, 0},
                 {"m26b_flat", "model.embed_tokens.weight", MTP_HEAD_FLAT, false, 1, 5, 1}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        fixture f;
        fixture_open(&f, cases[c].name, cases[c].mode);
        mtp_step_config config = f.config;
        config.detach_state = cases[c].detach;
        config.num_speculative_steps = f.config.num_speculative_steps = cases[c].K;
        config.rows_per_chunk = cases[c].rows_per_chunk;
        fixture_rows(&f);
        mtp_drafter *drafter = fixture_drafter(&f, NULL);
        const int parts = 2 + (int)drafter->config.num_layers; /* head; final norm and post-projection; layers */
        mtp_drafter_free(drafter);
        watch_one(&f, &config, cases[c].freeze, parts - cases[c].less);
        fixture_close(&f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_final_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
