/* Writing the structure of a shard. Nothing in the file depends on time, place or machine: object times are off, and
 * objects are made in one order by one thread. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"
#include "data/store_hdf5.h"

/* HDF5 calls in a row: one that fails makes the following ones do nothing, and the name says where it was. */
typedef struct writer {
    hid_t file;
    const char *failed; /* object; NULL: all is well */
} writer;

static void note(writer *w, const char *object, bool ok)
{
    if (!ok && !w->failed) w->failed = object;
}

/* ---- attributes ----------------------------------------------------------------------------------------------- */

static void put_attribute(writer *w, hid_t object, const char *name, hid_t file_type, hid_t memory_type,
                          const void *value)
{
    if (w->failed) return;
    const hid_t space = H5Screate(H5S_SCALAR);
    const hid_t attribute = H5Acreate2(object, name, file_type, space, H5P_DEFAULT, H5P_DEFAULT);
    note(w, name, attribute >= 0 && H5Awrite(attribute, memory_type, value) >= 0);
    if (attribute >= 0) H5Aclose(attribute);
    if (space >= 0) H5Sclose(space);
}

static void put_text(writer *w, hid_t object, const char *name, const char *text)
{
    const hid_t type = H5Tcopy(H5T_C_S1);
    note(w, name, type >= 0 && H5Tset_size(type, strlen(text) + 1) >= 0 && H5Tset_cset(type, H5T_CSET_UTF8) >= 0);
    put_attribute(w, object, name, type, type, text);
    if (type >= 0) H5Tclose(type);
}

static void put_int(writer *w, hid_t object, const char *name, int64_t value)
{
    put_attribute(w, object, name, H5T_STD_I64LE, H5T_NATIVE_INT64, &value);
}

/* ---- datasets ------------------------------------------------------------------------------------------------- */

static hid_t create_dataset(writer *w, const char *name, hid_t type, int rank, const hsize_t *shape)
{
    if (w->failed) return -1;
    const hid_t space = H5Screate_simple(rank, shape, NULL), list = H5Pcreate(H5P_DATASET_CREATE);
    const bool ok = list >= 0 && H5Pset_obj_track_times(list, 0) >= 0 && H5Pset_layout(list, H5D_CONTIGUOUS) >= 0 &&
                    H5Pset_alloc_time(list, H5D_ALLOC_TIME_EARLY) >= 0 &&
                    H5Pset_fill_time(list, H5D_FILL_TIME_NEVER) >= 0 && H5Pset_attr_phase_change(list, 64, 32) >= 0;
    const hid_t dataset = ok ? H5Dcreate2(w->file, name, type, space, H5P_DEFAULT, list, H5P_DEFAULT) : -1;
    note(w, name, dataset >= 0);
    if (list >= 0) H5Pclose(list);
    if (space >= 0) H5Sclose(space);
    return dataset;
}

typedef struct explanation {
    const char *description, *unit, *encoding;
} explanation;

static explanation explain(const mtp__store_layout *layout, mtp__store_field field)
{
    static const char bf16[] = "bfloat16 as its 16 bits (upper half of an IEEE float32)";
    static const char fp8[] =
        "float8_e4m3fn as its 8 bits; value = byte's float x scale of its token, K or V, and head";
    const char *kv = layout->fp8 ? fp8 : bf16;
    switch (field) {
    case MTP__STORE_IDS:
        return (explanation){"Token ids of prompt and continuation, [token]", "token id", "int32"};
    case MTP__STORE_MASK:
        return (explanation){"1: this token may be a target of training, [token]", "boolean (0, 1)", "uint8"};
    case MTP__STORE_HIDDEN:
        return (explanation){"Hidden states of the verifier's last layer, after its final norm, [token, hidden]",
                             "dimensionless activation", bf16};
    case MTP__STORE_KV:
        return (explanation){"K (index 0, with norm and rotary embedding) and V (1) of the verifier's last sliding "
                             "layer that owns K/V, [token, K or V, head, dimension]",
                             "dimensionless activation", kv};
    case MTP__STORE_KV_GLOBAL:
        if (layout->global_v_only)
            return (explanation){"V of the verifier's last full layer that owns K/V, [token, V, head, dimension]; K is "
                                 "V with k_norm's weight and rotary embedding (attention_k_eq_v)",
                                 "dimensionless activation", kv};
        return (explanation){"K (index 0, with norm and rotary embedding) and V (1) of the verifier's last full layer "
                             "that owns K/V, [token, K or V, head, dimension]",
                             "dimensionless activation", kv};
    case MTP__STORE_SCALES:
    case MTP__STORE_SCALES_GLOBAL:
        return (explanation){"Scales of the 8-bit K/V, [token, K or V, head]", "activation per float8 unit", "float32"};
    case MTP__STORE_TEACHER_LSE:
        return (explanation){"Log-sum-exp of the verifier's logits after its softcap, [supervised token with a token "
                             "before it]: the distribution that the token was drawn from",
                             "nat", "float32"};
    case MTP__STORE_TEACHER_IDS:
        return (explanation){"The largest logits' token ids, falling by logit, lower id first among equals, "
                             "[supervised token, place]",
                             "token id", "int32"};
    default:
        return (explanation){"The largest logits after the softcap, falling, [supervised token, place]", "nat",
                             "float32"};
    }
}

static void create_field(writer *w, const mtp__store_layout *layout, mtp__store_field field, uint64_t *offset)
{
    hsize_t shape[4];
    const explanation text = explain(layout, field);
    const int rank = mtp__hdf5_field_shape(layout, field, shape);
    *offset = 0;
    if (shape[0] == 0 || mtp__store_row_bytes(layout, field) == 0) return;
    const hid_t dataset =
        create_dataset(w, mtp__store_field_name(field), mtp__hdf5_field_type(layout, field), rank, shape);
    if (dataset < 0) return;
    put_text(w, dataset, "description", text.description);
    put_text(w, dataset, "unit", text.unit);
    put_text(w, dataset, "encoding", text.encoding);
    note(w, mtp__store_field_name(field), H5Fflush(w->file, H5F_SCOPE_LOCAL) >= 0);
    const haddr_t address = H5Dget_offset(dataset);
    note(w, mtp__store_field_name(field), address != HADDR_UNDEF);
    *offset = address;
    H5Dclose(dataset);
}

static void describe_file(writer *w, const mtp__store_layout *layout, const char *verifier_name)
{
    put_text(w, w->file, "format", "mtp-shard");
    put_int(w, w->file, "version", mtp__store_version(layout));
    put_int(w, w->file, "complete", 0);
    put_text(w, w->file, "description",
             "Samples of a verifier for training a multi-token-prediction drafter. Every field is token-major; `index` "
             "says which rows belong to which sample; rows of no sample are unused.");
    put_text(w, w->file, "verifier", verifier_name);
    put_text(w, w->file, "hidden_norm", "post");
    put_text(w, w->file, "kv_encoding", layout->fp8 ? "fp8" : "bf16");
    if (layout->global_v_only) put_int(w, w->file, "global_v_only", 1);
    put_int(w, w->file, "num_tokens", layout->num_tokens);
    put_int(w, w->file, "num_teacher", layout->num_teacher);
    put_int(w, w->file, "teacher_top", layout->teacher_top);
    put_int(w, w->file, "vocab_size", layout->vocab_size);
    put_int(w, w->file, "hidden_size", layout->hidden_size);
    put_int(w, w->file, "sliding_window", layout->sliding_window);
    put_int(w, w->file, "num_kv_heads_local", layout->num_kv_heads[MTP_LAYER_SLIDING]);
    put_int(w, w->file, "head_dim_local", layout->head_dim[MTP_LAYER_SLIDING]);
    put_int(w, w->file, "num_kv_heads_global", layout->num_kv_heads[MTP_LAYER_FULL]);
    put_int(w, w->file, "head_dim_global", layout->head_dim[MTP_LAYER_FULL]);
}

/* ---- the file ------------------------------------------------------------------------------------------------- */

static void create_file(writer *w, const char *path)
{
    const hid_t access = mtp__hdf5_access(), list = H5Pcreate(H5P_FILE_CREATE);
    const bool ok =
        access >= 0 && list >= 0 && H5Pset_obj_track_times(list, 0) >= 0 && H5Pset_attr_phase_change(list, 64, 32) >= 0;
    w->file = ok ? H5Fcreate(path, H5F_ACC_TRUNC, list, access) : -1;
    note(w, "the file", w->file >= 0);
    if (access >= 0) H5Pclose(access);
    if (list >= 0) H5Pclose(list);
}

static mtp_status close_file(writer *w, const char *path)
{
    if (w->file >= 0) note(w, "the end", H5Fclose(w->file) >= 0);
    if (!w->failed) return MTP_OK;
    return MTP_FAIL(MTP_E_IO, "%s: HDF5 could not write %s; is there room, and may the directory be written?", path,
                    w->failed);
}

static mtp_status reserve(const char *path)
{
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: cannot open: %s", path, strerror(errno));
    const off_t size = lseek(fd, 0, SEEK_END);
    const int code = size > 0 ? posix_fallocate(fd, 0, size) : EIO;
    close(fd);
    if (code == 0 || code == EOPNOTSUPP || code == EINVAL) return MTP_OK; /* a file system without reservation */
    return MTP_FAIL_FOREIGN(MTP_E_IO, code, "%s: cannot reserve %lld MiB for the shard: %s", path,
                            (long long)(size >> 20), strerror(code));
}

mtp_status mtp__store_create(const char *path, const mtp__store_layout *layout, const char *verifier_name,
                             uint64_t offsets[MTP__STORE_FIELDS])
{
    mtp__hdf5_scope scope;
    writer w = {.file = -1};
    mtp__hdf5_enter(&scope);
    create_file(&w, path);
    describe_file(&w, layout, verifier_name);
    for (int field = 0; field < MTP__STORE_FIELDS; field++)
        create_field(&w, layout, (mtp__store_field)field, &offsets[field]);
    const mtp_status status = close_file(&w, path);
    mtp__hdf5_leave(&scope);
    return status == MTP_OK ? reserve(path) : status;
}

/* ---- the tail ------------------------------------------------------------------------------------------------- */

static void put_dataset(writer *w, const char *name, hid_t type, int rank, const hsize_t *shape, const void *data,
                        const explanation *text)
{
    if (shape[0] == 0) return;
    const hid_t dataset = create_dataset(w, name, type, rank, shape);
    if (dataset < 0) return;
    put_text(w, dataset, "description", text->description);
    put_text(w, dataset, "unit", text->unit);
    put_text(w, dataset, "encoding", text->encoding);
    note(w, name, H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0);
    H5Dclose(dataset);
}

static void put_tail(writer *w, const mtp__store_tail *tail)
{
    static const explanation index = {
        "One row a sample. sample_id: hash of the token ids; first_token, num_tokens: its rows of the token fields; "
        "first_teacher, num_teacher: its rows of the teacher fields; source: offset of its name in `sources`; "
        "num_supervised: ones of loss_mask; prompt_len: first of them; first_target, last_target: range of supervised "
        "tokens that have two tokens before them, end exclusive. The last four count from the sample's first token",
        "token (ids and offsets: none)", "compound of uint64 and uint32, little-endian"};
    static const explanation checksums = {
        "CRC-32C of each sample's rows of each field, [sample, field]; fields in the order token_ids, loss_mask, "
        "hidden_states, kv_last_local, kv_last_global, kv_last_local_scales, kv_last_global_scales, teacher_logsumexp, "
        "teacher_ids, teacher_logits; 0 for a field that is not there",
        "none", "uint32"};
    static const explanation sources = {"File names of the samples, each ending in a zero byte", "character",
                                        "UTF-8 bytes"};
    static const explanation quarantine = {"Samples that were refused while packing, one JSON object a line",
                                           "character", "UTF-8 bytes"};
    const hsize_t rows[2] = {(hsize_t)tail->num_samples, MTP__STORE_FIELDS};
    const hsize_t names = tail->sources_size, refused = tail->quarantine_size;
    const size_t index_bytes = (size_t)tail->num_samples * sizeof *tail->rows;
    const size_t checksum_bytes = (size_t)tail->num_samples * MTP__STORE_FIELDS * sizeof *tail->checksums;
    int64_t tokens = 0, supervised = 0;
    for (int64_t i = 0; i < tail->num_samples; i++) {
        tokens += tail->rows[i].num_tokens;
        supervised += tail->rows[i].num_supervised;
    }
    const hid_t type = mtp__hdf5_row_type();
    note(w, "index", type >= 0);
    put_dataset(w, "index", type, 1, rows, tail->rows, &index);
    if (type >= 0) H5Tclose(type);
    put_dataset(w, "checksums", H5T_STD_U32LE, 2, rows, tail->checksums, &checksums);
    put_dataset(w, "sources", H5T_STD_U8LE, 1, &names, tail->sources, &sources);
    put_dataset(w, "quarantine", H5T_STD_U8LE, 1, &refused, tail->quarantine, &quarantine);
    put_int(w, w->file, "num_samples", tail->num_samples);
    put_int(w, w->file, "sample_tokens", tokens);
    put_int(w, w->file, "num_supervised", supervised);
    put_int(w, w->file, "sources_bytes", (int64_t)tail->sources_size);
    put_int(w, w->file, "quarantine_bytes", (int64_t)tail->quarantine_size);
    put_int(w, w->file, "index_crc32c", mtp__crc32c(0, tail->rows, index_bytes));
    put_int(w, w->file, "checksums_crc32c", mtp__crc32c(0, tail->checksums, checksum_bytes));
    put_int(w, w->file, "sources_crc32c", mtp__crc32c(0, tail->sources, tail->sources_size));
}

static void mark_complete(writer *w)
{
    const int64_t one = 1;
    if (w->failed) return;
    note(w, "the end", H5Fflush(w->file, H5F_SCOPE_LOCAL) >= 0);
    const hid_t attribute = H5Aopen(w->file, "complete", H5P_DEFAULT);
    note(w, "complete", attribute >= 0 && H5Awrite(attribute, H5T_NATIVE_INT64, &one) >= 0);
    if (attribute >= 0) H5Aclose(attribute);
}

static mtp_status sync_file(const char *path)
{
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    const bool ok = fd >= 0 && fsync(fd) == 0;
    const int code = errno;
    if (fd >= 0) close(fd);
    return ok ? MTP_OK : MTP_FAIL_FOREIGN(MTP_E_IO, code, "%s: cannot sync: %s", path, strerror(code));
}

mtp_status mtp__store_finish(const char *path, const mtp__store_tail *tail)
{
    mtp__hdf5_scope scope;
    writer w = {.file = -1};
    mtp__hdf5_enter(&scope);
    const hid_t access = mtp__hdf5_access();
    w.file = access >= 0 ? H5Fopen(path, H5F_ACC_RDWR, access) : -1;
    note(&w, "the file", w.file >= 0);
    if (access >= 0) H5Pclose(access);
    put_tail(&w, tail);
    mark_complete(&w);
    const mtp_status status = close_file(&w, path);
    mtp__hdf5_leave(&scope);
    return status == MTP_OK ? sync_file(path) : status;
}
