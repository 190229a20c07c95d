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

const char *mtp_parts(void)
{
    return ""
#if MTP__HDF5
           "HDF5 yes"
#else
           "HDF5 no"
#endif
#if MTP__GLOO
           ", Gloo yes"
#else
           ", Gloo no"
#endif
#if MTP__TOMLPLUSPLUS
           ", toml++ yes";
#else
           ", toml++ no";
#endif
}
