/* Internal: what writing and reading a shard share of HDF5. */
#ifndef MTP_DATA_STORE_HDF5_H
#define MTP_DATA_STORE_HDF5_H

#include <hdf5.h>

#include "data/store.h"

/* HDF5 prints its errors unless told not to; that is a setting of the thread, put back when it leaves. */
typedef struct mtp__hdf5_scope {
    H5E_auto2_t print;
    void *user;
} mtp__hdf5_scope;
void mtp__hdf5_enter(mtp__hdf5_scope *scope);
void mtp__hdf5_leave(const mtp__hdf5_scope *scope);

/* File access: no locking (network mounts), format versions V18 to V110. Negative: failed. */
hid_t mtp__hdf5_access(void);
/* The compound type of the index; H5Tclose it. */
hid_t mtp__hdf5_row_type(void);
/* The file type of a field's values. */
hid_t mtp__hdf5_field_type(const mtp__store_layout *layout, mtp__store_field field);
/* Shape of a field: how many axes, and their lengths. */
int mtp__hdf5_field_shape(const mtp__store_layout *layout, mtp__store_field field, hsize_t shape[4]);

#endif
