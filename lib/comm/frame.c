#include "comm/frame.h"

#include <string.h>

#include "comm/secret.h"
#include "mtp/comm.h"

typedef struct kind_limits {
    const char *name;
    bool has_key;
    size_t min_value, max_value;
} kind_limits;

static const kind_limits limits[MTP__FRAME_KINDS] = {
    [MTP__FRAME_HELLO] = {"hello", false, MTP__NONCE_SIZE, MTP__NONCE_SIZE},
    [MTP__FRAME_PROOF] = {"proof", false, MTP__NONCE_SIZE + MTP__DIGEST_SIZE, MTP__NONCE_SIZE + MTP__DIGEST_SIZE},
    [MTP__FRAME_WELCOME] = {"welcome", false, MTP__DIGEST_SIZE, MTP__DIGEST_SIZE},
    [MTP__FRAME_SET] = {"set", true, 0, MTP_STORE_VALUE_MAX},
    [MTP__FRAME_GET] = {"get", true, 4, 4},
    [MTP__FRAME_ADD] = {"add", true, 8, 8},
    [MTP__FRAME_CHECK] = {"check", true, 0, 0},
    [MTP__FRAME_DONE] = {"done", false, 0, MTP_STORE_VALUE_MAX},
    [MTP__FRAME_ABSENT] = {"absent", false, 0, 0},
    [MTP__FRAME_REFUSED] = {"refused", false, 1, 512},
};

uint64_t mtp__frame_number(const uint8_t *data, size_t size)
{
    uint64_t number = 0;
    for (size_t i = 0; i < size; i++) number |= (uint64_t)data[i] << 8 * i;
    return number;
}

void mtp__frame_put_number(uint8_t *data, size_t size, uint64_t number)
{
    for (size_t i = 0; i < size; i++) data[i] = (uint8_t)(number >> 8 * i);
}

mtp_status mtp__frame_parse(const uint8_t *data, size_t size, mtp__frame *frame, bool *complete)
{
    *frame = (mtp__frame){.size = 0};
    *complete = false;
    if (size >= 1 && data[0] != MTP__FRAME_MAGIC)
        return MTP_FAIL(MTP_E_FORMAT, "not the store's protocol: the first byte is 0x%02x, not 0x%02x", data[0],
                        MTP__FRAME_MAGIC);
    if (size >= 2 && (data[1] == 0 || data[1] >= MTP__FRAME_KINDS))
        return MTP_FAIL(MTP_E_FORMAT, "not the store's protocol: no frame is of kind %d", data[1]);
    if (size < MTP__FRAME_HEADER) return MTP_OK;
    const kind_limits *limit = &limits[data[1]];
    const size_t key_size = (size_t)mtp__frame_number(data + 2, 2), value_size = (size_t)mtp__frame_number(data + 4, 4);
    if (limit->has_key ? key_size < 1 || key_size > MTP_STORE_KEY_MAX : key_size != 0)
        return MTP_FAIL(MTP_E_FORMAT, "a frame '%s' with a key of %zu bytes", limit->name, key_size);
    if (value_size < limit->min_value || value_size > limit->max_value)
        return MTP_FAIL(MTP_E_FORMAT, "a frame '%s' with a value of %zu bytes, not %zu to %zu", limit->name, value_size,
                        limit->min_value, limit->max_value);
    frame->kind = (mtp__frame_kind)data[1];
    frame->size = MTP__FRAME_HEADER + key_size + value_size;
    if (size < frame->size) return MTP_OK;
    frame->key = data + MTP__FRAME_HEADER;
    frame->key_size = key_size;
    frame->value = frame->key + key_size;
    frame->value_size = value_size;
    if (key_size > 0 && memchr(frame->key, '\0', key_size))
        return MTP_FAIL(MTP_E_FORMAT, "a frame '%s' with a NUL in its key", limit->name);
    *complete = true;
    return MTP_OK;
}

void mtp__frame_build(uint8_t *out, mtp__frame_kind kind, const void *key, size_t key_size, const void *value,
                      size_t value_size)
{
    out[0] = MTP__FRAME_MAGIC;
    out[1] = (uint8_t)kind;
    mtp__frame_put_number(out + 2, 2, key_size);
    mtp__frame_put_number(out + 4, 4, value_size);
    if (key_size > 0) memcpy(out + MTP__FRAME_HEADER, key, key_size);
    if (value_size > 0) memcpy(out + MTP__FRAME_HEADER + key_size, value, value_size);
}
