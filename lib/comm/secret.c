#include "comm/secret.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include "mtp/comm.h"

enum { BLOCK = 64, ROUNDS = 64 };

typedef struct sha256 {
    uint32_t state[8];
    uint64_t size;
    uint8_t block[BLOCK];
    size_t filled;
} sha256;

static uint32_t rotate(uint32_t x, int bits)
{
    return x >> bits | x << (32 - bits);
}

/* FIPS 180-4, 6.2.2. */
static void compress(uint32_t state[8], const uint8_t block[BLOCK])
{
    static const uint32_t constants[ROUNDS] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t schedule[ROUNDS], v[8];
    for (int i = 0; i < 16; i++)
        schedule[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 |
                      (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < ROUNDS; i++) {
        const uint32_t a = schedule[i - 15], b = schedule[i - 2];
        schedule[i] = schedule[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + schedule[i - 7] +
                      (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
    }
    memcpy(v, state, sizeof v);
    for (int i = 0; i < ROUNDS; i++) {
        const uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
        const uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
        const uint32_t t1 =
            v[7] + (rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25)) + choice + constants[i] + schedule[i];
        const uint32_t t2 = (rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22)) + majority;
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) state[i] += v[i];
}

static void sha256_begin(sha256 *hash)
{
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    *hash = (sha256){.size = 0};
    memcpy(hash->state, start, sizeof start);
}

static void sha256_add(sha256 *hash, const void *data, size_t size)
{
    const uint8_t *bytes = data;
    hash->size += size;
    for (size_t i = 0; i < size; i++) {
        hash->block[hash->filled++] = bytes[i];
        if (hash->filled < BLOCK) continue;
        compress(hash->state, hash->block);
        hash->filled = 0;
    }
}

static void sha256_end(sha256 *hash, uint8_t digest[MTP__DIGEST_SIZE])
{
    const uint64_t bits = hash->size * 8;
    const uint8_t one = 0x80, zero = 0;
    uint8_t length[8];
    sha256_add(hash, &one, 1);
    while (hash->filled != BLOCK - sizeof length) sha256_add(hash, &zero, 1);
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)(bits >> (56 - 8 * i));
    sha256_add(hash, length, sizeof length);
    for (int i = 0; i < MTP__DIGEST_SIZE; i++) digest[i] = (uint8_t)(hash->state[i / 4] >> (24 - 8 * (i % 4)));
}

void mtp__sha256(const void *data, size_t size, uint8_t digest[MTP__DIGEST_SIZE])
{
    sha256 hash;
    sha256_begin(&hash);
    sha256_add(&hash, data, size);
    sha256_end(&hash, digest);
}

void mtp__hmac_sha256(const void *key, size_t key_size, const void *data, size_t size, uint8_t mac[MTP__DIGEST_SIZE])
{
    uint8_t block[BLOCK] = {0}, pad[BLOCK];
    sha256 hash;
    if (key_size > BLOCK)
        mtp__sha256(key, key_size, block);
    else if (key_size > 0)
        memcpy(block, key, key_size);
    for (int i = 0; i < BLOCK; i++) pad[i] = block[i] ^ 0x36;
    sha256_begin(&hash);
    sha256_add(&hash, pad, BLOCK);
    sha256_add(&hash, data, size);
    sha256_end(&hash, mac);
    for (int i = 0; i < BLOCK; i++) pad[i] = block[i] ^ 0x5c;
    sha256_begin(&hash);
    sha256_add(&hash, pad, BLOCK);
    sha256_add(&hash, mac, MTP__DIGEST_SIZE);
    sha256_end(&hash, mac);
}

bool mtp__same_digest(const uint8_t a[MTP__DIGEST_SIZE], const uint8_t b[MTP__DIGEST_SIZE])
{
    unsigned different = 0;
    for (int i = 0; i < MTP__DIGEST_SIZE; i++) different |= (unsigned)(a[i] ^ b[i]);
    return different == 0;
}

mtp_status mtp__random_bytes(void *data, size_t size)
{
    char *next = data;
    while (size > 0) {
        const ssize_t got = getrandom(next, size, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "the system gives no random bytes: %s", strerror(errno));
        next += got;
        size -= (size_t)got;
    }
    return MTP_OK;
}

void mtp__secret_proof(const char *secret, mtp__role role, const uint8_t server_nonce[MTP__NONCE_SIZE],
                       const uint8_t client_nonce[MTP__NONCE_SIZE], uint8_t proof[MTP__DIGEST_SIZE])
{
    uint8_t text[1 + 2 * MTP__NONCE_SIZE];
    text[0] = (uint8_t)role;
    memcpy(text + 1, server_nonce, MTP__NONCE_SIZE);
    memcpy(text + 1 + MTP__NONCE_SIZE, client_nonce, MTP__NONCE_SIZE);
    mtp__hmac_sha256(secret, strlen(secret), text, sizeof text, proof);
}

mtp_status mtp_store_make_secret(char secret[MTP_STORE_SECRET_SIZE])
{
    static const char digits[] = "0123456789abcdef";
    uint8_t bytes[(MTP_STORE_SECRET_SIZE - 1) / 2];
    MTP_REQUIRE(secret != NULL);
    MTP_TRY(mtp__random_bytes(bytes, sizeof bytes));
    for (size_t i = 0; i < sizeof bytes; i++) {
        secret[2 * i] = digits[bytes[i] >> 4];
        secret[2 * i + 1] = digits[bytes[i] & 15];
    }
    secret[MTP_STORE_SECRET_SIZE - 1] = '\0';
    return MTP_OK;
}
