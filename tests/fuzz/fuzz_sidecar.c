/* Protects: whatever the bytes, a sidecar is refused with a message or gives one sound mask for each file it names. */
#include "fuzz.h"

#include <string.h>

#include "data/sidecar.h"

static void use_entry(mtp__sidecar *sidecar, const mtp__sidecar_entry *entry)
{
    FUZZ_CHECK(mtp__sidecar_find(sidecar, entry->file) == entry);
    FUZZ_CHECK(*entry->file && !strchr(entry->file, '/'));
    FUZZ_CHECK((entry->mask == NULL) == (entry->prompt_len >= 0));
    FUZZ_CHECK(!entry->mask || entry->mask_length >= 1);
    for (int64_t i = 0; entry->mask && i < entry->mask_length; i++) {
        FUZZ_CHECK(entry->mask[i] <= 1);
        FUZZ_CHECK(mtp__sidecar_supervises(entry, i) == (entry->mask[i] == 1));
    }
}

int mtp_fuzz_accepts(const uint8_t *data, size_t size)
{
    mtp__jsonl_reader reader;
    mtp__sidecar sidecar = {0};
    FUZZ_CHECK(mtp__jsonl_open_text(&reader, (const char *)data, size, "fuzz") == MTP_OK);
    mtp_status status = mtp__sidecar_add(&sidecar, &reader);
    if (status == MTP_OK) status = mtp__sidecar_sort(&sidecar);
    for (size_t i = 0; status == MTP_OK && i < sidecar.count; i++) use_entry(&sidecar, &sidecar.entries[i]);
    FUZZ_CHECK(status != MTP_OK || mtp__sidecar_find(&sidecar, "/") == NULL);
    mtp__sidecar_free(&sidecar);
    mtp__jsonl_close(&reader);
    return status == MTP_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    (void)mtp_fuzz_accepts(data, size);
    return 0;
}
