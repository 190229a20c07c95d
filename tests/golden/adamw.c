/* adamw/: the optimizer alone, through the code that training uses. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "formats/json.h"
#include "golden.h"
#include "optim/optimizer.h"

enum { MAX_TENSORS = 64 };

typedef struct adamw_case {
    mtp_context *context;
    mtp_safetensors *file;
    mtp_adamw_config config;
    double learning_rate[256];
    size_t num_steps;
    mtp__optim_tensor tensors[MAX_TENSORS];
    int64_t num_tensors;
} adamw_case;

static mtp_status read_settings(const char *directory, adamw_case *c)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/optimizer.json", directory);
    json_t *json;
    MTP_TRY(mtp__json_read(path, &json));
    const mtp__json_node root = mtp__json_root(json, path);
    mtp__json_node betas, rates;
    size_t count = 0;
    mtp_status status = mtp__json_get_array(&root, "betas", &betas, &count);
    if (status == MTP_OK && count != 2) status = mtp__json_fail(&betas, MTP_E_DATA, "expected two numbers");
    if (status == MTP_OK) {
        const mtp__json_node first = mtp__json_item(&betas, 0), second = mtp__json_item(&betas, 1);
        status = mtp__json_as_double(&first, &c->config.beta1);
        if (status == MTP_OK) status = mtp__json_as_double(&second, &c->config.beta2);
    }
    if (status == MTP_OK) status = mtp__json_get_double(&root, "eps", &c->config.epsilon);
    if (status == MTP_OK) status = mtp__json_get_double(&root, "weight_decay", &c->config.weight_decay);
    if (status == MTP_OK) status = mtp__json_get_double(&root, "clip_norm", &c->config.max_grad_norm);
    if (status == MTP_OK) status = mtp__json_get_array(&root, "lr", &rates, &c->num_steps);
    if (status == MTP_OK && c->num_steps > sizeof c->learning_rate / sizeof *c->learning_rate)
        status = mtp__json_fail(&rates, MTP_E_DATA, "too many steps");
    for (size_t i = 0; status == MTP_OK && i < c->num_steps; i++) {
        const mtp__json_node rate = mtp__json_item(&rates, i);
        status = mtp__json_as_double(&rate, &c->learning_rate[i]);
    }
    json_decref(json);
    return status;
}

/* Every start.<name> becomes a tensor in device memory, with memory for its gradient. */
static mtp_status read_tensors(adamw_case *c)
{
    const mtp_backend *ops = c->context->ops;
    for (size_t i = 0; i < mtp_safetensors_count(c->file); i++) {
        const mtp_safetensors_entry *entry = mtp_safetensors_at(c->file, i);
        if (strncmp(entry->name, "start.", 6) != 0) continue;
        if (c->num_tensors == MAX_TENSORS) return MTP_FAIL(MTP_E_DATA, "more than %d tensors", MAX_TENSORS);
        mtp__optim_tensor *tensor = &c->tensors[c->num_tensors];
        mtp_view view;
        MTP_TRY(mtp_safetensors_view(entry, &view));
        if (view.dtype != MTP_F32) return MTP_FAIL(MTP_E_DATA, "%s is not F32", entry->name);
        tensor->name = entry->name + 6;
        tensor->value = tensor->grad = view;
        tensor->decays = view.rank > 1;
        tensor->value.data = tensor->grad.data = NULL;
        c->num_tensors++;
        MTP_TRY(ops->memory_alloc(c->context->device, entry->size, &tensor->value.data));
        MTP_TRY(ops->memory_alloc(c->context->device, entry->size, &tensor->grad.data));
        MTP_TRY(ops->upload(c->context->device, tensor->value.data, entry->data, entry->size));
    }
    return c->num_tensors ? MTP_OK : MTP_FAIL(MTP_E_DATA, "no start.<name> tensors");
}

static mtp_status one_step(adamw_case *c, mtp__optimizer *optimizer, size_t step, golden_result *result)
{
    char name[256];
    for (int64_t t = 0; t < c->num_tensors; t++) {
        const mtp_safetensors_entry *entry;
        snprintf(name, sizeof name, "grad%zu.%s", step, c->tensors[t].name);
        MTP_TRY(mtp_safetensors_get(c->file, name, &entry));
        if (entry->size != (size_t)mtp_view_count(c->tensors[t].grad) * sizeof(float))
            return MTP_FAIL(MTP_E_DATA, "%s has %zu bytes", name, entry->size);
        MTP_TRY(c->context->ops->upload(c->context->device, c->tensors[t].grad.data, entry->data, entry->size));
    }
    mtp__optim_result done;
    MTP_TRY(mtp__optimizer_step(optimizer, &(mtp__optim_update){.learning_rate = c->learning_rate[step]}));
    MTP_TRY(mtp__optimizer_read(optimizer, &done));
    const float got = (float)done.norm;
    snprintf(name, sizeof name, "norm%zu", step);
    MTP_TRY(golden_compare(result, GOLDEN_ADAMW, c->file, name, &got, 1, 0));
    for (int64_t t = 0; t < c->num_tensors; t++) {
        snprintf(name, sizeof name, "after%zu.%s", step, c->tensors[t].name);
        MTP_TRY(golden_compare_device(result, GOLDEN_ADAMW, c->file, name, c->context, c->tensors[t].value.data,
                                      mtp_view_count(c->tensors[t].value), 0));
    }
    return MTP_OK;
}

mtp_status golden_run_adamw(const char *directory, const mtp_context_options *device, golden_result *result)
{
    adamw_case c = {0};
    mtp__optimizer *optimizer = NULL;
    char path[4096];
    snprintf(path, sizeof path, "%s/steps.safetensors", directory);
    mtp_status status = read_settings(directory, &c);
    if (status == MTP_OK) status = mtp_safetensors_open(path, &c.file);
    if (status == MTP_OK) status = mtp_context_create(device, &c.context);
    if (status == MTP_OK) status = read_tensors(&c);
    if (status == MTP_OK)
        status = mtp__optimizer_create(c.context, c.tensors, c.num_tensors, &c.config, NULL, &optimizer);
    for (size_t step = 0; status == MTP_OK && step < c.num_steps; step++)
        status = one_step(&c, optimizer, step, result);
    mtp__optimizer_free(optimizer);
    for (int64_t t = 0; t < c.num_tensors; t++) {
        c.context->ops->memory_free(c.context->device, c.tensors[t].value.data);
        c.context->ops->memory_free(c.context->device, c.tensors[t].grad.data);
    }
    mtp_context_free(c.context);
    mtp_safetensors_close(c.file);
    return status;
}
