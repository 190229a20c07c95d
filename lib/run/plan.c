/* The memory of a training run, from shapes alone. The dry run of the step is the step's own layout. */
#include "run/plan.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/batch_size.h"
#include "data/verifier_config.h"
#include "model/stage.h"
#include "model/tensors.h"
#include "optim/optimizer.h"
#include "run/config.h"
#include "run/saver.h"
#include "run/trainer.h"

enum { MAX_LINES = MTP__ARENA_LABELS + 24, EVAL_TOKENS = 8192, EVAL_STEPS = 2 };

/* ---- lines ---------------------------------------------------------------------------------------------------- */

mtp_status mtp__plan_new(mtp_context *context, const char *remedy, mtp_plan **plan)
{
    *plan = NULL;
    mtp_plan *made = calloc(1, sizeof *made);
    if (made) made->lines = calloc(MAX_LINES, sizeof *made->lines);
    if (!made || !made->lines) {
        free(made);
        return MTP_FAIL(MTP_E_MEMORY, "out of memory for a plan");
    }
    made->remedy = remedy;
    made->has_device = !context->ops->memory_is_host;
    snprintf(made->device, sizeof made->device, "%s", context->ops->device_info(context->device)->isa);
    *plan = made;
    return MTP_OK;
}

void mtp_plan_free(mtp_plan *plan)
{
    if (!plan) return;
    free(plan->lines);
    free(plan);
}

mtp_status mtp__plan_add(mtp_plan *plan, mtp__plan_place place, const char *what, uint64_t bytes, const char *note)
{
    if (bytes == 0) return MTP_OK;
    if (plan->num_lines == MAX_LINES) return MTP_FAIL(MTP_E_INTERNAL, "a plan of more than %d lines", (int)MAX_LINES);
    const bool mapped = place == MTP__PLAN_MAPPED, on_device = place == MTP__PLAN_DEVICE && plan->has_device;
    plan->lines[plan->num_lines++] =
        (mtp_plan_line){.what = what, .note = note, .bytes = bytes, .mapped = mapped, .on_device = on_device};
    if (mapped) return MTP_OK;
    plan->total_bytes += bytes;
    *(on_device ? &plan->device_bytes : &plan->host_bytes) += bytes;
    return MTP_OK;
}

static mtp_status add_device(mtp_plan *plan, const char *what, uint64_t bytes, const char *note)
{
    return mtp__plan_add(plan, MTP__PLAN_DEVICE, what, bytes, note);
}

static mtp_status add_host(mtp_plan *plan, const char *what, uint64_t bytes, const char *note)
{
    return mtp__plan_add(plan, MTP__PLAN_HOST, what, bytes, note);
}

/* ---- parameters ----------------------------------------------------------------------------------------------- */

static bool frozen(const mtp_strings *patterns, const char *name)
{
    for (int64_t i = 0; i < patterns->count; i++)
        if (fnmatch(patterns->items[i], name, 0) == 0) return true;
    return false;
}

static mtp_status plan_parameters(const mtp_train_config *c, const mtp_drafter_config *drafter,
                                  const mtp_context *context, int64_t world_size, mtp_plan *plan)
{
    mtp__tensor_spec *specs = NULL;
    int64_t count = 0, num_trained = 0;
    MTP_TRY(mtp__tensor_specs(drafter, &specs, &count));
    mtp__optim_tensor *trained = calloc((size_t)count, sizeof *trained);
    if (!trained) {
        free(specs);
        return MTP_FAIL(MTP_E_MEMORY, "out of memory for a plan");
    }
    uint64_t matrices = 0;
    for (int64_t i = 0; i < count; i++) {
        const mtp_view view = mtp_view_nd(NULL, MTP_F32, specs[i].rank, specs[i].shape);
        if (strcmp(specs[i].name, MTP__TOKEN_ORDERING) == 0) continue;
        plan->num_parameters += mtp_view_count(view);
        if (specs[i].rank == 2) matrices += (uint64_t)mtp_view_count(view);
        if (frozen(&c->freeze, specs[i].name)) continue;
        plan->num_trained += mtp_view_count(view);
        trained[num_trained++] = (mtp__optim_tensor){.value = view, .grad = view};
    }
    const mtp__optim_rank first = {.world_size = world_size};
    size_t moments = 0, extra = 0;
    const mtp_status status =
        mtp__optimizer_plan(context, trained, num_trained, c->zero_stage > 0 ? &first : NULL, &moments, &extra);
    free(trained);
    free(specs);
    MTP_TRY(status);
    const uint64_t V = drafter->ordered ? (uint64_t)drafter->vocab_size : 0;
    const mtp_dtype masters = mtp__config_masters(c);
    const uint64_t vectors = (uint64_t)plan->num_parameters - matrices;
    const uint64_t values = mtp_dtype_size(masters) * matrices + 4 * vectors;
    MTP_TRY(add_device(plan, "parameters", values,
                       masters == MTP_BF16 ? "bf16 masters of the matrices (master_weights)" : "fp32 masters"));
    if (mtp__has_shadows(context, masters))
        MTP_TRY(add_device(plan, "bf16 parameters", 2 * matrices, "matrices as products take them"));
    MTP_TRY(add_device(plan, "token ordering", 8 * V, "two maps of the vocabulary"));
    MTP_TRY(add_host(plan, "token ordering as stored", 8 * V, ""));
    MTP_TRY(add_device(plan, "gradients", 4 * (uint64_t)plan->num_trained, "fp32, trained parameters"));
    MTP_TRY(add_device(plan, "optimizer moments", moments,
                       c->zero_stage > 0 && world_size > 1
                           ? "AdamW, two a trained parameter of a rank's share (zero_stage 1)"
                           : "AdamW, two a trained parameter"));
    plan->checkpoint_bytes = values + 8 * (uint64_t)plan->num_trained;
    plan->export_bytes = 2 * (uint64_t)plan->num_parameters + 8 * V;
    MTP_TRY(add_device(plan, "optimizer scratch", extra, ""));
    return add_host(plan, "checkpoint copy", mtp__saver_bytes(plan->checkpoint_bytes, world_size),
                    "what a checkpoint is written from beside the training");
}

/* ---- data ----------------------------------------------------------------------------------------------------- */

/* Bytes of a batch of `tokens` tokens, in as many documents as they could be, whose hidden states and K/V are stored in
 * 16 bits. */
static uint64_t batch_bytes(const mtp_verifier_config *verifier, int64_t tokens, bool direct)
{
    const mtp__batch_shape shape = {
        .places = tokens, .documents = tokens, .hidden_size = 2, .kv_size = {2, 2}, .direct = direct};
    return mtp__batch_bytes(verifier, &shape);
}

static uint64_t rows_bytes(int64_t rows, int64_t K)
{
    return (uint64_t)(rows * (4 * 4 + K * (4 + 4 + 1 + 1)));
}

static mtp_status plan_data(const mtp_train_config *c, const mtp_verifier_config *verifier, int64_t world_size,
                            mtp_plan *plan)
{
    const int64_t steps = 1 + mtp__trainer_lag(!plan->has_device, world_size);
    const int64_t held = steps * c->gradient_accumulation_steps, ring = c->prefetch + held - 1 + 2;
    const int64_t K = c->num_speculative_steps;
    const bool direct = c->direct_io == MTP_DIRECT_IO_ON; /* "auto" depends on the data */
    MTP_TRY(add_host(plan, "loader", (uint64_t)ring * batch_bytes(verifier, c->tokens_per_batch, direct),
                     plan->has_device
                         ? "pinned ring of prefetched micro-batches of 16-bit values; twice this for fp32 "
                           "samples and fp8 stores"
                         : "ring of prefetched micro-batches of 16-bit values; twice this for fp32 samples "
                           "and fp8 stores"));
    MTP_TRY(mtp__plan_kv(plan, verifier, c->tokens_per_batch, 0));
    return add_host(plan, "rows", (uint64_t)held * rows_bytes(c->tokens_per_batch, K), "");
}

mtp_status mtp__plan_kv(mtp_plan *plan, const mtp_verifier_config *verifier, int64_t tokens, int64_t evaluations)
{
    const char *note = evaluations ? "16-bit values; twice this for fp32 samples"
                                   : "16-bit values, two batches in turn; twice this for fp32 samples";
    const uint64_t steps = evaluations ? (uint64_t)evaluations : MTP__STAGE_SETS;
    size_t kv = 0;
    if (!plan->has_device) return MTP_OK; /* read where the loader put it */
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        if (verifier->kv_layer[type] >= 0)
            kv += mtp__stage_reserved((size_t)(tokens * 2 * verifier->num_kv_heads[type] * verifier->head_dim[type]) *
                                      sizeof(uint16_t));
    const size_t hidden = mtp__stage_reserved((size_t)(tokens * verifier->hidden_size) * sizeof(uint16_t));
    MTP_TRY(add_device(plan, evaluations ? "K/V in evaluation" : "K/V of a batch", steps * kv, note));
    return add_device(plan, evaluations ? "hidden states in evaluation" : "hidden states of a batch", steps * hidden,
                      note);
}

/* ---- steps ---------------------------------------------------------------------------------------------------- */

/* The blocks of pinned memory that the rows of chunks are copied from. */
static uint64_t staging_bytes(const mtp_plan *plan, const mtp__arena *step)
{
    uint64_t bytes = 0;
    for (int32_t i = 0; i < step->num_labels && plan->has_device; i++)
        if (strcmp(step->labels[i].label, MTP__STAGE_LABEL) == 0) bytes += MTP__STAGE_BLOCKS * step->labels[i].bytes;
    return bytes;
}

static mtp_status plan_training(const mtp_train_config *c, const mtp_drafter_config *drafter,
                                const mtp_context *context, mtp_plan *plan)
{
    mtp__arena arena;
    const mtp_step_config step = mtp__config_step(c);
    MTP_TRY(mtp__step_plan(drafter, context, mtp__config_masters(c), &step, MTP__STEP_TRAIN, &arena));
    plan->rows_per_chunk = step.rows_per_chunk;
    plan->logits_budget = (int64_t)step.logits_budget;
    if (plan->logits_budget == 0)
        plan->logits_budget = (int64_t)(plan->has_device ? MTP__LOGITS_MIB_DEVICE : MTP__LOGITS_MIB_HOST) << 20;
    for (int32_t i = 0; i < arena.num_labels; i++)
        MTP_TRY(add_device(plan, arena.labels[i].label, arena.labels[i].bytes, "training step"));
    return add_host(plan, "staging", staging_bytes(plan, &arena), "pinned; rows on their way to the device");
}

static mtp_status plan_evaluation(const mtp_train_config *c, const mtp_drafter_config *drafter,
                                  const mtp_verifier_config *verifier, const mtp_context *context, mtp_plan *plan)
{
    if (!mtp__config_evaluates(c)) return MTP_OK;
    const mtp_step_config training = mtp__config_step(c);
    uint64_t staging = 0;
    MTP_TRY(mtp__plan_evaluation(plan, drafter, context, mtp__config_masters(c), &training, EVAL_STEPS, &staging));
    MTP_TRY(mtp__plan_kv(plan, verifier, EVAL_TOKENS, EVAL_STEPS));
    return add_host(
        plan, "evaluation batch",
        batch_bytes(verifier, EVAL_TOKENS, false) + rows_bytes(EVAL_TOKENS, c->num_speculative_steps) + staging, "");
}

mtp_status mtp__plan_evaluation(mtp_plan *plan, const mtp_drafter_config *drafter, const mtp_context *context,
                                mtp_dtype masters, const mtp_step_config *config, int steps, uint64_t *staging)
{
    uint64_t bytes = 0;
    *staging = 0;
    for (int i = 0; i < steps; i++) {
        mtp__arena arena;
        mtp_step_config step = *config;
        step.feeding = i == 0 ? MTP_FEED_SELF : MTP_FEED_TEACHER;
        MTP_TRY(mtp__step_plan(drafter, context, masters, &step, MTP__STEP_EVALUATE, &arena));
        bytes += arena.used;
        *staging += staging_bytes(plan, &arena);
    }
    return add_device(plan, "evaluation", bytes, steps == 1 ? "a step without backward" : "two steps without backward");
}

/* ---- the verifier's embedding --------------------------------------------------------------------------------- */

/* What CUDA, its libraries and the communication between ranks take beside what is listed. */
static uint64_t margin(const mtp_plan *plan)
{
    return plan->device_total / 32;
}

mtp_status mtp__plan_embedding(mtp_plan *plan, mtp_context *context, mtp_embedding_place choice,
                               const mtp__plan_verifier *verifier)
{
    const uint64_t bytes =
        (uint64_t)(verifier->config->vocab_size * verifier->config->hidden_size) * verifier->embedding_value;
    if (plan->has_device) {
        MTP_TRY(context->ops->memory_info(context->device, &plan->device_free, &plan->device_total));
        const bool fits = plan->device_bytes + bytes + margin(plan) <= plan->device_free;
        plan->embedding_on_device = choice == MTP_EMBEDDING_ON || (choice == MTP_EMBEDDING_AUTO && fits);
    }
    const char *note = choice == MTP_EMBEDDING_ON    ? "embedding_on_device = \"on\""
                       : choice == MTP_EMBEDDING_OFF ? "embedding_on_device = \"off\""
                       : plan->embedding_on_device   ? "embedding_on_device = \"auto\": it fits"
                                                     : "embedding_on_device = \"auto\": it does not fit";
    const bool held = plan->embedding_on_device;
    if (held) MTP_TRY(add_device(plan, "verifier embedding", bytes, note));
    return mtp__plan_add(plan, MTP__PLAN_MAPPED, held ? "verifier embedding, in its file" : "verifier embedding", bytes,
                         plan->has_device && !held ? note : "mapped from the file: pages that the system may drop");
}

/* ---- all of it ------------------------------------------------------------------------------------------------ */

mtp_status mtp__plan_of(const mtp_train_config *c, const mtp_drafter_config *drafter,
                        const mtp__plan_verifier *verifier, int64_t world_size, mtp_context *context, mtp_plan **plan)
{
    static const char remedy[] =
        "a smaller rows_per_chunk (activations, evaluation), logits_budget_mib (kernel scratch of a flat head) or "
        "tokens_per_batch (K/V), embedding_on_device = \"off\" (verifier embedding), precision = \"bf16\" "
        "(activations), master_weights = \"bf16\" (parameters), zero_stage = 1 on several ranks (optimizer moments); "
        "`mtp plan` shows what each of them does";
    mtp_plan *made = NULL;
    *plan = NULL;
    MTP_TRY(mtp__plan_new(context, remedy, &made));
    mtp_status status = plan_parameters(c, drafter, context, world_size, made);
    if (status == MTP_OK) status = plan_training(c, drafter, context, made);
    if (status == MTP_OK) status = plan_data(c, verifier->config, world_size, made);
    if (status == MTP_OK) status = plan_evaluation(c, drafter, verifier->config, context, made);
    if (status == MTP_OK)
        status = mtp__plan_embedding(made, context, (mtp_embedding_place)c->embedding_on_device, verifier);
    if (status == MTP_OK)
        *plan = made;
    else
        mtp_plan_free(made);
    return status;
}

static mtp_status plan_in_context(const mtp_train_config *c, const mtp_drafter_config *drafter,
                                  const mtp_verifier_config *verifier, int64_t world_size, const mtp_logger *logger,
                                  mtp_plan **plan)
{
    mtp_context *context = NULL; /* asked for the sizes of scratch, and for what is free */
    const mtp_context_options options = mtp__config_context(c, logger);
    const mtp__plan_verifier known = {.config = verifier, .embedding_value = 2};
    MTP_TRY(mtp_context_create(&options, &context));
    const mtp_status status = mtp__plan_of(c, drafter, &known, world_size, context, plan);
    mtp_context_free(context);
    return status;
}

mtp_status mtp_plan_create(const mtp_train_config *config, int64_t world_size, const mtp_logger *logger,
                           mtp_plan **plan)
{
    mtp_drafter_config drafter = {0};
    mtp_verifier_config verifier = {0};
    MTP_REQUIRE(config && world_size >= 1 && plan);
    *plan = NULL;
    mtp_status status = mtp_drafter_config_read(config->drafter, &drafter);
    if (status == MTP_OK) status = mtp__config_check_directory(config, "verifier", config->verifier);
    if (status == MTP_OK) status = mtp__verifier_config_read(config->verifier, &verifier);
    if (status == MTP_OK) status = plan_in_context(config, &drafter, &verifier, world_size, logger, plan);
    mtp_drafter_config_free(&drafter);
    return status;
}
