#include "data/store_hdf5.h"

/* HDF5 has one state for the whole process, and two threads may open data at once. */
#ifndef H5_HAVE_THREADSAFE
#error "HDF5 must be built with --enable-threadsafe, as Debian's libhdf5-dev is"
#endif

mtp_status mtp__store_supported(const char *path)
{
    (void)path;
    return MTP_OK;
}

void mtp__hdf5_enter(mtp__hdf5_scope *scope)
{
    /* At exit HDF5 writes again what it could not write on a full disk, and crashes. Every file is closed here by hand.
     */
    (void)H5dont_atexit();
    H5Eget_auto2(H5E_DEFAULT, &scope->print, &scope->user);
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
}

void mtp__hdf5_leave(const mtp__hdf5_scope *scope)
{
    H5Eset_auto2(H5E_DEFAULT, scope->print, scope->user);
}

hid_t mtp__hdf5_access(void)
{
    const hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    if (access < 0) return access;
    if (H5Pset_file_locking(access, 0, 1) >= 0 && H5Pset_libver_bounds(access, H5F_LIBVER_V18, H5F_LIBVER_V110) >= 0)
        return access;
    H5Pclose(access);
    return -1;
}

hid_t mtp__hdf5_row_type(void)
{
    static const struct {
        const char *name;
        size_t offset;
        bool wide;
    } members[] = {{"sample_id", offsetof(mtp__store_row, sample_id), true},
                   {"first_token", offsetof(mtp__store_row, first_token), true},
                   {"first_teacher", offsetof(mtp__store_row, first_teacher), true},
                   {"source", offsetof(mtp__store_row, source), true},
                   {"num_tokens", offsetof(mtp__store_row, num_tokens), false},
                   {"num_supervised", offsetof(mtp__store_row, num_supervised), false},
                   {"prompt_len", offsetof(mtp__store_row, prompt_len), false},
                   {"first_target", offsetof(mtp__store_row, first_target), false},
                   {"last_target", offsetof(mtp__store_row, last_target), false},
                   {"num_teacher", offsetof(mtp__store_row, num_teacher), false}};
    const hid_t type = H5Tcreate(H5T_COMPOUND, sizeof(mtp__store_row));
    for (size_t i = 0; i < sizeof members / sizeof *members && type >= 0; i++)
        if (H5Tinsert(type, members[i].name, members[i].offset, members[i].wide ? H5T_STD_U64LE : H5T_STD_U32LE) < 0) {
            H5Tclose(type);
            return -1;
        }
    return type;
}

hid_t mtp__hdf5_field_type(const mtp__store_layout *layout, mtp__store_field field)
{
    switch (field) {
    case MTP__STORE_IDS:
    case MTP__STORE_TEACHER_IDS:
        return H5T_STD_I32LE;
    case MTP__STORE_MASK:
        return H5T_STD_U8LE;
    case MTP__STORE_HIDDEN:
        return H5T_STD_U16LE;
    case MTP__STORE_KV:
    case MTP__STORE_KV_GLOBAL:
        return layout->fp8 ? H5T_STD_U8LE : H5T_STD_U16LE;
    default:
        return H5T_IEEE_F32LE;
    }
}

int mtp__hdf5_field_shape(const mtp__store_layout *layout, mtp__store_field field, hsize_t shape[4])
{
    const int type = field == MTP__STORE_KV_GLOBAL || field == MTP__STORE_SCALES_GLOBAL;
    shape[0] = (hsize_t)mtp__store_num_rows(layout, field);
    switch (field) {
    case MTP__STORE_HIDDEN:
        shape[1] = (hsize_t)layout->hidden_size;
        return 2;
    case MTP__STORE_KV:
    case MTP__STORE_KV_GLOBAL:
    case MTP__STORE_SCALES:
    case MTP__STORE_SCALES_GLOBAL:
        shape[1] = (hsize_t)mtp__store_parts(layout, type);
        shape[2] = (hsize_t)layout->num_kv_heads[type];
        shape[3] = (hsize_t)layout->head_dim[type];
        return field == MTP__STORE_KV || field == MTP__STORE_KV_GLOBAL ? 4 : 3;
    case MTP__STORE_TEACHER_IDS:
    case MTP__STORE_TEACHER_LOGITS:
        shape[1] = (hsize_t)layout->teacher_top;
        return 2;
    default:
        return 1;
    }
}
