/* Who takes part in an attempt: every machine says that it is there, node 0 decides and tells all. */
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "nodes.h"
#include "say.h"

enum { LOOK_MS = 50, MEMBER_LETTERS = 64 };

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

static node_end store_lost(void)
{
    say("node 0, which hosts the store, is lost, and the run ends with it: %s", mtp_last_error()->message);
    return NODE_LOST;
}

static bool set_value(nodes *all, const char *key, const char *value)
{
    return mtp_store_set(all->store, key, value, strlen(value)) == MTP_OK;
}

/* The value of a key that may not be there: then *value is NULL. False: the store is lost. */
static bool get_value(nodes *all, const char *key, char **value)
{
    void *got = NULL;
    const mtp_status status = mtp_store_get(all->store, key, 0, &got, NULL);
    *value = got;
    return status == MTP_OK || status == MTP_E_NOT_FOUND;
}

static void pause_briefly(void)
{
    nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * 1000000L}, NULL);
}

/* "RANKS INCARNATION HOST" under node/RANK of the attempt. */
static bool sign_in(nodes *all, int attempt)
{
    char key[NODE_KEY], name[32], value[NODE_TEXT], host[NODE_HOST] = "?";
    gethostname(host, sizeof host - 1);
    snprintf(name, sizeof name, "node/%d", all->own->node_rank);
    snprintf(value, sizeof value, "%d %s %s", all->own->num_ranks, all->incarnation, host);
    nodes_attempt_key(all, attempt, name, key);
    return set_value(all, key, value);
}

/* ---- node 0 ------------------------------------------------------------------------------------------------------ */

/* Which machines have signed in and are alive. False: the store is lost. */
static bool look_who_is_there(nodes *all, int attempt, bool *there, int *count)
{
    const options *own = all->own;
    const double alive_within = 3 * own->heartbeat + 1;
    *count = 0;
    for (int rank = 0; rank < own->num_nodes; rank++) {
        char key[NODE_KEY], name[32], *value;
        node *one = &all->all[rank];
        snprintf(name, sizeof name, "node/%d", rank);
        nodes_attempt_key(all, attempt, name, key);
        if (!get_value(all, key, &value)) return false;
        there[rank] = value && sscanf(value, "%d %32s %63s", &one->ranks, one->incarnation, one->host) == 3;
        free(value);
        /* one may have signed in and died while it waited */
        if (there[rank] && nodes_silent(all, rank, alive_within) && !nodes_observe(all, rank)) return false;
        there[rank] = there[rank] && !nodes_silent(all, rank, alive_within);
        *count += there[rank];
    }
    return true;
}

/* Whether somebody who took part in the last attempt, and is not known to be lost, has not come yet. */
static bool somebody_may_come(const nodes *all, int attempt, const bool *there)
{
    const options *own = all->own;
    for (int rank = 0; rank < own->num_nodes; rank++)
        if (!there[rank] && (attempt == 0 || all->all[rank].takes_part) &&
            !(attempt > 0 && nodes_silent(all, rank, own->time_limit - own->heartbeat)))
            return true;
    return false;
}

/* Wait for enough machines. */
static node_end gather(nodes *all, int attempt, bool *there, node_stop stop)
{
    const options *own = all->own;
    const double deadline = nodes_now() + own->join_seconds;
    double last_call = 0;
    for (;; pause_briefly()) {
        int count;
        if (stop.wanted(stop.user)) return NODE_INTERRUPTED;
        if (!nodes_beat(all) || !look_who_is_there(all, attempt, there, &count)) return store_lost();
        if (count == own->num_nodes) return NODE_RUNS;
        if (count < own->min_nodes) {
            last_call = 0;
            if (nodes_now() > deadline) break;
            continue;
        }
        if (last_call == 0) last_call = nodes_now() + own->last_call_seconds;
        if (nodes_now() >= last_call || !somebody_may_come(all, attempt, there)) return NODE_RUNS;
    }
    for (int rank = 0; rank < own->num_nodes; rank++)
        if (!there[rank]) say("error: node %d of %d did not come within %g s", rank, own->num_nodes, own->join_seconds);
    return NODE_FAILED;
}

/* "PORT ADDRESS" and a line "RANK RANKS INCARNATION" for each machine; freed by the caller. */
static char *write_members(nodes *all, const bool *there, const plan *now)
{
    const size_t size = ADDRESS_LETTERS + 32 + (size_t)all->own->num_nodes * MEMBER_LETTERS;
    char *text = malloc(size);
    if (!text) return NULL;
    size_t used = (size_t)snprintf(text, size, "%d %s\n", now->master_port, now->master_addr);
    for (int rank = 0; rank < all->own->num_nodes; rank++) {
        node *one = &all->all[rank];
        one->takes_part = there[rank];
        if (there[rank])
            used += (size_t)snprintf(text + used, size - used, "%d %d %s\n", rank, one->ranks, one->incarnation);
    }
    return text;
}

static node_end decide(nodes *all, int attempt, plan *now, node_stop stop)
{
    char key[NODE_KEY], value[16];
    bool *there = calloc((size_t)all->own->num_nodes, sizeof *there);
    char *members = NULL;
    nodes_key(all, "current", key);
    snprintf(value, sizeof value, "%d", attempt);
    node_end end = NODE_RUNS;
    if (!there)
        end = NODE_FAILED;
    else if (!set_value(all, key, value))
        end = store_lost();
    if (end == NODE_RUNS) end = gather(all, attempt, there, stop);
    if (end == NODE_RUNS) members = write_members(all, there, now);
    if (members) {
        nodes_attempt_key(all, attempt, "members", key);
        if (!set_value(all, key, members)) end = store_lost();
    } else if (end == NODE_RUNS) {
        say("error: out of memory");
        end = NODE_FAILED;
    }
    free(members);
    free(there);
    return end;
}

/* ---- every node
 * ------------------------------------------------------------------------------------------------------- */

/* Fill `now` from what node 0 wrote. *taken: this machine takes part. *replaced: a process that was here before does.
 */
static bool read_members(nodes *all, const char *text, plan *now, bool *taken, bool *replaced)
{
    const options *own = all->own;
    int used = 0, rank, ranks;
    char incarnation[MTP_STORE_SECRET_SIZE];
    *taken = *replaced = false;
    now->world_size = now->first_rank = now->group_size = 0;
    if (sscanf(text, "%d %255[^\n]\n%n", &now->master_port, now->master_addr, &used) != 2 || used == 0) return false;
    for (const char *line = text + used; *line; line = strchr(line, '\n') + 1) {
        if (sscanf(line, "%d %d %32s", &rank, &ranks, incarnation) != 3 || !strchr(line, '\n')) return false;
        if (rank == own->node_rank) {
            *taken = strcmp(incarnation, all->incarnation) == 0;
            *replaced = !*taken;
            now->group_rank = now->group_size;
        }
        if (rank < own->node_rank) now->first_rank += ranks;
        now->world_size += ranks;
        now->group_size++;
    }
    all->members = now->group_size;
    return true;
}

/* Wait until node 0 has decided on an attempt. */
static node_end wait_members(nodes *all, int attempt, double deadline, node_stop stop, char **members, int *code)
{
    char decided[NODE_KEY], over[NODE_KEY], *value;
    nodes_attempt_key(all, attempt, "members", decided);
    nodes_key(all, "over", over);
    for (;; pause_briefly()) {
        if (stop.wanted(stop.user)) return NODE_INTERRUPTED;
        if (!nodes_beat(all) || !get_value(all, decided, members)) return store_lost();
        if (*members) return NODE_RUNS;
        if (!get_value(all, over, &value)) return store_lost();
        if (value) {
            *code = atoi(value);
            free(value);
            say("the run has ended, with exit code %d, before this machine took part", *code);
            return NODE_OVER;
        }
        if (deadline > 0 && nodes_now() > deadline) {
            say("error: node 0 did not get enough machines together within %g s", all->own->join_seconds);
            return NODE_FAILED;
        }
    }
}

/* The attempt that runs, when that is later than `attempt`: for a machine that comes late. */
static bool catch_up(nodes *all, int *attempt)
{
    char key[NODE_KEY], *value;
    nodes_key(all, "current", key);
    if (!get_value(all, key, &value)) return false;
    if (value && atoi(value) > *attempt) *attempt = atoi(value);
    free(value);
    return true;
}

/* Until an attempt has this machine among its members. */
static node_end take_part(nodes *all, int attempt, plan *now, node_stop stop, int *code)
{
    const bool host = all->own->node_rank == 0;
    double deadline = host ? 0 : nodes_now() + all->own->join_seconds + all->own->last_call_seconds;
    if (!host && !catch_up(all, &attempt)) return store_lost();
    for (;; attempt++) {
        char *members = NULL, text[64];
        bool taken = false, replaced = false;
        now->attempt = attempt;
        if (!nodes_beat(all) || !sign_in(all, attempt)) return store_lost();
        node_end end = host ? decide(all, attempt, now, stop) : NODE_RUNS;
        if (end == NODE_RUNS) end = wait_members(all, attempt, deadline, stop, &members, code);
        const bool good = end == NODE_RUNS && read_members(all, members, now, &taken, &replaced);
        free(members);
        if (end != NODE_RUNS) return end;
        if (!good) return say("error: what node 0 says about the members cannot be read"), NODE_FAILED;
        if (taken) return NODE_RUNS;
        snprintf(text, sizeof text, "machine %d was lost and has been started anew", all->own->node_rank);
        if (replaced) nodes_report(all, attempt, NODE_FAILED, 1, text);
        if (deadline > 0) say("the run goes on without this machine, which joins at the next restart");
        deadline = 0;
    }
}

node_end nodes_join(nodes *all, int attempt, plan *now, node_stop stop, int *code)
{
    const options *own = all->own;
    *now = (plan){.attempt = attempt, .master_port = own->master_port, .group_size = 1};
    snprintf(now->master_addr, sizeof now->master_addr, "%s", own->master_addr ? own->master_addr : all->host);
    snprintf(now->endpoint, sizeof now->endpoint, "%s", all->endpoint);
    snprintf(now->secret, sizeof now->secret, "%s", all->secret);
    if (own->node_rank == 0 && now->master_port == 0 && (now->master_port = free_port()) == 0) return NODE_FAILED;
    if (own->num_nodes == 1) {
        now->world_size = own->num_ranks;
        return NODE_RUNS;
    }
    const node_end end = take_part(all, attempt, now, stop, code);
    if (end != NODE_RUNS) return end;
    if (own->min_nodes < own->num_nodes)
        say("%d machine%s of at most %d, %d rank%s in all", now->group_size, plural(now->group_size), own->num_nodes,
            now->world_size, plural(now->world_size));
    return NODE_RUNS;
}
