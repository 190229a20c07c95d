/* Internal: may a checkpoint be gone on from with this configuration and this data. */
#ifndef MTP_RUN_RESUME_H
#define MTP_RUN_RESUME_H

#include "optim/schedule.h"
#include "run/checkpoint.h"
#include "run/config.h"

/* What the present run has, beside its configuration. */
typedef struct mtp__resume_facts {
    uint64_t dataset, verifier; /* fingerprints */
    int64_t num_samples;
    int64_t world_size;
    mtp__schedule schedule; /* max_steps: total steps of the run as it would be now */
} mtp__resume_facts;

/* Every key with its value, into the manifest. */
mtp_status mtp__resume_record(const mtp_train_config *config, mtp__manifest *manifest);
/* MTP_E_CONFIG with the list of all differences that matter, each "key: then, now". The length of the run may change
 * when the learning rates of the steps already done stay what they were (so always with a constant schedule). */
mtp_status mtp__resume_check(const mtp_train_config *config, const mtp__resume_facts *facts,
                             const mtp__manifest *manifest);

#endif
