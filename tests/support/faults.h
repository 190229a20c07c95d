/* Faults planted into a shipped sample, and what a check must say about each of them. */
#ifndef MTP_TESTS_FAULTS_H
#define MTP_TESTS_FAULTS_H

#include "samples.h"

#include "mtp/check.h"

#define TEST_SAMPLES MTP_TEST_DATA "/sample"
enum { TEST_BENT = 103, TEST_DONOR = 104, TEST_FIRST = 100 }; /* numbers of samples of eval/ */

typedef struct test_fault {
    const char *name;
    test_sample (*make)(const struct test_fault *fault);
    const char *tensor; /* that is bent */
    double amount;      /* by what, where there is a choice */
    /* what must be found: reason, token, and a part of the message */
    mtp_check_reason reason;
    int64_t index;
    const char *text;
    bool whole; /* length or types are others: only a whole data set that holds it can be checked */
} test_fault;

extern const test_fault test_faults[];
extern const int test_num_faults;

/* eval/sample_<number>.safetensors */
const char *test_eval_sample(int number);
/* Copies of `count` samples from TEST_FIRST on in a fresh directory. */
const char *test_eval_samples(int count);

#endif
