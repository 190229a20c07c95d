/* mtp pack: samples into a store, and a store compared with its checksums. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"
#include "inputs.h"
#include "mtp/pack.h"
#include "program.h"

static const char *const kv_choices[] = {"bf16", "fp8", NULL};

typedef struct pack_options {
    const char *out;
    args_list inputs;
    const char *verifier, *embedding_from, *hidden_norm, *kv;
    double shard_size, max_bad;
    int64_t workers, threads;
    bool teacher, verify;
} pack_options;

static bool parse(int argc, char **argv, pack_options *options, int *exit_code)
{
    const args_positional positionals[] = {
        {.name = "OUT", .target = &options->out, .help = "Directory of the store; made when missing."},
        {.name = "INPUT",
         .target = &options->inputs,
         .help = "Directories with samples, or single sample files.",
         .optional = true,
         .many = true},
    };
    const args_option table[] = {
        {.name = "verifier",
         .kind = ARGS_STRING,
         .target = &options->verifier,
         .value = "DIR",
         .help = "The model that the samples are of. Needed unless --verify is given."},
        {.name = "hidden-norm",
         .kind = ARGS_CHOICE,
         .target = &options->hidden_norm,
         .value = "SIDE",
         .choices = inputs_hidden_norms,
         .help = "Side of the verifier's final norm that hidden states of unlabelled samples are on."},
        {.name = "kv",
         .kind = ARGS_CHOICE,
         .target = &options->kv,
         .value = "TYPE",
         .choices = kv_choices,
         .help = "Type of the stored K/V: bf16, or fp8 with a scale for each token and head. Default bf16."},
        {.name = "teacher",
         .kind = ARGS_FLAG,
         .target = &options->teacher,
         .help = "Store the log-sum-exp and the 64 largest logits of the verifier's head for each supervised token."},
        {.name = "shard-size",
         .kind = ARGS_REAL,
         .target = &options->shard_size,
         .value = "GIB",
         .min = 1e-6,
         .max = 1024,
         .help = "A shard ends before it would become larger. Default 4."},
        {.name = "max-bad",
         .kind = ARGS_REAL,
         .target = &options->max_bad,
         .value = "SHARE",
         .min = 0,
         .max = 1,
         .help = "Fail when more than this share of the samples is bad. Default 0.01."},
        {.name = "workers",
         .kind = ARGS_INT,
         .target = &options->workers,
         .value = "N",
         .min = 1,
         .max = 4096,
         .help = "Threads that read, check and write samples. Default: the cores of this machine."},
        {.name = "threads",
         .kind = ARGS_INT,
         .target = &options->threads,
         .value = "N",
         .min = 1,
         .max = 4096,
         .help = "With --teacher: threads of the computation. Default: the cores this process may use."},
        {.name = "embedding-from",
         .kind = ARGS_STRING,
         .target = &options->embedding_from,
         .value = "DIR",
         .help = "Take the embedding table and final norm from this model, when those of the verifier are quantised."},
        {.name = "verify",
         .kind = ARGS_FLAG,
         .target = &options->verify,
         .help = "Pack nothing: read the whole store OUT and compare every checksum."},
    };
    const args_spec spec = {
        .command = "mtp pack",
        .summary = "Pack samples into a store of a few large HDF5 files, which mtp train and mtp eval read like a "
                   "directory of samples.",
        .positionals = positionals,
        .num_positionals = 2,
        .options = table,
        .num_options = sizeof table / sizeof *table,
        .epilogue = "Bad samples are left out and listed with the reason in OUT/quarantine.jsonl. An interrupted run\n"
                    "goes on behind its last finished shard when the same command is given again; the result is the\n"
                    "same to the last byte.\n"};
    return args_parse(&spec, argc, argv, exit_code);
}

static void print_summary(const mtp_pack_summary *s)
{
    const double gib = 1024.0 * 1024 * 1024;
    printf("%lld samples, %lld tokens, %lld of them supervised, in %lld shards of %.3f GiB together\n",
           (long long)s->samples, (long long)s->tokens, (long long)s->supervised, (long long)s->shards,
           (double)s->bytes / gib);
    if (s->shards_kept) printf("%lld shards were there already\n", (long long)s->shards_kept);
    if (s->tokens)
        printf("%.1f KiB a token: %.2f TiB for a billion tokens\n", (double)s->bytes / (double)s->tokens / 1024,
               (double)s->bytes / (double)s->tokens * 1e9 / gib / 1024);
    printf("%lld samples were refused\n", (long long)s->refused);
    for (int i = 0; i < MTP_PACK_REASONS && s->reasons[i].reason; i++)
        printf("  %6lld  %s\n", (long long)s->reasons[i].count, s->reasons[i].reason);
}

static mtp_status run_pack(const pack_options *options, mtp_pack_summary *summary)
{
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    mtp_verifier *verifier = NULL;
    mtp_context *context = NULL;
    mtp_pack_options pack = {.inputs = options->inputs.items,
                             .num_inputs = options->inputs.count,
                             .shard_bytes = (int64_t)(options->shard_size * 1024 * 1024 * 1024),
                             .workers = options->workers ? options->workers : (cores > 0 ? cores : 1),
                             .max_bad = options->max_bad,
                             .fp8 = strcmp(options->kv, "fp8") == 0,
                             .logger = program_logger(),
                             .progress = inputs_progress};
    if (options->hidden_norm)
        pack.hidden_norm = strcmp(options->hidden_norm, "pre") == 0 ? MTP_HIDDEN_PRE : MTP_HIDDEN_POST;
    mtp_status status = mtp_verifier_open(options->verifier, options->embedding_from, &verifier);
    const mtp_context_options device = {.num_threads = (int)options->threads, .logger = program_logger()};
    if (status == MTP_OK && options->teacher) status = mtp_context_create(&device, &context);
    pack.verifier = verifier;
    pack.teacher = context;
    if (status == MTP_OK) status = mtp_pack(options->out, &pack, summary);
    inputs_progress_end();
    mtp_context_free(context);
    mtp_verifier_close(verifier);
    return status;
}

static mtp_status run_verify(const pack_options *options, mtp_pack_summary *summary)
{
    const mtp_status status = mtp_pack_verify(options->out, NULL, NULL, summary);
    if (status == MTP_OK) puts("every checksum is right");
    return status;
}

int command_pack(int argc, char **argv)
{
    pack_options options = {.kv = "bf16", .shard_size = 4, .max_bad = 0.01};
    mtp_pack_summary summary;
    int exit_code = 0;
    if (parse(argc, argv, &options, &exit_code)) {
        if (!options.verify && (!options.verifier || options.inputs.count == 0)) {
            exit_code = program_usage("mtp pack needs INPUT and --verifier, or --verify");
        } else if (options.verify && options.inputs.count > 0) {
            exit_code = program_usage("with --verify only OUT is given: nothing is packed");
        } else {
            const mtp_status status = options.verify ? run_verify(&options, &summary) : run_pack(&options, &summary);
            if (status == MTP_OK) print_summary(&summary);
            exit_code = program_finish(status);
        }
    }
    args_list_free(&options.inputs);
    return exit_code;
}
