/* Internal: the verifier's embedding table in device memory, so that tokens go to the device as ids alone. Whether it
 * is held there is decided once, by who knows what else needs the memory (lib/run). */
#ifndef MTP_MODEL_EMBEDDING_H
#define MTP_MODEL_EMBEDDING_H

#include "mtp/drafter.h"
#include "mtp/verifier.h"

/* Bytes of the table on a device. */
uint64_t mtp__embedding_bytes(const mtp_verifier *verifier);
/* Copy the table to the drafter's device; when this verifier's is there already, it gets one more holder. Nothing to
 * copy where device memory is ordinary memory. MTP_E_MEMORY when it does not fit: then the drafter is as before. Each
 * holder lets go of it once, after the steps that it created meanwhile: they keep what mtp__embedding_held says. */
mtp_status mtp__embedding_hold(mtp_drafter *drafter, const mtp_verifier *verifier);
void mtp__embedding_drop(mtp_drafter *drafter);
/* The table as ops may be given it, [V, Hb]; data NULL when rows have to be brought from host memory (stage.h). */
mtp_view mtp__embedding_held(const mtp_drafter *drafter, const mtp_verifier *verifier);

#endif
