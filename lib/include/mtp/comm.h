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

#include "mtp/context.h"
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

/* ---- collectives ---------------------------------------------------------------------------------------------- */

/* Operations that all ranks call in the same order with the same sizes. They run one after the other on a thread of the
 * communicator. The order of a reduction depends on the world size and the number of values only: the same world size
 * gives the same bits, on every rank. After the first failure every further call fails with it: the ranks no longer
 * agree on what comes next, and the run must be started again.
 *
 * Another thread gives a sign of life to the store at every heartbeat. A rank that is killed or stopped, or whose
 * machine is lost, is noticed within the time limit also while no operation waits for it. A rank that hangs but lives
 * is noticed by the time limit of the next operation. Either way the message names it, with its host and process.
 *
 * One thread at a time may call the functions of one communicator. */
typedef struct mtp_comm mtp_comm;

typedef enum mtp_reduce { MTP_REDUCE_SUM, MTP_REDUCE_MAX, MTP_REDUCE_MIN } mtp_reduce;

typedef struct mtp_comm_options {
    /* How long an operation may take, finding each other too, and within which a rank that gives no sign of life is
     * noticed. 0: MTP_COMM_TIME_LIMIT of the environment, or else 60. */
    double seconds;
    /* Between signs of life, at most a third of `seconds`. 0: MTP_COMM_HEARTBEAT of the environment, or else 5, or a
     * third of `seconds` when that is less. */
    double heartbeat_seconds;
    const mtp_logger *logger; /* must outlive the communicator; may be NULL */
    /* Called at most once, from a thread of the communicator, as soon as it has failed: an operation did, or a rank
     * gave no sign of life. The message says what is known. The thread that calls the functions here may be anywhere,
     * and may wait for something that never comes; what is done about that is the program's choice. May be NULL. */
    void (*failed)(void *user, const char *message);
    void *user;
} mtp_comm_options;

/* Which process of how many this is. */
typedef struct mtp_comm_place {
    int rank, world_size;
    int local_rank, local_world_size; /* on this node; local_world_size is 0 when the launcher does not say */
} mtp_comm_place;

/* Find the other ranks, as the environment says. The place of this process:
 *   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE       mtprun, torchrun
 *   SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID    srun
 *   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE    mpirun (Open MPI)
 *   none of them                                         a world of one rank
 * The store through which they meet is at MTP_RDZV_ENDPOINT. Without it rank 0 hosts one at MASTER_ADDR (127.0.0.1 when
 * all ranks are on one node) and the port MTP_RDZV_PORT, or else MASTER_PORT + 1. MTP_RDZV_SECRET is its secret; it may
 * be missing only where rank 0 hosts the store for one node. TORCHELASTIC_RUN_ID and TORCHELASTIC_RESTART_COUNT keep
 * runs and their restarts apart. MTP_E_CONFIG for what is missing or contradicts itself. */
MTP_API mtp_status mtp_comm_create(const mtp_comm_options *options, mtp_comm **comm);
/* A second communicator of the same ranks whose data is device memory of `context`: sums (F32, BF16) and broadcasts by
 * NCCL, which begin behind what was launched on the device when they are asked for, and are complete when mtp_comm_wait
 * returns; nothing else. All ranks call it; `ranks` and `context` must outlive it. A rank that `ranks` finds to be lost
 * ends its operations too. MTP_E_UNSUPPORTED for the CPU, and without NCCL. */
MTP_API mtp_status mtp_comm_create_device(mtp_comm *ranks, mtp_context *context, mtp_comm **comm);
MTP_API mtp_comm_place mtp_comm_where(const mtp_comm *comm);
/* MTP_OK, or the failure that every further operation would give. */
MTP_API mtp_status mtp_comm_check(mtp_comm *comm);
/* Accepts NULL. Started operations must have been waited for. A rank 0 that hosts the store waits for the others to
 * come here too, unless the communicator has failed. */
MTP_API void mtp_comm_free(mtp_comm *comm);

/* Reduce `count` values over all ranks, in place. dtype is MTP_F32 or MTP_BF16; bf16 is reduced in fp32 and rounded to
 * nearest even after each rank. MAX and MIN give NaN when a rank has NaN. */
MTP_API mtp_status mtp_comm_all_reduce(mtp_comm *comm, void *data, int64_t count, mtp_dtype dtype, mtp_reduce reduce);
/* The same without waiting. `data` must not be touched until mtp_comm_wait has returned; each start needs its wait,
 * which frees the request, also after a failure. */
typedef struct mtp_comm_request mtp_comm_request;
MTP_API mtp_status mtp_comm_all_reduce_start(mtp_comm *comm, void *data, int64_t count, mtp_dtype dtype,
                                             mtp_reduce reduce, mtp_comm_request **request);
MTP_API mtp_status mtp_comm_wait(mtp_comm *comm, mtp_comm_request *request);
/* `size` bytes of rank `root` to all. */
MTP_API mtp_status mtp_comm_broadcast(mtp_comm *comm, void *data, int64_t size, int root);
/* `size` bytes of each rank, in the order of the ranks, to all; `out` has world_size * size bytes. */
MTP_API mtp_status mtp_comm_all_gather(mtp_comm *comm, const void *data, int64_t size, void *out);
/* Returns when all ranks have called it. */
MTP_API mtp_status mtp_comm_barrier(mtp_comm *comm);

#ifdef __cplusplus
}
#endif
#endif
