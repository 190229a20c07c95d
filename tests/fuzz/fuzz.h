/* What a fuzz target defines. */
#ifndef MTP_TESTS_FUZZ_H
#define MTP_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Reads the bytes with the reader under test, uses everything that it hands out, and says whether it accepted them: 1,
 * or 0 with the error record set. The replayer demands 1 for corpus/<name>/good and 0 for bad. */
int mtp_fuzz_accepts(const uint8_t *data, size_t size);
/* What libFuzzer calls; each target defines it as a call of mtp_fuzz_accepts. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A property that holds for every input, in every build. */
#define FUZZ_CHECK(condition)                                                              \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                       \
        }                                                                                  \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
