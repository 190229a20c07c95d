#include "comm/place.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct launcher {
    const char *rank, *world_size, *local_rank, *local_world_size;
} launcher;

static const launcher launchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    /* SLURM_NTASKS is set in a batch script too, where no task was started yet */
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
};

/* NULL when not set or empty. */
static const char *value_of(const char *name)
{
    const char *value = name ? getenv(name) : NULL;
    return value && *value ? value : NULL;
}

static mtp_status number_of(const char *name, long min, long max, int *number)
{
    const char *text = value_of(name);
    char *end;
    if (!text) return MTP_FAIL(MTP_E_CONFIG, "the environment has no %s", name);
    const long parsed = strtol(text, &end, 10);
    if (*end || text[0] < '0' || text[0] > '9' || parsed < min || parsed > max)
        return MTP_FAIL(MTP_E_CONFIG, "%s is '%s'; it must be a number from %ld to %ld", name, text, min, max);
    *number = (int)parsed;
    return MTP_OK;
}

static mtp_status read_place(mtp_comm_place *place)
{
    enum { RANKS_MAX = MTP_STORE_CONNECTIONS_MAX };
    *place = (mtp_comm_place){.world_size = 1, .local_world_size = 1};
    const launcher *by = NULL;
    for (size_t i = 0; !by && i < sizeof launchers / sizeof *launchers; i++)
        /* srun's rank alone is no sign of a step with tasks */
        if (value_of(launchers[i].world_size) || (i == 0 && value_of(launchers[i].rank))) by = &launchers[i];
    if (!by) return MTP_OK;
    if (!value_of(by->world_size) || !value_of(by->rank))
        return MTP_FAIL(MTP_E_CONFIG,
                        "the environment has %s but no %s: ranks are started by mtprun (or torchrun, srun, mpirun), "
                        "which set both; for one process unset it",
                        value_of(by->rank) ? by->rank : by->world_size, value_of(by->rank) ? by->world_size : by->rank);
    MTP_TRY(number_of(by->world_size, 1, RANKS_MAX, &place->world_size));
    MTP_TRY(number_of(by->rank, 0, place->world_size - 1, &place->rank));
    place->local_world_size = place->world_size == 1;
    if (value_of(by->local_world_size))
        MTP_TRY(number_of(by->local_world_size, 1, place->world_size, &place->local_world_size));
    const int local_max = place->local_world_size ? place->local_world_size : place->world_size;
    if (value_of(by->local_rank)) return number_of(by->local_rank, 0, local_max - 1, &place->local_rank);
    return MTP_OK;
}

/* Rank 0 hosts the store: where. */
static mtp_status read_host(mtp__meeting *meeting)
{
    const char *address = value_of("MASTER_ADDR");
    int master_port;
    if (!address && !meeting->one_node)
        return MTP_FAIL(MTP_E_CONFIG,
                        "MASTER_ADDR must name the machine of rank 0, since the ranks are not (or may not "
                        "be) all on one node; mtprun sets it");
    if (meeting->one_node) address = "127.0.0.1";
    if (value_of("MTP_RDZV_PORT")) {
        MTP_TRY(number_of("MTP_RDZV_PORT", 1, 65535, &meeting->port));
    } else {
        MTP_TRY_AT(number_of("MASTER_PORT", 1, 65534, &master_port),
                   "%d ranks without MTP_RDZV_ENDPOINT or MTP_RDZV_PORT", meeting->place.world_size);
        meeting->port = master_port + 1;
    }
    if (strlen(address) >= sizeof meeting->address)
        return MTP_FAIL(MTP_E_CONFIG, "MASTER_ADDR has %zu letters; that is no address", strlen(address));
    meeting->host = meeting->place.rank == 0;
    snprintf(meeting->address, sizeof meeting->address, "%s", address);
    snprintf(meeting->endpoint, sizeof meeting->endpoint, strchr(address, ':') ? "[%s]:%d" : "%s:%d", address,
             meeting->port);
    return MTP_OK;
}

static mtp_status read_secret(mtp__meeting *meeting, bool hosted_here, const char *run_id)
{
    const char *secret = value_of("MTP_RDZV_SECRET");
    if (!secret && !(hosted_here && meeting->one_node))
        return MTP_FAIL(MTP_E_CONFIG,
                        "MTP_RDZV_SECRET is not set; set it to the same text of at least %d letters on "
                        "all nodes",
                        MTP_STORE_SECRET_MIN);
    if (secret && strlen(secret) >= sizeof meeting->secret)
        return MTP_FAIL(MTP_E_CONFIG, "MTP_RDZV_SECRET has %zu letters; %zu are the limit", strlen(secret),
                        sizeof meeting->secret - 1);
    /* on loopback and without a secret to share, the run id keeps runs apart; it keeps nobody out */
    snprintf(meeting->secret, sizeof meeting->secret, secret ? "%s" : "loopback %s", secret ? secret : run_id);
    return MTP_OK;
}

mtp_status mtp__meeting_read(mtp__meeting *meeting)
{
    *meeting = (mtp__meeting){.port = 0};
    MTP_TRY(read_place(&meeting->place));
    meeting->one_node = meeting->place.local_world_size == meeting->place.world_size;
    if (meeting->place.world_size == 1) return MTP_OK;
    const char *run_id = value_of("TORCHELASTIC_RUN_ID"), *restarts = value_of("TORCHELASTIC_RESTART_COUNT");
    const char *endpoint = value_of("MTP_RDZV_ENDPOINT");
    if (!run_id) run_id = "none";
    if (strlen(run_id) > 128 || (restarts && strlen(restarts) > 16))
        return MTP_FAIL(MTP_E_CONFIG, "TORCHELASTIC_RUN_ID or _RESTART_COUNT is too long: at most 128 and 16 letters");
    snprintf(meeting->run, sizeof meeting->run, "%s/%s", run_id, restarts ? restarts : "0");
    if (!endpoint) {
        MTP_TRY(read_host(meeting));
    } else {
        char host[MTP__NET_NAME];
        MTP_TRY_AT(mtp__net_split(endpoint, host, &meeting->port), "MTP_RDZV_ENDPOINT");
        snprintf(meeting->endpoint, sizeof meeting->endpoint, "%.*s", (int)sizeof meeting->endpoint - 1, endpoint);
    }
    return read_secret(meeting, endpoint == NULL, run_id);
}
