/* Opening a shard: its structure and index, every number checked before it is used. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/pages.h"
#include "data/store_hdf5.h"

enum { MOST_TOKENS_LOG2 = 40, MOST_WIDTH = 1 << 24 };

/* ---- attributes ----------------------------------------------------------------------------------------------- */

static mtp_status get_int(hid_t file, const char *name, int64_t min, int64_t max, int64_t *value)
{
    const hid_t attribute = H5Aopen(file, name, H5P_DEFAULT);
    if (attribute < 0) return MTP_FAIL(MTP_E_FORMAT, "there is no attribute %s", name);
    const hid_t type = H5Aget_type(attribute), space = H5Aget_space(attribute);
    const bool ok = type >= 0 && space >= 0 && H5Tequal(type, H5T_STD_I64LE) > 0 &&
                    H5Sget_simple_extent_npoints(space) == 1 && H5Aread(attribute, H5T_NATIVE_INT64, value) >= 0;
    if (type >= 0) H5Tclose(type);
    if (space >= 0) H5Sclose(space);
    H5Aclose(attribute);
    if (!ok) return MTP_FAIL(MTP_E_FORMAT, "attribute %s is no 64-bit integer", name);
    if (*value < min || *value > max)
        return MTP_FAIL(MTP_E_FORMAT, "attribute %s is %lld, outside [%lld, %lld]", name, (long long)*value,
                        (long long)min, (long long)max);
    return MTP_OK;
}

/* A text of fewer than `size` bytes. */
static mtp_status get_text(hid_t file, const char *name, char *text, size_t size)
{
    const hid_t attribute = H5Aopen(file, name, H5P_DEFAULT);
    if (attribute < 0) return MTP_FAIL(MTP_E_FORMAT, "there is no attribute %s", name);
    const hid_t type = H5Aget_type(attribute), space = H5Aget_space(attribute);
    const bool ok = type >= 0 && space >= 0 && H5Tget_class(type) == H5T_STRING && H5Tis_variable_str(type) == 0 &&
                    H5Tget_size(type) < size && H5Sget_simple_extent_npoints(space) == 1;
    memset(text, 0, size);
    const bool read = ok && H5Aread(attribute, type, text) >= 0;
    if (type >= 0) H5Tclose(type);
    if (space >= 0) H5Sclose(space);
    H5Aclose(attribute);
    return read ? MTP_OK : MTP_FAIL(MTP_E_FORMAT, "attribute %s is no short text", name);
}

/* The attributes that say whether the rest can be read. */
static mtp_status read_identity(hid_t file, mtp__shard *shard)
{
    char format[32];
    int64_t version, complete, only = 0;
    mtp__store_layout *layout = &shard->layout;
    if (get_text(file, "format", format, sizeof format) != MTP_OK || strcmp(format, "mtp-shard") != 0)
        return MTP_FAIL(MTP_E_FORMAT, "an HDF5 file, but no shard of mtp pack (no attribute format = mtp-shard)");
    MTP_TRY(get_int(file, "version", 1, INT64_MAX, &version));
    if (version > MTP__SHARD_VERSION)
        return MTP_FAIL(MTP_E_VERSION, "a shard of version %lld; this program reads version %d and older: update it",
                        (long long)version, (int)MTP__SHARD_VERSION);
    if (version >= 2) MTP_TRY(get_int(file, "global_v_only", 0, 1, &only));
    layout->global_v_only = only != 0;
    shard->version = version;
    MTP_TRY(get_text(file, "verifier", shard->verifier, sizeof shard->verifier));
    MTP_TRY(get_int(file, "complete", 0, 1, &complete));
    if (!complete) return MTP_FAIL(MTP_E_FORMAT, "the shard was not finished; run mtp pack again");
    return MTP_OK;
}

static mtp_status read_layout(hid_t file, mtp__shard *shard, int64_t *sources, int64_t *quarantine)
{
    mtp__store_layout *layout = &shard->layout;
    const int64_t most = (int64_t)1 << MOST_TOKENS_LOG2;
    char encoding[16];
    int64_t crc[3];
    MTP_TRY(read_identity(file, shard));
    MTP_TRY(get_int(file, "num_tokens", 1, most, &layout->num_tokens));
    MTP_TRY(get_int(file, "num_teacher", 0, most, &layout->num_teacher));
    MTP_TRY(get_int(file, "teacher_top", 0, MTP__TEACHER_TOP, &layout->teacher_top));
    MTP_TRY(get_int(file, "vocab_size", 1, INT32_MAX, &layout->vocab_size));
    MTP_TRY(get_int(file, "hidden_size", 1, MOST_WIDTH, &layout->hidden_size));
    MTP_TRY(get_int(file, "sliding_window", 0, INT32_MAX, &layout->sliding_window));
    MTP_TRY(get_int(file, "num_kv_heads_local", 0, 1 << 12, &layout->num_kv_heads[MTP_LAYER_SLIDING]));
    MTP_TRY(get_int(file, "head_dim_local", 0, 1 << 13, &layout->head_dim[MTP_LAYER_SLIDING]));
    MTP_TRY(get_int(file, "num_kv_heads_global", 0, 1 << 12, &layout->num_kv_heads[MTP_LAYER_FULL]));
    MTP_TRY(get_int(file, "head_dim_global", 0, 1 << 13, &layout->head_dim[MTP_LAYER_FULL]));
    MTP_TRY(get_text(file, "kv_encoding", encoding, sizeof encoding));
    layout->fp8 = strcmp(encoding, "fp8") == 0;
    if (!layout->fp8 && strcmp(encoding, "bf16") != 0)
        return MTP_FAIL(MTP_E_FORMAT, "kv_encoding is %s; bf16 and fp8 are known", encoding);
    MTP_TRY(get_int(file, "num_samples", 0, layout->num_tokens, &shard->num_samples));
    MTP_TRY(get_int(file, "sample_tokens", 0, layout->num_tokens, &shard->sample_tokens));
    MTP_TRY(get_int(file, "num_supervised", 0, layout->num_tokens, &shard->num_supervised));
    MTP_TRY(get_int(file, "sources_bytes", 0, most, sources));
    MTP_TRY(get_int(file, "quarantine_bytes", 0, most, quarantine));
    MTP_TRY(get_int(file, "index_crc32c", 0, UINT32_MAX, &crc[0]));
    MTP_TRY(get_int(file, "checksums_crc32c", 0, UINT32_MAX, &crc[1]));
    MTP_TRY(get_int(file, "sources_crc32c", 0, UINT32_MAX, &crc[2]));
    for (int i = 0; i < 3; i++) shard->tail_crc[i] = (uint32_t)crc[i];
    return MTP_OK;
}

/* ---- datasets ------------------------------------------------------------------------------------------------- */

static bool is_shape(hid_t dataset, int rank, const hsize_t *shape)
{
    hsize_t found[H5S_MAX_RANK];
    const hid_t space = H5Dget_space(dataset);
    bool ok = space >= 0 && H5Sget_simple_extent_ndims(space) == rank &&
              H5Sget_simple_extent_dims(space, found, NULL) == rank;
    for (int i = 0; ok && i < rank; i++) ok = found[i] == shape[i];
    if (space >= 0) H5Sclose(space);
    return ok;
}

static bool is_contiguous(hid_t dataset)
{
    const hid_t list = H5Dget_create_plist(dataset);
    const bool ok = list >= 0 && H5Pget_layout(list) == H5D_CONTIGUOUS && H5Pget_external_count(list) == 0;
    if (list >= 0) H5Pclose(list);
    return ok;
}

/* Where a dataset of this type and shape begins. */
static mtp_status find_dataset(hid_t file, const mtp__shard *shard, const char *name, hid_t type, int rank,
                               const hsize_t *shape, uint64_t *offset)
{
    const hid_t dataset = H5Dopen2(file, name, H5P_DEFAULT);
    if (dataset < 0) return MTP_FAIL(MTP_E_FORMAT, "there is no dataset %s", name);
    const hid_t found = H5Dget_type(dataset);
    uint64_t bytes = found >= 0 ? H5Tget_size(found) : 0;
    const bool ok = found >= 0 && H5Tequal(found, type) > 0 && is_shape(dataset, rank, shape) && is_contiguous(dataset);
    const haddr_t address = H5Dget_offset(dataset);
    if (found >= 0) H5Tclose(found);
    H5Dclose(dataset);
    if (!ok)
        return MTP_FAIL(MTP_E_FORMAT, "dataset %s has not the type, shape or layout that its attributes say", name);
    for (int i = 0; i < rank; i++) bytes = shape[i] && bytes > UINT64_MAX / shape[i] ? UINT64_MAX : bytes * shape[i];
    if (address == HADDR_UNDEF || bytes > shard->file_size || address > shard->file_size - bytes)
        return MTP_FAIL(MTP_E_FORMAT, "dataset %s reaches beyond the end of the file; it was cut", name);
    *offset = address;
    return MTP_OK;
}

static mtp_status find_fields(hid_t file, mtp__shard *shard)
{
    for (int i = 0; i < MTP__STORE_FIELDS; i++) {
        const mtp__store_field field = (mtp__store_field)i;
        hsize_t shape[4];
        const int rank = mtp__hdf5_field_shape(&shard->layout, field, shape);
        if (shape[0] == 0 || mtp__store_row_bytes(&shard->layout, field) == 0) continue;
        MTP_TRY(find_dataset(file, shard, mtp__store_field_name(field), mtp__hdf5_field_type(&shard->layout, field),
                             rank, shape, &shard->offsets[i]));
    }
    return MTP_OK;
}

/* Offsets of what comes last, 0 for what is empty. */
typedef struct tail {
    uint64_t index, sources, quarantine;
} tail;

static mtp_status find_tail(hid_t file, mtp__shard *shard, tail *found)
{
    const hsize_t rows[2] = {(hsize_t)shard->num_samples, MTP__STORE_FIELDS};
    const hsize_t names = shard->sources_size, refused = shard->quarantine_size;
    if (rows[0]) {
        const hid_t type = mtp__hdf5_row_type();
        if (type < 0) return MTP_FAIL(MTP_E_MEMORY, "HDF5 is out of memory");
        const mtp_status status = find_dataset(file, shard, "index", type, 1, rows, &found->index);
        H5Tclose(type);
        MTP_TRY(status);
        MTP_TRY(find_dataset(file, shard, "checksums", H5T_STD_U32LE, 2, rows, &shard->checksums_offset));
    }
    if (names) MTP_TRY(find_dataset(file, shard, "sources", H5T_STD_U8LE, 1, &names, &found->sources));
    if (refused) MTP_TRY(find_dataset(file, shard, "quarantine", H5T_STD_U8LE, 1, &refused, &found->quarantine));
    return MTP_OK;
}

static mtp_status read_structure(const char *path, mtp__shard *shard, tail *found)
{
    int64_t sources = 0, quarantine = 0;
    const hid_t access = mtp__hdf5_access();
    const hid_t file = access >= 0 ? H5Fopen(path, H5F_ACC_RDONLY, access) : -1;
    if (access >= 0) H5Pclose(access);
    if (file < 0) return MTP_FAIL(MTP_E_FORMAT, "HDF5 cannot open it: cut, damaged or no HDF5 file");
    mtp_status status = read_layout(file, shard, &sources, &quarantine);
    shard->sources_size = (size_t)sources;
    shard->quarantine_size = (size_t)quarantine;
    if (status == MTP_OK) status = find_fields(file, shard);
    if (status == MTP_OK) status = find_tail(file, shard, found);
    H5Fclose(file);
    return status;
}

/* ---- index ---------------------------------------------------------------------------------------------------- */

static mtp_status check_rows(const mtp__shard *shard)
{
    const uint64_t tokens = (uint64_t)shard->layout.num_tokens, teacher = (uint64_t)shard->layout.num_teacher;
    uint64_t next_token = 0, next_teacher = 0, total = 0, supervised = 0;
    for (int64_t i = 0; i < shard->num_samples; i++) {
        const mtp__store_row *row = &shard->rows[i];
        const uint32_t n = row->num_tokens;
        bool ok = n >= 1 && n <= INT32_MAX && row->first_token >= next_token && row->first_token <= tokens &&
                  n <= tokens - row->first_token && row->first_teacher >= next_teacher &&
                  row->first_teacher <= teacher && row->num_teacher <= teacher - row->first_teacher;
        ok = ok && row->num_supervised <= n && row->prompt_len <= n &&
             (row->prompt_len < n) == (row->num_supervised > 0);
        ok = ok && row->first_target <= n && row->first_target >= row->prompt_len && row->last_target <= n &&
             (row->first_target < n) == (row->last_target > row->first_target && row->first_target >= 2) &&
             row->num_teacher <= row->num_supervised && row->source < shard->sources_size;
        if (!ok) return MTP_FAIL(MTP_E_FORMAT, "row %lld of the index contradicts the shard", (long long)i);
        next_token = row->first_token + n;
        next_teacher = row->first_teacher + row->num_teacher;
        total += n;
        supervised += row->num_supervised;
    }
    if (total != (uint64_t)shard->sample_tokens || supervised != (uint64_t)shard->num_supervised)
        return MTP_FAIL(MTP_E_FORMAT, "the index does not hold the tokens that the attributes count");
    return MTP_OK;
}

static mtp_status read_tail(int fd, mtp__shard *shard, const tail *found)
{
    const size_t bytes = (size_t)shard->num_samples * sizeof *shard->rows;
    shard->rows = mtp__pages_alloc(bytes + 1);
    shard->sources = mtp__pages_alloc(shard->sources_size + 1);
    shard->quarantine = calloc(1, shard->quarantine_size + 1);
    if (!shard->rows || !shard->sources || !shard->quarantine)
        return MTP_FAIL(MTP_E_MEMORY, "no memory for an index of %lld samples", (long long)shard->num_samples);
    MTP_TRY(mtp__store_pread(fd, "index", found->index, shard->rows, bytes));
    MTP_TRY(mtp__store_pread(fd, "sources", found->sources, shard->sources, shard->sources_size));
    MTP_TRY(mtp__store_pread(fd, "quarantine", found->quarantine, shard->quarantine, shard->quarantine_size));
    shard->sources[shard->sources_size] = '\0';
    return check_rows(shard);
}

/* ---- the whole ------------------------------------------------------------------------------------------------ */

static mtp_status open_shard(const char *path, mtp__shard *shard)
{
    int fd;
    struct stat info;
    tail found = {0};
    mtp__hdf5_scope scope;
    MTP_TRY(mtp__store_open_file(path, 0, &fd, &info));
    shard->file_size = (uint64_t)info.st_size;
    shard->file_node = (uint64_t)info.st_ino;
    shard->file_time = mtp__store_time(&info);
    mtp__hdf5_enter(&scope);
    mtp_status status = read_structure(path, shard, &found);
    mtp__hdf5_leave(&scope);
    if (status == MTP_OK) status = read_tail(fd, shard, &found);
    close(fd);
    return status;
}

mtp_status mtp__shard_open(const char *path, mtp__shard **shard)
{
    *shard = NULL;
    mtp__shard *made = calloc(1, sizeof *made);
    if (made) made->path = strdup(path);
    if (!made || !made->path) {
        free(made);
        return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
    }
    const mtp_status status = open_shard(path, made);
    if (status != MTP_OK) {
        mtp__shard_close(made);
        return mtp__fail_prefix(status, "%s", path);
    }
    *shard = made;
    return MTP_OK;
}
