/* Writing an export: a temporary directory beside the target, filled, synced, checked, renamed. */
#include "model/export.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/text.h"

enum { MOST_TEMPORARIES = 1000 };

/* Files that make a tokenizer; what is there is copied. */
static const char *const tokenizer_files[] = {"tokenizer.json",    "tokenizer_config.json",
                                              "tokenizer.model",   "special_tokens_map.json",
                                              "added_tokens.json", "vocab.json",
                                              "merges.txt",        "chat_template.jinja",
                                              "chat_template.json"};

typedef struct job {
    const mtp_drafter *drafter;
    const mtp__export_request *request;
    char *parent;         /* absolute */
    char *output;         /* absolute */
    char *temporary;      /* NULL until made */
    int64_t tokens;       /* K */
    bool keep_generation; /* the source's generation_config.json goes along unchanged */
} job;

static mtp_status fail_errno(const char *what, const char *path)
{
    return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: cannot %s: %s", path, what, strerror(errno));
}

static bool has_file(const char *directory, const char *name)
{
    char *path = NULL;
    const bool there = directory && mtp__path_join(directory, name, &path) == MTP_OK && mtp__file_exists(path);
    free(path);
    return there;
}

/* ---- where to ------------------------------------------------------------------------------------------------- */

/* Absolute paths of the output and of its directory, which is created. */
static mtp_status resolve_output(job *work)
{
    char *trimmed = strdup(work->request->output), *absolute = NULL;
    if (!trimmed) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a path");
    for (size_t n = strlen(trimmed); n > 1 && trimmed[n - 1] == '/'; n--) trimmed[n - 1] = '\0';
    char *slash = strrchr(trimmed, '/');
    const char *name = slash ? slash + 1 : trimmed;
    mtp_status status = MTP_OK;
    if (!*name || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        status = MTP_FAIL(MTP_E_CONFIG, "%s: cannot export here; name a directory to make", work->request->output);
    if (slash == trimmed) {
        absolute = strdup("/");
    } else if (status == MTP_OK) {
        if (slash) *slash = '\0';
        const char *parent = slash ? trimmed : ".";
        status = mtp__dir_create(parent);
        if (status == MTP_OK && !(absolute = realpath(parent, NULL))) status = fail_errno("resolve", parent);
    }
    if (status == MTP_OK) status = mtp__path_join(absolute, name, &work->output);
    work->parent = absolute;
    free(trimmed);
    return status;
}

static mtp_status is_empty(const char *directory, bool *empty)
{
    mtp__name_list files = {0}, directories = {0};
    mtp_status status = mtp__dir_list(directory, MTP__LIST_FILES, NULL, &files);
    if (status == MTP_OK) status = mtp__dir_list(directory, MTP__LIST_DIRECTORIES, NULL, &directories);
    *empty = files.count + directories.count == 0;
    mtp__name_list_free(&files);
    mtp__name_list_free(&directories);
    return status;
}

/* `force` replaces a drafter, nothing else: a mistyped path must not cost a directory of something. */
static mtp_status check_output(const job *work)
{
    bool empty;
    mtp_drafter_config config = {0};
    char source[PATH_MAX];
    if (!mtp__path_exists(work->output)) return MTP_OK;
    if (!mtp__dir_exists(work->output)) return MTP_FAIL(MTP_E_EXISTS, "%s exists and is not a directory", work->output);
    MTP_TRY(is_empty(work->output, &empty));
    if (empty) return MTP_OK;
    if (!work->request->force)
        return MTP_FAIL(MTP_E_EXISTS, "%s exists; choose another directory, or replace it with --force", work->output);
    if (work->request->source && realpath(work->request->source, source) && strcmp(source, work->output) == 0)
        return MTP_FAIL(MTP_E_CONFIG, "%s is the source of the export; choose another directory", work->output);
    if (mtp_drafter_config_read(work->output, &config) != MTP_OK)
        return MTP_FAIL(MTP_E_EXISTS, "%s exists and is not a drafter, so it is not replaced; remove it first",
                        work->output);
    mtp_drafter_config_free(&config);
    return MTP_OK;
}

static mtp_status make_temporary(job *work)
{
    const char *name = mtp__path_name(work->output);
    const size_t size = strlen(work->parent) + strlen(name) + 64;
    work->temporary = malloc(size);
    if (!work->temporary) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a path");
    for (int n = 0; n < MOST_TEMPORARIES; n++) {
        snprintf(work->temporary, size, "%s/.%s.tmp-%ld-%d", work->parent, name, (long)getpid(), n);
        if (mkdir(work->temporary, 0777) == 0) return MTP_OK;
        if (errno != EEXIST) break;
    }
    const mtp_status status = fail_errno("make a directory beside the target", work->output);
    free(work->temporary);
    work->temporary = NULL;
    return status;
}

/* A directory of files only, as exports are. Failures are not reported: this is clean-up. */
static void remove_directory(const char *directory)
{
    mtp__name_list list = {0};
    if (mtp__dir_list(directory, MTP__LIST_FILES, NULL, &list) == MTP_OK) {
        for (size_t i = 0; i < list.count; i++) {
            char *path = NULL;
            if (mtp__path_join(directory, list.names[i], &path) == MTP_OK) unlink(path);
            free(path);
        }
    }
    mtp__name_list_free(&list);
    rmdir(directory);
}

/* The temporary becomes the output. What was there is set aside first and removed after. */
static mtp_status publish(job *work)
{
    char *aside = NULL;
    MTP_TRY(mtp__dir_sync(work->temporary));
    if (rename(work->temporary, work->output) != 0) {
        if (!work->request->force || (errno != ENOTEMPTY && errno != EEXIST))
            return fail_errno("rename to", work->output);
        const size_t size = strlen(work->temporary) + sizeof ".old";
        aside = malloc(size);
        if (!aside) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a path");
        snprintf(aside, size, "%s.old", work->temporary);
        mtp_status status = MTP_OK;
        if (rename(work->output, aside) != 0) {
            status = fail_errno("set aside", work->output);
        } else if (rename(work->temporary, work->output) != 0) {
            status = fail_errno("rename to", work->output);
            rename(aside, work->output);
        }
        if (status != MTP_OK) {
            free(aside);
            return status;
        }
    }
    free(work->temporary);
    work->temporary = NULL;
    const mtp_status status = mtp__dir_sync(work->parent);
    if (aside) remove_directory(aside);
    free(aside);
    return status;
}

/* ---- what ----------------------------------------------------------------------------------------------------- */

/* num_assistant_tokens of the source; 0 when it names none. */
static mtp_status source_tokens(const job *work, int64_t *tokens, bool *present)
{
    char *path = NULL;
    json_t *json = NULL;
    *tokens = 0;
    *present = has_file(work->request->source, "generation_config.json");
    if (!*present) return MTP_OK;
    MTP_TRY(mtp__path_join(work->request->source, "generation_config.json", &path));
    mtp_status status = mtp__json_read(path, &json);
    if (status == MTP_OK) {
        const mtp__json_node root = mtp__json_root(json, path);
        status = mtp__json_as_object(&root);
        if (status == MTP_OK && mtp__json_has(&root, "num_assistant_tokens"))
            status = mtp__json_get_int64(&root, "num_assistant_tokens", 1, 1024, tokens);
    }
    json_decref(json);
    free(path);
    return status;
}

static mtp_status choose_tokens(job *work)
{
    int64_t tokens;
    bool present;
    MTP_TRY(source_tokens(work, &tokens, &present));
    work->tokens = work->request->num_speculative_tokens;
    if (work->tokens == 0) work->tokens = tokens ? tokens : work->request->default_tokens;
    if (work->tokens == 0)
        return MTP_FAIL(MTP_E_CONFIG,
                        "%s has no generation_config.json with num_assistant_tokens; say how many tokens to draft with "
                        "--num-speculative-tokens",
                        work->request->source ? work->request->source : "the new drafter");
    work->keep_generation = present && tokens == work->tokens;
    return MTP_OK;
}

static mtp_status write_generation(const job *work, const char *from, const char *to)
{
    json_t *json = NULL;
    if (work->keep_generation) return mtp__file_copy(from, to);
    if (from)
        MTP_TRY(mtp__json_read(from, &json));
    else
        json = json_pack("{s:b}", "is_assistant", 1);
    const bool done = json && json_object_set_new(json, "num_assistant_tokens", json_integer(work->tokens)) == 0 &&
                      (json_object_get(json, "num_assistant_tokens_schedule") ||
                       json_object_set_new(json, "num_assistant_tokens_schedule", json_string("constant")) == 0);
    const mtp_status status = done ? mtp__json_write(to, json, MTP__JSON_SORT_KEYS | MTP__JSON_NEWLINE)
                                   : MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", to);
    json_decref(json);
    return status;
}

/* `original` in the form of an export; `text` is its source, which is kept byte for byte when it has that form (NULL:
 * there is none). */
static mtp_status write_config_json(const job *work, const json_t *original, const char *text, const char *to)
{
    json_t *json = json_deep_copy(original);
    if (!json) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", to);
    mtp_status status = mtp__export_config(json, &work->drafter->config);
    if (status == MTP_OK)
        status = text && json_equal(json, original) && strstr(text, "\"model_type\": \"")
                     ? mtp__file_write(to, text, strlen(text))
                     : mtp__json_write(to, json, MTP__JSON_SORT_KEYS | MTP__JSON_NEWLINE);
    json_decref(json);
    return status;
}

static mtp_status write_config(const job *work, const char *from, const char *to)
{
    char *text = NULL;
    size_t size;
    json_t *json = NULL;
    if (work->request->config) return write_config_json(work, work->request->config, NULL, to);
    MTP_TRY(mtp__file_read(from, MTP__JSON_MAX_BYTES, &text, &size));
    mtp_status status = mtp__json_parse(text, size, from, 1, &json);
    if (status == MTP_OK) status = write_config_json(work, json, text, to);
    json_decref(json);
    free(text);
    return status;
}

static mtp_status write_weights(const job *work, const char *from, const char *to)
{
    (void)from;
    return mtp_drafter_save_weights(work->drafter, to);
}

/* Calls `write` with the paths of a file in `directory` (NULL when it is not there) and in the new directory. */
static mtp_status place(const job *work, const char *directory, const char *name,
                        mtp_status (*write)(const job *work, const char *from, const char *to))
{
    char *from = NULL, *to = NULL;
    mtp_status status = mtp__path_join(work->temporary, name, &to);
    if (status == MTP_OK && has_file(directory, name)) status = mtp__path_join(directory, name, &from);
    if (status == MTP_OK) status = write(work, from, to);
    free(from);
    free(to);
    return status;
}

static mtp_status copy_file(const job *work, const char *from, const char *to)
{
    (void)work;
    return mtp__file_copy(from, to);
}

static mtp_status find_tokenizer(const job *work, const char **directory)
{
    *directory = work->request->source;
    if (has_file(*directory, "tokenizer.json")) return MTP_OK;
    *directory = work->request->verifier;
    if (*directory && has_file(*directory, "tokenizer.json")) return MTP_OK;
    const char *source = work->request->source;
    return MTP_FAIL(MTP_E_NOT_FOUND,
                    "no tokenizer.json in %s%s%s; the llama.cpp converter needs one: name a verifier that has it",
                    source ? source : "", source && *directory ? ", nor in " : "", *directory ? *directory : "");
}

static mtp_status fill(const job *work, const char *tokenizer)
{
    const char *source = work->request->source;
    MTP_TRY(place(work, source, "config.json", write_config));
    MTP_TRY(place(work, source, "generation_config.json", write_generation));
    MTP_TRY(place(work, source, "model.safetensors", write_weights));
    for (size_t i = 0; i < sizeof tokenizer_files / sizeof *tokenizer_files; i++)
        if (has_file(tokenizer, tokenizer_files[i])) MTP_TRY(place(work, tokenizer, tokenizer_files[i], copy_file));
    return MTP_OK;
}

/* ---- the serve line ------------------------------------------------------------------------------------------- */

/* `text` as one word of a POSIX shell. */
static void add_quoted(mtp__text *line, const char *text)
{
    if (text[strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./+=:@%,")] == '\0' &&
        *text) {
        mtp__text_add(line, "%s", text);
        return;
    }
    mtp__text_add(line, "'");
    for (; *text; text++) {
        if (*text == '\'')
            mtp__text_add(line, "'\\''");
        else
            mtp__text_add(line, "%c", *text);
    }
    mtp__text_add(line, "'");
}

static mtp_status serve_line(const job *work, char **line)
{
    mtp__text text = {0};
    char *speculative = NULL, verifier[PATH_MAX] = "VERIFIER";
    if (work->request->verifier && !realpath(work->request->verifier, verifier))
        return fail_errno("resolve", work->request->verifier);
    json_t *json = json_pack("{s:s, s:s, s:I}", "method", "mtp", "model", work->output, "num_speculative_tokens",
                             (json_int_t)work->tokens);
    if (!json) return MTP_FAIL(MTP_E_CONFIG, "%s: the path is not UTF-8, which engines need", work->output);
    mtp_status status = mtp__json_dump(json, MTP__JSON_ONE_LINE, &speculative);
    json_decref(json);
    if (status == MTP_OK) {
        mtp__text_add(&text, "vllm serve ");
        add_quoted(&text, verifier);
        mtp__text_add(&text, " --speculative-config ");
        add_quoted(&text, speculative);
        status = mtp__text_check(&text);
    }
    free(speculative);
    if (status != MTP_OK) {
        mtp__text_free(&text);
        return status;
    }
    *line = text.data;
    return MTP_OK;
}

/* ---- the whole ------------------------------------------------------------------------------------------------ */

static mtp_status prepare(job *work, const char **tokenizer)
{
    MTP_TRY(choose_tokens(work));
    MTP_TRY(resolve_output(work));
    MTP_TRY(check_output(work));
    return find_tokenizer(work, tokenizer);
}

static mtp_status run(job *work, mtp_export_result *result)
{
    const char *tokenizer;
    MTP_TRY(prepare(work, &tokenizer));
    MTP_TRY(serve_line(work, &result->serve_line));
    MTP_TRY(make_temporary(work));
    MTP_TRY(fill(work, tokenizer));
    MTP_TRY(mtp_validate_export(work->temporary, work->request->verifier, &result->report));
    MTP_TRY(publish(work));
    result->num_speculative_tokens = work->tokens;
    mtp_log(work->request->logger, MTP_LOG_INFO, "exported to %s", work->output);
    return MTP_OK;
}

static mtp_status check_request(const mtp__export_request *request)
{
    MTP_REQUIRE(request && (request->source || request->config) && request->output);
    MTP_REQUIRE(request->num_speculative_tokens >= 0 && request->default_tokens >= 0);
    return MTP_OK;
}

static void release(job *work)
{
    if (work->temporary) remove_directory(work->temporary);
    free(work->temporary);
    free(work->parent);
    free(work->output);
}

mtp_status mtp__export_preflight(const mtp__export_request *request)
{
    const char *tokenizer;
    MTP_TRY(check_request(request));
    job work = {.request = request};
    const mtp_status status = prepare(&work, &tokenizer);
    release(&work);
    return status == MTP_OK ? MTP_OK : mtp__fail_prefix(status, "export to %s", request->output);
}

mtp_status mtp__export_drafter(const mtp_drafter *drafter, const mtp__export_request *request,
                               mtp_export_result *result)
{
    MTP_REQUIRE(drafter && result);
    MTP_TRY(check_request(request));
    job work = {.drafter = drafter, .request = request};
    *result = (mtp_export_result){0};
    const mtp_status status = run(&work, result);
    release(&work);
    if (status == MTP_OK) return MTP_OK;
    mtp_export_result_free(result);
    return mtp__fail_prefix(status, "export to %s", request->output);
}

void mtp_export_result_free(mtp_export_result *result)
{
    if (!result) return;
    free(result->serve_line);
    mtp_export_report_free(&result->report);
    *result = (mtp_export_result){0};
}
