/* Protects: whatever the bytes, the line reader ends, counts lines forward and gives whole values only. A file is
 * accepted when all its lines are. */
#include "fuzz.h"

#include <string.h>

#include "formats/jsonl.h"

int mtp_fuzz_accepts(const uint8_t *data, size_t size)
{
    mtp__jsonl_reader reader;
    json_t *value;
    int accepted = 1, last = 0;
    FUZZ_CHECK(mtp__jsonl_open_text(&reader, (const char *)data, size, "fuzz") == MTP_OK);
    for (;;) {
        const mtp_status status = mtp__jsonl_next(&reader, &value);
        if (status != MTP_OK) accepted = 0;
        if (status == MTP_OK && !value) break;
        FUZZ_CHECK((status == MTP_OK) == (value != NULL));
        FUZZ_CHECK(reader.line > last && (size_t)reader.line <= size);
        last = reader.line;
        json_decref(value);
    }
    mtp__jsonl_close(&reader);
    return accepted;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    (void)mtp_fuzz_accepts(data, size);
    return 0;
}
