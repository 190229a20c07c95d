/* Where the loss mask of a sample comes from: its file, or a sidecar. */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "data/dataset_open.h"

static mtp_status missing_mask(const char *path, const mtp__sidecar *sidecar)
{
    if (sidecar->count > 0)
        return MTP_FAIL(MTP_E_DATA,
                        "no loss mask: it has none itself, and none of the %zu lines in the *.jsonl files beside it is "
                        "for \"file\": \"%s\" (%s is for \"%s\")",
                        sidecar->count, mtp__path_name(path), sidecar->entries[0].origin, sidecar->entries[0].file);
    return MTP_FAIL(MTP_E_DATA,
                    "no loss mask. Either put loss_mask (U8 [S]) into the file, or put a line {\"file\": \"%s\", "
                    "\"prompt_len\": N} (or \"loss_mask\": [0, 1, ...]) into a *.jsonl file beside it",
                    mtp__path_name(path));
}

/* The sidecar's entry against the number of tokens, and against the file's own mask when it has one. */
static mtp_status check_sidecar(const mtp__sidecar_entry *side, int64_t num_tokens, const uint8_t *file_mask)
{
    if (side->mask && side->mask_length != num_tokens)
        return MTP_FAIL(MTP_E_DATA, "%s: loss_mask has %lld entries, the sample has %lld tokens", side->origin,
                        (long long)side->mask_length, (long long)num_tokens);
    if (!side->mask && side->prompt_len > num_tokens)
        return MTP_FAIL(MTP_E_DATA, "%s: prompt_len is %lld, the sample has %lld tokens", side->origin,
                        (long long)side->prompt_len, (long long)num_tokens);
    for (int64_t i = 0; file_mask && i < num_tokens; i++)
        if (mtp__sidecar_supervises(side, i) != (file_mask[i] != 0))
            return MTP_FAIL(MTP_E_DATA,
                            "%s: loss_mask of the file says %d for token %lld, the sidecar says %d; remove one",
                            side->origin, file_mask[i], (long long)i, !file_mask[i]);
    return MTP_OK;
}

static void summarise(mtp__dataset_entry *entry, const uint8_t *mask)
{
    entry->num_supervised = entry->last_target = 0;
    entry->prompt_len = entry->first_target = entry->num_tokens;
    for (int64_t i = entry->num_tokens - 1; i >= 0; i--) {
        if (!mask[i]) continue;
        entry->num_supervised++;
        entry->prompt_len = i;
        if (i < 2) continue;
        entry->first_target = i;
        if (entry->last_target == 0) entry->last_target = i + 1;
    }
}

mtp_status mtp__dataset_find_mask(const mtp__sample *sample, mtp__sidecar *sidecar, mtp__dataset_entry *entry,
                                  uint8_t *mask)
{
    const mtp__sidecar_entry *side = mtp__sidecar_find(sidecar, mtp__path_name(entry->path));
    entry->sidecar_prompt_len = -1;
    if (!side && !sample->loss_mask) return missing_mask(entry->path, sidecar);
    if (sample->loss_mask) MTP_TRY(mtp__sample_read_mask(sample, entry->num_tokens, mask));
    if (side) MTP_TRY(check_sidecar(side, entry->num_tokens, sample->loss_mask ? mask : NULL));
    if (side && !sample->loss_mask) {
        for (int64_t i = 0; i < entry->num_tokens; i++) mask[i] = mtp__sidecar_supervises(side, i);
        entry->sidecar_prompt_len = side->prompt_len;
        if (side->mask) {
            entry->sidecar_mask = malloc((size_t)entry->num_tokens);
            if (!entry->sidecar_mask) return MTP_FAIL(MTP_E_MEMORY, "no memory for a loss mask");
            memcpy(entry->sidecar_mask, mask, (size_t)entry->num_tokens);
        }
    }
    summarise(entry, mask);
    return MTP_OK;
}
