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
    const char *verifier, *embedding_from, *hidden_norm, *kv, *drafter;
    double shard_size, max_bad;
    int64_t workers, threads;
    bool teacher, verify, structure_only, global_v_only;
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
        inputs_option_verifier(&options->verifier,
                               "The model that the samples are of. Needed unless --verify is given.", false),
        inputs_option_hidden_norm(&options->hidden_norm),
        {.name = "kv",
         .kind = ARGS_CHOICE,
         .target = &options->kv,
         .value = "TYPE",
         .choices = kv_choices,
         .help = "Type of the stored K/V: bf16, or fp8 with a scale for each token and head. Default bf16."},
        {.name = "global-v-only",
         .kind = ARGS_FLAG,
         .target = &options->global_v_only,
         .help = "Leave the K of full layers out and make it of V when it is read, for verifiers with attention_k_eq_v "
                 "(12B, 26B-A4B, 31B). K then has other last bits than the samples'."},
        {.name = "teacher",
         .kind = ARGS_FLAG,
         .target = &options->teacher,
         .help = "Store the log-sum-exp and the 64 largest logits of the verifier's head for each supervised token."},
        inputs_option_drafter(
            &options->drafter,
            "Refuse to pack unless this drafter was made for the verifier: widths, vocabulary, K/V geometry, window."),
        inputs_option_structure_only(
            &options->structure_only,
            "Leave out what rests on the verifier's weights: for numbers that no verifier wrote."),
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
        inputs_option_threads(&options->threads, "Threads of the verifier's head, for --teacher and for the tests. "
                                                 "Default: the cores this process may use."),
        inputs_option_embedding_from(&options->embedding_from),
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
        .epilogue =
            "Every sample is put to the tests of mtp check. Bad samples are left out and listed with the reason in\n"
            "OUT/quarantine.jsonl; more of them than --max-bad end the run. An interrupted run goes on behind\n"
            "its last finished shard when the same command is given again; the result is the same to the last\n"
            "byte.\n"
            "\n"
            "Exit codes: 0 when the store is whole, 3 when too many samples are bad, the drafter does not fit, or\n"
            "--verify found damage, 130 when it was interrupted.\n"};
    return args_parse(&spec, argc, argv, exit_code);
}

static void print_refused(const mtp_pack_summary *s)
{
    printf("%lld sample%s refused\n", (long long)s->refused, s->refused == 1 ? " was" : "s were");
    for (int i = 0; i < MTP_PACK_REASONS && s->reasons[i].count; i++)
        printf("  %6lld  %s\n", (long long)s->reasons[i].count, s->reasons[i].reason);
}

static void print_summary(const mtp_pack_summary *s)
{
    const double gib = 1024.0 * 1024 * 1024;
    printf("%lld sample%s, %lld tokens, %lld of them supervised, in %lld shard%s of %.3f GiB\n", (long long)s->samples,
           program_plural(s->samples), (long long)s->tokens, (long long)s->supervised, (long long)s->shards,
           program_plural(s->shards), (double)s->bytes / gib);
    if (s->shards_kept)
        printf("%lld shard%s there already\n", (long long)s->shards_kept, s->shards_kept == 1 ? " was" : "s were");
    if (s->tokens)
        printf("%.1f KiB a token: %.2f TiB for a billion tokens\n", (double)s->bytes / (double)s->tokens / 1024,
               (double)s->bytes / (double)s->tokens * 1e9 / gib / 1024);
    print_refused(s);
}

/* ---- the tests of mtp check ----------------------------------------------------------------------------------- */

typedef struct sample_tests {
    mtp_context *context;
    mtp_check_options options;
    mtp_check *check; /* NULL: nothing had to be packed */
} sample_tests;

static mtp_status prepare_tests(void *user, const mtp_dataset *samples)
{
    sample_tests *tests = user;
    return mtp_check_create(tests->context, samples, &tests->options, &tests->check);
}

static mtp_status test_sample(void *user, int64_t index, const mtp_safetensors *file, mtp_pack_refusal *refusal)
{
    const sample_tests *tests = user;
    mtp_check_finding finding;
    const mtp_status status = mtp_check_sample(tests->check, index, file, &finding);
    if (status != MTP_OK || finding.reason == MTP_CHECK_GOOD) return status;
    snprintf(refusal->reason, sizeof refusal->reason, "%s", mtp_check_reason_name(finding.reason));
    snprintf(refusal->message, sizeof refusal->message, "%s", finding.message);
    refusal->index = finding.index;
    return MTP_OK;
}

static void end_tests(sample_tests *tests)
{
    const int64_t count = tests->check ? mtp_check_num_evidence(tests->check) : 0;
    for (int64_t i = 0; i < count; i++) inputs_print_evidence(mtp_check_get_evidence(tests->check, i));
    mtp_check_free(tests->check);
    mtp_context_free(tests->context);
}

/* ---- running -------------------------------------------------------------------------------------------------- */

static mtp_status pack_inputs(const pack_options *options, const mtp_verifier *verifier, mtp_pack_summary *summary)
{
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    const mtp_context_options device = {.num_threads = (int)options->threads, .logger = program_logger()};
    sample_tests tests = {.options = {.structure_only = options->structure_only}};
    const mtp_pack_check check = {.name = options->structure_only ? "structure" : "all",
                                  .prepare = prepare_tests,
                                  .sample = test_sample,
                                  .user = &tests};
    mtp_pack_options pack = {.inputs = options->inputs.items,
                             .num_inputs = options->inputs.count,
                             .verifier = verifier,
                             .hidden_norm = inputs_hidden_norm(options->hidden_norm),
                             .shard_bytes = (int64_t)(options->shard_size * 1024 * 1024 * 1024),
                             .workers = options->workers ? options->workers : (cores > 0 ? cores : 1),
                             .max_bad = options->max_bad,
                             .fp8 = strcmp(options->kv, "fp8") == 0,
                             .global_v_only = options->global_v_only,
                             .check = &check,
                             .logger = program_logger(),
                             .progress = inputs_progress};
    program_catch_signals();
    mtp_status status = mtp_context_create(&device, &tests.context);
    if (options->teacher) pack.teacher = tests.context;
    if (status == MTP_OK) status = mtp_pack(options->out, &pack, summary);
    inputs_progress_end();
    end_tests(&tests);
    if (status != MTP_OK && summary->refused) print_refused(summary);
    return status;
}

static mtp_status run_pack(const pack_options *options, mtp_pack_summary *summary)
{
    mtp_verifier *verifier = NULL;
    mtp_status status = mtp_verifier_open(options->verifier, options->embedding_from, &verifier);
    if (status == MTP_OK && options->drafter) status = inputs_check_drafter(options->drafter, verifier);
    if (status == MTP_OK) status = pack_inputs(options, verifier, summary);
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
    mtp_pack_summary summary = {0};
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
