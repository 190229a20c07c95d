/* mtp plan: who needs how much memory, before anything is allocated. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "mtp/pack.h"
#include "mtp/train.h"
#include "plan_scale.h"
#include "program.h"

static double mib(uint64_t bytes)
{
    return (double)bytes / (1024 * 1024);
}

static void print_file(const char *what, uint64_t bytes, const char *note)
{
    printf("%-32s %12.1f  %s\n", what, mib(bytes), note);
}

static mtp_status print_table(const mtp_plan *plan)
{
    char *table = NULL;
    const mtp_status status = mtp_plan_table(plan, &table);
    if (status != MTP_OK) return status;
    fputs(table, stdout);
    free(table);
    print_file("checkpoint", plan->checkpoint_bytes, "on disk, each");
    print_file("export", plan->export_bytes, "on disk");
    printf("\n%lld parameters, %lld of them trained\n", (long long)plan->num_parameters, (long long)plan->num_trained);
    printf("%lld rows at once (rows_per_chunk), %.0f MiB of logits at most (logits_budget_mib)\n",
           (long long)plan->rows_per_chunk, mib((uint64_t)plan->logits_budget));
    if (plan->has_device && plan->device_bytes > plan->device_free)
        printf("\ndoes not fit: %.1f MiB more than are free; less is needed with %s\n",
               mib(plan->device_bytes - plan->device_free), plan->remedy);
    return MTP_OK;
}

/* Names and notes are ours: quotation marks are all in them that needs an escape. */
static void print_string(const char *text)
{
    putchar('"');
    for (; *text; text++) {
        if (*text == '"') putchar('\\');
        putchar(*text);
    }
    putchar('"');
}

static void print_json(const mtp_plan *plan)
{
    printf("{\"rows_per_chunk\": %lld, \"logits_budget_mib\": %lld, ", (long long)plan->rows_per_chunk,
           (long long)(plan->logits_budget >> 20));
    printf("\"parameters\": %lld, \"trained\": %lld, \"total_bytes\": %llu, \"device_bytes\": %llu, "
           "\"host_bytes\": %llu, \"checkpoint_bytes\": %llu, \"export_bytes\": %llu, ",
           (long long)plan->num_parameters, (long long)plan->num_trained, (unsigned long long)plan->total_bytes,
           (unsigned long long)plan->device_bytes, (unsigned long long)plan->host_bytes,
           (unsigned long long)plan->checkpoint_bytes, (unsigned long long)plan->export_bytes);
    if (plan->has_device)
        printf("\"device_free_bytes\": %llu, \"device_total_bytes\": %llu, ", (unsigned long long)plan->device_free,
               (unsigned long long)plan->device_total);
    fputs("\"memory\": [", stdout);
    for (int64_t i = 0; i < plan->num_lines; i++) {
        const mtp_plan_line *line = &plan->lines[i];
        printf("%s{\"what\": \"%s\", \"note\": ", i ? ", " : "", line->what);
        print_string(line->note);
        printf(", \"bytes\": %llu, \"mapped\": %s, \"on_device\": %s}", (unsigned long long)line->bytes,
               line->mapped ? "true" : "false", line->on_device ? "true" : "false");
    }
    fputs("]}\n", stdout);
}

static mtp_status plan(const char *path, const args_list *overrides, int64_t world_size, bool json)
{
    mtp_train_config *config = NULL;
    mtp_plan *made = NULL;
    mtp_status status = mtp_train_config_load(path, overrides->items, overrides->count, &config);
    if (status == MTP_OK) status = mtp_plan_create(config, world_size, program_logger(), &made);
    if (status == MTP_OK && json) print_json(made);
    if (status == MTP_OK && !json) status = print_table(made);
    mtp_plan_free(made);
    mtp_train_config_free(config);
    return status;
}

/* ---- disk ----------------------------------------------------------------------------------------------------- */

static void print_disk(int64_t tokens)
{
    const double gib = 1024.0 * 1024 * 1024;
    printf("packed store of %lld token%s, GiB (V only: with --global-v-only; teacher: more, when all tokens are "
           "supervised)\n%-10s %12s %12s %12s %12s %12s\n",
           (long long)tokens, program_plural(tokens), "verifier", "bf16", "fp8", "bf16, V only", "fp8, V only",
           "teacher");
    for (int64_t i = 0; mtp_pack_official(i); i++) {
        const uint64_t bf16 = mtp_pack_official_bytes(i, false, false, false, tokens);
        const uint64_t columns[] = {bf16, mtp_pack_official_bytes(i, true, false, false, tokens),
                                    mtp_pack_official_bytes(i, false, true, false, tokens),
                                    mtp_pack_official_bytes(i, true, true, false, tokens),
                                    mtp_pack_official_bytes(i, false, false, true, tokens) - bf16};
        printf("%-10s", mtp_pack_official(i));
        for (size_t j = 0; j < sizeof columns / sizeof *columns; j++)
            if (columns[j])
                printf(" %12.1f", (double)columns[j] / gib);
            else
                printf(" %12s", "-");
        putchar('\n');
    }
}

/* Numbers as people write them. */
typedef struct scale_arguments {
    mtp_scale_options options;
    double bandwidth, matrix_rate, memory_rate; /* GB/s, TFLOP/s, GB/s */
} scale_arguments;

static mtp_status plan_scale(const scale_arguments *given, bool json)
{
    mtp_scale_options options = given->options;
    options.bandwidth = given->bandwidth * 1e9;
    options.matrix_rate = given->matrix_rate * 1e12;
    options.memory_rate = given->memory_rate * 1e9;
    return print_scale(&options, json);
}

/* An option that only the official sizes have, when one was given. */
static const char *find_scale_option(const scale_arguments *given)
{
    return given->bandwidth > 0                       ? "bandwidth"
           : given->matrix_rate > 0                   ? "matrix-rate"
           : given->memory_rate > 0                   ? "memory-rate"
           : given->options.positions > 0             ? "positions"
           : given->options.length > 0                ? "length"
           : given->options.zero_stage > 0            ? "zero-stage"
           : given->options.num_speculative_steps > 0 ? "num-speculative-steps"
                                                      : NULL;
}

typedef struct plan_arguments {
    const char *config;
    args_list overrides;
    bool json;
    int64_t tokens;
    scale_arguments scale;
} plan_arguments;

/* What was given goes together, so nothing of it is without effect. */
static bool fits(const plan_arguments *given)
{
    const char *config = given->config, *option = find_scale_option(&given->scale);
    const int64_t world_size = given->scale.options.world_size;
    if (config && option)
        return program_usage("--%s is about the official sizes and takes no CONFIG; --set has the keys of one", option),
               false;
    if (option && !world_size) return program_usage("--%s needs --world-size", option), false;
    if (!config && given->overrides.count > 0) return program_usage("--set needs a CONFIG"), false;
    if (given->json && given->tokens) return program_usage("--tokens prints a table; it has no --json"), false;
    if (!config && world_size > 1 && given->scale.bandwidth == 0)
        return program_usage("--world-size %lld needs --bandwidth", (long long)world_size), false;
    if (!config && !world_size && !given->tokens)
        return program_usage("mtp plan needs CONFIG, --tokens or --world-size"), false;
    return true;
}

static bool parse(int argc, char **argv, plan_arguments *given, int *exit_code)
{
    const args_positional positionals[] = {
        {.name = "CONFIG",
         .target = &given->config,
         .help = "The TOML file that mtp train takes. May be left out with --tokens or --world-size.",
         .optional = true},
    };
    const args_option options[] = {
        {.name = "tokens",
         .kind = ARGS_INT,
         .target = &given->tokens,
         .value = "N",
         .min = 1,
         .max = 1e15,
         .help = "Print the disk that a packed store of N tokens takes, for each official verifier."},
        {.name = "world-size",
         .kind = ARGS_INT,
         .target = &given->scale.options.world_size,
         .value = "N",
         .min = 1,
         .max = 1e6,
         .help = "With CONFIG: the memory of one of N ranks. Without: foretell what a step takes on N GPUs, one rank "
                 "each, for each official verifier: time, the part of the all-reduce that backward does not hide, "
                 "memory and data rate of a rank."},
        {.name = "bandwidth",
         .kind = ARGS_REAL,
         .target = &given->scale.bandwidth,
         .value = "GB/S",
         .min = 1e-3,
         .max = 1e6,
         .help = "With --world-size: rate of an all-reduce between the ranks (bus bandwidth of nccl-tests); needed for "
                 "more than one."},
        {.name = "matrix-rate",
         .kind = ARGS_REAL,
         .target = &given->scale.matrix_rate,
         .value = "TFLOP/S",
         .min = 1e-3,
         .max = 1e6,
         .help = "With --world-size: bf16 products of one GPU; default 790, an H200."},
        {.name = "memory-rate",
         .kind = ARGS_REAL,
         .target = &given->scale.memory_rate,
         .value = "GB/S",
         .min = 1e-3,
         .max = 1e6,
         .help = "With --world-size: memory of one GPU; default 4300."},
        {.name = "positions",
         .kind = ARGS_INT,
         .target = &given->scale.options.positions,
         .value = "N",
         .min = 1,
         .max = 1e12,
         .help = "With --world-size: supervised positions of one rank in a step; default 16384."},
        {.name = "length",
         .kind = ARGS_INT,
         .target = &given->scale.options.length,
         .value = "N",
         .min = 1,
         .max = 1e9,
         .help = "With --world-size: tokens of a document; default 4096."},
        {.name = "zero-stage",
         .kind = ARGS_INT,
         .target = &given->scale.options.zero_stage,
         .value = "0|1",
         .min = 0,
         .max = 1,
         .help = "With --world-size: 1 for sharded moments (zero_stage of a configuration); default 0."},
        {.name = "num-speculative-steps",
         .kind = ARGS_INT,
         .target = &given->scale.options.num_speculative_steps,
         .value = "K",
         .min = 1,
         .max = 64,
         .help = "With --world-size: draft steps that are trained; default 3."},
        {.name = "set",
         .kind = ARGS_LIST,
         .target = &given->overrides,
         .value = "KEY=VALUE",
         .help = "Override a key of the file; may be given many times."},
        {.name = "json",
         .kind = ARGS_FLAG,
         .target = &given->json,
         .help = "Print one JSON object, with bytes in place of MiB."},
    };
    const args_spec spec = {.command = "mtp plan",
                            .summary =
                                "Print who needs how much memory in the training run of CONFIG, and the size of "
                                "its checkpoints. Only config.json of drafter and verifier are read (--set "
                                "drafter=DIR --set verifier=DIR): neither weights nor data need to be there, and "
                                "nothing of what is listed is allocated. Of a GPU it says what is free now.",
                            .positionals = positionals,
                            .num_positionals = 1,
                            .options = options,
                            .num_options = sizeof options / sizeof *options};
    return args_parse(&spec, argc, argv, exit_code);
}

int command_plan(int argc, char **argv)
{
    plan_arguments given = {.config = NULL};
    int exit_code = 0;
    if (parse(argc, argv, &given, &exit_code)) {
        const int64_t world_size = given.scale.options.world_size;
        if (!fits(&given)) {
            exit_code = 2;
        } else {
            if (given.tokens) print_disk(given.tokens);
            if (given.config)
                exit_code =
                    program_finish(plan(given.config, &given.overrides, world_size ? world_size : 1, given.json));
            else if (world_size)
                exit_code = program_finish(plan_scale(&given.scale, given.json));
        }
    }
    args_list_free(&given.overrides);
    return exit_code;
}
