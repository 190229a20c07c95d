/* A document of a shard into a batch: rows of a field are rows of the batch, so each field is one read into its place.
 *
 * Training reads less than the whole. Its rows are the positions t with a supervised target among t + 2 .. t + 1 + K,
 * so with the first target at f and the last before l they lie in [f - 1 - K, l - 2), whatever K up to MOST_STEPS. A
 * row sees global K/V up to t and local K/V in (t - W, t]. What no row sees is not read and stands as zeros. */
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "data/batch.h"

enum { MOST_STEPS = 64 }; /* of num_speculative_steps */

typedef struct range {
    int64_t begin, end;
} range;

static range visible_rows(const mtp_verifier_config *verifier, const mtp__dataset_entry *entry, int type,
                          int64_t length)
{
    range seen = {0, entry->last_target - 2};
    if (type == MTP_LAYER_SLIDING) seen.begin = entry->first_target - 1 - MOST_STEPS - verifier->sliding_window;
    if (seen.end > length) seen.end = length;
    if (seen.end < 0 || entry->first_target >= length) seen.end = 0;
    if (seen.begin < 0) seen.begin = 0;
    if (seen.begin > seen.end) seen.begin = seen.end;
    return seen;
}

/* ---- real numbers --------------------------------------------------------------------------------------------- */

/* n bf16 values that stand in the second half of `dst` to fp32, in place: no value is overwritten before it is read. */
static void expand_bf16(float *dst, int64_t n)
{
    const char *src = (const char *)dst + 2 * n;
    for (int64_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, src + 2 * i, sizeof half);
        const uint32_t word = (uint32_t)half << 16;
        memcpy(&dst[i], &word, sizeof word);
    }
}

static float f8_value(uint8_t byte)
{
    const int exponent = byte >> 3 & 15, fraction = byte & 7;
    const float magnitude = exponent ? ldexpf((float)(8 + fraction), exponent - 10) : ldexpf((float)fraction, -9);
    return byte & 0x80 ? -magnitude : magnitude;
}

/* The same for 8-bit values, which stand in the last quarter, with a scale for each `width` of them. False: a scale or
 * a byte that means no number. */
static bool expand_f8(float *dst, const float *scales, int64_t n, int64_t width)
{
    float table[256];
    const char *src = (const char *)dst + 3 * n;
    bool good = true;
    for (int byte = 0; byte < 256; byte++) table[byte] = f8_value((uint8_t)byte);
    for (int64_t i = 0; i < n; i++) {
        uint8_t byte;
        memcpy(&byte, src + i, sizeof byte);
        const float scale = scales[i / width], value = table[byte] * scale;
        good = good && (byte & 0x7f) != 0x7f && scale >= 0 && isfinite(value);
        memcpy(&dst[i], &value, sizeof value);
    }
    return good;
}

static bool is_finite_bf16(const void *values, int64_t n)
{
    const uint16_t *words = values;
    unsigned bad = 0;
    for (int64_t i = 0; i < n; i++) bad |= (words[i] & 0x7f80u) == 0x7f80u;
    return !bad;
}

/* ---- fields --------------------------------------------------------------------------------------------------- */

static mtp_status not_finite(const mtp__dataset_entry *entry, mtp__store_field field)
{
    return MTP_FAIL(
        MTP_E_DATA, "%s: sample %lld (%s): NaN, Inf or a bad scale in %s; the file was damaged, pack it again",
        entry->path, (long long)entry->row, mtp__shard_source(entry->shard, entry->row), mtp__store_field_name(field));
}

/* Rows of bf16, each `width` values, as bf16 or F32. */
static mtp_status read_bf16(const mtp__dataset_entry *entry, int fd, mtp__store_field field, range rows, int64_t width,
                            mtp_dtype to, void *dst)
{
    const int64_t n = (rows.end - rows.begin) * width;
    char *raw = (char *)dst + (to == MTP_F32 ? 2 * n : 0);
    MTP_TRY(mtp__shard_read(entry->shard, fd, entry->row, field, rows.begin, rows.end, raw));
    if (to == MTP_F32) expand_bf16(dst, n);
    const bool finite = to == MTP_F32 || is_finite_bf16(raw, n);
    return finite ? MTP_OK : not_finite(entry, field);
}

static mtp_status read_fp8(mtp__batch *batch, const mtp__dataset_entry *entry, int fd, int type, range rows, float *dst)
{
    const mtp__store_layout *layout = &entry->shard->layout;
    const int64_t groups = (rows.end - rows.begin) * MTP__KV * layout->num_kv_heads[type];
    const int64_t n = groups * layout->head_dim[type];
    MTP_TRY(mtp__shard_read(entry->shard, fd, entry->row, (mtp__store_field)(MTP__STORE_KV + type), rows.begin,
                            rows.end, (char *)dst + 3 * n));
    MTP_TRY(mtp__shard_read(entry->shard, fd, entry->row, (mtp__store_field)(MTP__STORE_SCALES + type), rows.begin,
                            rows.end, batch->scales));
    if (expand_f8(dst, batch->scales, n, layout->head_dim[type])) return MTP_OK;
    return not_finite(entry, (mtp__store_field)(MTP__STORE_KV + type));
}

static mtp_status read_kv(mtp__batch *batch, const mtp__dataset_entry *entry, int fd, int type, int64_t begin,
                          int64_t length, bool visible)
{
    const mtp__store_layout *layout = &entry->shard->layout;
    const mtp_verifier_config *verifier = mtp_verifier_get_config(batch->dataset->verifier);
    const mtp_view *view = &batch->view.kv[type];
    const int64_t width = MTP__KV * layout->num_kv_heads[type] * layout->head_dim[type];
    const size_t row_bytes = (size_t)width * mtp_dtype_size(view->dtype);
    const range rows = visible ? visible_rows(verifier, entry, type, length) : (range){0, length};
    char *dst = (char *)view->data + (size_t)begin * row_bytes;
    if (width == 0) return MTP_OK;
    memset(dst, 0, (size_t)rows.begin * row_bytes);
    memset(dst + (size_t)rows.end * row_bytes, 0, (size_t)(length - rows.end) * row_bytes);
    dst += (size_t)rows.begin * row_bytes;
    if (layout->fp8) return read_fp8(batch, entry, fd, type, rows, (float *)(void *)dst);
    return read_bf16(entry, fd, (mtp__store_field)(MTP__STORE_KV + type), rows, width, view->dtype, dst);
}

static mtp_status read_integers(mtp__batch *batch, const mtp__dataset_entry *entry, int fd, int64_t begin,
                                int64_t length)
{
    const mtp__shard *shard = entry->shard;
    int32_t *ids = batch->view.token_ids + begin;
    uint8_t *mask = batch->view.loss_mask + begin;
    bool good = true;
    MTP_TRY(mtp__shard_read(shard, fd, entry->row, MTP__STORE_IDS, 0, length, ids));
    MTP_TRY(mtp__shard_read(shard, fd, entry->row, MTP__STORE_MASK, 0, length, mask));
    for (int64_t i = 0; i < length; i++)
        good = good && ids[i] >= 0 && ids[i] < shard->layout.vocab_size && mask[i] <= 1;
    if (good) return MTP_OK;
    return MTP_FAIL(MTP_E_DATA,
                    "%s: sample %lld (%s): token_ids or loss_mask hold what they may not; the file was "
                    "damaged, pack it again",
                    shard->path, (long long)entry->row, mtp__shard_source(shard, entry->row));
}

mtp_status mtp__batch_read_packed(mtp__batch *batch, const mtp__dataset_entry *entry, int64_t begin, int64_t length,
                                  bool visible)
{
    int fd;
    const mtp_view *hidden = &batch->view.hidden_states;
    const int64_t width = entry->shard->layout.hidden_size;
    char *dst = (char *)hidden->data + (size_t)(begin * width) * mtp_dtype_size(hidden->dtype);
    MTP_TRY(mtp__shard_file(entry->shard, &fd));
    mtp_status status = read_integers(batch, entry, fd, begin, length);
    if (status == MTP_OK)
        status = read_bf16(entry, fd, MTP__STORE_HIDDEN, (range){0, length}, width, hidden->dtype, dst);
    for (int type = 0; type < MTP_LAYER_TYPES && status == MTP_OK; type++)
        status = read_kv(batch, entry, fd, type, begin, length, visible);
    close(fd);
    return status;
}
