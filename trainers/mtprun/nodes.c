#include "nodes.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "say.h"

static const double store_seconds = 20; /* for one exchange with the store */

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* ---- opening -------------------------------------------------------------------------------------------------- */

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
    if (own->node_rank != 0) say("waiting for node 0 at %s", all->endpoint);
    if (mtp_store_connect(all->endpoint, all->secret, own->node_rank ? own->join_seconds : store_seconds,
                          &all->store) != MTP_OK)
        return say_failure();
    return 0;
}

/* ---- one attempt ---------------------------------------------------------------------------------------------- */

/* A port nobody listens on now. 0 and a message when there is none. */
static int free_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t length = sizeof address;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int port = 0;
    if (fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0 &&
        getsockname(fd, (struct sockaddr *)&address, &length) == 0)
        port = ntohs(address.sin_port);
    if (port == 0) say("error: no free port for MASTER_PORT: %s", strerror(errno));
    if (fd >= 0) close(fd);
    return port;
}

static void make_key(const nodes *all, int attempt, const char *name, char key[300])
{
    snprintf(key, 300, "mtprun/%s/%d/%s", all->own->run_id, attempt, name);
}

/* A value of another node, waited for in steps so that signals are seen. */
static node_end wait_value(nodes *all, int attempt, const char *name, double deadline, char value[512],
                           bool (*stop)(void *), void *user)
{
    char key[300];
    make_key(all, attempt, name, key);
    for (;;) {
        void *got;
        if (stop(user)) return NODE_INTERRUPTED;
        const mtp_status status = mtp_store_get(all->store, key, 0.2, &got, NULL);
        if (status == MTP_OK) {
            snprintf(value, 512, "%s", (char *)got);
            free(got);
            return NODE_RUNS;
        }
        if (status != MTP_E_NOT_FOUND) {
            say("node 0, which hosts the store, is lost: %s", mtp_last_error()->message);
            return NODE_LOST;
        }
        if (now_seconds() > deadline) return NODE_FAILED;
    }
}

static bool set_value(nodes *all, int attempt, const char *name, const char *value)
{
    char key[300];
    make_key(all, attempt, name, key);
    if (mtp_store_set(all->store, key, value, strlen(value)) == MTP_OK) return true;
    say("error: %s", mtp_last_error()->message);
    return false;
}

/* Every node says how many ranks it has; each sums up those before it. */
static node_end number_ranks(nodes *all, int attempt, plan *now, double deadline, bool (*stop)(void *), void *user)
{
    char name[32], value[512];
    snprintf(name, sizeof name, "node/%d", all->own->node_rank);
    snprintf(value, sizeof value, "%d", all->own->num_ranks);
    if (!set_value(all, attempt, name, value)) return NODE_FAILED;
    for (int node = 0; node < all->own->num_nodes; node++) {
        snprintf(name, sizeof name, "node/%d", node);
        const node_end end = wait_value(all, attempt, name, deadline, value, stop, user);
        if (end == NODE_FAILED)
            say("error: node %d of %d did not come within %g s", node, all->own->num_nodes, all->own->join_seconds);
        if (end != NODE_RUNS) return end;
        const int ranks = atoi(value);
        if (node < all->own->node_rank) now->first_rank += ranks;
        now->world_size += ranks;
    }
    return NODE_RUNS;
}

node_end nodes_join(nodes *all, int attempt, plan *now, bool (*stop)(void *), void *user)
{
    const options *own = all->own;
    const double deadline = now_seconds() + own->join_seconds;
    char value[512];
    *now = (plan){.attempt = attempt, .master_port = own->master_port};
    snprintf(now->master_addr, sizeof now->master_addr, "%s", own->master_addr ? own->master_addr : all->host);
    snprintf(now->endpoint, sizeof now->endpoint, "%s", all->endpoint);
    snprintf(now->secret, sizeof now->secret, "%s", all->secret);
    if (own->node_rank == 0 && now->master_port == 0 && (now->master_port = free_port()) == 0) return NODE_FAILED;
    if (own->num_nodes == 1) {
        now->world_size = own->num_ranks;
        return NODE_RUNS;
    }
    const node_end end = number_ranks(all, attempt, now, deadline, stop, user);
    if (end != NODE_RUNS) return end;
    all->met = true;
    if (own->node_rank == 0) {
        snprintf(value, sizeof value, "%d %s", now->master_port, now->master_addr);
        return set_value(all, attempt, "master", value) ? NODE_RUNS : NODE_FAILED;
    }
    const node_end got = wait_value(all, attempt, "master", deadline, value, stop, user);
    if (got == NODE_FAILED) say("error: node 0 did not say where the master is within %g s", own->join_seconds);
    if (got == NODE_RUNS) {
        char *address;
        now->master_port = (int)strtol(value, &address, 10);
        snprintf(now->master_addr, sizeof now->master_addr, "%s", *address ? address + 1 : "");
    }
    return got;
}

void nodes_report(nodes *all, int attempt, node_end end, int code, const char *text)
{
    char key[300], value[512];
    int64_t count = 0;
    if (!all->store) return;
    if (end == NODE_DONE) {
        make_key(all, attempt, "done", key);
        (void)mtp_store_add(all->store, key, 1, &count); /* a lost store is seen by the next look */
        return;
    }
    /* the first failure is the one that counts */
    make_key(all, attempt, "ends", key);
    if (mtp_store_add(all->store, key, 1, &count) != MTP_OK || count != 1) return;
    make_key(all, attempt, "end", key);
    snprintf(value, sizeof value, "%c %d %s", end == NODE_INTERRUPTED ? 'I' : 'F', code, text ? text : "");
    (void)mtp_store_set(all->store, key, value, strlen(value));
}

node_end nodes_look(nodes *all, int attempt, int *code, char *text, size_t size)
{
    char key[300];
    void *got = NULL;
    int64_t done = 0;
    if (!all->store) return NODE_RUNS;
    make_key(all, attempt, "end", key);
    const mtp_status status = mtp_store_get(all->store, key, 0, &got, NULL);
    if (status == MTP_OK) {
        const char *value = got;
        char *rest;
        const bool interrupted = value[0] == 'I';
        *code = (int)strtol(strlen(value) > 2 ? value + 2 : "1 ", &rest, 10);
        snprintf(text, size, "%s", *rest ? rest + 1 : "");
        free(got);
        return interrupted ? NODE_INTERRUPTED : NODE_FAILED;
    }
    make_key(all, attempt, "done", key);
    if (status != MTP_E_NOT_FOUND || mtp_store_add(all->store, key, 0, &done) != MTP_OK) return NODE_LOST;
    return done == all->own->num_nodes ? NODE_DONE : NODE_RUNS;
}

void nodes_close(nodes *all)
{
    if (all->store && all->met) {
        const bool host = all->own->node_rank == 0;
        const double deadline = now_seconds() + all->own->stop_seconds + 5;
        int64_t left = 0;
        do {
            if (mtp_store_add(all->store, "mtprun/left", host ? 0 : 1, &left) != MTP_OK || !host) break;
            if (left >= all->own->num_nodes - 1) break;
            nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
        } while (now_seconds() < deadline);
    }
    mtp_store_close(all->store);
    mtp_store_server_stop(all->server);
    *all = (nodes){.own = NULL};
}
