#include "inputs.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "program.h"

/* ---- options -------------------------------------------------------------------------------------------------- */

args_option inputs_option_verifier(const char **target, const char *help, bool required)
{
    return (args_option){
        .name = "verifier", .kind = ARGS_STRING, .target = target, .value = "DIR", .help = help, .required = required};
}

args_option inputs_option_hidden_norm(const char **target)
{
    static const char *const sides[] = {"pre", "post", NULL};
    return (args_option){.name = "hidden-norm",
                         .kind = ARGS_CHOICE,
                         .target = target,
                         .value = "SIDE",
                         .choices = sides,
                         .help = "Side of the verifier's final norm that hidden states of unlabelled samples are on."};
}

args_option inputs_option_embedding_from(const char **target)
{
    return (args_option){
        .name = "embedding-from",
        .kind = ARGS_STRING,
        .target = target,
        .value = "DIR",
        .help = "Take the embedding table and final norm from this model, when those of the verifier are quantised."};
}

args_option inputs_option_threads(int64_t *target, const char *help)
{
    return (args_option){
        .name = "threads", .kind = ARGS_INT, .target = target, .value = "N", .min = 1, .max = 1024, .help = help};
}

args_option inputs_option_device(const char **target)
{
    return (args_option){.name = "device",
                         .kind = ARGS_STRING,
                         .target = target,
                         .value = "NAME",
                         .help = "What computes: cpu (the default), cuda or cuda:N; mtp devices lists them."};
}

args_option inputs_option_position_offset(int64_t *target, const char *help)
{
    return (args_option){.name = "position-offset",
                         .kind = ARGS_INT,
                         .target = target,
                         .value = "0|1",
                         .min = 0,
                         .max = 1,
                         .help = help};
}

args_option inputs_option_structure_only(bool *target, const char *help)
{
    return (args_option){.name = "structure-only", .kind = ARGS_FLAG, .target = target, .help = help};
}

args_option inputs_option_drafter(const char **target, const char *help)
{
    return (args_option){.name = "drafter", .kind = ARGS_STRING, .target = target, .value = "DIR", .help = help};
}

/* ---- opening -------------------------------------------------------------------------------------------------- */

mtp_hidden_norm inputs_hidden_norm(const char *side)
{
    if (!side) return MTP_HIDDEN_UNSET;
    return strcmp(side, "pre") == 0 ? MTP_HIDDEN_PRE : MTP_HIDDEN_POST;
}

mtp_dataset_options inputs_dataset_options(const inputs_options *options)
{
    return (mtp_dataset_options){.hidden_norm = inputs_hidden_norm(options->hidden_norm), .logger = program_logger()};
}

mtp_status inputs_open(const inputs_options *options, inputs *opened)
{
    const mtp_dataset_options dataset = inputs_dataset_options(options);
    mtp_status status = mtp_verifier_open(options->verifier, options->embedding_from, &opened->verifier);
    if (status == MTP_OK)
        status =
            mtp_dataset_open(options->data.items, options->data.count, opened->verifier, &dataset, &opened->dataset);
    if (status != MTP_OK || !options->model) return status;
    const mtp_context_options device = {
        .device = options->device, .num_threads = (int)options->threads, .logger = program_logger()};
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

mtp_status inputs_check_drafter(const char *directory, const mtp_verifier *verifier)
{
    mtp_drafter_config config = {0};
    mtp_status status = mtp_drafter_config_read(directory, &config);
    if (status == MTP_OK) status = mtp_verifier_check_drafter(verifier, &config);
    mtp_drafter_config_free(&config);
    return status;
}

/* ---- printing ------------------------------------------------------------------------------------------------- */

void inputs_print_evidence(const mtp_check_evidence *evidence)
{
    printf("%-11s %s: %s\n", evidence->possible ? "tested" : "not tested", evidence->test, evidence->note);
}

enum { SECONDS_A_LINE = 10 };

bool inputs_progress(void *user, int64_t done, int64_t total)
{
    static time_t last; /* when a line was printed, or work began */
    (void)user;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (isatty(STDERR_FILENO)) {
        fprintf(stderr, "\r%lld of %lld samples", (long long)done, (long long)total);
    } else if (last == 0) {
        last = now.tv_sec;
    } else if (now.tv_sec - last >= SECONDS_A_LINE) {
        last = now.tv_sec;
        fprintf(stderr, "mtp: %lld of %lld samples\n", (long long)done, (long long)total);
    }
    return !program_stop_requested();
}

void inputs_progress_end(void)
{
    if (isatty(STDERR_FILENO)) fputs("\r\033[K", stderr);
}
