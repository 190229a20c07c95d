/* mtp check: are samples whole, and does a drafter read only what serving will show it? */
#include <stdio.h>

#include "commands.h"
#include "inputs.h"
#include "mtp/leak.h"
#include "program.h"

enum { NAME_WIDTH = 18 };

typedef struct check_options {
    inputs_options inputs; /* model: the drafter of --leak */
    int64_t num_speculative_steps, position_offset, rows_per_document;
} check_options;

static bool parse(int argc, char **argv, check_options *options, int *exit_code)
{
    const args_positional data = {.name = "DATA",
                                  .target = &options->inputs.data,
                                  .help = "Directories with samples, or single sample files.",
                                  .many = true};
    const args_option table[] = {
        {.name = "verifier",
         .kind = ARGS_STRING,
         .target = &options->inputs.verifier,
         .value = "DIR",
         .help = "The model that the samples are of.",
         .required = true},
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
        {.name = "position-offset",
         .kind = ARGS_INT,
         .target = &options->position_offset,
         .value = "0|1",
         .min = 0,
         .max = 1,
         .help = "With --leak: rotary position t or t+1. Default 0."},
        {.name = "rows-per-document",
         .kind = ARGS_INT,
         .target = &options->rows_per_document,
         .value = "N",
         .min = 1,
         .max = 1 << 30,
         .help = "With --leak: supervised positions tried in each sample, spread evenly. Default 64."},
        {.name = "hidden-norm",
         .kind = ARGS_CHOICE,
         .target = &options->inputs.hidden_norm,
         .value = "SIDE",
         .choices = inputs_hidden_norms,
         .help = "Side of the verifier's final norm that hidden states of unlabelled samples are on."},
        {.name = "threads",
         .kind = ARGS_INT,
         .target = &options->inputs.threads,
         .value = "N",
         .min = 1,
         .max = 1024,
         .help = "With --leak: threads. Default: the cores this process may use."},
        {.name = "embedding-from",
         .kind = ARGS_STRING,
         .target = &options->inputs.embedding_from,
         .value = "DIR",
         .help = "Take the embedding table and final norm from this model, when those of the verifier are quantised."},
    };
    const args_spec spec = {
        .command = "mtp check",
        .summary = "Check samples, or test on them that a drafter does not leak.",
        .positionals = &data,
        .num_positionals = 1,
        .options = table,
        .num_options = sizeof table / sizeof *table,
        .epilogue =
            "Without --leak every sample is read whole, as training reads it: keys, shapes, dtypes and lengths "
            "against\n"
            "the verifier, ids inside the vocabulary, no NaN or infinity, no zero rows. What needs statistics over "
            "the\n"
            "data (implausible scale, swapped or shifted K/V) is not looked at.\n"
            "\n"
            "With --leak, what a row at position t must not read is changed (K/V after t, K/V outside the window, "
            "other\n"
            "positions, other documents), and nothing that is computed for the row may move by a bit; rows computed\n"
            "alone, padded and in other chunks must be the same too.\n"
            "\n"
            "Exit codes: 0 when everything holds, 3 when something does not.\n"};
    return args_parse(&spec, argc, argv, exit_code);
}

/* ---- samples -------------------------------------------------------------------------------------------------- */

static mtp_status check_samples(const inputs *opened)
{
    int64_t tokens = 0, supervised = 0, without = 0;
    const int64_t num_samples = mtp_dataset_size(opened->dataset);
    for (int64_t i = 0; i < num_samples; i++) {
        const mtp_sample_info info = mtp_dataset_sample(opened->dataset, i);
        mtp_batch *batch = NULL;
        inputs_progress(NULL, i, num_samples);
        const mtp_status status = mtp_batch_collate(opened->dataset, &i, 1, true, &batch);
        mtp_batch_free(batch);
        if (status != MTP_OK) {
            inputs_progress_end();
            return status;
        }
        tokens += info.num_tokens;
        supervised += info.num_supervised;
        without += info.num_supervised == 0;
    }
    inputs_progress_end();
    printf("%lld samples are whole and fit the verifier: %lld tokens, %lld of them supervised\n",
           (long long)num_samples, (long long)tokens, (long long)supervised);
    if (without > 0)
        printf("%lld samples have nothing supervised and train nothing: is their loss_mask right?\n",
               (long long)without);
    return MTP_OK;
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
        printf("%lld of %lld rows moved\n", (long long)property->moved, (long long)property->rows);
    else if (property->moved == 0)
        printf("%lld rows compared, %s\n", (long long)property->rows,
               property->exact ? "all equal bit for bit" : "all equal to float order");
    else
        printf("%lld of %lld rows differ, the first: %s\n", (long long)property->moved, (long long)property->rows,
               property->first);
}

static void print_report(const mtp_leak_report *report)
{
    for (int kind = 0; kind < MTP_LEAK_KINDS; kind++)
        print_property(&report->properties[kind], kind == MTP_LEAK_CONTROL);
    if (report->skipped > 0)
        printf("%lld samples have nothing supervised and were left out\n", (long long)report->skipped);
    if (!report->rows_exact)
        printf(
            "note: packed = alone, packed = padded and chunks = whole hold to float order only here (compared: hidden, "
            "state and loss, |a - b| <= %g max(1, |a|, |b|)): %s\n",
            report->tolerance, report->rows_note);
    printf(report->holds ? "no leak found in %lld samples\n" : "a test FAILED on these %lld samples\n",
           (long long)report->documents);
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

int command_check(int argc, char **argv)
{
    check_options options = {.num_speculative_steps = 3, .rows_per_document = 64};
    inputs opened = {0};
    int exit_code = 0;
    if (parse(argc, argv, &options, &exit_code)) {
        bool holds = true;
        mtp_status status = inputs_open(&options.inputs, &opened);
        if (status == MTP_OK)
            status = options.inputs.model ? check_leaks(&options, &opened, &holds) : check_samples(&opened);
        exit_code = program_finish(status);
        if (status == MTP_OK && !holds) exit_code = mtp_status_exit_code(MTP_E_DATA);
        inputs_close(&opened);
    }
    args_list_free(&options.inputs.data);
    return exit_code;
}
