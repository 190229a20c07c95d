/* What the op tests share: devices of every instruction set, guarded tensors of every dtype and stride, comparison with
 * a double-precision result, the same bits with any number of threads, and gradients by central differences.
 *
 * Everything made here is owned by one registry; ops_release() checks all guards and frees it. */
#ifndef MTP_TESTS_OPS_CHECK_H
#define MTP_TESTS_OPS_CHECK_H

#include "support.h"

#include <math.h>

#include "base/backends.h"
#include "mtp/tensor.h"
#include "ops.h"

static const char *const ops_isas[] = {"plain", "avx2", "avx512"};
enum { OPS_ISAS = 3 };

/* ---- ownership --------------------------------------------------------------------------------------------------- */

typedef struct ops_block {
    unsigned char *memory; /* 64 bytes of 0xa5, the usable part, the same guard again */
    size_t size;
} ops_block;

static struct {
    ops_block blocks[4096];
    int count;
    mtp_device *devices[64];
    int num_devices;
} ops_owned;

enum { OPS_GUARD = 64 };

/* n bytes, 64-byte aligned, each 0xff (NaN, an index out of range), between guards. */
static inline void *ops_bytes(size_t n)
{
    unsigned char *memory = aligned_alloc(64, OPS_GUARD + (n + OPS_GUARD + 63) / 64 * 64);
    if (!memory) fail_msg("out of memory");
    if (ops_owned.count == (int)(sizeof ops_owned.blocks / sizeof *ops_owned.blocks)) fail_msg("too many buffers");
    ops_owned.blocks[ops_owned.count++] = (ops_block){memory, n};
    memset(memory, 0xa5, OPS_GUARD);
    memset(memory + OPS_GUARD, 0xff, n);
    memset(memory + OPS_GUARD + n, 0xa5, OPS_GUARD);
    return memory + OPS_GUARD;
}

/* Check the guards of the buffers made since ops_owned.count was `mark` and free them. */
static inline void ops_release_to(int mark)
{
    for (int i = mark; i < ops_owned.count; i++) {
        const ops_block *block = &ops_owned.blocks[i];
        for (size_t k = 0; k < OPS_GUARD; k++) {
            if (block->memory[k] != 0xa5) fail_msg("written %zu bytes before a buffer", OPS_GUARD - k);
            if (block->memory[OPS_GUARD + block->size + k] != 0xa5) fail_msg("written %zu bytes after a buffer", k);
        }
        free(block->memory);
    }
    ops_owned.count = mark;
}

/* The same for every buffer; devices stay open. */
static inline void ops_release_buffers(void)
{
    ops_release_to(0);
}

/* ---- the backend under test -------------------------------------------------------------------------------------- */

#include "ops_mirror.h"

/* NULL: the cpu backend. */
static inline const char *ops_device_name(void)
{
    const char *name = getenv("MTP_TEST_DEVICE");
    return name && *name && strcmp(name, "cpu") != 0 ? name : NULL;
}

static inline const mtp_backend *ops_backend(void)
{
    return ops_device_name() ? mirror_open(ops_device_name()) : mtp__backend_cpu();
}

/* What an op says about indices in its data: a device that is not the host finds them in a kernel, and says less. */
static inline const char *ops_found(const char *host, const char *device)
{
    return ops_device_name() ? device : host;
}

/* Of a device that is not the host only size and alignment of scratch count: it has its own. */
static inline mtp_scratch ops_scratch(size_t size)
{
    return (mtp_scratch){.data = ops_bytes(ops_device_name() ? 64 : size), .size = size};
}

/* The same, and the devices are closed. */
static inline void ops_release(void)
{
    ops_release_buffers();
    for (int i = 0; i < ops_owned.num_devices; i++) ops_backend()->device_close(ops_owned.devices[i]);
    ops_owned.num_devices = 0;
}

/* A device, or NULL when this machine lacks the instruction set (NULL: the best one). A device that is not the cpu has
 * one, "plain". */
static inline mtp_device *ops_open(const char *isa, int num_threads)
{
    mtp_device *device = NULL;
    const mtp_device_options options = {.num_threads = num_threads, .isa = isa};
    if (ops_device_name() && isa && strcmp(isa, "plain") != 0) return NULL;
    const mtp_status status = ops_backend()->device_open(&options, &device);
    if (status == MTP_E_UNSUPPORTED) return NULL;
    assert_ok(status);
    ops_owned.devices[ops_owned.num_devices++] = device;
    return device;
}

/* A device in bf16 mode, or in fp32 where the backend has no such mode. */
static inline mtp_device *ops_open_bf16(void)
{
    const mtp_device_options options = {.num_threads = 2, .bf16 = true};
    mtp_device *device = NULL;
    assert_ok(ops_backend()->device_open(&options, &device));
    ops_owned.devices[ops_owned.num_devices++] = device;
    return device;
}

/* Run a test body on two threads with each instruction set that this machine has. */
static inline void ops_each_isa(void (*body)(mtp_device *device))
{
    for (int i = 0; i < OPS_ISAS; i++) {
        mtp_device *device = ops_open(ops_isas[i], 2);
        if (device) body(device);
        ops_release();
    }
}

/* ---- 16-bit types, bit by bit ------------------------------------------------------------------------------------ */

/* The nearest value of a format with `mantissa` explicit bits and smallest normal exponent `low`, ties to even; finite
 * values far from overflow only. */
static inline float ops_round(float x, int mantissa, int low)
{
    if (x == 0.0f || !isfinite(x)) return x;
    int exponent;
    (void)frexpf(x, &exponent); /* |x| in [2^(e-1), 2^e) */
    if (exponent < low + 1) exponent = low + 1;
    const double unit = ldexp(1.0, exponent - 1 - mantissa);
    return (float)(nearbyint((double)x / unit) * unit);
}

static inline float ops_rounded(float x, mtp_dtype dtype)
{
    return dtype == MTP_BF16 ? ops_round(x, 7, -126) : dtype == MTP_F16 ? ops_round(x, 10, -14) : x;
}

/* The 16 bits of a value that ops_rounded returned. */
static inline uint16_t ops_bits16(float x, mtp_dtype dtype)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (dtype == MTP_BF16) return (uint16_t)(bits >> 16);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    const float magnitude = fabsf(x);
    if (magnitude < 0x1p-14f) return (uint16_t)(sign | (uint16_t)lrintf(magnitude * 0x1p+24f));
    int exponent;
    const float fraction = frexpf(magnitude, &exponent);
    return (uint16_t)(sign | (uint16_t)((exponent + 14) << 10) | ((uint16_t)lrintf(fraction * 0x1p+11f) & 0x3ffu));
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

/* A matrix in memory of its dtype and row stride, and its values when it was made, contiguous in fp32. */
typedef struct ops_tensor {
    mtp_view view;
    float *values;
} ops_tensor;

static const float ops_gap = -768.0f; /* between the rows of a strided tensor; representable in every dtype */

static inline void ops_put(const mtp_view *view, int64_t element, float value)
{
    if (view->dtype == MTP_F32)
        ((float *)view->data)[element] = value;
    else
        ((uint16_t *)view->data)[element] = ops_bits16(value, view->dtype);
}

/* rows x cols values of test_uniform times `scale`, rounded to the dtype; `gap` extra elements between rows. */
static inline ops_tensor ops_random(test_rng *rng, mtp_dtype dtype, int64_t rows, int64_t cols, int64_t gap,
                                    float scale)
{
    ops_tensor t;
    const int64_t stride = cols + gap, count = rows * stride - gap;
    t.values = ops_bytes((size_t)(rows * cols) * sizeof(float));
    t.view = mtp_view_2d(ops_bytes((size_t)count * mtp_dtype_size(dtype)), dtype, rows, cols);
    t.view.stride[0] = stride;
    for (int64_t i = 0; i < count; i++) {
        const int64_t r = i / stride, c = i % stride;
        if (c < cols) t.values[r * cols + c] = ops_rounded(scale * test_uniform(rng), dtype);
        ops_put(&t.view, i, c < cols ? t.values[r * cols + c] : ops_gap);
    }
    return t;
}

/* A vector is a matrix of one row; its view has one axis. */
static inline ops_tensor ops_random_vector(test_rng *rng, mtp_dtype dtype, int64_t n, float scale)
{
    ops_tensor t = ops_random(rng, dtype, 1, n, 0, scale);
    t.view = mtp_view_1d(t.view.data, dtype, n);
    return t;
}

static inline ops_tensor ops_indices(test_rng *rng, int64_t n, int64_t limit)
{
    ops_tensor t = {.view = mtp_view_1d(ops_bytes((size_t)n * sizeof(int32_t)), MTP_I32, n)};
    for (int64_t i = 0; i < n; i++) ((int32_t *)t.view.data)[i] = (int32_t)test_below(rng, limit);
    return t;
}

static inline int64_t ops_rows(const ops_tensor *t)
{
    return t->view.rank == 1 ? 1 : t->view.shape[0];
}

static inline int64_t ops_width(const ops_tensor *t)
{
    return t->view.shape[t->view.rank - 1];
}

/* Element c of row r, of a tensor that is F32 or BF16. */
static inline float ops_at(const ops_tensor *t, int64_t r, int64_t c)
{
    const int64_t element = (t->view.rank == 1 ? 0 : r * t->view.stride[0]) + c;
    if (t->view.dtype == MTP_F32) return ((const float *)t->view.data)[element];
    const uint32_t bits = (uint32_t)((const uint16_t *)t->view.data)[element] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Address of row r of an F32 tensor. */
static inline float *ops_row(const ops_tensor *t, int64_t r)
{
    return (float *)t->view.data + (t->view.rank == 1 ? 0 : r * t->view.stride[0]);
}

/* An F32 result against the double-precision one: every element within `tolerance` of the largest magnitude, and
 * nothing written between the rows. */
static inline void ops_expect(const char *name, const ops_tensor *got, const double *want, double tolerance)
{
    const int64_t rows = ops_rows(got), width = ops_width(got);
    double largest = 0;
    for (int64_t i = 0; i < rows * width; i++) largest = fabs(want[i]) > largest ? fabs(want[i]) : largest;
    for (int64_t r = 0; r < rows; r++) {
        const float *row = ops_row(got, r);
        for (int64_t c = 0; c < width; c++) {
            const double error = fabs((double)row[c] - want[r * width + c]);
            if (!(error <= tolerance * largest)) /* NaN fails as well */
                fail_msg("%s[%d, %d] is %.9g, want %.9g (error %.3g of the largest)", name, (int)r, (int)c,
                         (double)row[c], want[r * width + c], error / largest);
        }
        if (r + 1 < rows)
            for (int64_t c = width; c < got->view.stride[0]; c++)
                if (row[c] != ops_gap) fail_msg("%s: written %d elements after row %d", name, (int)(c - width), (int)r);
    }
}

/* Largest error against `want` of the op, whose result is F32 or BF16, at most twice that of the plain loop. */
static inline void ops_expect_bf16(const char *name, const ops_tensor *got, const double *want, const double *plain)
{
    const int64_t width = ops_width(got);
    double error = 0, allowed = 0;
    for (int64_t i = 0; i < ops_rows(got) * width; i++) {
        const double e = fabs((double)ops_at(got, i / width, i % width) - want[i]);
        if (!(e <= error)) error = e; /* NaN stays */
        if (fabs(plain[i] - want[i]) > allowed) allowed = fabs(plain[i] - want[i]);
    }
    if (!(error <= 2 * allowed)) fail_msg("%s: error %.3g, of a plain loop in bf16 %.3g", name, error, allowed);
    for (int64_t r = 0; r + 1 < ops_rows(got); r++)
        for (int64_t c = width; c < got->view.stride[0]; c++)
            if (ops_at(got, r, c) != ops_gap) fail_msg("%s: written %d elements after row %d", name, (int)c, (int)r);
}

/* n doubles, zeroed. */
static inline double *ops_doubles(int64_t n)
{
    double *x = ops_bytes((size_t)n * sizeof *x);
    memset(x, 0, (size_t)n * sizeof *x);
    return x;
}

/* A stored result: in F32 as above; in BF16 against the plain loop that computes it exactly and rounds it at the end.
 */
static inline void ops_expect_stored(const char *name, const ops_tensor *got, const double *want, double tolerance)
{
    if (got->view.dtype == MTP_F32) {
        ops_expect(name, got, want, tolerance);
        return;
    }
    const int64_t n = ops_rows(got) * ops_width(got);
    double *plain = ops_doubles(n);
    for (int64_t i = 0; i < n; i++) plain[i] = (double)ops_rounded((float)want[i], MTP_BF16);
    ops_expect_bf16(name, got, want, plain);
}

/* The dtype in which a device stores activations. */
static inline mtp_dtype ops_stored(const mtp_device *device)
{
    return ops_backend()->device_info(device)->stored;
}

/* ---- determinism ------------------------------------------------------------------------------------------------- */

/* A number that changes with any bit of the rows of a tensor (FNV-1a). */
static inline uint64_t ops_hash(const ops_tensor *t, uint64_t hash)
{
    hash = hash ? hash : 1469598103934665603u;
    for (int64_t r = 0; r < ops_rows(t); r++) {
        const size_t size = mtp_dtype_size(t->view.dtype),
                     first = t->view.rank == 1 ? 0 : (size_t)(r * t->view.stride[0]);
        const unsigned char *bytes = (const unsigned char *)t->view.data + first * size;
        for (size_t i = 0; i < (size_t)ops_width(t) * size; i++) hash = (hash ^ bytes[i]) * 1099511628211u;
    }
    return hash;
}

/* `run` makes its inputs from a seed of its own, runs the op and returns a hash of all results: the same for any number
 * of threads, with each instruction set. */
static inline void ops_same_bits(uint64_t (*run)(mtp_device *device))
{
    static const int threads[] = {1, 2, 3, 7};
    for (int i = 0; i < OPS_ISAS; i++) {
        uint64_t first = 0;
        for (size_t k = 0; k < sizeof threads / sizeof *threads; k++) {
            mtp_device *device = ops_open(ops_isas[i], threads[k]);
            if (!device) break;
            const uint64_t hash = run(device);
            if (k == 0) first = hash;
            if (hash != first) fail_msg("%s: other bits with %d threads than with 1", ops_isas[i], threads[k]);
            ops_release();
        }
        ops_release();
    }
}

/* ---- gradients --------------------------------------------------------------------------------------------------- */

/* d loss / d x[i] by central differences: `loss` runs the op forward on what x points into and returns a double. */
static inline void ops_differences(double (*loss)(void *context), void *context, float *x, int64_t n, double *gradient)
{
    const float step = 0x1p-7f;
    for (int64_t i = 0; i < n; i++) {
        const float kept = x[i];
        x[i] = kept + step;
        const double above = loss(context), high = (double)x[i];
        x[i] = kept - step;
        const double below = loss(context), low = (double)x[i];
        x[i] = kept;
        gradient[i] = (above - below) / (high - low);
    }
}

/* sum of a[r, c] * weights[r, c] over an F32 tensor: a scalar loss whose gradient is `weights`. */
static inline double ops_weighted_sum(const ops_tensor *a, const float *weights)
{
    double sum = 0;
    for (int64_t r = 0; r < ops_rows(a); r++)
        for (int64_t c = 0; c < ops_width(a); c++)
            sum += (double)ops_row(a, r)[c] * (double)weights[r * ops_width(a) + c];
    return sum;
}

#endif
