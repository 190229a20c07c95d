/* Bad steps of a run: skipped until there are too many. */
#include <stdlib.h>

#include "run/config.h"
#include "run/train_run.h"

static mtp_status too_many(const mtp__run *run, const mtp__update *update, const char *names, const char *path)
{
    return MTP_FAIL(
        MTP_E_DATA,
        "step %lld: loss %g, gradient norm %g: not finite. The samples of its batch: %s (all of them in %s). "
        "Skipped before it: %lld, max_bad_steps is %lld. Weights are those of before "
        "the step. mtp check says whether these samples are at fault; a larger max_bad_steps skips more of them, "
        "a lower learning_rate is another run",
        (long long)update->step, update->loss, update->grad_norm, names, path, (long long)run->bad_steps - 1,
        (long long)run->config->max_bad_steps);
}

mtp_status mtp__run_skip(mtp__run *run, const mtp__update *update)
{
    const mtp__trainer *t = &run->trainer;
    const char *directory = run->directory.path;
    mtp__text names = {0};
    char *path = NULL;
    run->bad_steps++;
    mtp__sample_list_names(&t->bad, t->train_data, &names);
    mtp_status status = mtp__text_check(&names);
    if (status == MTP_OK) status = mtp__bad_steps_path(directory, &path);
    if (status == MTP_OK && mtp__run_writes(run)) {
        status = mtp__bad_steps_record(directory, update, run->bad_steps, &t->bad, t->train_data);
        if (status == MTP_E_IO) { /* a full disk: the log names them all the same */
            mtp_log(run->options->logger, MTP_LOG_WARNING, "%s", mtp_last_error()->message);
            status = MTP_OK;
        }
        if (status == MTP_OK) status = mtp__metrics_bad_step(&run->metrics, update, run->bad_steps);
    }
    if (status == MTP_OK && run->bad_steps > run->config->max_bad_steps)
        status = too_many(run, update, names.data, path);
    else if (status == MTP_OK && mtp__run_writes(run))
        mtp_log(run->options->logger, MTP_LOG_WARNING,
                "step %lld is skipped: loss %g, gradient norm %g; number %lld of at most %lld (max_bad_steps). Its "
                "samples, also in %s: %s",
                (long long)update->step, update->loss, update->grad_norm, (long long)run->bad_steps,
                (long long)run->config->max_bad_steps, path, names.data);
    mtp__text_free(&names);
    free(path);
    return status;
}

mtp_status mtp__run_check_trained(const mtp__run *run)
{
    if (run->bad_steps == 0) return MTP_OK;
    if (run->bad_steps < run->step && !mtp__run_writes(run)) return MTP_OK;
    if (run->bad_steps == run->step)
        return MTP_FAIL(
            MTP_E_DATA,
            "all %lld steps were skipped because their loss or gradient was not finite: nothing was trained. "
            "%s/bad_steps.jsonl names the samples; lower learning_rate, or look at them (mtp check)",
            (long long)run->step, run->directory.path);
    mtp_log(run->options->logger, MTP_LOG_WARNING,
            "%lld of %lld steps were skipped because their loss or gradient was not finite; %s/bad_steps.jsonl names "
            "the samples",
            (long long)run->bad_steps, (long long)run->step, run->directory.path);
    return MTP_OK;
}
