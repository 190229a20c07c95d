/* The memory of a training run, from shapes alone. The dry run of the step is the step's own layout. */
#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#include "data/batch_size.h"
#include "data/verifier_config.h"
#include "model/step.h"
#include "model/tensors.h"
#include "optim/share.h"
#include "run/config.h"
#include "run/saver.h"

enum { MAX_LINES = MTP__ARENA_LABELS + 16, EVAL_TOKENS = 8192 };

static mtp_status add(mtp_plan *plan, const char *what, uint64_t bytes, bool mapped, const char *note)
{
    if (bytes == 0) return MTP_OK;
    if (plan->num_lines == MAX_LINES) return MTP_FAIL(MTP_E_INTERNAL, "a plan of more than %d lines", (int)MAX_LINES);
    plan->lines[plan->num_lines++] = (mtp_plan_line){.what = what, .note = note, .bytes = bytes, .mapped = mapped};
    if (!mapped) plan->total_bytes += bytes;
    return MTP_OK;
}

/* ---- parameters ----------------------------------------------------------------------------------------------- */

static bool frozen(const mtp_strings *patterns, const char *name)
{
    for (int64_t i = 0; i < patterns->count; i++)
        if (fnmatch(patterns->items[i], name, 0) == 0) return true;
    return false;
}

/* Bytes of the moments of a rank. */
static size_t moments_of(const mtp_train_config *c, const mtp_context *context, mtp__optim_tensor *trained,
                         int64_t num_trained, int64_t world_size)
{
    const mtp__optim_rank first = {.world_size = world_size};
    size_t moments = 0, scratch;
    if (c->zero_stage > 0) num_trained = mtp__optim_share(trained, num_trained, &first, trained);
    mtp__optimizer_plan(context, trained, num_trained, &moments, &scratch);
    return moments;
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
    for (int64_t i = 0; i < count; i++) {
        const mtp_view view = mtp_view_nd(NULL, MTP_F32, specs[i].rank, specs[i].shape);
        if (strcmp(specs[i].name, MTP__TOKEN_ORDERING) == 0) continue;
        plan->num_parameters += mtp_view_count(view);
        if (frozen(&c->freeze, specs[i].name)) continue;
        plan->num_trained += mtp_view_count(view);
        trained[num_trained++] = (mtp__optim_tensor){.value = view, .grad = view};
    }
    size_t moments = 0, scratch = 0;
    mtp__optimizer_plan(context, trained, num_trained, &moments, &scratch);
    moments = moments_of(c, context, trained, num_trained, world_size);
    free(trained);
    free(specs);
    const uint64_t ordering = drafter->ordered ? (uint64_t)drafter->vocab_size * 16 : 0; /* I64 and two I32 maps */
    MTP_TRY(add(plan, "parameters", 4 * (uint64_t)plan->num_parameters, false, "fp32 masters"));
    MTP_TRY(add(plan, "token ordering", ordering, false, ""));
    MTP_TRY(add(plan, "gradients", 4 * (uint64_t)plan->num_trained, false, "fp32, trained parameters"));
    MTP_TRY(add(plan, "optimizer moments", moments, false,
                c->zero_stage > 0 && world_size > 1 ? "AdamW, two a trained parameter of a rank's share (zero_stage 1)"
                                                    : "AdamW, two a trained parameter"));
    plan->checkpoint_bytes = 4 * (uint64_t)plan->num_parameters + 8 * (uint64_t)plan->num_trained;
    plan->export_bytes =
        2 * (uint64_t)plan->num_parameters + (drafter->ordered ? 8 * (uint64_t)drafter->vocab_size : 0);
    MTP_TRY(add(plan, "optimizer scratch", scratch, false, ""));
    return add(plan, "checkpoint copy",
               mtp__saver_bytes((uint64_t)plan->num_parameters, (uint64_t)plan->num_trained, world_size), false,
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

static mtp_status plan_data(const mtp_train_config *c, const mtp_verifier_config *verifier, mtp_plan *plan)
{
    const int64_t held = c->gradient_accumulation_steps, ring = c->prefetch + held - 1 + 2;
    const int64_t K = c->num_speculative_steps;
    const bool direct = c->direct_io == MTP_DIRECT_IO_ON; /* "auto" depends on the data */
    MTP_TRY(add(plan, "loader", (uint64_t)ring * batch_bytes(verifier, c->tokens_per_batch, direct), false,
                "ring of prefetched micro-batches of 16-bit values; twice this for fp32 samples and fp8 stores"));
    MTP_TRY(add(plan, "rows", (uint64_t)held * rows_bytes(c->tokens_per_batch, K), false, ""));
    return add(plan, "verifier embedding", 2 * (uint64_t)(verifier->vocab_size * verifier->hidden_size), true,
               "mapped from the file: pages that the system may drop");
}

/* ---- steps ---------------------------------------------------------------------------------------------------- */

static mtp_status plan_training(const mtp_train_config *c, const mtp_drafter_config *drafter,
                                const mtp_context *context, mtp_plan *plan)
{
    mtp__arena arena;
    const mtp_step_config step = mtp__config_step(c);
    MTP_TRY(mtp__step_plan(drafter, context, &step, MTP__STEP_TRAIN, &arena));
    for (int32_t i = 0; i < arena.num_labels; i++)
        MTP_TRY(add(plan, arena.labels[i].label, arena.labels[i].bytes, false, "training step"));
    return MTP_OK;
}

static mtp_status plan_evaluation(const mtp_train_config *c, const mtp_drafter_config *drafter,
                                  const mtp_verifier_config *verifier, const mtp_context *context, mtp_plan *plan)
{
    if (!mtp__config_evaluates(c)) return MTP_OK;
    uint64_t bytes = 0;
    for (int feeding = MTP_FEED_TEACHER; feeding <= MTP_FEED_SELF; feeding++) {
        mtp__arena arena;
        mtp_step_config step = mtp__config_step(c);
        step.feeding = (mtp_feeding)feeding;
        MTP_TRY(mtp__step_plan(drafter, context, &step, MTP__STEP_EVALUATE, &arena));
        bytes += arena.used;
    }
    bytes += batch_bytes(verifier, EVAL_TOKENS, false) + rows_bytes(EVAL_TOKENS, c->num_speculative_steps);
    return add(plan, "evaluation", bytes, false, "two steps without backward, and a batch");
}

/* ---- all of it ------------------------------------------------------------------------------------------------ */

static mtp_status fill(const mtp_train_config *c, const mtp_drafter_config *drafter,
                       const mtp_verifier_config *verifier, int64_t world_size, const mtp_logger *logger,
                       mtp_plan *plan)
{
    mtp_context *context = NULL; /* asked for the sizes of scratch */
    const mtp_context_options options = mtp__config_context(c, logger);
    MTP_TRY(mtp_context_create(&options, &context));
    mtp_status status = plan_parameters(c, drafter, context, world_size, plan);
    if (status == MTP_OK) status = plan_training(c, drafter, context, plan);
    if (status == MTP_OK) status = plan_evaluation(c, drafter, verifier, context, plan);
    if (status == MTP_OK) status = plan_data(c, verifier, plan);
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
    mtp_plan *made = calloc(1, sizeof *made);
    if (made) made->lines = calloc(MAX_LINES, sizeof *made->lines);
    mtp_status status = made && made->lines ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory for a plan");
    if (status == MTP_OK) status = mtp_drafter_config_read(config->drafter, &drafter);
    if (status == MTP_OK) status = mtp__verifier_config_read(config->verifier, &verifier);
    if (status == MTP_OK) status = fill(config, &drafter, &verifier, world_size, logger, made);
    mtp_drafter_config_free(&drafter);
    if (status != MTP_OK) {
        mtp_plan_free(made);
        return status;
    }
    *plan = made;
    return MTP_OK;
}

void mtp_plan_free(mtp_plan *plan)
{
    if (!plan) return;
    free(plan->lines);
    free(plan);
}
