/* mtp check: are samples whole, and does a drafter read only what serving will show it? */
#include <stdio.h>
#include <stdlib.h>

#include "commands.h"
#include "inputs.h"
#include "mtp/check.h"
#include "mtp/leak.h"
#include "program.h"

enum { NAME_WIDTH = 18 };

typedef struct check_options {
    inputs_options inputs; /* model: the drafter of --leak */
    const char *drafter;
    int64_t num_speculative_steps, position_offset, rows_per_document;
    double max_bad;
    bool json, structure_only;
} check_options;

static bool parse(int argc, char **argv, check_options *options, int *exit_code)
{
    const args_positional data = {.name = "DATA",
                                  .target = &options->inputs.data,
                                  .help =
                                      "Directories with samples or packed by mtp pack, single sample files or shards.",
                                  .many = true};
    const args_option table[] = {
        inputs_option_verifier(&options->inputs.verifier, "The model that the samples are of.", true),
        inputs_option_drafter(
            &options->drafter,
            "Without --leak: check that this drafter was made for the verifier: widths, vocabulary, K/V geometry, "
            "window."),
        {.name = "max-bad",
         .kind = ARGS_REAL,
         .target = &options->max_bad,
         .value = "SHARE",
         .min = 0,
         .max = 1,
         .help = "Without --leak: exit with 3 when a larger share of the samples is bad. Default 0.01."},
        {.name = "json",
         .kind = ARGS_FLAG,
         .target = &options->json,
         .help = "Without --leak: print one JSON object on one line instead of the table."},
        inputs_option_structure_only(
            &options->structure_only,
            "Without --leak: leave out what rests on the verifier's weights: for numbers that no verifier wrote."),
        {.name = "leak",
         .kind = ARGS_STRING,
         .target = &options->inputs.model,
         .value = "DRAFTER",
         .help = "Test on the samples that this drafter reads nothing that it will not have when it serves."},
        {.name = "num-speculative-steps",
         .kind = ARGS_INT,
         .target = &options->num_speculative_steps,
         .value = "K",
         .min = 1,
         .max = 64,
         .help = "With --leak: drafts a row. Default 3."},
        inputs_option_position_offset(&options->position_offset, "With --leak: rotary position t or t+1. Default 0."),
        {.name = "rows-per-document",
         .kind = ARGS_INT,
         .target = &options->rows_per_document,
         .value = "N",
         .min = 1,
         .max = 1 << 30,
         .help = "With --leak: supervised positions tried in each sample, spread evenly. Default 64."},
        inputs_option_hidden_norm(&options->inputs.hidden_norm),
        inputs_option_threads(&options->inputs.threads, "Threads. Default: the cores this process may use."),
        inputs_option_embedding_from(&options->inputs.embedding_from),
    };
    const args_spec spec = {
        .command = "mtp check",
        .summary = "Check samples, or test on them that a drafter does not leak.",
        .positionals = &data,
        .num_positionals = 1,
        .options = table,
        .num_options = sizeof table / sizeof *table,
        .epilogue =
            "Without --leak every sample is read whole and each bad one is named, with the reason and the first token\n"
            "concerned. Looked at: keys, shapes, dtypes, lengths and ids against the verifier; NaN and infinity; rows\n"
            "of zeros, rows that repeat; agreement of all samples about their origin; the RMS of hidden states, K and\n"
            "V over the weights of their norms; K against its rotary position; local and global swapped; the next\n"
            "token against the verifier's head on the hidden state; K and V against the sample's tokens and hidden\n"
            "states, as most samples relate them. What a data set is too small for, or the verifier's directory lacks\n"
            "weights for, is listed as not tested.\n"
            "\n"
            "With --leak, what a row at position t must not read is changed (K/V after t, K/V outside the window, "
            "other\n"
            "positions, other documents), and nothing that is computed for the row may move by a bit; rows computed\n"
            "alone, padded and in other chunks must be the same too.\n"
            "\n"
            "Exit codes: 0 when everything holds, 3 when more than --max-bad of the samples are bad, the drafter does "
            "not\n"
            "fit, or a leak was found.\n"};
    return args_parse(&spec, argc, argv, exit_code);
}

/* ---- samples -------------------------------------------------------------------------------------------------- */

static void print_bad(const mtp_check_report *report)
{
    for (int64_t i = 0; i < report->num_bad; i++) {
        const mtp_check_bad *bad = &report->bad[i];
        if (bad->finding.index >= 0)
            printf("%s: %s at token %lld: %s\n", bad->path, mtp_check_reason_name(bad->finding.reason),
                   (long long)bad->finding.index, bad->finding.message);
        else
            printf("%s: %s: %s\n", bad->path, mtp_check_reason_name(bad->finding.reason), bad->finding.message);
    }
    if (report->num_bad == 0) return;
    printf("\n%-*s %8s  meaning\n", NAME_WIDTH, "reason", "samples");
    for (int reason = MTP_CHECK_GOOD + 1; reason < MTP_CHECK_REASONS; reason++)
        if (report->counts[reason])
            printf("%-*s %8lld  %s\n", NAME_WIDTH, mtp_check_reason_name((mtp_check_reason)reason),
                   (long long)report->counts[reason], mtp_check_reason_text((mtp_check_reason)reason));
    printf("\n");
}

static void print_summary(const mtp_check_report *report, double bad_share)
{
    print_bad(report);
    for (int64_t i = 0; i < report->num_evidence; i++) inputs_print_evidence(&report->evidence[i]);
    printf("%lld sample%s, %lld good (%lld token%s, %lld of them supervised), %lld bad (%.2f %%)\n",
           (long long)report->num_samples, program_plural(report->num_samples),
           (long long)report->counts[MTP_CHECK_GOOD], (long long)report->num_tokens, program_plural(report->num_tokens),
           (long long)report->num_supervised, (long long)report->num_bad, 100 * bad_share);
    if (report->num_unsupervised > 0)
        printf("%lld sample%s with nothing supervised, to train nothing with: is the loss_mask right?\n",
               (long long)report->num_unsupervised, program_plural(report->num_unsupervised));
}

static mtp_status check_samples(const check_options *options, inputs *opened, bool *holds)
{
    const mtp_dataset_options dataset = inputs_dataset_options(&options->inputs);
    const mtp_context_options device = {.num_threads = (int)options->inputs.threads, .logger = program_logger()};
    const mtp_check_options check = {.structure_only = options->structure_only};
    mtp_check_report report;
    char *json = NULL;
    mtp_status status = mtp_verifier_open(options->inputs.verifier, options->inputs.embedding_from, &opened->verifier);
    if (status == MTP_OK && options->drafter) status = inputs_check_drafter(options->drafter, opened->verifier);
    if (status == MTP_OK) status = mtp_context_create(&device, &opened->context);
    if (status == MTP_OK)
        status = mtp_check_run(opened->context, options->inputs.data.items, options->inputs.data.count,
                               opened->verifier, &dataset, &check, inputs_progress, NULL, &report);
    inputs_progress_end();
    if (status != MTP_OK) return status;
    const double bad_share = report.num_samples ? (double)report.num_bad / (double)report.num_samples : 0;
    *holds = bad_share <= options->max_bad;
    if (options->json) {
        status = mtp_check_report_json(&report, &json);
        if (status == MTP_OK) printf("%s\n", json);
        free(json);
    } else {
        print_summary(&report, bad_share);
    }
    mtp_check_report_free(&report);
    return status;
}

/* ---- leaks ---------------------------------------------------------------------------------------------------- */

static void print_property(const mtp_leak_property *property, bool control)
{
    const char *verdict = property->rows == 0 ? "not tested" : property->holds ? "holds" : "FAILS";
    printf("%-11s %-*s %s\n", verdict, NAME_WIDTH, property->name, property->claim);
    printf("%-11s %-*s ", "", NAME_WIDTH, "");
    if (property->rows == 0)
        printf("these samples have no row to test this with\n");
    else if (control)
        printf("%lld of %lld row%s moved\n", (long long)property->moved, (long long)property->rows,
               program_plural(property->rows));
    else if (property->moved == 0)
        printf("%lld row%s compared, %s\n", (long long)property->rows, program_plural(property->rows),
               property->exact ? "all equal bit for bit" : "all equal to float order");
    else
        printf("%lld of %lld row%s differ, the first: %s\n", (long long)property->moved, (long long)property->rows,
               program_plural(property->rows), property->first);
}

static void print_report(const mtp_leak_report *report)
{
    for (int kind = 0; kind < MTP_LEAK_KINDS; kind++)
        print_property(&report->properties[kind], kind == MTP_LEAK_CONTROL);
    if (report->skipped > 0)
        printf("%lld sample%s with nothing supervised left out\n", (long long)report->skipped,
               program_plural(report->skipped));
    if (!report->rows_exact)
        printf(
            "note: packed = alone, packed = padded and chunks = whole hold to float order only here (compared: hidden, "
            "state and loss, |a - b| <= %g max(1, |a|, |b|)): %s\n",
            report->tolerance, report->rows_note);
    printf(report->holds ? "no leak found in %lld sample%s\n" : "a test FAILED, on %lld sample%s\n",
           (long long)report->documents, program_plural(report->documents));
}

static mtp_status check_leaks(const check_options *options, const inputs *opened, bool *holds)
{
    mtp_leak_report report;
    const mtp_leak_options leak = {.num_speculative_steps = (int32_t)options->num_speculative_steps,
                                   .position_offset = (int32_t)options->position_offset,
                                   .rows_per_document = options->rows_per_document,
                                   .progress = inputs_progress};
    const mtp_status status = mtp_leak_check(opened->drafter, opened->verifier, opened->dataset, &leak, &report);
    inputs_progress_end();
    if (status != MTP_OK) return status;
    print_report(&report);
    *holds = report.holds;
    return MTP_OK;
}

static mtp_status check(const check_options *options, inputs *opened, bool *holds)
{
    if (!options->inputs.model) return check_samples(options, opened, holds);
    const mtp_status status = inputs_open(&options->inputs, opened);
    return status == MTP_OK ? check_leaks(options, opened, holds) : status;
}

int command_check(int argc, char **argv)
{
    check_options options = {.num_speculative_steps = 3, .rows_per_document = 64, .max_bad = 0.01};
    inputs opened = {0};
    int exit_code = 0;
    if (parse(argc, argv, &options, &exit_code)) {
        bool holds = true;
        const mtp_status status = check(&options, &opened, &holds);
        exit_code = program_finish(status);
        if (status == MTP_OK && !holds) exit_code = mtp_status_exit_code(MTP_E_DATA);
        inputs_close(&opened);
    }
    args_list_free(&options.inputs.data);
    return exit_code;
}
