/* One attempt at the run: who takes part, and what the ranks are told. */
#ifndef MTPRUN_PLAN_H
#define MTPRUN_PLAN_H

#include "options.h"

enum { ADDRESS_LETTERS = 256, ENDPOINT_LETTERS = 300 };

typedef struct plan {
    int attempt; /* counts from 0: TORCHELASTIC_RESTART_COUNT */
    int world_size;
    int first_rank; /* of this node */
    int group_rank; /* of this node among those that take part */
    int group_size;
    char master_addr[ADDRESS_LETTERS];
    int master_port;
    char endpoint[ENDPOINT_LETTERS]; /* of the store */
    char secret[512];
} plan;

/* The environment of one rank, NULL-terminated: this process's own with what mtprun sets. NULL when out of memory, else
 * free with environment_free. */
char **environment_make(const options *own, const plan *now, int local_rank);
void environment_free(char **environment);

#endif
