/* One sample of a shard: read and checked in pieces of rows, each field written to its place. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/real.h"
#include "data/pack.h"

enum { PIECE = MTP__TEACHER_ROWS }; /* rows of a piece */

struct mtp__pack_worker {
    mtp__pack_job *job;
    int32_t *ids;        /* [PIECE] */
    uint8_t *mask;       /* [PIECE] */
    void *packed;        /* [PIECE] rows of the widest field */
    float *values;       /* the same as fp32 */
    float *scratch;      /* two rows */
    float *scales;       /* [PIECE, 2, heads] */
    uint16_t *teacher_x; /* [PIECE, Hb] */
    float *teacher_lse, *teacher_logits;
    int32_t *teacher_ids;
};

int64_t mtp__pack_num_teacher(const mtp__dataset_entry *entry)
{
    return entry->num_supervised - (entry->num_supervised > 0 && entry->prompt_len == 0);
}

/* ---- memory of a worker --------------------------------------------------------------------------------------- */

static int64_t values_of(const mtp__store_layout *layout, int type)
{
    return MTP__KV * layout->num_kv_heads[type] * layout->head_dim[type];
}

void mtp__pack_worker_free(mtp__pack_worker *w)
{
    if (!w) return;
    void *const blocks[] = {w->ids,    w->mask,      w->packed,      w->values,         w->scratch,
                            w->scales, w->teacher_x, w->teacher_lse, w->teacher_logits, w->teacher_ids};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) free(blocks[i]);
    free(w);
}

mtp_status mtp__pack_worker_create(mtp__pack_job *job, mtp__pack_worker **worker)
{
    const mtp__store_layout *layout = &job->layout;
    size_t widest = (size_t)layout->hidden_size, heads = 1, top = (size_t)layout->teacher_top + 1;
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        if ((size_t)values_of(layout, type) > widest) widest = (size_t)values_of(layout, type);
        if ((size_t)layout->num_kv_heads[type] > heads) heads = (size_t)layout->num_kv_heads[type];
    }
    mtp__pack_worker *w = *worker = calloc(1, sizeof *w);
    if (!w) return MTP_FAIL(MTP_E_MEMORY, "no memory for a worker; use fewer");
    w->job = job;
    w->ids = malloc(PIECE * sizeof *w->ids);
    w->mask = malloc(PIECE);
    w->packed = malloc(PIECE * widest * sizeof(uint16_t));
    w->values = malloc(PIECE * widest * sizeof *w->values);
    w->scratch = malloc(2 * widest * sizeof *w->scratch);
    w->scales = malloc(PIECE * MTP__KV * heads * sizeof *w->scales);
    w->teacher_x = aligned_alloc(64, PIECE * (((size_t)layout->hidden_size * 2 + 63) / 64 * 64));
    w->teacher_lse = malloc(PIECE * sizeof *w->teacher_lse);
    w->teacher_logits = malloc(PIECE * top * sizeof *w->teacher_logits);
    w->teacher_ids = malloc(PIECE * top * sizeof *w->teacher_ids);
    if (w->ids && w->mask && w->packed && w->values && w->scratch && w->scales && w->teacher_x && w->teacher_lse &&
        w->teacher_logits && w->teacher_ids)
        return MTP_OK;
    return MTP_FAIL(MTP_E_MEMORY, "no memory for a worker; use fewer");
}

/* ---- one sample ----------------------------------------------------------------------------------------------- */

/* Where a sample goes and what is known of it while it is written. */
typedef struct target {
    int64_t index; /* in the shard */
    mtp__store_row *row;
    const mtp__dataset_entry *entry;
    const mtp__sample *sample;
    int64_t teacher_done;
    uint64_t id_hash;
} target;

/* Rows [first, first + count) of a field of the sample. */
static mtp_status put(mtp__pack_worker *w, const target *t, mtp__store_field field, int64_t first, int64_t count,
                      const void *data)
{
    mtp__pack_job *shared = w->job;
    const size_t width = mtp__store_row_bytes(&shared->layout, field), size = (size_t)count * width;
    const uint64_t base = field >= MTP__STORE_TEACHER_LSE ? t->row->first_teacher : t->row->first_token;
    uint32_t *crc = &shared->checksums[t->index * MTP__STORE_FIELDS + (int64_t)field];
    if (size == 0) return MTP_OK;
    *crc = mtp__crc32c(*crc, data, size);
    return mtp__store_pwrite(shared->fd, shared->path,
                             shared->offsets[field] + (base + (uint64_t)first) * (uint64_t)width, data, size);
}

/* Masks of tokens [begin, end), from the file or from its sidecar. */
static mtp_status read_mask(const target *t, int64_t begin, int64_t end, uint8_t *mask)
{
    const mtp__dataset_entry *entry = t->entry;
    if (t->sample->loss_mask) return mtp__sample_read_mask_from(t->sample, begin, end, mask);
    for (int64_t i = begin; i < end; i++)
        mask[i - begin] = entry->sidecar_mask ? entry->sidecar_mask[i] : i >= entry->sidecar_prompt_len;
    return MTP_OK;
}

static mtp_status put_integers(mtp__pack_worker *w, target *t, int64_t begin, int64_t end)
{
    MTP_TRY(mtp__sample_read_ids_from(t->sample, w->job->layout.vocab_size, begin, end, w->ids));
    MTP_TRY(read_mask(t, begin, end, w->mask));
    t->id_hash = mtp__fnv1a(t->id_hash, w->ids, (size_t)(end - begin) * sizeof *w->ids);
    MTP_TRY(put(w, t, MTP__STORE_IDS, begin, end - begin, w->ids));
    return put(w, t, MTP__STORE_MASK, begin, end - begin, w->mask);
}

/* Rows of a field as bf16 in w->packed, `stride` values apart. */
static mtp_status read_bf16(mtp__pack_worker *w, const mtp__field *field, int64_t begin, int64_t end,
                            mtp__final_norm norm, bool no_zero_rows, int64_t stride, int64_t offset)
{
    uint16_t *dst = (uint16_t *)w->packed + offset;
    const int64_t n = field->heads * field->width;
    if (field->dtype == MTP_BF16)
        return mtp__field_read_rows(field, begin, end, norm, no_zero_rows, MTP_BF16, dst, stride, w->scratch);
    MTP_TRY(mtp__field_read_rows(field, begin, end, norm, no_zero_rows, MTP_F32, w->values, n, w->scratch));
    for (int64_t t = 0; t < end - begin; t++) mtp__real_from_f32(dst + t * stride, MTP_BF16, w->values + t * n, n);
    return MTP_OK;
}

/* The teacher of the tokens begin + 1 .. end that are supervised: the distribution behind hidden states begin .. end-1,
 * which are in w->packed. */
static mtp_status put_teacher(mtp__pack_worker *w, target *t, int64_t begin, int64_t end)
{
    mtp__pack_job *shared = w->job;
    const int64_t width = shared->layout.hidden_size;
    const uint16_t *hidden = w->packed;
    const int64_t last = end < t->entry->num_tokens ? end : t->entry->num_tokens - 1; /* token after the last state */
    int64_t rows = 0;
    MTP_TRY(read_mask(t, begin + 1, last + 1, w->mask));
    for (int64_t i = begin; i < last; i++)
        if (w->mask[i - begin])
            memcpy(w->teacher_x + rows++ * width, hidden + (i - begin) * width, (size_t)width * sizeof *hidden);
    if (rows == 0) return MTP_OK;
    if (t->teacher_done + rows > t->row->num_teacher)
        return MTP_FAIL(MTP_E_DATA, "loss_mask changed since the data set was opened");
    pthread_mutex_lock(&shared->teacher_mutex);
    const mtp_status status =
        mtp__teacher_rows(shared->teacher, w->teacher_x, rows, w->teacher_lse, w->teacher_ids, w->teacher_logits);
    pthread_mutex_unlock(&shared->teacher_mutex);
    MTP_TRY(status);
    MTP_TRY(put(w, t, MTP__STORE_TEACHER_LSE, t->teacher_done, rows, w->teacher_lse));
    MTP_TRY(put(w, t, MTP__STORE_TEACHER_IDS, t->teacher_done, rows, w->teacher_ids));
    MTP_TRY(put(w, t, MTP__STORE_TEACHER_LOGITS, t->teacher_done, rows, w->teacher_logits));
    t->teacher_done += rows;
    return MTP_OK;
}

static mtp_status put_hidden(mtp__pack_worker *w, target *t, int64_t begin, int64_t end)
{
    const mtp_verifier *verifier = w->job->options->verifier;
    mtp__final_norm norm = {.weight = NULL};
    if (t->entry->normalise)
        norm = (mtp__final_norm){mtp_verifier_norm(verifier), mtp_verifier_get_config(verifier)->rms_norm_eps};
    MTP_TRY(read_bf16(w, &t->sample->hidden, begin, end, norm, true, w->job->layout.hidden_size, 0));
    MTP_TRY(put(w, t, MTP__STORE_HIDDEN, begin, end - begin, w->packed));
    return w->job->teacher ? put_teacher(w, t, begin, end) : MTP_OK;
}

/* Rows of values in w->values, `width` each, as 8-bit numbers with scales for every head. */
static mtp_status put_fp8(mtp__pack_worker *w, target *t, int type, int64_t begin, int64_t end, int64_t width)
{
    const int64_t head = w->job->layout.head_dim[type], groups = (end - begin) * width / head;
    for (int64_t i = 0; i < groups; i++)
        mtp__store_to_fp8((uint8_t *)w->packed + i * head, &w->scales[i], w->values + i * head, head);
    MTP_TRY(put(w, t, (mtp__store_field)(MTP__STORE_KV + type), begin, end - begin, w->packed));
    return put(w, t, (mtp__store_field)(MTP__STORE_SCALES + type), begin, end - begin, w->scales);
}

/* Is K, in w->values, what the rows of V behind it give, to the rounding of bf16? */
static mtp_status compare_keys(mtp__pack_worker *w, int64_t begin, int64_t end, int64_t width)
{
    const mtp__verifier_key *key = &w->job->means->key;
    const float *k = w->values, *v = k + (end - begin) * width;
    float *made = w->scratch;
    for (int64_t t = begin; t < end; t++, k += width, v += width) {
        mtp__verifier_key_of_value(key, t, v, made);
        for (int64_t head = 0; head < key->heads; head++) {
            double off = 0, size = 0;
            for (int64_t i = head * key->width; i < (head + 1) * key->width; i++) {
                off += ((double)made[i] - (double)k[i]) * ((double)made[i] - (double)k[i]);
                size += (double)k[i] * (double)k[i];
            }
            if (off > MTP__KEY_OF_VALUE_LIMIT * MTP__KEY_OF_VALUE_LIMIT * size)
                return MTP_FAIL(MTP_E_DATA,
                                "global K of token %lld is not what V gives with k_norm's weight and rotary embedding: "
                                "it differs by %.2g of its size; store both",
                                (long long)t, sqrt(off / size));
        }
    }
    return MTP_OK;
}

/* Global V alone. */
static mtp_status put_value(mtp__pack_worker *w, target *t, int type, int64_t begin, int64_t end)
{
    const int64_t width = values_of(&w->job->layout, type) / MTP__KV;
    const mtp__final_norm none = {.weight = NULL};
    for (int part = 0; part < MTP__KV; part++)
        MTP_TRY(mtp__field_read_rows(&t->sample->kv[type][part], begin, end, none, false, MTP_F32,
                                     w->values + part * (end - begin) * width, width, w->scratch));
    MTP_TRY(compare_keys(w, begin, end, width));
    memmove(w->values, w->values + (end - begin) * width, (size_t)((end - begin) * width) * sizeof *w->values);
    if (w->job->layout.fp8) return put_fp8(w, t, type, begin, end, width);
    mtp__real_from_f32(w->packed, MTP_BF16, w->values, (end - begin) * width);
    return put(w, t, (mtp__store_field)(MTP__STORE_KV + type), begin, end - begin, w->packed);
}

static mtp_status put_kv(mtp__pack_worker *w, target *t, int type, int64_t begin, int64_t end)
{
    const int64_t width = values_of(&w->job->layout, type), half = width / MTP__KV;
    const mtp__final_norm none = {.weight = NULL};
    if (width == 0) return MTP_OK;
    if (mtp__store_parts(&w->job->layout, type) == 1) return put_value(w, t, type, begin, end);
    if (w->job->layout.fp8) {
        for (int part = 0; part < MTP__KV; part++)
            MTP_TRY(mtp__field_read_rows(&t->sample->kv[type][part], begin, end, none, false, MTP_F32,
                                         w->values + part * half, width, w->scratch));
        return put_fp8(w, t, type, begin, end, width);
    }
    for (int part = 0; part < MTP__KV; part++)
        MTP_TRY(read_bf16(w, &t->sample->kv[type][part], begin, end, none, false, width, part * half));
    return put(w, t, (mtp__store_field)(MTP__STORE_KV + type), begin, end - begin, w->packed);
}

static mtp_status put_sample(mtp__pack_worker *w, target *t)
{
    const int64_t num_tokens = t->entry->num_tokens;
    t->id_hash = MTP__FNV_START;
    for (int64_t begin = 0; begin < num_tokens; begin += PIECE) {
        const int64_t end = begin + PIECE < num_tokens ? begin + PIECE : num_tokens;
        MTP_TRY(put_integers(w, t, begin, end));
        MTP_TRY(put_hidden(w, t, begin, end));
        for (int type = 0; type < MTP_LAYER_TYPES; type++) MTP_TRY(put_kv(w, t, type, begin, end));
    }
    if (t->id_hash != t->entry->sample_id || t->teacher_done != t->row->num_teacher)
        return MTP_FAIL(MTP_E_DATA, "the file changed since the data set was opened");
    return MTP_OK;
}

/* `refusal` gets a reason when the tests refuse the sample. */
static mtp_status check_and_put(mtp__pack_worker *w, target *t, int64_t sample_index, const mtp_safetensors *file,
                                mtp_pack_refusal *refusal)
{
    const mtp_pack_check *check = w->job->options->check;
    if (check) MTP_TRY(check->sample(check->user, sample_index, file, refusal));
    return refusal->reason[0] ? MTP_OK : put_sample(w, t);
}

mtp_status mtp__pack_sample(mtp__pack_worker *w, int64_t index, mtp_pack_refusal *refusal)
{
    const mtp__pack_job *shared = w->job;
    const int64_t sample_index = shared->begin + index;
    const mtp__dataset_entry entry = mtp__dataset_at(shared->input, sample_index);
    mtp__sample sample;
    mtp_safetensors *file = NULL;
    target t = {.index = index, .row = &shared->rows[index], .entry = &entry, .sample = &sample};
    MTP_TRY(mtp__dataset_open_sample(shared->input, sample_index, &file, &sample));
    const mtp_status status = check_and_put(w, &t, sample_index, file, refusal);
    mtp_safetensors_close(file);
    return status;
}
