/* Protects: a checkpoint gives back every bit; a damaged, incomplete or newer one is refused by name with its reason
 * and the good one beside it is named; a failing save leaves what was there. */
#include "fixture.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "run/checkpoint.h"

static void save(fixture *f, int64_t step)
{
    mtp__manifest *m = make_manifest(step);
    assert_ok(mtp__checkpoint_save(f->run, m, f->drafter, f->optimizer));
    mtp__manifest_free(m);
}

static const char *directory_of(const fixture *f, int64_t step)
{
    return test_path("%s/checkpoints/step-%08lld", f->run, (long long)step);
}

static const char *shard_of(const fixture *f, int64_t step)
{
    return test_path("%s/shard-00000-of-00001.safetensors", directory_of(f, step));
}

static void gives_back_every_bit(void **state)
{
    (void)state;
    fixture f = open_fixture(), g = open_fixture();
    scramble(&f, 1);
    save(&f, 12);
    mtp__manifest *m = NULL;
    assert_ok(mtp__checkpoint_find(f.run, NULL, &m));
    assert_string_equal(m->directory, directory_of(&f, 12));
    assert_int_equal(m->step, 12);
    assert_int_equal(m->total_steps, 100);
    assert_int_equal(m->epoch, 3);
    assert_int_equal(m->batch, 4);
    assert_true(m->seed == 9007199254740991u);
    assert_string_equal(m->drafter, "/models/a \"drafter\"");
    assert_true(m->verifier == 0xfedcba9876543210u);
    assert_true(m->dataset == 0x8000000000000001u);
    assert_true(m->best_length == 0.1 + 0.2);
    assert_int_equal(m->best_step, 12);
    assert_int_equal(m->evals_since_best, 2);
    assert_int_equal(m->last_eval_step, 12);
    assert_string_equal(mtp__manifest_setting(m, "optimizer.learning_rate"), "0.001");
    assert_null(mtp__manifest_setting(m, "optimizer.weight_decay"));
    assert_ok(mtp__checkpoint_load_weights(m, g.drafter));
    assert_ok(mtp__checkpoint_load_optimizer(m, g.drafter, g.optimizer));
    assert_same_state(&f, &g);
    assert_int_equal(step_of(g.optimizer), 12);
    mtp__manifest_free(m);
    close_fixture(&f);
    close_fixture(&g);
}

/* The sizes that the check of free space counts on. */
static void bytes_are_foreseen(void **state)
{
    (void)state;
    fixture f = open_fixture();
    struct stat info;
    save(&f, 1);
    assert_int_equal(stat(shard_of(&f, 1), &info), 0);
    const uint64_t foreseen = mtp__checkpoint_bytes(f.drafter);
    assert_true((uint64_t)info.st_size <= foreseen && foreseen < (uint64_t)info.st_size + (1 << 17));
    close_fixture(&f);
}

static void finds(const fixture *f, int64_t step)
{
    mtp__manifest *m = NULL;
    assert_ok(mtp__checkpoint_find(f->run, NULL, &m));
    assert_int_equal(m->step, step);
    mtp__manifest_free(m);
}

static void refuses(const char *path, mtp_status status, const char *message)
{
    mtp__manifest *m = NULL;
    assert_fails(mtp__checkpoint_find(path, NULL, &m), status, message);
    assert_null(m);
}

/* What the logger was told. */
static void keep_line(void *user, mtp_log_level level, const char *line)
{
    if (level == MTP_LOG_WARNING) snprintf(user, 4096, "%s", line);
}

static void flip(const char *path, long offset)
{
    size_t size;
    char *text = test_read(path, &size);
    assert_true((size_t)offset < size);
    text[offset] = (char)(text[offset] ^ 1);
    test_write(path, text, size);
    free(text);
}

static void a_damaged_one_is_skipped_and_named(void **state)
{
    (void)state;
    fixture f = open_fixture();
    char warning[4096] = "";
    const mtp_logger logger = {.write = keep_line, .user = warning};
    for (int64_t step = 1; step <= 4; step++) save(&f, step);
    finds(&f, 4);
    flip(shard_of(&f, 4), 200000);
    mtp__manifest *m = NULL;
    assert_ok(mtp__checkpoint_find(f.run, &logger, &m));
    assert_int_equal(m->step, 3);
    mtp__manifest_free(m);
    assert_non_null(strstr(warning, "skipped: checkpoint"));
    assert_non_null(strstr(warning, "step-00000004"));
    assert_non_null(strstr(warning, "checksum"));
    refuses(directory_of(&f, 4), MTP_E_DATA, "step-00000003");
    refuses(test_path("%s/", directory_of(&f, 4)), MTP_E_DATA, "the newest good checkpoint beside it is");
    assert_int_equal(truncate(shard_of(&f, 3), 1000), 0);
    finds(&f, 2);
    refuses(directory_of(&f, 3), MTP_E_DATA, "has 1000 bytes, the manifest says");
    assert_int_equal(unlink(shard_of(&f, 2)), 0);
    finds(&f, 1);
    refuses(directory_of(&f, 2), MTP_E_DATA, "shard-00000-of-00001.safetensors");
    assert_int_equal(unlink(test_path("%s/manifest.json", directory_of(&f, 1))), 0);
    refuses(directory_of(&f, 1), MTP_E_DATA, "manifest.json");
    refuses(f.run, MTP_E_DATA, "has no good checkpoint: 4 are damaged");
    close_fixture(&f);
}

/* The manifest has a checksum of its own: a digit that changed makes no other run of it. */
static void an_edited_manifest_is_damaged(void **state)
{
    (void)state;
    fixture f = open_fixture();
    save(&f, 1);
    save(&f, 2);
    const char *path = test_path("%s/manifest.json", directory_of(&f, 2));
    char *text = test_read(path, NULL), *epoch = strstr(text, "\"epoch\": 3");
    assert_non_null(epoch);
    epoch[strlen("\"epoch\": ")] = '1';
    test_write(path, text, strlen(text));
    free(text);
    refuses(directory_of(&f, 2), MTP_E_DATA, "the manifest's own checksum is not right");
    finds(&f, 1);
    close_fixture(&f);
}

/* The same names and shapes, but the weights would mean something else. */
static void another_computation_is_refused(void **state)
{
    (void)state;
    fixture f = open_fixture();
    mtp_drafter *d = f.drafter;
    mtp__manifest *m = NULL;
    save(&f, 1);
    assert_ok(mtp__checkpoint_find(f.run, NULL, &m));
    const int64_t first = d->token_ordering[0];
    d->token_ordering[0] = d->token_ordering[1];
    d->token_ordering[1] = first;
    assert_fails(mtp__checkpoint_load_weights(m, d), MTP_E_DATA, "token_ordering is not the one");
    d->token_ordering[1] = d->token_ordering[0];
    d->token_ordering[0] = first;
    assert_ok(mtp__checkpoint_load_weights(m, d));
    d->config.centroid_top_k--;
    assert_fails(mtp__checkpoint_load_weights(m, d), MTP_E_DATA, "config.json");
    d->config.centroid_top_k++;
    d->config.geometry[MTP_LAYER_FULL].rope_theta *= 2;
    assert_fails(mtp__checkpoint_load_weights(m, d), MTP_E_DATA, "config.json");
    mtp__manifest_free(m);
    close_fixture(&f);
}

static void a_newer_version_is_not_passed_over(void **state)
{
    (void)state;
    fixture f = open_fixture();
    save(&f, 1);
    save(&f, 2);
    const char *path = test_path("%s/manifest.json", directory_of(&f, 2));
    char *text = test_read(path, NULL), *version = strstr(text, "\"version\": 3");
    assert_non_null(version);
    version[strlen("\"version\": ")] = '7';
    test_write(path, text, strlen(text));
    free(text);
    refuses(f.run, MTP_E_VERSION, "version 7, written by a newer mtp");
    close_fixture(&f);
}

static void other_directories_are_named(void **state)
{
    (void)state;
    fixture f = open_fixture();
    refuses("/nowhere/at/all", MTP_E_NOT_FOUND, "/nowhere/at/all");
    refuses(MTP_TEST_DATA "/sample", MTP_E_NOT_FOUND, "is neither a run");
    assert_int_equal(mkdir(f.run, 0777), 0);
    test_write(test_path("%s/run.json", f.run), "{}", 2);
    refuses(f.run, MTP_E_NOT_FOUND, "has no checkpoint yet");
    close_fixture(&f);
}

static void another_drafter_is_refused(void **state)
{
    (void)state;
    fixture f = open_fixture();
    save(&f, 1);
    mtp_drafter *dense = NULL;
    mtp__manifest *m = NULL;
    assert_ok(mtp_drafter_load(f.context, MTP_TEST_DATA "/sample/drafter_init_dense", &dense));
    assert_ok(mtp__checkpoint_find(f.run, NULL, &m));
    assert_fails(mtp__checkpoint_load_weights(m, dense), MTP_E_DATA, "masked_embedding.centroids.weight is unknown");
    mtp_drafter_free(dense);
    mtp__param *param = &f.drafter->params[0];
    param->trained = false; /* frozen now: the checkpoint has moments of it that nobody asks for */
    assert_fails(mtp__checkpoint_load_optimizer(m, f.drafter, f.optimizer), MTP_E_DATA,
                 test_path("exp_avg.%s is unknown", param->name));
    param->trained = true;
    mtp__manifest_free(m);
    close_fixture(&f);
}

static void keeps_the_newest_and_the_best(void **state)
{
    (void)state;
    fixture f = open_fixture();
    for (int64_t step = 1; step <= 5; step++) save(&f, step);
    const char *leftover = test_path("%s/checkpoints/.step-00000006.tmp-1", f.run);
    assert_int_equal(mkdir(leftover, 0777), 0);
    test_write(test_path("%s/shard", leftover), "x", 1);
    /* killed between moving a checkpoint away for a new one of its step and giving the new one its name */
    assert_int_equal(rename(directory_of(&f, 4), test_path("%s/checkpoints/.step-00000004.old", f.run)), 0);
    assert_ok(mtp__checkpoint_mark_best(f.run, 2));
    assert_ok(mtp__checkpoint_prune(f.run, &(mtp__retention){.last = 2, .best_step = 2}));
    mtp__name_list names;
    assert_ok(mtp__dir_list(test_path("%s/checkpoints", f.run), MTP__LIST_DIRECTORIES, NULL, &names));
    assert_int_equal(names.count, 4);
    assert_string_equal(names.names[0], "best");
    assert_string_equal(names.names[1], "step-00000002");
    assert_string_equal(names.names[2], "step-00000004");
    assert_string_equal(names.names[3], "step-00000005");
    mtp__name_list_free(&names);
    mtp__manifest *m = NULL;
    assert_ok(mtp__checkpoint_find(test_path("%s/checkpoints/best", f.run), NULL, &m));
    assert_int_equal(m->step, 2);
    mtp__manifest_free(m);
    assert_ok(mtp__checkpoint_mark_best(f.run, 5));
    assert_ok(mtp__checkpoint_find(test_path("%s/checkpoints/best", f.run), NULL, &m));
    assert_int_equal(m->step, 5);
    mtp__manifest_free(m);
    close_fixture(&f);
}

static void a_step_is_saved_again_in_its_place(void **state)
{
    (void)state;
    fixture f = open_fixture();
    save(&f, 3);
    flip(shard_of(&f, 3), 200000);
    scramble(&f, 5);
    save(&f, 3);
    finds(&f, 3);
    mtp__name_list names;
    assert_ok(mtp__dir_list(test_path("%s/checkpoints", f.run), MTP__LIST_DIRECTORIES, NULL, &names));
    assert_int_equal(names.count, 1);
    mtp__name_list_free(&names);
    close_fixture(&f);
}

/* The limit on file size stands for a disk that fills up in the middle of the shard. */
static void a_save_that_fails_leaves_the_one_before(void **state)
{
    (void)state;
    fixture f = open_fixture();
    struct rlimit old, small;
    save(&f, 1);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = (struct rlimit){.rlim_cur = 100000, .rlim_max = old.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    mtp__manifest *m = mtp__manifest_create();
    m->step = 2;
    m->drafter = strdup("d");
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    const mtp_status status = mtp__checkpoint_save(f.run, m, f.drafter, f.optimizer);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(status, MTP_E_IO);
    assert_non_null(strstr(mtp_last_error()->message, "checkpoint of step 2 not saved"));
    mtp__manifest_free(m);
    finds(&f, 1);
    mtp__name_list names;
    assert_ok(mtp__dir_list(test_path("%s/checkpoints", f.run), MTP__LIST_DIRECTORIES, NULL, &names));
    assert_int_equal(names.count, 1);
    mtp__name_list_free(&names);
    close_fixture(&f);
}

/* What may not be read may be good: no older one is taken in its place. The superuser may read everything, so the test
 * looks as somebody else. */
static void an_unreadable_one_is_not_passed_over(void **state)
{
    (void)state;
    fixture f = open_fixture();
    mtp__manifest *m = NULL;
    save(&f, 1);
    save(&f, 2);
    assert_int_equal(chmod(f.run, 0755) + chmod(test_path("%s/..", f.run), 0755), 0);
    assert_int_equal(chmod(shard_of(&f, 2), 0), 0);
    const uid_t us = geteuid();
    if (us == 0) assert_int_equal(seteuid(65534), 0);
    const mtp_status status = mtp__checkpoint_find(f.run, NULL, &m);
    if (us == 0) assert_int_equal(seteuid(us), 0);
    assert_fails(status, MTP_E_IO, "Permission denied; make it readable, or remove it");
    assert_int_equal(chmod(shard_of(&f, 2), 0644), 0);
    finds(&f, 2);
    close_fixture(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gives_back_every_bit),
        cmocka_unit_test(bytes_are_foreseen),
        cmocka_unit_test(a_damaged_one_is_skipped_and_named),
        cmocka_unit_test(an_edited_manifest_is_damaged),
        cmocka_unit_test(another_computation_is_refused),
        cmocka_unit_test(a_newer_version_is_not_passed_over),
        cmocka_unit_test(other_directories_are_named),
        cmocka_unit_test(another_drafter_is_refused),
        cmocka_unit_test(keeps_the_newest_and_the_best),
        cmocka_unit_test(a_step_is_saved_again_in_its_place),
        cmocka_unit_test(an_unreadable_one_is_not_passed_over),
        cmocka_unit_test(a_save_that_fails_leaves_the_one_before),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
