/* Protects: whatever bytes arrive at the store, they are refused with a message or are frames within the limits that
 * say what they are: built again, they are the same bytes. */
#include "fuzz.h"

#include <string.h>

#include "comm/frame.h"
#include "mtp/comm.h"

int mtp_fuzz_accepts(const uint8_t *data, size_t size)
{
    size_t used = 0;
    mtp__frame frame;
    bool complete = size > 0;
    while (complete && used < size) {
        if (mtp__frame_parse(data + used, size - used, &frame, &complete) != MTP_OK) return 0;
        FUZZ_CHECK(frame.size <= (size_t)MTP__FRAME_HEADER + MTP_STORE_KEY_MAX + MTP_STORE_VALUE_MAX);
        if (!complete) break;
        FUZZ_CHECK(frame.size == MTP__FRAME_HEADER + frame.key_size + frame.value_size);
        FUZZ_CHECK(frame.size <= size - used);
        uint8_t *again = malloc(frame.size);
        FUZZ_CHECK(again != NULL);
        mtp__frame_build(again, frame.kind, frame.key, frame.key_size, frame.value, frame.value_size);
        FUZZ_CHECK(memcmp(again, data + used, frame.size) == 0);
        free(again);
        used += frame.size;
    }
    /* accepted: whole frames and nothing behind them */
    return complete;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    (void)mtp_fuzz_accepts(data, size);
    return 0;
}
