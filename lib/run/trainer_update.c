/* One optimizer update. */
#include <math.h>

#include "run/trainer.h"

/* Micro-batches of the update: all of accumulation but at the end of a run given in epochs, which takes what is left.
 */
static int64_t batches_of(const mtp__trainer *t, int64_t done)
{
    const int64_t left = t->total_batches - done * t->accumulation;
    return t->total_batches > 0 && left < t->accumulation ? left : t->accumulation;
}

static void release_batches(mtp__trainer *t)
{
    for (int64_t i = 0; i < t->held; i++) mtp_loader_release(t->loader, t->batches[i]);
    t->held = 0;
}

/* Fetch every micro-batch first: the loss is normalised by counts over all of them. */
static mtp_status fetch(mtp__trainer *t, int64_t done, mtp__update *u)
{
    const int64_t wanted = batches_of(t, done);
    for (int64_t i = 0; i < wanted; i++) {
        MTP_TRY(mtp_loader_next(t->loader, &t->batches[i], &u->epoch, &u->batch));
        t->held++;
        MTP_TRY(mtp__rows_build(t->batches[i], MTP__ROWS_SUPERVISED, NULL, &t->rows[i]));
        mtp__rows_count(&t->rows[i], u->counts);
        u->rows += t->rows[i].num_rows;
        u->tokens += t->batches[i]->document_end[t->batches[i]->num_documents - 1];
    }
    return MTP_OK;
}

static mtp_status differentiate(mtp__trainer *t, mtp__update *u)
{
    mtp_context *context = t->context;
    mtp__step_sums sums[MTP_MAX_SPECULATIVE_STEPS];
    MTP_TRY(
        context->ops->memory_zero(context->device, t->drafter->grads, (size_t)t->drafter->num_grads * sizeof(float)));
    for (int64_t i = 0; i < t->held; i++) {
        MTP_TRY(mtp__step_run(t->step, t->batches[i], &t->rows[i], u->counts, sums, NULL));
        for (int32_t k = 0; k < t->step_config.num_speculative_steps; k++) {
            u->sums[k].loss += sums[k].loss;
            u->sums[k].centroid_loss += sums[k].centroid_loss;
            u->sums[k].count += sums[k].count;
            u->sums[k].correct += sums[k].correct;
            u->sums[k].missed += sums[k].missed;
        }
    }
    u->loss = mtp__step_total(&t->step_config, u->sums, u->counts);
    return MTP_OK;
}

static mtp_status note_samples(mtp__trainer *t)
{
    for (int64_t i = 0; i < t->held; i++)
        for (int64_t d = 0; d < t->batches[i]->num_documents; d++)
            MTP_TRY(mtp__sample_list_add(&t->bad, t->batches[i]->document_sample[d]));
    return MTP_OK;
}

/* Is the step to be skipped: the one place that decides, when its gradients are complete and before anything is
 * changed. */
static mtp_status judge(mtp__trainer *t, mtp__update *u)
{
    t->bad.count = 0;
    u->bad = !isfinite(u->loss) || !isfinite(u->grad_norm);
    return u->bad ? note_samples(t) : MTP_OK;
}

static mtp_status update(mtp__trainer *t, int64_t done, mtp__update *u)
{
    MTP_TRY(fetch(t, done, u));
    MTP_TRY(differentiate(t, u));
    MTP_TRY(mtp__optimizer_grad_norm(t->optimizer, &u->grad_norm));
    MTP_TRY(judge(t, u));
    if (u->bad) return MTP_OK;
    u->learning_rate = mtp__schedule_lr(&t->schedule, done);
    return mtp__optimizer_step(t->optimizer, u->learning_rate,
                               mtp__optimizer_clip(&t->optimizer->config, u->grad_norm));
}

mtp_status mtp__trainer_update(mtp__trainer *t, int64_t done, mtp__update *u)
{
    *u = (mtp__update){.step = done + 1};
    const mtp_status status = update(t, done, u);
    release_batches(t);
    return status;
}
