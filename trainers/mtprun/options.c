#include "options.h"

#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "devices.h"
#include "mtp/comm.h"
#include "mtp/suggest.h"
#include "mtp/version.h"
#include "say.h"

typedef enum kind { FLAG, TEXT, NUMBER, SECONDS } kind;

typedef struct option_row {
    const char *name;
    kind kind;
    size_t offset; /* in struct given */
    long min, max;
    const char *help;
} option_row;

/* What was given, before it is checked as a whole. */
typedef struct given {
    const char *nnodes, *nproc_per_node;
    int node_rank, master_port, max_restarts;
    const char *rdzv_endpoint, *rdzv_id, *master_addr, *log_dir, *redirects, *tee;
    double stop_seconds, join_seconds, last_call_seconds, time_limit, heartbeat;
    bool standalone, no_python, module, node_rank_given;
} given;

#define ROW(name, kind, field, min, max, help)             \
    {                                                      \
        name, kind, offsetof(given, field), min, max, help \
    }
static const option_row rows[] = {
    ROW("nnodes", TEXT, nnodes, 0, 0,
        "N: how many machines; 1 unless given. MIN:MAX: each start takes those that are there"),
    ROW("nproc-per-node", TEXT, nproc_per_node, 0, 0,
        "ranks on this machine: a number; gpu or cpu: one each; auto: gpu where there are some, else cpu; default 1"),
    ROW("node-rank", NUMBER, node_rank, 0, RANKS_MAX,
        "which of the machines this is, from 0; needed when there are several"),
    ROW("rdzv-endpoint", TEXT, rdzv_endpoint, 0, 0, "HOST:PORT of the store, which node 0 hosts"),
    ROW("rdzv-id", TEXT, rdzv_id, 0, 0, "name of the run, the same on all machines; default none"),
    ROW("master-addr", TEXT, master_addr, 0, 0, "MASTER_ADDR; default the host of the endpoint, or 127.0.0.1"),
    ROW("master-port", NUMBER, master_port, 1, 65534, "MASTER_PORT, which is left to the program; default a free one"),
    ROW("max-restarts", NUMBER, max_restarts, 0, 1000000,
        "how often all ranks are started again after one failed, but not with exit code 2 or 130; default 0"),
    ROW("standalone", FLAG, standalone, 0, 0, "one machine, a store of its own on a free port"),
    ROW("log-dir", TEXT, log_dir, 0, 0,
        "keep DIR/RUN_ID/attempt_N/RANK/{stdout,stderr}.log; those of an earlier run are added to"),
    ROW("redirects", TEXT, redirects, 0, 0, "1 stdout, 2 stderr, 3 both: to the log only; 0:1,1:2 by local rank"),
    ROW("tee", TEXT, tee, 0, 0, "the same, to the log and here; default 3 with --log-dir"),
    ROW("no-python", FLAG, no_python, 0, 0, "run the program itself, also when its name ends with .py"),
    ROW("module", FLAG, module, 0, 0, "the program is a Python module: python3 -m; also -m"),
    ROW("stop-seconds", SECONDS, stop_seconds, 0, 86400,
        "how long ranks that are stopped have to end, before SIGKILL; default 30"),
    ROW("join-seconds", SECONDS, join_seconds, 1, 86400, "how long machines wait for each other; default 600"),
    ROW("last-call", SECONDS, last_call_seconds, 0, 86400,
        "how long MIN machines wait for more, up to MAX; default 30"),
    ROW("time-limit", SECONDS, time_limit, 0, 86400,
        "how long a rank may be stopped, or a machine or a rank give no sign of life; default MTP_COMM_TIME_LIMIT, "
        "or 60"),
    ROW("heartbeat", SECONDS, heartbeat, 0, 86400,
        "between signs of life, at most a third of that; default MTP_COMM_HEARTBEAT, or 5"),
};
#undef ROW
enum { NUM_ROWS = (int)(sizeof rows / sizeof *rows), NAME_MAX_LETTERS = 64 };

static void print_help(void)
{
    printf(
        "usage: mtprun [OPTIONS] PROGRAM [ARGUMENTS]\n\n"
        "Starts PROGRAM once for each rank and sees all of them to their end. A PROGRAM whose name ends with .py is\n"
        "run with python3 -u. Options are those of torchrun, with - or _ between the words:\n\n");
    for (int i = 0; i < NUM_ROWS; i++) printf("  --%-16s %s\n", rows[i].name, rows[i].help);
    printf(
        "\nEach rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, GROUP_RANK, GROUP_WORLD_SIZE,\n"
        "ROLE_RANK, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS,\n"
        "TORCHELASTIC_RUN_ID, MTP_RDZV_ENDPOINT, MTP_RDZV_SECRET, MTP_COMM_TIME_LIMIT and MTP_COMM_HEARTBEAT, and\n"
        "OMP_NUM_THREADS = cores / ranks unless it is set. Several machines need the same MTP_RDZV_SECRET on all of\n"
        "them. For trusted networks only.\n\n"
        "With --nnodes MIN:MAX a machine that is lost ends the attempt; the next one (--max-restarts) takes the\n"
        "machines that come within --last-call. One that comes later, or comes back, joins at the next restart. The\n"
        "loss of machine 0, which hosts the store, ends the run.\n\n"
        "SIGINT and SIGTERM go to all ranks; a second one kills them. Exit codes: 0 all ranks ended well; that of the\n"
        "first rank that failed, or 1 when a signal ended it; 2 wrong usage; 130 interrupted.\n");
}

/* A name as the table has it: - for _. */
static const option_row *find_row(const char *name)
{
    const char *names[NUM_ROWS];
    for (int i = 0; i < NUM_ROWS; i++) {
        if (strcmp(rows[i].name, name) == 0) return &rows[i];
        names[i] = rows[i].name;
    }
    const char *nearest = mtp_suggest(name, names, NUM_ROWS);
    if (nearest)
        say_usage("unknown option '--%s' (did you mean '--%s'?)", name, nearest);
    else
        say_usage("unknown option '--%s'; mtprun --help lists them", name);
    return NULL;
}

static bool whole_number(const char *text, long min, long max, long *number)
{
    char *end;
    if (*text < '0' || *text > '9') return false;
    *number = strtol(text, &end, 10);
    return *end == '\0' && *number >= min && *number <= max;
}

static bool seconds_of(const char *text, const option_row *row, double *seconds)
{
    char *end;
    if ((*text < '0' || *text > '9') && *text != '.') return false;
    *seconds = strtod(text, &end);
    return *end == '\0' && *seconds >= (double)row->min && *seconds <= (double)row->max;
}

static bool store_value(given *all, const option_row *row, const char *value)
{
    char *target = (char *)all + row->offset;
    long number;
    if (row->kind == TEXT) {
        if (!*value) {
            say_usage("--%s has an empty value", row->name);
            return false;
        }
        *(const char **)(void *)target = value;
        return true;
    }
    if (row->kind == SECONDS) {
        if (seconds_of(value, row, (double *)(void *)target)) return true;
        say_usage("--%s is '%s'; it must be a number of seconds from %ld to %ld", row->name, value, row->min, row->max);
        return false;
    }
    if (!whole_number(value, row->min, row->max, &number)) {
        say_usage("--%s is '%s'; it must be a whole number from %ld to %ld", row->name, value, row->min, row->max);
        return false;
    }
    *(int *)(void *)target = (int)number;
    if (row->offset == offsetof(given, node_rank)) all->node_rank_given = true;
    return true;
}

/* One option at argv[*at], and its value. */
static bool take_option(given *all, int argc, char **argv, int *at)
{
    char name[NAME_MAX_LETTERS];
    const char *text = argv[*at] + 2, *equals = strchr(text, '=');
    const size_t length = equals ? (size_t)(equals - text) : strlen(text);
    if (length >= sizeof name) return say_usage("unknown option '%s'", argv[*at]), false;
    for (size_t i = 0; i <= length; i++) name[i] = (char)(i == length ? '\0' : text[i] == '_' ? '-' : text[i]);
    const option_row *row = find_row(name);
    if (!row) return false;
    if (row->kind == FLAG) {
        if (equals) return say_usage("--%s takes no value", name), false;
        *(bool *)(void *)((char *)all + row->offset) = true;
        return true;
    }
    if (equals) return store_value(all, row, equals + 1);
    if (*at + 1 >= argc) return say_usage("--%s needs a value", name), false;
    return store_value(all, row, argv[++*at]);
}

static int count_cores(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

static bool set_ranks(const given *all, options *own)
{
    const char *text = all->nproc_per_node ? all->nproc_per_node : "1";
    const bool automatic = strcmp(text, "auto") == 0;
    long number;
    own->num_cores = count_cores();
    const int gpus = automatic || strcmp(text, "gpu") == 0 ? devices_count("/dev") : 0;
    if (strcmp(text, "gpu") == 0 && gpus == 0)
        return say_usage("--nproc-per-node gpu: no GPU here (no /dev/nvidia0, or CUDA_VISIBLE_DEVICES hides all); use "
                         "a number, cpu or auto"),
               false;
    if (gpus > 0)
        own->num_ranks = gpus;
    else if (automatic || strcmp(text, "cpu") == 0)
        own->num_ranks = own->num_cores;
    else if (whole_number(text, 1, RANKS_MAX, &number))
        own->num_ranks = (int)number;
    else
        return say_usage("--nproc-per-node is '%s'; it must be a number from 1 to %d, gpu, cpu or auto", text,
                         RANKS_MAX),
               false;
    return true;
}

/* A time that was given (above 0), or that the environment has, or else the default. */
static bool choose_seconds(double flag, const char *name, double otherwise, double *seconds)
{
    const char *text = getenv(name);
    char *end;
    *seconds = flag > 0 ? flag : otherwise;
    if (flag > 0 || !text || !*text) return true;
    *seconds = strtod(text, &end);
    if (*end == '\0' && *seconds > 0) return true;
    return say_usage("%s is '%s'; it must be a number of seconds above 0", name, text), false;
}

static bool set_times(const given *all, options *own)
{
    own->stop_seconds = all->stop_seconds;
    own->join_seconds = all->join_seconds;
    own->last_call_seconds = all->last_call_seconds;
    if (!choose_seconds(all->time_limit, "MTP_COMM_TIME_LIMIT", 60, &own->time_limit)) return false;
    const double third = own->time_limit / 3;
    if (!choose_seconds(all->heartbeat, "MTP_COMM_HEARTBEAT", third < 5 ? third : 5, &own->heartbeat)) return false;
    if (own->heartbeat <= third) return true;
    return say_usage("--heartbeat %g is too rare for --time-limit %g: at most a third of it", own->heartbeat,
                     own->time_limit),
           false;
}

static bool set_nodes(const given *all, options *own)
{
    long most = 1, least = 1;
    if (all->nnodes) {
        char first[16];
        const char *colon = strchr(all->nnodes, ':');
        snprintf(first, sizeof first, "%.*s", colon ? (int)(colon - all->nnodes) : 15, all->nnodes);
        if (!whole_number(first, 1, RANKS_MAX, &least) ||
            !whole_number(colon ? colon + 1 : all->nnodes, least, RANKS_MAX, &most))
            return say_usage("--nnodes is '%s'; it must be N or MIN:MAX", all->nnodes), false;
        if (!colon) least = most;
    }
    own->min_nodes = (int)least;
    own->num_nodes = (int)most;
    own->node_rank = all->node_rank;
    if (all->standalone && own->num_nodes > 1)
        return say_usage("--standalone is for one machine, --nnodes says %d", own->num_nodes), false;
    if (own->node_rank >= own->num_nodes)
        return say_usage("--node-rank is %d; with %d machine%s it must be below that", own->node_rank, own->num_nodes,
                         plural(own->num_nodes)),
               false;
    if (own->num_nodes > 1 && !all->node_rank_given)
        return say_usage("--nnodes %d: each machine needs its --node-rank", own->num_nodes), false;
    if (own->num_nodes > 1 && !all->rdzv_endpoint && !(all->master_addr && all->master_port))
        return say_usage("--nnodes %d: machines find each other at --rdzv-endpoint HOST:PORT, or at --master-addr and "
                         "the port after --master-port",
                         own->num_nodes),
               false;
    const char *secret = getenv("MTP_RDZV_SECRET");
    if (own->num_nodes > 1 && (!secret || strlen(secret) < MTP_STORE_SECRET_MIN))
        return say_usage("--nnodes %d: set MTP_RDZV_SECRET to the same text of at least %d letters on all machines",
                         own->num_nodes, MTP_STORE_SECRET_MIN),
               false;
    return true;
}

/* "3", or "0:1,1:2". */
static bool valid_streams(const char *name, const char *value)
{
    const char *next = value;
    if (!value || (strlen(value) == 1 && *value >= '0' && *value <= '3')) return true;
    for (;;) {
        char *end;
        const long rank = strtol(next, &end, 10);
        if (end == next || rank < 0 || rank >= RANKS_MAX || *end != ':' || end[1] < '0' || end[1] > '3') break;
        if (end[2] == '\0') return true;
        if (end[2] != ',') break;
        next = end + 3;
    }
    say_usage("--%s is '%s'; it must be 0, 1 (stdout), 2 (stderr) or 3 (both), or such by local rank: 0:3,1:2", name,
              value);
    return false;
}

int options_streams(const char *value, int local_rank)
{
    if (!value) return 0;
    if (!value[1]) return value[0] - '0';
    for (const char *next = value; next; next = strchr(next, ',') ? strchr(next, ',') + 1 : NULL)
        if (strtol(next, NULL, 10) == local_rank) return *(strchr(next, ':') + 1) - '0';
    return 0;
}

static bool check(const given *all, options *own)
{
    *own = (options){.run_id = all->rdzv_id ? all->rdzv_id : "none",
                     .endpoint = all->standalone ? NULL : all->rdzv_endpoint,
                     .master_addr = all->master_addr,
                     .master_port = all->master_port,
                     .max_restarts = all->max_restarts,
                     .log_dir = all->log_dir,
                     .redirects = all->redirects,
                     .tee = all->tee,
                     .standalone = all->standalone,
                     .no_python = all->no_python,
                     .module = all->module};
    if (!set_ranks(all, own) || !set_nodes(all, own) || !set_times(all, own)) return false;
    if (!valid_streams("redirects", all->redirects) || !valid_streams("tee", all->tee)) return false;
    if ((all->redirects || all->tee) && !all->log_dir)
        return say_usage("--redirects and --tee need --log-dir: where the logs go"), false;
    if (strlen(own->run_id) > 128 || strchr(own->run_id, '/') || own->run_id[0] == '.')
        return say_usage("--rdzv-id '%s' must be a name: at most 128 letters, no '/', no '.' in front", own->run_id),
               false;
    if (all->no_python && all->module) return say_usage("--no-python and --module exclude each other"), false;
    if (own->log_dir && !own->redirects && !own->tee) own->tee = "3";
    return true;
}

bool options_parse(int argc, char **argv, options *own, int *exit_code)
{
    given all = {.stop_seconds = 30, .join_seconds = 600, .last_call_seconds = 30};
    int at = 1;
    *exit_code = 2;
    for (; at < argc && argv[at][0] == '-'; at++) {
        if (strcmp(argv[at], "--") == 0) {
            at++;
            break;
        }
        if (strcmp(argv[at], "--help") == 0 || strcmp(argv[at], "-h") == 0 || strcmp(argv[at], "--version") == 0) {
            if (argv[at][2] == 'v')
                printf("mtprun %s\n", mtp_version());
            else
                print_help();
            *exit_code = fflush(stdout) == 0 ? 0 : 1;
            return false;
        }
        if (strcmp(argv[at], "-m") == 0)
            all.module = true;
        else if (argv[at][1] != '-')
            return say_usage("unknown option '%s'; mtprun --help lists them", argv[at]), false;
        else if (!take_option(&all, argc, argv, &at))
            return false;
    }
    if (at >= argc) return say_usage("no program to run; mtprun --help shows how"), false;
    if (!check(&all, own)) return false;
    own->program = argv + at;
    return true;
}
