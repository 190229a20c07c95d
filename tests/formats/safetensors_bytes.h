/* Builds safetensors files byte by byte, right or wrong as a test wants them. */
#ifndef MTP_TESTS_SAFETENSORS_BYTES_H
#define MTP_TESTS_SAFETENSORS_BYTES_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* u64 length, `header`, `data_size` bytes 0, 1, 2, ...; free() it. The data may be anywhere in memory: what the parser
 * gets is at a multiple of 16. */
static inline unsigned char *safetensors_bytes(const char *header, size_t data_size, size_t *size)
{
    const size_t length = strlen(header);
    *size = 8 + length + data_size;
    unsigned char *bytes = malloc(*size);
    if (!bytes) abort();
    for (size_t i = 0; i < 8; i++) bytes[i] = (unsigned char)(length >> 8 * i & 0xff);
    memcpy(bytes + 8, header, length);
    for (size_t i = 0; i < data_size; i++) bytes[8 + length + i] = (unsigned char)i;
    return bytes;
}

#endif
