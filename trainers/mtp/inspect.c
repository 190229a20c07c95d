/* mtp inspect: what a file or directory is, and whether an export serves. */
#include <stdio.h>
#include <stdlib.h>

#include "args.h"
#include "commands.h"
#include "mtp/export.h"
#include "mtp/inspect.h"
#include "program.h"

typedef struct inspect_options {
    const char *path, *verifier;
    bool strict, json;
} inspect_options;

static bool parse(int argc, char **argv, inspect_options *options, int *exit_code)
{
    const args_positional positionals[] = {
        {.name = "PATH",
         .target = &options->path,
         .help =
             "A safetensors file, a sample, or a directory: samples, a packed store, drafter, verifier, checkpoint or "
             "run."},
    };
    const args_option table[] = {
        {.name = "strict",
         .kind = ARGS_FLAG,
         .target = &options->strict,
         .help =
             "PATH is an export: refuse it, with the reasons, unless every engine loads it and computes with it what "
             "was trained."},
        {.name = "verifier",
         .kind = ARGS_STRING,
         .target = &options->verifier,
         .value = "DIR",
         .help = "Compare a sample, a drafter or an export with this verifier's geometry."},
        {.name = "json", .kind = ARGS_FLAG, .target = &options->json, .help = "Print one JSON object."},
    };
    const args_spec spec = {.command = "mtp inspect",
                            .summary =
                                "Explain PATH in a few lines: kind, geometry, counts, dtypes, metadata, and what is "
                                "wrong with it.",
                            .positionals = positionals,
                            .num_positionals = 1,
                            .options = table,
                            .num_options = sizeof table / sizeof *table,
                            .epilogue = "Exit code 3 when something is wrong with PATH.\n"};
    return args_parse(&spec, argc, argv, exit_code);
}

static void print_findings(const mtp_export_report *report)
{
    for (int64_t i = 0; i < report->num_findings; i++) {
        const mtp_finding *finding = &report->findings[i];
        printf("%s: %s %s [%s]\n", finding->fatal ? "refused" : "note", finding->where, finding->message,
               finding->engines);
    }
}

static int validate(const inspect_options *options)
{
    mtp_export_report report = {0};
    char *json = NULL;
    mtp_status status = mtp_validate_export(options->path, options->verifier, &report);
    const bool checked = status == MTP_OK || report.num_fatal > 0;
    if (!checked) return program_finish(status);
    if (options->json) {
        status = mtp_export_report_json(&report, options->path, &json);
        if (status == MTP_OK) printf("%s\n", json);
        free(json);
    } else {
        print_findings(&report);
        if (report.num_fatal)
            printf("%s: refused, %lld things to put right\n", options->path, (long long)report.num_fatal);
        else if (report.num_findings)
            printf("%s: no fault found; mind the notes\n", options->path);
        else
            printf("%s: ready for every engine\n", options->path);
    }
    const int exit_code = report.num_fatal ? mtp_status_exit_code(MTP_E_DATA) : 0;
    mtp_export_report_free(&report);
    return status == MTP_OK || report.num_fatal ? exit_code : program_finish(status);
}

static int explain(const inspect_options *options)
{
    mtp_inspection inspection = {0};
    const mtp_status status = mtp_inspect(options->path, options->verifier, &inspection);
    if (status != MTP_OK) return program_finish(status);
    if (options->json)
        printf("%s\n", inspection.json);
    else
        fputs(inspection.text, stdout);
    const int exit_code = inspection.num_problems ? mtp_status_exit_code(MTP_E_DATA) : 0;
    mtp_inspection_free(&inspection);
    return exit_code;
}

int command_inspect(int argc, char **argv)
{
    inspect_options options = {0};
    int exit_code = 0;
    if (!parse(argc, argv, &options, &exit_code)) return exit_code;
    return options.strict ? validate(&options) : explain(&options);
}
