/* Protects: what goes into a device's queue beside ops: copies that do not wait, marks, graphs; what they refuse, and
 * that indices out of range are said at a mark. */
#include "ops_check.h"

enum { N = 300 };

/* The backend itself: here arguments are device memory. */
static const mtp_backend *backend(void)
{
    return ops_backend() == &mirror_of.table ? mirror_of.real : ops_backend();
}

static float *device_floats(mtp_device *device, int64_t n)
{
    void *memory = NULL;
    assert_ok(backend()->memory_alloc(device, (size_t)n * sizeof(float), &memory));
    return memory;
}

static float *pinned(mtp_device *device, float first)
{
    void *memory = NULL;
    assert_ok(backend()->host_alloc(device, N * sizeof(float), &memory));
    for (int i = 0; i < N; i++) ((float *)memory)[i] = first + (float)i;
    return memory;
}

static void twice(mtp_device *device, float *x)
{
    const mtp_view view = mtp_view_1d(x, MTP_F32, N);
    const mtp_axpy_args a = {.x = view, .y = view, .alpha = 1.0f, .write = MTP_ACCUMULATE};
    assert_ok(backend()->axpy(device, &a));
}

static void copies_keep_the_order(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    float *memory = device_floats(device, N), *in = pinned(device, 1), *out = pinned(device, 0);
    mtp_mark *mark = NULL;
    assert_ok(backend()->upload_async(device, memory, in, N * sizeof(float)));
    twice(device, memory);
    assert_ok(backend()->download_async(device, out, memory, N * sizeof(float)));
    const mtp_device_counts before = backend()->device_counts(device);
    assert_ok(backend()->mark(device, &mark));
    assert_int_equal(backend()->device_counts(device).waits, before.waits);
    if (ops_device_name()) assert_true(out[0] != out[0] || out[0] == 2); /* not there yet, or already */
    assert_ok(backend()->mark_wait(device, mark));
    for (int i = 0; i < N; i++) assert_true(out[i] == 2 * in[i]);
    const int64_t waits = backend()->device_counts(device).waits;
    assert_ok(backend()->mark_wait(device, mark)); /* it is passed */
    assert_int_equal(backend()->device_counts(device).waits, waits);
    mtp_mark *same = mark;
    twice(device, memory);
    assert_ok(backend()->download_async(device, out, memory, N * sizeof(float)));
    assert_ok(backend()->mark(device, &mark)); /* moved */
    assert_ptr_equal(mark, same);
    assert_ok(backend()->mark_wait(device, mark));
    assert_true(out[7] == 4 * in[7]);

    float local[N]; /* other host memory: read at once, never written late */
    for (int i = 0; i < N; i++) local[i] = 5;
    assert_ok(backend()->upload_async(device, memory, local, sizeof local));
    for (int i = 0; i < N; i++) local[i] = 6;
    assert_ok(backend()->download(device, out, memory, N * sizeof(float)));
    assert_true(out[N - 1] == 5);
    if (ops_device_name())
        assert_fails(backend()->download_async(device, local, memory, sizeof local), MTP_E_ARGUMENT,
                     "not memory of host_alloc");
    assert_fails(backend()->upload_async(device, NULL, local, 4), MTP_E_ARGUMENT, "");
    backend()->mark_free(device, mark);
    backend()->mark_free(device, NULL);
    backend()->host_free(device, in);
    backend()->host_free(device, out);
    backend()->memory_free(device, memory);
    ops_release();
}

/* The copy does not overtake the ops that its memory is used by, nor do those behind the join overtake the copy. */
static void uploads_beside_the_ops(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    float *memory = device_floats(device, N), *other = device_floats(device, N), *first = pinned(device, 1),
          *second = pinned(device, 1000), *out = pinned(device, 0);
    mtp_mark *used = NULL;
    assert_ok(backend()->upload(device, memory, first, N * sizeof(float)));
    assert_ok(backend()->memory_zero(device, other, N * sizeof(float)));
    for (int round = 0; round < 3; round++) {
        const mtp_axpy_args add = {.x = mtp_view_1d(memory, MTP_F32, N),
                                   .y = mtp_view_1d(other, MTP_F32, N),
                                   .alpha = 1.0f,
                                   .write = MTP_ACCUMULATE};
        assert_ok(backend()->axpy(device, &add));
        assert_ok(backend()->mark(device, &used));
        const int64_t waits = backend()->device_counts(device).waits;
        assert_ok(backend()->upload_beside(device, memory, round == 1 ? first : second, N * sizeof(float), used));
        assert_ok(backend()->uploads_join(device));
        assert_int_equal(backend()->device_counts(device).waits, waits);
    }
    twice(device, memory);
    assert_ok(backend()->download(device, out, other, N * sizeof(float)));
    for (int i = 0; i < N; i++) assert_true(out[i] == 2 * first[i] + second[i]);
    assert_ok(backend()->download(device, out, memory, N * sizeof(float)));
    for (int i = 0; i < N; i++) assert_true(out[i] == 2 * second[i]);
    assert_fails(backend()->upload_beside(device, NULL, first, 4, NULL), MTP_E_ARGUMENT, "");
    backend()->mark_free(device, used);
    float *const all[] = {first, second, out};
    for (int i = 0; i < 3; i++) backend()->host_free(device, all[i]);
    backend()->memory_free(device, memory);
    backend()->memory_free(device, other);
    ops_release();
}

static void memory_is_counted(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    uint64_t left = 0, total = 0, after = 0;
    assert_ok(backend()->memory_info(device, &left, &total));
    assert_true(left > 0 && left <= total);
    if (ops_device_name()) {
        float *memory = device_floats(device, 1 << 20);
        assert_ok(backend()->memory_info(device, &after, &total));
        assert_true(after + (4 << 20) <= left);
        assert_true(backend()->device_counts(device).allocations >= 1);
        backend()->memory_free(device, memory);
    }
    ops_release();
}

static void bad_indices_are_said_at_a_mark(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    if (!ops_device_name()) { /* the op says it */
        ops_release();
        return;
    }
    float *table = device_floats(device, N), *y = device_floats(device, N), *ids = device_floats(device, 2);
    const int32_t numbers[2] = {1, 9};
    mtp_mark *mark = NULL;
    assert_ok(backend()->memory_zero(device, table, N * sizeof(float)));
    assert_ok(backend()->upload(device, ids, numbers, sizeof numbers));
    const mtp_embed_args embed = {.table = mtp_view_2d(table, MTP_F32, 5, 4),
                                  .ids = mtp_view_1d(ids, MTP_I32, 2),
                                  .y = mtp_view_2d(y, MTP_F32, 2, 4)};
    assert_ok(backend()->embed_fwd(device, &embed));
    assert_ok(backend()->mark(device, &mark));
    assert_fails(backend()->mark_wait(device, mark), MTP_E_ARGUMENT, "embed_fwd: ids[1] is 9, outside [0, 5)");
    assert_ok(backend()->mark(device, &mark));
    assert_ok(backend()->mark_wait(device, mark));
    backend()->mark_free(device, mark);
    backend()->memory_free(device, table);
    backend()->memory_free(device, y);
    backend()->memory_free(device, ids);
    ops_release();
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

static void a_launch_reads_what_is_there_then(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    const mtp_graph_ops *graphs = backend()->graph;
    if (!graphs) {
        assert_null(ops_device_name());
        ops_release();
        return;
    }
    float *memory = device_floats(device, N), *more = device_floats(device, N), *in = pinned(device, 1),
          *out = pinned(device, 0);
    mtp_graph *graph = NULL;
    mtp_mark *mark = NULL;
    assert_ok(backend()->memory_zero(device, memory, N * sizeof(float)));
    assert_ok(graphs->capture_begin(device));
    assert_ok(backend()->memory_zero(device, more, N * sizeof(float)));
    assert_ok(backend()->upload_async(device, memory, in, N * sizeof(float)));
    twice(device, memory);
    assert_ok(backend()->download_async(device, out, memory, N * sizeof(float)));
    assert_ok(graphs->capture_end(device, &graph));
    assert_int_equal(graphs->num_nodes(graph), 4);
    float got[N];
    assert_ok(backend()->download(device, got, memory, sizeof got));
    assert_true(got[5] == 0); /* nothing has run */
    for (int launch = 0; launch < 3; launch++) {
        for (int i = 0; i < N; i++) in[i] = (float)(launch + i);
        const mtp_device_counts before = backend()->device_counts(device);
        assert_ok(graphs->launch(device, graph));
        assert_ok(backend()->mark(device, &mark));
        assert_int_equal(backend()->device_counts(device).waits, before.waits);
        assert_int_equal(backend()->device_counts(device).launches, before.launches + 1);
        assert_ok(backend()->mark_wait(device, mark));
        for (int i = 0; i < N; i++) assert_true(out[i] == 2 * (float)(launch + i));
    }
    assert_ok(graphs->launch(device, graph)); /* freed while it may be at work */
    graphs->free(device, graph);
    graphs->free(device, NULL);
    backend()->mark_free(device, mark);
    backend()->host_free(device, in);
    backend()->host_free(device, out);
    backend()->memory_free(device, memory);
    backend()->memory_free(device, more);
    ops_release();
}

static mtp_status product(mtp_device *device, float *memory, float *scratch, int64_t rows)
{
    const mtp_linear_args a = {.x = mtp_view_2d(memory, MTP_F32, rows, 8),
                               .w = mtp_view_2d(memory + 8 * rows, MTP_F32, 4, 8),
                               .y = mtp_view_2d(memory + 8 * rows + 32, MTP_F32, rows, 4),
                               .scratch = {scratch, (size_t)64 << 20}};
    return backend()->linear_fwd(device, &a);
}

/* What waits, allocates or asks for an algorithm: refused, and the device goes on afterwards. */
static void what_spoils_a_capture(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    const mtp_graph_ops *graphs = backend()->graph;
    if (!graphs) {
        ops_release();
        return;
    }
    float *memory = device_floats(device, N), *scratch = device_floats(device, 16 << 20), local[N] = {0}, *in;
    in = pinned(device, 0);
    void *other = NULL;
    mtp_graph *graph = NULL;
    mtp_mark *mark = NULL;
    assert_ok(backend()->memory_zero(device, memory, N * sizeof(float)));
    assert_ok(product(device, memory, scratch, 8));
    for (int spoil = 0; spoil < 6; spoil++) {
        assert_ok(graphs->capture_begin(device));
        mtp_status status = MTP_OK;
        if (spoil == 0) status = backend()->memory_alloc(device, 64, &other);
        if (spoil == 1) status = backend()->host_alloc(device, 64, &other);
        if (spoil == 2) status = backend()->upload(device, memory, in, 64);
        if (spoil == 3) status = backend()->download(device, local, memory, 64);
        if (spoil == 4) status = backend()->upload_async(device, memory, local, 64);
        if (spoil == 5) status = product(device, memory, scratch, 9);
        if (status == MTP_OK) fail_msg("call %d was captured", spoil);
        status = graphs->capture_end(device, &graph);
        if (spoil < 4) {
            assert_int_equal(status, MTP_E_BACKEND);
            assert_null(graph);
        } else { /* refused before CUDA heard of it */
            assert_int_equal(status, MTP_OK);
            graphs->free(device, graph);
        }
        assert_ok(backend()->mark(device, &mark));
        assert_ok(backend()->mark_wait(device, mark));
    }
    assert_ok(graphs->capture_begin(device)); /* a product that has run before is captured */
    assert_ok(product(device, memory, scratch, 8));
    assert_ok(graphs->capture_end(device, &graph));
    assert_ok(graphs->launch(device, graph));
    assert_ok(backend()->download(device, local, memory, 64));
    graphs->free(device, graph);
    backend()->mark_free(device, mark);
    backend()->host_free(device, in);
    backend()->memory_free(device, memory);
    backend()->memory_free(device, scratch);
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copies_keep_the_order),
        cmocka_unit_test(uploads_beside_the_ops),
        cmocka_unit_test(memory_is_counted),
        cmocka_unit_test(bad_indices_are_said_at_a_mark),
        cmocka_unit_test(a_launch_reads_what_is_there_then),
        cmocka_unit_test(what_spoils_a_capture),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
