/* mtp plan --world-size: what the official sizes will take on many GPUs. */
#ifndef MTP_TRAINERS_PLAN_SCALE_H
#define MTP_TRAINERS_PLAN_SCALE_H

#include <stdbool.h>

#include "mtp/scale.h"

/* Print a table, or with `json` a line with an array. */
mtp_status print_scale(const mtp_scale_options *options, bool json);

#endif
