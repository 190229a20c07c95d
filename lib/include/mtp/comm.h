/* Processes that work together: a key-value store through which they find each other, and collectives between them.
 *
 * The store is one TCP server and any number of clients. Every connection proves, both ways, that it knows a shared
 * secret before it may do anything else; the secret itself never travels. What travels is neither encrypted nor signed:
 * for trusted networks only. Collectives over Gloo open sockets of their own that have no authentication at all: they
 * are bound to loopback when all ranks are on one node. */
#ifndef MTP_COMM_H
#define MTP_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mtp/log.h"
#include "mtp/status.h"
#include "mtp/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the store: server ---------------------------------------------------------------------------------------- */

enum {
    MTP_STORE_KEY_MAX = 512,         /* bytes of a key */
    MTP_STORE_VALUE_MAX = 1 << 20,   /* bytes of a value */
    MTP_STORE_SECRET_SIZE = 33,      /* what mtp_store_make_secret writes, with its NUL */
    MTP_STORE_SECRET_MIN = 8,        /* letters of a secret */
    MTP_STORE_CONNECTIONS_MAX = 4096 /* at one time */
};

typedef struct mtp_store_server mtp_store_server;

typedef struct mtp_store_server_options {
    const char *address;      /* numeric or a name, to listen on; NULL: 127.0.0.1, so nobody outside can connect */
    int port;                 /* 0: any free one */
    const char *secret;       /* at least MTP_STORE_SECRET_MIN letters; copied */
    double io_seconds;        /* how long a handshake, a started frame or a reply may take; 0: 10 */
    const mtp_logger *logger; /* told about every connection that is refused; must outlive the server */
} mtp_store_server_options;

/* Listen, and serve from a thread of its own until stopped. MTP_E_IO when the address or port is not to be had. */
MTP_API mtp_status mtp_store_server_start(const mtp_store_server_options *options, mtp_store_server **server);
MTP_API int mtp_store_server_port(const mtp_store_server *server);
/* Close all connections, end the thread and free. Accepts NULL. */
MTP_API void mtp_store_server_stop(mtp_store_server *server);

/* 128 random bits as 32 hexadecimal letters. */
MTP_API mtp_status mtp_store_make_secret(char secret[MTP_STORE_SECRET_SIZE]);

/* ---- the store: client ---------------------------------------------------------------------------------------- */

/* One connection. Not for two threads at once. After a failed call the connection is closed, and every further call
 * fails with the first failure; a wait that ran out (MTP_E_NOT_FOUND) is no such failure. */
typedef struct mtp_store mtp_store;

/* Connect to "host:port" or "[v6]:port", trying again until `seconds` are over, since the server may start later than
 * its clients. A wrong secret fails at once (MTP_E_CONFIG). `seconds` also limits each later exchange. */
MTP_API mtp_status mtp_store_connect(const char *endpoint, const char *secret, double seconds, mtp_store **store);
/* Keys are texts of 1 to MTP_STORE_KEY_MAX bytes; values any bytes. */
MTP_API mtp_status mtp_store_set(mtp_store *store, const char *key, const void *value, size_t size);
/* Wait up to `seconds` (0: do not wait) for a key. The value is NUL-terminated beyond `size`; free() it. `size` may be
 * NULL. MTP_E_NOT_FOUND when the time is over. */
MTP_API mtp_status mtp_store_get(mtp_store *store, const char *key, double seconds, void **value, size_t *size);
/* Add to a number that starts at 0, at once for all clients; *sum is the new value. A value that was set and does not
 * have 8 bytes is MTP_E_ARGUMENT. */
MTP_API mtp_status mtp_store_add(mtp_store *store, const char *key, int64_t amount, int64_t *sum);
/* Whether a key is there. */
MTP_API mtp_status mtp_store_check(mtp_store *store, const char *key, bool *there);
/* The numeric address from which this machine reaches the server; lives as long as the connection. */
MTP_API const char *mtp_store_local_address(const mtp_store *store);
/* Accepts NULL. */
MTP_API void mtp_store_close(mtp_store *store);

#ifdef __cplusplus
}
#endif
#endif
