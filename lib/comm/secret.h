/* Proofs that a peer knows the shared secret: HMAC-SHA-256 (RFC 2104, FIPS 180-4). Internal. */
#ifndef MTP_COMM_SECRET_H
#define MTP_COMM_SECRET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

enum { MTP__DIGEST_SIZE = 32, MTP__NONCE_SIZE = 32 };

void mtp__sha256(const void *data, size_t size, uint8_t digest[MTP__DIGEST_SIZE]);
void mtp__hmac_sha256(const void *key, size_t key_size, const void *data, size_t size, uint8_t mac[MTP__DIGEST_SIZE]);
/* Compares in a time that does not depend on the content. */
bool mtp__same_digest(const uint8_t a[MTP__DIGEST_SIZE], const uint8_t b[MTP__DIGEST_SIZE]);
/* Bytes from the system's random number generator. */
mtp_status mtp__random_bytes(void *data, size_t size);

typedef enum mtp__role { MTP__ROLE_SERVER = 's', MTP__ROLE_CLIENT = 'c' } mtp__role;
/* What `role` shows to prove that it knows the secret: it depends on the nonces of both sides and on who speaks, so an
 * answer can be neither replayed nor sent back. */
void mtp__secret_proof(const char *secret, mtp__role role, const uint8_t server_nonce[MTP__NONCE_SIZE],
                       const uint8_t client_nonce[MTP__NONCE_SIZE], uint8_t proof[MTP__DIGEST_SIZE]);

#endif
