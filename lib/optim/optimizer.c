#include "optim/optimizer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "optim/share.h"

enum { ALIGN = 64 };

/* Bytes of one moment tensor, rounded so that the next one is aligned too. */
static size_t moment_size(const mtp__optim_tensor *tensor)
{
    const size_t bytes = (size_t)mtp_view_count(tensor->value) * sizeof(float);
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

void mtp__optimizer_plan(const mtp_context *context, const mtp__optim_tensor *tensors, int64_t num_tensors,
                         size_t *moment_bytes, size_t *scratch_bytes)
{
    *moment_bytes = 0;
    *scratch_bytes = 0;
    for (int64_t i = 0; i < num_tensors; i++) {
        const mtp_sumsq_args args = {.x = tensors[i].grad};
        const size_t scratch = context->ops->sumsq_scratch(context->device, &args);
        *moment_bytes += 2 * moment_size(&tensors[i]);
        if (scratch > *scratch_bytes) *scratch_bytes = scratch;
    }
}

static mtp_status check_tensor(const mtp__optim_tensor *tensor)
{
    const mtp_view *value = &tensor->value, *grad = &tensor->grad;
    bool same = value->rank == grad->rank && value->dtype == MTP_F32 && grad->dtype == MTP_F32;
    for (int32_t i = 0; same && i < value->rank; i++) same = value->shape[i] == grad->shape[i];
    if (!same || !value->data || !grad->data || mtp_view_count(*value) < 1)
        return MTP_FAIL(MTP_E_ARGUMENT, "optimizer: tensor %s: needs an F32 value and an F32 gradient of its shape",
                        tensor->name);
    return MTP_OK;
}

static mtp_status check_config(const mtp_adamw_config *c)
{
    MTP_REQUIRE(c->beta1 >= 0 && c->beta1 < 1);
    MTP_REQUIRE(c->beta2 >= 0 && c->beta2 < 1);
    MTP_REQUIRE(c->epsilon > 0 && isfinite(c->epsilon));
    MTP_REQUIRE(c->weight_decay >= 0 && isfinite(c->weight_decay));
    MTP_REQUIRE(c->max_grad_norm >= 0 && isfinite(c->max_grad_norm));
    return MTP_OK;
}

static mtp_view like(mtp_view view, char *memory)
{
    return mtp_view_nd(memory, MTP_F32, view.rank, view.shape);
}

/* Which tensors are measured, and which are updated here. */
static mtp_status list_tensors(mtp__optimizer *o, const mtp__optim_tensor *tensors, int64_t num_tensors,
                               const mtp__optim_rank *rank)
{
    const size_t count = (size_t)num_tensors;
    o->measured = malloc(count * sizeof *o->measured);
    o->tensors = malloc(count * sizeof *o->tensors);
    o->exp_avg = malloc(count * sizeof *o->exp_avg);
    o->exp_avg_sq = malloc(count * sizeof *o->exp_avg_sq);
    if (!o->measured || !o->tensors || !o->exp_avg || !o->exp_avg_sq)
        return MTP_FAIL(MTP_E_MEMORY, "out of memory for the optimizer");
    memcpy(o->measured, tensors, count * sizeof *tensors);
    o->num_measured = num_tensors;
    if (rank) {
        o->num_tensors = mtp__optim_share(tensors, num_tensors, rank, o->tensors);
    } else {
        memcpy(o->tensors, tensors, count * sizeof *tensors);
        o->num_tensors = num_tensors;
    }
    return MTP_OK;
}

static mtp_status allocate(mtp__optimizer *o)
{
    mtp_context *context = o->context;
    size_t scratch = 0, unused;
    mtp__optimizer_plan(context, o->measured, o->num_measured, &unused, &scratch);
    mtp__optimizer_plan(context, o->tensors, o->num_tensors, &o->moment_bytes, &unused);
    if (o->moment_bytes) {
        MTP_TRY_AT(context->ops->memory_alloc(context->device, o->moment_bytes, &o->moments), "optimizer moments");
        MTP_TRY(context->ops->memory_zero(context->device, o->moments, o->moment_bytes));
    }
    if (scratch)
        MTP_TRY_AT(context->ops->memory_alloc(context->device, scratch, &o->scratch.data), "optimizer scratch");
    o->scratch.size = scratch;
    char *next = o->moments;
    for (int64_t i = 0; i < o->num_tensors; i++) {
        o->exp_avg[i] = like(o->tensors[i].value, next);
        next += moment_size(&o->tensors[i]);
        o->exp_avg_sq[i] = like(o->tensors[i].value, next);
        next += moment_size(&o->tensors[i]);
    }
    return MTP_OK;
}

mtp_status mtp__optimizer_create(mtp_context *context, const mtp__optim_tensor *tensors, int64_t num_tensors,
                                 const mtp_adamw_config *config, mtp__optimizer **optimizer)
{
    return mtp__optimizer_create_share(context, tensors, num_tensors, config, NULL, optimizer);
}

mtp_status mtp__optimizer_create_share(mtp_context *context, const mtp__optim_tensor *tensors, int64_t num_tensors,
                                       const mtp_adamw_config *config, const mtp__optim_rank *rank,
                                       mtp__optimizer **optimizer)
{
    MTP_REQUIRE(context && tensors && num_tensors >= 1 && config && optimizer);
    MTP_REQUIRE(!rank || (rank->rank >= 0 && rank->rank < rank->world_size));
    *optimizer = NULL;
    MTP_TRY(check_config(config));
    for (int64_t i = 0; i < num_tensors; i++) MTP_TRY(check_tensor(&tensors[i]));
    mtp__optimizer *created = calloc(1, sizeof *created);
    if (!created) return MTP_FAIL(MTP_E_MEMORY, "out of memory for the optimizer");
    created->context = context;
    created->config = *config;
    mtp_status status = list_tensors(created, tensors, num_tensors, rank);
    if (status == MTP_OK) status = allocate(created);
    if (status != MTP_OK) {
        mtp__optimizer_free(created);
        return status;
    }
    *optimizer = created;
    return MTP_OK;
}

void mtp__optimizer_free(mtp__optimizer *o)
{
    if (!o) return;
    o->context->ops->memory_free(o->context->device, o->moments);
    o->context->ops->memory_free(o->context->device, o->scratch.data);
    free(o->measured);
    free(o->tensors);
    free(o->exp_avg);
    free(o->exp_avg_sq);
    free(o);
}

mtp_status mtp__optimizer_grad_norm(mtp__optimizer *o, double *norm)
{
    double total = 0;
    for (int64_t i = 0; i < o->num_measured; i++) {
        double sum = 0;
        const mtp_sumsq_args args = {.x = o->measured[i].grad, .result = &sum, .scratch = o->scratch};
        MTP_TRY_AT(o->context->ops->sumsq(o->context->device, &args), "gradient of %s", o->measured[i].name);
        total += sum;
    }
    *norm = sqrt(total);
    return MTP_OK;
}

double mtp__optimizer_clip(const mtp_adamw_config *config, double norm)
{
    if (config->max_grad_norm <= 0) return 1.0;
    const double factor = config->max_grad_norm / (norm + 1e-6);
    return factor < 1.0 ? factor : 1.0;
}

mtp_status mtp__optimizer_step(mtp__optimizer *o, double learning_rate, double grad_scale)
{
    for (int64_t i = 0; i < o->num_tensors; i++) {
        const mtp__optim_tensor *tensor = &o->tensors[i];
        const mtp_adamw_args args = {.p = tensor->value,
                                     .m = o->exp_avg[i],
                                     .v = o->exp_avg_sq[i],
                                     .g = tensor->grad,
                                     .lr = learning_rate,
                                     .beta1 = o->config.beta1,
                                     .beta2 = o->config.beta2,
                                     .eps = o->config.epsilon,
                                     .weight_decay = tensor->decays ? o->config.weight_decay : 0.0,
                                     .grad_scale = grad_scale,
                                     .step = o->step + 1};
        MTP_TRY_AT(o->context->ops->adamw(o->context->device, &args), "update of %s", tensor->name);
    }
    o->step++;
    return MTP_OK;
}
