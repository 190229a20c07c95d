/* Protects: a configuration is read strictly: what is misspelt, mistyped, out of range, missing or contradictory is
 * refused with its place; the resolved one reads back as itself; the reference in configs/ is the schema. */
#include "support.h"

#include "mtp/train.h"
#include "run/config.h"
#include "run/resume.h"

static const char *const drafter = MTP_TEST_DATA "/sample/drafter_init";
static const char *const dense = MTP_TEST_DATA "/sample/drafter_init_dense";

static const char *minimal(const char *model)
{
    static char text[4096];
    snprintf(
        text, sizeof text,
        "[model]\ndrafter = \"%s\"\nverifier = \"%s/sample/verifier\"\n[data]\ntrain_data = [\"%s/sample/train\"]\n"
        "[train]\nmax_steps = 20\n[output]\noutput_dir = \"out\"\n",
        model, MTP_TEST_DATA, MTP_TEST_DATA);
    return text;
}

static const char *write_config(const char *text)
{
    const char *path = test_path("%s/run.toml", test_dir());
    test_write(path, text, strlen(text));
    return path;
}

static mtp_train_config *load(const char *text)
{
    mtp_train_config *config = NULL;
    assert_ok(mtp_train_config_load(write_config(text), NULL, 0, &config));
    return config;
}

/* Line 10 of minimal() and what stands there. */
static void refused(const char *line, const char *message)
{
    mtp_train_config *config = NULL;
    const char *path = write_config(test_path("%s%s\n", minimal(drafter), line));
    assert_fails(mtp_train_config_load(path, NULL, 0, &config), MTP_E_CONFIG, message);
    assert_null(config);
}

static void refused_override(const char *override, const char *message)
{
    mtp_train_config *config = NULL;
    assert_fails(mtp_train_config_load(write_config(minimal(drafter)), &override, 1, &config), MTP_E_CONFIG, message);
}

static void defaults(void **state)
{
    (void)state;
    mtp_train_config *c = load(minimal(drafter));
    assert_string_equal(c->drafter, drafter);
    assert_int_equal(c->max_steps, 20);
    assert_int_equal(c->num_speculative_steps, 3);
    assert_int_equal(c->freeze.count, 1);
    assert_string_equal(c->freeze.items[0], "*.layer_scalar");
    assert_int_equal(c->hidden_norm, MTP_HIDDEN_UNSET);
    assert_int_equal(c->overlong, MTP_OVERLONG_ERROR);
    assert_int_equal(c->lr_scheduler_type, MTP_LR_COSINE);
    assert_true(c->shuffle);
    assert_true(c->adam_beta2 == 0.95);
    assert_ok(mtp_train_config_check_paths(c));
    mtp_train_config_free(c);
}

static void names_stand_for_their_enumerations(void **state)
{
    (void)state;
    mtp_train_config *c = load(test_path("%s[loss]\nhead = \"hierarchical\"\nfeeding = \"self\"\n[optimizer]\n"
                                         "lr_scheduler_type = \"wsd\"\n",
                                         minimal(drafter)));
    assert_int_equal(c->head, MTP_HEAD_HIERARCHICAL);
    assert_int_equal(c->feeding, MTP_FEED_SELF);
    assert_int_equal(c->lr_scheduler_type, MTP_LR_WSD);
    mtp_train_config_free(c);
}

static void head_follows_the_drafter(void **state)
{
    (void)state;
    mtp_train_config *c = load(minimal(drafter));
    assert_int_equal(c->head, MTP_HEAD_MASKED);
    assert_true(c->centroid_weight == 1.0);
    mtp_train_config_free(c);
    c = load(minimal(dense));
    assert_int_equal(c->head, MTP_HEAD_FLAT);
    assert_true(c->centroid_weight == 0.0);
    mtp_train_config_free(c);
    const char *path = write_config(test_path("%s[loss]\nhead = \"masked\"\n", minimal(dense)));
    assert_fails(mtp_train_config_load(path, NULL, 0, &c), MTP_E_CONFIG, "run.toml:11: head: the drafter");
    path = write_config(test_path("%s[loss]\ncentroid_weight = 0.5\n", minimal(dense)));
    assert_fails(mtp_train_config_load(path, NULL, 0, &c), MTP_E_CONFIG, "run.toml:11: centroid_weight:");
}

static void mistakes_say_their_line(void **state)
{
    (void)state;
    refused("learning_rte = 1e-3",
            "run.toml:10: unknown key 'output.learning_rte' (did you mean 'optimizer.learning_rate'?)");
    refused("learning_rate = 1e-3", "unknown key 'output.learning_rate' (did you mean 'optimizer.learning_rate'?)");
    refused("zzzz = 1", "run.toml:10: unknown key 'output.zzzz'; mtp train --print-reference lists all");
    refused("[optimiser]\nlearning_rate = 1.0", "run.toml:10: unknown table 'optimiser' (did you mean 'optimizer'?)");
    refused("logging_steps = \"ten\"", "run.toml:10: logging_steps: expected an integer, got a string");
    refused("logging_steps = 1.5", "logging_steps: expected an integer");
    refused("logging_steps = 0", "run.toml:10: logging_steps = 0: must be from 1");
    refused("resume = 3", "resume: expected a string");
    refused("[loss]\nhead = \"maskd\"", "run.toml:11: head = \"maskd\": must be one of \"flat\", \"masked\", "
                                        "\"hierarchical\", \"auto\" (did you mean \"masked\"?)");
    refused("[loss]\ndetach_state = 1", "detach_state: expected true or false");
    refused("[optimizer]\nwarmup_steps = 9223372036854775807",
            "warmup_steps = 9223372036854775807: must be from 0 to 9007199254740992");
    refused("[optimizer]\nlearning_rate = -1.0", "learning_rate = -1: must be from 0 to 10");
    refused("[optimizer]\nlearning_rate = nan", "learning_rate = nan: must be from 0 to 10");
    refused("[model.freeze]\nx = 1", "freeze");
    refused("[optimizer]\nno_decay = [1]", "no_decay: expected a list of strings");
    refused("save_steps = 1\nsave_steps = 2", "run.toml:11");
}

static void overrides_win_and_say_set(void **state)
{
    (void)state;
    const char *const overrides[] = {"max_steps=30", "optimizer.learning_rate=2e-3", "output_dir=runs/x",
                                     "train.max_steps=40", "freeze=[\"model.norm.weight\", \"*.layer_scalar\"]"};
    mtp_train_config *c = NULL;
    assert_ok(mtp_train_config_load(write_config(minimal(drafter)), overrides, 5, &c));
    assert_int_equal(c->max_steps, 40);
    assert_true(c->learning_rate == 2e-3);
    assert_string_equal(c->output_dir, "runs/x");
    assert_int_equal(c->freeze.count, 2);
    mtp_train_config_free(c);
    refused_override("max_stps=3", "--set max_stps=3: unknown key 'max_stps' (did you mean 'train.max_steps'?)");
    refused_override("max_steps=-3", "--set max_steps=-3: max_steps = -3: must be from 0");
    refused_override("loss.max_steps=3",
                     "--set loss.max_steps=3: unknown key 'loss.max_steps' (did you mean 'train.max_steps'?)");
    refused_override("drafter=/nowhere/at/all", "--set drafter=/nowhere/at/all: drafter: ");
}

static void contradictions(void **state)
{
    (void)state;
    refused("[data]\n", "run.toml");
    refused_override("num_train_epochs=2", "--set num_train_epochs=2: num_train_epochs: max_steps = 20 is given too");
    refused_override("max_steps=0", "max_steps: the run has no length");
    refused_override("warmup_steps=21", "--set warmup_steps=21: warmup_steps: 21 is more than max_steps = 20");
    refused_override("eval_steps=5", "--set eval_steps=5: eval_steps: needs eval_data");
    refused_override("keep_best=true", "--set keep_best=true: keep_best: needs eval_steps");
    refused_override("patience=2", "--set patience=2: patience: needs eval_steps");
    refused_override("train_data=[]", "--set train_data=[]: train_data: must be given, in the table [data]");
}

/* minimal() without its table [data], and `data` in its place. */
static const char *with_data(const char *data)
{
    return test_path(
        "%s[model]\ndrafter = \"%s\"\nverifier = \"%s/sample/verifier\"\n[train]\nmax_steps = 20\n[output]\n"
        "output_dir = \"out\"\n",
        data, drafter, MTP_TEST_DATA);
}

static void data_refused(const char *data, const char *message)
{
    mtp_train_config *config = NULL;
    assert_fails(mtp_train_config_load(write_config(with_data(data)), NULL, 0, &config), MTP_E_CONFIG, message);
}

/* Three ways to write the same. */
static void sources_with_weights(void **state)
{
    (void)state;
    static const char *const forms[] = {
        "[[data]]\npath = \"a\"\nweight = 3\n[[data]]\npath = \"b\"\n",
        "[data]\nshuffle = true\n[[data.sources]]\nweight = 3.0\npath = \"a\"\n[[data.sources]]\npath = \"b\"\n",
        "[data]\nsources = [{ path = \"a\", weight = 3 }, { path = \"b\" }]\n"};
    for (int i = 0; i < 3; i++) {
        mtp_train_config *c = load(with_data(forms[i])), *again;
        char *text = NULL;
        assert_int_equal(c->train_data.count, 0);
        assert_int_equal(c->sources.count, 2);
        assert_string_equal(c->sources.items[0].path, "a");
        assert_string_equal(c->sources.items[1].path, "b");
        assert_true(c->sources.items[0].weight == 3 && c->sources.items[1].weight == 1);
        assert_fails(mtp_train_config_check_paths(c), MTP_E_CONFIG, "sources: there is no file or directory a");
        assert_ok(mtp_train_config_print(c, &text));
        assert_non_null(strstr(text, "sources = [{ path = \"a\", weight = 3.0 }, { path = \"b\", weight = 1.0 }]"));
        again = load(text);
        assert_int_equal(again->sources.count, 2);
        mtp_train_config_free(again);
        mtp_train_config_free(c);
        free(text);
    }
    refused_override("sources=[{path=\"a\"}]",
                     "--set sources=[{path=\"a\"}]: sources: train_data is given too; use one");
    refused_override("data=[{path=\"a\"}]", "sources: train_data is given too");
    data_refused("", "train_data: must be given, in the table [data]");
    data_refused("[[data]]\nweight = 3\n", "run.toml:1: a source without a path");
    data_refused("[[data]]\npath = \"\"\n", "run.toml:2: path: expected a string");
    data_refused("[[data]]\npath = [\"a\"]\n", "run.toml:2: path: expected a string");
    data_refused("[[data]]\npath = \"a\"\nweight = 0\n", "run.toml:3: weight = 0: must be from 1e-06 to 1000000");
    data_refused("[[data]]\npath = \"a\"\nweight = nan\n", "run.toml:3: weight = nan: must be");
    data_refused("[[data]]\npath = \"a\"\nweight = \"3\"\n", "run.toml:3: weight: expected a number, got a string");
    data_refused("[[data]]\npath = \"a\"\nwieght = 3\n", "unknown key 'wieght' of a source (did you mean 'weight'?)");
    data_refused("[[data]]\npath = \"a\"\ntokens_per_batch = 9\n",
                 "not 'tokens_per_batch'; the other keys of the section");
    data_refused("[data]\nsources = [\"a\"]\n", "sources: expected a table with path and weight, got a string");
    data_refused("[data]\nsources = \"a\"\n", "sources: expected a list of tables, got a string");
}

static void missing_paths_say_their_line(void **state)
{
    (void)state;
    mtp_train_config *c = load(test_path("%s", minimal(drafter)));
    free(c->verifier);
    c->verifier = strdup("/nowhere");
    assert_fails(mtp_train_config_check_paths(c), MTP_E_CONFIG, "run.toml:3: verifier: there is no directory /nowhere");
    mtp_train_config_free(c);
    const char *override = "eval_data=[\"/nowhere/data\"]";
    assert_ok(mtp_train_config_load(write_config(minimal(drafter)), &override, 1, &c));
    assert_fails(mtp_train_config_check_paths(c), MTP_E_CONFIG,
                 "--set eval_data=[\"/nowhere/data\"]: eval_data: there is no file or directory /nowhere/data");
    mtp_train_config_free(c);
    assert_fails(mtp_train_config_load("/nowhere/run.toml", NULL, 0, &c), MTP_E_CONFIG, "/nowhere/run.toml");
    assert_fails(mtp_train_config_load(test_dir(), NULL, 0, &c), MTP_E_CONFIG, "");
}

static void resolved_reads_back_as_itself(void **state)
{
    (void)state;
    char *first = NULL, *second = NULL;
    mtp_train_config *c = load(test_path("%s[optimizer]\nlearning_rate = 0.1234567890123456789\nadam_epsilon = 1e-12\n"
                                         "no_decay = [\"a \\\"quoted\\\\ name\\u0001\"]\n",
                                         minimal(drafter)));
    assert_ok(mtp_train_config_print(c, &first));
    const double rate = c->learning_rate;
    mtp_train_config_free(c);
    c = load(first);
    assert_true(c->learning_rate == rate);
    assert_string_equal(c->no_decay.items[0], "a \"quoted\\ name\001");
    assert_ok(mtp_train_config_print(c, &second));
    assert_string_equal(first, second);
    assert_non_null(strstr(first, "head = \"masked\""));
    mtp_train_config_free(c);
    free(first);
    free(second);
}

static void reference_is_the_schema(void **state)
{
    (void)state;
    size_t size;
    char *text = NULL, *file = test_read(MTP_TEST_DATA "/../../configs/reference.toml", &size);
    assert_ok(mtp_train_config_reference(&text));
    if (strcmp(text, file) != 0) fail_msg("configs/reference.toml is not what mtp train --print-reference prints");
    const char *const overrides[] = {test_path("drafter=\"%s\"", drafter)};
    mtp_train_config *c = NULL;
    assert_ok(mtp_train_config_load(MTP_TEST_DATA "/../../configs/reference.toml", overrides, 1, &c));
    assert_string_equal(c->output_dir, "runs/e2b");
    mtp_train_config_free(c);
    free(file);
    free(text);
}

/* Two keys of one name would make `--set key=value` ambiguous; a field twice would leave another without a row. */
static void fields_are_unique(void **state)
{
    (void)state;
    size_t count;
    const mtp__field *fields = mtp__config_fields(&count);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(mtp__config_find(fields[i].key), i);
        assert_non_null(mtp__config_section_help(fields[i].section));
        for (size_t j = 0; j < i; j++) assert_int_not_equal(fields[i].offset, fields[j].offset);
    }
}

/* A checkpoint from before there was a key resumes with the key's default, and with nothing else. */
static void test_resume_over_a_new_key(void **state)
{
    (void)state;
    mtp_train_config *config = load(minimal(drafter)), *changed = NULL;
    const char *override = "step_weight_beta=0.9";
    const mtp__resume_facts facts = {.world_size = 1, .schedule = {.max_steps = 20}};
    mtp__manifest *manifest = calloc(1, sizeof *manifest);
    *manifest = (mtp__manifest){.directory = strdup("old"), .world_size = 1, .step = 5, .total_steps = 20};
    assert_ok(mtp__resume_record(config, manifest));
    bool dropped = false;
    for (int64_t i = 0; i < manifest->num_settings; i++) {
        if (strcmp(manifest->settings[i].key, "loss.step_weight_beta") != 0) continue;
        strcpy(manifest->settings[i].key, "gone");
        dropped = true;
    }
    assert_true(dropped);
    assert_ok(mtp__resume_check(config, &facts, manifest));
    assert_ok(mtp_train_config_load(write_config(minimal(drafter)), &override, 1, &changed));
    assert_fails(mtp__resume_check(changed, &facts, manifest), MTP_E_CONFIG, "loss.step_weight_beta: not known then");
    mtp__manifest_free(manifest);
    mtp_train_config_free(changed);
    mtp_train_config_free(config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resume_over_a_new_key),
        cmocka_unit_test(defaults),
        cmocka_unit_test(names_stand_for_their_enumerations),
        cmocka_unit_test(head_follows_the_drafter),
        cmocka_unit_test(mistakes_say_their_line),
        cmocka_unit_test(overrides_win_and_say_set),
        cmocka_unit_test(contradictions),
        cmocka_unit_test(sources_with_weights),
        cmocka_unit_test(missing_paths_say_their_line),
        cmocka_unit_test(resolved_reads_back_as_itself),
        cmocka_unit_test(reference_is_the_schema),
        cmocka_unit_test(fields_are_unique),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
