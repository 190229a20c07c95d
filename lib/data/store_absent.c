/* In place of store_hdf5.c, store_open.c and store_write.c where there is no HDF5: a packed store is refused. */
#include "data/store.h"

mtp_status mtp__store_supported(const char *path)
{
    return MTP_FAIL(MTP_E_UNSUPPORTED,
                    "%s: a packed store needs HDF5, which this build was made without; install libhdf5-dev and "
                    "configure with -DMTP_HDF5=ON, or use the samples unpacked",
                    path);
}

mtp_status mtp__shard_open(const char *path, mtp__shard **shard)
{
    *shard = NULL;
    return mtp__store_supported(path);
}

mtp_status mtp__store_create(const char *path, const mtp__store_layout *layout, const char *verifier_name,
                             uint64_t offsets[MTP__STORE_FIELDS])
{
    (void)layout, (void)verifier_name, (void)offsets;
    return mtp__store_supported(path);
}

mtp_status mtp__store_finish(const char *path, const mtp__store_tail *tail)
{
    (void)tail;
    return mtp__store_supported(path);
}
