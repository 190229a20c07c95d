/* Protects: checkpoints written beside the training are the state at their begin whatever happens to it meanwhile; any
 * number of ranks writes one, and any other loads it bit for bit, one of version 2 as well; parts that are not
 * every value once are refused; a save that fails on one rank fails on all, names it, and costs nothing but itself. */
#include "fixture.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/file.h"
#include "mtp/safetensors.h"
#include "run/saver.h"

enum { MAX_RANKS = 8 };

/* Ranks of one run, all in this process. */
typedef struct world {
    fixture *f;
    int64_t size;
    mtp__optimizer *parts[MAX_RANKS]; /* NULL: every rank holds the fixture's */
    mtp__saver *savers[MAX_RANKS];
} world;

static world open_world(fixture *f, int64_t size, bool sharded)
{
    world w = {.f = f, .size = size};
    for (int64_t i = 0; i < size; i++) {
        if (sharded) w.parts[i] = open_part(f, i, size);
        const mtp__saver_options options = {.run_directory = f->run,
                                            .drafter = f->drafter,
                                            .optimizer = sharded ? w.parts[i] : f->optimizer,
                                            .share = {.rank = i, .world_size = size, .sharded_moments = sharded}};
        assert_ok(mtp__saver_create(&options, &w.savers[i]));
    }
    return w;
}

static void close_world(world *w)
{
    for (int64_t i = 0; i < w->size; i++) {
        mtp__saver_free(w->savers[i]);
        mtp__optimizer_free(w->parts[i]);
    }
}

static void begin(world *w, int64_t step)
{
    for (int64_t i = 0; i < w->size; i++) {
        const mtp__save save = {.step = step,
                                .manifest = i == 0 ? make_manifest(step) : NULL,
                                .retention = {.last = 2, .best_step = -1},
                                .metrics = -1};
        assert_false(mtp__saver_busy(w->savers[i]));
        assert_ok(mtp__saver_begin(w->savers[i], &save));
        assert_true(mtp__saver_busy(w->savers[i]));
    }
}

/* Until it has ended; every rank must come to the same. */
static mtp__save_outcome settle(world *w, mtp_status *status)
{
    for (;;) {
        mtp__save_report reports[MAX_RANKS];
        for (int64_t i = 0; i < w->size; i++) mtp__saver_wait(w->savers[i], 60, &reports[i]);
        mtp__save_outcome first = mtp__saver_settle(w->savers[0], reports, status);
        for (int64_t i = 1; i < w->size; i++) {
            mtp_status other;
            assert_int_equal(mtp__saver_settle(w->savers[i], reports, &other), first);
            assert_int_equal(other, *status);
        }
        if (first != MTP__SAVE_PENDING) return first;
    }
}

static void save(world *w, int64_t step)
{
    mtp_status status;
    begin(w, step);
    assert_int_equal(settle(w, &status), MTP__SAVE_DONE);
    assert_null(mtp__saver_warning(w->savers[0]));
}

static void loads_into(const char *run, const fixture *expected, int64_t step)
{
    fixture g = open_fixture();
    mtp__manifest *m = NULL;
    assert_ok(mtp__checkpoint_find(run, NULL, &m));
    assert_int_equal(m->step, step);
    assert_ok(mtp__checkpoint_load_weights(m, g.drafter));
    assert_ok(mtp__checkpoint_load_optimizer(m, g.drafter, g.optimizer));
    assert_same_state(expected, &g);
    /* the parts of three ranks */
    for (int64_t rank = 0; rank < 3; rank++) {
        mtp__optimizer *part = open_part(&g, rank, 3);
        assert_ok(mtp__checkpoint_load_optimizer(m, g.drafter, part));
        assert_int_equal(step_of(part), step);
        for (int64_t i = 0, j = 0; i < part->num_tensors; i++) {
            const mtp__optim_tensor *t = &part->tensors[i];
            while (strcmp(expected->optimizer->tensors[j].name, t->name) != 0) j++;
            const size_t size = (size_t)mtp_view_count(part->exp_avg[i]) * sizeof(float);
            const mtp__optimizer *o = expected->optimizer;
            assert_memory_equal(part->exp_avg[i].data, (const float *)o->exp_avg[j].data + t->first, size);
            assert_memory_equal(part->exp_avg_sq[i].data, (const float *)o->exp_avg_sq[j].data + t->first, size);
        }
        mtp__optimizer_free(part);
    }
    mtp__manifest_free(m);
    close_fixture(&g);
}

static void it_is_the_state_at_its_begin(void **state)
{
    (void)state;
    fixture f = open_fixture(), same = open_fixture();
    scramble(&f, 1);
    scramble(&same, 1);
    world w = open_world(&f, 1, false);
    mtp_status status;
    begin(&w, 7);
    scramble(&f, 2);
    assert_int_equal(settle(&w, &status), MTP__SAVE_DONE);
    loads_into(f.run, &same, 7);
    assert_int_equal(count_directories(f.run), 1);
    close_world(&w);
    close_fixture(&f);
    close_fixture(&same);
}

/* One process writes the same file, byte for byte, as a save at once. */
static void one_process_writes_the_same_shard_at_once(void **state)
{
    (void)state;
    fixture f = open_fixture(), g = open_fixture();
    scramble(&f, 1);
    scramble(&g, 1);
    world w = open_world(&f, 1, false);
    save(&w, 1);
    mtp__manifest *m = make_manifest(1);
    assert_ok(mtp__checkpoint_save(g.run, m, g.drafter, g.optimizer));
    mtp__manifest_free(m);
    static const char *const names[] = {"shard-00000-of-00001.safetensors", "manifest.json"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t a_size, b_size;
        char *a = test_read(test_path("%s/checkpoints/step-00000001/%s", f.run, names[i]), &a_size);
        char *b = test_read(test_path("%s/checkpoints/step-00000001/%s", g.run, names[i]), &b_size);
        assert_int_equal(a_size, b_size);
        assert_memory_equal(a, b, a_size);
        free(a);
        free(b);
    }
    close_world(&w);
    close_fixture(&f);
    close_fixture(&g);
}

static void any_world_writes_and_any_other_loads(void **state)
{
    (void)state;
    for (int sharded = 0; sharded < 2; sharded++)
        for (int64_t ranks = 2; ranks <= MAX_RANKS; ranks += ranks < 4 ? 1 : 4) {
            fixture f = open_fixture();
            scramble(&f, 3);
            if (sharded) /* what the parts hold is not what the whole optimizer holds: put it there */
                test_fill(&(test_rng){9}, f.optimizer->moments, (int64_t)(f.optimizer->moment_bytes / 4), 1.0f);
            world w = open_world(&f, ranks, sharded != 0);
            for (int64_t rank = 0; sharded && rank < ranks; rank++)
                for (int64_t i = 0, j = 0; i < w.parts[rank]->num_tensors; i++) {
                    const mtp__optim_tensor *t = &w.parts[rank]->tensors[i];
                    while (strcmp(f.optimizer->tensors[j].name, t->name) != 0) j++;
                    const size_t size = (size_t)mtp_view_count(w.parts[rank]->exp_avg[i]) * sizeof(float);
                    memcpy(w.parts[rank]->exp_avg[i].data, (float *)f.optimizer->exp_avg[j].data + t->first, size);
                    memcpy(w.parts[rank]->exp_avg_sq[i].data, (float *)f.optimizer->exp_avg_sq[j].data + t->first,
                           size);
                }
            save(&w, 5);
            mtp__manifest *m = NULL;
            assert_ok(mtp__checkpoint_find(f.run, NULL, &m));
            assert_int_equal(m->num_shards, ranks);
            assert_int_equal(m->world_size, ranks);
            uint64_t least = UINT64_MAX, most = 0;
            for (int64_t i = 0; i < ranks; i++) {
                if (m->shards[i].bytes < least) least = m->shards[i].bytes;
                if (m->shards[i].bytes > most) most = m->shards[i].bytes;
            }
            assert_true(most < least + 16384); /* the work is shared: they differ by their headers */
            mtp__manifest_free(m);
            loads_into(f.run, &f, 5);
            close_world(&w);
            close_fixture(&f);
        }
}

/* ---- version 2: rows in the order of the tokens ---------------------------------------------------------------- */

/* Values of the embedding, in memory and in the order of the tokens. */
typedef struct by_token {
    const float *memory;
    float *values;
} by_token;

static by_token order_by_token(const mtp_drafter *drafter, const void *memory)
{
    const int64_t V = drafter->embed->shape[0], H = drafter->embed->shape[1];
    const by_token t = {memory, malloc((size_t)(V * H) * sizeof(float))};
    assert_non_null(t.values);
    for (int64_t slot = 0; slot < V; slot++)
        memcpy(t.values + drafter->token_ordering[slot] * H, t.memory + slot * H, (size_t)H * sizeof(float));
    return t;
}

/* A checkpoint of version 2 by `ranks` ranks, whose parts of the embedding begin and end inside of rows. */
static void save_by_token(const fixture *f, int64_t ranks)
{
    const mtp_drafter *drafter = f->drafter;
    const int64_t count = drafter->embed->count;
    int64_t at = 0;
    while (strcmp(f->optimizer->tensors[at].name, drafter->embed->name) != 0) at++;
    const by_token tensors[] = {order_by_token(drafter, drafter->embed->value),
                                order_by_token(drafter, f->optimizer->exp_avg[at].data),
                                order_by_token(drafter, f->optimizer->exp_avg_sq[at].data)};
    mtp__manifest *m = make_manifest(4);
    int64_t replaced = 0;
    m->version = 2;
    m->world_size = ranks;
    m->computation = mtp__checkpoint_computation(drafter);
    for (int64_t rank = 0; rank < ranks; rank++) {
        const mtp__share share = {.rank = rank, .world_size = ranks};
        mtp__pieces pieces;
        char name[MTP__SHARD_NAME];
        uint64_t bytes;
        uint32_t crc;
        assert_ok(mtp__pieces_collect(drafter, f->optimizer, &share, &pieces));
        for (int64_t i = 0; i < pieces.count; i++)
            for (int k = 0; k < 3; k++) {
                mtp_view *view = &pieces.items[i].view;
                const int64_t first = (const float *)view->data - tensors[k].memory;
                if (first < 0 || first >= count) continue;
                view->data = tensors[k].values + first;
                replaced += mtp_view_count(*view);
                break;
            }
        mtp__shard_name(rank, ranks, name);
        assert_ok(mtp__shard_write(f->run, 4, &share, &pieces, NULL, &bytes, &crc));
        assert_ok(mtp__manifest_add_shard(m, name, bytes, crc));
        mtp__pieces_free(&pieces);
    }
    assert_int_equal(replaced, 3 * count);
    assert_ok(mtp__checkpoint_publish(f->run, m));
    mtp__manifest_free(m);
    for (int k = 0; k < 3; k++) free(tensors[k].values);
}

static void rows_in_the_order_of_the_tokens_load(void **state)
{
    (void)state;
    static const int64_t ranks[] = {1, 5};
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        fixture f = open_fixture();
        scramble(&f, 5);
        save_by_token(&f, ranks[i]);
        loads_into(f.run, &f, 4);
        close_fixture(&f);
    }
}

/* ---- parts that do not fit together --------------------------------------------------------------------------- */

static mtp_status load_with(const fixture *f, const char *const *names, const int64_t *lengths, size_t count)
{
    static const float zeros[1 << 16];
    mtp_safetensors_source sources[8] = {0};
    const mtp__share share = {.world_size = 1};
    mtp__pieces pieces;
    char *staging = NULL;
    fixture g = open_fixture();
    mtp__manifest *m = make_manifest(1), *found = NULL;
    uint64_t bytes;
    uint32_t crc;
    assert_ok(mtp__pieces_collect(g.drafter, g.optimizer, &share, &pieces));
    for (int64_t i = 0; i < pieces.count; i++) /* the norm comes from elsewhere */
        if (strcmp(pieces.items[i].key, "param.model.norm.weight") == 0) {
            free(pieces.items[i].key);
            pieces.items[i].key = strdup("spare");
        }
    assert_ok(mtp__shard_write(f->run, 1, &share, &pieces, NULL, &bytes, &crc));
    assert_ok(mtp__manifest_add_shard(m, "shard-00000-of-00001.safetensors", bytes, crc));
    for (size_t i = 0; i < count; i++)
        sources[i] = (mtp_safetensors_source){
            .name = names[i], .dtype = MTP_F32, .rank = 1, .shape = &lengths[i], .data = zeros};
    assert_ok(mtp__checkpoint_staging(f->run, 1, &staging));
    const char *path = test_path("%s/more.safetensors", staging);
    assert_ok(mtp_safetensors_write(path, NULL, 0, sources, count));
    mtp__file_map map;
    assert_ok(mtp__file_map_open(&map, path));
    assert_ok(mtp__manifest_add_shard(m, "more.safetensors", map.size, 0));
    mtp__file_map_close(&map);
    m->computation = mtp__checkpoint_computation(g.drafter);
    assert_ok(mtp__checkpoint_publish(f->run, m));
    assert_ok(mtp__checkpoint_open(test_path("%s/checkpoints/step-00000001", f->run), false, &found));
    const mtp_status status = mtp__checkpoint_load_weights(found, g.drafter);
    mtp__manifest_free(m);
    mtp__manifest_free(found);
    mtp__pieces_free(&pieces);
    free(staging);
    close_fixture(&g);
    return status;
}

static void parts_must_be_every_value_once(void **state)
{
    (void)state;
    fixture f = open_fixture();
    int64_t size = 0;
    for (int64_t i = 0; i < f.drafter->num_params; i++)
        if (strcmp(f.drafter->params[i].name, "model.norm.weight") == 0) size = f.drafter->params[i].count;
    assert_true(size > 20);
    const struct {
        int64_t first, end, second, last;
        bool good;
    } cases[] = {
        {0, 10, 10, size, true},      {10, size, 0, 10, true},  {0, 10, 11, size, false},     {0, 10, 9, size, false},
        {0, 10, 10, size - 1, false}, {1, 10, 10, size, false}, {0, 10, 10, size + 1, false}, {0, size, 0, 10, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *const names[] = {
            test_path("param.model.norm.weight[%lld:%lld]", (long long)cases[i].first, (long long)cases[i].end),
            test_path("param.model.norm.weight[%lld:%lld]", (long long)cases[i].second, (long long)cases[i].last)};
        const int64_t lengths[] = {cases[i].end - cases[i].first, cases[i].last - cases[i].second};
        const mtp_status status = load_with(&f, names, lengths, 2);
        if (cases[i].good)
            assert_ok(status);
        else
            assert_fails(status, MTP_E_DATA, "param.model.norm.weight: its parts have another shape");
    }
    const int64_t whole = size, other = size - 3;
    assert_ok(load_with(&f, (const char *const[]){"param.model.norm.weight"}, &whole, 1));
    assert_fails(load_with(&f, (const char *const[]){"param.model.norm.weight"}, &other, 1), MTP_E_DATA,
                 "param.model.norm.weight has another shape");
    /* a range that the values do not have */
    const char *said = test_path("param.model.norm.weight[0:%lld]", (long long)size);
    assert_fails(load_with(&f, &said, &other, 1), MTP_E_DATA, "param.model.norm.weight has another shape");
    /* what only looks like a range is a name */
    static const char *const odd[] = {"param.model.norm.weight[0:]", "param.model.norm.weight[:9]",
                                      "param.model.norm.weight[0:9", "param.model.norm.weight[-1:9]",
                                      "param.model.norm.weight[0:9999999999999999999]"};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        assert_fails(load_with(&f, &odd[i], &whole, 1), MTP_E_DATA, "param.model.norm.weight is missing");
    close_fixture(&f);
}

/* ---- saves that fail ------------------------------------------------------------------------------------------ */

static void a_full_disk_costs_one_checkpoint(void **state)
{
    (void)state;
    fixture f = open_fixture();
    world w = open_world(&f, 2, false);
    struct rlimit old, small;
    mtp_status status;
    save(&w, 1);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = (struct rlimit){.rlim_cur = 100000, .rlim_max = old.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    begin(&w, 2);
    assert_int_equal(settle(&w, &status), MTP__SAVE_LOST);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(status, MTP_E_IO);
    assert_non_null(strstr(mtp_last_error()->message, "checkpoint of step 2 not saved: rank 0: "));
    assert_int_equal(count_directories(f.run), 1);
    loads_into(f.run, &f, 1);
    scramble(&f, 4);
    save(&w, 3); /* and the next one is whole */
    loads_into(f.run, &f, 3);
    close_world(&w);
    close_fixture(&f);
}

/* One rank that cannot write: something stands where its shard should go. */
static void the_rank_that_failed_is_named(void **state)
{
    (void)state;
    fixture f = open_fixture();
    world w = open_world(&f, 3, false);
    mtp_status status;
    char *staging = NULL;
    save(&w, 1);
    assert_ok(mtp__checkpoint_staging(f.run, 2, &staging));
    assert_ok(mtp__dir_create(test_path("%s/shard-00002-of-00003.safetensors", staging)));
    begin(&w, 2);
    assert_int_equal(settle(&w, &status), MTP__SAVE_LOST);
    assert_non_null(strstr(mtp_last_error()->message, "step 2 not saved: rank 2: "));
    loads_into(f.run, &f, 1);
    assert_int_equal(rmdir(test_path("%s/shard-00002-of-00003.safetensors", staging)), 0);
    save(&w, 2);
    loads_into(f.run, &f, 2);
    free(staging);
    close_world(&w);
    close_fixture(&f);
}

/* A shard that is gone before the manifest is written: ranks that share no directory. */
static void a_shard_that_is_not_there_is_no_checkpoint(void **state)
{
    (void)state;
    fixture f = open_fixture();
    world w = open_world(&f, 2, false);
    mtp__save_report reports[2];
    mtp_status status;
    char *staging = NULL;
    assert_ok(mtp__checkpoint_staging(f.run, 1, &staging));
    begin(&w, 1);
    for (int64_t i = 0; i < 2; i++) mtp__saver_wait(w.savers[i], 60, &reports[i]);
    assert_int_equal(unlink(test_path("%s/shard-00001-of-00002.safetensors", staging)), 0);
    assert_int_equal(settle(&w, &status), MTP__SAVE_LOST);
    assert_non_null(strstr(mtp_last_error()->message, "a directory that all ranks share"));
    mtp__manifest *m = NULL;
    assert_fails(mtp__checkpoint_find(test_path("%s", f.run), NULL, &m), MTP_E_NOT_FOUND, "no checkpoint yet");
    save(&w, 1);
    free(staging);
    close_world(&w);
    close_fixture(&f);
}

static void keep_line(void *user, mtp_log_level level, const char *line)
{
    if (level == MTP_LOG_WARNING) snprintf(user, 4096, "%s", line);
}

/* One shard of several is cut short, changed or gone: that checkpoint is refused by the name of the shard, and the one
 * before it taken where any may be. */
static void a_damaged_shard_is_named(void **state)
{
    (void)state;
    static const char *const reasons[] = {"damaged or incomplete", "the checksum is not", "cannot open"};
    fixture f = open_fixture();
    world w = open_world(&f, 3, false);
    for (int damage = 0; damage < 3; damage++) {
        char warning[4096] = "";
        const mtp_logger logger = {.write = keep_line, .user = warning};
        mtp__manifest *m = NULL;
        save(&w, 2 * damage + 1);
        save(&w, 2 * damage + 2);
        const char *directory = test_path("%s/checkpoints/step-%08d", f.run, 2 * damage + 2);
        const char *shard = test_path("%s/shard-00001-of-00003.safetensors", directory);
        size_t size;
        char *bytes = test_read(shard, &size);
        bytes[size / 2] = (char)(bytes[size / 2] ^ 4);
        if (damage < 2)
            test_write(shard, bytes, damage == 0 ? size - 4 : size);
        else
            assert_int_equal(unlink(shard), 0);
        free(bytes);
        assert_ok(mtp__checkpoint_find(f.run, &logger, &m));
        assert_int_equal(m->step, 2 * damage + 1);
        mtp__manifest_free(m);
        if (!strstr(warning, "shard-00001-of-00003.safetensors") || !strstr(warning, reasons[damage]))
            fail_msg("the warning does not name shard and reason \"%s\": %s", reasons[damage], warning);
        assert_fails(mtp__checkpoint_find(directory, NULL, &m), MTP_E_DATA, "shard-00001-of-00003.safetensors");
        assert_non_null(strstr(mtp_last_error()->message, "the newest good checkpoint beside it is"));
    }
    close_world(&w);
    close_fixture(&f);
}

/* Closed in the middle of a save: nothing that looks like a checkpoint is left. */
static void a_saver_may_be_closed_at_any_time(void **state)
{
    (void)state;
    fixture f = open_fixture();
    world w = open_world(&f, 2, false);
    save(&w, 1);
    begin(&w, 2);
    close_world(&w);
    loads_into(f.run, &f, 1);
    w = open_world(&f, 2, false);
    begin(&w, 2);
    for (int64_t i = w.size - 1; i >= 0; i--) mtp__saver_cancel(w.savers[i]);
    assert_int_equal(count_directories(f.run), 1);
    save(&w, 2);
    close_world(&w);
    close_fixture(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_is_the_state_at_its_begin),
        cmocka_unit_test(one_process_writes_the_same_shard_at_once),
        cmocka_unit_test(any_world_writes_and_any_other_loads),
        cmocka_unit_test(rows_in_the_order_of_the_tokens_load),
        cmocka_unit_test(parts_must_be_every_value_once),
        cmocka_unit_test(a_full_disk_costs_one_checkpoint),
        cmocka_unit_test(the_rank_that_failed_is_named),
        cmocka_unit_test(a_shard_that_is_not_there_is_no_checkpoint),
        cmocka_unit_test(a_damaged_shard_is_named),
        cmocka_unit_test(a_saver_may_be_closed_at_any_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
