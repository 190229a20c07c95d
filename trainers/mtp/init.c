/* mtp init: an untrained drafter for a verifier. */
#include <stdio.h>

#include "commands.h"
#include "inputs.h"
#include "mtp/init.h"
#include "program.h"

typedef struct init_arguments {
    mtp_init_options options;
    int64_t seed, threads;
} init_arguments;

#define SIZE(option, field, letter, text)                                                                        \
    {                                                                                                            \
        .name = option, .kind = ARGS_INT, .target = &geometry->field, .value = letter, .min = 1, .max = 1 << 28, \
        .help = text                                                                                             \
    }

static bool parse(int argc, char **argv, init_arguments *arguments, int *exit_code)
{
    mtp_init_options *options = &arguments->options;
    mtp_init_geometry *geometry = &options->geometry;
    const args_option table[] = {
        inputs_option_verifier(&options->verifier, "The model to draft for: gives geometry, embedding and tokenizer.",
                               true),
        {.name = "output",
         .kind = ARGS_STRING,
         .target = &options->output,
         .value = "DIR",
         .help = "The directory to make.",
         .required = true},
        {.name = "config",
         .kind = ARGS_STRING,
         .target = &options->config,
         .value = "FILE",
         .help = "config.json of the drafter. Default: made from the verifier and the sizes below."},
        SIZE("hidden-size", hidden_size, "H", "Width of the drafter. Default 256."),
        SIZE("intermediate-size", intermediate_size, "I", "Width of its MLP. Default 8 H."),
        SIZE("num-hidden-layers", num_hidden_layers, "N", "Layers; the last has full attention. Default 4."),
        SIZE("num-attention-heads", num_attention_heads, "NH",
             "Query heads. Default: twice the verifier's sliding K/V heads, at least 4."),
        SIZE("num-centroids", num_centroids, "C", "An ordered head with this many centroids. Default: a dense head."),
        SIZE("centroid-top-k", centroid_intermediate_top_k, "N",
             "Centroids whose tokens may be drafted. Default 32; with --num-centroids."),
        {.name = "token-ordering",
         .kind = ARGS_STRING,
         .target = &options->token_ordering,
         .value = "FILE",
         .help = "Ordered heads: take masked_embedding.token_ordering from this safetensors file. Default: cluster the "
                 "verifier's embedding rows, which takes minutes at full size."},
        {.name = "seed",
         .kind = ARGS_INT,
         .target = &arguments->seed,
         .value = "N",
         .min = 0,
         .max = 9e15,
         .help = "Seed of the random values and of the clustering. Default 0."},
        {.name = "num-speculative-tokens",
         .kind = ARGS_INT,
         .target = &options->num_speculative_tokens,
         .value = "K",
         .min = 1,
         .max = 1024,
         .help = "Tokens to draft in a round, for generation_config.json. Default 3."},
        inputs_option_embedding_from(&options->embedding_from),
        inputs_option_threads(&arguments->threads, "Threads. Default: the cores this process may use."),
        {.name = "force",
         .kind = ARGS_FLAG,
         .target = &options->force,
         .help = "Replace a drafter that is at --output."},
    };
    const args_spec spec = {.command = "mtp init",
                            .summary =
                                "Write an untrained drafter for a verifier: its embedding is the verifier's on its "
                                "leading directions, an ordered head's centroids are balanced clusters of the "
                                "verifier's tokens, the rest is random.",
                            .options = table,
                            .num_options = sizeof table / sizeof *table};
    return args_parse(&spec, argc, argv, exit_code);
}

static mtp_status init(const init_arguments *arguments)
{
    mtp_context *context = NULL;
    mtp_init_result result;
    const mtp_context_options device = {.num_threads = (int)arguments->threads, .logger = program_logger()};
    mtp_status status = mtp_context_create(&device, &context);
    if (status == MTP_OK) status = mtp_init(context, &arguments->options, &result);
    if (status == MTP_OK)
        printf("%s: an untrained drafter with %lld parameters\n", arguments->options.output,
               (long long)result.num_parameters);
    mtp_context_free(context);
    return status;
}

int command_init(int argc, char **argv)
{
    init_arguments arguments = {.options = {.num_speculative_tokens = 3, .logger = program_logger()}};
    int exit_code = 0;
    if (!parse(argc, argv, &arguments, &exit_code)) return exit_code;
    arguments.options.seed = (uint64_t)arguments.seed;
    return program_finish(init(&arguments));
}
