/* Protects: stores without global K: V comes back to the last bit, K is made of it to the rounding of bf16, alike when
 * a document is read whole and in part; verifiers and samples of which it cannot be made are refused. */
#include "support.h"

#include <math.h>

#include "base/file.h"
#include "base/real.h"
#include "edit.h"
#include "pack.h"
#include "samples.h"

#define SAMPLE MTP_TEST_DATA "/sample"
enum { WIDTH = 64, PAIR = 2 * WIDTH }; /* one global head of 64 */

static mtp_verifier *verifier;

static int set_up(void **state)
{
    (void)state;
    assert_ok(mtp_verifier_open(SAMPLE "/verifier", NULL, &verifier));
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    mtp_verifier_close(verifier);
    return 0;
}

static mtp_dataset *open_data(const char *path)
{
    const mtp_dataset_options options = {.hidden_norm = MTP_HIDDEN_UNSET};
    mtp_dataset *dataset = NULL;
    assert_ok(mtp_dataset_open(&path, 1, verifier, &options, &dataset));
    return dataset;
}

static const char *pack(const char *input, bool fp8)
{
    const char *out = test_path("%s/store", test_dir());
    mtp_pack_options options = test_pack_options(&input, 1, verifier);
    mtp_pack_summary summary;
    options.global_v_only = true;
    options.fp8 = fp8;
    assert_ok(mtp_pack(out, &options, &summary));
    return out;
}

static void value(mtp_view view, int64_t first, float *out)
{
    mtp__real_to_f32(out, (const char *)view.data + (size_t)first * mtp_dtype_size(view.dtype), view.dtype, PAIR);
}

static double distance(const float *made, const float *right, int64_t n)
{
    double off = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        off += ((double)made[i] - (double)right[i]) * ((double)made[i] - (double)right[i]);
        size += (double)right[i] * (double)right[i];
    }
    return sqrt(off / size);
}

static void keys_are_made_of_values(void **state)
{
    (void)state;
    const char *out = pack(SAMPLE "/eval", false);
    mtp_dataset *files = open_data(SAMPLE "/eval"), *store = open_data(out);
    double worst = 0, total = 0;
    int64_t rows = 0, same = 0;
    assert_int_equal(mtp_dataset_size(store), 20);
    for (int64_t i = 0; i < 20; i++) {
        mtp_batch *a = NULL, *b = NULL;
        assert_ok(mtp_batch_collate(files, &i, 1, true, &a));
        assert_ok(mtp_batch_collate(store, &i, 1, true, &b));
        assert_int_equal(b->kv[MTP_LAYER_FULL].dtype, MTP_BF16);
        assert_memory_equal(a->kv[MTP_LAYER_SLIDING].data, b->kv[MTP_LAYER_SLIDING].data,
                            (size_t)mtp_view_count(a->kv[MTP_LAYER_SLIDING]) * 2);
        for (int64_t t = 0; t < a->seq; t++) {
            float right[PAIR], made[PAIR];
            value(a->kv[MTP_LAYER_FULL], t * PAIR, right);
            value(b->kv[MTP_LAYER_FULL], t * PAIR, made);
            assert_memory_equal(right + WIDTH, made + WIDTH, WIDTH * sizeof *made);
            const double off = distance(made, right, WIDTH);
            worst = fmax(worst, off);
            total += off;
            rows++;
            for (int j = 0; j < WIDTH; j++) same += made[j] == right[j];
        }
        mtp_batch_free(a);
        mtp_batch_free(b);
    }
    printf("global K: %.1f %% of the values the same, a head %.2f %% of its size away on average, %.2f %% at most\n",
           100.0 * (double)same / (double)(rows * WIDTH), 100 * total / (double)rows, 100 * worst);
    assert_true(worst < 0.006 && worst > 0);
    mtp_dataset_close(files);
    mtp_dataset_close(store);
}

/* What a loader reads of a document's K/V equals the same rows read whole; 8-bit and mixed batches too. */
static void parts_and_types(void **state)
{
    (void)state;
    for (int fp8 = 0; fp8 < 2; fp8++) {
        const char *out = pack(SAMPLE "/eval", fp8 != 0);
        mtp_dataset *store = open_data(out);
        const mtp_loader_options load = {.tokens_per_batch = 400, .prefetch = 1};
        mtp_loader *loader = NULL;
        const mtp_batch *seen = NULL;
        int64_t epoch, index, compared = 0;
        assert_ok(mtp_loader_create(store, &load, &loader));
        assert_ok(mtp_loader_next(loader, &seen, &epoch, &index));
        for (int64_t d = 0; d < seen->num_documents; d++) {
            mtp_batch *whole = NULL;
            assert_ok(mtp_batch_collate(store, &seen->document_sample[d], 1, true, &whole));
            for (int64_t t = 0; t < whole->seq; t++) {
                float a[PAIR], b[PAIR], zero[PAIR] = {0};
                value(whole->kv[MTP_LAYER_FULL], t * PAIR, a);
                value(seen->kv[MTP_LAYER_FULL], (seen->document_begin[d] + t) * PAIR, b);
                if (memcmp(b, zero, sizeof b) == 0) continue; /* no row sees it */
                assert_memory_equal(a, b, sizeof a);
                compared++;
            }
            mtp_batch_free(whole);
        }
        assert_true(compared > 100);
        mtp_loader_release(loader, seen);
        mtp_loader_free(loader);

        /* with F32 samples beside it the same numbers, wider */
        test_sample wide = test_sample_load(SAMPLE "/eval/sample_0101.safetensors");
        static const char *const reals[] = {"kv_last_local_k", "kv_last_local_v", "kv_last_global_k",
                                            "kv_last_global_v"};
        for (int i = 0; i < 4; i++) test_sample_retype(&wide, reals[i], MTP_F32);
        const char *path = test_path("%s/wide.safetensors", test_dir()), *both[] = {out, path};
        test_sample_write(&wide, path);
        test_sample_free(&wide);
        const mtp_dataset_options opening = {.hidden_norm = MTP_HIDDEN_UNSET};
        mtp_dataset *mixed = NULL;
        mtp_batch *together = NULL, *alone = NULL;
        const int64_t pair[] = {3, 20};
        assert_ok(mtp_dataset_open(both, 2, verifier, &opening, &mixed));
        assert_ok(mtp_batch_collate(mixed, pair, 2, true, &together));
        assert_ok(mtp_batch_collate(store, pair, 1, true, &alone));
        assert_int_equal(together->kv[MTP_LAYER_FULL].dtype, MTP_F32);
        for (int64_t t = 0; t < alone->seq; t++) {
            float a[PAIR], b[PAIR];
            value(alone->kv[MTP_LAYER_FULL], t * PAIR, a);
            value(together->kv[MTP_LAYER_FULL], t * PAIR, b);
            assert_memory_equal(a, b, sizeof a);
        }
        mtp_batch_free(together);
        mtp_batch_free(alone);
        mtp_dataset_close(mixed);
        mtp_dataset_close(store);
    }
}

static void what_cannot_be_made_is_refused(void **state)
{
    (void)state;
    const char *dir = test_dir(), *out = test_path("%s/store", test_dir());
    mtp_pack_summary summary;
    test_sample sample = test_sample_load(SAMPLE "/eval/sample_0103.safetensors");
    test_tensor *k = test_sample_find(&sample, "kv_last_global_k");
    for (int64_t i = 0; i < WIDTH; i++) /* one row, a twentieth too large */
        test_tensor_set(k, 70 * WIDTH + i, 1.05 * test_tensor_get(k, 70 * WIDTH + i));
    test_sample_write(&sample, test_path("%s/scaled.safetensors", dir));
    test_sample_free(&sample);
    mtp_pack_options options = test_pack_options(&dir, 1, verifier);
    options.global_v_only = true;
    options.max_bad = 1;
    assert_ok(mtp_pack(out, &options, &summary));
    assert_int_equal(summary.refused, 1);
    assert_string_equal(summary.reasons[0].reason, "global K not made of V");
    char *list = test_read(test_path("%s/quarantine.jsonl", out), NULL);
    assert_non_null(strstr(list, "\"index\":70,\"message\":\"global K of token 70 is not what V gives"));
    free(list);

    /* verifiers whose full layers have a v_proj of their own, or whose k_norm is not there */
    const char *own = test_path("%s/verifier", test_dir()), *tiny = test_tiny_verifier();
    test_copy(SAMPLE "/verifier", own);
    test_json_set(test_path("%s/config.json", own), "attention_k_eq_v", "false");
    const struct {
        const char *directory, *says;
    } cases[] = {{own, "global K cannot be made of V: config.json does not say attention_k_eq_v; store both"},
                 {tiny, "global K cannot be made of V: there is no k_norm weight of its last full layer"}};
    for (int i = 0; i < 2; i++) {
        mtp_verifier *other = NULL;
        assert_ok(mtp_verifier_open(cases[i].directory, NULL, &other));
        options = test_pack_options(&dir, 1, other);
        options.global_v_only = true;
        assert_fails(mtp_pack(test_path("%s/store", test_dir()), &options, &summary), MTP_E_CONFIG, cases[i].says);
        mtp_verifier_close(other);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_are_made_of_values),
        cmocka_unit_test(parts_and_types),
        cmocka_unit_test(what_cannot_be_made_is_refused),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
