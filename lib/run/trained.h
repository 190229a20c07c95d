/* Internal: a drafter's parameters as an optimizer takes them. */
#ifndef MTP_RUN_TRAINED_H
#define MTP_RUN_TRAINED_H

#include "model/drafter.h"
#include "optim/optimizer.h"

static inline mtp__optim_tensor mtp__trained_tensor(const mtp__param *param)
{
    return (mtp__optim_tensor){.name = param->name,
                               .place = param->place,
                               .value = mtp__param_value(param),
                               .grad = mtp__param_grad(param),
                               .shadow = mtp__param_shadow(param),
                               .decays = mtp__param_decays(param)};
}

/* All trained parameters into tensors [drafter->num_params], in their order in memory; returns how many. */
static inline int64_t mtp__trained_tensors(const mtp_drafter *drafter, mtp__optim_tensor *tensors)
{
    int64_t count = 0;
    for (int64_t i = 0; i < drafter->num_params; i++)
        if (drafter->placed[i]->trained) tensors[count++] = mtp__trained_tensor(drafter->placed[i]);
    return count;
}

#endif
