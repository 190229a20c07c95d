/* A drafter's weights from model.safetensors, and back. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/file.h"
#include "base/real.h"
#include "model/slots.h"
#include "model/tensors.h"
#include "model/weights.h"

enum { CHUNK = 1 << 18 }; /* elements converted at once */

/* ---- checking the file ---------------------------------------------------------------------------------------- */

static void check_entry(const mtp__tensor_spec *spec, const mtp_safetensors_entry *entry, mtp__text *problems)
{
    char got[256], want[64];
    const bool ordering = strcmp(spec->name, MTP__TOKEN_ORDERING) == 0;
    if (!entry) {
        mtp__text_add(problems, "; %s is missing", spec->name);
        return;
    }
    if (!mtp__tensor_fits(spec, entry))
        mtp__text_add(problems, "; %s has shape %s, expected %s", spec->name,
                      mtp__shape_text(entry->rank, entry->shape, got, sizeof got),
                      mtp__shape_text(spec->rank, spec->shape, want, sizeof want));
    if (ordering && entry->dtype != MTP_I64)
        mtp__text_add(problems, "; %s is %s, expected I64", spec->name, mtp_dtype_name(entry->dtype));
    if (!ordering && !mtp_dtype_is_compute(entry->dtype))
        mtp__text_add(problems, "; %s is %s, expected F32, BF16 or F16", spec->name, mtp_dtype_name(entry->dtype));
}

mtp_status mtp__drafter_check_file(const mtp_safetensors *file, const mtp_drafter_config *config)
{
    mtp__tensor_spec *specs = NULL;
    int64_t count = 0;
    mtp__text problems = {0};
    MTP_TRY(mtp__tensor_specs(config, &specs, &count));
    for (int64_t i = 0; i < count; i++) check_entry(&specs[i], mtp_safetensors_find(file, specs[i].name), &problems);
    for (size_t i = 0; i < mtp_safetensors_count(file); i++) {
        const char *name = mtp_safetensors_at(file, i)->name;
        if (!mtp__tensor_spec_find(specs, count, name))
            mtp__text_add(&problems, "; unknown tensor %s: %s", name, mtp__tensor_stranger(name));
    }
    mtp_status status = mtp__text_check(&problems);
    if (status == MTP_OK && problems.length)
        status = MTP_FAIL(MTP_E_DATA, "%s does not fit its config.json: %s", mtp_safetensors_path(file),
                          problems.data + strlen("; "));
    mtp__text_free(&problems);
    free(specs);
    return status;
}

/* ---- device memory -------------------------------------------------------------------------------------------- */

enum { PART = 1 << 14 }; /* values in bf16 on their way */

static mtp_status write_rounded(const mtp_context *context, uint16_t *memory, const float *values, int64_t count)
{
    uint16_t part[PART];
    for (int64_t at = 0; at < count; at += PART) {
        const int64_t n = count - at < PART ? count - at : PART;
        mtp__real_from_f32(part, MTP_BF16, values + at, n);
        MTP_TRY(context->ops->upload(context->device, memory + at, part, (size_t)n * sizeof *part));
    }
    return MTP_OK;
}

static mtp_status read_rounded(const mtp_context *context, const uint16_t *memory, float *values, int64_t count)
{
    uint16_t part[PART];
    for (int64_t at = 0; at < count; at += PART) {
        const int64_t n = count - at < PART ? count - at : PART;
        MTP_TRY(context->ops->download(context->device, part, memory + at, (size_t)n * sizeof *part));
        mtp__real_to_f32(values + at, part, MTP_BF16, n);
    }
    return MTP_OK;
}

mtp_status mtp__param_write(const mtp_drafter *drafter, const mtp__param *param, int64_t first, const float *values,
                            int64_t count)
{
    const mtp_context *context = drafter->context;
    MTP_REQUIRE(first >= 0 && count >= 0 && first <= param->count - count);
    if (param->shadow) MTP_TRY(write_rounded(context, (uint16_t *)param->shadow + first, values, count));
    if (param->dtype == MTP_BF16) return write_rounded(context, (uint16_t *)param->value + first, values, count);
    return context->ops->upload(context->device, (float *)param->value + first, values, (size_t)count * sizeof *values);
}

mtp_status mtp__param_read(const mtp_drafter *drafter, const mtp__param *param, int64_t first, float *values,
                           int64_t count)
{
    const mtp_context *context = drafter->context;
    MTP_REQUIRE(first >= 0 && count >= 0 && first <= param->count - count);
    if (param->dtype == MTP_BF16) return read_rounded(context, (const uint16_t *)param->value + first, values, count);
    return context->ops->download(context->device, values, (const float *)param->value + first,
                                  (size_t)count * sizeof *values);
}

/* ---- reading -------------------------------------------------------------------------------------------------- */

/* Values [first, first + count) of a tensor of a file, which must be finite. */
static mtp_status read_stretch(void *user, int64_t first, int64_t count, float *values)
{
    const mtp_safetensors_entry *entry = user;
    const char *source = (const char *)entry->data + (size_t)first * mtp_dtype_size(entry->dtype);
    mtp__real_to_f32(values, source, entry->dtype, count);
    const int64_t bad = mtp__real_find_nonfinite(values, count);
    if (bad < 0) return MTP_OK;
    return MTP_FAIL(MTP_E_DATA, "%s: tensor %s holds %f at element %lld", mtp_safetensors_path(entry->owner),
                    entry->name, (double)values[bad], (long long)(first + bad));
}

static mtp_status upload_param(mtp_drafter *drafter, mtp__param *param, const mtp_safetensors_entry *entry,
                               float *staging)
{
    param->stored = entry->dtype;
    for (int64_t first = 0; first < param->count; first += CHUNK) {
        const int64_t n = param->count - first < CHUNK ? param->count - first : CHUNK;
        MTP_TRY(mtp__values_in_memory_order(drafter, param, first, n, read_stretch, (void *)entry, staging));
        MTP_TRY(mtp__param_write(drafter, param, first, staging, n));
    }
    return MTP_OK;
}

static mtp_status read_ordering(mtp_drafter *drafter, const mtp_safetensors *file)
{
    const mtp_safetensors_entry *entry = mtp_safetensors_find(file, MTP__TOKEN_ORDERING);
    char origin[512];
    int64_t *ordering = malloc(entry->size);
    if (!ordering) return MTP_FAIL(MTP_E_MEMORY, "out of memory for the token ordering");
    snprintf(origin, sizeof origin, "%s: tensor " MTP__TOKEN_ORDERING, mtp_safetensors_path(file));
    mtp_status status = mtp_safetensors_copy(entry, ordering, entry->size);
    if (status == MTP_OK) status = mtp__drafter_set_ordering(drafter, ordering, origin);
    free(ordering);
    return status;
}

static mtp_status read_values(mtp_drafter *drafter, const mtp_safetensors *file)
{
    mtp_status status = MTP_OK;
    if (drafter->config.ordered) MTP_TRY(read_ordering(drafter, file)); /* says where rows go */
    float *staging = malloc(CHUNK * sizeof *staging);
    if (!staging) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a buffer of %d values", CHUNK);
    for (int64_t i = 0; i < drafter->num_params && status == MTP_OK; i++) {
        mtp__param *param = &drafter->params[i];
        status = upload_param(drafter, param, mtp_safetensors_find(file, param->name), staging);
    }
    free(staging);
    return status;
}

static mtp_status load(mtp_context *context, const char *directory, const mtp_drafter_config *config,
                       const mtp_safetensors *file, mtp_dtype masters, mtp_drafter **drafter)
{
    MTP_TRY(mtp__drafter_check_file(file, config));
    MTP_TRY(mtp__drafter_create(context, config, directory, masters, drafter));
    const mtp_status status = read_values(*drafter, file);
    if (status == MTP_OK) return MTP_OK;
    mtp_drafter_free(*drafter);
    *drafter = NULL;
    return status;
}

mtp_status mtp__drafter_load(mtp_context *context, const char *directory, mtp_dtype masters, mtp_drafter **drafter)
{
    MTP_REQUIRE(context && directory && drafter);
    mtp_drafter_config config = {0};
    mtp_safetensors *file = NULL;
    char *path = NULL;
    *drafter = NULL;
    MTP_TRY(mtp_drafter_config_read(directory, &config));
    mtp_status status = mtp__path_join(directory, "model.safetensors", &path);
    if (status == MTP_OK) status = mtp_safetensors_open(path, &file);
    if (status == MTP_OK) status = load(context, directory, &config, file, masters, drafter);
    mtp_safetensors_close(file);
    free(path);
    mtp_drafter_config_free(&config);
    return status;
}

mtp_status mtp_drafter_load(mtp_context *context, const char *directory, mtp_drafter **drafter)
{
    return mtp__drafter_load(context, directory, MTP_F32, drafter);
}

/* ---- writing -------------------------------------------------------------------------------------------------- */

/* Of all tensors of a file. */
typedef struct buffers {
    const mtp_drafter *drafter;
    const char *path;
    float *staging; /* [CHUNK] */
    float *rows;    /* host, [num_rows, H]: rows of a parameter by slot */
    void *gathered; /* device, the same */
    int64_t num_rows;
} buffers;

typedef struct writer {
    const buffers *buffers;
    const mtp__param *param;
} writer;

/* Memory for the rows that CHUNK values can touch. */
static mtp_status make_buffers(const mtp_drafter *drafter, const char *path, buffers *b)
{
    const mtp_context *context = drafter->context;
    const int64_t H = drafter->config.hidden_size;
    *b = (buffers){.drafter = drafter, .path = path, .num_rows = CHUNK / H + 2};
    const size_t bytes = (size_t)(b->num_rows * H) * sizeof(float);
    b->staging = malloc(CHUNK * sizeof *b->staging);
    if (drafter->token_ordering) b->rows = malloc(bytes);
    if (!b->staging || (drafter->token_ordering && !b->rows)) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
    return drafter->token_ordering ? context->ops->memory_alloc(context->device, bytes, &b->gathered) : MTP_OK;
}

static void free_buffers(buffers *b)
{
    b->drafter->context->ops->memory_free(b->drafter->context->device, b->gathered);
    free(b->rows);
    free(b->staging);
}

/* Values [first, first + n) of a parameter, in the order of files, into staging. The device brings rows that memory has
 * in another order together. */
static mtp_status download_values(const buffers *b, const mtp__param *param, int64_t first, int64_t n)
{
    const mtp_context *context = b->drafter->context;
    const mtp_backend *ops = context->ops;
    const size_t bytes = (size_t)n * sizeof(float);
    if (!param->by_slot) return mtp__param_read(b->drafter, param, first, b->staging, n);
    const int64_t H = param->shape[1], row = first / H, count = (first + n - 1) / H - row + 1;
    const mtp_view slot_of = mtp_view_1d(b->drafter->slot_of, MTP_I32, param->shape[0]);
    const mtp_gather_args gather = {.src = mtp__param_value(param),
                                    .index = mtp_view_rows(slot_of, row, count),
                                    .dst = mtp_view_2d(b->gathered, MTP_F32, count, H)};
    MTP_TRY(ops->gather_rows(context->device, &gather));
    MTP_TRY(ops->download(context->device, b->rows, b->gathered, (size_t)(count * H) * sizeof(float)));
    memcpy(b->staging, b->rows + (first - row * H), bytes);
    return MTP_OK;
}

/* Bytes [offset, offset + size) of a parameter as BF16. */
static mtp_status fill_bf16(void *user, size_t offset, void *buffer, size_t size)
{
    const writer *self = user;
    const buffers *b = self->buffers;
    const int64_t begin = (int64_t)(offset / sizeof(uint16_t)), end = begin + (int64_t)(size / sizeof(uint16_t));
    for (int64_t first = begin; first < end; first += CHUNK) {
        const int64_t n = end - first < CHUNK ? end - first : CHUNK;
        uint16_t *target = (uint16_t *)buffer + (first - begin);
        MTP_TRY(download_values(b, self->param, first, n));
        const int64_t bad = mtp__real_find_nonfinite(b->staging, n);
        if (bad >= 0)
            return MTP_FAIL(MTP_E_DATA, "%s: not written: parameter %s holds %f at element %lld", b->path,
                            self->param->name, (double)b->staging[bad], (long long)(first + bad));
        mtp__real_from_f32(target, MTP_BF16, b->staging, n);
    }
    return MTP_OK;
}

static mtp_status save(const buffers *b, writer *writers, mtp_safetensors_source *sources)
{
    const mtp_drafter *drafter = b->drafter;
    const mtp_safetensors_pair metadata = {"format", "pt"};
    size_t count = 0;
    for (int64_t i = 0; i < drafter->num_params; i++) {
        const mtp__param *param = &drafter->params[i];
        writers[i] = (writer){b, param};
        sources[count++] = (mtp_safetensors_source){.name = param->name,
                                                    .dtype = MTP_BF16,
                                                    .rank = param->rank,
                                                    .shape = param->shape,
                                                    .fill = fill_bf16,
                                                    .user = &writers[i]};
    }
    if (drafter->token_ordering)
        sources[count++] = (mtp_safetensors_source){.name = MTP__TOKEN_ORDERING,
                                                    .dtype = MTP_I64,
                                                    .rank = 1,
                                                    .shape = &drafter->config.vocab_size,
                                                    .data = drafter->token_ordering};
    return mtp_safetensors_write(b->path, &metadata, 1, sources, count);
}

mtp_status mtp_drafter_save_weights(const mtp_drafter *drafter, const char *path)
{
    MTP_REQUIRE(drafter && path);
    const size_t count = (size_t)drafter->num_params;
    writer *writers = calloc(count, sizeof *writers);
    mtp_safetensors_source *sources = calloc(count + 1, sizeof *sources);
    buffers b;
    mtp_status status = make_buffers(drafter, path, &b);
    if (status == MTP_OK)
        status = writers && sources ? save(&b, writers, sources) : MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
    free_buffers(&b);
    free(writers);
    free(sources);
    return status;
}
