/* How much disk a store of the official sizes takes. */
#include "data/store.h"
#include "mtp/pack.h"

/* config.json of the published verifiers: hidden_size, and the K/V of the last sliding and full layer that own it. */
static const struct {
    const char *name;
    int64_t hidden_size, local_heads, global_heads;
} official[] = {
    {"E2B", 1536, 1, 1}, {"E4B", 2560, 2, 2}, {"12B", 3840, 8, 1}, {"26B-A4B", 2816, 8, 2}, {"31B", 5376, 16, 4},
};

const char *mtp_pack_official(int64_t index)
{
    return index >= 0 && index < (int64_t)(sizeof official / sizeof *official) ? official[index].name : NULL;
}

uint64_t mtp_pack_official_bytes(int64_t index, bool fp8, bool teacher, int64_t num_tokens)
{
    if (!mtp_pack_official(index) || num_tokens < 0) return 0;
    const mtp__store_layout layout = {.num_tokens = num_tokens,
                                      .num_teacher = teacher ? num_tokens : 0,
                                      .hidden_size = official[index].hidden_size,
                                      .num_kv_heads = {official[index].local_heads, official[index].global_heads},
                                      .head_dim = {256, 512},
                                      .teacher_top = teacher ? MTP__TEACHER_TOP : 0,
                                      .fp8 = fp8};
    uint64_t bytes = 0;
    for (int field = 0; field < MTP__STORE_FIELDS; field++)
        bytes += (uint64_t)mtp__store_num_rows(&layout, (mtp__store_field)field) *
                 mtp__store_row_bytes(&layout, (mtp__store_field)field);
    return bytes;
}
