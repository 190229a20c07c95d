/* Protects: reading shards: a newer version is refused by name; a shard that was cut, damaged, left unfinished or
 * swapped is refused or named on reading; whatever byte is flipped, no read leaves its buffer and damage of values
 * never comes out as data; blocks are reserved before values are written; nothing is locked or mapped; opening takes
 * the same number of steps for any number of samples. */
#include "support.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <hdf5.h>

#include "base/file.h"
#include "data/dataset.h"
#include "pack.h"
#include "samples.h"

/* Sanitizers say who they are in two ways; under them nothing is timed. */
#if defined(__has_feature)
#define HAS_FEATURE(feature) __has_feature(feature)
#else
#define HAS_FEATURE(feature) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED true
#else
#define SANITIZED (HAS_FEATURE(address_sanitizer) || HAS_FEATURE(thread_sanitizer))
#endif

static mtp_verifier *verifier;

static const char *pack_two(void)
{
    const char *dir = test_dir(), *out = test_path("%s/store", test_dir());
    for (int i = 0; i < 2; i++) {
        test_sample_file(test_path("%s/%d.safetensors", dir, i), 7 + i, 3, (uint64_t)i + 3);
    }
    mtp_pack_options options = test_pack_options(&dir, 1, verifier);
    mtp_pack_summary summary;
    assert_ok(mtp_pack(out, &options, &summary));
    return out;
}

static mtp_status open_path(const char *path, mtp_dataset **dataset)
{
    const mtp_dataset_options options = {.hidden_norm = MTP_HIDDEN_UNSET};
    return mtp_dataset_open(&path, 1, verifier, &options, dataset);
}

static void set_attribute(const char *path, const char *name, int64_t value)
{
    const hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT), attribute = H5Aopen(file, name, H5P_DEFAULT);
    assert_true(file >= 0 && attribute >= 0 && H5Awrite(attribute, H5T_NATIVE_INT64, &value) >= 0);
    H5Aclose(attribute);
    H5Fclose(file);
}

static void attributes_are_believed_only_when_they_fit(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int64_t value;
        mtp_status status;
        const char *says;
    } cases[] = {
        {"version", 3, MTP_E_VERSION, "a shard of version 3; this program reads version 2 and older: update it"},
        {"version", 2, MTP_E_FORMAT, "there is no attribute global_v_only"},
        {"complete", 0, MTP_E_FORMAT, "not finished"},
        {"num_tokens", 1 << 20, MTP_E_FORMAT, "token_ids"},
        {"num_tokens", -1, MTP_E_FORMAT, "num_tokens is -1"},
        {"hidden_size", 9, MTP_E_FORMAT, "hidden_states"},
        {"num_samples", 1, MTP_E_FORMAT, "index"},
        {"sources_bytes", 1, MTP_E_FORMAT, "sources"},
        {"num_supervised", 1, MTP_E_FORMAT, "does not hold the tokens"},
        {"head_dim_local", 0, MTP_E_FORMAT, "kv_last_local"},
        {"vocab_size", 31, MTP_E_DATA, "another verifier: vocab_size is 31"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *out = pack_two();
        mtp_dataset *dataset = NULL;
        set_attribute(test_path("%s/shard-00000.h5", out), cases[i].name, cases[i].value);
        const mtp_status status = open_path(out, &dataset);
        mtp_dataset_close(dataset);
        if (strcmp(cases[i].name, "head_dim_local") == 0 && status == MTP_E_DATA) continue; /* or by the verifier */
        assert_fails(status, cases[i].status, cases[i].says);
        assert_non_null(strstr(mtp_last_error()->message, "shard-00000.h5"));
    }
}

static void directories_are_checked(void **state)
{
    (void)state;
    const char *out = pack_two(), *shard = test_path("%s/shard-00000.h5", out);
    const char *store = test_path("%s/store.json", out);
    mtp_dataset *dataset = NULL;
    size_t size;
    char *bytes = test_read(shard, &size);
    test_write(test_path("%s/shard-00001.h5", out), bytes, size);
    assert_fails(open_path(out, &dataset), MTP_E_DATA, "shard-00001.h5 does not belong");
    assert_int_equal(unlink(test_path("%s/shard-00001.h5", out)), 0);
    assert_int_equal(unlink(shard), 0);
    assert_fails(open_path(out, &dataset), MTP_E_NOT_FOUND, "shard-00000.h5 is missing");
    for (size_t cut = 0; cut < size; cut += 1 + size / 7) {
        test_write(shard, bytes, cut);
        assert_fails(open_path(out, &dataset), MTP_E_FORMAT, "shard-00000.h5");
    }
    free(bytes);
    test_write(store, "{\"version\": 7, \"num_shards\": 1}", 31);
    assert_fails(open_path(out, &dataset), MTP_E_VERSION, "a store of version 7");
    assert_int_equal(unlink(store), 0);
    assert_fails(open_path(out, &dataset), MTP_E_DATA, "packing has not finished");
}

static void replaced_while_open(void **state)
{
    (void)state;
    const char *out = pack_two(), *shard = test_path("%s/shard-00000.h5", out);
    const int64_t zero = 0;
    mtp_dataset *dataset = NULL;
    mtp_batch *batch = NULL;
    size_t size;
    assert_ok(open_path(out, &dataset));
    char *bytes = test_read(shard, &size);
    assert_int_equal(unlink(shard), 0);
    assert_fails(mtp_batch_collate(dataset, &zero, 1, true, &batch), MTP_E_NOT_FOUND, "shard-00000.h5");
    test_write(shard, bytes, size - 1);
    assert_fails(mtp_batch_collate(dataset, &zero, 1, true, &batch), MTP_E_DATA, "changed since it was opened");
    free(bytes);
    mtp_dataset_close(dataset);
}

/* Every byte of the file, one bit at a time: the batch is as before, or there is an error. */
static void flipped_bits(void **state)
{
    (void)state;
    const char *out = pack_two(), *shard = test_path("%s/shard-00000.h5", out);
    const int64_t both[] = {0, 1};
    mtp_dataset *dataset = NULL;
    mtp_batch *good = NULL;
    size_t size;
    int64_t refused = 0, same = 0;
    char *bytes = test_read(shard, &size);
    assert_ok(open_path(out, &dataset));
    assert_ok(mtp_batch_collate(dataset, both, 2, true, &good));
    mtp_dataset_close(dataset);
    const int fd = open(shard, O_RDWR);
    assert_true(fd >= 0);
    for (size_t i = 0; i < size; i += 3) {
        const char flipped = (char)(bytes[i] ^ (1 << i % 8));
        mtp_batch *batch = NULL;
        dataset = NULL;
        assert_int_equal(pwrite(fd, &flipped, 1, (off_t)i), 1);
        mtp_status status = open_path(out, &dataset);
        if (status == MTP_OK && mtp_dataset_size(dataset) == 2)
            status = mtp_batch_collate(dataset, both, 2, true, &batch);
        if (batch) {
            same++;
            const size_t tokens = (size_t)good->seq;
            assert_int_equal(batch->seq, good->seq);
            assert_memory_equal(batch->token_ids, good->token_ids, tokens * sizeof *good->token_ids);
            assert_memory_equal(batch->loss_mask, good->loss_mask, tokens);
            assert_memory_equal(batch->hidden_states.data, good->hidden_states.data, tokens * TINY_HB * 2);
            for (int type = 0; type < MTP_LAYER_TYPES; type++)
                assert_memory_equal(batch->kv[type].data, good->kv[type].data,
                                    (size_t)mtp_view_count(good->kv[type]) * 2);
        } else {
            refused++;
        }
        mtp_batch_free(batch);
        mtp_dataset_close(dataset);
        assert_int_equal(pwrite(fd, &bytes[i], 1, (off_t)i), 1);
    }
    close(fd);
    mtp_batch_free(good);
    free(bytes);
    printf("%lld flips refused, %lld without effect (names, descriptions)\n", (long long)refused, (long long)same);
    assert_true(refused > 200 && same > 0);
}

/* ---- disks and mounts ------------------------------------------------------------------------------------------ */

/* A full disk shows when the shard is laid out: every block of every field is there before the first value. */
static void blocks_are_reserved(void **state)
{
    (void)state;
    const char *probe = test_path("%s/probe", test_dir()), *path = test_path("%s/shard-00000.h5", test_dir());
    mtp__store_layout layout = mtp__store_layout_of(mtp_verifier_get_config(verifier));
    uint64_t offsets[MTP__STORE_FIELDS];
    struct stat info;
    const int fd = open(probe, O_RDWR | O_CREAT, 0600);
    const bool possible = fd >= 0 && posix_fallocate(fd, 0, 1 << 20) == 0;
    close(fd);
    if (!possible) skip(); /* a file system without reservation */
    layout.num_tokens = 40000;
    layout.num_teacher = 30000;
    layout.teacher_top = 8;
    layout.fp8 = true;
    assert_ok(mtp__store_create(path, &layout, "tiny", offsets));
    assert_int_equal(stat(path, &info), 0);
    for (int field = 0; field < MTP__STORE_FIELDS; field++) {
        const uint64_t bytes = (uint64_t)mtp__store_num_rows(&layout, (mtp__store_field)field) *
                               mtp__store_row_bytes(&layout, (mtp__store_field)field);
        assert_true(offsets[field] > 0 && bytes > 0 && offsets[field] + bytes <= (uint64_t)info.st_size);
    }
    assert_true(info.st_blocks * 512 >= info.st_size);
}

/* As on a network mount: a lock that another program holds keeps nobody from reading, and no part of a shard is mapped,
 * where an I/O error would be a signal. */
static void locks_and_maps(void **state)
{
    (void)state;
    const char *out = pack_two(), *shard = test_path("%s/shard-00000.h5", out);
    const int64_t both[] = {0, 1};
    mtp_dataset *dataset = NULL;
    mtp_batch *batch = NULL;
    const int fd = open(shard, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    assert_ok(open_path(out, &dataset));
    assert_ok(mtp_batch_collate(dataset, both, 2, true, &batch));
    char *maps = test_read("/proc/self/maps", NULL);
    assert_non_null(strstr(maps, "[stack]"));
    assert_null(strstr(maps, ".h5"));
    free(maps);
    close(fd);
    mtp_batch_free(batch);
    mtp_dataset_close(dataset);
}

/* ---- many samples --------------------------------------------------------------------------------------------- */

/* A shard of `count` one-token samples, without values in its fields. */
static const char *many_samples(int64_t count)
{
    const char *path = test_path("%s/shard-00000.h5", test_dir());
    mtp__store_layout layout = mtp__store_layout_of(mtp_verifier_get_config(verifier));
    uint64_t offsets[MTP__STORE_FIELDS];
    layout.num_tokens = count;
    mtp__store_row *rows = calloc((size_t)count, sizeof *rows);
    uint32_t *checksums = calloc((size_t)count, MTP__STORE_FIELDS * sizeof *checksums);
    char *names = calloc((size_t)count, 10);
    assert_true(rows && checksums && names);
    for (int64_t i = 0; i < count; i++) {
        rows[i] = (mtp__store_row){.sample_id = (uint64_t)i,
                                   .first_token = (uint64_t)i,
                                   .source = 10 * (uint64_t)i,
                                   .num_tokens = 1,
                                   .prompt_len = 1,
                                   .first_target = 1};
        snprintf(names + 10 * i, 10, "%08lld", (long long)i);
    }
    const mtp__store_tail tail = {rows, checksums, count, names, 10 * (size_t)count, "", 0};
    assert_ok(mtp__store_create(path, &layout, "tiny", offsets));
    assert_ok(mtp__store_finish(path, &tail));
    free(rows);
    free(checksums);
    free(names);
    return path;
}

static double seconds_to_open(const char *path, int64_t count)
{
    double best = 1e9;
    for (int i = 0; i < 5; i++) {
        struct timespec begin, end;
        mtp_dataset *dataset = NULL;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        assert_ok(open_path(path, &dataset));
        clock_gettime(CLOCK_MONOTONIC, &end);
        assert_int_equal(mtp_dataset_size(dataset), count);
        assert_string_equal(mtp_dataset_sample(dataset, count - 1).name, test_path("%08lld", (long long)count - 1));
        mtp_dataset_close(dataset);
        const double took = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
        if (took < best) best = took;
    }
    return best;
}

static void a_million_samples(void **state)
{
    (void)state;
    const double few = seconds_to_open(many_samples(1000), 1000),
                 many = seconds_to_open(many_samples(1000000), 1000000);
    printf("open: 1,000 samples %.4f s, 1,000,000 samples %.4f s\n", few, many);
    assert_true(many < 0.1 || SANITIZED);
}

static int set_up(void **state)
{
    (void)state;
    assert_ok(mtp_verifier_open(test_tiny_verifier(), NULL, &verifier));
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
        cmocka_unit_test(attributes_are_believed_only_when_they_fit),
        cmocka_unit_test(directories_are_checked),
        cmocka_unit_test(replaced_while_open),
        cmocka_unit_test(flipped_bits),
        cmocka_unit_test(blocks_are_reserved),
        cmocka_unit_test(locks_and_maps),
        cmocka_unit_test(a_million_samples),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
