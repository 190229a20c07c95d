/* Protects: the block shuffle is a permutation that reads neighbours together and still differs from epoch to epoch;
 * any number of ranks goes through the same sequence of batches; training and validation are disjoint,
 * complete, the same for samples and their store, and no document changes sides when data is added. */
#include "support.h"

#include "data/dataset.h"
#include "data/sampler.h"
#include "pack.h"
#include "samples.h"

enum { SAMPLES = 60 };

static mtp_verifier *verifier;
static const char *samples;

static void blocks(void **state)
{
    (void)state;
    enum { COUNT = 10007 };
    static uint32_t order[COUNT], other[COUNT];
    static bool seen[COUNT];
    mtp__sampler_order(5, 2, true, COUNT, order);
    mtp__sampler_order(5, 3, true, COUNT, other);
    assert_memory_not_equal(order, other, sizeof order);
    mtp__sampler_order(5, 2, true, COUNT, other);
    assert_memory_equal(order, other, sizeof order);
    for (int i = 0; i < COUNT; i++) {
        assert_true(order[i] < COUNT && !seen[order[i]]);
        seen[order[i]] = true;
    }
    /* a window touches at most eight blocks (nine where the short block shifts it), and not in their order */
    int neighbours = 0;
    for (int begin = 0; begin + MTP__SHUFFLE_WINDOW <= COUNT; begin += MTP__SHUFFLE_WINDOW) {
        bool touched[COUNT / MTP__SHUFFLE_BLOCK + 1] = {false};
        int distinct = 0;
        for (int i = begin; i < begin + MTP__SHUFFLE_WINDOW; i++) {
            const uint32_t block = order[i] / MTP__SHUFFLE_BLOCK;
            distinct += !touched[block];
            touched[block] = true;
            neighbours += i > begin && order[i] == order[i - 1] + 1;
        }
        assert_true(distinct <= 16);
    }
    assert_true(neighbours < 100);
}

static mtp_dataset *open_data(const char *const *paths, int64_t count, mtp_split side, double share)
{
    const mtp_dataset_options options = {.split = side, .validation_share = share};
    mtp_dataset *dataset = NULL;
    assert_ok(mtp_dataset_open(paths, count, verifier, &options, &dataset));
    return dataset;
}

/* Whatever the number of ranks, together they go through the one sequence of batches that a single process sees, over
 * the ends of epochs, from wherever they are sent. */
static void ranks(void **state)
{
    (void)state;
    enum { TAKEN = 90, MOST = 40 };
    mtp_dataset *dataset = open_data(&samples, 1, MTP_SPLIT_NONE, 0);
    mtp_loader_options options = {.tokens_per_batch = 40, .shuffle = true, .seed = 3, .prefetch = 1};
    static struct {
        int64_t epoch, index, first, documents;
    } alone[TAKEN];
    mtp_loader *loader = NULL;
    int64_t all = 0, epoch, index;
    const mtp_batch *batch = NULL;
    assert_ok(mtp_loader_create(dataset, &options, &loader));
    assert_ok(mtp_loader_batches(loader, 0, &all));
    assert_true(all > 4 && 2 * all < TAKEN - MOST);
    for (int i = 0; i < TAKEN; i++) {
        assert_ok(mtp_loader_next(loader, &batch, &alone[i].epoch, &alone[i].index));
        alone[i].first = batch->document_sample[0];
        alone[i].documents = batch->num_documents;
        mtp_loader_release(loader, batch);
    }
    mtp_loader_free(loader);
    const int64_t worlds[] = {2, 3, MOST}; /* the last takes more ranks than an epoch has batches */
    assert_true(MOST > all);
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
        for (options.world_size = worlds[w], options.rank = 0; options.rank < worlds[w]; options.rank++) {
            const int64_t begins[] = {0, all - 1};
            assert_ok(mtp_loader_create(dataset, &options, &loader));
            int64_t count;
            assert_ok(mtp_loader_batches(loader, 0, &count));
            assert_int_equal(count, all);
            for (size_t b = 0; b < sizeof begins / sizeof *begins; b++) {
                if (b > 0) assert_ok(mtp_loader_seek(loader, 0, begins[b]));
                for (int64_t i = begins[b] + options.rank; i < TAKEN; i += options.world_size) {
                    assert_ok(mtp_loader_next(loader, &batch, &epoch, &index));
                    assert_int_equal(epoch, alone[i].epoch);
                    assert_int_equal(index, alone[i].index);
                    assert_int_equal(batch->document_sample[0], alone[i].first);
                    assert_int_equal(batch->num_documents, alone[i].documents);
                    mtp_loader_release(loader, batch);
                }
            }
            mtp_loader_free(loader);
        }
    options.world_size = 2;
    options.rank = 2;
    assert_fails(mtp_loader_create(dataset, &options, &loader), MTP_E_ARGUMENT, "rank");
    mtp_dataset_close(dataset);
}

/* Is a document of this name there? */
static bool holds(const mtp_dataset *dataset, const char *name)
{
    for (int64_t i = 0; i < mtp_dataset_size(dataset); i++)
        if (strcmp(mtp_dataset_sample(dataset, i).name, name) == 0) return true;
    return false;
}

static void sides(void **state)
{
    (void)state;
    const char *store = test_path("%s/store", test_dir()), *half[SAMPLES / 2];
    mtp_pack_options options = test_pack_options(&samples, 1, verifier);
    mtp_pack_summary summary;
    options.shard_bytes = 4000;
    assert_ok(mtp_pack(store, &options, &summary));
    for (int i = 0; i < SAMPLES / 2; i++) half[i] = test_path("%s/%02d.safetensors", samples, i);
    mtp_dataset *train = open_data(&samples, 1, MTP_SPLIT_TRAINING, 0.25);
    mtp_dataset *held = open_data(&samples, 1, MTP_SPLIT_VALIDATION, 0.25);
    mtp_dataset *packed = open_data((const char *const *)&store, 1, MTP_SPLIT_VALIDATION, 0.25);
    mtp_dataset *fewer = open_data(half, SAMPLES / 2, MTP_SPLIT_VALIDATION, 0.25);
    assert_int_equal(mtp_dataset_size(train) + mtp_dataset_size(held), SAMPLES);
    assert_in_range(mtp_dataset_size(held), SAMPLES / 8, SAMPLES / 2);
    assert_int_equal(mtp_dataset_fingerprint(held), mtp_dataset_fingerprint(packed));
    for (int i = 0; i < SAMPLES; i++) {
        const char *name = test_path("%02d.safetensors", i);
        assert_true(holds(train, name) != holds(held, name));
        if (i < SAMPLES / 2) assert_true(holds(fewer, name) == holds(held, name));
    }
    const int64_t last = mtp_dataset_size(packed) - 1;
    mtp_batch *a = NULL, *b = NULL;
    assert_ok(mtp_batch_collate(held, &last, 1, true, &a));
    assert_ok(mtp_batch_collate(packed, &last, 1, true, &b));
    assert_int_equal(a->seq, b->seq);
    assert_memory_equal(a->token_ids, b->token_ids, (size_t)a->seq * sizeof *a->token_ids);
    mtp_batch_free(a);
    mtp_batch_free(b);
    mtp_dataset_close(train);
    mtp_dataset_close(held);
    mtp_dataset_close(packed);
    mtp_dataset_close(fewer);
    const mtp_dataset_options none = {.split = MTP_SPLIT_VALIDATION, .validation_share = 1e-9};
    assert_fails(mtp_dataset_open(&samples, 1, verifier, &none, &train), MTP_E_DATA, "leaves no sample");
}

static int set_up(void **state)
{
    (void)state;
    assert_ok(mtp_verifier_open(test_tiny_verifier(), NULL, &verifier));
    samples = test_dir();
    for (int i = 0; i < SAMPLES; i++) {
        test_sample_file(test_path("%s/%02d.safetensors", samples, i), 8 + i % 9, 3, (uint64_t)i + 100);
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
        cmocka_unit_test(blocks),
        cmocka_unit_test(ranks),
        cmocka_unit_test(sides),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
