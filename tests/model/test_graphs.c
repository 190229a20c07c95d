/* Protects: sizes that are rounded up change nothing but the order of sums; on a device with graphs (MTP_TEST_DEVICE),
 * a step that is launched as a graph has the bits of one that runs call by call, whatever batches come, waits once a
 * run or not at all, allocates nothing, and keeps a bounded number of graphs. */
#include "fixture.h"

#include "base/context.h"
#include "base/error.h"
#include "model/embedding.h"
#include "model/workspace.h"

enum { K = 3 };

/* ---- a drafter of its own with its step -------------------------------------------------------------------------- */

typedef struct trainee {
    fixture *f;
    mtp_drafter *drafter;
    mtp__step *step;
    float *grads; /* host [num_grads] */
    mtp__step_sums sums[K];
} trainee;

static trainee trainee_open(fixture *f, const mtp_step_config *config, mtp__step_mode mode)
{
    trainee t = {.f = f, .drafter = fixture_drafter(f, NULL)};
    assert_ok(mtp__step_create(t.drafter, f->verifier, config, mode, &t.step));
    t.grads = calloc((size_t)t.drafter->num_grads, sizeof *t.grads);
    assert_non_null(t.grads);
    return t;
}

static void trainee_close(trainee *t)
{
    mtp__step_free(t->step);
    mtp_drafter_free(t->drafter);
    free(t->grads);
}

static const mtp_backend *ops_of(const trainee *t)
{
    return t->drafter->context->ops;
}

static mtp_device *device_of(const trainee *t)
{
    return t->drafter->context->device;
}

static void run(trainee *t, const mtp__rows *rows)
{
    assert_ok(mtp__step_run(t->step, t->f->batch, rows, t->f->counts, t->sums, NULL));
}

static void read_grads(trainee *t)
{
    assert_ok(
        ops_of(t)->download(device_of(t), t->grads, t->drafter->grads, (size_t)t->drafter->num_grads * sizeof(float)));
}

static void same_bits(trainee *a, trainee *b)
{
    assert_memory_equal(a->sums, b->sums, sizeof a->sums);
    read_grads(a);
    read_grads(b);
    assert_memory_equal(a->grads, b->grads, (size_t)a->drafter->num_grads * sizeof(float));
}

/* The first `count` rows of the fixture's, as rows of their own. */
static mtp__rows first_rows(const fixture *f, int64_t count)
{
    const mtp__rows *all = &f->rows;
    mtp__rows some;
    assert_ok(mtp__rows_create(count, K, &some));
    some.num_rows = count;
    const size_t numbers = (size_t)count * sizeof(int32_t);
    memcpy(some.document, all->document, numbers);
    memcpy(some.position, all->position, numbers);
    memcpy(some.place, all->place, numbers);
    memcpy(some.doc_begin, all->doc_begin, numbers);
    for (int64_t k = 0; k < K; k++) {
        memcpy(some.input_token + k * count, all->input_token + k * all->num_rows, numbers);
        memcpy(some.target + k * count, all->target + k * all->num_rows, numbers);
        memcpy(some.valid + k * count, all->valid + k * all->num_rows, (size_t)count);
        memcpy(some.supervised + k * count, all->supervised + k * all->num_rows, (size_t)count);
    }
    return some;
}

static bool on_host(const fixture *f)
{
    return f->context->ops->graph == NULL;
}

static const struct {
    const char *name;
    mtp_head_mode mode;
    mtp_feeding feeding;
    bool bf16;
} cases[] = {{"e2b_masked", MTP_HEAD_MASKED, MTP_FEED_TEACHER, false},
             {"e2b_masked", MTP_HEAD_HIERARCHICAL, MTP_FEED_SELF, false},
             {"m26b_flat", MTP_HEAD_FLAT, MTP_FEED_TEACHER, true}};
enum { CASES = sizeof cases / sizeof *cases };

static void open_case(fixture *f, size_t i)
{
    const mtp_context_options options = {.device = getenv("MTP_TEST_DEVICE"), .num_threads = 2, .bf16 = cases[i].bf16};
    fixture_open(f, cases[i].name, cases[i].mode);
    f->config.feeding = cases[i].feeding;
    mtp_context_free(f->context);
    assert_ok(mtp_context_create(&options, &f->context));
}

/* ---- sizes ------------------------------------------------------------------------------------------------------- */

static void rounded_sizes_change_only_the_order_of_sums(void **state)
{
    (void)state;
    for (size_t i = 0; i < CASES; i++) {
        fixture f;
        open_case(&f, i);
        f.config.rows_per_chunk = 16;
        trainee exact = trainee_open(&f, &f.config, MTP__STEP_TRAIN);
        trainee rounded = trainee_open(&f, &f.config, MTP__STEP_TRAIN);
        exact.step->padded = false;
        rounded.step->padded = true;
        static const int64_t counts[] = {1, 9, 21};
        for (size_t n = 0; n < sizeof counts / sizeof *counts; n++) {
            const int64_t count = counts[n];
            mtp__rows rows = first_rows(&f, count);
            run(&exact, &rows);
            run(&rounded, &rows);
            assert_true(rounded.step->num_rows % 8 == 0 && rounded.step->num_rows >= rounded.step->own_rows);
            assert_true(rounded.step->head_rows % 8 == 0 || rounded.step->head_rows == K * rounded.step->num_rows);
            for (int k = 0; k < K; k++) {
                assert_int_equal(rounded.sums[k].count, exact.sums[k].count);
                assert_int_equal(rounded.sums[k].correct, exact.sums[k].correct);
                assert_int_equal(rounded.sums[k].missed, exact.sums[k].missed);
                assert_near(rounded.sums[k].loss, exact.sums[k].loss, 1e-6 * exact.sums[k].loss);
            }
            mtp__rows_free(&rows);
        }
        read_grads(&exact);
        read_grads(&rounded);
        double largest = 0, error = 0;
        for (int64_t p = 0; p < exact.drafter->num_grads; p++) {
            const double x = (double)exact.grads[p], difference = fabs(x - (double)rounded.grads[p]);
            if (fabs(x) > largest) largest = fabs(x);
            if (!(difference <= error)) error = difference;
        }
        assert_true(largest > 0 && error <= 1e-5 * largest);
        trainee_close(&exact);
        trainee_close(&rounded);
        fixture_close(&f);
    }
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

/* A batch of the case's first samples; closed with mtp_batch_free. */
static mtp_batch *batch_of(const fixture *f, int64_t count)
{
    const int64_t samples[3] = {0, 1, 2};
    mtp_batch *batch;
    assert_ok(mtp_batch_collate(f->dataset, samples, count, true, &batch));
    return batch;
}

/* The next run takes this batch, or its first rows only. */
static mtp__rows take(fixture *f, mtp_batch *batch, int64_t most)
{
    f->batch = batch;
    fixture_rows(f);
    return first_rows(f, most && most < f->rows.num_rows ? most : f->rows.num_rows);
}

static void note(void *user, int64_t final)
{
    *(int64_t *)user = final;
}

/* What is said in the middle of a chunk is said when its calls are made. */
static void watched_runs_are_calls(trainee *graphs, trainee *calls)
{
    int64_t final = 0;
    const mtp__step_watch watch = {.ready = note, .user = &final};
    const int64_t launched = mtp__step_counted(graphs->step).launched;
    mtp__rows rows = first_rows(graphs->f, 7);
    mtp__step_set_watch(graphs->step, &watch);
    run(graphs, &rows);
    run(calls, &rows);
    mtp__step_set_watch(graphs->step, NULL);
    assert_true(final > 0);
    assert_int_equal(mtp__step_counted(graphs->step).launched, launched);
    same_bits(graphs, calls);
    mtp__rows_free(&rows);
}

static void graphs_have_the_bits_of_calls(void **state)
{
    (void)state;
    for (size_t i = 0; i < CASES; i++) {
        fixture f;
        open_case(&f, i);
        mtp_batch *whole = f.batch, *small = batch_of(&f, 1);
        if (on_host(&f)) {
            mtp_batch_free(small);
            fixture_close(&f);
            return;
        }
        const struct {
            mtp_batch *batch;
            int64_t most;
        } runs[] = {{small, 10}, {small, 10}, {small, 10}, {small, 10}, {whole, 14}, {whole, 14}, {whole, 14},
                    {whole, 14}, {whole, 14}, {small, 7},  {small, 7},  {small, 7},  {small, 7}};
        f.config.rows_per_chunk = 24;
        trainee calls = trainee_open(&f, &f.config, MTP__STEP_TRAIN);
        trainee graphs = trainee_open(&f, &f.config, MTP__STEP_TRAIN);
        calls.step->graphs.on = false;
        if (f.config.feeding == MTP_FEED_SELF) { /* without the table on the device each draft asks the host */
            mtp__rows rows = take(&f, small, 5);
            run(&graphs, &rows), run(&graphs, &rows), run(&calls, &rows), run(&calls, &rows);
            assert_int_equal(mtp__step_counted(graphs.step).captured, 0);
            same_bits(&graphs, &calls);
            mtp__rows_free(&rows);
            mtp__step_free(graphs.step);
            assert_ok(mtp__embedding_hold(graphs.drafter, f.verifier));
            assert_ok(mtp__step_create(graphs.drafter, f.verifier, &f.config, MTP__STEP_TRAIN, &graphs.step));
        }
        for (size_t n = 0; n < sizeof runs / sizeof *runs; n++) {
            mtp__rows rows = take(&f, runs[n].batch, runs[n].most);
            run(&calls, &rows);
            const mtp_device_counts before = ops_of(&graphs)->device_counts(device_of(&graphs));
            run(&graphs, &rows);
            const mtp_device_counts after = ops_of(&graphs)->device_counts(device_of(&graphs));
            if (n > 5) assert_int_equal(after.allocations, before.allocations);
            if (n > 5) assert_int_equal(after.waits, before.waits + 1);
            same_bits(&graphs, &calls);
            mtp__rows_free(&rows);
        }
        watched_runs_are_calls(&graphs, &calls);
        const mtp__step_counts counted = mtp__step_counted(graphs.step), plain = mtp__step_counted(calls.step);
        assert_int_equal(plain.captured + plain.launched + counted.refused, 0);
        /* the watched run is none of these */
        if (f.config.feeding == MTP_FEED_TEACHER) assert_int_equal(counted.called + counted.launched + 1, plain.called);
        assert_true(counted.captured >= 3 && counted.launched >= 5);
        assert_true(counted.nodes > 60);
        if (f.config.feeding == MTP_FEED_SELF) mtp__embedding_drop(graphs.drafter);
        trainee_close(&calls);
        trainee_close(&graphs);
        f.batch = whole;
        mtp_batch_free(small);
        fixture_close(&f);
    }
}

/* Ten updates by plain gradient descent: the same losses, which fall. */
static void ten_updates(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, "m26b_flat", MTP_HEAD_FLAT);
    if (on_host(&f)) {
        fixture_close(&f);
        return;
    }
    trainee both[2] = {trainee_open(&f, &f.config, MTP__STEP_TRAIN), trainee_open(&f, &f.config, MTP__STEP_TRAIN)};
    both[0].step->graphs.on = false;
    double first = 0, last = 0;
    mtp__rows rows = first_rows(&f, 8);
    for (int update = 0; update < 10; update++) {
        for (int i = 0; i < 2; i++) {
            trainee *t = &both[i];
            const size_t bytes = (size_t)t->drafter->num_grads * sizeof(float);
            assert_ok(ops_of(t)->memory_zero(device_of(t), t->drafter->grads, bytes));
            run(t, &rows);
            for (int64_t p = 0; p < t->drafter->num_params; p++) {
                const mtp__param *param = &t->drafter->params[p];
                const mtp_axpy_args descend = {.x = mtp_view_1d(param->grad, MTP_F32, param->count),
                                               .y = mtp_view_1d(param->value, MTP_F32, param->count),
                                               .alpha = -1e-2f,
                                               .write = MTP_ACCUMULATE};
                if (param->grad) assert_ok(ops_of(t)->axpy(device_of(t), &descend));
            }
        }
        same_bits(&both[0], &both[1]);
        last = mtp__step_total(&f.config, both[1].sums, f.counts);
        if (update == 0) first = last;
    }
    assert_true(last < first);
    assert_int_equal(mtp__step_counted(both[1].step).launched, 8); /* each set of memory is captured for itself */
    mtp__rows_free(&rows);
    trainee_close(&both[0]);
    trainee_close(&both[1]);
    fixture_close(&f);
}

/* Without sums nothing waits, and they add up on the device. */
static void runs_that_nobody_waits_for(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, "m26b_flat", MTP_HEAD_FLAT);
    mtp_batch *again = batch_of(&f, 3);
    trainee one = trainee_open(&f, &f.config, MTP__STEP_TRAIN);
    const mtp_backend *ops = ops_of(&one);
    mtp_device *device = device_of(&one);
    double numbers[K * MTP_TALLY_COLUMNS];
    mtp__step_sums twice[K];
    run(&one, &f.rows);
    run(&one, &f.rows);
    assert_ok(mtp__step_begin_update(one.step));
    const mtp_device_counts before = ops->device_counts(device);
    assert_ok(mtp__step_run(one.step, f.batch, &f.rows, f.counts, NULL, NULL));
    assert_ok(mtp__step_run(one.step, again, &f.rows, f.counts, NULL, NULL));
    const mtp_device_counts after = ops->device_counts(device);
    assert_int_equal(after.waits, before.waits);
    assert_int_equal(after.allocations, before.allocations);
    const mtp_view sums = mtp__step_device_sums(one.step);
    assert_int_equal(mtp_view_count(sums), K * MTP_TALLY_COLUMNS);
    assert_ok(ops->download(device, numbers, sums.data, sizeof numbers));
    mtp__step_sums_of(numbers, K, twice);
    for (int k = 0; k < K; k++) {
        assert_int_equal(twice[k].count, 2 * one.sums[k].count);
        assert_int_equal(twice[k].correct, 2 * one.sums[k].correct);
        assert_near(twice[k].loss, 2 * one.sums[k].loss, 1e-12 * twice[k].loss);
    }
    trainee_close(&one);
    mtp_batch_free(again);
    fixture_close(&f);
}

static void the_environment_switches_graphs_off(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, "m26b_flat", MTP_HEAD_FLAT);
    assert_int_equal(setenv("MTP_CUDA_GRAPHS", "0", 1), 0);
    trainee off = trainee_open(&f, &f.config, MTP__STEP_EVALUATE);
    assert_int_equal(unsetenv("MTP_CUDA_GRAPHS"), 0);
    for (int i = 0; i < 3; i++) run(&off, &f.rows);
    assert_int_equal(mtp__step_counted(off.step).called, 3);
    assert_int_equal(mtp__step_counted(off.step).launched, 0);
    trainee_close(&off);
    fixture_close(&f);
}

/* ---- which graphs are kept --------------------------------------------------------------------------------------- */

typedef struct fill {
    const mtp_context *context;
    void *memory;
    bool waits;
} fill;

static mtp_status fill_once(void *user)
{
    const fill *f = user;
    char byte;
    MTP_TRY(f->context->ops->memory_zero(f->context->device, f->memory, 64));
    return f->waits ? f->context->ops->download(f->context->device, &byte, f->memory, 1) : MTP_OK;
}

typedef struct heard {
    int warnings;
    char last[1024];
} heard;

static void hear(void *user, mtp_log_level level, const char *line)
{
    heard *h = user;
    h->warnings += level == MTP_LOG_WARNING;
    strncpy(h->last, line, sizeof h->last - 1);
}

static void the_oldest_graph_goes(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, "m26b_flat", MTP_HEAD_FLAT);
    heard log = {0};
    const mtp_logger logger = {.write = hear, .user = &log};
    const mtp_context context = {.ops = f.context->ops, .device = f.context->device, .logger = &logger};
    fill work = {.context = &context};
    mtp__graphs graphs;
    mtp__graphs_create(&context, &graphs);
    assert_ok(f.context->ops->memory_alloc(f.context->device, 64, &work.memory));
    for (int64_t round = 0; round < 3 && graphs.on; round++)
        for (int64_t key = 0; key < MTP__GRAPHS_KEPT; key++)
            assert_ok(mtp__graphs_run(&graphs, &(mtp__graph_key){{key}}, fill_once, &work));
    if (graphs.on) {
        assert_int_equal(graphs.captured, MTP__GRAPHS_KEPT);
        assert_int_equal(graphs.launched, 2 * MTP__GRAPHS_KEPT);
        assert_int_equal(graphs.nodes, 1);
        assert_ok(mtp__graphs_run(&graphs, &(mtp__graph_key){{0}}, fill_once, &work));
        assert_ok(mtp__graphs_run(&graphs, &(mtp__graph_key){{1000}}, fill_once, &work)); /* in the place of 1 */
        assert_int_equal(graphs.called, MTP__GRAPHS_KEPT + 1);
        assert_ok(mtp__graphs_run(&graphs, &(mtp__graph_key){{0}}, fill_once, &work));
        assert_int_equal(graphs.called, MTP__GRAPHS_KEPT + 1);
        assert_ok(mtp__graphs_run(&graphs, &(mtp__graph_key){{1}}, fill_once, &work));
        assert_int_equal(graphs.called, MTP__GRAPHS_KEPT + 2);
        work.waits = true; /* cannot be captured: call by call, and is not tried again */
        for (int i = 0; i < 4; i++) assert_ok(mtp__graphs_run(&graphs, &(mtp__graph_key){{7, 7}}, fill_once, &work));
        assert_int_equal(graphs.refused, 1);
        assert_int_equal(graphs.called, MTP__GRAPHS_KEPT + 6);
        for (int i = 0; i < 2; i++) assert_ok(mtp__graphs_run(&graphs, &(mtp__graph_key){{7, 8}}, fill_once, &work));
        assert_int_equal(graphs.refused, 2);
        assert_int_equal(log.warnings, 1); /* with the reason */
        assert_non_null(strstr(log.last, "runs call by call"));
        assert_non_null(strstr(log.last, "captur"));
    }
    mtp__graphs_clear(&graphs);
    mtp__graphs_clear(&graphs);
    f.context->ops->memory_free(f.context->device, work.memory);
    fixture_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rounded_sizes_change_only_the_order_of_sums),
        cmocka_unit_test(graphs_have_the_bits_of_calls),
        cmocka_unit_test(ten_updates),
        cmocka_unit_test(runs_that_nobody_waits_for),
        cmocka_unit_test(the_environment_switches_graphs_off),
        cmocka_unit_test(the_oldest_graph_goes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
