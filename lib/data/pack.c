/* Packing: which samples go into which shard, what is there already, and the files that stand beside the shards. */
#include "mtp/pack.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/hash.h"
#include "data/pack.h"
#include "data/store_dir.h"
#include "formats/json.h"

typedef struct packing {
    const char *directory;
    const mtp_pack_options *options;
    mtp_pack_summary *summary;
    mtp__pack_means means;
    mtp__text quarantine; /* all lines so far */
    int64_t num_inputs;   /* samples offered, refused ones included */
    bool prepared;        /* the check */
} packing;

/* ---- input ---------------------------------------------------------------------------------------------------- */

static void refuse(void *user, const char *path, const mtp_error *why)
{
    const mtp_pack_refusal refusal = mtp__refusal_of(path, why);
    mtp__quarantine_add(user, path, &refusal);
}

static mtp_status open_input(packing *p)
{
    const mtp_pack_options *options = p->options;
    const mtp_dataset_options dataset = {.hidden_norm = options->hidden_norm, .logger = options->logger};
    const mtp__dataset_quarantine quarantine = {refuse, &p->quarantine};
    MTP_TRY(mtp__dataset_open(options->inputs, options->num_inputs, options->verifier, &dataset, &quarantine,
                              &p->means.input));
    for (int64_t i = 0; i < p->means.input->num_parts; i++)
        if (p->means.input->parts[i].shard)
            return MTP_FAIL(MTP_E_CONFIG, "%s: is packed already; give the samples it was made of",
                            p->means.input->parts[i].shard->path);
    MTP_TRY(mtp__text_check(&p->quarantine));
    p->num_inputs = p->means.input->count;
    for (const char *line = mtp__text_get(&p->quarantine); *line; line++) p->num_inputs += *line == '\n';
    return MTP_OK;
}

static mtp_status write_quarantine(const packing *p)
{
    char *path = NULL;
    MTP_TRY(mtp__path_join(p->directory, "quarantine.jsonl", &path));
    const mtp_status status = mtp__file_write(path, mtp__text_get(&p->quarantine), p->quarantine.length);
    free(path);
    return status;
}

/* More bad samples than the user allows? Then the list is written at once: it is what helps. */
static mtp_status check_bad(packing *p)
{
    int64_t bad = 0;
    for (const char *line = mtp__text_get(&p->quarantine); *line; line++) bad += *line == '\n';
    if ((double)bad <= p->options->max_bad * (double)p->num_inputs) return MTP_OK;
    MTP_TRY(write_quarantine(p));
    mtp__quarantine_count(mtp__text_get(&p->quarantine), p->summary);
    const char *first = mtp__text_get(&p->quarantine);
    const size_t length = strcspn(first, "\n");
    return MTP_FAIL(MTP_E_DATA,
                    "%lld of %lld samples are bad, more than max_bad %g allows; %s/quarantine.jsonl says which and "
                    "why, the first: %.*s",
                    (long long)bad, (long long)p->num_inputs, p->options->max_bad, p->directory,
                    (int)(length < 400 ? length : 400), first);
}

/* ---- the plan ------------------------------------------------------------------------------------------------- */

static int version_of(const packing *p)
{
    const mtp__store_layout layout = mtp__pack_layout(p->options, p->means.input, 0, 0);
    return mtp__store_version(&layout);
}

static json_t *describe_plan(const packing *p)
{
    const mtp_pack_options *options = p->options;
    uint64_t digest = mtp_dataset_fingerprint(p->means.input);
    char text[24];
    for (int64_t i = 0; i < p->means.input->count; i++) {
        const mtp__dataset_entry entry = mtp__dataset_at(p->means.input, i);
        const char *name = mtp__path_name(entry.path);
        digest = mtp__fnv1a(digest, name, strlen(name) + 1);
    }
    digest = mtp__fnv1a(digest, mtp__text_get(&p->quarantine), p->quarantine.length);
    snprintf(text, sizeof text, "%016llx", (unsigned long long)digest);
    return json_pack("{s:s, s:i, s:s, s:I, s:I, s:s, s:b, s:b, s:s}", "format", "mtp-store-plan", "version",
                     version_of(p), "inputs", text, "samples", (json_int_t)p->num_inputs, "shard_bytes",
                     (json_int_t)options->shard_bytes, "kv", options->fp8 ? "fp8" : "bf16", "global_v_only",
                     options->global_v_only, "teacher", options->teacher != NULL, "check",
                     options->check ? options->check->name : "none");
}

/* Nothing of others may be in the way: neither another packing nor foreign shards. */
static mtp_status compare_plan(const packing *p, const char *path, const json_t *plan)
{
    json_t *found = NULL;
    MTP_TRY(mtp__json_read(path, &found));
    const bool same = json_equal(found, plan);
    json_decref(found);
    if (same) return MTP_OK;
    return MTP_FAIL(MTP_E_EXISTS,
                    "%s holds a store of other samples or settings (%s); pack into another directory, or remove it",
                    p->directory, path);
}

static mtp_status settle_plan(const packing *p)
{
    char *path = NULL;
    json_t *plan = describe_plan(p);
    mtp__name_list shards = {0};
    mtp_status status = plan ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory");
    if (status == MTP_OK) status = mtp__path_join(p->directory, MTP__STORE_PLAN, &path);
    if (status == MTP_OK && mtp__file_exists(path)) {
        status = compare_plan(p, path, plan);
    } else if (status == MTP_OK) {
        status = mtp__dir_list(p->directory, MTP__LIST_FILES, ".h5", &shards);
        if (status == MTP_OK && shards.count > 0)
            status = MTP_FAIL(MTP_E_EXISTS, "%s holds shards of an unknown packing (%s); pack into another directory",
                              p->directory, shards.names[0]);
        if (status == MTP_OK) status = mtp__json_write(path, plan, MTP__JSON_NEWLINE);
    }
    mtp__name_list_free(&shards);
    json_decref(plan);
    free(path);
    return status;
}

/* ---- shards --------------------------------------------------------------------------------------------------- */

static uint64_t shard_bytes(const mtp__store_layout *layout)
{
    uint64_t bytes = 0;
    for (int field = 0; field < MTP__STORE_FIELDS; field++)
        bytes += (uint64_t)mtp__store_num_rows(layout, (mtp__store_field)field) *
                 mtp__store_row_bytes(layout, (mtp__store_field)field);
    return bytes;
}

/* One past the last sample of the shard that begins with `begin`. */
static int64_t shard_end(const packing *p, int64_t begin)
{
    const uint64_t most = (uint64_t)p->options->shard_bytes;
    uint64_t bytes = 0;
    int64_t end = begin;
    while (end < p->means.input->count) {
        const mtp__store_layout layout = mtp__pack_layout(p->options, p->means.input, end, end + 1);
        bytes += shard_bytes(&layout);
        if (bytes > most && end > begin) break;
        end++;
    }
    return end;
}

/* Counts of a finished shard, and its quarantine list. */
static void add_counts(const mtp__shard *shard, mtp_pack_summary *summary)
{
    summary->shards++;
    summary->samples += shard->num_samples;
    summary->tokens += shard->sample_tokens;
    summary->supervised += shard->num_supervised;
    summary->bytes += shard->file_size;
}

static mtp_status write_shard(packing *p, const char *path, int64_t begin, int64_t end, mtp__pack_progress *progress)
{
    const mtp_pack_check *check = p->options->check;
    if (check && !p->prepared) MTP_TRY(check->prepare(check->user, p->means.input));
    p->prepared = true;
    return mtp__pack_shard(&p->means, path, begin, end, progress);
}

static mtp_status take_shard(packing *p, const char *path, int64_t begin, int64_t end, mtp__pack_progress *progress)
{
    mtp__shard *shard = NULL;
    mtp_status status = mtp__path_exists(path) ? mtp__shard_open(path, &shard) : MTP_E_NOT_FOUND;
    const bool kept = status == MTP_OK;
    if (kept) {
        progress->done += end - begin;
        p->summary->shards_kept++;
    } else {
        if (status != MTP_E_NOT_FOUND)
            mtp_log(p->options->logger, MTP_LOG_WARNING, "%s; it is packed again", mtp_last_error()->message);
        MTP_TRY(write_shard(p, path, begin, end, progress));
        MTP_TRY(mtp__shard_open(path, &shard));
    }
    add_counts(shard, p->summary);
    mtp__text_add(&p->quarantine, "%s", shard->quarantine);
    mtp__shard_close(shard);
    MTP_TRY(mtp__text_check(&p->quarantine));
    return check_bad(p);
}

static mtp_status pack_shards(packing *p)
{
    mtp__pack_progress progress = {.total = p->means.input->count};
    int64_t index = 0;
    for (int64_t begin = 0; begin < p->means.input->count; index++) {
        const int64_t end = shard_end(p, begin);
        char name[32], *path = NULL;
        mtp__store_shard_name(index, name);
        MTP_TRY(mtp__path_join(p->directory, name, &path));
        const mtp_status status = take_shard(p, path, begin, end, &progress);
        free(path);
        MTP_TRY(status);
        begin = end;
    }
    return MTP_OK;
}

/* ---- the end -------------------------------------------------------------------------------------------------- */

static mtp_status write_store(const packing *p)
{
    const mtp_pack_summary *s = p->summary;
    char *path = NULL;
    json_t *store = json_pack("{s:s, s:i, s:I, s:I, s:I, s:I, s:I, s:I}", "format", "mtp-store", "version",
                              version_of(p), "num_shards", (json_int_t)s->shards, "samples", (json_int_t)s->samples,
                              "tokens", (json_int_t)s->tokens, "supervised", (json_int_t)s->supervised, "bytes",
                              (json_int_t)s->bytes, "refused", (json_int_t)s->refused);
    mtp_status status = store ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory");
    if (status == MTP_OK) status = mtp__path_join(p->directory, MTP__STORE_DONE, &path);
    if (status == MTP_OK) status = mtp__json_write(path, store, MTP__JSON_NEWLINE);
    json_decref(store);
    free(path);
    return status;
}

/* Temporaries of a run that was killed; nobody else packs here now. */
static mtp_status remove_leftovers(const char *directory)
{
    mtp__name_list names;
    MTP_TRY(mtp__dir_list(directory, MTP__LIST_FILES, NULL, &names));
    mtp_status status = MTP_OK;
    for (size_t i = 0; i < names.count && status == MTP_OK; i++) {
        char *path = NULL;
        const char *name = names.names[i];
        const bool shard = strncmp(name, ".shard-", 7) == 0, text = name[0] == '.' && strstr(name, ".json");
        if (!shard && !(text && strstr(name, ".tmp-"))) continue;
        status = mtp__path_join(directory, name, &path);
        if (status == MTP_OK) remove(path);
        free(path);
    }
    mtp__name_list_free(&names);
    return status;
}

static mtp_status pack(packing *p)
{
    const mtp_verifier_config *verifier = mtp_verifier_get_config(p->options->verifier);
    const int64_t top = verifier->vocab_size < MTP__TEACHER_TOP ? verifier->vocab_size : MTP__TEACHER_TOP;
    if (p->options->global_v_only) {
        MTP_TRY(mtp__verifier_key_read(p->options->verifier, MTP_LAYER_FULL, &p->means.key));
        MTP_TRY(mtp__verifier_key_check(&p->means.key, mtp_verifier_directory(p->options->verifier)));
    }
    MTP_TRY(open_input(p));
    MTP_TRY(settle_plan(p));
    MTP_TRY(check_bad(p));
    MTP_TRY(remove_leftovers(p->directory));
    if (p->means.input->count == 0)
        return MTP_FAIL(MTP_E_DATA, "%s: there is no sample to pack", p->options->inputs[0]);
    if (p->options->teacher)
        MTP_TRY(mtp__teacher_create(p->options->teacher, p->options->verifier, top, &p->means.teacher));
    MTP_TRY(pack_shards(p));
    mtp__quarantine_count(mtp__text_get(&p->quarantine), p->summary);
    MTP_TRY(write_quarantine(p));
    return write_store(p);
}

/* A directory with a store in it is read as one, so samples beside it would be out of sight. */
static mtp_status check_place(const char *directory)
{
    mtp__name_list names;
    MTP_TRY(mtp__dir_list(directory, MTP__LIST_FILES, ".safetensors", &names));
    mtp_status status = MTP_OK;
    if (names.count > 0)
        status = MTP_FAIL(MTP_E_EXISTS, "%s holds samples (%s, ...); pack into a directory of its own", directory,
                          names.names[0]);
    mtp__name_list_free(&names);
    return status;
}

mtp_status mtp_pack(const char *directory, const mtp_pack_options *options, mtp_pack_summary *summary)
{
    MTP_REQUIRE(directory && options && summary && options->inputs && options->num_inputs >= 1 && options->verifier);
    MTP_REQUIRE(options->shard_bytes >= 1 && options->workers >= 1 && options->workers <= 4096);
    MTP_REQUIRE(options->max_bad >= 0 && options->max_bad <= 1);
    *summary = (mtp_pack_summary){0};
    packing p = {.directory = directory, .options = options, .summary = summary, .means.options = options};
    mtp__pack_owner owner;
    MTP_TRY(mtp__store_supported(directory));
    MTP_TRY(mtp__dir_create(directory));
    MTP_TRY(check_place(directory));
    MTP_TRY(mtp__pack_own(directory, &owner));
    const mtp_status status = pack(&p);
    mtp__teacher_free(p.means.teacher);
    mtp__verifier_key_free(&p.means.key);
    mtp_dataset_close(p.means.input);
    mtp__text_free(&p.quarantine);
    mtp__pack_disown(&owner);
    return status;
}

/* ---- verifying ------------------------------------------------------------------------------------------------ */

static mtp_status verify_shard(const char *path, mtp_pack_summary *summary)
{
    mtp__shard *shard = NULL;
    MTP_TRY(mtp__shard_open(path, &shard));
    const mtp_status status = mtp__shard_verify(shard);
    add_counts(shard, summary);
    mtp__quarantine_count(shard->quarantine, summary);
    mtp__shard_close(shard);
    return status;
}

mtp_status mtp_pack_verify(const char *path, bool (*progress)(void *user, int64_t done, int64_t total), void *user,
                           mtp_pack_summary *summary)
{
    MTP_REQUIRE(path && summary);
    *summary = (mtp_pack_summary){0};
    if (!mtp__path_exists(path)) return MTP_FAIL(MTP_E_NOT_FOUND, "%s: no such file or directory", path);
    if (!mtp__dir_exists(path)) return verify_shard(path, summary);
    if (!mtp__store_dir_is(path)) return MTP_FAIL(MTP_E_FORMAT, "%s: is no directory that mtp pack wrote", path);
    mtp__name_list names;
    MTP_TRY(mtp__store_dir_shards(path, &names));
    mtp_status status = MTP_OK;
    for (size_t i = 0; i < names.count && status == MTP_OK; i++) {
        char *shard = NULL;
        status = mtp__path_join(path, names.names[i], &shard);
        if (status == MTP_OK) status = verify_shard(shard, summary);
        free(shard);
        if (status == MTP_OK && progress && !progress(user, (int64_t)i + 1, (int64_t)names.count))
            status = MTP_FAIL(MTP_E_INTERRUPTED, "interrupted");
    }
    mtp__name_list_free(&names);
    return status;
}
