#include "mtp/version.h"

const char *mtp_version(void)
{
    return MTP__VERSION;
}

const char *mtp_compiler(void)
{
#if defined(__clang__)
    return "clang " __clang_version__;
#else
    return "gcc " __VERSION__;
#endif
}
