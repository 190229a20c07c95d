/* What a shard holds: names, rows, sizes; and plain reading and writing at an offset. */
#include "data/store.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

const char *mtp__store_field_name(mtp__store_field field)
{
    static const char *const names[MTP__STORE_FIELDS] = {"token_ids",
                                                         "loss_mask",
                                                         "hidden_states",
                                                         "kv_last_local",
                                                         "kv_last_global",
                                                         "kv_last_local_scales",
                                                         "kv_last_global_scales",
                                                         "teacher_logsumexp",
                                                         "teacher_ids",
                                                         "teacher_logits"};
    return names[field];
}

int64_t mtp__store_parts(const mtp__store_layout *layout, int type)
{
    return type == MTP_LAYER_FULL && layout->global_v_only ? 1 : 2;
}

int mtp__store_version(const mtp__store_layout *layout)
{
    return layout->global_v_only ? 2 : 1;
}

size_t mtp__store_row_bytes(const mtp__store_layout *layout, mtp__store_field field)
{
    const int type = field == MTP__STORE_KV_GLOBAL || field == MTP__STORE_SCALES_GLOBAL;
    const size_t heads = (size_t)(mtp__store_parts(layout, type) * layout->num_kv_heads[type]);
    switch (field) {
    case MTP__STORE_IDS:
        return sizeof(int32_t);
    case MTP__STORE_MASK:
        return 1;
    case MTP__STORE_HIDDEN:
        return 2 * (size_t)layout->hidden_size;
    case MTP__STORE_KV:
    case MTP__STORE_KV_GLOBAL:
        return heads * (size_t)layout->head_dim[type] * (layout->fp8 ? 1 : 2);
    case MTP__STORE_SCALES:
    case MTP__STORE_SCALES_GLOBAL:
        return layout->fp8 ? heads * sizeof(float) : 0;
    case MTP__STORE_TEACHER_LSE:
        return layout->teacher_top ? sizeof(float) : 0;
    case MTP__STORE_TEACHER_IDS:
    case MTP__STORE_TEACHER_LOGITS:
        return (size_t)layout->teacher_top * sizeof(float);
    case MTP__STORE_FIELDS:
        break;
    }
    return 0;
}

int64_t mtp__store_num_rows(const mtp__store_layout *layout, mtp__store_field field)
{
    return field >= MTP__STORE_TEACHER_LSE ? layout->num_teacher : layout->num_tokens;
}

mtp__store_layout mtp__store_layout_of(const mtp_verifier_config *verifier)
{
    mtp__store_layout layout = {.vocab_size = verifier->vocab_size,
                                .hidden_size = verifier->hidden_size,
                                .sliding_window = verifier->sliding_window};
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        layout.num_kv_heads[type] = verifier->kv_layer[type] < 0 ? 0 : verifier->num_kv_heads[type];
        layout.head_dim[type] = verifier->kv_layer[type] < 0 ? 0 : verifier->head_dim[type];
    }
    return layout;
}

mtp_status mtp__store_pread(int fd, const char *path, uint64_t offset, void *buffer, size_t size)
{
    char *at = buffer;
    while (size > 0) {
        const ssize_t count = pread(fd, at, size, (off_t)offset);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: cannot read: %s", path, strerror(errno));
        if (count == 0)
            return MTP_FAIL(MTP_E_FORMAT, "%s: the file ends at %llu, %zu bytes too early; pack it again", path,
                            (unsigned long long)offset, size);
        at += count;
        offset += (uint64_t)count;
        size -= (size_t)count;
    }
    return MTP_OK;
}

mtp_status mtp__store_pwrite(int fd, const char *path, uint64_t offset, const void *buffer, size_t size)
{
    const char *at = buffer;
    while (size > 0) {
        const ssize_t count = pwrite(fd, at, size, (off_t)offset);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: cannot write: %s", path, strerror(errno));
        at += count;
        offset += (uint64_t)count;
        size -= (size_t)count;
    }
    return MTP_OK;
}
