/* mtp export: from a drafter, a checkpoint or a run to a directory that engines load. */
#include <stdio.h>

#include "args.h"
#include "commands.h"
#include "mtp/export.h"
#include "program.h"

static bool parse(int argc, char **argv, mtp_export_options *options, int *exit_code)
{
    const args_positional positionals[] = {
        {.name = "SOURCE",
         .target = &options->source,
         .help = "A run directory (its newest checkpoint), a checkpoint, or a drafter directory."},
        {.name = "OUT", .target = &options->output, .help = "The directory to make."},
    };
    const args_option table[] = {
        {.name = "verifier",
         .kind = ARGS_STRING,
         .target = &options->verifier,
         .value = "DIR",
         .help = "The model it drafts for: gives the tokenizer when the source drafter has none, and the export is "
                 "checked against it. Default: the run's."},
        {.name = "num-speculative-tokens",
         .kind = ARGS_INT,
         .target = &options->num_speculative_tokens,
         .value = "K",
         .min = 1,
         .max = 1024,
         .help =
             "Tokens to draft in a round, for generation_config.json and the serve line. Default: what the source's "
             "generation_config.json says, else the number of steps the run trained."},
        {.name = "force", .kind = ARGS_FLAG, .target = &options->force, .help = "Replace a drafter that is at OUT."},
    };
    const args_spec spec = {
        .command = "mtp export",
        .summary =
            "Write the drafter as a directory that transformers, vLLM, sglang, mlx-vlm and the llama.cpp converter "
            "load, check it, and print the command that serves it.",
        .positionals = positionals,
        .num_positionals = 2,
        .options = table,
        .num_options = sizeof table / sizeof *table,
        .epilogue = "OUT appears whole or not at all. It is never overwritten without --force.\n"};
    return args_parse(&spec, argc, argv, exit_code);
}

static mtp_status export_source(const mtp_export_options *options)
{
    mtp_context *context = NULL;
    mtp_export_result result = {0};
    const mtp_context_options device = {.num_threads = 1, .logger = options->logger};
    mtp_status status = mtp_context_create(&device, &context);
    if (status == MTP_OK) status = mtp_export(context, options, &result);
    if (status == MTP_OK) {
        for (int64_t i = 0; i < result.report.num_findings; i++) {
            const mtp_finding *finding = &result.report.findings[i];
            mtp_log(options->logger, MTP_LOG_WARNING, "%s %s [%s]", finding->where, finding->message, finding->engines);
        }
        printf("%s\n", result.serve_line);
    }
    mtp_export_result_free(&result);
    mtp_context_free(context);
    return status;
}

int command_export(int argc, char **argv)
{
    mtp_export_options options = {.logger = program_logger()};
    int exit_code = 0;
    if (!parse(argc, argv, &options, &exit_code)) return exit_code;
    return program_finish(export_source(&options));
}
