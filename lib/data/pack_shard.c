/* One shard: threads take samples, read and check them in pieces of rows, and write each field to its place. Where a
 * sample lies is known from the headers, so nothing depends on who takes which sample when. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/real.h"
#include "data/pack.h"

enum {
    PIECE = MTP__TEACHER_ROWS
}; /* rows of a piece: memory of a worker is so many rows, whatever a sample's length */

/* Supervised tokens that have a token before them. */
static int64_t num_teacher(const mtp__dataset_entry *entry)
{
    return entry->num_supervised - (entry->num_supervised > 0 && entry->prompt_len == 0);
}

/* What all workers share. */
typedef struct job {
    const mtp__pack_means *means;
    const mtp_pack_options *options;
    const mtp_dataset *input;
    mtp__teacher *teacher;
    int64_t begin, count;
    mtp__store_layout layout;
    uint64_t offsets[MTP__STORE_FIELDS];
    const char *path; /* temporary name */
    int fd;
    mtp__store_row *rows;       /* [count] where each sample goes */
    uint32_t *checksums;        /* [count, MTP__STORE_FIELDS] */
    mtp_pack_refusal **refused; /* [count] why; NULL: stored */
    mtp__pack_progress *progress;
    pthread_mutex_t mutex; /* guards what follows, and the progress */
    int64_t next;
    mtp_error failure; /* status MTP_OK: none */
    pthread_mutex_t teacher_mutex;
} job;

typedef struct worker {
    job *job;
    int32_t *ids;        /* [PIECE] */
    uint8_t *mask;       /* [PIECE] */
    void *packed;        /* [PIECE] rows of the widest field */
    float *values;       /* the same as fp32 */
    float *scratch;      /* two rows */
    float *scales;       /* [PIECE, 2, heads] */
    uint16_t *teacher_x; /* [PIECE, Hb] */
    float *teacher_lse, *teacher_logits;
    int32_t *teacher_ids;
    pthread_t thread;
} worker;

mtp__store_layout mtp__pack_layout(const mtp_pack_options *options, const mtp_dataset *input, int64_t begin,
                                   int64_t end)
{
    const mtp_verifier_config *verifier = mtp_verifier_get_config(options->verifier);
    mtp__store_layout layout = mtp__store_layout_of(verifier);
    layout.fp8 = options->fp8;
    layout.global_v_only = options->global_v_only;
    if (options->teacher)
        layout.teacher_top = verifier->vocab_size < MTP__TEACHER_TOP ? verifier->vocab_size : MTP__TEACHER_TOP;
    for (int64_t i = begin; i < end; i++) {
        const mtp__dataset_entry entry = mtp__dataset_at(input, i);
        layout.num_tokens += entry.num_tokens;
        if (options->teacher) layout.num_teacher += num_teacher(&entry);
    }
    return layout;
}

/* ---- memory of a worker --------------------------------------------------------------------------------------- */

static int64_t values_of(const mtp__store_layout *layout, int type)
{
    return MTP__KV * layout->num_kv_heads[type] * layout->head_dim[type];
}

static void free_worker(worker *w)
{
    void *const blocks[] = {w->ids,    w->mask,      w->packed,      w->values,         w->scratch,
                            w->scales, w->teacher_x, w->teacher_lse, w->teacher_logits, w->teacher_ids};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) free(blocks[i]);
}

static mtp_status create_worker(job *shared, worker *w)
{
    const mtp__store_layout *layout = &shared->layout;
    size_t widest = (size_t)layout->hidden_size, heads = 1, top = (size_t)layout->teacher_top + 1;
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        if ((size_t)values_of(layout, type) > widest) widest = (size_t)values_of(layout, type);
        if ((size_t)layout->num_kv_heads[type] > heads) heads = (size_t)layout->num_kv_heads[type];
    }
    *w = (worker){.job = shared};
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
static mtp_status put(worker *w, const target *t, mtp__store_field field, int64_t first, int64_t count,
                      const void *data)
{
    job *shared = w->job;
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

static mtp_status put_integers(worker *w, target *t, int64_t begin, int64_t end)
{
    MTP_TRY(mtp__sample_read_ids_from(t->sample, w->job->layout.vocab_size, begin, end, w->ids));
    MTP_TRY(read_mask(t, begin, end, w->mask));
    t->id_hash = mtp__fnv1a(t->id_hash, w->ids, (size_t)(end - begin) * sizeof *w->ids);
    MTP_TRY(put(w, t, MTP__STORE_IDS, begin, end - begin, w->ids));
    return put(w, t, MTP__STORE_MASK, begin, end - begin, w->mask);
}

/* Rows of a field as bf16 in w->packed, `stride` values apart. */
static mtp_status read_bf16(worker *w, const mtp__field *field, int64_t begin, int64_t end, mtp__final_norm norm,
                            bool no_zero_rows, int64_t stride, int64_t offset)
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
static mtp_status put_teacher(worker *w, target *t, int64_t begin, int64_t end)
{
    job *shared = w->job;
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

static mtp_status put_hidden(worker *w, target *t, int64_t begin, int64_t end)
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
static mtp_status put_fp8(worker *w, target *t, int type, int64_t begin, int64_t end, int64_t width)
{
    const int64_t head = w->job->layout.head_dim[type], groups = (end - begin) * width / head;
    for (int64_t i = 0; i < groups; i++)
        mtp__store_to_fp8((uint8_t *)w->packed + i * head, &w->scales[i], w->values + i * head, head);
    MTP_TRY(put(w, t, (mtp__store_field)(MTP__STORE_KV + type), begin, end - begin, w->packed));
    return put(w, t, (mtp__store_field)(MTP__STORE_SCALES + type), begin, end - begin, w->scales);
}

/* Is K, in w->values, what the rows of V behind it give, to the rounding of bf16? */
static mtp_status compare_keys(worker *w, int64_t begin, int64_t end, int64_t width)
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
static mtp_status put_value(worker *w, target *t, int type, int64_t begin, int64_t end)
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

static mtp_status put_kv(worker *w, target *t, int type, int64_t begin, int64_t end)
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

static mtp_status put_sample(worker *w, target *t)
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
static mtp_status check_and_put(worker *w, target *t, int64_t sample_index, const mtp_safetensors *file,
                                mtp_pack_refusal *refusal)
{
    const mtp_pack_check *check = w->job->options->check;
    if (check) MTP_TRY(check->sample(check->user, sample_index, file, refusal));
    return refusal->reason[0] ? MTP_OK : put_sample(w, t);
}

static mtp_status pack_sample(worker *w, int64_t index, mtp_pack_refusal *refusal)
{
    job *shared = w->job;
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

/* ---- threads -------------------------------------------------------------------------------------------------- */

static bool is_bad_sample(mtp_status status)
{
    return status == MTP_E_DATA || status == MTP_E_FORMAT || status == MTP_E_VERSION || status == MTP_E_NOT_FOUND;
}

static mtp_status refuse(job *shared, int64_t index, const mtp_pack_refusal *refusal)
{
    shared->refused[index] = malloc(sizeof *refusal);
    if (!shared->refused[index]) return MTP_FAIL(MTP_E_MEMORY, "out of memory");
    *shared->refused[index] = *refusal;
    return MTP_OK;
}

/* What became of a sample; with the mutex. */
static void note(job *shared, int64_t index, mtp_status status, mtp_pack_refusal *refusal)
{
    if (is_bad_sample(status)) {
        const mtp__dataset_entry entry = mtp__dataset_at(shared->input, shared->begin + index);
        *refusal = mtp__refusal_of(entry.path, mtp_last_error());
        status = MTP_OK;
    }
    if (status == MTP_OK && refusal->reason[0]) status = refuse(shared, index, refusal);
    shared->progress->done++;
    const mtp_pack_options *options = shared->options;
    if (status == MTP_OK && options->progress &&
        !options->progress(options->user, shared->progress->done, shared->progress->total))
        status = MTP_FAIL(MTP_E_INTERRUPTED, "interrupted; the same command goes on where it stopped");
    if (status != MTP_OK && shared->failure.status == MTP_OK) shared->failure = *mtp_last_error();
}

static void *work(void *argument)
{
    worker *w = argument;
    job *shared = w->job;
    pthread_mutex_lock(&shared->mutex);
    while (shared->next < shared->count && shared->failure.status == MTP_OK) {
        const int64_t index = shared->next++;
        pthread_mutex_unlock(&shared->mutex);
        mtp_pack_refusal refusal = {.index = -1};
        const mtp_status status = pack_sample(w, index, &refusal);
        pthread_mutex_lock(&shared->mutex);
        note(shared, index, status, &refusal);
    }
    pthread_mutex_unlock(&shared->mutex);
    return NULL;
}

static mtp_status run_workers(job *shared)
{
    const int64_t wanted = shared->options->workers < shared->count ? shared->options->workers : shared->count;
    worker *workers = calloc((size_t)wanted, sizeof *workers);
    if (!workers) return MTP_FAIL(MTP_E_MEMORY, "no memory for workers");
    int64_t started = 0;
    mtp_status status = MTP_OK;
    pthread_mutex_init(&shared->mutex, NULL);
    pthread_mutex_init(&shared->teacher_mutex, NULL);
    while (started < wanted && status == MTP_OK) {
        worker *w = &workers[started];
        status = create_worker(shared, w);
        const int code = status == MTP_OK ? pthread_create(&w->thread, NULL, work, w) : 0;
        if (code != 0) status = MTP_FAIL_FOREIGN(MTP_E_IO, code, "cannot start a worker: %s", strerror(code));
        if (status == MTP_OK)
            started++;
        else
            free_worker(w);
    }
    if (status != MTP_OK) { /* those that run stop at their next sample */
        pthread_mutex_lock(&shared->mutex);
        if (shared->failure.status == MTP_OK) shared->failure = *mtp_last_error();
        pthread_mutex_unlock(&shared->mutex);
    }
    for (int64_t i = 0; i < started; i++) {
        pthread_join(workers[i].thread, NULL);
        free_worker(&workers[i]);
    }
    pthread_mutex_destroy(&shared->mutex);
    pthread_mutex_destroy(&shared->teacher_mutex);
    free(workers);
    const mtp_error *failure = &shared->failure;
    if (failure->status == MTP_OK) return MTP_OK;
    return mtp__fail(failure->status, failure->foreign, failure->file, failure->line, "%s", failure->message);
}

/* ---- the shard ------------------------------------------------------------------------------------------------ */

static mtp_status place_samples(job *shared)
{
    uint64_t token = 0, teacher = 0;
    shared->rows = calloc((size_t)shared->count, sizeof *shared->rows);
    shared->checksums = calloc((size_t)shared->count * MTP__STORE_FIELDS, sizeof *shared->checksums);
    shared->refused = calloc((size_t)shared->count, sizeof *shared->refused);
    if (!shared->rows || !shared->checksums || !shared->refused)
        return MTP_FAIL(MTP_E_MEMORY, "no memory for an index of %lld samples", (long long)shared->count);
    for (int64_t i = 0; i < shared->count; i++) {
        const mtp__dataset_entry entry = mtp__dataset_at(shared->input, shared->begin + i);
        shared->rows[i] = (mtp__store_row){.sample_id = entry.sample_id,
                                           .first_token = token,
                                           .first_teacher = teacher,
                                           .num_tokens = (uint32_t)entry.num_tokens,
                                           .num_supervised = (uint32_t)entry.num_supervised,
                                           .prompt_len = (uint32_t)entry.prompt_len,
                                           .first_target = (uint32_t)entry.first_target,
                                           .last_target = (uint32_t)entry.last_target,
                                           .num_teacher = shared->teacher ? (uint32_t)num_teacher(&entry) : 0};
        token += shared->rows[i].num_tokens;
        teacher += shared->rows[i].num_teacher;
    }
    return MTP_OK;
}

/* Move the stored samples to the front, collect names and the list of the others. */
static int64_t gather(job *shared, mtp__text *sources, mtp__text *quarantine)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < shared->count; i++) {
        const mtp__dataset_entry entry = mtp__dataset_at(shared->input, shared->begin + i);
        if (shared->refused[i]) {
            mtp__quarantine_add(quarantine, entry.path, shared->refused[i]);
            continue;
        }
        shared->rows[kept] = shared->rows[i];
        shared->rows[kept].source = sources->length;
        memmove(&shared->checksums[kept * MTP__STORE_FIELDS], &shared->checksums[i * MTP__STORE_FIELDS],
                MTP__STORE_FIELDS * sizeof *shared->checksums);
        mtp__text_add(sources, "%s%c", mtp__path_name(entry.path), 0);
        kept++;
    }
    return kept;
}

static mtp_status finish(job *shared)
{
    mtp__text sources = {0}, quarantine = {0};
    const mtp__store_tail tail = {.num_samples = gather(shared, &sources, &quarantine),
                                  .rows = shared->rows,
                                  .checksums = shared->checksums,
                                  .sources = mtp__text_get(&sources),
                                  .sources_size = sources.length,
                                  .quarantine = mtp__text_get(&quarantine),
                                  .quarantine_size = quarantine.length};
    mtp_status status = mtp__text_check(&sources);
    if (status == MTP_OK) status = mtp__text_check(&quarantine);
    if (status == MTP_OK) status = mtp__store_finish(shared->path, &tail);
    mtp__text_free(&sources);
    mtp__text_free(&quarantine);
    return status;
}

/* ".<name>.tmp" beside it. */
static mtp_status temporary_name(const char *path, char **temporary)
{
    const char *name = mtp__path_name(path);
    if (asprintf(temporary, "%.*s.%s.tmp", (int)(name - path), path, name) >= 0) return MTP_OK;
    *temporary = NULL;
    return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
}

static const char *verifier_name(const mtp_pack_options *options)
{
    return mtp__path_name(mtp_verifier_directory(options->verifier));
}

static mtp_status write_shard(job *shared)
{
    MTP_TRY(place_samples(shared));
    MTP_TRY(mtp__store_create(shared->path, &shared->layout, verifier_name(shared->options), shared->offsets));
    shared->fd = open(shared->path, O_WRONLY | O_CLOEXEC);
    if (shared->fd < 0) return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: cannot open: %s", shared->path, strerror(errno));
    const mtp_status status = run_workers(shared);
    const int closed = close(shared->fd);
    MTP_TRY(status);
    if (closed != 0) return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: cannot close: %s", shared->path, strerror(errno));
    return finish(shared);
}

static mtp_status publish(const char *temporary, const char *path)
{
    if (rename(temporary, path) != 0)
        return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: cannot rename into place: %s", path, strerror(errno));
    char *directory = strndup(path, (size_t)(mtp__path_name(path) - path));
    if (!directory) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
    const mtp_status status = mtp__dir_sync(directory);
    free(directory);
    return status;
}

mtp_status mtp__pack_shard(const mtp__pack_means *means, const char *path, int64_t begin, int64_t end,
                           mtp__pack_progress *progress)
{
    char *temporary = NULL;
    MTP_TRY(temporary_name(path, &temporary));
    job shared = {.means = means,
                  .options = means->options,
                  .input = means->input,
                  .teacher = means->teacher,
                  .begin = begin,
                  .count = end - begin,
                  .layout = mtp__pack_layout(means->options, means->input, begin, end),
                  .path = temporary,
                  .progress = progress};
    mtp_status status = write_shard(&shared);
    if (status == MTP_OK) status = publish(temporary, path);
    if (status != MTP_OK) unlink(temporary);
    for (int64_t i = 0; i < shared.count && shared.refused; i++) free(shared.refused[i]);
    free(shared.refused);
    free(shared.checksums);
    free(shared.rows);
    free(temporary);
    return status;
}
