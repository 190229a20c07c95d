/* libmtp: train Gemma-4 multi-token-prediction drafters. Include this, or the single headers it lists. */
#ifndef MTP_MTP_H
#define MTP_MTP_H

#include "mtp/check.h"
#include "mtp/comm.h"
#include "mtp/context.h"
#include "mtp/data.h"
#include "mtp/drafter.h"
#include "mtp/eval.h"
#include "mtp/export.h"
#include "mtp/init.h"
#include "mtp/inspect.h"
#include "mtp/leak.h"
#include "mtp/log.h"
#include "mtp/loss.h"
#include "mtp/optim.h"
#include "mtp/pack.h"
#include "mtp/safetensors.h"
#include "mtp/scale.h"
#include "mtp/status.h"
#include "mtp/suggest.h"
#include "mtp/tensor.h"
#include "mtp/train.h"
#include "mtp/verifier.h"
#include "mtp/version.h"

#endif
