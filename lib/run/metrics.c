#include "run/metrics.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

/* Bytes of lines that wait for a disk with room. */
enum { MAX_LATE = 1 << 24 };

/* ---- opening -------------------------------------------------------------------------------------------------- */

/* Is this line one of steps that a run which goes on at `step` does not do again. */
static bool keeps(json_t *line, const char *origin, int64_t step, int64_t last_eval_step)
{
    const mtp__json_node root = mtp__json_root(line, origin);
    const char *kind;
    int64_t at;
    if (mtp__json_get_string(&root, "kind", &kind) != MTP_OK) return false;
    if (mtp__json_get_int64(&root, "step", 0, INT64_MAX, &at) != MTP_OK) return false;
    return at <= (strcmp(kind, "eval") == 0 ? last_eval_step : step);
}

static mtp_status copy_lines(mtp__jsonl_reader *reader, int64_t step, int64_t last_eval_step, mtp__file_writer *writer)
{
    for (;;) {
        json_t *line = NULL;
        const mtp_status read = mtp__jsonl_next(reader, &line);
        if (read == MTP_E_MEMORY) return read;
        if (read != MTP_OK) continue; /* the end of a line that a killed process did not finish */
        if (!line) return MTP_OK;
        mtp_status status = MTP_OK;
        if (keeps(line, reader->origin, step, last_eval_step)) {
            char *text = NULL;
            status = mtp__json_dump(line, MTP__JSON_ONE_LINE | MTP__JSON_NEWLINE, &text);
            if (status == MTP_OK) status = mtp__file_writer_write(writer, text, strlen(text));
            free(text);
        }
        json_decref(line);
        if (status != MTP_OK) return status;
    }
}

mtp_status mtp__metrics_cut_back(const char *path, int64_t step, int64_t last_eval_step)
{
    mtp__jsonl_reader reader;
    mtp__file_writer writer = {0};
    char *text = NULL;
    size_t size = 0;
    MTP_TRY(mtp__file_read(path, SIZE_MAX / 2, &text, &size));
    mtp_status status = mtp__jsonl_open_text(&reader, text, size, path);
    if (status == MTP_OK) {
        status = mtp__file_writer_open(&writer, path);
        if (status == MTP_OK) status = copy_lines(&reader, step, last_eval_step, &writer);
        if (status == MTP_OK) status = mtp__file_writer_commit(&writer);
        mtp__file_writer_abort(&writer);
        mtp__jsonl_close(&reader);
    }
    free(text);
    return status;
}

static mtp_status open_lines(const char *path, int64_t step, int64_t last_eval_step, mtp__metrics *metrics)
{
    if (step < 0)
        MTP_TRY(mtp__file_write(path, "", 0));
    else if (mtp__file_exists(path))
        MTP_TRY(mtp__metrics_cut_back(path, step, last_eval_step));
    return mtp__jsonl_append_open(&metrics->lines, path);
}

double mtp__metrics_time(void)
{
    struct timeval time;
    gettimeofday(&time, NULL);
    return (double)time.tv_sec + (double)time.tv_usec * 1e-6;
}

mtp_status mtp__metrics_open(const char *run_directory, int64_t step, int64_t last_eval_step, mtp__metrics *metrics)
{
    char *path = NULL, *tb = NULL;
    mtp_status status = mtp__path_join(run_directory, "metrics.jsonl", &path);
    if (status == MTP_OK) status = mtp__path_join(run_directory, "tb", &tb);
    if (status == MTP_OK) status = open_lines(path, step, last_eval_step, metrics);
    if (status == MTP_OK) status = mtp__tfevents_create(tb, mtp__metrics_time(), &metrics->events);
    free(path);
    free(tb);
    return status;
}

/* Lines that wait for it. */
static mtp_status write_late(mtp__metrics *metrics)
{
    if (metrics->late.length == 0) return mtp__text_check(&metrics->late);
    MTP_TRY(mtp__text_check(&metrics->late));
    MTP_TRY(mtp__jsonl_append_text(&metrics->lines, metrics->late.data, metrics->late.length));
    mtp__text_free(&metrics->late);
    return MTP_OK;
}

mtp_status mtp__metrics_close(mtp__metrics *metrics)
{
    mtp_status status = MTP_OK;
    if (metrics->lines.fd >= 0) status = write_late(metrics);
    if (status == MTP_OK && metrics->lines.fd >= 0) status = mtp__jsonl_sync(&metrics->lines);
    mtp__text_free(&metrics->late);
    mtp__jsonl_append_close(&metrics->lines);
    const mtp_status events = mtp__tfevents_close(metrics->events);
    metrics->events = NULL;
    return status == MTP_OK ? events : status;
}

void mtp__metrics_abandon(mtp__metrics *metrics)
{
    const mtp_error *last = mtp_last_error();
    char message[sizeof last->message];
    const mtp_error kept = {.status = last->status, .foreign = last->foreign, .file = last->file, .line = last->line};
    memcpy(message, last->message, sizeof message);
    if (mtp__metrics_close(metrics) != MTP_OK)
        mtp__fail(kept.status, kept.foreign, kept.file, kept.line, "%s", message);
}

/* ---- writing -------------------------------------------------------------------------------------------------- */

static double mean(double sum, int64_t count)
{
    return count ? sum / (double)count : 0;
}

/* Every number below `value` as a scalar; keys and indices make the tag: "train/accuracy/0". */
static mtp_status add_scalars(mtp__metrics *metrics, int64_t step, double time, const char *tag, const json_t *value)
{
    char name[MTP__TFEVENTS_MAX_TAG];
    const char *key;
    json_t *item;
    size_t index;
    if (json_is_number(value))
        return mtp__tfevents_scalar(metrics->events, tag, step, time, (float)json_number_value(value));
    json_array_foreach(value, index, item)
    {
        snprintf(name, sizeof name, "%s/%zu", tag, index);
        MTP_TRY(add_scalars(metrics, step, time, name, item));
    }
    json_object_foreach((json_t *)(uintptr_t)value, key, item)
    {
        if (strcmp(key, "step") == 0 || strcmp(key, "unix") == 0) continue; /* each event has its own */
        snprintf(name, sizeof name, "%s/%s", tag, key);
        MTP_TRY(add_scalars(metrics, step, time, name, item));
    }
    return MTP_OK;
}

bool mtp__metrics_behind(mtp__metrics *metrics)
{
    return write_late(metrics) != MTP_OK;
}

/* A full disk is waited out; `status` is what came of writing. */
static mtp_status wait_out(mtp__metrics *metrics, mtp_status status)
{
    if (status == MTP_OK && metrics->behind) {
        mtp_log(metrics->logger, MTP_LOG_INFO, "metrics can be written again");
        metrics->behind = false;
    }
    if (status != MTP_E_IO || metrics->late.length > MAX_LATE) return status;
    if (!metrics->behind)
        mtp_log(metrics->logger, MTP_LOG_WARNING, "%s; the run goes on, and metrics are written when they can be",
                mtp_last_error()->message);
    metrics->behind = true;
    return MTP_OK;
}

/* One line, and its numbers as events. Takes `root`. */
static mtp_status append(mtp__metrics *metrics, int64_t step, json_t *root)
{
    if (!root) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a line of metrics");
    const char *kind = json_string_value(json_object_get(root, "kind"));
    const double time = json_real_value(json_object_get(json_object_get(root, "time"), "unix"));
    char *text = NULL;
    mtp_status status = mtp__json_dump(root, MTP__JSON_ONE_LINE | MTP__JSON_NEWLINE, &text);
    if (status == MTP_OK) {
        mtp__text_add(&metrics->late, "%s", text);
        const mtp_status lines = write_late(metrics);
        status = add_scalars(metrics, step, time, kind, root);
        if (status == MTP_OK) status = mtp__tfevents_flush(metrics->events);
        status = wait_out(metrics, lines == MTP_OK ? status : lines);
    }
    free(text);
    json_decref(root);
    return status;
}

typedef struct figures {
    json_t *loss, *centroid_loss, *accuracy, *miss, *supervised;
} figures;

static json_t *array_or_null(bool array)
{
    return array ? json_array() : json_null();
}

static json_t *train_json(const mtp__metrics *metrics, const mtp__update *u, const mtp__pace *pace)
{
    figures f = {json_array(), array_or_null(metrics->centroid_term), json_array(), array_or_null(metrics->ordered),
                 json_array()};
    for (int32_t k = 0; k < metrics->K; k++) {
        const mtp__step_sums *sums = &u->sums[k];
        json_array_append_new(f.loss, json_real(mean(sums->loss, u->counts[k])));
        if (metrics->centroid_term)
            json_array_append_new(f.centroid_loss, json_real(mean(sums->centroid_loss, u->counts[k])));
        json_array_append_new(f.accuracy, json_real(mean((double)sums->correct, u->counts[k])));
        if (metrics->ordered) json_array_append_new(f.miss, json_real(mean((double)sums->missed, u->counts[k])));
        json_array_append_new(f.supervised, json_integer(u->counts[k]));
    }
    return json_pack("{s:s, s:I, s:I, s:f, s:f, s:f, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:{s:f, s:f, s:f, s:f}}",
                     "kind", "train", "step", (json_int_t)u->step, "epoch", (json_int_t)u->epoch, "loss", u->loss,
                     "learning_rate", u->learning_rate, "grad_norm", u->grad_norm, "rows", (json_int_t)u->rows,
                     "tokens", (json_int_t)u->tokens, "step_loss", f.loss, "centroid_loss", f.centroid_loss, "accuracy",
                     f.accuracy, "centroid_miss", f.miss, "supervised", f.supervised, "time", "unix",
                     mtp__metrics_time(), "rows_per_second", pace->rows_per_second, "data_wait", pace->data_wait,
                     "peak_memory_mib", pace->peak_memory_mib);
}

mtp_status mtp__metrics_train(mtp__metrics *metrics, const mtp__update *u, const mtp__pace *pace)
{
    return append(metrics, u->step, train_json(metrics, u, pace));
}

mtp_status mtp__metrics_bad_step(mtp__metrics *metrics, const mtp__update *u, int64_t bad_steps)
{
    return append(metrics, u->step,
                  json_pack("{s:s, s:I, s:I, s:I, s:{s:f}}", "kind", "bad_step", "step", (json_int_t)u->step, "epoch",
                            (json_int_t)u->epoch, "bad_steps", (json_int_t)bad_steps, "time", "unix",
                            mtp__metrics_time()));
}

static json_t *acceptance_json(const mtp_acceptance *acceptance, int32_t K)
{
    json_t *rates = json_array(), *conditional = json_array();
    for (int32_t k = 0; k < K; k++) {
        json_array_append_new(rates, json_real(mtp_acceptance_rate(acceptance, k)));
        json_array_append_new(conditional, json_real(mtp_acceptance_conditional(acceptance, k)));
    }
    return json_pack("{s:I, s:f, s:o, s:o}", "count", (json_int_t)acceptance->count, "mean_accepted",
                     mtp_acceptance_length(acceptance, K), "acceptance", rates, "conditional", conditional);
}

static json_t *eval_json(const mtp__metrics *metrics, int64_t step, const mtp_evaluation *e)
{
    figures f = {.loss = json_array(), .accuracy = json_array(), .miss = array_or_null(metrics->ordered)};
    for (int32_t k = 0; k < metrics->K; k++) {
        json_array_append_new(f.loss, json_real(e->steps[k].loss));
        json_array_append_new(f.accuracy, json_real(e->steps[k].accuracy));
        if (metrics->ordered) json_array_append_new(f.miss, json_real(e->steps[k].centroid_miss));
    }
    return json_pack("{s:s, s:I, s:f, s:o, s:o, s:o, s:o, s:o, s:{s:f, s:f}}", "kind", "eval", "step", (json_int_t)step,
                     "weighted_loss", e->loss, "step_loss", f.loss, "accuracy", f.accuracy, "centroid_miss", f.miss,
                     "rounds", acceptance_json(&e->rounds, metrics->K), "positions",
                     acceptance_json(&e->positions, metrics->K), "time", "unix", mtp__metrics_time(), "seconds",
                     e->seconds);
}

mtp_status mtp__metrics_eval(mtp__metrics *metrics, int64_t step, const mtp_evaluation *e)
{
    return append(metrics, step, eval_json(metrics, step, e));
}
