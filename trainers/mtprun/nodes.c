#include "nodes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "say.h"

static const double store_seconds = 20; /* for one exchange with the store */

double nodes_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

/* "host:port", where port may be 0; brackets around an IPv6 address. */
static bool split(const char *endpoint, char *host, int *port)
{
    const char *colon = strrchr(endpoint, ':');
    char *end = NULL;
    const long number = colon && colon[1] ? strtol(colon + 1, &end, 10) : -1;
    if (number < 0 || number > 65535 || *end || colon == endpoint || colon - endpoint >= ADDRESS_LETTERS) return false;
    const bool brackets = endpoint[0] == '[' && colon[-1] == ']';
    snprintf(host, ADDRESS_LETTERS, "%.*s", (int)(colon - endpoint) - 2 * brackets, endpoint + brackets);
    *port = (int)number;
    return *host != '\0';
}

static int choose_secret(nodes *all)
{
    const char *given = getenv("MTP_RDZV_SECRET");
    char made[MTP_STORE_SECRET_SIZE];
    if (given && *given) {
        if (strlen(given) >= sizeof all->secret) return say_usage("MTP_RDZV_SECRET is too long");
        snprintf(all->secret, sizeof all->secret, "%s", given);
        return 0;
    }
    if (mtp_store_make_secret(made) != MTP_OK) return say_failure();
    snprintf(all->secret, sizeof all->secret, "%s", made);
    return 0;
}

static int choose_endpoint(nodes *all, int *port)
{
    const options *own = all->own;
    snprintf(all->host, sizeof all->host, "127.0.0.1");
    *port = 0;
    if (own->endpoint) {
        if (!split(own->endpoint, all->host, port) || (*port == 0 && own->num_nodes > 1))
            return say_usage("--rdzv-endpoint is '%s'; it must be HOST:PORT", own->endpoint);
    } else if (own->num_nodes > 1) {
        if (strlen(own->master_addr) >= sizeof all->host) return say_usage("--master-addr is too long");
        snprintf(all->host, sizeof all->host, "%s", own->master_addr);
        *port = own->master_port + 1;
    }
    return 0;
}

int nodes_open(nodes *all, const options *own)
{
    int port;
    *all = (nodes){.own = own};
    int code = choose_secret(all);
    if (code == 0) code = choose_endpoint(all, &port);
    if (code != 0) return code;
    if (own->node_rank == 0) {
        const mtp_store_server_options serve = {
            .address = all->host, .port = port, .secret = all->secret, .logger = say_logger()};
        if (mtp_store_server_start(&serve, &all->server) != MTP_OK) return say_failure();
        port = mtp_store_server_port(all->server);
    }
    snprintf(all->endpoint, sizeof all->endpoint, strchr(all->host, ':') ? "[%s]:%d" : "%s:%d", all->host, port);
    if (own->num_nodes == 1) return 0;
    all->all = calloc((size_t)own->num_nodes, sizeof *all->all);
    if (!all->all) return say("error: out of memory"), 1;
    if (mtp_store_make_secret(all->incarnation) != MTP_OK) return say_failure();
    if (own->node_rank != 0) say("waiting for node 0 at %s", all->endpoint);
    if (mtp_store_connect(all->endpoint, all->secret, own->node_rank ? own->join_seconds : store_seconds,
                          &all->store) != MTP_OK)
        return say_failure();
    return 0;
}

/* ---- keys and signs of life -------------------------------------------------------------------------------------- */

void nodes_key(const nodes *all, const char *name, char key[NODE_KEY])
{
    snprintf(key, NODE_KEY, "mtprun/%s/%s", all->own->run_id, name);
}

void nodes_attempt_key(const nodes *all, int attempt, const char *name, char key[NODE_KEY])
{
    snprintf(key, NODE_KEY, "mtprun/%s/%d/%s", all->own->run_id, attempt, name);
}

static bool count_beats(nodes *all, int rank, int64_t amount, int64_t *beats)
{
    char key[NODE_KEY], name[32];
    snprintf(name, sizeof name, "beat/%d", rank);
    nodes_key(all, name, key);
    return mtp_store_add(all->store, key, amount, beats) == MTP_OK;
}

bool nodes_observe(nodes *all, int rank)
{
    node *one = &all->all[rank];
    int64_t beats;
    if (!count_beats(all, rank, 0, &beats)) return false;
    if (beats != one->beats) one->changed = nodes_now();
    one->beats = beats;
    return true;
}

bool nodes_beat(nodes *all)
{
    const options *own = all->own;
    const double now = nodes_now(), since = now - all->last_beat;
    int64_t beats;
    if (since < own->heartbeat) return true;
    if (!count_beats(all, own->node_rank, 1, &beats)) return false;
    for (int rank = 1; own->node_rank == 0 && rank < own->num_nodes; rank++) {
        /* this process itself was stopped: what it has not seen is nobody's fault */
        if (since > 2 * own->heartbeat + 1 && all->last_beat > 0) all->all[rank].changed = now;
        if (!nodes_observe(all, rank)) return false;
    }
    all->last_beat = now;
    return true;
}

bool nodes_silent(const nodes *all, int rank, double seconds)
{
    return rank != 0 && nodes_now() - all->all[rank].changed >= seconds;
}

/* ---- how an attempt ends ----------------------------------------------------------------------------------------- */

void nodes_report(nodes *all, int attempt, node_end end, int code, const char *text)
{
    char key[NODE_KEY], value[NODE_TEXT];
    int64_t count = 0;
    if (!all->store) return;
    if (end == NODE_DONE) {
        nodes_attempt_key(all, attempt, "done", key);
        (void)mtp_store_add(all->store, key, 1, &count); /* a lost store is seen by the next look */
        return;
    }
    /* the first failure is the one that counts */
    nodes_attempt_key(all, attempt, "ends", key);
    if (mtp_store_add(all->store, key, 1, &count) != MTP_OK || count != 1) return;
    nodes_attempt_key(all, attempt, "end", key);
    snprintf(value, sizeof value, "%c %d %s", end == NODE_INTERRUPTED ? 'I' : 'F', code, text ? text : "");
    (void)mtp_store_set(all->store, key, value, strlen(value));
}

/* Node 0: a machine of this attempt that gives no sign of life ends it. */
static void report_silent(nodes *all, int attempt)
{
    char text[NODE_TEXT];
    const options *own = all->own;
    if (own->node_rank != 0) return;
    for (int rank = 1; rank < own->num_nodes; rank++) {
        const node *one = &all->all[rank];
        if (!one->takes_part || !nodes_silent(all, rank, own->time_limit - own->heartbeat)) continue;
        snprintf(text, sizeof text, "machine %d (%s) has given no sign of life for %.0f s: it is lost", rank, one->host,
                 nodes_now() - one->changed);
        nodes_report(all, attempt, NODE_FAILED, 1, text);
        return;
    }
}

static node_end read_end(void *got, int *code, char *text, size_t size)
{
    const char *value = got;
    char *rest;
    const bool interrupted = value[0] == 'I';
    *code = (int)strtol(strlen(value) > 2 ? value + 2 : "1 ", &rest, 10);
    snprintf(text, size, "%s", *rest ? rest + 1 : "");
    free(got);
    return interrupted ? NODE_INTERRUPTED : NODE_FAILED;
}

node_end nodes_look(nodes *all, int attempt, int *code, char *text, size_t size)
{
    char key[NODE_KEY];
    void *got = NULL;
    int64_t done = 0;
    if (!all->store) return NODE_RUNS;
    if (!nodes_beat(all)) return NODE_LOST;
    report_silent(all, attempt);
    nodes_attempt_key(all, attempt, "end", key);
    const mtp_status status = mtp_store_get(all->store, key, 0, &got, NULL);
    if (status == MTP_OK) return read_end(got, code, text, size);
    nodes_attempt_key(all, attempt, "done", key);
    if (status != MTP_E_NOT_FOUND || mtp_store_add(all->store, key, 0, &done) != MTP_OK) return NODE_LOST;
    return done == all->members ? NODE_DONE : NODE_RUNS;
}

/* How many of the other machines are there and have not left. */
static int others_there(const nodes *all)
{
    int count = 0;
    for (int rank = 1; rank < all->own->num_nodes; rank++)
        count += all->all[rank].beats > 0 && !nodes_silent(all, rank, 3 * all->own->heartbeat);
    return count;
}

void nodes_close(nodes *all, int code)
{
    char key[NODE_KEY], value[16];
    int64_t left = 0;
    if (all->store) {
        const bool host = all->own->node_rank == 0;
        const double deadline = nodes_now() + all->own->stop_seconds + 5;
        nodes_key(all, "over", key);
        snprintf(value, sizeof value, "%d", code);
        if (host) (void)mtp_store_set(all->store, key, value, strlen(value));
        for (int rank = 1; host && rank < all->own->num_nodes; rank++) (void)nodes_observe(all, rank);
        nodes_key(all, "left", key);
        /* one that has left beats no more: it stops to count on both sides, one a little later */
        while (mtp_store_add(all->store, key, host ? 0 : 1, &left) == MTP_OK && host && nodes_beat(all)) {
            if (left >= others_there(all) || nodes_now() > deadline) break;
            nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
        }
    }
    mtp_store_close(all->store);
    mtp_store_server_stop(all->server);
    free(all->all);
    *all = (nodes){.own = NULL};
}
