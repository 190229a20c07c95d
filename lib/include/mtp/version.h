/* What this copy of libmtp is. */
#ifndef MTP_VERSION_H
#define MTP_VERSION_H

#include "mtp/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* "0.1.0" */
MTP_API const char *mtp_version(void);
/* "gcc 12.2.0": the compiler that built it. */
MTP_API const char *mtp_compiler(void);

/* "HDF5 yes, Gloo yes, toml++ no": the parts that a build may be made without. HDF5: packed stores. Gloo: several ranks
 * on CPUs. toml++: configurations in all of TOML; without it in the part that configurations use. */
MTP_API const char *mtp_parts(void);

#ifdef __cplusplus
}
#endif
#endif
