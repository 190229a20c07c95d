#include "optim/optimizer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "optim/share.h"

enum { ALIGN = 64 };

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static mtp_status no_memory(void)
{
    return MTP_FAIL(MTP_E_MEMORY, "out of memory for the optimizer");
}

/* ---- what is asked for ---------------------------------------------------------------------------------------- */

static bool same_shape(const mtp_view *a, const mtp_view *b)
{
    bool same = a->rank == b->rank;
    for (int32_t i = 0; same && i < a->rank; i++) same = a->shape[i] == b->shape[i];
    return same;
}

static mtp_status check_tensor(const mtp__optim_tensor *tensor)
{
    const mtp_view *value = &tensor->value, *grad = &tensor->grad, *shadow = &tensor->shadow;
    const bool rounded = value->dtype == MTP_BF16;
    if ((!rounded && value->dtype != MTP_F32) || grad->dtype != MTP_F32 || !same_shape(value, grad) || !value->data ||
        !grad->data || mtp_view_count(*value) < 1)
        return MTP_FAIL(MTP_E_ARGUMENT,
                        "optimizer: tensor %s: needs an F32 or BF16 value and an F32 gradient of its shape",
                        tensor->name);
    if (shadow->data && (rounded || shadow->dtype != MTP_BF16 || !same_shape(value, shadow)))
        return MTP_FAIL(MTP_E_ARGUMENT, "optimizer: tensor %s: a shadow is BF16, of an F32 value and of its shape",
                        tensor->name);
    if (tensor->place < 0 || tensor->place % MTP__OPTIM_GRAIN != 0)
        return MTP_FAIL(MTP_E_ARGUMENT, "optimizer: tensor %s: place %lld is no multiple of %d", tensor->name,
                        (long long)tensor->place, (int)MTP__OPTIM_GRAIN);
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

/* ---- sizes ---------------------------------------------------------------------------------------------------- */

static int64_t places_of(const mtp__optim_tensor *tensors, int64_t num_tensors)
{
    int64_t places = 0;
    for (int64_t i = 0; i < num_tensors; i++) places += mtp__optim_padded(mtp_view_count(tensors[i].value));
    return places;
}

/* Device memory: moments, and control block, marks and scratch behind each other. */
typedef struct sizes {
    size_t moments; /* of either kind */
    size_t control, marks, scratch;
} sizes;

static sizes sizes_of(const mtp_context *context, int64_t own, int64_t measured)
{
    const mtp_sumsq_args args = {.x = mtp_view_1d(NULL, MTP_F32, measured)};
    return (sizes){.moments = aligned((size_t)own * sizeof(float)),
                   .control = aligned(MTP_CONTROL * sizeof(double)),
                   .marks = aligned((size_t)own / MTP__OPTIM_GRAIN),
                   .scratch = aligned(context->ops->sumsq_scratch(context->device, &args))};
}

static size_t extra_of(const sizes *s)
{
    return s->control + s->marks + s->scratch;
}

mtp_status mtp__optimizer_plan(const mtp_context *context, const mtp__optim_tensor *tensors, int64_t num_tensors,
                               const mtp__optim_rank *rank, size_t *moment_bytes, size_t *extra_bytes)
{
    const int64_t measured = places_of(tensors, num_tensors);
    int64_t own = measured;
    if (rank) {
        mtp__optim_tensor *parts = calloc((size_t)num_tensors, sizeof *parts);
        if (!parts) return no_memory();
        own = places_of(parts, mtp__optim_share(tensors, num_tensors, rank, parts));
        free(parts);
    }
    const sizes s = sizes_of(context, own, measured);
    *moment_bytes = 2 * s.moments;
    *extra_bytes = extra_of(&s);
    return MTP_OK;
}

/* ---- creation ------------------------------------------------------------------------------------------------- */

/* Values [0, count) from where a view begins. */
static mtp_view stretch(const mtp_view *view, int64_t count)
{
    return mtp_view_1d(view->data, view->dtype, count);
}

/* Which tensors are updated here. */
static mtp_status list_tensors(mtp__optimizer *o, const mtp__optim_tensor *tensors, int64_t num_tensors,
                               const mtp__optim_rank *rank)
{
    const size_t count = (size_t)num_tensors;
    o->tensors = malloc(count * sizeof *o->tensors);
    o->exp_avg = malloc(count * sizeof *o->exp_avg);
    o->exp_avg_sq = malloc(count * sizeof *o->exp_avg_sq);
    o->spans = calloc(count, sizeof *o->spans);
    o->measured = calloc(count, sizeof *o->measured);
    if (!o->tensors || !o->exp_avg || !o->exp_avg_sq || !o->spans || !o->measured) return no_memory();
    memcpy(o->tensors, tensors, count * sizeof *tensors);
    o->num_tensors = rank ? mtp__optim_share(tensors, num_tensors, rank, o->tensors) : num_tensors;
    return MTP_OK;
}

/* What the norm is of: gradients that lie behind each other as one, whatever became of their values. */
static void list_measured(mtp__optimizer *o, const mtp__optim_tensor *tensors, int64_t num_tensors)
{
    for (int64_t i = 0; i < num_tensors; i++) {
        const int64_t count = mtp_view_count(tensors[i].grad);
        mtp_view *last = o->num_measured ? &o->measured[o->num_measured - 1] : NULL;
        if (last && mtp__optim_behind(last, &tensors[i].grad))
            *last = stretch(last, mtp__optim_padded(mtp_view_count(*last)) + count);
        else
            o->measured[o->num_measured++] = stretch(&tensors[i].grad, count);
    }
}

/* What each rank hands to the others. */
static mtp_status list_stretches(mtp__optimizer *o, const mtp__optim_tensor *tensors, int64_t num_tensors,
                                 int64_t world_size)
{
    mtp__optim_tensor *parts = calloc((size_t)num_tensors, sizeof *parts);
    o->stretches = calloc((size_t)(num_tensors + world_size), sizeof *o->stretches); /* each cut makes one more */
    if (!parts || !o->stretches) {
        free(parts);
        return no_memory();
    }
    for (int64_t root = 0; root < world_size; root++) {
        const mtp__optim_rank owner = {.rank = root, .world_size = world_size};
        const int64_t num_parts = mtp__optim_share(tensors, num_tensors, &owner, parts);
        for (int64_t i = 0, next, count; i < num_parts; i = next) {
            next = mtp__optim_neighbours(parts, num_parts, i, &count);
            o->stretches[o->num_stretches++] = (mtp__optim_stretch){.root = (int)root,
                                                                    .value = stretch(&parts[i].value, count),
                                                                    .shadow = stretch(&parts[i].shadow, count)};
        }
    }
    free(parts);
    return MTP_OK;
}

static mtp_status allocate(mtp__optimizer *o, int64_t measured)
{
    mtp_context *context = o->context;
    const sizes s = sizes_of(context, places_of(o->tensors, o->num_tensors), measured);
    o->moment_bytes = 2 * s.moments;
    o->extra_bytes = extra_of(&s);
    if (o->moment_bytes) {
        MTP_TRY_AT(context->ops->memory_alloc(context->device, o->moment_bytes, &o->moments), "optimizer moments");
        MTP_TRY(context->ops->memory_zero(context->device, o->moments, o->moment_bytes));
    }
    MTP_TRY_AT(context->ops->memory_alloc(context->device, o->extra_bytes, &o->extra), "optimizer");
    MTP_TRY(context->ops->memory_zero(context->device, o->extra, o->extra_bytes));
    o->control = mtp_view_1d(o->extra, MTP_F64, MTP_CONTROL);
    o->scratch = (mtp_scratch){.data = (char *)o->extra + s.control + s.marks, .size = s.scratch};
    return MTP_OK;
}

/* The moments in the order of the list, in places as the values have them. */
static void place_moments(mtp__optimizer *o)
{
    float *first = o->moments, *second = first + o->moment_bytes / 2 / sizeof(float);
    for (int64_t i = 0; i < o->num_tensors; i++) {
        const mtp_view *value = &o->tensors[i].value;
        const int64_t places = mtp__optim_padded(mtp_view_count(*value));
        o->exp_avg[i] = mtp_view_nd(first, MTP_F32, value->rank, value->shape);
        o->exp_avg_sq[i] = mtp_view_nd(second, MTP_F32, value->rank, value->shape);
        first += places;
        second += places;
    }
}

/* Where weight decay applies, a byte for 16 values, for the spans in which it does here and there. */
static mtp_status mark_decay(mtp__optimizer *o, mtp__optim_span *span, int64_t first, int64_t end, uint8_t *device)
{
    const mtp_context *context = o->context;
    const int64_t grains = (mtp_view_count(span->value) + MTP__OPTIM_GRAIN - 1) / MTP__OPTIM_GRAIN;
    bool any = false, all = true;
    for (int64_t i = first; i < end; i++) {
        any = any || o->tensors[i].decays;
        all = all && o->tensors[i].decays;
    }
    span->weight_decay = any ? o->config.weight_decay : 0;
    if (all || span->weight_decay == 0) return MTP_OK;
    uint8_t *marks = malloc((size_t)grains), *next = marks;
    if (!marks) return no_memory();
    for (int64_t i = first; i < end; i++) {
        const size_t count = (size_t)(mtp__optim_padded(mtp_view_count(o->tensors[i].value)) / MTP__OPTIM_GRAIN);
        memset(next, o->tensors[i].decays, count);
        next += count;
    }
    const mtp_status status = context->ops->upload(context->device, device, marks, (size_t)grains);
    span->decays = mtp_view_1d(device, MTP_U8, grains);
    free(marks);
    return status;
}

static mtp_status list_spans(mtp__optimizer *o)
{
    uint8_t *marks = (uint8_t *)o->extra + aligned(MTP_CONTROL * sizeof(double));
    int64_t count;
    for (int64_t i = 0, next; i < o->num_tensors; i = next) {
        const mtp__optim_tensor *t = &o->tensors[i];
        mtp__optim_span *span = &o->spans[o->num_spans++];
        next = mtp__optim_neighbours(o->tensors, o->num_tensors, i, &count);
        *span = (mtp__optim_span){.name = t->name,
                                  .place = t->place,
                                  .value = stretch(&t->value, count),
                                  .grad = stretch(&t->grad, count),
                                  .shadow = stretch(&t->shadow, count),
                                  .exp_avg = stretch(&o->exp_avg[i], count),
                                  .exp_avg_sq = stretch(&o->exp_avg_sq[i], count)};
        MTP_TRY(mark_decay(o, span, i, next, marks));
        marks += mtp__optim_padded(count) / MTP__OPTIM_GRAIN;
    }
    return MTP_OK;
}

static mtp_status build(mtp__optimizer *o, const mtp__optim_tensor *tensors, int64_t num_tensors,
                        const mtp__optim_rank *rank)
{
    MTP_TRY(list_tensors(o, tensors, num_tensors, rank));
    list_measured(o, tensors, num_tensors);
    if (rank) MTP_TRY(list_stretches(o, tensors, num_tensors, rank->world_size));
    MTP_TRY(allocate(o, places_of(tensors, num_tensors)));
    place_moments(o);
    return list_spans(o);
}

mtp_status mtp__optimizer_create(mtp_context *context, const mtp__optim_tensor *tensors, int64_t num_tensors,
                                 const mtp_adamw_config *config, const mtp__optim_rank *rank,
                                 mtp__optimizer **optimizer)
{
    MTP_REQUIRE(context && tensors && num_tensors >= 1 && config && optimizer);
    MTP_REQUIRE(!rank || (rank->rank >= 0 && rank->rank < rank->world_size));
    *optimizer = NULL;
    MTP_TRY(check_config(config));
    for (int64_t i = 0; i < num_tensors; i++) MTP_TRY(check_tensor(&tensors[i]));
    mtp__optimizer *created = calloc(1, sizeof *created);
    if (!created) return no_memory();
    created->context = context;
    created->config = *config;
    const mtp_status status = build(created, tensors, num_tensors, rank);
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
    o->context->ops->memory_free(o->context->device, o->extra);
    free(o->tensors);
    free(o->exp_avg);
    free(o->exp_avg_sq);
    free(o->spans);
    free(o->measured);
    free(o->stretches);
    free(o);
}

/* ---- an update ------------------------------------------------------------------------------------------------ */

static mtp_status measure(mtp__optimizer *o)
{
    const mtp_view sum = mtp_view_1d((double *)o->control.data + MTP_CONTROL_SUM, MTP_F64, 1);
    for (int64_t i = 0; i < o->num_measured; i++) {
        const mtp_sumsq_args args = {
            .x = o->measured[i], .result = sum, .write = i ? MTP_ACCUMULATE : MTP_OVERWRITE, .scratch = o->scratch};
        MTP_TRY_AT(o->context->ops->sumsq(o->context->device, &args), "gradient norm");
    }
    return MTP_OK;
}

mtp_status mtp__optimizer_step(mtp__optimizer *o, const mtp__optim_update *update)
{
    const mtp_adamw_config *c = &o->config;
    const mtp_clip_args clip = {.control = o->control,
                                .watch = update->watch,
                                .lr = update->learning_rate,
                                .max_norm = c->max_grad_norm,
                                .beta1 = c->beta1,
                                .beta2 = c->beta2,
                                .skip = update->skip};
    MTP_TRY(measure(o));
    MTP_TRY_AT(o->context->ops->clip(o->context->device, &clip), "optimizer");
    for (int64_t i = 0; i < o->num_spans; i++) {
        const mtp__optim_span *span = &o->spans[i];
        const mtp_adamw_args args = {.p = span->value,
                                     .m = span->exp_avg,
                                     .v = span->exp_avg_sq,
                                     .g = span->grad,
                                     .shadow = span->shadow,
                                     .decays = span->decays,
                                     .control = o->control,
                                     .beta1 = c->beta1,
                                     .beta2 = c->beta2,
                                     .eps = c->epsilon,
                                     .weight_decay = span->weight_decay,
                                     .seed = c->seed,
                                     .place = span->place};
        MTP_TRY_AT(o->context->ops->adamw(o->context->device, &args), "update from %s on", span->name);
    }
    return MTP_OK;
}

mtp__optim_result mtp__optim_result_of(const double control[MTP_CONTROL])
{
    return (mtp__optim_result){.learning_rate = control[MTP_CONTROL_LR],
                               .norm = control[MTP_CONTROL_NORM],
                               .factor = control[MTP_CONTROL_FACTOR],
                               .step = (int64_t)control[MTP_CONTROL_STEP],
                               .skipped = control[MTP_CONTROL_SKIP] != 0};
}

mtp_status mtp__optimizer_read(mtp__optimizer *o, mtp__optim_result *result)
{
    double control[MTP_CONTROL];
    MTP_TRY_AT(o->context->ops->download(o->context->device, control, o->control.data, sizeof control), "optimizer");
    *result = mtp__optim_result_of(control);
    return MTP_OK;
}

mtp_status mtp__optimizer_set_step(mtp__optimizer *o, int64_t step)
{
    const double value = (double)step;
    return o->context->ops->upload(o->context->device, (double *)o->control.data + MTP_CONTROL_STEP, &value,
                                   sizeof value);
}
