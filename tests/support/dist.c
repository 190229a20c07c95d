#include "dist.h"

#include <math.h>

#define VERIFIER MTP_TEST_DATA "/sample/verifier" /* V 2048, Hb 128, local K/V 2 x 32, global 1 x 64 */
#define DRAFTER MTP_TEST_DATA "/sample/drafter_init"

static const char *config;

static void fill(test_sample *sample, const char *name, test_rng *rng, int64_t heads, int64_t width)
{
    test_tensor *tensor = heads ? test_sample_put(sample, name, MTP_BF16, DIST_TOKENS, heads, width)
                                : test_sample_put(sample, name, MTP_BF16, DIST_TOKENS, width);
    for (int64_t i = 0; i < tensor->count; i++) test_tensor_set(tensor, i, (double)test_uniform(rng));
}

/* DIST_TOKENS random tokens of the shipped verifier's geometry, supervised from `prompt_len` on. */
test_sample dist_sample(int64_t prompt_len, uint64_t seed)
{
    test_sample sample = {.metadata = {{"hidden_norm", "post"}}, .num_metadata = 1};
    test_rng rng = {seed};
    test_tensor *ids = test_sample_put(&sample, "token_ids", MTP_I64, DIST_TOKENS);
    for (int64_t i = 0; i < DIST_TOKENS; i++) test_tensor_set(ids, i, (double)test_below(&rng, 2048));
    fill(&sample, "hidden_states", &rng, 0, 128);
    fill(&sample, "kv_last_local_k", &rng, 2, 32);
    fill(&sample, "kv_last_local_v", &rng, 2, 32);
    fill(&sample, "kv_last_global_k", &rng, 1, 64);
    fill(&sample, "kv_last_global_v", &rng, 1, 64);
    test_tensor *mask = test_sample_put(&sample, "loss_mask", MTP_U8, DIST_TOKENS);
    for (int64_t i = prompt_len; i < DIST_TOKENS; i++) test_tensor_set(mask, i, 1);
    return sample;
}

/* Documents of the same length, so that a budget of tokens is a number of documents, and of many different numbers of
 * supervised rows. */
const char *dist_data(int count, uint64_t seed)
{
    const char *dir = test_dir();
    for (int i = 0; i < count; i++) {
        test_sample sample = dist_sample(1 + (i * 5) % (DIST_TOKENS - 2), seed + (uint64_t)i);
        test_sample_write(&sample, test_path("%s/sample_%04d.safetensors", dir, i));
        test_sample_free(&sample);
    }
    return dir;
}

int dist_setup(void **state)
{
    (void)state;
#ifndef MTP_TEST_GLOO
    print_message("skipped: this build has no Gloo (MTP_GLOO=OFF)\n");
    return 0;
#endif
    const char *data = dist_data(DIST_DOCUMENTS, 100);
    config = test_path("%s/run.toml", test_dir());
    const char *text = test_path("[model]\ndrafter = \"%s\"\nverifier = \"%s\"\n"
                                 "[data]\ntrain_data = [\"%s\"]\n"
                                 "[loss]\nnum_speculative_steps = 2\n"
                                 "[optimizer]\nlearning_rate = 1e-3\nlr_scheduler_type = \"constant\"\n"
                                 "[train]\nmax_steps = %d\nseed = 5\n"
                                 "[output]\noutput_dir = \"unset\"\nlogging_steps = 1\nsave_steps = 0\n"
                                 "[device]\nnum_threads = 1\n",
                                 DRAFTER, VERIFIER, data, DIST_STEPS);
    test_write(config, text, strlen(text));
    return 0;
}

void dist_needs_gloo(void)
{
#ifndef MTP_TEST_GLOO
    skip();
#endif
}

/* ---- runs ----------------------------------------------------------------------------------------------------- */

enum { ARGUMENTS = 64 };

/* mtprun with so many ranks, `wrap` in front of mtp when it is not NULL. */
test_run dist_launch(int ranks, const char *wrap, const char *out, const char *const *overrides)
{
    const char *argv[ARGUMENTS] = {MTP_TEST_LAUNCHER, "--nproc-per-node", test_path("%d", ranks)};
    int count = 3;
    if (wrap) {
        argv[count++] = "sh";
        argv[count++] = "-c";
        argv[count++] = wrap;
        argv[count++] = MTP_TEST_PROGRAM; /* "$0" of the script; "$@" is what follows */
    } else {
        argv[count++] = MTP_TEST_PROGRAM;
    }
    argv[count++] = "train";
    argv[count++] = config;
    argv[count++] = "--set";
    argv[count++] = test_path("output_dir=%s", out);
    for (; *overrides; overrides++) {
        if (count > ARGUMENTS - 3) fail_msg("too many arguments");
        argv[count++] = "--set";
        argv[count++] = *overrides;
    }
    return test_execute(argv);
}

/* A run of `ranks` ranks that succeeds; returns its directory. */
const char *dist_train(int ranks, const char *const *overrides)
{
    const char *out = test_path("%s/run", test_dir());
    test_run run = dist_launch(ranks, NULL, out, overrides);
    if (run.exit_code != 0) fail_msg("%d ranks: exit code %d:\n%s%s", ranks, run.exit_code, run.out, run.err);
    test_run_free(&run);
    return out;
}
const char *dist_config(void)
{
    return config;
}

const char *dist_budget(int documents)
{
    return test_path("tokens_per_batch=%d", documents * DIST_TOKENS);
}

const char *dist_accumulation(int steps)
{
    return test_path("gradient_accumulation_steps=%d", steps);
}

const char *dist_max_steps(int steps)
{
    return test_path("max_steps=%d", steps);
}

/* Lines of metrics.jsonl of a kind, as an array; json_decref. */
json_t *dist_lines(const char *run, const char *kind)
{
    char *text = test_read(test_path("%s/metrics.jsonl", run), NULL), *rest = NULL;
    json_t *lines = json_array();
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        json_t *value = json_loads(line, 0, NULL);
        assert_non_null(value);
        json_object_del(value, "time");
        if (strcmp(json_string_value(json_object_get(value, "kind")), kind) == 0)
            json_array_append_new(lines, value);
        else
            json_decref(value);
    }
    free(text);
    return lines;
}

double dist_number(const json_t *line, const char *key)
{
    return json_number_value(json_object_get(line, key));
}

/* The same steps: whole numbers are equal, losses agree to 1e-6. */
void dist_same_training(const char *one, const char *other, size_t steps)
{
    static const char *const whole[] = {"step", "epoch", "rows", "tokens", "supervised"};
    json_t *a = dist_lines(one, "train"), *b = dist_lines(other, "train");
    assert_int_equal(json_array_size(a), steps);
    assert_int_equal(json_array_size(b), steps);
    for (size_t i = 0; i < steps; i++) {
        const json_t *x = json_array_get(a, i), *y = json_array_get(b, i);
        for (size_t j = 0; j < sizeof whole / sizeof *whole; j++)
            if (!json_equal(json_object_get(x, whole[j]), json_object_get(y, whole[j])))
                fail_msg("step %zu of %s and %s: %s differs", i + 1, one, other, whole[j]);
        const double loss = dist_number(x, "loss");
        assert_true(isfinite(loss) && loss > 0);
        if (fabs(loss - dist_number(y, "loss")) > 1e-6 * loss)
            fail_msg("step %zu of %s and %s: loss %.9g and %.9g", i + 1, one, other, loss, dist_number(y, "loss"));
    }
    json_decref(a);
    json_decref(b);
}
