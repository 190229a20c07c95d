/* What goes over a connection of the store. Internal.
 *
 * A frame is 8 bytes, then the key, then the value:
 *   0  0xA7      1  kind      2..3  bytes of the key      4..7  bytes of the value      (little-endian)
 * The sizes that a kind allows are checked on the first 8 bytes, before anything is stored for the rest. */
#ifndef MTP_COMM_FRAME_H
#define MTP_COMM_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

enum { MTP__FRAME_HEADER = 8, MTP__FRAME_MAGIC = 0xA7 };

typedef enum mtp__frame_kind {
    MTP__FRAME_HELLO = 1, /* server: its nonce */
    MTP__FRAME_PROOF,     /* client: its nonce and its proof */
    MTP__FRAME_WELCOME,   /* server: its proof */
    MTP__FRAME_SET,       /* client: key, value */
    MTP__FRAME_GET,       /* client: key, milliseconds to wait for it (4 bytes) */
    MTP__FRAME_ADD,       /* client: key, amount (8 bytes) */
    MTP__FRAME_CHECK,     /* client: key */
    MTP__FRAME_DONE,      /* server: the value, the sum (8 bytes), whether the key is there (1 byte), or nothing */
    MTP__FRAME_ABSENT,    /* server: the time of a GET is over */
    MTP__FRAME_REFUSED,   /* server: why, as text; the connection stays open */
    MTP__FRAME_KINDS
} mtp__frame_kind;

typedef struct mtp__frame {
    mtp__frame_kind kind;
    const uint8_t *key, *value; /* into the bytes that were parsed */
    size_t key_size, value_size;
    size_t size; /* of the whole frame */
} mtp__frame;

/* Read the frame at the start of `data`. *complete is false, and MTP_OK returned, while more bytes are needed; then
 * frame->size is the size of the whole frame when the header is there, else 0. MTP_E_FORMAT for bytes that no frame
 * starts with, or sizes that its kind does not have. */
mtp_status mtp__frame_parse(const uint8_t *data, size_t size, mtp__frame *frame, bool *complete);
/* Write the header and the key and value behind it; `out` has room for MTP__FRAME_HEADER + key_size + value_size. */
void mtp__frame_build(uint8_t *out, mtp__frame_kind kind, const void *key, size_t key_size, const void *value,
                      size_t value_size);

/* Little-endian numbers of values. */
uint64_t mtp__frame_number(const uint8_t *data, size_t size);
void mtp__frame_put_number(uint8_t *data, size_t size, uint64_t number);

#endif
