/* Runs of several processes on documents of the same length. */
#ifndef MTP_TESTS_DIST_H
#define MTP_TESTS_DIST_H

#include <jansson.h>

#include "samples.h"
#include "train.h"

enum {
    DIST_DOCUMENTS = 144,
    DIST_TOKENS = 8,  /* of each document: a budget of tokens is a number of documents */
    DIST_GLOBAL = 72, /* documents of a global batch that 1 to 4 ranks and accumulations of 1 to 3 can share */
    DIST_STEPS = 20
};

/* DIST_TOKENS random tokens of the shipped verifier's geometry, supervised from `prompt_len` on. */
test_sample dist_sample(int64_t prompt_len, uint64_t seed);
/* A directory of `count` such documents with many different numbers of supervised rows. */
const char *dist_data(int count, uint64_t seed);
/* The group's setup: makes the configuration and its data. */
int dist_setup(void **state);
/* The path of the configuration. */
const char *dist_config(void);
/* Skips the test in a build without Gloo. */
void dist_needs_gloo(void);

/* mtprun with so many ranks of mtp train; with `wrap`, a script that runs "$0" "$@" for each. Overrides up to a NULL.
 */
test_run dist_launch(int ranks, const char *wrap, const char *out, const char *const *overrides);
/* A run that succeeds; returns its directory. */
const char *dist_train(int ranks, const char *const *overrides);
#define dist_train_with(ranks, ...) dist_train((ranks), (const char *const[]){__VA_ARGS__, NULL})

/* Overrides. */
const char *dist_budget(int documents);
const char *dist_accumulation(int steps);
const char *dist_max_steps(int steps);

/* Lines of metrics.jsonl of a kind, as an array without their "time"; json_decref. */
json_t *dist_lines(const char *run, const char *kind);
double dist_number(const json_t *line, const char *key);
/* The same steps: whole numbers are equal, losses agree to 1e-6. */
void dist_same_training(const char *one, const char *other, size_t steps);

#endif
