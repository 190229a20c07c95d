#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "plan.h"

enum { NUM_SET = 18 };

/* What a rank must not inherit: torchrun's own store, which is not here; and whatever is set anew below. */
static bool inherited(const char *setting, char *const *made, int count)
{
    static const char agent[] = "TORCHELASTIC_USE_AGENT_STORE=";
    if (strncmp(setting, agent, sizeof agent - 1) == 0) return false;
    for (int i = 0; i < count; i++) {
        const size_t name = (size_t)(strchr(made[i], '=') - made[i]) + 1;
        if (strncmp(setting, made[i], name) == 0) return false;
    }
    return true;
}

static void put(char **made, int *count, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void put(char **made, int *count, const char *format, ...)
{
    char setting[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(setting, sizeof setting, format, args);
    va_end(args);
    made[*count] = strdup(setting);
    if (made[*count]) ++*count;
}

char **environment_make(const options *own, const plan *now, int local_rank)
{
    size_t existing = 0;
    int count = 0;
    while (environ[existing]) existing++;
    char **made = calloc(existing + NUM_SET + 1, sizeof *made);
    if (!made) return NULL;
    const int rank = now->first_rank + local_rank;
    put(made, &count, "RANK=%d", rank);
    put(made, &count, "LOCAL_RANK=%d", local_rank);
    put(made, &count, "WORLD_SIZE=%d", now->world_size);
    put(made, &count, "LOCAL_WORLD_SIZE=%d", own->num_ranks);
    put(made, &count, "NODE_RANK=%d", own->node_rank);
    put(made, &count, "GROUP_RANK=%d", now->group_rank);
    put(made, &count, "GROUP_WORLD_SIZE=%d", now->group_size);
    put(made, &count, "ROLE_RANK=%d", rank);
    put(made, &count, "MASTER_ADDR=%s", now->master_addr);
    put(made, &count, "MASTER_PORT=%d", now->master_port);
    put(made, &count, "TORCHELASTIC_RESTART_COUNT=%d", now->attempt);
    put(made, &count, "TORCHELASTIC_MAX_RESTARTS=%d", own->max_restarts);
    put(made, &count, "TORCHELASTIC_RUN_ID=%s", own->run_id);
    put(made, &count, "MTP_RDZV_ENDPOINT=%s", now->endpoint);
    put(made, &count, "MTP_RDZV_SECRET=%s", now->secret);
    /* all digits: rounded up, a third of the limit would be more than a third */
    put(made, &count, "MTP_COMM_TIME_LIMIT=%.17g", own->time_limit);
    put(made, &count, "MTP_COMM_HEARTBEAT=%.17g", own->heartbeat);
    const char *threads = getenv("OMP_NUM_THREADS");
    const int each = own->num_cores / own->num_ranks;
    if (threads && *threads)
        put(made, &count, "OMP_NUM_THREADS=%s", threads);
    else
        put(made, &count, "OMP_NUM_THREADS=%d", each > 0 ? each : 1);
    if (count != NUM_SET) {
        environment_free(made);
        return NULL;
    }
    for (size_t i = 0; i < existing; i++) {
        if (!inherited(environ[i], made, NUM_SET)) continue;
        made[count] = strdup(environ[i]);
        if (!made[count++]) {
            environment_free(made);
            return NULL;
        }
    }
    return made;
}

void environment_free(char **environment)
{
    if (!environment) return;
    for (char **next = environment; *next; next++) free(*next);
    free(environment);
}
