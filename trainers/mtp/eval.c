/* mtp eval: how many drafts of a drafter a verifier would accept. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "inputs.h"
#include "mtp/eval.h"
#include "program.h"

typedef struct eval_options {
    inputs_options inputs;
    int64_t num_speculative_steps, position_offset;
    const char *embedding_on_device;
    bool json;
} eval_options;

static const char *const embedding_places[] = {"auto", "on", "off", NULL};

static mtp_embedding_place embedding_place(const char *name)
{
    int place = MTP_EMBEDDING_AUTO;
    while (name && strcmp(name, embedding_places[place]) != 0) place++;
    return (mtp_embedding_place)place;
}

static bool parse(int argc, char **argv, eval_options *options, int *exit_code)
{
    const args_option table[] = {
        {.name = "model",
         .kind = ARGS_STRING,
         .target = &options->inputs.model,
         .value = "DIR",
         .help = "The drafter.",
         .required = true},
        inputs_option_verifier(&options->inputs.verifier,
                               "The model it drafts for; its config, embedding and final norm are read.", true),
        {.name = "data",
         .kind = ARGS_LISTS,
         .target = &options->inputs.data,
         .value = "DIR",
         .help = "Directories with samples, stores of mtp pack, or single files of either.",
         .required = true},
        {.name = "num-speculative-steps",
         .kind = ARGS_INT,
         .target = &options->num_speculative_steps,
         .value = "K",
         .min = 1,
         .max = MTP_MAX_SPECULATIVE_STEPS,
         .help = "Drafts a round. Default 3."},
        inputs_option_position_offset(
            &options->position_offset,
            "Rotary position of the drafts: t (0: vLLM, sglang; the default) or t+1 (1: transformers, llama.cpp)."),
        {.name = "json",
         .kind = ARGS_FLAG,
         .target = &options->json,
         .help = "Print one JSON object in place of the table."},
        inputs_option_hidden_norm(&options->inputs.hidden_norm),
        inputs_option_threads(&options->inputs.threads,
                              "Threads. Default: the cores this process may use. The results do not depend on it."),
        inputs_option_device(&options->inputs.device),
        inputs_option_embedding_from(&options->inputs.embedding_from),
        {.name = "embedding-on-device",
         .kind = ARGS_CHOICE,
         .target = &options->embedding_on_device,
         .value = "PLACE",
         .choices = embedding_places,
         .help =
             "Keep the verifier's embedding table in the GPU's memory: auto (the default: when it fits), on or off. "
             "The results do not depend on it."},
    };
    const args_spec spec = {
        .command = "mtp eval",
        .summary = "Measure the acceptance of a drafter as a greedy server would see it, on stored samples.",
        .options = table,
        .num_options = sizeof table / sizeof *table,
        .epilogue =
            "A round at position t takes the token at t+1 and everything the verifier knew at t, and drafts K tokens\n"
            "from the drafter's own argmax. A draft is accepted when it and all drafts before it are the tokens of "
            "the\n"
            "sample. Rounds are walked as a server does, from the last prompt token on, and at every position.\n"
            "\n"
            "Serving has this acceptance only for samples whose continuation the verifier wrote by greedy decoding.\n"
            "Samples do not say how they were written: with other texts (answers of a data set, sampling at a\n"
            "temperature) the numbers are too low.\n"
            "\n"
            "Loss, accuracy and centroid_miss are teacher-fed, as in training.\n"};
    return args_parse(&spec, argc, argv, exit_code);
}

static mtp_status print_json(const mtp_evaluation *evaluation, const eval_options *options, const inputs *opened)
{
    char *text = NULL;
    const mtp_evaluation_labels labels = {
        .model = options->inputs.model, .verifier = options->inputs.verifier, .dataset = opened->dataset};
    const mtp_status status = mtp_evaluation_json(evaluation, &labels, &text);
    if (status == MTP_OK) puts(text);
    free(text);
    return status;
}

static mtp_status print_table(const mtp_evaluation *evaluation)
{
    char *text = NULL;
    const char *title = "drafter";
    const mtp_status status = mtp_evaluation_table(&evaluation, &title, 1, &text);
    if (status != MTP_OK) return status;
    fputs(text, stdout);
    free(text);
    printf("%lld sample%s in %.1f s", (long long)evaluation->num_samples, program_plural(evaluation->num_samples),
           evaluation->seconds);
    if (evaluation->num_short > 0)
        printf("; %lld too short for a round of %d drafts", (long long)evaluation->num_short,
               evaluation->num_speculative_steps);
    if (evaluation->num_gapped > 0)
        printf("; %lld with unsupervised tokens behind the first supervised one, over which rounds are walked too",
               (long long)evaluation->num_gapped);
    putchar('\n');
    return MTP_OK;
}

static mtp_status evaluate(const eval_options *options, inputs *opened)
{
    mtp_evaluator *evaluator = NULL;
    mtp_evaluation evaluation = {0};
    const mtp_evaluator_options evaluator_options = {.num_speculative_steps = (int32_t)options->num_speculative_steps,
                                                     .position_offset = (int32_t)options->position_offset,
                                                     .embedding_on_device =
                                                         embedding_place(options->embedding_on_device),
                                                     .progress = inputs_progress};
    mtp_status status = inputs_open(&options->inputs, opened);
    if (status == MTP_OK)
        status =
            mtp_evaluator_create(opened->drafter, opened->verifier, opened->dataset, &evaluator_options, &evaluator);
    if (status == MTP_OK) {
        status = mtp_evaluator_run(evaluator, &evaluation);
        inputs_progress_end();
    }
    if (status == MTP_OK) status = options->json ? print_json(&evaluation, options, opened) : print_table(&evaluation);
    mtp_evaluation_free(&evaluation);
    mtp_evaluator_free(evaluator);
    return status;
}

int command_eval(int argc, char **argv)
{
    eval_options options = {.num_speculative_steps = 3};
    inputs opened = {0};
    int exit_code = 0;
    if (parse(argc, argv, &options, &exit_code)) {
        exit_code = program_finish(evaluate(&options, &opened));
        inputs_close(&opened);
    }
    args_list_free(&options.inputs.data);
    return exit_code;
}
