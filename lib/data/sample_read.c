/* The values of a sample: copied or converted token by token, and checked while they are at hand. */
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/real.h"
#include "data/sample.h"

/* ---- integers ------------------------------------------------------------------------------------------------- */

/* Element `index` of an integer tensor, aligned or not. */
static int64_t integer_at(const mtp_safetensors_entry *entry, int64_t index)
{
    const size_t size = mtp_dtype_size(entry->dtype);
    const char *at = (const char *)entry->data + (size_t)index * size;
    int64_t wide;
    int32_t narrow;
    if (size == sizeof wide) {
        memcpy(&wide, at, sizeof wide);
        return wide;
    }
    if (size == sizeof narrow) {
        memcpy(&narrow, at, sizeof narrow);
        return narrow;
    }
    return *(const uint8_t *)at;
}

uint64_t mtp__sample_hash(const mtp__sample *sample)
{
    uint64_t hash = MTP__FNV_START;
    for (int64_t i = 0; i < sample->num_tokens; i++) {
        const int32_t id = (int32_t)(uint32_t)(uint64_t)integer_at(sample->token_ids, i);
        hash = mtp__fnv1a(hash, &id, sizeof id);
    }
    return hash;
}

mtp_status mtp__sample_read_ids(const mtp__sample *sample, int64_t vocab_size, int64_t count, int32_t *ids)
{
    return mtp__sample_read_ids_from(sample, vocab_size, 0, count, ids);
}

mtp_status mtp__sample_read_ids_from(const mtp__sample *sample, int64_t vocab_size, int64_t begin, int64_t end,
                                     int32_t *ids)
{
    for (int64_t i = begin; i < end; i++) {
        const int64_t id = integer_at(sample->token_ids, i);
        if (id < 0 || id >= vocab_size)
            return MTP_FAIL(MTP_E_DATA, "token_ids[%lld] is %lld, outside the vocabulary of %lld", (long long)i,
                            (long long)id, (long long)vocab_size);
        ids[i - begin] = (int32_t)id;
    }
    return MTP_OK;
}

mtp_status mtp__sample_read_mask(const mtp__sample *sample, int64_t count, uint8_t *mask)
{
    return mtp__sample_read_mask_from(sample, 0, count, mask);
}

mtp_status mtp__sample_read_mask_from(const mtp__sample *sample, int64_t begin, int64_t end, uint8_t *mask)
{
    for (int64_t i = begin; i < end; i++) {
        const int64_t value = integer_at(sample->loss_mask, i);
        if (value != 0 && value != 1)
            return MTP_FAIL(MTP_E_DATA, "loss_mask[%lld] is %lld; only 0 and 1 mean something", (long long)i,
                            (long long)value);
        mask[i - begin] = (uint8_t)value;
    }
    return MTP_OK;
}

/* ---- checks of a row ------------------------------------------------------------------------------------------ */

/* What the bits of a row say, found in one pass without branches. */
typedef struct row_bits {
    bool nonfinite, nonzero;
} row_bits;

static row_bits look_at_words(const void *row, int64_t n, uint16_t exponent)
{
    const char *bytes = row;
    unsigned nonfinite = 0, any = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t word;
        memcpy(&word, bytes + 2 * i, sizeof word);
        nonfinite |= (word & exponent) == exponent;
        any |= word;
    }
    return (row_bits){nonfinite != 0, (any & 0x7fffu) != 0};
}

static row_bits look_at_floats(const void *row, int64_t n)
{
    const char *bytes = row;
    unsigned nonfinite = 0;
    uint32_t any = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t word;
        memcpy(&word, bytes + 4 * i, sizeof word);
        nonfinite |= (word & 0x7f800000u) == 0x7f800000u;
        any |= word;
    }
    return (row_bits){nonfinite != 0, (any & 0x7fffffffu) != 0};
}

static row_bits look_at(const void *row, mtp_dtype dtype, int64_t n)
{
    if (dtype == MTP_F32) return look_at_floats(row, n);
    return look_at_words(row, n, dtype == MTP_BF16 ? 0x7f80 : 0x7c00);
}

static mtp_status fail_nonfinite(const mtp__field *field, int64_t token, const void *row, mtp_dtype dtype)
{
    const int64_t index = mtp__real_find_nonfinite_in(row, dtype, field->heads * field->width);
    const char *name = field->entry->name;
    if (field->heads == 1 && field->entry->rank <= 3)
        return MTP_FAIL(MTP_E_DATA, "%s: NaN or Inf at token %lld, value %lld", name, (long long)token,
                        (long long)index);
    return MTP_FAIL(MTP_E_DATA, "%s: NaN or Inf at token %lld, head %lld, value %lld", name, (long long)token,
                    (long long)(index / field->width), (long long)(index % field->width));
}

/* ---- real numbers --------------------------------------------------------------------------------------------- */

/* fp8 times its scales, exact in fp32 up to one rounding. */
static mtp_status dequantise(const mtp__field *field, int64_t token, const void *src, float *row)
{
    const size_t size = mtp_dtype_size(field->scales->dtype);
    const int64_t first = token * field->scale_stride + field->scale_offset;
    const int64_t group = field->heads * field->width / field->num_scales;
    mtp__real_from_f8_e4m3(row, src, field->heads * field->width);
    for (int64_t i = 0; i < field->num_scales; i++) {
        float scale;
        mtp__real_to_f32(&scale, (const char *)field->scales->data + (size_t)(first + i) * size, field->scales->dtype,
                         1);
        if (!(scale >= 0.0f) || isinf(scale))
            return MTP_FAIL(MTP_E_DATA, "%s: the scale of token %lld is %g", field->scales->name, (long long)token,
                            (double)scale);
        for (int64_t j = 0; j < group; j++) row[i * group + j] *= scale;
    }
    return MTP_OK;
}

/* transformers' Gemma4RMSNorm: everything in fp32. The sum is kept in double so that its order does not show. */
static void normalise(float *row, int64_t n, mtp__final_norm norm)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)row[i] * (double)row[i];
    const float mean = (float)(sum / (double)n) + (float)norm.eps;
    const float factor = (float)(1.0 / sqrt((double)mean));
    for (int64_t i = 0; i < n; i++) row[i] = row[i] * factor * norm.weight[i];
}

/* Row `token` as `to`. */
static mtp_status read_row(const mtp__field *field, int64_t token, mtp__final_norm norm, mtp_dtype to, void *dst,
                           float *scratch)
{
    const mtp_dtype stored = field->entry->dtype;
    const int64_t n = field->heads * field->width;
    const int64_t first = token * field->row_stride + field->row_offset;
    const void *src = (const char *)field->entry->data + (size_t)first * mtp_dtype_size(stored);
    if (!norm.weight && stored == to) {
        memcpy(dst, src, (size_t)n * mtp_dtype_size(to));
        return MTP_OK;
    }
    float *row = scratch, *rounded = scratch + n;
    if (field->scales)
        MTP_TRY(dequantise(field, token, src, row));
    else
        mtp__real_to_f32(row, src, stored, n);
    if (!norm.weight || to == field->dtype) {
        if (norm.weight) normalise(row, n, norm);
        mtp__real_from_f32(dst, to, row, n);
        return MTP_OK;
    }
    /* a batch of mixed types is fp32, but the norm's output has the type of its file whatever stands beside it */
    normalise(row, n, norm);
    mtp__real_from_f32(rounded, field->dtype, row, n);
    mtp__real_to_f32(dst, rounded, field->dtype, n);
    return MTP_OK;
}

int64_t mtp__field_row_bytes(const mtp__field *field)
{
    int64_t bytes = field->heads * field->width * (int64_t)mtp_dtype_size(field->entry->dtype);
    if (field->scales) bytes += field->num_scales * (int64_t)mtp_dtype_size(field->scales->dtype);
    return bytes;
}

/* The system starts no more for one call than the read-ahead of the device, so the range is told in pieces. Rows that
 * do not lie together, as of one layer of several, are left to page faults. */
void mtp__field_announce(const mtp__field *field, int64_t begin, int64_t end)
{
    enum { STEP = 128 << 10 };
    const size_t size = mtp_dtype_size(field->entry->dtype);
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), base = (uintptr_t)field->entry->data;
    if (begin >= end || field->row_stride > 2 * field->heads * field->width) return;
    uintptr_t at = (base + (uintptr_t)(begin * field->row_stride) * size) / page * page;
    for (const uintptr_t last = base + (uintptr_t)(end * field->row_stride) * size; at < last; at += STEP)
        (void)madvise((void *)at, last - at < STEP ? last - at : STEP, MADV_WILLNEED);
}

mtp_status mtp__field_read(const mtp__field *field, int64_t count, mtp__final_norm norm, bool no_zero_rows,
                           mtp_dtype to, void *dst, int64_t dst_stride, float *scratch)
{
    return mtp__field_read_rows(field, 0, count, norm, no_zero_rows, to, dst, dst_stride, scratch);
}

mtp_status mtp__field_read_rows(const mtp__field *field, int64_t begin, int64_t end, mtp__final_norm norm,
                                bool no_zero_rows, mtp_dtype to, void *dst, int64_t dst_stride, float *scratch)
{
    const size_t size = mtp_dtype_size(to);
    const int64_t n = field->heads * field->width;
    for (int64_t t = begin; t < end; t++) {
        char *row = (char *)dst + (size_t)((t - begin) * dst_stride) * size;
        MTP_TRY(read_row(field, t, norm, to, row, scratch));
        const row_bits bits = look_at(row, to, n);
        if (bits.nonfinite) return fail_nonfinite(field, t, row, to);
        if (no_zero_rows && !bits.nonzero)
            return MTP_FAIL(MTP_E_DATA, "%s: every value of token %lld is zero; the extraction did not write this row",
                            field->entry->name, (long long)t);
    }
    return MTP_OK;
}
