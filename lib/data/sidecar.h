/* Internal: loss masks that stand beside sample files, in JSON Lines.
 *
 * Every *.jsonl of a sample directory is read. A line is an object with "file", the name of a sample in that directory,
 * and either "prompt_len" (tokens before it may not be targets, those from it on may) or "loss_mask" (an array of 0 and
 * 1, or of booleans, one for each token). Other keys are ignored. */
#ifndef MTP_DATA_SIDECAR_H
#define MTP_DATA_SIDECAR_H

#include "formats/jsonl.h"

typedef struct mtp__sidecar_entry {
    char *file;         /* name without directory */
    char *origin;       /* "path:line" it was read from */
    int64_t prompt_len; /* -1 when there is a mask instead */
    uint8_t *mask;      /* [mask_length] */
    int64_t mask_length;
    bool used; /* a sample asked for it */
} mtp__sidecar_entry;

/* Zero-initialise. */
typedef struct mtp__sidecar {
    mtp__sidecar_entry *entries; /* sorted by file once mtp__sidecar_sort was called */
    size_t count, capacity;
} mtp__sidecar;

/* All *.jsonl files of a directory, sorted. On failure the sidecar is freed. */
mtp_status mtp__sidecar_read(mtp__sidecar *sidecar, const char *directory);
/* Append the lines of one reader. */
mtp_status mtp__sidecar_add(mtp__sidecar *sidecar, mtp__jsonl_reader *reader);
/* Sort for mtp__sidecar_find; a file with two entries is MTP_E_DATA. */
mtp_status mtp__sidecar_sort(mtp__sidecar *sidecar);
/* The entry of a file, which becomes used; NULL when there is none. */
const mtp__sidecar_entry *mtp__sidecar_find(mtp__sidecar *sidecar, const char *file);
/* What the entry says about token `index`; for a mask the index must be below mask_length. */
static inline bool mtp__sidecar_supervises(const mtp__sidecar_entry *entry, int64_t index)
{
    return entry->mask ? entry->mask[index] != 0 : index >= entry->prompt_len;
}
/* Accepts a zeroed struct and zeroes it. */
void mtp__sidecar_free(mtp__sidecar *sidecar);

#endif
