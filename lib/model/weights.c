/* A drafter's parameters in device memory: who they are, which are trained, and where their gradients lie. Reading and
 * writing them is weights_io.c. */
#include "model/weights.h"

#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "model/tensors.h"

enum { GRAIN = 16 }; /* values: 64 bytes of fp32, and what an optimizer cuts at */

static int64_t padded(int64_t count)
{
    return (count + GRAIN - 1) / GRAIN * GRAIN;
}

/* ---- creation ------------------------------------------------------------------------------------------------- */

static mtp_status copy_config(const mtp_drafter_config *from, mtp_drafter_config *to)
{
    const size_t bytes = (size_t)from->num_layers * sizeof *from->layer_types;
    *to = *from;
    to->layer_types = malloc(bytes);
    if (!to->layer_types) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %lld layers", (long long)from->num_layers);
    memcpy(to->layer_types, from->layer_types, bytes);
    return MTP_OK;
}

static mtp_status create_params(mtp_drafter *drafter)
{
    mtp__tensor_spec *specs = NULL;
    int64_t count = 0;
    MTP_TRY(mtp__tensor_specs(&drafter->config, &specs, &count));
    drafter->params = calloc((size_t)count, sizeof *drafter->params);
    bool complete = drafter->params != NULL;
    for (int64_t i = 0; i < count && complete; i++) {
        if (strcmp(specs[i].name, MTP__TOKEN_ORDERING) == 0) continue;
        mtp__param *param = &drafter->params[drafter->num_params++];
        *param = (mtp__param){.name = strdup(specs[i].name),
                              .rank = specs[i].rank,
                              .shape = {specs[i].shape[0], specs[i].rank == 2 ? specs[i].shape[1] : 0},
                              .count = specs[i].shape[0] * (specs[i].rank == 2 ? specs[i].shape[1] : 1),
                              .stored = MTP_BF16,
                              .trained = true};
        complete = param->name != NULL;
    }
    free(specs);
    return complete ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory for %lld parameters", (long long)count);
}

static mtp__param *find_param(const mtp_drafter *drafter, const char *name)
{
    for (int64_t i = 0; i < drafter->num_params; i++)
        if (strcmp(drafter->params[i].name, name) == 0) return &drafter->params[i];
    return NULL;
}

static mtp__param *find_in_layer(const mtp_drafter *drafter, int64_t layer, const char *name)
{
    char full[128];
    snprintf(full, sizeof full, "model.layers.%lld.%s", (long long)layer, name);
    return find_param(drafter, full);
}

/* Roles to parameters. Every name is in the list by construction (mtp__tensor_specs). */
static mtp_status bind_roles(mtp_drafter *drafter)
{
    drafter->embed = find_param(drafter, "model.embed_tokens.weight");
    drafter->embed->by_slot = drafter->config.ordered;
    drafter->final_norm = find_param(drafter, "model.norm.weight");
    drafter->pre_projection = find_param(drafter, "pre_projection.weight");
    drafter->post_projection = find_param(drafter, "post_projection.weight");
    drafter->centroids = find_param(drafter, "masked_embedding.centroids.weight");
    drafter->layers = calloc((size_t)drafter->config.num_layers, sizeof *drafter->layers);
    if (!drafter->layers)
        return MTP_FAIL(MTP_E_MEMORY, "out of memory for %lld layers", (long long)drafter->config.num_layers);
    for (int64_t i = 0; i < drafter->config.num_layers; i++) {
        drafter->layers[i] = (mtp__layer){
            .type = drafter->config.layer_types[i],
            .input_norm = find_in_layer(drafter, i, "input_layernorm.weight"),
            .post_attention_norm = find_in_layer(drafter, i, "post_attention_layernorm.weight"),
            .pre_feedforward_norm = find_in_layer(drafter, i, "pre_feedforward_layernorm.weight"),
            .post_feedforward_norm = find_in_layer(drafter, i, "post_feedforward_layernorm.weight"),
            .q_proj = find_in_layer(drafter, i, "self_attn.q_proj.weight"),
            .q_norm = find_in_layer(drafter, i, "self_attn.q_norm.weight"),
            .o_proj = find_in_layer(drafter, i, "self_attn.o_proj.weight"),
            .gate_proj = find_in_layer(drafter, i, "mlp.gate_proj.weight"),
            .up_proj = find_in_layer(drafter, i, "mlp.up_proj.weight"),
            .down_proj = find_in_layer(drafter, i, "mlp.down_proj.weight"),
            .layer_scalar = find_in_layer(drafter, i, "layer_scalar"),
        };
    }
    return MTP_OK;
}

/* ---- the order in memory -------------------------------------------------------------------------------------- */

enum kind { MATRIX, VECTOR, SCALAR };

static enum kind kind_of(const mtp__param *param)
{
    return param->rank == 2 ? MATRIX : param->count > 1 ? VECTOR : SCALAR;
}

static void append(mtp_drafter *drafter, enum kind kind, mtp__param *const *params, size_t num_params, int64_t *count)
{
    for (size_t i = 0; i < num_params; i++)
        if (params[i] && kind_of(params[i]) == kind) drafter->placed[(*count)++] = params[i];
}

/* Parameters of a kind at the end of drafter->placed, as the backward pass finishes their gradients. */
static void append_all(mtp_drafter *drafter, enum kind kind, int64_t *count)
{
    mtp__param *const first[] = {drafter->embed, drafter->centroids, drafter->final_norm, drafter->post_projection};
    append(drafter, kind, first, sizeof first / sizeof *first, count);
    for (int64_t i = drafter->config.num_layers - 1; i >= 0; i--) {
        const mtp__layer *layer = &drafter->layers[i];
        mtp__param *const params[] = {layer->layer_scalar,
                                      layer->post_feedforward_norm,
                                      layer->down_proj,
                                      layer->gate_proj,
                                      layer->up_proj,
                                      layer->pre_feedforward_norm,
                                      layer->post_attention_norm,
                                      layer->o_proj,
                                      layer->q_norm,
                                      layer->q_proj,
                                      layer->input_norm};
        append(drafter, kind, params, sizeof params / sizeof *params, count);
    }
    append(drafter, kind, &drafter->pre_projection, 1, count);
}

/* Matrices, vectors, scalars. So masters of matrices are one block even when they have another type than the vectors,
 * no bucket of gradients waits for the small ones, and scalars, which are often frozen, part nothing when they are. */
static mtp_status place_params(mtp_drafter *drafter)
{
    drafter->placed = calloc((size_t)drafter->num_params, sizeof *drafter->placed);
    if (!drafter->placed) return MTP_FAIL(MTP_E_MEMORY, "out of memory for the order of the parameters");
    int64_t count = 0, place = 0;
    append_all(drafter, MATRIX, &count);
    append_all(drafter, VECTOR, &count);
    append_all(drafter, SCALAR, &count);
    if (count != drafter->num_params) return MTP_FAIL(MTP_E_INTERNAL, "a parameter has no place in memory");
    for (int64_t i = 0; i < count; i++) {
        mtp__param *param = drafter->placed[i];
        param->place = place;
        param->dtype = kind_of(param) == MATRIX ? drafter->masters : MTP_F32;
        place += padded(param->count);
    }
    return MTP_OK;
}

/* Zeroed device memory, so that what pads it counts for nothing. */
static mtp_status alloc_zeros(const mtp_context *context, size_t bytes, void **memory)
{
    MTP_TRY(context->ops->memory_alloc(context->device, bytes, memory));
    return context->ops->memory_zero(context->device, *memory, bytes);
}

static mtp_status alloc_values(mtp_drafter *drafter)
{
    const mtp_context *context = drafter->context;
    const bool shadowed = mtp__has_shadows(context, drafter->masters);
    size_t bytes = 0, matrices = 0;
    for (int64_t i = 0; i < drafter->num_params; i++) {
        const mtp__param *param = drafter->placed[i];
        bytes += (size_t)padded(param->count) * mtp_dtype_size(param->dtype);
        if (param->rank == 2) matrices += (size_t)padded(param->count);
    }
    MTP_TRY_AT(alloc_zeros(context, bytes, &drafter->values), "weights of the drafter");
    if (shadowed)
        MTP_TRY_AT(alloc_zeros(context, matrices * sizeof(uint16_t), &drafter->shadows), "bf16 weights of the drafter");
    char *next = drafter->values;
    for (int64_t i = 0; i < drafter->num_params; i++) {
        mtp__param *param = drafter->placed[i];
        param->value = next;
        next += (size_t)padded(param->count) * mtp_dtype_size(param->dtype);
        if (shadowed && param->rank == 2) param->shadow = (uint16_t *)drafter->shadows + param->place;
    }
    return MTP_OK;
}

/* ---- rotary frequencies --------------------------------------------------------------------------------------- */

/* As transformers' modeling_rope_utils.py computes them, in fp32: 1 / theta^(2i / D). "proportional" keeps the
 * denominator D, leaves the pairs beyond partial_rotary_factor at 0 and divides by factor. */
void mtp__inv_freq(const mtp_layer_geometry *geometry, float *inv_freq)
{
    const int64_t pairs = geometry->head_dim / 2;
    const double share = geometry->proportional ? geometry->partial_rotary_factor : 1;
    const int64_t rotated = (int64_t)floor(share * (double)geometry->head_dim / 2);
    const float theta = (float)geometry->rope_theta, factor = (float)geometry->rope_factor;
    for (int64_t i = 0; i < pairs; i++) {
        const float exponent = (float)(2 * i) / (float)geometry->head_dim;
        inv_freq[i] = i < rotated ? 1.0f / powf(theta, exponent) / factor : 0.0f;
    }
}

static mtp_status upload_inv_freq(mtp_drafter *drafter)
{
    const mtp_context *context = drafter->context;
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        const mtp_layer_geometry *geometry = &drafter->config.geometry[type];
        const size_t bytes = (size_t)(geometry->head_dim / 2) * sizeof(float);
        void *memory = NULL;
        if (geometry->head_dim == 0) continue;
        float *host = malloc(bytes);
        if (!host) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %zu bytes of rotary frequencies", bytes);
        mtp__inv_freq(geometry, host);
        mtp_status status = context->ops->memory_alloc(context->device, bytes, &memory);
        drafter->inv_freq[type] = memory;
        if (status == MTP_OK) status = context->ops->upload(context->device, memory, host, bytes);
        free(host);
        MTP_TRY(status);
    }
    return MTP_OK;
}

/* ---- the ordered head ----------------------------------------------------------------------------------------- */

static mtp_status upload_i32(mtp_drafter *drafter, const int32_t *host, int32_t **device)
{
    const mtp_context *context = drafter->context;
    const size_t bytes = (size_t)drafter->config.vocab_size * sizeof *host;
    void *memory = NULL;
    MTP_TRY(context->ops->memory_alloc(context->device, bytes, &memory));
    *device = memory;
    return context->ops->upload(context->device, memory, host, bytes);
}

mtp_status mtp__drafter_set_ordering(mtp_drafter *drafter, const int64_t *ordering, const char *origin)
{
    const int64_t V = drafter->config.vocab_size;
    MTP_TRY(mtp__check_ordering(ordering, V, origin));
    int32_t *order = malloc((size_t)V * sizeof *order), *slot_of = malloc((size_t)V * sizeof *slot_of);
    drafter->token_ordering = malloc((size_t)V * sizeof *ordering);
    mtp_status status = MTP_OK;
    if (!order || !slot_of || !drafter->token_ordering)
        MTP_TRY_GOTO(status, MTP_FAIL(MTP_E_MEMORY, "out of memory for the ordering of %lld tokens", (long long)V),
                     done);
    memcpy(drafter->token_ordering, ordering, (size_t)V * sizeof *ordering);
    for (int64_t slot = 0; slot < V; slot++) {
        order[slot] = (int32_t)ordering[slot];
        slot_of[ordering[slot]] = (int32_t)slot;
    }
    MTP_TRY_GOTO(status, upload_i32(drafter, order, &drafter->order), done);
    MTP_TRY_GOTO(status, upload_i32(drafter, slot_of, &drafter->slot_of), done);
done:
    free(order);
    free(slot_of);
    return status;
}

/* ---- life ----------------------------------------------------------------------------------------------------- */

static mtp_status build(mtp_drafter *drafter, const mtp_drafter_config *config, const char *directory)
{
    MTP_TRY(copy_config(config, &drafter->config));
    drafter->directory = strdup(directory);
    if (!drafter->directory) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a path");
    MTP_TRY(create_params(drafter));
    MTP_TRY(bind_roles(drafter));
    MTP_TRY(place_params(drafter));
    MTP_TRY(alloc_values(drafter));
    return upload_inv_freq(drafter);
}

mtp_status mtp__drafter_create(mtp_context *context, const mtp_drafter_config *config, const char *directory,
                               mtp_dtype masters, mtp_drafter **drafter)
{
    MTP_REQUIRE(masters == MTP_F32 || masters == MTP_BF16);
    mtp_drafter *created = calloc(1, sizeof *created);
    *drafter = NULL;
    if (!created) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a drafter");
    created->context = context;
    created->masters = masters;
    const mtp_status status = build(created, config, directory);
    if (status != MTP_OK) {
        mtp_drafter_free(created);
        return status;
    }
    *drafter = created;
    return MTP_OK;
}

void mtp_drafter_free(mtp_drafter *drafter)
{
    if (!drafter) return;
    const mtp_context *context = drafter->context;
    for (int64_t i = 0; i < drafter->num_params; i++) free(drafter->params[i].name);
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        context->ops->memory_free(context->device, drafter->inv_freq[type]);
    context->ops->memory_free(context->device, drafter->order);
    context->ops->memory_free(context->device, drafter->slot_of);
    context->ops->memory_free(context->device, drafter->values);
    context->ops->memory_free(context->device, drafter->shadows);
    context->ops->memory_free(context->device, drafter->grads);
    free(drafter->params);
    free(drafter->placed);
    free(drafter->layers);
    free(drafter->token_ordering);
    free(drafter->directory);
    mtp_drafter_config_free(&drafter->config);
    free(drafter);
}

/* ---- what callers see ----------------------------------------------------------------------------------------- */

const mtp_drafter_config *mtp_drafter_get_config(const mtp_drafter *drafter)
{
    return &drafter->config;
}

int64_t mtp_drafter_num_parameters(const mtp_drafter *drafter)
{
    return drafter->num_params;
}

mtp_parameter mtp_drafter_parameter(const mtp_drafter *drafter, int64_t index)
{
    const mtp__param *param = &drafter->params[index];
    return (mtp_parameter){.name = param->name,
                           .rank = param->rank,
                           .shape = {param->shape[0], param->shape[1]},
                           .stored = param->stored,
                           .trained = param->trained,
                           .dtype = param->dtype,
                           .value = param->value};
}

int64_t mtp_drafter_num_trained(const mtp_drafter *drafter)
{
    int64_t count = 0;
    for (int64_t i = 0; i < drafter->num_params; i++)
        if (drafter->params[i].trained) count += drafter->params[i].count;
    return count;
}

static mtp_status fail_no_match(const mtp_drafter *drafter, const char *pattern)
{
    mtp__text names = {0};
    for (int64_t i = 0; i < drafter->num_params; i++)
        mtp__text_add(&names, "%s%s", i ? ", " : "", drafter->params[i].name);
    const mtp_status status = MTP_FAIL(MTP_E_CONFIG, "freeze pattern \"%s\" matches no parameter; there are: %s",
                                       pattern, mtp__text_get(&names));
    mtp__text_free(&names);
    return status;
}

mtp_status mtp_drafter_freeze(mtp_drafter *drafter, const char *pattern)
{
    MTP_REQUIRE(drafter && pattern);
    if (drafter->grads)
        return MTP_FAIL(MTP_E_ARGUMENT, "mtp_drafter_freeze: called after a trainer was made; freeze before");
    int64_t matches = 0;
    for (int64_t i = 0; i < drafter->num_params; i++) {
        if (fnmatch(pattern, drafter->params[i].name, 0) != 0) continue;
        drafter->params[i].trained = false;
        matches++;
    }
    return matches ? MTP_OK : fail_no_match(drafter, pattern);
}

mtp_view mtp__param_value(const mtp__param *param)
{
    return mtp_view_nd(param->value, param->dtype, param->rank, param->shape);
}

mtp_view mtp__param_shadow(const mtp__param *param)
{
    return mtp_view_nd(param->shadow, MTP_BF16, param->rank, param->shape);
}

mtp_view mtp__param_factor(const mtp__param *param)
{
    return param->shadow ? mtp__param_shadow(param) : mtp__param_value(param);
}

mtp_view mtp__param_grad(const mtp__param *param)
{
    return mtp_view_nd(param->grad, MTP_F32, param->rank, param->shape);
}

/* ---- gradients ------------------------------------------------------------------------------------------------ */

mtp_status mtp__drafter_alloc_grads(mtp_drafter *drafter)
{
    int64_t floats = 0;
    if (drafter->grads)
        return MTP_FAIL(MTP_E_ARGUMENT, "gradients of this drafter exist already: one trainer a drafter");
    for (int64_t i = 0; i < drafter->num_params; i++)
        if (drafter->params[i].trained) floats += padded(drafter->params[i].count);
    if (floats == 0)
        return MTP_FAIL(MTP_E_CONFIG, "every parameter is frozen, nothing is left to train; freeze fewer patterns");
    MTP_TRY_AT(alloc_zeros(drafter->context, (size_t)floats * sizeof(float), &drafter->grads),
               "gradients of the drafter");
    drafter->num_grads = floats;
    float *next = drafter->grads;
    for (int64_t i = 0; i < drafter->num_params; i++) {
        mtp__param *param = drafter->placed[i];
        param->grad = param->trained ? next : NULL;
        if (param->trained) next += padded(param->count);
    }
    return MTP_OK;
}
