/* Packed stores for tests. */
#ifndef MTP_TESTS_PACK_H
#define MTP_TESTS_PACK_H

#include "mtp/pack.h"

/* Skips the test in a build without HDF5. One worker, bf16, no teacher, 4 GiB, nothing bad allowed; change what the
 * test is about. */
mtp_pack_options test_pack_options(const char *const *inputs, int64_t num_inputs, const mtp_verifier *verifier);
/* Fail unless two directories hold the same files with the same bytes. */
void test_same_directory(const char *one, const char *other);

#endif
