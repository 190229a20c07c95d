/* Inspecting packed stores and their shards. Values are not read: mtp pack --verify does that. */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "data/pack.h"
#include "data/store.h"
#include "data/store_dir.h"
#include "data/verifier_config.h"
#include "run/inspect.h"

static const char *type_name(const mtp__store_layout *layout, mtp__store_field field)
{
    switch (field) {
    case MTP__STORE_IDS:
    case MTP__STORE_TEACHER_IDS:
        return "I32";
    case MTP__STORE_MASK:
        return "U8";
    case MTP__STORE_HIDDEN:
        return "BF16";
    case MTP__STORE_KV:
    case MTP__STORE_KV_GLOBAL:
        return layout->fp8 ? "F8_E4M3" : "BF16";
    default:
        return "F32";
    }
}

static mtp_status check_verifier(mtp__inspector *inspector, const mtp__shard *shard)
{
    mtp_verifier_config verifier;
    if (!inspector->verifier) return MTP_OK;
    MTP_TRY(mtp__verifier_config_read(inspector->verifier, &verifier));
    if (mtp__shard_check_verifier(shard, &verifier) != MTP_OK) mtp__problem_last(inspector);
    return MTP_OK;
}

static void add_geometry(mtp__inspector *inspector, const mtp__store_layout *layout)
{
    static const char *const names[MTP_LAYER_TYPES] = {"kv_last_local", "kv_last_global"};
    mtp__fact(inspector, "vocab_size", json_integer(layout->vocab_size));
    mtp__fact_text(inspector, "hidden_states", "%lld wide, after the final norm", (long long)layout->hidden_size);
    mtp__fact(inspector, "sliding_window", json_integer(layout->sliding_window));
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        if (layout->num_kv_heads[type])
            mtp__fact_text(inspector, names[type], "%s, %lld heads of %lld%s",
                           type_name(layout, (mtp__store_field)(MTP__STORE_KV + type)),
                           (long long)layout->num_kv_heads[type], (long long)layout->head_dim[type],
                           mtp__store_parts(layout, type) == 1 ? ", V alone: K is made of it" : "");
        else
            mtp__fact_text(inspector, names[type], "none");
    if (layout->teacher_top)
        mtp__fact_text(inspector, "teacher", "log-sum-exp and the %lld largest logits of each supervised token",
                       (long long)layout->teacher_top);
    else
        mtp__fact_text(inspector, "teacher", "none");
}

static void add_fields(mtp__inspector *inspector, const mtp__store_layout *layout)
{
    for (int i = 0; i < MTP__STORE_FIELDS; i++) {
        const mtp__store_field field = (mtp__store_field)i;
        const size_t width = mtp__store_row_bytes(layout, field);
        char name[64];
        if (width == 0 || mtp__store_num_rows(layout, field) == 0) continue;
        snprintf(name, sizeof name, "field %s", mtp__store_field_name(field));
        mtp__fact_text(inspector, name, "%s, %lld rows of %zu bytes", type_name(layout, field),
                       (long long)mtp__store_num_rows(layout, field), width);
    }
}

/* Samples that were refused while this shard was written, by reason. */
static void add_refused(mtp__inspector *inspector, const mtp__shard *shard)
{
    mtp_pack_summary summary = {0};
    json_t *reasons = json_object();
    mtp__quarantine_count(shard->quarantine, &summary);
    mtp__fact(inspector, "refused", json_integer(summary.refused));
    for (int i = 0; i < MTP_PACK_REASONS && summary.reasons[i].count; i++)
        if (json_object_set_new(reasons, summary.reasons[i].reason, json_integer(summary.reasons[i].count)) != 0)
            inspector->failed = true;
    if (summary.refused)
        mtp__fact(inspector, "refused_by_reason", reasons);
    else
        json_decref(reasons);
}

mtp_status mtp__inspect_shard(mtp__inspector *inspector)
{
    mtp__shard *shard = NULL;
    inspector->kind = MTP_INSPECT_SHARD;
    MTP_TRY(mtp__shard_open(inspector->path, &shard));
    mtp__fact(inspector, "version", json_integer(shard->version));
    mtp__fact_text(inspector, "verifier", "%s", shard->verifier);
    mtp__fact(inspector, "samples", json_integer(shard->num_samples));
    mtp__fact(inspector, "tokens", json_integer(shard->sample_tokens));
    mtp__fact(inspector, "unused_rows", json_integer(shard->layout.num_tokens - shard->sample_tokens));
    mtp__fact(inspector, "supervised", json_integer(shard->num_supervised));
    add_refused(inspector, shard);
    mtp__fact(inspector, "bytes", json_integer((json_int_t)shard->file_size));
    add_geometry(inspector, &shard->layout);
    add_fields(inspector, &shard->layout);
    mtp__fact_text(inspector, "checksums", "not compared: mtp pack --verify does");
    const mtp_status status = check_verifier(inspector, shard);
    mtp__shard_close(shard);
    return status;
}

static mtp_status add_shards(mtp__inspector *inspector, const mtp__name_list *names)
{
    int64_t samples = 0, tokens = 0, supervised = 0, bytes = 0;
    for (size_t i = 0; i < names->count; i++) {
        char *path = NULL;
        mtp__shard *shard = NULL;
        MTP_TRY(mtp__path_join(inspector->path, names->names[i], &path));
        mtp_status status = MTP_OK;
        if (mtp__shard_open(path, &shard) != MTP_OK) {
            mtp__problem_last(inspector);
        } else {
            if (i == 0) add_geometry(inspector, &shard->layout);
            samples += shard->num_samples;
            tokens += shard->sample_tokens;
            supervised += shard->num_supervised;
            bytes += (int64_t)shard->file_size;
            status = check_verifier(inspector, shard);
        }
        mtp__shard_close(shard);
        free(path);
        MTP_TRY(status);
    }
    mtp__fact(inspector, "shards", json_integer((json_int_t)names->count));
    mtp__fact(inspector, "samples", json_integer(samples));
    mtp__fact(inspector, "tokens", json_integer(tokens));
    mtp__fact(inspector, "supervised", json_integer(supervised));
    mtp__fact(inspector, "bytes", json_integer(bytes));
    return MTP_OK;
}

mtp_status mtp__inspect_store(mtp__inspector *inspector)
{
    mtp__name_list names = {0};
    inspector->kind = MTP_INSPECT_STORE;
    if (mtp__store_dir_shards(inspector->path, &names) != MTP_OK) {
        mtp__problem_last(inspector);
        return MTP_OK;
    }
    const mtp_status status = add_shards(inspector, &names);
    mtp__name_list_free(&names);
    return status;
}
