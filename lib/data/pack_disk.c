/* How much disk a store of the official sizes takes. */
#include "data/official.h"
#include "data/store.h"
#include "mtp/pack.h"

const char *mtp_pack_official(int64_t index)
{
    const mtp__official *official = mtp__official_at(index);
    return official ? official->name : NULL;
}

uint64_t mtp_pack_official_bytes(int64_t index, bool fp8, bool global_v_only, bool teacher, int64_t num_tokens)
{
    const mtp__official *official = mtp__official_at(index);
    if (!official || num_tokens < 0 || (global_v_only && !official->k_is_v)) return 0;
    const mtp__store_layout layout = {.num_tokens = num_tokens,
                                      .num_teacher = teacher ? num_tokens : 0,
                                      .hidden_size = official->hidden_size,
                                      .num_kv_heads = {official->num_kv_heads[0], official->num_kv_heads[1]},
                                      .head_dim = {256, 512},
                                      .teacher_top = teacher ? MTP__TEACHER_TOP : 0,
                                      .fp8 = fp8,
                                      .global_v_only = global_v_only};
    uint64_t bytes = 0;
    for (int field = 0; field < MTP__STORE_FIELDS; field++)
        bytes += (uint64_t)mtp__store_num_rows(&layout, (mtp__store_field)field) *
                 mtp__store_row_bytes(&layout, (mtp__store_field)field);
    return bytes;
}
