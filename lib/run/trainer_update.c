/* One optimizer update. */
#include <math.h>
#include <string.h>

#include "run/plan.h"
#include "run/trainer.h"

/* This rank's micro-batches of the update: all of accumulation but at the end of a run given in epochs, whose last
 * update takes what is left; a rank may have none then. */
static int64_t batches_of(const mtp__trainer *t, int64_t done)
{
    const int64_t world_size = t->ranks->world_size;
    if (t->batches_left < 0) return t->accumulation;
    const int64_t left = t->batches_left - (done - t->begin.step) * t->accumulation * world_size;
    const int64_t own = left > t->ranks->rank ? (left - t->ranks->rank + world_size - 1) / world_size : 0;
    return own < t->accumulation ? own : t->accumulation;
}

static mtp__flight *flight_of(mtp__trainer *t, int64_t step)
{
    return &t->flights[step % (t->lag + 1)];
}

static void release_batches(mtp__trainer *t, mtp__flight *f)
{
    for (int64_t i = 0; i < f->held; i++) mtp_loader_release(t->loader, f->batches[i]);
    f->held = 0;
}

/* Fetch every micro-batch first: the loss is normalised by counts over all of them, on all ranks. */
static mtp_status fetch(mtp__trainer *t, int64_t done, mtp__flight *f)
{
    mtp__update *u = &f->update;
    const int64_t wanted = batches_of(t, done);
    for (int64_t i = 0; i < wanted; i++) {
        MTP_TRY(mtp_loader_next(t->loader, &f->batches[i], &u->epoch, &u->batch));
        f->held++;
        MTP_TRY(mtp__rows_build(f->batches[i], MTP__ROWS_SUPERVISED, NULL, &f->rows[i]));
        mtp__rows_count(&f->rows[i], u->counts);
        u->rows += f->rows[i].num_rows;
        u->tokens += f->batches[i]->document_end[f->batches[i]->num_documents - 1];
    }
    return MTP_OK;
}

/* What each rank has for the update. */
typedef struct share {
    int64_t stop;
    int64_t epoch, batch; /* of its last micro-batch; batch -1: it has none */
    int64_t rows, tokens;
    int64_t counts[MTP_MAX_SPECULATIVE_STEPS];
} share;

/* Own counts become those of all ranks. `status`: how fetching went here. */
static mtp_status share_counts(mtp__trainer *t, mtp_status status, mtp__flight *f, bool *stop)
{
    mtp__update *u = &f->update;
    share own = {
        .stop = *stop, .epoch = u->epoch, .batch = f->held ? u->batch : -1, .rows = u->rows, .tokens = u->tokens};
    memcpy(own.counts, u->counts, sizeof own.counts);
    MTP_TRY(mtp__ranks_exchange(t->ranks, status, &own, sizeof own));
    *u = (mtp__update){.step = u->step, .batch = -1};
    for (int rank = 0; rank < t->ranks->world_size; rank++) {
        const share *s = mtp__ranks_said(t->ranks, rank);
        *stop = *stop || s->stop;
        if (s->batch >= 0 && (s->epoch > u->epoch || (s->epoch == u->epoch && s->batch > u->batch))) {
            u->epoch = s->epoch;
            u->batch = s->batch;
        }
        u->rows += s->rows;
        u->tokens += s->tokens;
        for (int32_t k = 0; k < t->step_config.num_speculative_steps; k++) u->counts[k] += s->counts[k];
    }
    return MTP_OK;
}

static void add_sums(mtp__update *u, const mtp__step_sums *sums, int32_t K)
{
    for (int32_t k = 0; k < K; k++) {
        u->sums[k].loss += sums[k].loss;
        u->sums[k].centroid_loss += sums[k].centroid_loss;
        u->sums[k].count += sums[k].count;
        u->sums[k].correct += sums[k].correct;
        u->sums[k].missed += sums[k].missed;
    }
}

static void gradients_ready(void *user, int64_t final)
{
    mtp__buckets_ready(user, final);
}

/* Gradients of this rank's micro-batches, and their sums, which stay on the device. In the last of them the sum over
 * ranks begins. */
static mtp_status differentiate(mtp__trainer *t, mtp__flight *f)
{
    mtp_context *context = t->context;
    const mtp__step_watch watch = {.ready = gradients_ready, .user = t->buckets};
    MTP_TRY(mtp__step_begin_update(t->step));
    MTP_TRY(
        context->ops->memory_zero(context->device, t->drafter->grads, (size_t)t->drafter->num_grads * sizeof(float)));
    for (int64_t i = 0; i < f->held; i++) {
        mtp__step_set_watch(t->step, t->buckets && i + 1 == f->held ? &watch : NULL);
        MTP_TRY(mtp__step_run(t->step, f->batches[i], &f->rows[i], f->update.counts, NULL, NULL));
    }
    return MTP_OK;
}

/* Wait for the sums of the gradients, also for a rank whose own part failed: the others wait for it. */
static mtp_status finish_gradients(mtp__trainer *t, mtp_status status)
{
    if (!t->buckets) return status;
    if (status == MTP_OK) return mtp__buckets_finish(t->buckets);
    const mtp_error first = *mtp_last_error();
    (void)mtp__buckets_finish(t->buckets);
    return mtp__fail_again(&first);
}

/* This rank's sums, now. */
static mtp_status read_sums(mtp__trainer *t, mtp__flight *f, mtp__step_sums *sums)
{
    const mtp_view from = mtp__step_device_sums(t->step);
    MTP_TRY(t->context->ops->download(t->context->device, f->sums, from.data,
                                      (size_t)mtp_view_count(from) * sizeof *f->sums));
    mtp__step_sums_of(f->sums, t->step_config.num_speculative_steps, sums);
    return MTP_OK;
}

/* Own sums and gradients become those of all ranks; sums are added in the order of the ranks. `status`: how it went
 * here. */
static mtp_status share_results(mtp__trainer *t, mtp_status status, mtp__flight *f)
{
    mtp__update *u = &f->update;
    mtp__step_sums own[MTP_MAX_SPECULATIVE_STEPS] = {0};
    if (status == MTP_OK) status = read_sums(t, f, own);
    MTP_TRY(mtp__ranks_exchange(t->ranks, finish_gradients(t, status), own, sizeof own));
    for (int rank = 0; rank < t->ranks->world_size; rank++)
        add_sums(u, mtp__ranks_said(t->ranks, rank), t->step_config.num_speculative_steps);
    return MTP_OK;
}

/* This rank's samples, behind those of `list`. */
static mtp_status own_samples(const mtp__flight *f, mtp__sample_list *list)
{
    for (int64_t i = 0; i < f->held; i++)
        for (int64_t d = 0; d < f->batches[i]->num_documents; d++)
            MTP_TRY(mtp__sample_list_add(list, f->batches[i]->document_sample[d]));
    return MTP_OK;
}

/* Those of all ranks, into trainer->bad. Each says as many as the one with the most: -1 where it has no more. */
static mtp_status note_samples(mtp__trainer *t, const mtp__flight *f)
{
    mtp__sample_list own = {0};
    int64_t most = 0;
    mtp_status status = own_samples(f, &own);
    status = mtp__ranks_exchange(t->ranks, status, &own.count, sizeof own.count);
    for (int rank = 0; status == MTP_OK && rank < t->ranks->world_size; rank++) {
        const int64_t count = *(const int64_t *)mtp__ranks_said(t->ranks, rank);
        if (count > most) most = count;
    }
    while (status == MTP_OK && own.count < most) status = mtp__sample_list_add(&own, -1);
    status = mtp__ranks_exchange(t->ranks, status, own.samples, (size_t)most * sizeof *own.samples);
    mtp__sample_list_free(&own);
    for (int rank = 0; status == MTP_OK && rank < t->ranks->world_size; rank++) {
        const int64_t *samples = mtp__ranks_said(t->ranks, rank);
        for (int64_t i = 0; status == MTP_OK && i < most && samples[i] >= 0; i++)
            status = mtp__sample_list_add(&t->bad, samples[i]);
    }
    return status;
}

static void take_result(mtp__update *u, const mtp__optim_result *result)
{
    u->grad_norm = result->norm;
    u->bad = result->skipped;
    if (!u->bad) u->learning_rate = result->learning_rate;
}

/* The values that each rank has updated, to all, where their shadows are renewed. */
static mtp_status share_values(mtp__trainer *t, mtp_status status)
{
    const mtp__optimizer *o = t->optimizer;
    if (!t->sharded_moments) return status;
    MTP_TRY(mtp__ranks_agree(t->ranks, status));
    for (int64_t i = 0; i < o->num_stretches; i++) {
        const mtp__optim_stretch *s = &o->stretches[i];
        const size_t bytes = (size_t)mtp_view_count(s->value) * mtp_dtype_size(s->value.dtype);
        const mtp_convert_args renew = {.src = s->value, .dst = s->shadow};
        MTP_TRY(mtp__broadcast_values(t->device_comm, t->context, t->staged, s->value.data, bytes, s->root));
        if (s->shadow.data && s->root != t->ranks->rank) MTP_TRY(t->context->ops->convert(t->context->device, &renew));
    }
    return MTP_OK;
}

/* With several ranks: all of a step, which is skipped on all when loss or gradient norm are not finite. */
static mtp_status step_together(mtp__trainer *t, int64_t done, mtp__flight *f)
{
    mtp__update *u = &f->update;
    mtp__optim_result result = {0};
    MTP_TRY(share_results(t, differentiate(t, f), f));
    u->loss = mtp__step_total(&t->step_config, u->sums, u->counts);
    const mtp__optim_update step = {.learning_rate = mtp__schedule_lr(&t->schedule, done), .skip = !isfinite(u->loss)};
    mtp_status status = mtp__optimizer_step(t->optimizer, &step);
    if (status == MTP_OK) status = mtp__optimizer_read(t->optimizer, &result);
    take_result(u, &result);
    return status == MTP_OK && u->bad ? MTP_OK : share_values(t, status);
}

/* Alone: the same, and what brings the results to the host; nothing waits. The device skips the step itself, when one
 * of the sums that make the loss, or the norm, is not finite. */
static mtp_status step_alone(mtp__trainer *t, int64_t done, mtp__flight *f)
{
    const mtp_backend *ops = t->context->ops;
    mtp_device *device = t->context->device;
    const mtp_view sums = mtp__step_device_sums(t->step);
    const size_t count = (size_t)mtp_view_count(sums);
    const mtp__optim_update step = {.learning_rate = mtp__schedule_lr(&t->schedule, done),
                                    .watch = mtp_view_1d(sums.data, MTP_F64, (int64_t)count)};
    MTP_TRY(differentiate(t, f));
    MTP_TRY(mtp__optimizer_step(t->optimizer, &step));
    MTP_TRY(ops->download_async(device, f->sums, sums.data, count * sizeof *f->sums));
    MTP_TRY(ops->download_async(device, f->control, t->optimizer->control.data, MTP_CONTROL * sizeof *f->control));
    return ops->mark(device, &f->mark);
}

static mtp_status read_alone(mtp__trainer *t, mtp__flight *f)
{
    mtp__update *u = &f->update;
    MTP_TRY(t->context->ops->mark_wait(t->context->device, f->mark));
    mtp__step_sums_of(f->sums, t->step_config.num_speculative_steps, u->sums);
    u->loss = mtp__step_total(&t->step_config, u->sums, u->counts);
    const mtp__optim_result result = mtp__optim_result_of(f->control);
    take_result(u, &result);
    return MTP_OK;
}

static mtp_status launch(mtp__trainer *t, int64_t done, mtp__flight *f, bool *stop)
{
    const bool alone = t->ranks->world_size == 1;
    if (*stop && alone) return MTP_OK; /* data that may not come is not waited for */
    MTP_TRY(share_counts(t, fetch(t, done, f), f, stop));
    if (*stop) return MTP_OK;
    return alone ? step_alone(t, done, f) : step_together(t, done, f);
}

mtp_status mtp__trainer_launch(mtp__trainer *t, int64_t done, bool stop, bool *stopped)
{
    MTP_REQUIRE(mtp__trainer_flying(t) <= t->lag);
    mtp__flight *f = flight_of(t, t->launched);
    f->update = (mtp__update){.step = done + 1};
    *stopped = stop;
    MTP_TRY(mtp__plan_explain(t->plan, launch(t, done, f, stopped)));
    if (*stopped)
        release_batches(t, f);
    else
        t->launched++;
    return MTP_OK;
}

int64_t mtp__trainer_flying(const mtp__trainer *t)
{
    return t->launched - t->read;
}

mtp_status mtp__trainer_read(mtp__trainer *t, mtp__update *update)
{
    MTP_REQUIRE(mtp__trainer_flying(t) > 0);
    mtp__flight *f = flight_of(t, t->read++);
    t->bad.count = 0;
    mtp_status status = t->ranks->world_size == 1 ? mtp__plan_explain(t->plan, read_alone(t, f)) : MTP_OK;
    *update = f->update;
    if (status == MTP_OK && update->bad) status = note_samples(t, f);
    release_batches(t, f);
    return status;
}
