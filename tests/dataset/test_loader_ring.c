/* Protects: any number of reading threads gives the same batches, bit by bit, in the same order, and a failure comes
 * out in the place of its batch; the loader's memory is the ring, taken once, from the caller's allocator when there is
 * one; of stores and directories no K/V is read that no row of training sees; every way to share a global batch between
 * ranks and accumulation takes the same documents. */
#include "samples.h"

#include <fcntl.h>
#include <unistd.h>

#include "base/hash.h"
#include "data/dataset.h"
#include "mtp/data.h"
#include "pack.h"

enum { SAMPLES = 40, BUDGET = 60 };

static mtp_verifier *verifier;
static const char *samples, *store;

static mtp_dataset *open_data(const char *path)
{
    const mtp_dataset_options options = {.hidden_norm = MTP_HIDDEN_UNSET};
    mtp_dataset *dataset = NULL;
    assert_ok(mtp_dataset_open(&path, 1, verifier, &options, &dataset));
    return dataset;
}

static mtp_loader *make_loader(const mtp_dataset *dataset, const mtp_loader_options *options)
{
    mtp_loader *loader = NULL;
    assert_ok(mtp_loader_create(dataset, options, &loader));
    return loader;
}

static uint64_t hash_view(uint64_t hash, const mtp_view *view)
{
    const uint64_t head[2] = {(uint64_t)view->dtype, (uint64_t)mtp_view_count(*view)};
    hash = mtp__fnv1a(hash, head, sizeof head);
    return mtp__fnv1a(hash, view->data, (size_t)head[1] * mtp_dtype_size(view->dtype));
}

/* Everything that a batch holds, and where it stands. */
static uint64_t hash_batch(const mtp_batch *batch, int64_t epoch, int64_t index)
{
    const size_t tokens = (size_t)(batch->batch * batch->seq), documents = (size_t)batch->num_documents;
    const int64_t head[5] = {epoch, index, batch->seq, batch->num_documents, batch->num_supervised};
    uint64_t hash = mtp__fnv1a(MTP__FNV_START, head, sizeof head);
    hash = mtp__fnv1a(hash, batch->token_ids, tokens * sizeof *batch->token_ids);
    hash = mtp__fnv1a(hash, batch->loss_mask, tokens * sizeof *batch->loss_mask);
    hash = mtp__fnv1a(hash, batch->document_ids, tokens * sizeof *batch->document_ids);
    hash = mtp__fnv1a(hash, batch->document_begin, documents * sizeof *batch->document_begin);
    hash = mtp__fnv1a(hash, batch->document_end, documents * sizeof *batch->document_end);
    hash = mtp__fnv1a(hash, batch->document_sample, documents * sizeof *batch->document_sample);
    hash = hash_view(hash, &batch->hidden_states);
    for (int type = 0; type < MTP_LAYER_TYPES; type++) hash = hash_view(hash, &batch->kv[type]);
    return hash;
}

static uint64_t next_hash(mtp_loader *loader)
{
    const mtp_batch *batch = NULL;
    int64_t epoch, index;
    assert_ok(mtp_loader_next(loader, &batch, &epoch, &index));
    const uint64_t hash = hash_batch(batch, epoch, index);
    mtp_loader_release(loader, batch);
    return hash;
}

/* ---- threads -------------------------------------------------------------------------------------------------- */

/* Over two ends of epochs, and after a seek back. */
static void same_with_any_number_of_threads(void **state)
{
    (void)state;
    enum { TAKEN = 50 };
    static const int64_t workers[] = {0, 1, 2, 3, 7};
    const char *paths[] = {samples, store};
    for (int p = 0; p < 2; p++) {
        mtp_dataset *dataset = open_data(paths[p]);
        uint64_t expected[TAKEN];
        for (size_t w = 0; w < sizeof workers / sizeof *workers; w++) {
            const mtp_loader_options options = {.tokens_per_batch = BUDGET,
                                                .shuffle = true,
                                                .seed = 9,
                                                .prefetch = workers[w] ? workers[w] : 1,
                                                .num_workers = workers[w]};
            mtp_loader *loader = make_loader(dataset, &options);
            int64_t batches;
            assert_ok(mtp_loader_batches(loader, 0, &batches));
            assert_true(2 * batches < TAKEN);
            for (int i = 0; i < TAKEN; i++) {
                const uint64_t hash = next_hash(loader);
                if (w == 0) expected[i] = hash;
                assert_true(hash == expected[i]);
            }
            assert_ok(mtp_loader_seek(loader, 0, 3));
            for (int i = 3; i < TAKEN; i++) assert_true(next_hash(loader) == expected[i]);
            mtp_loader_free(loader);
        }
        mtp_dataset_close(dataset);
    }
}

/* Nothing is read before it is asked for. */
static void no_thread_reads_when_asked(void **state)
{
    (void)state;
    mtp_dataset *dataset = open_data(samples);
    const mtp_loader_options options = {.tokens_per_batch = BUDGET, .prefetch = 4};
    mtp_loader *loader = make_loader(dataset, &options);
    assert_int_equal(mtp_loader_get_stats(loader).tokens_read, 0);
    int64_t tokens = 0;
    for (int i = 0; i < 5; i++) {
        const mtp_batch *batch = NULL;
        int64_t epoch, index;
        assert_ok(mtp_loader_next(loader, &batch, &epoch, &index));
        tokens += batch->seq;
        assert_int_equal(mtp_loader_get_stats(loader).tokens_read, tokens);
    }
    const mtp_batch *more = NULL;
    int64_t epoch, index;
    assert_fails(mtp_loader_next(loader, &more, &epoch, &index), MTP_E_ARGUMENT, "release one first");
    mtp_loader_free(loader);
    mtp_dataset_close(dataset);
}

/* A byte of one document of a shard is changed: the batches before it come, then the message, again and again. */
static void failures_keep_their_place(void **state)
{
    (void)state;
    enum { VICTIM = 17 };
    const char *copy = test_path("%s/store", test_dir());
    test_copy(store, copy);
    mtp_dataset *dataset = open_data(copy);
    const mtp__dataset_entry entry = mtp__dataset_at(dataset, VICTIM);
    const mtp__store_row *row = &entry.shard->rows[entry.row];
    const int fd = open(entry.path, O_RDWR);
    const off_t at = (off_t)(entry.shard->offsets[MTP__STORE_HIDDEN] + row->first_token * 2 * TINY_HB + 5);
    unsigned char byte;
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
    mtp_dataset_close(dataset);
    dataset = open_data(copy);
    for (int64_t workers = 0; workers < 4; workers++) {
        const mtp_loader_options options = {
            .tokens_per_batch = BUDGET, .shuffle = true, .seed = 2, .prefetch = workers + 1, .num_workers = workers};
        mtp_loader *loader = make_loader(dataset, &options);
        const mtp_batch *batch = NULL;
        int64_t epoch, index, expected = 0;
        mtp_status status;
        while ((status = mtp_loader_next(loader, &batch, &epoch, &index)) == MTP_OK) {
            assert_int_equal(epoch, 0);
            assert_int_equal(index, expected++);
            for (int64_t d = 0; d < batch->num_documents; d++) assert_int_not_equal(batch->document_sample[d], VICTIM);
            mtp_loader_release(loader, batch);
        }
        for (int i = 0; i < 2; i++) {
            assert_null(batch);
            assert_fails(mtp_loader_next(loader, &batch, &epoch, &index), MTP_E_DATA, "the checksum of hidden_states");
            assert_non_null(strstr(mtp_last_error()->message, mtp_dataset_sample(dataset, VICTIM).path));
            assert_non_null(strstr(mtp_last_error()->message, mtp_dataset_sample(dataset, VICTIM).name));
        }
        assert_ok(mtp_loader_seek(loader, 0, expected + 1)); /* one may go on behind it */
        assert_ok(mtp_loader_next(loader, &batch, &epoch, &index));
        assert_int_equal(index, expected + 1);
        mtp_loader_free(loader);
    }
    mtp_dataset_close(dataset);
}

/* A flipped bit of K/V that rows see is noticed where the field is read as a whole: when the document is trained on
 * from near its beginning to its end. */
static void flipped_bits_of_kv(void **state)
{
    (void)state;
    enum { S = 200 };
    const char *dir = test_dir(), *packed = test_path("%s/store", test_dir());
    test_sample_file(test_path("%s/a.safetensors", dir), S, 3, 21);
    const mtp_pack_options options = test_pack_options(&dir, 1, verifier);
    mtp_pack_summary summary;
    assert_ok(mtp_pack(packed, &options, &summary));
    for (int field = MTP__STORE_KV; field <= MTP__STORE_KV_GLOBAL; field++) {
        mtp_dataset *dataset = open_data(packed);
        const mtp__shard *shard = mtp__dataset_at(dataset, 0).shard;
        const off_t at =
            (off_t)(shard->offsets[field] + 100 * mtp__store_row_bytes(&shard->layout, (mtp__store_field)field));
        const int fd = open(shard->path, O_RDWR);
        const mtp_loader_options load = {.tokens_per_batch = S, .prefetch = 1, .num_speculative_steps = 3};
        unsigned char byte;
        mtp_dataset_close(dataset);
        for (int flip = 0; flip < 2; flip++) { /* there and back */
            assert_int_equal(pread(fd, &byte, 1, at), 1);
            byte ^= 1;
            assert_int_equal(pwrite(fd, &byte, 1, at), 1);
            dataset = open_data(packed);
            mtp_loader *loader = make_loader(dataset, &load);
            const mtp_batch *batch = NULL;
            int64_t epoch, index;
            if (flip == 0)
                assert_fails(mtp_loader_next(loader, &batch, &epoch, &index), MTP_E_DATA,
                             test_path("the checksum of %s", mtp__store_field_name((mtp__store_field)field)));
            else
                assert_ok(mtp_loader_next(loader, &batch, &epoch, &index));
            mtp_loader_free(loader);
            mtp_dataset_close(dataset);
        }
        close(fd);
    }
}

/* ---- memory --------------------------------------------------------------------------------------------------- */

typedef struct counted {
    int64_t blocks, live, calls;
    size_t bytes;
    int64_t refuse_at; /* number of the call that finds no memory; 0: none */
    size_t misaligned; /* added to every address */
} counted;

static void *count_alloc(void *user, size_t size)
{
    counted *c = user;
    if (++c->calls == c->refuse_at) return NULL;
    c->blocks++;
    c->live++;
    c->bytes += size;
    char *block = aligned_alloc(64, (size + 128) / 64 * 64);
    assert_non_null(block);
    return block + c->misaligned;
}

static void count_free(void *user, void *block, size_t size)
{
    counted *c = user;
    c->live--;
    c->bytes -= size;
    free((char *)block - c->misaligned);
}

static void memory_is_the_ring(void **state)
{
    (void)state;
    enum { PREFETCH = 3 };
    mtp_dataset *dataset = open_data(store);
    counted c = {0};
    const mtp_allocator allocator = {count_alloc, count_free, &c};
    mtp_loader_options options = {
        .tokens_per_batch = BUDGET, .prefetch = PREFETCH, .num_workers = 2, .shuffle = true, .allocator = &allocator};
    mtp_loader *loader = make_loader(dataset, &options);
    const size_t bytes = c.bytes;
    assert_int_equal(c.blocks, PREFETCH + 2);
    assert_int_equal(mtp_loader_get_stats(loader).memory_bytes, bytes);
    for (int i = 0; i < 100; i++) (void)next_hash(loader);
    assert_ok(mtp_loader_seek(loader, 7, 1));
    (void)next_hash(loader);
    assert_int_equal(c.blocks, PREFETCH + 2);
    assert_int_equal(c.live, PREFETCH + 2);
    assert_int_equal(mtp_loader_get_stats(loader).memory_bytes, bytes);
    mtp_loader_free(loader);
    assert_int_equal(c.live, 0);
    assert_int_equal(c.bytes, 0);
    /* it grows with the blocks of the ring and with nothing else */
    options.allocator = NULL;
    options.num_workers = 1;
    loader = make_loader(dataset, &options);
    assert_int_equal(mtp_loader_get_stats(loader).memory_bytes, bytes);
    mtp_loader_free(loader);
    options.prefetch = 2 * (PREFETCH + 2) - 2;
    loader = make_loader(dataset, &options);
    assert_int_equal(mtp_loader_get_stats(loader).memory_bytes, 2 * bytes);
    mtp_loader_free(loader);
    mtp_dataset_close(dataset);
}

static void allocators_that_fail(void **state)
{
    (void)state;
    mtp_dataset *dataset = open_data(store);
    counted c = {.refuse_at = 3};
    const mtp_allocator allocator = {count_alloc, count_free, &c};
    const mtp_loader_options options = {.tokens_per_batch = BUDGET, .prefetch = 2, .allocator = &allocator};
    mtp_loader *loader = NULL;
    assert_fails(mtp_loader_create(dataset, &options, &loader), MTP_E_MEMORY, "batch 3 of 4 that the loader keeps");
    assert_null(loader);
    assert_int_equal(c.live, 0);
    c = (counted){.misaligned = 8};
    assert_fails(mtp_loader_create(dataset, &options, &loader), MTP_E_ARGUMENT, "not aligned to 64 bytes");
    assert_int_equal(c.live, 0);
    mtp_dataset_close(dataset);
}

/* ---- what is read --------------------------------------------------------------------------------------------- */

/* One document of S tokens with targets in [TARGET, END): rows lie in [TARGET - 1 - K, END - 2), see global K/V from 0
 * and local K/V of the window before them. Token ids, mask and hidden states are read in full. */
static void only_what_rows_see(void **state)
{
    (void)state;
    enum { S = 300, TARGET = 200, END = 250 };
    const char *dir = test_dir(), *packed = test_path("%s/store", test_dir());
    test_sample sample = test_sample_make(S, TARGET, 77);
    for (int64_t i = END; i < S; i++) test_tensor_set(test_sample_find(&sample, "loss_mask"), i, 0);
    test_sample_write(&sample, test_path("%s/long.safetensors", dir));
    test_sample_free(&sample);
    const mtp_pack_options options = test_pack_options(&dir, 1, verifier);
    mtp_pack_summary summary;
    assert_ok(mtp_pack(packed, &options, &summary));
    const struct {
        const char *path;
        int64_t value, token; /* bytes of a stored value; of id and mask */
    } forms[] = {{dir, 4, 8 + 1}, {packed, 2, 4 + 1}};
    static const int64_t steps[] = {0, 1, 3, 64}; /* 0: whatever K, so 64 */
    for (int f = 0; f < 2; f++) {
        mtp_dataset *dataset = open_data(forms[f].path);
        for (int i = 0; i < 4; i++) {
            const mtp_loader_options load = {.tokens_per_batch = S, .prefetch = 1, .num_speculative_steps = steps[i]};
            const int64_t K = steps[i] ? steps[i] : 64;
            const int64_t local = END - 2 - (TARGET - 1 - K - TINY_WINDOW + 1), global = END - 2;
            const int64_t values = S * TINY_HB + local * 2 * TINY_LOCAL_HEADS * TINY_LOCAL_DIM +
                                   global * 2 * TINY_GLOBAL_HEADS * TINY_GLOBAL_DIM;
            mtp_loader *loader = make_loader(dataset, &load);
            (void)next_hash(loader);
            assert_int_equal(mtp_loader_get_stats(loader).bytes_read, S * forms[f].token + values * forms[f].value);
            mtp_loader_free(loader);
        }
        mtp_dataset_close(dataset);
    }
}

/* The K/V that is left out is zero, the rest is that of the whole document; a fault where nothing is read does not
 * matter. */
static void what_is_left_out_is_zero(void **state)
{
    (void)state;
    enum { S = 40, TARGET = 30, K = 2 };
    const char *dir = test_dir();
    test_sample sample = test_sample_make(S, TARGET, 5);
    test_sample_write(&sample, test_path("%s/a.safetensors", dir));
    mtp_dataset *dataset = open_data(dir);
    const int64_t zero = 0;
    mtp_batch *whole = NULL;
    assert_ok(mtp_batch_collate(dataset, &zero, 1, true, &whole));
    mtp_dataset_close(dataset);
    const int64_t first[MTP_LAYER_TYPES] = {TARGET - 1 - K - TINY_WINDOW + 1, 0};
    test_tensor_set(test_sample_find(&sample, "kv_last_local_k"), (first[0] - 1) * TINY_LOCAL_HEADS * TINY_LOCAL_DIM,
                    1e300 * 1e300);
    test_sample_write(&sample, test_path("%s/a.safetensors", dir));
    test_sample_free(&sample);
    dataset = open_data(dir);
    const mtp_loader_options options = {.tokens_per_batch = S, .prefetch = 1, .num_speculative_steps = K};
    mtp_loader *loader = make_loader(dataset, &options);
    const mtp_batch *batch = NULL;
    int64_t epoch, index;
    assert_ok(mtp_loader_next(loader, &batch, &epoch, &index));
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        const int64_t width = mtp_view_count(whole->kv[type]) / S;
        const float *seen = batch->kv[type].data, *all = whole->kv[type].data;
        for (int64_t t = 0; t < S; t++)
            for (int64_t i = 0; i < width; i++)
                assert_true(seen[t * width + i] == (t >= first[type] && t < S - 2 ? all[t * width + i] : 0.0f));
    }
    mtp_loader_free(loader);
    mtp_batch_free(whole);
    mtp_dataset_close(dataset);
}

/* ---- past the page cache -------------------------------------------------------------------------------------- */

/* Does the file system of the test directory read past the page cache? */
static bool has_direct_io(const mtp_dataset *dataset)
{
    int fd;
    const mtp_status status = mtp__shard_file_direct(mtp__dataset_at(dataset, 0).shard, &fd);
    if (status == MTP_OK) close(fd);
    if (status != MTP_OK) assert_int_equal(status, MTP_E_UNSUPPORTED);
    return status == MTP_OK;
}

/* The same bits in any case, from the first to the last byte of a file, and of fields longer than is read at once. */
static void direct_io_reads_the_same(void **state)
{
    (void)state;
    enum { LONG = 140000 }; /* 4.3 MiB of local K/V */
    const char *dir = test_dir(), *large[2] = {test_path("%s/bf16", test_dir()), test_path("%s/fp8", test_dir())};
    test_sample_file(test_path("%s/long.safetensors", dir), LONG, 3, 8);
    mtp_pack_options pack = test_pack_options(&dir, 1, verifier);
    mtp_pack_summary summary;
    assert_ok(mtp_pack(large[0], &pack, &summary));
    pack.fp8 = true;
    assert_ok(mtp_pack(large[1], &pack, &summary));
    const char *paths[] = {store, large[0], large[1]};
    for (int p = 0; p < 3; p++) {
        mtp_dataset *dataset = open_data(paths[p]);
        mtp_loader_options options = {.tokens_per_batch = p ? LONG : BUDGET, .prefetch = 1, .num_workers = 1};
        uint64_t expected[8];
        size_t bytes = 0;
        for (options.direct_io = MTP_DIRECT_IO_AUTO; options.direct_io <= MTP_DIRECT_IO_OFF; options.direct_io++) {
            mtp_loader *loader = NULL;
            if (options.direct_io == MTP_DIRECT_IO_ON && !has_direct_io(dataset)) {
                assert_fails(mtp_loader_create(dataset, &options, &loader), MTP_E_UNSUPPORTED, "direct_io = \"off\"");
                continue;
            }
            loader = make_loader(dataset, &options);
            for (int i = 0; i < (p ? 1 : 8); i++) {
                const uint64_t hash = next_hash(loader);
                if (options.direct_io == MTP_DIRECT_IO_AUTO) expected[i] = hash;
                assert_true(hash == expected[i]);
            }
            const size_t ring = mtp_loader_get_stats(loader).memory_bytes; /* the buffer is part of it */
            if (options.direct_io == MTP_DIRECT_IO_AUTO) bytes = ring;     /* small files: through the cache */
            if (options.direct_io == MTP_DIRECT_IO_ON) assert_true(ring >= bytes + 3 * MTP__STORE_BOUNCE);
            if (options.direct_io == MTP_DIRECT_IO_OFF) assert_int_equal(ring, bytes);
            mtp_loader_free(loader);
        }
        mtp_dataset_close(dataset);
    }
}

/* Any range of a file: the ends of blocks, one byte, more than is read at once, beyond the end. */
static void direct_reads_of_any_range(void **state)
{
    (void)state;
    enum { SIZE = MTP__STORE_BOUNCE + 3 * MTP__STORE_BLOCK + 77 };
    const char *path = test_path("%s/file", test_dir());
    unsigned char *data = malloc(SIZE), *bounce = aligned_alloc(MTP__STORE_BLOCK, MTP__STORE_BOUNCE);
    test_rng rng = {3};
    assert_true(data && bounce);
    for (int i = 0; i < SIZE; i++) data[i] = (unsigned char)test_below(&rng, 256);
    test_write(path, data, SIZE);
    const int fd = open(path, O_RDONLY | O_DIRECT);
    if (fd >= 0) {
        const mtp__store_reader reader = {.fd = -1, .direct = fd, .bounce = bounce};
        static const size_t ranges[][2] = {{0, 1},       {0, SIZE}, {1, SIZE - 1}, {4095, 2},
                                           {4096, 4096}, {5000, 9}, {SIZE - 1, 1}, {8191, MTP__STORE_BOUNCE}};
        const char *at;
        size_t count;
        for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
            for (size_t offset = ranges[i][0], left = ranges[i][1]; left > 0; offset += count, left -= count) {
                assert_ok(mtp__store_pread_direct(&reader, path, offset, left, &at, &count));
                assert_true(count >= 1 && count <= left &&
                            (left < 65536 ? count == left : count > 4096 || count == left));
                assert_memory_equal(at, data + offset, count);
            }
        assert_fails(mtp__store_pread_direct(&reader, path, SIZE, 1, &at, &count), MTP_E_FORMAT, "ends at");
        assert_fails(mtp__store_pread_direct(&reader, path, 2 * SIZE, 1, &at, &count), MTP_E_FORMAT, "too early");
        close(fd);
    }
    free(data);
    free(bounce);
}

/* ---- ranks ---------------------------------------------------------------------------------------------------- */

/* The documents of step `step` of a run with `world` ranks of `accumulation` micro-batches, marked by how often. */
static void documents_of_step(const mtp_dataset *dataset, int64_t world, int64_t accumulation, int64_t step, int *taken)
{
    memset(taken, 0, SAMPLES * sizeof *taken);
    for (int64_t rank = 0; rank < world; rank++) {
        const mtp_loader_options options = {.tokens_per_batch = BUDGET,
                                            .shuffle = true,
                                            .seed = 4,
                                            .world_size = world,
                                            .rank = rank,
                                            .prefetch = 1,
                                            .num_workers = 1};
        mtp_loader *loader = make_loader(dataset, &options);
        for (int64_t i = 0; i < (step + 1) * accumulation; i++) {
            const mtp_batch *batch = NULL;
            int64_t epoch, index;
            assert_ok(mtp_loader_next(loader, &batch, &epoch, &index));
            for (int64_t d = 0; d < batch->num_documents && i >= step * accumulation; d++)
                taken[batch->document_sample[d]]++;
            mtp_loader_release(loader, batch);
        }
        mtp_loader_free(loader);
    }
}

/* Steps within an epoch and over the end of one (an epoch has about ten batches, a step takes four). */
static void a_global_batch_has_the_same_documents(void **state)
{
    (void)state;
    mtp_dataset *dataset = open_data(samples);
    int alone[SAMPLES], shared[SAMPLES];
    for (int64_t step = 0; step < 7; step++) {
        documents_of_step(dataset, 1, 4, step, alone);
        documents_of_step(dataset, 2, 2, step, shared);
        assert_memory_equal(alone, shared, sizeof alone);
        documents_of_step(dataset, 4, 1, step, shared);
        assert_memory_equal(alone, shared, sizeof alone);
    }
    mtp_dataset_close(dataset);
}

static int set_up(void **state)
{
    (void)state;
    assert_ok(mtp_verifier_open(test_tiny_verifier(), NULL, &verifier));
    samples = test_dir();
    store = test_path("%s/store", test_dir());
    for (int i = 0; i < SAMPLES; i++) {
        test_sample_file(test_path("%s/s%02d.safetensors", samples, i), 6 + i * 7 % 19, 3, (uint64_t)i + 300);
    }
    mtp_pack_options options = test_pack_options(&samples, 1, verifier);
    mtp_pack_summary summary;
    options.shard_bytes = 20000; /* several shards */
    assert_ok(mtp_pack(store, &options, &summary));
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
        cmocka_unit_test(same_with_any_number_of_threads),
        cmocka_unit_test(no_thread_reads_when_asked),
        cmocka_unit_test(failures_keep_their_place),
        cmocka_unit_test(flipped_bits_of_kv),
        cmocka_unit_test(memory_is_the_ring),
        cmocka_unit_test(allocators_that_fail),
        cmocka_unit_test(only_what_rows_see),
        cmocka_unit_test(what_is_left_out_is_zero),
        cmocka_unit_test(direct_io_reads_the_same),
        cmocka_unit_test(direct_reads_of_any_range),
        cmocka_unit_test(a_global_batch_has_the_same_documents),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
