/* libmtp: train Gemma-4 multi-token-prediction drafters. Include this, or the single headers it lists. */
#ifndef MTP_MTP_H
#define MTP_MTP_H

#include "mtp/log.h"
#include "mtp/safetensors.h"
#include "mtp/status.h"
#include "mtp/tensor.h"
#include "mtp/version.h"

#endif
