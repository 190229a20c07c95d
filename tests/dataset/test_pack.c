/* Protects: packing: the store gives the batches of the samples it was made of, in every variant,
 * and the loader what rows of training see of them; the bytes depend on
 * nothing but input and settings; an interrupted packing goes on to the same bytes; bad samples are listed with their
 * reason and no more than allowed; another packing, a second packer and a finished store are told apart. */
#include "support.h"

#include <math.h>
#include <unistd.h>

#include "base/file.h"
#include "data/dataset.h"
#include "pack.h"
#include "samples.h"

typedef struct world {
    const char *verifier_dir, *samples;
    mtp_verifier *verifier;
} world;

enum { SAMPLES = 12 };

static const char *sample_path(const world *w, int i)
{
    return test_path("%s/sample_%02d.safetensors", w->samples, i);
}

static void write_sample(const world *w, int i)
{
    test_sample sample = test_sample_make(5 + 3 * i, i % 5, (uint64_t)i + 1);
    static const char *const reals[] = {"hidden_states", "kv_last_local_k", "kv_last_local_v", "kv_last_global_k",
                                        "kv_last_global_v"};
    for (size_t j = 0; j < sizeof reals / sizeof *reals; j++)
        test_sample_retype(&sample, reals[j], i % 3 ? MTP_BF16 : MTP_F32);
    if (i % 4 == 0) sample.metadata[0].value = "pre";
    test_sample_write(&sample, sample_path(w, i));
    test_sample_free(&sample);
}

static int set_up(void **state)
{
    world *w = calloc(1, sizeof *w);
    w->verifier_dir = test_tiny_verifier();
    w->samples = test_dir();
    assert_ok(mtp_verifier_open(w->verifier_dir, NULL, &w->verifier));
    for (int i = 0; i < SAMPLES; i++) write_sample(w, i);
    *state = w;
    return 0;
}

static int tear_down(void **state)
{
    world *w = *state;
    mtp_verifier_close(w->verifier);
    free(w);
    return 0;
}

static mtp_dataset *open_data(const world *w, const char *path)
{
    const mtp_dataset_options options = {.hidden_norm = MTP_HIDDEN_UNSET};
    mtp_dataset *dataset = NULL;
    assert_ok(mtp_dataset_open(&path, 1, w->verifier, &options, &dataset));
    return dataset;
}

static mtp_pack_summary pack_ok(const char *directory, const mtp_pack_options *options)
{
    mtp_pack_summary summary;
    assert_ok(mtp_pack(directory, options, &summary));
    return summary;
}

/* A value of a batch whatever its type; bf16 to float. */
static float real_at(mtp_view view, int64_t i)
{
    if (view.dtype == MTP_F32) return ((const float *)view.data)[i];
    assert_int_equal(view.dtype, MTP_BF16);
    const uint32_t word = (uint32_t)((const uint16_t *)view.data)[i] << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* `rounding`: relative to the largest value of the view, of a value that is not small. */
static void same_values(mtp_view one, mtp_view other, float rounding)
{
    assert_int_equal(mtp_view_count(one), mtp_view_count(other));
    for (int64_t i = 0; i < mtp_view_count(one); i++) {
        const float a = real_at(one, i), b = real_at(other, i);
        if (!(a - b <= rounding && b - a <= rounding))
            fail_msg("value %lld: %g and %g", (long long)i, (double)a, (double)b);
    }
}

static void same_batches(const mtp_dataset *one, const mtp_dataset *other, bool packed, float rounding)
{
    int64_t all[SAMPLES];
    assert_int_equal(mtp_dataset_size(one), mtp_dataset_size(other));
    for (int64_t i = 0; i < mtp_dataset_size(one); i++) {
        const mtp_sample_info a = mtp_dataset_sample(one, i), b = mtp_dataset_sample(other, i);
        assert_string_equal(a.name, b.name);
        assert_int_equal(a.num_tokens, b.num_tokens);
        assert_int_equal(a.prompt_len, b.prompt_len);
        assert_int_equal(a.num_supervised, b.num_supervised);
        all[i] = i;
    }
    mtp_batch *a = NULL, *b = NULL;
    assert_ok(mtp_batch_collate(one, all, mtp_dataset_size(one), packed, &a));
    assert_ok(mtp_batch_collate(other, all, mtp_dataset_size(one), packed, &b));
    const size_t places = (size_t)(a->batch * a->seq);
    assert_int_equal(a->batch * a->seq, b->batch * b->seq);
    assert_memory_equal(a->token_ids, b->token_ids, places * sizeof *a->token_ids);
    assert_memory_equal(a->loss_mask, b->loss_mask, places);
    assert_memory_equal(a->document_ids, b->document_ids, places * sizeof *a->document_ids);
    assert_int_equal(a->num_supervised, b->num_supervised);
    same_values(a->hidden_states, b->hidden_states, 0.0f);
    for (int type = 0; type < MTP_LAYER_TYPES; type++) same_values(a->kv[type], b->kv[type], rounding);
    mtp_batch_free(a);
    mtp_batch_free(b);
}

/* Hidden states of the F32 "pre" samples become bf16 after the norm, so those are left out of the exact comparison. */
static void store_gives_the_same_batches(void **state)
{
    const world *w = *state;
    const char *out = test_path("%s/store", test_dir()), *paths[SAMPLES];
    int64_t count = 0;
    for (int i = 0; i < SAMPLES; i++)
        if (i % 12 != 0) paths[count++] = sample_path(w, i); /* 0: F32 and pre */
    mtp_pack_options options = test_pack_options(paths, count, w->verifier);
    options.shard_bytes = 2000;
    const mtp_pack_summary summary = pack_ok(out, &options);
    assert_int_equal(summary.samples, count);
    assert_true(summary.shards > 3);
    assert_int_equal(summary.refused, 0);

    const mtp_dataset_options data = {.hidden_norm = MTP_HIDDEN_UNSET};
    mtp_dataset *files = NULL, *store = open_data(w, out);
    assert_ok(mtp_dataset_open(paths, count, w->verifier, &data, &files));
    same_batches(files, store, true, 0.0f);
    same_batches(files, store, false, 0.0f);
    /* a sample that is too long is named, not only its shard */
    const mtp_loader_options few = {.tokens_per_batch = 20, .prefetch = 1};
    mtp_loader *loader = NULL;
    assert_fails(mtp_loader_create(store, &few, &loader), MTP_E_DATA,
                 "sample_06.safetensors) has 23 tokens, more than");
    assert_int_equal(mtp_dataset_fingerprint(files), mtp_dataset_fingerprint(store));
    mtp_dataset_close(files);

    /* a store and samples in one data set: bf16 and F32 meet in one batch */
    const char *both[] = {out, sample_path(w, 0)};
    mtp_dataset *mixed = NULL;
    assert_ok(mtp_dataset_open(both, 2, w->verifier, &data, &mixed));
    assert_int_equal(mtp_dataset_size(mixed), count + 1);
    const int64_t pair[] = {1, count};
    mtp_batch *batch = NULL, *alone = NULL;
    assert_ok(mtp_batch_collate(mixed, pair, 2, true, &batch));
    assert_ok(mtp_batch_collate(store, pair, 1, true, &alone));
    assert_int_equal(batch->hidden_states.dtype, MTP_F32);
    same_values(mtp_view_1d(batch->hidden_states.data, MTP_F32, mtp_view_count(alone->hidden_states)),
                alone->hidden_states, 0.0f);
    mtp_batch_free(batch);
    mtp_batch_free(alone);
    mtp_dataset_close(mixed);
    mtp_dataset_close(store);

    const char *twice[] = {out, test_path("%s/shard-00001.h5", out)};
    assert_fails(mtp_dataset_open(twice, 2, w->verifier, &data, &mixed), MTP_E_CONFIG, "given twice");
    const mtp_dataset_options pre = {.hidden_norm = MTP_HIDDEN_PRE};
    assert_fails(mtp_dataset_open(twice, 1, w->verifier, &pre, &mixed), MTP_E_CONFIG, "post");
}

/* Rows of training stand from token 1 on before the first target: with any number of draft steps no row sees local K/V
 * farther back than the window, nor anything behind the last row. */
static void loader_reads_what_rows_see(void **state)
{
    const world *w = *state;
    enum { S = 300, TARGET = 200, END = 250 };
    const char *dir = test_dir(), *out = test_path("%s/store", test_dir());
    test_sample sample = test_sample_make(S, TARGET, 77);
    for (int64_t i = END; i < S; i++) test_tensor_set(test_sample_find(&sample, "loss_mask"), i, 0);
    test_sample_write(&sample, test_path("%s/long.safetensors", dir));
    test_sample_free(&sample);
    mtp_pack_options options = test_pack_options(&dir, 1, w->verifier);
    pack_ok(out, &options);
    mtp_dataset *store = open_data(w, out);
    const mtp_loader_options load = {.tokens_per_batch = S, .prefetch = 1};
    const mtp_batch *seen = NULL;
    mtp_loader *loader = NULL;
    mtp_batch *whole = NULL;
    int64_t zero = 0, epoch, index;
    assert_ok(mtp_loader_create(store, &load, &loader));
    assert_ok(mtp_loader_next(loader, &seen, &epoch, &index));
    assert_ok(mtp_batch_collate(store, &zero, 1, true, &whole));
    same_values(seen->hidden_states, whole->hidden_states, 0.0f);
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        const int64_t width = mtp_view_count(whole->kv[type]) / S;
        const int64_t begin = type == MTP_LAYER_SLIDING ? TARGET - 64 - TINY_WINDOW : 0, end = END - 2;
        for (int64_t t = 0; t < S; t++)
            for (int64_t i = 0; i < width; i++) {
                const float expected = t >= begin && t < end ? real_at(whole->kv[type], t * width + i) : 0.0f;
                assert_true(real_at(seen->kv[type], t * width + i) == expected);
            }
    }
    mtp_loader_release(loader, seen);
    mtp_batch_free(whole);
    mtp_loader_free(loader);
    mtp_dataset_close(store);
}

static void eight_bits(void **state)
{
    const world *w = *state;
    const char *out = test_path("%s/store", test_dir()), *one = sample_path(w, 7);
    mtp_pack_options options = test_pack_options(&one, 1, w->verifier);
    options.fp8 = true;
    pack_ok(out, &options);
    mtp_dataset *files = open_data(w, one), *store = open_data(w, out);
    /* values below 8: a step of e4m3 near the largest is 8 / 448 * 32, half of it is the rounding; with the largest
     * scale that is tried it is nearly twice that */
    same_batches(files, store, true, 8.0f / 448.0f * 32.0f);
    int64_t zero = 0;
    mtp_batch *batch = NULL;
    assert_ok(mtp_batch_collate(store, &zero, 1, true, &batch));
    assert_int_equal(batch->kv[0].dtype, MTP_F32);
    mtp_batch_free(batch);
    mtp_dataset_close(files);
    mtp_dataset_close(store);
}

/* Against the head computed here in double, from what the store itself holds. */
static void teacher(void **state)
{
    const world *w = *state;
    enum { V = TINY_VOCAB };
    const char *out = test_path("%s/store", test_dir()), *one = sample_path(w, 7);
    const mtp_context_options device = {.num_threads = 1};
    mtp_context *context = NULL;
    assert_ok(mtp_context_create(&device, &context));
    mtp_pack_options options = test_pack_options(&one, 1, w->verifier);
    options.teacher = context;
    pack_ok(out, &options);
    mtp_context_free(context);
    mtp__shard *shard = NULL;
    assert_ok(mtp__shard_open(test_path("%s/shard-00000.h5", out), &shard));
    assert_ok(mtp__shard_verify(shard));
    const int64_t tokens = shard->rows[0].num_tokens, rows = shard->rows[0].num_teacher;
    assert_int_equal(shard->layout.teacher_top, V);
    float *lse = malloc((size_t)rows * sizeof *lse), *logits = malloc((size_t)rows * V * sizeof *logits);
    int32_t *ids = malloc((size_t)rows * V * sizeof *ids);
    uint16_t *hidden = malloc((size_t)tokens * TINY_HB * sizeof *hidden);
    uint8_t *mask = malloc((size_t)tokens);
    int fd;
    assert_ok(mtp__shard_file(shard, &fd));
    assert_ok(mtp__shard_read(shard, fd, 0, MTP__STORE_TEACHER_LSE, 0, rows, lse));
    assert_ok(mtp__shard_read(shard, fd, 0, MTP__STORE_TEACHER_LOGITS, 0, rows, logits));
    assert_ok(mtp__shard_read(shard, fd, 0, MTP__STORE_TEACHER_IDS, 0, rows, ids));
    assert_ok(mtp__shard_read(shard, fd, 0, MTP__STORE_HIDDEN, 0, tokens, hidden));
    assert_ok(mtp__shard_read(shard, fd, 0, MTP__STORE_MASK, 0, tokens, mask));
    close(fd);
    const mtp_view table = mtp_verifier_embedding(w->verifier);
    const mtp_view states = mtp_view_2d(hidden, MTP_BF16, tokens, TINY_HB);
    int64_t row = 0;
    for (int64_t p = 1; p < tokens; p++) {
        double expected[V], sum = 0;
        bool seen[V] = {false};
        if (!mask[p]) continue;
        for (int64_t v = 0; v < V; v++) {
            double dot = 0;
            for (int64_t i = 0; i < TINY_HB; i++)
                dot += (double)real_at(states, (p - 1) * TINY_HB + i) * (double)real_at(table, v * TINY_HB + i);
            expected[v] = 30.0 * tanh(dot / 30.0);
            sum += exp(expected[v]);
        }
        assert_true(fabs((double)lse[row] - log(sum)) < 1e-4);
        for (int64_t i = 0; i < V; i++) {
            const int32_t id = ids[row * V + i];
            assert_true(id >= 0 && id < V && !seen[id]);
            seen[id] = true;
            assert_true(fabs((double)logits[row * V + i] - expected[id]) < 1e-4);
            if (i > 0) assert_true(logits[row * V + i] <= logits[row * V + i - 1]);
        }
        row++;
    }
    assert_int_equal(row, rows);
    assert_true(rows > 0);
    free(lse);
    free(logits);
    free(ids);
    free(hidden);
    free(mask);
    mtp__shard_close(shard);
}

static void bytes_depend_on_input_alone(void **state)
{
    const world *w = *state;
    const char *first = test_path("%s/store", test_dir()), *second = test_path("%s/other", test_dir());
    mtp_pack_options options = test_pack_options(&w->samples, 1, w->verifier);
    options.shard_bytes = 3000;
    pack_ok(first, &options);
    options.workers = 4;
    pack_ok(second, &options);
    test_same_directory(first, second);
    const mtp_pack_summary again = pack_ok(first, &options); /* all is there */
    assert_int_equal(again.shards_kept, again.shards);
    assert_int_equal(again.samples, SAMPLES);
    test_same_directory(first, second);
}

static bool stop_after(void *user, int64_t done, int64_t total)
{
    (void)total;
    return done < *(const int64_t *)user;
}

static void goes_on_after_a_stop(void **state)
{
    const world *w = *state;
    const char *whole = test_path("%s/store", test_dir());
    mtp_pack_options options = test_pack_options(&w->samples, 1, w->verifier);
    options.shard_bytes = 3000;
    pack_ok(whole, &options);
    for (int64_t stop = 1; stop <= SAMPLES; stop += 3) {
        const char *out = test_path("%s/store", test_dir());
        mtp_pack_summary summary;
        mtp_dataset *dataset = NULL;
        options.progress = stop_after;
        options.user = &stop;
        assert_fails(mtp_pack(out, &options, &summary), MTP_E_INTERRUPTED, "goes on");
        const mtp_dataset_options data = {.hidden_norm = MTP_HIDDEN_UNSET};
        assert_fails(mtp_dataset_open(&out, 1, w->verifier, &data, &dataset), MTP_E_DATA, "packing has not finished");
        options.progress = NULL;
        summary = pack_ok(out, &options);
        assert_int_equal(summary.samples, SAMPLES);
        test_same_directory(whole, out);
    }
}

/* ---- bad samples ---------------------------------------------------------------------------------------------- */

static void spoil(const world *w, const char *directory)
{
    test_copy(w->samples, directory);
    test_sample sample = test_sample_make(9, 2, 5);
    test_tensor_set(test_sample_find(&sample, "kv_last_global_v"), 13, (double)NAN);
    test_sample_write(&sample, test_path("%s/nan.safetensors", directory));
    test_sample_free(&sample);
    sample = test_sample_make(9, 2, 6);
    test_tensor *hidden = test_sample_find(&sample, "hidden_states");
    for (int64_t i = 0; i < TINY_HB; i++) test_tensor_set(hidden, 4 * TINY_HB + i, 0);
    test_sample_write(&sample, test_path("%s/zeros.safetensors", directory));
    test_sample_free(&sample);
    sample = test_sample_make(9, 2, 7);
    test_sample_remove(&sample, "kv_last_local_k");
    test_sample_write(&sample, test_path("%s/incomplete.safetensors", directory));
    test_sample_free(&sample);
    test_write(test_path("%s/cut.safetensors", directory), "\x10\0\0\0\0\0\0\0{", 9);
}

static void bad_samples_go_to_quarantine(void **state)
{
    const world *w = *state;
    const char *bad = test_path("%s/bad", test_dir()), *out = test_path("%s/store", test_dir());
    spoil(w, bad);
    mtp_pack_options options = test_pack_options(&bad, 1, w->verifier);
    mtp_pack_summary summary;
    options.max_bad = 3.0 / 16; /* four are bad, the first two by their headers */
    options.shard_bytes = 3000;
    assert_fails(mtp_pack(out, &options, &summary), MTP_E_DATA, "of 16 samples are bad");
    assert_false(mtp__file_exists(test_path("%s/store.json", out)));
    options.max_bad = 0.25;
    summary = pack_ok(out, &options);
    assert_int_equal(summary.samples, SAMPLES);
    assert_int_equal(summary.refused, 4);
    char *list = test_read(test_path("%s/quarantine.jsonl", out), NULL);
    assert_non_null(strstr(list, "{\"file\":\"cut.safetensors\",\"reason\":\"damaged file\",\"index\":-1"));
    assert_non_null(strstr(list, "{\"file\":\"incomplete.safetensors\",\"reason\":\"missing keys\""));
    assert_non_null(strstr(list, "{\"file\":\"nan.safetensors\",\"reason\":\"NaN or infinity\",\"index\":2"));
    assert_non_null(strstr(list, "{\"file\":\"zeros.safetensors\",\"reason\":\"row of zeros\",\"index\":4"));
    free(list);
    mtp_dataset *files = open_data(w, w->samples), *store = open_data(w, out);
    assert_int_equal(mtp_dataset_fingerprint(files), mtp_dataset_fingerprint(store));
    mtp_dataset_close(files);
    mtp_dataset_close(store);
    assert_ok(mtp_pack_verify(out, NULL, NULL, &summary));
    assert_int_equal(summary.refused, 2); /* those of headers are in no shard */
    const char *again = test_path("%s/again", test_dir());
    pack_ok(again, &options);
    test_same_directory(out, again);
}

/* ---- whose directory ------------------------------------------------------------------------------------------ */

static void other_packings_are_refused(void **state)
{
    const world *w = *state;
    const char *out = test_path("%s/store", test_dir());
    mtp_pack_options options = test_pack_options(&w->samples, 1, w->verifier);
    mtp_pack_summary summary;
    pack_ok(out, &options);
    options.fp8 = true;
    assert_fails(mtp_pack(out, &options, &summary), MTP_E_EXISTS, "other samples or settings");
    options.fp8 = false;
    const char *one = sample_path(w, 3);
    options.inputs = &one;
    assert_fails(mtp_pack(out, &options, &summary), MTP_E_EXISTS, "other samples or settings");
    options.inputs = &out;
    assert_fails(mtp_pack(test_path("%s/third", test_dir()), &options, &summary), MTP_E_CONFIG, "packed already");
}

static void one_packer_at_a_time(void **state)
{
    const world *w = *state;
    const char *out = test_path("%s/store", test_dir()), *lock = test_path("%s/packing.lock", out);
    mtp_pack_options options = test_pack_options(&w->samples, 1, w->verifier);
    mtp_pack_summary summary;
    char host[256] = "";
    assert_ok(mtp__dir_create(out));
    gethostname(host, sizeof host - 1);
    const char *elsewhere = "process 12 started 5 on another.machine\n";
    test_write(lock, elsewhere, strlen(elsewhere));
    assert_fails(mtp_pack(out, &options, &summary), MTP_E_EXISTS, "process 12 started 5 on another.machine");
    const char *recycled = test_path("process %ld started 1 on %s\n", (long)getpid(), host); /* our id, another start */
    test_write(lock, recycled, strlen(recycled));
    pack_ok(out, &options);
    assert_false(mtp__path_exists(lock));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(store_gives_the_same_batches, set_up, tear_down),
        cmocka_unit_test_setup_teardown(loader_reads_what_rows_see, set_up, tear_down),
        cmocka_unit_test_setup_teardown(eight_bits, set_up, tear_down),
        cmocka_unit_test_setup_teardown(teacher, set_up, tear_down),
        cmocka_unit_test_setup_teardown(bytes_depend_on_input_alone, set_up, tear_down),
        cmocka_unit_test_setup_teardown(goes_on_after_a_stop, set_up, tear_down),
        cmocka_unit_test_setup_teardown(bad_samples_go_to_quarantine, set_up, tear_down),
        cmocka_unit_test_setup_teardown(other_packings_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(one_packer_at_a_time, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
