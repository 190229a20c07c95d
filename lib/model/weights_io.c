/* A drafter's weights from model.safetensors, and back. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/file.h"
#include "base/real.h"
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

/* ---- reading -------------------------------------------------------------------------------------------------- */

static mtp_status upload_param(mtp_drafter *drafter, mtp__param *param, const mtp_safetensors_entry *entry,
                               float *staging)
{
    const mtp_context *context = drafter->context;
    param->stored = entry->dtype;
    for (int64_t first = 0; first < param->count; first += CHUNK) {
        const int64_t n = param->count - first < CHUNK ? param->count - first : CHUNK;
        const char *source = (const char *)entry->data + (size_t)first * mtp_dtype_size(entry->dtype);
        mtp__real_to_f32(staging, source, entry->dtype, n);
        const int64_t bad = mtp__real_find_nonfinite(staging, n);
        if (bad >= 0)
            return MTP_FAIL(MTP_E_DATA, "%s: tensor %s holds %f at element %lld", mtp_safetensors_path(entry->owner),
                            param->name, (double)staging[bad], (long long)(first + bad));
        MTP_TRY(context->ops->upload(context->device, param->value + first, staging, (size_t)n * sizeof *staging));
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
    float *staging = malloc(CHUNK * sizeof *staging);
    if (!staging) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a buffer of %d values", CHUNK);
    for (int64_t i = 0; i < drafter->num_params && status == MTP_OK; i++) {
        mtp__param *param = &drafter->params[i];
        status = upload_param(drafter, param, mtp_safetensors_find(file, param->name), staging);
    }
    free(staging);
    MTP_TRY(status);
    return drafter->config.ordered ? read_ordering(drafter, file) : MTP_OK;
}

static mtp_status load(mtp_context *context, const char *directory, const mtp_drafter_config *config,
                       const mtp_safetensors *file, mtp_drafter **drafter)
{
    MTP_TRY(mtp__drafter_check_file(file, config));
    MTP_TRY(mtp__drafter_create(context, config, directory, drafter));
    const mtp_status status = read_values(*drafter, file);
    if (status == MTP_OK) return MTP_OK;
    mtp_drafter_free(*drafter);
    *drafter = NULL;
    return status;
}

mtp_status mtp_drafter_load(mtp_context *context, const char *directory, mtp_drafter **drafter)
{
    MTP_REQUIRE(context && directory && drafter);
    mtp_drafter_config config = {0};
    mtp_safetensors *file = NULL;
    char *path = NULL;
    *drafter = NULL;
    MTP_TRY(mtp_drafter_config_read(directory, &config));
    mtp_status status = mtp__path_join(directory, "model.safetensors", &path);
    if (status == MTP_OK) status = mtp_safetensors_open(path, &file);
    if (status == MTP_OK) status = load(context, directory, &config, file, drafter);
    mtp_safetensors_close(file);
    free(path);
    mtp_drafter_config_free(&config);
    return status;
}

/* ---- writing -------------------------------------------------------------------------------------------------- */

typedef struct writer {
    const mtp_context *context;
    const mtp__param *param;
    const char *path;
    float *staging; /* [CHUNK], shared by all writers */
} writer;

/* Bytes [offset, offset + size) of a parameter as BF16. */
static mtp_status fill_bf16(void *user, size_t offset, void *buffer, size_t size)
{
    const writer *self = user;
    const int64_t begin = (int64_t)(offset / sizeof(uint16_t)), end = begin + (int64_t)(size / sizeof(uint16_t));
    for (int64_t first = begin; first < end; first += CHUNK) {
        const int64_t n = end - first < CHUNK ? end - first : CHUNK;
        uint16_t *target = (uint16_t *)buffer + (first - begin);
        MTP_TRY(self->context->ops->download(self->context->device, self->staging, self->param->value + first,
                                             (size_t)n * sizeof(float)));
        const int64_t bad = mtp__real_find_nonfinite(self->staging, n);
        if (bad >= 0)
            return MTP_FAIL(MTP_E_DATA, "%s: not written: parameter %s holds %f at element %lld", self->path,
                            self->param->name, (double)self->staging[bad], (long long)(first + bad));
        mtp__real_from_f32(target, MTP_BF16, self->staging, n);
    }
    return MTP_OK;
}

static mtp_status save(const mtp_drafter *drafter, const char *path, writer *writers, mtp_safetensors_source *sources)
{
    const mtp_safetensors_pair metadata = {"format", "pt"};
    size_t count = 0;
    for (int64_t i = 0; i < drafter->num_params; i++) {
        const mtp__param *param = &drafter->params[i];
        writers[i].context = drafter->context;
        writers[i].param = param;
        writers[i].path = path;
        writers[i].staging = writers[0].staging;
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
    return mtp_safetensors_write(path, &metadata, 1, sources, count);
}

mtp_status mtp_drafter_save_weights(const mtp_drafter *drafter, const char *path)
{
    MTP_REQUIRE(drafter && path);
    const size_t count = (size_t)drafter->num_params;
    writer *writers = calloc(count, sizeof *writers);
    mtp_safetensors_source *sources = calloc(count + 1, sizeof *sources);
    float *staging = malloc(CHUNK * sizeof *staging);
    mtp_status status;
    if (writers && sources && staging) {
        writers[0].staging = staging;
        status = save(drafter, path, writers, sources);
    } else {
        status = MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
    }
    free(writers);
    free(sources);
    free(staging);
    return status;
}
