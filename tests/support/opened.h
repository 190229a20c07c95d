/* What a test of a drafter on data has open: verifier, samples, drafter, and the device they run on. */
#ifndef MTP_TESTS_OPENED_H
#define MTP_TESTS_OPENED_H

#include "mtp/data.h"

typedef struct test_opened {
    mtp_context *context;
    mtp_verifier *verifier;
    mtp_drafter *drafter;
    mtp_dataset *dataset;
} test_opened;

/* All three are paths below tests/data; the threads are those of the device by default. Fails the test when one cannot
 * be opened. */
test_opened test_open(const char *drafter, const char *verifier, const char *samples);
void test_close(test_opened *o);

#endif
