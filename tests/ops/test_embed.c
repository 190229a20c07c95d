/* Protects: the scaled embedding rounds as engines do, and gather, scatter, convert and axpy move exactly what they are
 * told to, for every dtype and stride; indices outside are refused. */
#include "ops_check.h"

static void embeddings(mtp_device *device)
{
    static const mtp_dtype dtypes[] = {MTP_F32, MTP_BF16, MTP_F16};
    enum { vocabulary = 50, rows = 23 };
    static const int64_t widths[] = {1, 37, 1536};
    for (int d = 0; d < 3; d++)
        for (int k = 0; k < 3; k++) {
            test_rng rng = {71};
            const int64_t width = widths[k];
            const ops_tensor table = ops_random(&rng, dtypes[d], vocabulary, width, k, 1.0f);
            const ops_tensor ids = ops_indices(&rng, rows, vocabulary);
            const ops_tensor y = ops_random(&rng, MTP_F32, rows, width, 3, 1.0f);
            const mtp_embed_args a = {.table = table.view, .ids = ids.view, .y = y.view};
            assert_ok(ops_backend()->embed_fwd(device, &a));
            const float factor = ops_rounded((float)sqrt((double)width), dtypes[d]);
            if (width == 1536 && dtypes[d] == MTP_BF16) assert_true(factor == 39.25f); /* a published value */
            for (int r = 0; r < rows; r++)
                for (int64_t i = 0; i < width; i++) {
                    const float entry = table.values[((const int32_t *)ids.view.data)[r] * width + i];
                    assert_true(ops_row(&y, r)[i] == ops_rounded(factor * entry, dtypes[d]));
                }
            ops_release_buffers();
        }
}

static void embeddings_on_every_isa(void **state)
{
    (void)state;
    ops_each_isa(embeddings);
}

/* Into the dtype in which the device stores: the fp32 value, which a table in bf16 has already, rounded once more. */
static void rows_of_stored_views(void **state)
{
    (void)state;
    static const mtp_dtype dtypes[] = {MTP_F32, MTP_BF16, MTP_F16};
    enum { vocabulary = 20, rows = 9 };
    static const int64_t widths[] = {5, 264};
    mtp_device *device = ops_open_bf16();
    const mtp_dtype stored = ops_stored(device);
    for (int d = 0; d < 3; d++)
        for (int k = 0; k < 2; k++) {
            test_rng rng = {76};
            const int64_t width = widths[k];
            const ops_tensor table = ops_random(&rng, dtypes[d], vocabulary, width, 8 * k, 1.0f);
            const ops_tensor ids = ops_indices(&rng, rows, vocabulary);
            const ops_tensor y = ops_random(&rng, stored, rows, width, 0, 1.0f);
            const ops_tensor dst = ops_random(&rng, stored, rows, width, 1, 1.0f);
            int32_t *id = ids.view.data;
            const mtp_embed_args embed = {.table = table.view, .ids = ids.view, .y = y.view};
            assert_ok(ops_backend()->embed_fwd(device, &embed));
            const float factor = ops_rounded((float)sqrt((double)width), dtypes[d]);
            for (int r = 0; r < rows; r++)
                for (int64_t i = 0; i < width; i++) {
                    const float scaled = ops_rounded(factor * table.values[id[r] * width + i], dtypes[d]);
                    assert_true(ops_at(&y, r, i) == ops_rounded(scaled, stored));
                }
            id[3] = MTP_NO_ROW;
            const mtp_gather_args gather = {.src = table.view, .index = ids.view, .dst = dst.view};
            assert_ok(ops_backend()->gather_rows(device, &gather));
            for (int r = 0; r < rows; r++)
                for (int64_t i = 0; i < width; i++)
                    assert_true(ops_at(&dst, r, i) ==
                                (r == 3 ? 0.0f : ops_rounded(table.values[id[r] * width + i], stored)));
        }
    ops_release();
}

static void ids_outside_are_refused(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    test_rng rng = {72};
    const ops_tensor table = ops_random(&rng, MTP_BF16, 10, 4, 0, 1.0f), y = ops_random(&rng, MTP_F32, 3, 4, 0, 1.0f);
    const ops_tensor ids = ops_indices(&rng, 3, 10);
    mtp_embed_args a = {.table = table.view, .ids = ids.view, .y = y.view};
    ((int32_t *)ids.view.data)[2] = 10;
    assert_fails(ops_backend()->embed_fwd(device, &a), MTP_E_ARGUMENT, "ids[2] is 10, outside [0, 10)");
    ((int32_t *)ids.view.data)[2] = -1;
    assert_fails(ops_backend()->embed_fwd(device, &a), MTP_E_ARGUMENT, "ids[2] is -1");
    ((int32_t *)ids.view.data)[2] = MTP_NO_ROW - 1;
    const mtp_gather_args gather = {.src = table.view, .index = ids.view, .dst = y.view};
    assert_fails(ops_backend()->gather_rows(device, &gather), MTP_E_ARGUMENT, "gather_rows: index[2] is -2");
    const mtp_gather_args scatter = {.src = y.view, .index = ids.view, .dst = y.view};
    assert_fails(ops_backend()->scatter_rows(device, &scatter), MTP_E_ARGUMENT, "scatter_rows: index[");
    a.ids.dtype = MTP_I64;
    assert_fails(ops_backend()->embed_fwd(device, &a), MTP_E_ARGUMENT, "embed_fwd: ids is I64");
    ops_release();
}

static void rows_move(mtp_device *device)
{
    static const mtp_dtype dtypes[] = {MTP_F32, MTP_BF16, MTP_F16};
    enum { count = 40, rows = 9, width = 21 };
    for (int d = 0; d < 3; d++)
        for (int write = MTP_OVERWRITE; write <= MTP_ACCUMULATE; write++) {
            test_rng rng = {73};
            const ops_tensor src = ops_random(&rng, dtypes[d], count, width, 2, 1.0f);
            const ops_tensor dst = ops_random(&rng, MTP_F32, rows, width, 5, 1.0f);
            const ops_tensor back = ops_random(&rng, MTP_F32, count, width, 1, 1.0f);
            const ops_tensor index = ops_indices(&rng, rows, 4);
            int32_t *ids = index.view.data;
            for (int r = 0; r < rows; r++) ids[r] += 4 * r; /* distinct */
            ids[3] = ids[rows - 1] = MTP_NO_ROW;
            const bool adds = write == MTP_ACCUMULATE;
            const mtp_gather_args gather = {
                .src = src.view, .index = index.view, .dst = dst.view, .write = (mtp_write)write};
            const mtp_gather_args scatter = {
                .src = dst.view, .index = index.view, .dst = back.view, .write = (mtp_write)write};
            assert_ok(ops_backend()->gather_rows(device, &gather));
            assert_ok(ops_backend()->scatter_rows(device, &scatter));
            double *gathered = ops_doubles(rows * width), *scattered = ops_doubles(count * width);
            for (int i = 0; i < count * width; i++) scattered[i] = (double)back.values[i];
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < width; i++) {
                    const float value = ids[r] == MTP_NO_ROW ? 0 : src.values[ids[r] * width + i];
                    const float before = dst.values[r * width + i], moved = adds ? before + value : value;
                    gathered[r * width + i] = (double)moved;
                    if (ids[r] == MTP_NO_ROW) continue;
                    const float old = back.values[ids[r] * width + i];
                    scattered[ids[r] * width + i] = (double)(adds ? old + moved : moved);
                }
            ops_expect("gathered", &dst, gathered, 0);
            ops_expect("scattered", &back, scattered, 0);
            ops_release_buffers();
        }
}

static void rows_move_on_every_isa(void **state)
{
    (void)state;
    ops_each_isa(rows_move);
}

static void conversions(mtp_device *device)
{
    static const mtp_dtype dtypes[] = {MTP_F32, MTP_BF16, MTP_F16};
    static const int64_t shapes[][2] = {{1, 1}, {7, 33}, {3, 40000}};
    for (int from = 0; from < 3; from++)
        for (int to = 0; to < 3; to++)
            for (int k = 0; k < 3; k++) {
                test_rng rng = {74};
                const int64_t rows = shapes[k][0], width = shapes[k][1];
                const ops_tensor src = ops_random(&rng, dtypes[from], rows, width, 3, 1.0f);
                const ops_tensor dst = ops_random(&rng, dtypes[to], rows, width, 2, 1.0f);
                const mtp_convert_args a = {.src = src.view, .dst = dst.view};
                assert_ok(ops_backend()->convert(device, &a));
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t i = 0; i < width; i++) {
                        const float want = ops_rounded(src.values[r * width + i], dtypes[to]);
                        const int64_t at = r * dst.view.stride[0] + i;
                        if (dtypes[to] == MTP_F32)
                            assert_true(((const float *)dst.view.data)[at] == want);
                        else
                            assert_int_equal(((const uint16_t *)dst.view.data)[at], ops_bits16(want, dtypes[to]));
                    }
                ops_release_buffers();
            }
}

static void conversions_on_every_isa(void **state)
{
    (void)state;
    ops_each_isa(conversions);
}

static void sums(mtp_device *device)
{
    for (int write = MTP_OVERWRITE; write <= MTP_ACCUMULATE; write++) {
        test_rng rng = {75};
        const ops_tensor x = ops_random(&rng, MTP_F32, 5, 20001, 3, 1.0f),
                         y = ops_random(&rng, MTP_F32, 5, 20001, 1, 1.0f);
        const mtp_axpy_args a = {.x = x.view, .y = y.view, .alpha = 0.25f, .write = (mtp_write)write};
        double *want = ops_doubles(5 * 20001);
        for (int64_t i = 0; i < 5 * 20001; i++)
            want[i] = 0.25 * (double)x.values[i] + (write == MTP_ACCUMULATE ? (double)y.values[i] : 0.0);
        assert_ok(ops_backend()->axpy(device, &a));
        ops_expect("y", &y, want, 1e-7);
        ops_release_buffers();
    }
}

static void sums_on_every_isa(void **state)
{
    (void)state;
    ops_each_isa(sums);
}

/* The three axes of a packed batch, the middle one strided as a column block is. */
static void more_than_two_axes(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 2);
    enum { a = 3, b = 4, c = 5 };
    float x[a][b + 1][c], y[a][b][c];
    for (int i = 0; i < a * (b + 1) * c; i++) (&x[0][0][0])[i] = (float)i;
    mtp_view from = mtp_view_3d(x, MTP_F32, a, b, c);
    from.stride[0] = (b + 1) * c;
    const mtp_convert_args args = {.src = from, .dst = mtp_view_3d(y, MTP_F32, a, b, c)};
    assert_ok(ops_backend()->convert(device, &args));
    for (int i = 0; i < a; i++)
        for (int k = 0; k < b; k++) assert_memory_equal(y[i][k], x[i][k], sizeof y[i][k]);
    mtp_convert_args bad = args;
    bad.dst.shape[1] = 3;
    assert_fails(ops_backend()->convert(device, &bad), MTP_E_ARGUMENT, "convert: dst");
    bad = args;
    bad.src.dtype = MTP_I32;
    assert_fails(ops_backend()->convert(device, &bad), MTP_E_ARGUMENT, "convert: src is I32");
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embeddings_on_every_isa),  cmocka_unit_test(rows_of_stored_views),
        cmocka_unit_test(ids_outside_are_refused),  cmocka_unit_test(rows_move_on_every_isa),
        cmocka_unit_test(conversions_on_every_isa), cmocka_unit_test(sums_on_every_isa),
        cmocka_unit_test(more_than_two_axes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
