/* Opening what a run needs, in the order in which the parts depend on each other. */
#include "run/trainer.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "model/embedding.h"
#include "model/weights.h"
#include "run/config.h"
#include "run/evaluate.h"
#include "run/plan.h"
#include "run/trained.h"

static mtp_status no_memory(void)
{
    return MTP_FAIL(MTP_E_MEMORY, "out of memory for the trainer");
}

uint64_t mtp__trainer_verifier_fingerprint(const mtp_verifier *verifier)
{
    enum { ROWS = 64 };
    const mtp_view table = mtp_verifier_embedding(verifier);
    const int64_t shape[3] = {table.shape[0], table.shape[1], (int64_t)table.dtype};
    const size_t row = (size_t)table.shape[1] * mtp_dtype_size(table.dtype);
    uint64_t hash = mtp__fnv1a(MTP__FNV_START, shape, sizeof shape);
    hash = mtp__fnv1a(hash, mtp_verifier_norm(verifier), (size_t)table.shape[1] * sizeof(float));
    for (int64_t i = 0; i < ROWS; i++) {
        const int64_t r = i * (table.shape[0] - 1) / (ROWS - 1);
        hash = mtp__fnv1a(hash, (const char *)table.data + (size_t)r * row, row);
    }
    return hash;
}

/* ---- model ---------------------------------------------------------------------------------------------------- */

/* Before anything is allocated: does all of it fit, and the verifier's table too. */
static mtp_status plan_memory(mtp__trainer *t)
{
    const mtp_view table = mtp_verifier_embedding(t->verifier);
    const mtp__plan_verifier known = {.config = mtp_verifier_get_config(t->verifier),
                                      .embedding_value = mtp_dtype_size(table.dtype)};
    mtp_drafter_config drafter = {0};
    if (t->context->ops->memory_is_host) return MTP_OK;
    MTP_TRY(mtp_drafter_config_read(t->config->drafter, &drafter));
    const mtp_status status = mtp__plan_of(t->config, &drafter, &known, t->ranks->world_size, t->context, &t->plan);
    mtp_drafter_config_free(&drafter);
    MTP_TRY(status);
    MTP_TRY(mtp__plan_check(t->plan));
    mtp__plan_log_embedding(t->plan, t->logger);
    return MTP_OK;
}

static mtp_status open_model(mtp__trainer *t)
{
    const mtp_train_config *c = t->config;
    const mtp_context_options options = mtp__config_context(c, t->logger);
    MTP_TRY(mtp_context_create(&options, &t->context));
    t->lag = mtp__trainer_lag(t->context->ops->memory_is_host, t->ranks->world_size);
    MTP_TRY(mtp_verifier_open(c->verifier, *c->embedding_from ? c->embedding_from : NULL, &t->verifier));
    MTP_TRY(plan_memory(t));
    MTP_TRY(mtp__drafter_load(t->context, c->drafter, mtp__config_masters(c), &t->drafter));
    MTP_TRY_AT(mtp_verifier_check_drafter(t->verifier, mtp_drafter_get_config(t->drafter)), "drafter %s", c->drafter);
    if (t->plan && t->plan->embedding_on_device) {
        MTP_TRY(mtp__embedding_hold(t->drafter, t->verifier));
        t->holds_embedding = true;
    }
    for (int64_t i = 0; i < c->freeze.count; i++) {
        if (mtp_drafter_freeze(t->drafter, c->freeze.items[i]) != MTP_OK)
            return mtp__config_fail(c, "freeze", "%s", mtp_last_error()->message);
    }
    return MTP_OK;
}

/* Indices of patterns that exclude a parameter are marked in `used`. */
static bool excluded(const mtp_strings *patterns, const char *name, bool *used)
{
    bool match = false;
    for (int64_t i = 0; i < patterns->count; i++) {
        if (fnmatch(patterns->items[i], name, 0) != 0) continue;
        used[i] = true;
        match = true;
    }
    return match;
}

/* The trained parameters in their order in memory; free(*tensors). A pattern of no_decay that matches nothing is
 * MTP_E_CONFIG. */
static mtp_status trained_tensors(const mtp_train_config *config, const mtp_drafter *drafter,
                                  mtp__optim_tensor **tensors, int64_t *count)
{
    const mtp_strings *patterns = &config->no_decay;
    mtp__optim_tensor *list = calloc((size_t)drafter->num_params + 1, sizeof *list);
    bool *used = calloc((size_t)patterns->count + 1, sizeof *used);
    mtp_status status = list && used ? MTP_OK : no_memory();
    *count = 0;
    for (int64_t i = 0; status == MTP_OK && i < drafter->num_params; i++) {
        const mtp__param *param = drafter->placed[i];
        const bool exempt = excluded(patterns, param->name, used);
        if (!param->trained) continue;
        mtp__optim_tensor *tensor = &list[(*count)++];
        *tensor = mtp__trained_tensor(param);
        tensor->decays = tensor->decays && !exempt;
    }
    for (int64_t i = 0; status == MTP_OK && i < patterns->count; i++)
        if (!used[i])
            status = mtp__config_fail(
                config, "no_decay", "pattern \"%s\" matches no parameter (mtp inspect lists them)", patterns->items[i]);
    free(used);
    if (status != MTP_OK) {
        free(list);
        return status;
    }
    *tensors = list;
    return MTP_OK;
}

static mtp_status open_optimizer(mtp__trainer *t)
{
    mtp__optim_tensor *tensors = NULL;
    int64_t count = 0;
    const mtp_adamw_config adamw = mtp__config_adamw(t->config);
    const mtp__optim_rank own = {.rank = t->ranks->rank, .world_size = t->ranks->world_size};
    t->sharded_moments = t->config->zero_stage > 0 && t->ranks->world_size > 1;
    MTP_TRY(mtp__drafter_alloc_grads(t->drafter));
    MTP_TRY(trained_tensors(t->config, t->drafter, &tensors, &count));
    const mtp_status status =
        mtp__optimizer_create(t->context, tensors, count, &adamw, t->sharded_moments ? &own : NULL, &t->optimizer);
    free(tensors);
    return status;
}

/* ---- data ----------------------------------------------------------------------------------------------------- */

static mtp_status open_dataset(const mtp__trainer *t, const mtp_strings *paths, const double *weights, mtp_split side,
                               mtp_dataset **dataset)
{
    const mtp_dataset_options options = {.hidden_norm = (mtp_hidden_norm)t->config->hidden_norm,
                                         .logger = t->logger,
                                         .split = side,
                                         .validation_share = t->config->validation_share,
                                         .weights = weights};
    return mtp_dataset_open((const char *const *)paths->items, paths->count, t->verifier, &options, dataset);
}

/* train_data or sources. What is held out of sources is not mixed: an evaluation looks at every document once. */
static mtp_status open_training(const mtp__trainer *t, mtp_split side, mtp_dataset **dataset)
{
    const mtp_sources *sources = &t->config->sources;
    const size_t count = (size_t)sources->count;
    if (count == 0) {
        MTP_TRY_AT(open_dataset(t, &t->config->train_data, NULL, side, dataset), "train_data");
        return MTP_OK;
    }
    mtp_strings paths = {.items = calloc(count, sizeof *paths.items), .count = sources->count};
    double *weights = calloc(count, sizeof *weights);
    mtp_status status = paths.items && weights ? MTP_OK : no_memory();
    for (size_t i = 0; i < count && status == MTP_OK; i++) {
        paths.items[i] = sources->items[i].path;
        weights[i] = sources->items[i].weight;
    }
    if (status == MTP_OK)
        status = open_dataset(t, &paths, side == MTP_SPLIT_VALIDATION ? NULL : weights, side, dataset);
    free(paths.items);
    free(weights);
    return status == MTP_OK ? MTP_OK : mtp__fail_prefix(status, "sources");
}

/* The loader's ring in memory that the device copies from as fast as it can. */
static void *ring_alloc(void *user, size_t size)
{
    const mtp_context *context = user;
    void *memory = NULL;
    return context->ops->host_alloc(context->device, size, &memory) == MTP_OK ? memory : NULL;
}

static void ring_free(void *user, void *memory, size_t size)
{
    const mtp_context *context = user;
    (void)size;
    context->ops->host_free(context->device, memory);
}

static mtp_status open_data(mtp__trainer *t)
{
    const mtp_train_config *c = t->config;
    const mtp_allocator pinned = {ring_alloc, ring_free, t->context};
    /* an update holds all its micro-batches at once, their counts normalise the loss, until its results are read */
    const int64_t held = c->gradient_accumulation_steps * (1 + t->lag);
    const mtp_loader_options options = {.tokens_per_batch = c->tokens_per_batch,
                                        .overlong = (mtp_overlong)c->overlong,
                                        .shuffle = c->shuffle,
                                        .seed = (uint64_t)c->seed,
                                        .world_size = t->ranks->world_size,
                                        .rank = t->ranks->rank,
                                        .num_speculative_steps = c->num_speculative_steps,
                                        .prefetch = c->prefetch + held - 1,
                                        .num_workers = c->num_workers,
                                        .direct_io = (mtp_direct_io)c->direct_io,
                                        .allocator = t->context->ops->memory_is_host ? NULL : &pinned,
                                        .logger = t->logger};
    const bool split = c->validation_share > 0;
    MTP_TRY(open_training(t, split ? MTP_SPLIT_TRAINING : MTP_SPLIT_NONE, &t->train_data));
    if (split)
        MTP_TRY(open_training(t, MTP_SPLIT_VALIDATION, &t->eval_data));
    else if (c->eval_data.count)
        MTP_TRY_AT(open_dataset(t, &c->eval_data, NULL, MTP_SPLIT_NONE, &t->eval_data), "eval_data");
    return mtp_loader_create(t->train_data, &options, &t->loader);
}

/* How many updates the run has: those done, whatever the number of ranks was then, and those of the batches left. */
static mtp_status plan_length(mtp__trainer *t)
{
    const mtp_train_config *c = t->config;
    const int64_t global = t->accumulation * t->ranks->world_size;
    int64_t steps = c->max_steps;
    t->batches_left = c->num_train_epochs > 0 ? 0 : -1;
    for (int64_t epoch = t->begin.epoch; epoch < c->num_train_epochs; epoch++) {
        int64_t count = 0;
        MTP_TRY(mtp_loader_batches(t->loader, epoch, &count));
        if (epoch == t->begin.epoch) count -= t->begin.batch < count ? t->begin.batch : count;
        t->batches_left += count;
    }
    if (c->num_train_epochs > 0) steps = t->begin.step + (t->batches_left + global - 1) / global;
    if (c->warmup_steps > steps)
        return mtp__config_fail(
            c, "warmup_steps",
            "%lld is more than the %lld steps of the run; set a smaller one, or more epochs or steps",
            (long long)c->warmup_steps, (long long)steps);
    t->schedule = (mtp__schedule){.type = (mtp_lr_scheduler)c->lr_scheduler_type,
                                  .learning_rate = c->learning_rate,
                                  .min_lr_ratio = c->min_lr_ratio,
                                  .warmup_steps = c->warmup_steps,
                                  .decay_steps = mtp__schedule_decay_steps(c->lr_decay_ratio, steps),
                                  .max_steps = steps};
    return MTP_OK;
}

/* ---- step ----------------------------------------------------------------------------------------------------- */

static mtp_status open_flight(const mtp__trainer *t, int32_t K, mtp__flight *flight)
{
    flight->rows = calloc((size_t)t->accumulation, sizeof *flight->rows);
    flight->batches = calloc((size_t)t->accumulation, sizeof *flight->batches);
    if (!flight->rows || !flight->batches) return no_memory();
    for (int64_t i = 0; i < t->accumulation; i++)
        MTP_TRY(mtp__rows_create(t->config->tokens_per_batch, K, &flight->rows[i]));
    const size_t sums = (size_t)K * MTP_TALLY_COLUMNS;
    void *results = NULL;
    MTP_TRY(t->context->ops->host_alloc(t->context->device, (sums + MTP_CONTROL) * sizeof(double), &results));
    flight->sums = results;
    flight->control = flight->sums + sums;
    return MTP_OK;
}

static void close_flight(const mtp__trainer *t, mtp__flight *flight)
{
    for (int64_t i = 0; i < flight->held; i++) mtp_loader_release(t->loader, flight->batches[i]);
    for (int64_t i = 0; flight->rows && i < t->accumulation; i++) mtp__rows_free(&flight->rows[i]);
    free(flight->rows);
    free(flight->batches);
    if (!t->context) return;
    t->context->ops->host_free(t->context->device, flight->sums);
    t->context->ops->mark_free(t->context->device, flight->mark);
}

static mtp_status open_step(mtp__trainer *t)
{
    const int32_t K = (int32_t)t->config->num_speculative_steps;
    t->step_config = mtp__config_step(t->config);
    MTP_TRY(mtp__step_create(t->drafter, t->verifier, &t->step_config, MTP__STEP_TRAIN, &t->step));
    for (int64_t i = 0; i <= t->lag; i++) MTP_TRY(open_flight(t, K, &t->flights[i]));
    return MTP_OK;
}

static mtp_status open_evaluator(mtp__trainer *t, const mtp__trainer_options *options)
{
    const mtp_evaluator_options evaluator = {.num_speculative_steps = t->step_config.num_speculative_steps,
                                             .position_offset = t->step_config.position_offset,
                                             .loss = &t->step_config,
                                             .progress = options->progress,
                                             .user = options->user};
    if (!t->eval_data) return MTP_OK;
    MTP_TRY_AT(mtp__evaluator_create(t->drafter, t->verifier, t->eval_data, &evaluator, &t->evaluator), "eval_data");
    mtp__evaluator_share(t->evaluator, t->ranks);
    return MTP_OK;
}

static mtp_status open_all(mtp__trainer *t, const mtp__trainer_options *options)
{
    MTP_TRY(open_model(t));
    MTP_TRY(open_data(t));
    MTP_TRY(plan_length(t));
    MTP_TRY(open_optimizer(t));
    MTP_TRY(open_step(t));
    return open_evaluator(t, options);
}

mtp_status mtp__trainer_open(const mtp_train_config *config, const mtp__trainer_options *options, mtp__trainer *t)
{
    *t = (mtp__trainer){.config = config,
                        .logger = options->logger,
                        .ranks = options->ranks,
                        .begin = options->begin,
                        .accumulation = config->gradient_accumulation_steps};
    const mtp_status status = open_all(t, options); /* makes the plan */
    return mtp__plan_explain(t->plan, status);
}

/* What gradients and weights travel by. */
static mtp_status open_device_comm(mtp__trainer *t)
{
    const mtp_train_config *c = t->config;
    const bool host = t->context->ops->memory_is_host;
    if (host && c->backend == MTP_DISTRIBUTED_NCCL)
        return mtp__config_fail(c, "backend", "NCCL is between GPUs, and device is \"%s\"; use \"auto\"", c->device);
    t->device_comm = t->ranks->comm;
    t->staged = !host;
    if (host || c->backend == MTP_DISTRIBUTED_GLOO) return MTP_OK;
    t->staged = false;
    t->device_comm = NULL;
    MTP_TRY_AT(
        mtp_comm_create_device(t->ranks->comm, t->context, &t->device_comm),
        "device \"%s\" on several ranks (distributed.backend = \"gloo\" works without NCCL, through host memory)",
        c->device);
    return MTP_OK;
}

mtp_status mtp__trainer_connect(mtp__trainer *t)
{
    const int64_t floats = t->config->bucket_mib * (int64_t)(1 << 20) / (int64_t)sizeof(float);
    if (t->ranks->world_size == 1) return MTP_OK;
    MTP_TRY(mtp__ranks_agree(t->ranks, open_device_comm(t)));
    return mtp__ranks_agree(t->ranks, mtp__buckets_create(t->device_comm, t->context, t->staged, t->drafter->grads,
                                                          t->drafter->num_grads, floats, &t->buckets));
}

/* Until the device has done all that was launched: it may still read what a flight holds. */
static void wait_for_device(mtp__trainer *t)
{
    mtp_mark *mark = NULL;
    if (!t->context || !t->drafter) return;
    if (t->context->ops->mark(t->context->device, &mark) == MTP_OK)
        (void)t->context->ops->mark_wait(t->context->device, mark);
    t->context->ops->mark_free(t->context->device, mark);
}

void mtp__trainer_close(mtp__trainer *t)
{
    const mtp_error first = *mtp_last_error();
    if (mtp__trainer_flying(t) > 0) wait_for_device(t);
    (void)mtp__fail_again(&first); /* waiting may fail for the reason that the run ends for */
    mtp__buckets_free(t->buckets);
    if (t->ranks && t->device_comm != t->ranks->comm) mtp_comm_free(t->device_comm);
    mtp_evaluator_free(t->evaluator);
    mtp__step_free(t->step);
    for (int i = 0; i < MTP__FLIGHTS; i++) close_flight(t, &t->flights[i]);
    mtp__sample_list_free(&t->bad);
    mtp__optimizer_free(t->optimizer);
    mtp_loader_free(t->loader);
    mtp_dataset_close(t->eval_data);
    mtp_dataset_close(t->train_data);
    if (t->holds_embedding) mtp__embedding_drop(t->drafter);
    mtp_plan_free(t->plan);
    mtp_drafter_free(t->drafter);
    mtp_verifier_close(t->verifier);
    mtp_context_free(t->context);
    *t = (mtp__trainer){0};
}
