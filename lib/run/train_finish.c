/* The end of a run: what training changed, and the export. */
#include <stdlib.h>

#include "base/file.h"
#include "mtp/export.h"
#include "run/config.h"
#include "run/train_run.h"

/* The step whose weights the run hands out. */
static int64_t final_step(const mtp__run *run)
{
    return run->config->keep_best && run->best_step >= 0 ? run->best_step : run->step;
}

/* Put the weights of that step into the drafter. */
static mtp_status load_final(mtp__run *run)
{
    char *path = NULL;
    mtp__manifest *manifest = NULL;
    if (final_step(run) == run->step) return MTP_OK;
    mtp_status status = mtp__checkpoint_path(run->directory.path, final_step(run), &path);
    if (status == MTP_OK) status = mtp__checkpoint_open(path, true, &manifest);
    if (status == MTP_OK) status = mtp__checkpoint_load_weights(manifest, run->trainer.drafter);
    mtp__manifest_free(manifest);
    free(path);
    return status;
}

mtp_status mtp__run_compare(mtp__run *run)
{
    if (!run->trainer.evaluator) return MTP_OK;
    MTP_TRY(mtp__ranks_agree(&run->ranks, load_final(run)));
    if (run->trained_step != final_step(run)) MTP_TRY(mtp__run_evaluate(run, &run->trained));
    run->trained_step = final_step(run);
    if (!run->options->report) return MTP_OK;
    char title[48], *table = NULL;
    snprintf(title, sizeof title, "step %lld", (long long)run->trained_step);
    const mtp_evaluation *const columns[] = {&run->start, &run->trained};
    const char *const titles[] = {"before training", title};
    MTP_TRY(mtp_evaluation_table(columns, titles, 2, &table));
    run->options->report(run->options->user, table);
    free(table);
    return MTP_OK;
}

static mtp_status export_from(const mtp__run *run, mtp_context *context, const char *source, const char *output)
{
    const mtp_export_options options = {.source = source,
                                        .output = output,
                                        .verifier = run->config->verifier,
                                        .num_speculative_tokens = run->config->num_speculative_steps,
                                        .force = true, /* an earlier end of this very run */
                                        .logger = run->options->logger};
    mtp_export_result result = {0};
    MTP_TRY_AT(mtp_export(context, &options, &result), "training is done (%s), the export is not", source);
    mtp_log(run->options->logger, MTP_LOG_INFO, "the export is step %lld; serve it with: %s",
            (long long)final_step(run), result.serve_line);
    mtp_export_result_free(&result);
    return MTP_OK;
}

mtp_status mtp__run_export(mtp__run *run)
{
    char *source = NULL, *output = NULL;
    mtp_context *context = NULL;
    const mtp_context_options options = mtp__config_context(run->config, run->options->logger);
    mtp__saver_free(run->saver);
    run->saver = NULL;
    mtp__trainer_close(&run->trainer); /* the export loads the weights once more: make room */
    mtp_status status = mtp__run_dir_check(&run->directory);
    if (status == MTP_OK) status = mtp_context_create(&options, &context);
    if (status == MTP_OK) status = mtp__checkpoint_path(run->directory.path, final_step(run), &source);
    if (status == MTP_OK) status = mtp__path_join(run->directory.path, "export", &output);
    if (status == MTP_OK) status = export_from(run, context, source, output);
    mtp_context_free(context);
    free(source);
    free(output);
    return status;
}
