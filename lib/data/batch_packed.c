/* A document of a shard into a batch: rows of a field are rows of the batch, so each field is one range of the file,
 * read into its place. */
#include <float.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "base/real.h"
#include "data/batch.h"
#include "mtp/loss.h"

mtp__row_range mtp__batch_visible(const mtp_verifier_config *verifier, const mtp__dataset_entry *entry, int type,
                                  int64_t num_steps, int64_t length)
{
    mtp__row_range seen = {0, entry->last_target - 2};
    if (type == MTP_LAYER_SLIDING) seen.begin = entry->first_target - num_steps - verifier->sliding_window;
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
 * a byte that means no number. A piece is taken out before its place is written, which may reach into it. */
static bool expand_f8(float *dst, const float *scales, int64_t n, int64_t width)
{
    enum { PIECE = 512 };
    float table[256];
    uint8_t bytes[PIECE];
    const uint8_t *src = (const uint8_t *)dst + 3 * n;
    bool good = true;
    for (int byte = 0; byte < 256; byte++) table[byte] = f8_value((uint8_t)byte);
    for (int64_t i = 0, count; i < n; i += count) {
        const int64_t left = width - i % width; /* of the values with this scale */
        const float scale = scales[i / width];
        unsigned bad = 0;
        count = left < PIECE ? left : PIECE;
        memcpy(bytes, src + i, (size_t)count);
        for (int64_t j = 0; j < count; j++) bad |= (bytes[j] & 0x7fu) == 0x7fu;
        for (int64_t j = 0; j < count; j++) dst[i + j] = table[bytes[j]] * scale;
        good = good && !bad && scale >= 0 && scale <= FLT_MAX / 448; /* the largest magnitude of e4m3 */
    }
    return good;
}

/* ---- fields --------------------------------------------------------------------------------------------------- */

static mtp_status not_finite(const mtp__dataset_entry *entry, mtp__store_field field)
{
    return MTP_FAIL(
        MTP_E_DATA, "%s: sample %lld (%s): NaN, Inf or a bad scale in %s; the file was damaged, pack it again",
        entry->path, (long long)entry->row, mtp__shard_source(entry->shard, entry->row), mtp__store_field_name(field));
}

/* Rows of bf16, each `width` values, as bf16 or F32. */
static mtp_status read_bf16(mtp__batch *batch, const mtp__dataset_entry *entry, mtp__store_field field,
                            mtp__row_range rows, int64_t width, mtp_dtype to, void *dst)
{
    const int64_t n = (rows.end - rows.begin) * width;
    char *raw = (char *)dst + (to == MTP_F32 ? 2 * n : 0);
    bool finite = true;
    MTP_TRY(mtp__shard_fetch(entry->shard, &batch->reader, entry->row, field, rows.begin, rows.end, raw, &finite));
    if (!finite) return not_finite(entry, field);
    if (to == MTP_F32) expand_bf16(dst, n);
    batch->bytes_read += 2 * n;
    return MTP_OK;
}

static mtp_status read_fp8(mtp__batch *batch, const mtp__dataset_entry *entry, int type, mtp__row_range rows,
                           float *dst)
{
    const mtp__store_layout *layout = &entry->shard->layout;
    const int64_t groups = (rows.end - rows.begin) * mtp__store_parts(layout, type) * layout->num_kv_heads[type];
    const int64_t n = groups * layout->head_dim[type];
    MTP_TRY(mtp__shard_fetch(entry->shard, &batch->reader, entry->row, (mtp__store_field)(MTP__STORE_KV + type),
                             rows.begin, rows.end, (char *)dst + 3 * n, NULL));
    MTP_TRY(mtp__shard_read(entry->shard, batch->reader.fd, entry->row, (mtp__store_field)(MTP__STORE_SCALES + type),
                            rows.begin, rows.end, batch->scales));
    batch->bytes_read += n + groups * (int64_t)sizeof *batch->scales;
    if (expand_f8(dst, batch->scales, n, layout->head_dim[type])) return MTP_OK;
    return not_finite(entry, (mtp__store_field)(MTP__STORE_KV + type));
}

/* Rows of V alone, which stand in the second half of `dst`, become rows of K and V: from the front on, so that none is
 * overwritten before it is read. K has the rounding that a stored one has. */
static void make_keys(const mtp__batch *batch, mtp__row_range rows, int64_t width, mtp_dtype dtype, char *dst)
{
    const size_t row = (size_t)width * mtp_dtype_size(dtype);
    const char *values = dst + (size_t)(rows.end - rows.begin) * row;
    float *v = batch->scratch, *k = v + width;
    for (int64_t t = rows.begin; t < rows.end; t++, dst += 2 * row, values += row) {
        mtp__real_to_f32(v, values, dtype, width);
        mtp__verifier_key_of_value(batch->dataset->key, t, v, k);
        memmove(dst + row, values, row);
        mtp__real_from_f32(dst, MTP_BF16, k, width);
        if (dtype == MTP_BF16) continue;
        mtp__real_to_f32(v, dst, MTP_BF16, width);
        memcpy(dst, v, row);
    }
}

/* The rows of K/V that are read: those that are seen, or all of the document where that is a 64th more at most, since a
 * whole field has a checksum and the last two rows, say, are no price for it. */
static mtp__row_range rows_to_read(const mtp__batch *batch, const mtp__dataset_entry *entry, int type, int64_t length)
{
    const mtp__row_range seen = mtp__batch_rows(batch, entry, type, length);
    const bool nearly_all = length - (seen.end - seen.begin) <= length / 64 && length == entry->num_tokens;
    return nearly_all ? (mtp__row_range){0, length} : seen;
}

static mtp_status read_kv(mtp__batch *batch, const mtp__dataset_entry *entry, int type, int64_t begin, int64_t length)
{
    const mtp__store_layout *layout = &entry->shard->layout;
    const mtp_view *view = &batch->view.kv[type];
    const int64_t width = MTP__KV * layout->num_kv_heads[type] * layout->head_dim[type];
    if (width == 0) return MTP_OK;
    const mtp__row_range rows = rows_to_read(batch, entry, type, length);
    char *dst = mtp__batch_clear_unread(view, begin, length, width, rows);
    const bool alone = mtp__store_parts(layout, type) == 1;
    const int64_t stored = alone ? width / MTP__KV : width;
    char *to = dst + (size_t)((rows.end - rows.begin) * (width - stored)) * mtp_dtype_size(view->dtype);
    const mtp__store_field field = (mtp__store_field)(MTP__STORE_KV + type);
    if (layout->fp8)
        MTP_TRY(read_fp8(batch, entry, type, rows, (float *)(void *)to));
    else
        MTP_TRY(read_bf16(batch, entry, field, rows, stored, view->dtype, to));
    if (alone) make_keys(batch, rows, stored, view->dtype, dst);
    mtp__batch_clear_unread(view, begin, length, width, mtp__batch_rows(batch, entry, type, length));
    return MTP_OK;
}

static mtp_status read_integers(mtp__batch *batch, const mtp__dataset_entry *entry, int64_t begin, int64_t length)
{
    const mtp__shard *shard = entry->shard;
    int32_t *ids = batch->view.token_ids + begin;
    uint8_t *mask = batch->view.loss_mask + begin;
    bool good = true;
    MTP_TRY(mtp__shard_read(shard, batch->reader.fd, entry->row, MTP__STORE_IDS, 0, length, ids));
    MTP_TRY(mtp__shard_read(shard, batch->reader.fd, entry->row, MTP__STORE_MASK, 0, length, mask));
    batch->bytes_read += length * (int64_t)(sizeof *ids + sizeof *mask);
    for (int64_t i = 0; i < length; i++)
        good = good && ids[i] >= 0 && ids[i] < shard->layout.vocab_size && mask[i] <= 1;
    if (good) return MTP_OK;
    return MTP_FAIL(MTP_E_DATA,
                    "%s: sample %lld (%s): token_ids or loss_mask hold what they may not; the file was "
                    "damaged, pack it again",
                    shard->path, (long long)entry->row, mtp__shard_source(shard, entry->row));
}

/* ---- documents ------------------------------------------------------------------------------------------------ */

/* The file of a shard stays open while documents of it follow each other. */
static mtp_status open_shard(mtp__batch *batch, const mtp__shard *shard)
{
    if (batch->open == shard) return MTP_OK;
    mtp__batch_close_shard(batch);
    batch->reader.direct = -1;
    MTP_TRY(mtp__shard_file(shard, &batch->reader.fd));
    batch->open = shard;
    return batch->reader.bounce ? mtp__shard_file_direct(shard, &batch->reader.direct) : MTP_OK;
}

void mtp__batch_close_shard(mtp__batch *batch)
{
    if (!batch->open) return;
    close(batch->reader.fd);
    if (batch->reader.direct >= 0) close(batch->reader.direct);
    batch->open = NULL;
}

mtp_status mtp__batch_announce_packed(mtp__batch *batch, const mtp__dataset_entry *entry, int64_t length)
{
    const mtp__shard *shard = entry->shard;
    if (batch->reader.bounce) return MTP_OK; /* the page cache has no part in it */
    MTP_TRY(open_shard(batch, shard));
    mtp__shard_announce(shard, batch->reader.fd, entry->row, MTP__STORE_HIDDEN, 0, length);
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        const mtp__row_range rows = rows_to_read(batch, entry, type, length);
        mtp__shard_announce(shard, batch->reader.fd, entry->row, (mtp__store_field)(MTP__STORE_KV + type), rows.begin,
                            rows.end);
    }
    return MTP_OK;
}

mtp_status mtp__batch_read_packed(mtp__batch *batch, const mtp__dataset_entry *entry, int64_t begin, int64_t length)
{
    const mtp_view *hidden = &batch->view.hidden_states;
    const int64_t width = entry->shard->layout.hidden_size;
    char *dst = (char *)hidden->data + (size_t)(begin * width) * mtp_dtype_size(hidden->dtype);
    MTP_TRY(open_shard(batch, entry->shard));
    MTP_TRY(read_integers(batch, entry, begin, length));
    MTP_TRY(read_bf16(batch, entry, MTP__STORE_HIDDEN, (mtp__row_range){0, length}, width, hidden->dtype, dst));
    for (int type = 0; type < MTP_LAYER_TYPES; type++) MTP_TRY(read_kv(batch, entry, type, begin, length));
    return MTP_OK;
}
