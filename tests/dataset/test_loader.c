/* Protects: the loader delivers every document once an epoch, in an order that depends on (seed, epoch) alone, never
 * above the token budget; it can be put anywhere, stopped any time, and says what went wrong in its thread. */
#include "samples.h"

#include <time.h>
#include <unistd.h>

#include "data/sampler.h"
#include "mtp/data.h"

static mtp_verifier *verifier;
static mtp_dataset *dataset; /* SAMPLES samples of 1 to 9 tokens; number 5 and 6 supervise nothing */
static const char *directory;
enum { SAMPLES = 23, LONGEST = 9 };

static int64_t length_of(int i)
{
    return 1 + (i * 5) % LONGEST;
}

static mtp_dataset *open_dataset(const char *dir)
{
    const mtp_dataset_options options = {.hidden_norm = MTP_HIDDEN_POST};
    mtp_dataset *opened = NULL;
    if (mtp_dataset_open(&dir, 1, verifier, &options, &opened) != MTP_OK) fail_msg("%s", mtp_last_error()->message);
    return opened;
}

static int set_up(void **state)
{
    (void)state;
    if (mtp_verifier_open(test_tiny_verifier(), NULL, &verifier) != MTP_OK) return -1;
    directory = test_dir();
    for (int i = 0; i < SAMPLES; i++) {
        const int64_t length = length_of(i);
        test_sample_file(test_path("%s/s%02d.safetensors", directory, i), length, i == 5 || i == 6 ? length : 1,
                         50 + (uint64_t)i);
    }
    dataset = open_dataset(directory);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    mtp_dataset_close(dataset);
    mtp_verifier_close(verifier);
    return 0;
}

static mtp_loader *make_loader(int64_t budget, bool shuffle, int64_t prefetch)
{
    const mtp_loader_options options = {
        .tokens_per_batch = budget, .shuffle = shuffle, .seed = 42, .prefetch = prefetch, .num_workers = prefetch};
    mtp_loader *loader = NULL;
    if (mtp_loader_create(dataset, &options, &loader) != MTP_OK) fail_msg("%s", mtp_last_error()->message);
    return loader;
}

static int64_t batches_of(const mtp_loader *loader, int64_t epoch)
{
    int64_t count = 0;
    if (mtp_loader_batches(loader, epoch, &count) != MTP_OK) fail_msg("%s", mtp_last_error()->message);
    return count;
}

/* The samples of the next batch as text, and its position. */
static const char *next_as_text(mtp_loader *loader)
{
    const mtp_batch *batch = NULL;
    int64_t epoch = -1, index = -1;
    if (mtp_loader_next(loader, &batch, &epoch, &index) != MTP_OK) fail_msg("%s", mtp_last_error()->message);
    char text[512];
    int used = snprintf(text, sizeof text, "%lld/%lld:", (long long)epoch, (long long)index);
    for (int64_t i = 0; i < batch->num_documents; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, " %lld", (long long)batch->document_sample[i]);
    mtp_loader_release(loader, batch);
    return test_path("%s", text);
}

/* ---- the plan ------------------------------------------------------------------------------------------------- */

static void order_is_a_function_of_seed_and_epoch(void **state)
{
    (void)state;
    enum { COUNT = 1000 };
    uint32_t a[COUNT], b[COUNT];
    bool seen[COUNT] = {false};
    mtp__sampler_order(7, 3, true, COUNT, a);
    mtp__sampler_order(7, 3, true, COUNT, b);
    assert_memory_equal(a, b, sizeof a);
    for (int i = 0; i < COUNT; i++) {
        assert_true(a[i] < COUNT && !seen[a[i]]);
        seen[a[i]] = true;
    }
    mtp__sampler_order(7, 4, true, COUNT, b);
    assert_memory_not_equal(a, b, sizeof a);
    mtp__sampler_order(8, 3, true, COUNT, b);
    assert_memory_not_equal(a, b, sizeof a);
    mtp__sampler_order(7, 3, false, COUNT, b);
    for (uint32_t i = 0; i < COUNT; i++) assert_int_equal(b[i], i);
}

/* Lengths in order: 1 6 2 7 3 8 4 9 5, again and again; numbers 5 (8 tokens) and 6 (4 tokens) supervise nothing. */
static void next_fit_within_the_budget(void **state)
{
    (void)state;
    mtp_loader *loader = make_loader(12, false, 2);
    static const char *const expected[] = {"0/0: 0 1 2", "0/1: 3 4"};
    for (int i = 0; i < 2; i++) assert_string_equal(next_as_text(loader), expected[i]);
    assert_int_equal(mtp_loader_get_stats(loader).batches_skipped, 0);
    assert_string_equal(next_as_text(loader), "0/2: 7"); /* batch 5 6 holds nothing to learn */
    assert_int_equal(mtp_loader_get_stats(loader).batches_skipped, 1);
    mtp_loader_free(loader);
}

static void every_document_once_an_epoch(void **state)
{
    (void)state;
    mtp_loader *loader = make_loader(12, true, 3);
    char *first_epoch = NULL;
    for (int64_t want = 0; want < 3; want++) {
        bool seen[SAMPLES] = {false};
        const int64_t count = batches_of(loader, want);
        char *order = NULL;
        size_t size = 0;
        FILE *text = open_memstream(&order, &size);
        for (int64_t i = 0; i < count; i++) {
            const mtp_batch *batch = NULL;
            int64_t epoch = -1, index = -1;
            assert_ok(mtp_loader_next(loader, &batch, &epoch, &index));
            assert_int_equal(epoch, want);
            assert_int_equal(index, i);
            assert_int_equal(batch->batch, 1);
            assert_true(batch->seq <= 12 && batch->num_supervised > 0);
            for (int64_t j = 0; j < batch->num_documents; j++) {
                const int64_t sample = batch->document_sample[j];
                assert_false(seen[sample]);
                seen[sample] = true;
                fprintf(text, "%lld ", (long long)sample);
                assert_int_equal(batch->document_end[j] - batch->document_begin[j], length_of((int)sample));
            }
            mtp_loader_release(loader, batch);
        }
        fclose(text);
        int64_t missing = 0;
        for (int i = 0; i < SAMPLES; i++) missing += !seen[i];
        assert_true(missing == 0 || mtp_loader_get_stats(loader).batches_skipped > 0);
        if (!first_epoch) {
            first_epoch = order;
            continue;
        }
        assert_string_not_equal(order, first_epoch);
        free(order);
    }
    free(first_epoch);
    mtp_loader_free(loader);
}

static char logged[1024];
static void keep_line(void *user, mtp_log_level level, const char *line)
{
    (void)user;
    const size_t used = strlen(logged);
    snprintf(logged + used, sizeof logged - used, "%d %s\n", (int)level, line);
}

static void overlong_documents(void **state)
{
    (void)state;
    const mtp_logger logger = {.write = keep_line, .min_level = MTP_LOG_INFO};
    mtp_loader_options options = {.tokens_per_batch = 7, .prefetch = 1, .logger = &logger};
    mtp_loader *loader = NULL;
    assert_fails(mtp_loader_create(dataset, &options, &loader), MTP_E_DATA, "s05.safetensors has 8 tokens");
    assert_fails(mtp_loader_create(dataset, &options, &loader), MTP_E_DATA, "more than the 7 of a batch");
    assert_null(loader);
    /* 5, 7, 14, 16 are longer than 7 (8 and 9 tokens) */
    static const struct {
        mtp_overlong overlong;
        int64_t truncated, skipped;
    } cases[] = {{MTP_OVERLONG_TRUNCATE, 4, 0}, {MTP_OVERLONG_SKIP, 0, 4}};
    for (int i = 0; i < 2; i++) {
        options.overlong = cases[i].overlong;
        assert_ok(mtp_loader_create(dataset, &options, &loader));
        assert_non_null(strstr(logged, test_path("longer than 7 tokens: %d samples truncated, %d skipped",
                                                 (int)cases[i].truncated, (int)cases[i].skipped)));
        bool seen = false;
        const int64_t count = batches_of(loader, 0);
        for (int64_t j = 0; j < count; j++) {
            const mtp_batch *batch = NULL;
            int64_t epoch, index;
            assert_ok(mtp_loader_next(loader, &batch, &epoch, &index));
            assert_true(batch->seq <= 7);
            for (int64_t d = 0; d < batch->num_documents; d++) seen = seen || batch->document_sample[d] == 7;
            mtp_loader_release(loader, batch);
        }
        assert_int_equal(seen, cases[i].overlong == MTP_OVERLONG_TRUNCATE);
        assert_int_equal(mtp_loader_get_stats(loader).documents_truncated, cases[i].truncated);
        assert_int_equal(mtp_loader_get_stats(loader).documents_skipped, cases[i].skipped);
        mtp_loader_free(loader);
    }
}

/* The last document of the epoch is passed over: it is counted with the last batch. */
static void counts_are_complete_with_the_last_batch(void **state)
{
    (void)state;
    const char *dir = test_dir();
    for (int i = 0; i < 3; i++) {
        test_sample_file(test_path("%s/s%d.safetensors", dir, i), i == 2 ? 9 : 4, i == 1 ? 4 : 1, 1 + (uint64_t)i);
    }
    mtp_dataset *three = open_dataset(dir);
    const mtp_loader_options options = {.tokens_per_batch = 6, .prefetch = 1, .overlong = MTP_OVERLONG_SKIP};
    mtp_loader *loader = NULL;
    assert_ok(mtp_loader_create(three, &options, &loader));
    assert_int_equal(batches_of(loader, 0), 1);
    assert_string_equal(next_as_text(loader), "0/0: 0");
    assert_int_equal(mtp_loader_get_stats(loader).documents_skipped, 1);
    assert_int_equal(mtp_loader_get_stats(loader).batches_skipped, 1);
    mtp_loader_free(loader);
    mtp_dataset_close(three);
}

/* A document whose only targets lie beyond the cut has none; a data set without any is refused at once. */
static void nothing_to_learn_is_an_error(void **state)
{
    (void)state;
    const char *dir = test_dir();
    test_sample_file(test_path("%s/a.safetensors", dir), 10, 6, 1);
    mtp_dataset *late = open_dataset(dir);
    mtp_loader_options options = {.tokens_per_batch = 6, .prefetch = 1, .overlong = MTP_OVERLONG_TRUNCATE};
    mtp_loader *loader = NULL;
    assert_fails(mtp_loader_create(late, &options, &loader), MTP_E_DATA, "could be a target within 6 tokens");
    options.tokens_per_batch = 7;
    assert_ok(mtp_loader_create(late, &options, &loader));
    const mtp_batch *batch = NULL;
    int64_t epoch, index;
    assert_ok(mtp_loader_next(loader, &batch, &epoch, &index));
    assert_int_equal(batch->num_supervised, 1);
    mtp_loader_free(loader);
    mtp_dataset_close(late);
}

/* ---- positions ------------------------------------------------------------------------------------------------ */

static void seek_gives_what_reading_on_gives(void **state)
{
    (void)state;
    mtp_loader *loader = make_loader(10, true, 2);
    const char *run[60];
    for (int i = 0; i < 60; i++) run[i] = next_as_text(loader);
    mtp_loader_free(loader);
    loader = make_loader(10, true, 3);
    for (int i = 58; i >= 0; i -= 7) {
        long long epoch, index;
        assert_int_equal(sscanf(run[i], "%lld/%lld", &epoch, &index), 2);
        assert_ok(mtp_loader_seek(loader, epoch, index));
        assert_string_equal(next_as_text(loader), run[i]);
        assert_string_equal(next_as_text(loader), run[i + 1]);
    }
    const int64_t count = batches_of(loader, 0);
    assert_ok(mtp_loader_seek(loader, 0, count)); /* behind the last: the next epoch */
    assert_string_equal(next_as_text(loader), run[count]);
    assert_fails(mtp_loader_seek(loader, 0, count + 1), MTP_E_ARGUMENT, "of epoch 0, which has");
    mtp_loader_free(loader);
}

static void held_batches_stay_as_they_are(void **state)
{
    (void)state;
    mtp_loader *loader = make_loader(12, true, 2);
    const mtp_batch *held[3], *more = NULL;
    int64_t epoch, index;
    static int32_t copies[3][12];
    for (int i = 0; i < 3; i++) {
        assert_ok(mtp_loader_next(loader, &held[i], &epoch, &index));
        memcpy(copies[i], held[i]->token_ids, (size_t)held[i]->seq * sizeof(int32_t));
    }
    assert_fails(mtp_loader_next(loader, &more, &epoch, &index), MTP_E_ARGUMENT, "release one first");
    assert_ok(mtp_loader_seek(loader, 1, 0));
    mtp_loader_release(loader, held[2]);
    for (int i = 0; i < 20; i++) (void)next_as_text(loader);
    for (int i = 0; i < 2; i++)
        assert_memory_equal(copies[i], held[i]->token_ids, (size_t)held[i]->seq * sizeof(int32_t));
    mtp_loader_free(loader);
}

/* The ring: prefetch + 2 blocks, the same ones for ever. */
static void memory_is_reused(void **state)
{
    (void)state;
    mtp_loader *loader = make_loader(12, true, 2);
    const size_t bytes = mtp_loader_get_stats(loader).memory_bytes;
    const mtp_batch *seen[4] = {NULL};
    int known = 0;
    int64_t tokens = 0;
    for (int i = 0; i < 200; i++) {
        const mtp_batch *batch = NULL;
        int64_t epoch, index;
        assert_ok(mtp_loader_next(loader, &batch, &epoch, &index));
        int j = 0;
        while (j < known && seen[j] != batch) j++;
        if (j == known) {
            assert_true(known < 4);
            seen[known++] = batch;
        }
        tokens += batch->seq;
        mtp_loader_release(loader, batch);
    }
    const mtp_loader_stats stats = mtp_loader_get_stats(loader);
    assert_int_equal(stats.memory_bytes, bytes);
    assert_true(stats.tokens_read >= tokens && stats.tokens_read <= tokens + 4 * 12);
    assert_true(stats.wait_seconds >= 0);
    mtp_loader_free(loader);
    /* a budget beyond all the data takes no more than the data does */
    mtp_loader *large = make_loader(INT64_C(1) << 40, false, 1);
    assert_true(mtp_loader_get_stats(large).memory_bytes < 1 << 20);
    mtp_loader_free(large);
}

/* ---- ends ----------------------------------------------------------------------------------------------------- */

static void pause_ms(long ms)
{
    const struct timespec time = {.tv_nsec = ms * 1000000};
    nanosleep(&time, NULL);
}

static void stops_at_any_moment(void **state)
{
    (void)state;
    for (int i = 0; i < 30; i++) {
        mtp_loader *loader = make_loader(12, true, 1 + i % 3);
        if (i % 2) pause_ms(2); /* the ring is full, the thread waits */
        if (i % 3 == 1) (void)next_as_text(loader);
        if (i % 5 == 1) assert_ok(mtp_loader_seek(loader, 2, 1));
        mtp_loader_free(loader);
    }
    mtp_loader_free(NULL);
    mtp_loader_release(NULL, NULL);
}

static void a_bad_sample_arrives_with_its_message(void **state)
{
    (void)state;
    const char *dir = test_dir();
    for (int i = 0; i < 3; i++) {
        test_sample sample = test_sample_make(6, 1, 1 + (uint64_t)i);
        if (i == 1)
            test_tensor_set(test_sample_find(&sample, "kv_last_global_v"), 3 * TINY_GLOBAL_DIM + 3, 1e300 * 1e300);
        test_sample_write(&sample, test_path("%s/s%d.safetensors", dir, i));
        test_sample_free(&sample);
    }
    mtp_dataset *broken = open_dataset(dir);
    const mtp_loader_options options = {.tokens_per_batch = 6, .prefetch = 2, .num_workers = 2};
    mtp_loader *loader = NULL;
    assert_ok(mtp_loader_create(broken, &options, &loader));
    const mtp_batch *batch = NULL;
    int64_t epoch, index;
    assert_string_equal(next_as_text(loader), "0/0: 0"); /* what is good comes first */
    for (int i = 0; i < 2; i++) {
        assert_fails(
            mtp_loader_next(loader, &batch, &epoch, &index), MTP_E_DATA,
            "s1.safetensors: kv_last_global_v: NaN or Inf at token 3, value 3; make this sample again (mtp check "
            "lists all that are bad), or leave it out: mtp pack --max-bad");
        assert_null(batch);
    }
    assert_ok(mtp_loader_seek(loader, 0, 2)); /* one may go on elsewhere */
    assert_string_equal(next_as_text(loader), "0/2: 2");
    mtp_loader_free(loader);
    /* a file that vanishes */
    assert_ok(mtp_loader_create(broken, &options, &loader));
    unlink(test_path("%s/s2.safetensors", dir));
    assert_ok(mtp_loader_seek(loader, 1, 2));
    assert_fails(mtp_loader_next(loader, &batch, &epoch, &index), MTP_E_NOT_FOUND, "s2.safetensors");
    mtp_loader_free(loader);
    mtp_dataset_close(broken);
}

static void bad_options(void **state)
{
    (void)state;
    mtp_loader *loader = NULL;
    mtp_loader_options options = {.tokens_per_batch = 0, .prefetch = 1};
    assert_fails(mtp_loader_create(dataset, &options, &loader), MTP_E_ARGUMENT, "tokens_per_batch >= 1");
    options = (mtp_loader_options){.tokens_per_batch = 16, .prefetch = 0};
    assert_fails(mtp_loader_create(dataset, &options, &loader), MTP_E_ARGUMENT, "prefetch >= 1");
    options = (mtp_loader_options){.tokens_per_batch = 16, .prefetch = 1, .num_workers = -1};
    assert_fails(mtp_loader_create(dataset, &options, &loader), MTP_E_ARGUMENT, "num_workers >= 0");
    options = (mtp_loader_options){.tokens_per_batch = 16, .prefetch = 1, .num_speculative_steps = 65};
    assert_fails(mtp_loader_create(dataset, &options, &loader), MTP_E_ARGUMENT, "num_speculative_steps");
    options = (mtp_loader_options){.tokens_per_batch = 16, .prefetch = 1, .allocator = &(mtp_allocator){0}};
    assert_fails(mtp_loader_create(dataset, &options, &loader), MTP_E_ARGUMENT, "allocator");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(order_is_a_function_of_seed_and_epoch),
        cmocka_unit_test(next_fit_within_the_budget),
        cmocka_unit_test(every_document_once_an_epoch),
        cmocka_unit_test(overlong_documents),
        cmocka_unit_test(counts_are_complete_with_the_last_batch),
        cmocka_unit_test(nothing_to_learn_is_an_error),
        cmocka_unit_test(seek_gives_what_reading_on_gives),
        cmocka_unit_test(held_batches_stay_as_they_are),
        cmocka_unit_test(memory_is_reused),
        cmocka_unit_test(stops_at_any_moment),
        cmocka_unit_test(a_bad_sample_arrives_with_its_message),
        cmocka_unit_test(bad_options),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
