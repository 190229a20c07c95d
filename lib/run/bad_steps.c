#include "run/bad_steps.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"

enum { MAX_NAMES = 32 };

/* ---- samples -------------------------------------------------------------------------------------------------- */

mtp_status mtp__sample_list_add(mtp__sample_list *list, int64_t sample)
{
    if (list->count == list->capacity) {
        const int64_t capacity = list->capacity ? 2 * list->capacity : 64;
        int64_t *grown = realloc(list->samples, (size_t)capacity * sizeof *grown);
        if (!grown) return MTP_FAIL(MTP_E_MEMORY, "out of memory for the samples of a batch");
        list->samples = grown;
        list->capacity = capacity;
    }
    list->samples[list->count++] = sample;
    return MTP_OK;
}

void mtp__sample_list_free(mtp__sample_list *list)
{
    free(list->samples);
    *list = (mtp__sample_list){0};
}

void mtp__sample_list_names(const mtp__sample_list *list, const mtp_dataset *dataset, mtp__text *names)
{
    for (int64_t i = 0; i < list->count && i < MAX_NAMES; i++) {
        const mtp_sample_info info = mtp_dataset_sample(dataset, list->samples[i]);
        mtp__text_add(names, "%s%s", i ? ", " : "", info.name);
    }
    if (list->count > MAX_NAMES) mtp__text_add(names, " and %lld more", (long long)(list->count - MAX_NAMES));
}

/* ---- the file ------------------------------------------------------------------------------------------------- */

mtp_status mtp__bad_steps_path(const char *run_directory, char **path)
{
    return mtp__path_join(run_directory, "bad_steps.jsonl", path);
}

mtp_status mtp__bad_steps_cut_back(const char *run_directory, int64_t step)
{
    char *path = NULL;
    MTP_TRY(mtp__bad_steps_path(run_directory, &path));
    const mtp_status status = mtp__file_exists(path) ? mtp__metrics_cut_back(path, step, step) : MTP_OK;
    free(path);
    return status;
}

/* JSON has no NaN and no infinity. */
static json_t *finite_or_null(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *line_of(const mtp__update *update, int64_t bad_steps, const mtp__sample_list *list,
                       const mtp_dataset *dataset)
{
    json_t *names = json_array();
    for (int64_t i = 0; i < list->count; i++)
        json_array_append_new(names, json_string(mtp_dataset_sample(dataset, list->samples[i]).name));
    return json_pack("{s:s, s:I, s:I, s:I, s:o, s:o, s:o, s:{s:f}}", "kind", "bad_step", "step",
                     (json_int_t)update->step, "epoch", (json_int_t)update->epoch, "bad_steps", (json_int_t)bad_steps,
                     "loss", finite_or_null(update->loss), "grad_norm", finite_or_null(update->grad_norm), "samples",
                     names, "time", "unix", mtp__metrics_time());
}

static mtp_status append(const char *path, const json_t *line)
{
    mtp__jsonl_writer writer;
    MTP_TRY(mtp__jsonl_append_open(&writer, path));
    mtp_status status = mtp__jsonl_append(&writer, line);
    if (status == MTP_OK) status = mtp__jsonl_sync(&writer);
    mtp__jsonl_append_close(&writer);
    return status;
}

mtp_status mtp__bad_steps_record(const char *run_directory, const mtp__update *update, int64_t bad_steps,
                                 const mtp__sample_list *samples, const mtp_dataset *dataset)
{
    char *path = NULL;
    json_t *line = line_of(update, bad_steps, samples, dataset);
    mtp_status status = line ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory for a line of bad_steps.jsonl");
    if (status == MTP_OK) status = mtp__bad_steps_path(run_directory, &path);
    const bool made = status == MTP_OK && !mtp__file_exists(path);
    if (status == MTP_OK) status = append(path, line);
    if (status == MTP_OK && made) status = mtp__dir_sync(run_directory);
    json_decref(line);
    free(path);
    return status;
}
