/* TensorBoard event files: scalars only. Internal.
 *
 * A record is u64 length, masked CRC-32C of the length, the bytes of an Event message, masked CRC-32C of the bytes
 * (TensorFlow's record_writer; all little-endian). An Event holds wall_time (1, double), step (2, int64), and
 * file_version (3, "brain.Event:2", first record only) or summary (5) with one value of tag (1) and simple_value (2).
 */
#ifndef MTP_FORMATS_TFEVENTS_H
#define MTP_FORMATS_TFEVENTS_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MTP__TFEVENTS_MAX_TAG = 200 };

typedef struct mtp__tfevents mtp__tfevents;

/* Always a new file "events.out.tfevents.<seconds>.<host>.<pid>.<n>" in `directory` (created when missing): a resumed
 * run writes beside the files of its earlier parts, and TensorBoard joins them. `wall_time`: seconds since 1970. */
mtp_status mtp__tfevents_create(const char *directory, double wall_time, mtp__tfevents **events);
/* One point. Tags longer than MTP__TFEVENTS_MAX_TAG bytes are refused. Gathered in memory until flush. */
mtp_status mtp__tfevents_scalar(mtp__tfevents *events, const char *tag, int64_t step, double wall_time, float value);
/* Hand what is gathered to the system, whole records only; after a failure they are lost, and the file is as before. */
mtp_status mtp__tfevents_flush(mtp__tfevents *events);
/* Flush, sync and free. Accepts NULL. The handle is gone even when this fails. */
mtp_status mtp__tfevents_close(mtp__tfevents *events);
const char *mtp__tfevents_path(const mtp__tfevents *events);

#ifdef __cplusplus
}
#endif
#endif
