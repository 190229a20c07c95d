#include "inputs.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "program.h"

const char *const inputs_hidden_norms[] = {"pre", "post", NULL};

mtp_dataset_options inputs_dataset_options(const inputs_options *options)
{
    mtp_dataset_options dataset = {.hidden_norm = MTP_HIDDEN_UNSET, .logger = program_logger()};
    if (options->hidden_norm)
        dataset.hidden_norm = strcmp(options->hidden_norm, "pre") == 0 ? MTP_HIDDEN_PRE : MTP_HIDDEN_POST;
    return dataset;
}

mtp_status inputs_open(const inputs_options *options, inputs *opened)
{
    const mtp_dataset_options dataset = inputs_dataset_options(options);
    mtp_status status = mtp_verifier_open(options->verifier, options->embedding_from, &opened->verifier);
    if (status == MTP_OK)
        status =
            mtp_dataset_open(options->data.items, options->data.count, opened->verifier, &dataset, &opened->dataset);
    if (status != MTP_OK || !options->model) return status;
    const mtp_context_options device = {.num_threads = (int)options->threads, .logger = program_logger()};
    status = mtp_context_create(&device, &opened->context);
    if (status == MTP_OK) status = mtp_drafter_load(opened->context, options->model, &opened->drafter);
    return status;
}

void inputs_close(inputs *opened)
{
    mtp_drafter_free(opened->drafter);
    mtp_context_free(opened->context);
    mtp_dataset_close(opened->dataset);
    mtp_verifier_close(opened->verifier);
    *opened = (inputs){0};
}

bool inputs_progress(void *user, int64_t done, int64_t total)
{
    (void)user;
    if (isatty(STDERR_FILENO)) fprintf(stderr, "\r%lld of %lld samples", (long long)done, (long long)total);
    return true;
}

void inputs_progress_end(void)
{
    if (isatty(STDERR_FILENO)) fputs("\r\033[K", stderr);
}
