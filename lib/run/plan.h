/* Internal: building a plan line by line, and asking whether it fits. */
#ifndef MTP_RUN_PLAN_H
#define MTP_RUN_PLAN_H

#include "model/step.h"
#include "mtp/train.h"

/* Where the memory of a line lies. */
typedef enum mtp__plan_place { MTP__PLAN_HOST, MTP__PLAN_DEVICE, MTP__PLAN_MAPPED } mtp__plan_place;

/* What plans need to know of a verifier: its config.json, and of what type the values of its table are. */
typedef struct mtp__plan_verifier {
    const mtp_verifier_config *config;
    size_t embedding_value; /* bytes of a value of the table */
} mtp__plan_verifier;

/* An empty plan for `context`. Where device memory is ordinary memory nothing is device memory. `remedy` says what
 * makes the plan smaller, for messages; it outlives the plan. */
mtp_status mtp__plan_new(mtp_context *context, const char *remedy, mtp_plan **plan);
/* A line; none for 0 bytes. `what` and `note` outlive the plan. */
mtp_status mtp__plan_add(mtp_plan *plan, mtp__plan_place place, const char *what, uint64_t bytes, const char *note);
/* Steps of an evaluation on the device: the one that drafts, and with `steps` 2 the one for the loss. `staging`: bytes
 * of pinned memory that they take, which is not added. */
mtp_status mtp__plan_evaluation(mtp_plan *plan, const mtp_drafter_config *drafter, const mtp_context *context,
                                mtp_dtype masters, const mtp_step_config *config, int steps, uint64_t *staging);
/* K/V and hidden states of a batch of `tokens` tokens on the device: of the training step (0; it has two sets), or of
 * so many steps that evaluate. */
mtp_status mtp__plan_kv(mtp_plan *plan, const mtp_verifier_config *verifier, int64_t tokens, int64_t evaluations);
/* The last line of a plan: where the verifier's table lies, as `choice` says; with MTP_EMBEDDING_AUTO on the device
 * when it fits beside everything else and leaves a margin. Asks the device what is free. */
mtp_status mtp__plan_embedding(mtp_plan *plan, mtp_context *context, mtp_embedding_place choice,
                               const mtp__plan_verifier *verifier);
/* Say where the table lies. */
void mtp__plan_log_embedding(const mtp_plan *plan, const mtp_logger *logger);
/* MTP_E_MEMORY when the plan needs more than is free. */
mtp_status mtp__plan_check(const mtp_plan *plan);
/* `status`; when it is MTP_E_MEMORY and the plan one of a device, the table and what could be changed stand behind its
 * message. `plan` may be NULL. */
mtp_status mtp__plan_explain(const mtp_plan *plan, mtp_status status);
/* The plan of a training run on `context`, whose configuration, drafter and verifier are known. */
mtp_status mtp__plan_of(const mtp_train_config *config, const mtp_drafter_config *drafter,
                        const mtp__plan_verifier *verifier, int64_t world_size, mtp_context *context, mtp_plan **plan);

#endif
