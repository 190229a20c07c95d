/* Names of the optimizer's configuration. */
#ifndef MTP_OPTIM_H
#define MTP_OPTIM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How the learning rate moves after the warm-up (formulas: lib/optim/schedule.h, configs/reference.toml). */
typedef enum mtp_lr_scheduler { MTP_LR_CONSTANT, MTP_LR_LINEAR, MTP_LR_COSINE, MTP_LR_WSD } mtp_lr_scheduler;

/* AdamW as torch.optim.AdamW computes it, and the clipping before it. */
typedef struct mtp_adamw_config {
    double beta1, beta2;  /* in [0, 1) */
    double epsilon;       /* outside the root */
    double weight_decay;  /* decoupled; on tensors with two axes */
    double max_grad_norm; /* gradients are scaled by min(1, max_grad_norm / (norm + 1e-6)); 0: no clipping */
    uint64_t seed;        /* of the rounding of bf16 master weights */
} mtp_adamw_config;

#ifdef __cplusplus
}
#endif
#endif
