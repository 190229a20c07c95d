/* Protects: several sources are mixed as their weights say, at every point of an epoch; no document of a source comes
 * again before all others of it have come; any epoch is known without those before it, for any number of ranks. */
#include "samples.h"

#include <math.h>

#include "data/sampler.h"
#include "mtp/data.h"

enum { SOURCES = 3, LONGEST = 24, BUDGET = 30 };
static const int documents[SOURCES] = {40, 12, 25};
static const int64_t shortest[SOURCES] = {4, 20, 9}; /* a source's documents have this many tokens and up to 4 more */

static mtp_verifier *verifier;
static const char *sources[SOURCES];

static int64_t length_of(int source, int document)
{
    return shortest[source] + document % 5;
}

static mtp_dataset *open_mixed(const double *weights, int64_t count)
{
    const mtp_dataset_options options = {.weights = weights};
    mtp_dataset *dataset = NULL;
    assert_ok(mtp_dataset_open(sources, count, verifier, &options, &dataset));
    return dataset;
}

static int source_of(int64_t sample)
{
    int source = 0;
    while (sample >= documents[source]) sample -= documents[source++];
    return source;
}

static mtp_loader_options load_options(void)
{
    return (mtp_loader_options){
        .tokens_per_batch = BUDGET, .shuffle = true, .seed = 11, .prefetch = 2, .num_workers = 2};
}

static mtp__plan make_plan(const mtp_dataset *dataset, int64_t epoch)
{
    const mtp_loader_options options = load_options();
    mtp__plan plan;
    assert_ok(mtp__plan_create(dataset, &options, epoch, &plan));
    return plan;
}

static void shares_are_the_weights_everywhere(void **state)
{
    (void)state;
    static const double weights[SOURCES] = {1, 5, 2};
    mtp_dataset *dataset = open_mixed(weights, SOURCES);
    int64_t all = 0;
    for (int s = 0; s < SOURCES; s++)
        for (int i = 0; i < documents[s]; i++) all += length_of(s, i);
    for (int64_t epoch = 0; epoch < 6; epoch++) {
        mtp__plan plan = make_plan(dataset, epoch);
        double tokens[SOURCES] = {0}, sum = 0;
        for (int64_t i = 0; i < plan.num_items; i++) {
            tokens[source_of(plan.items[i].sample)] += (double)plan.items[i].length;
            sum += (double)plan.items[i].length;
            for (int s = 0; s < SOURCES; s++)
                assert_true(tokens[s] > sum * weights[s] / 8 - 2 * LONGEST &&
                            tokens[s] < sum * weights[s] / 8 + 2 * LONGEST);
        }
        assert_true(sum > (double)(all - 2 * LONGEST) && sum < (double)(all + 2 * LONGEST));
        mtp__plan_free(&plan);
    }
    mtp_dataset_close(dataset);
}

/* Documents of a source over many epochs: a permutation of all of them, then another. */
static void a_source_is_gone_through_before_it_repeats(void **state)
{
    (void)state;
    static const double weights[SOURCES] = {1, 5, 2};
    mtp_dataset *dataset = open_mixed(weights, SOURCES);
    int taken[SOURCES] = {0}, counts[SOURCES][40] = {{0}};
    for (int64_t epoch = 0; epoch < 12; epoch++) {
        mtp__plan plan = make_plan(dataset, epoch);
        for (int64_t i = 0; i < plan.num_items; i++) {
            const int s = source_of(plan.items[i].sample);
            int64_t document = plan.items[i].sample;
            for (int before = 0; before < s; before++) document -= documents[before];
            const int pass = taken[s]++ / documents[s];
            assert_int_equal(counts[s][document]++, pass);
        }
        mtp__plan_free(&plan);
    }
    for (int s = 0; s < SOURCES; s++) assert_true(taken[s] > 2 * documents[s]);
    mtp_dataset_close(dataset);
}

/* Shares that the sources have of themselves change nothing: every document once an epoch. One source is no mixture. */
static void natural_weights_take_every_document_once(void **state)
{
    (void)state;
    double weights[SOURCES] = {0};
    for (int s = 0; s < SOURCES; s++)
        for (int i = 0; i < documents[s]; i++) weights[s] += (double)length_of(s, i);
    mtp_dataset *dataset = open_mixed(weights, SOURCES);
    for (int64_t epoch = 0; epoch < 3; epoch++) {
        mtp__plan plan = make_plan(dataset, epoch);
        bool seen[128] = {false};
        assert_int_equal(plan.num_items, mtp_dataset_size(dataset));
        for (int64_t i = 0; i < plan.num_items; i++) {
            assert_false(seen[plan.items[i].sample]);
            seen[plan.items[i].sample] = true;
        }
        mtp__plan_free(&plan);
    }
    mtp_dataset_close(dataset);
    mtp_dataset *alone = open_mixed(NULL, 1), *weighed = open_mixed((const double[]){3}, 1);
    mtp__plan a = make_plan(alone, 4), b = make_plan(weighed, 4);
    assert_int_equal(a.num_items, b.num_items);
    assert_memory_equal(a.items, b.items, (size_t)a.num_items * sizeof *a.items);
    assert_int_equal(mtp_dataset_fingerprint(alone), mtp_dataset_fingerprint(weighed));
    mtp__plan_free(&a);
    mtp__plan_free(&b);
    mtp_dataset_close(alone);
    mtp_dataset_close(weighed);
}

/* Sources of the same size have orders of their own, and without shuffle each is taken in its order. */
static void orders(void **state)
{
    (void)state;
    const char *pair[2] = {test_path("%s/one", test_dir()), test_path("%s/two", test_dir())};
    test_copy(sources[0], pair[0]);
    test_copy(sources[0], pair[1]);
    const mtp_dataset_options options = {.weights = (const double[]){1, 1}};
    mtp_loader_options load = load_options();
    mtp_dataset *dataset = NULL;
    assert_ok(mtp_dataset_open(pair, 2, verifier, &options, &dataset));
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        mtp__plan plan;
        load.shuffle = shuffle;
        assert_ok(mtp__plan_create(dataset, &load, 0, &plan));
        assert_int_equal(plan.num_items, 80);
        int64_t taken[2][40], count[2] = {0}, same = 0, sorted = 0;
        for (int64_t i = 0; i < 80; i++) {
            const int s = plan.items[i].sample >= 40;
            taken[s][count[s]++] = plan.items[i].sample - 40 * s;
        }
        for (int i = 0; i < 40; i++) {
            same += taken[0][i] == taken[1][i];
            sorted += taken[0][i] == i && taken[1][i] == i;
        }
        assert_true(shuffle ? same < 20 && sorted < 20 : sorted == 40);
        mtp__plan_free(&plan);
    }
    mtp_dataset_close(dataset);
}

/* Any position and any rank, without what was before; batches of ranks are those of one process. */
static void positions_and_ranks(void **state)
{
    (void)state;
    enum { TAKEN = 60, WORLD = 3 };
    static const double weights[SOURCES] = {0.5, 2, 0.25};
    mtp_dataset *dataset = open_mixed(weights, SOURCES);
    mtp_loader_options options = load_options();
    static struct {
        int64_t epoch, index, count, samples[16];
    } alone[TAKEN];
    mtp_loader *loader = NULL;
    const mtp_batch *batch = NULL;
    int64_t epoch, index;
    assert_ok(mtp_loader_create(dataset, &options, &loader));
    for (int i = 0; i < TAKEN; i++) {
        assert_ok(mtp_loader_next(loader, &batch, &alone[i].epoch, &alone[i].index));
        alone[i].count = batch->num_documents;
        assert_true(batch->num_documents <= 16);
        memcpy(alone[i].samples, batch->document_sample, (size_t)batch->num_documents * sizeof(int64_t));
        mtp_loader_release(loader, batch);
    }
    assert_true(alone[TAKEN - 1].epoch >= 1);
    mtp_loader_free(loader);
    options.world_size = WORLD;
    for (options.rank = 0; options.rank < WORLD; options.rank++) {
        assert_ok(mtp_loader_create(dataset, &options, &loader));
        for (int begin = 0; begin < TAKEN; begin += 17) {
            assert_ok(mtp_loader_seek(loader, alone[begin].epoch, alone[begin].index));
            for (int64_t i = begin + options.rank; i < TAKEN; i += WORLD) {
                assert_ok(mtp_loader_next(loader, &batch, &epoch, &index));
                assert_int_equal(epoch, alone[i].epoch);
                assert_int_equal(index, alone[i].index);
                assert_int_equal(batch->num_documents, alone[i].count);
                assert_memory_equal(batch->document_sample, alone[i].samples, (size_t)alone[i].count * sizeof(int64_t));
                mtp_loader_release(loader, batch);
            }
        }
        mtp_loader_free(loader);
    }
    mtp_dataset_close(dataset);
}

/* A checkpoint tells runs with other weights apart, and not those with the same shares. */
static void fingerprints(void **state)
{
    (void)state;
    mtp_dataset *a = open_mixed((const double[]){1, 2, 1}, SOURCES),
                *b = open_mixed((const double[]){2, 4, 2}, SOURCES);
    mtp_dataset *c = open_mixed((const double[]){1, 3, 1}, SOURCES), *d = open_mixed(NULL, SOURCES);
    assert_int_equal(mtp_dataset_fingerprint(a), mtp_dataset_fingerprint(b));
    assert_int_not_equal(mtp_dataset_fingerprint(a), mtp_dataset_fingerprint(c));
    assert_int_not_equal(mtp_dataset_fingerprint(a), mtp_dataset_fingerprint(d));
    assert_int_equal(mtp_dataset_num_sources(a), SOURCES);
    const mtp_source_info info = mtp_dataset_source(a, 1), none = mtp_dataset_source(a, SOURCES);
    assert_string_equal(info.path, sources[1]);
    assert_true(info.share == 0.5 && mtp_dataset_source(d, 1).share == 0);
    assert_int_equal(info.num_samples, documents[1]);
    assert_int_equal(none.num_samples, 0);
    assert_null(none.path);
    mtp_dataset_close(a);
    mtp_dataset_close(b);
    mtp_dataset_close(c);
    mtp_dataset_close(d);
}

static char logged[4096];
static void keep_line(void *user, mtp_log_level level, const char *line)
{
    (void)user;
    (void)level;
    const size_t used = strlen(logged);
    snprintf(logged + used, sizeof logged - used, "%s\n", line);
}

static void counts_are_said(void **state)
{
    (void)state;
    const mtp_logger logger = {.write = keep_line, .min_level = MTP_LOG_INFO};
    mtp_dataset *dataset = open_mixed((const double[]){1, 1}, 2);
    mtp_loader_options options = load_options();
    mtp_loader *loader = NULL;
    options.logger = &logger;
    assert_ok(mtp_loader_create(dataset, &options, &loader));
    /* 40 documents of 240 tokens and 12 of 261: half of 501 each */
    assert_non_null(
        strstr(logged, test_path("source %s: 50 %% of the tokens; it has 40 samples, 240 tokens, ", sources[0])));
    assert_non_null(strstr(logged, "an epoch takes 42 of its documents (1.05 passes)"));
    assert_non_null(strstr(logged, "an epoch takes 12 of its documents (1 passes)"));
    mtp_loader_free(loader);
    mtp_dataset_close(dataset);
}

static void mistakes(void **state)
{
    (void)state;
    mtp_dataset_options options = {.weights = (const double[]){1, 0}};
    mtp_dataset *dataset = NULL;
    assert_fails(mtp_dataset_open(sources, 2, verifier, &options, &dataset), MTP_E_ARGUMENT, "weight 0");
    options.weights = (const double[]){1, (double)NAN};
    assert_fails(mtp_dataset_open(sources, 2, verifier, &options, &dataset), MTP_E_ARGUMENT, sources[1]);
    options.weights = (const double[]){1e308, 1.7e308};
    assert_fails(mtp_dataset_open(sources, 2, verifier, &options, &dataset), MTP_E_ARGUMENT, "no finite number");
    /* a file of one document is on one side of a split, so a mixture with it has no share on the other */
    const char *pair[2] = {sources[0], test_path("%s/00.safetensors", sources[1])};
    options = (mtp_dataset_options){.weights = (const double[]){1, 1}, .validation_share = 0.3};
    int without = 0;
    for (options.split = MTP_SPLIT_TRAINING; options.split <= MTP_SPLIT_VALIDATION; options.split++) {
        if (mtp_dataset_open(pair, 2, verifier, &options, &dataset) != MTP_OK) {
            assert_non_null(
                strstr(mtp_last_error()->message, "00.safetensors has no sample on this side of the split"));
            without++;
        } else {
            mtp_dataset_close(dataset);
        }
    }
    assert_int_equal(without, 1);
    /* documents that do not fit are found in every source before the first step */
    dataset = open_mixed((const double[]){1000, 1}, 2);
    mtp_loader_options load = load_options();
    mtp_loader *loader = NULL;
    load.tokens_per_batch = 10;
    assert_fails(mtp_loader_create(dataset, &load, &loader), MTP_E_DATA, "more than the 10 of a batch");
    load.overlong = MTP_OVERLONG_SKIP;
    assert_fails(mtp_loader_create(dataset, &load, &loader), MTP_E_DATA,
                 "none of its 12 documents fits into the 10 tokens");
    mtp_dataset_close(dataset);
    /* a few tokens that shall come a thousand times */
    const char *few[2] = {test_path("%s/00.safetensors", sources[0]), sources[1]};
    options = (mtp_dataset_options){.weights = (const double[]){1, 1}};
    assert_ok(mtp_dataset_open(few, 2, verifier, &options, &dataset));
    const mtp__dataset_source saved = dataset->sources[0];
    dataset->sources[0].share = 100; /* of a far larger other source */
    load = load_options();
    assert_fails(mtp_loader_create(dataset, &load, &loader), MTP_E_DATA, "its 4 tokens would come");
    dataset->sources[0] = saved;
    assert_ok(mtp_loader_create(dataset, &load, &loader));
    mtp_loader_free(loader);
    mtp_dataset_close(dataset);
}

static int set_up(void **state)
{
    (void)state;
    assert_ok(mtp_verifier_open(test_tiny_verifier(), NULL, &verifier));
    for (int s = 0; s < SOURCES; s++) {
        sources[s] = test_dir();
        for (int i = 0; i < documents[s]; i++) {
            test_sample_file(test_path("%s/%02d.safetensors", sources[s], i), length_of(s, i), 1,
                             (uint64_t)(100 * s + i) + 1000);
        }
    }
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    mtp_verifier_close(verifier);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shares_are_the_weights_everywhere),
        cmocka_unit_test(a_source_is_gone_through_before_it_repeats),
        cmocka_unit_test(natural_weights_take_every_document_once),
        cmocka_unit_test(orders),
        cmocka_unit_test(positions_and_ranks),
        cmocka_unit_test(fingerprints),
        cmocka_unit_test(counts_are_said),
        cmocka_unit_test(mistakes),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
