/* The table of all keys: the one place that knows names, types, defaults, ranges and what they mean. */
#include <string.h>

#include "run/config.h"

static const char *const hidden_norms[] = {"label", "pre", "post", NULL};
static const char *const direct_ios[] = {"auto", "on", "off", NULL};
static const char *const overlongs[] = {"error", "truncate", "skip", NULL};
static const char *const heads[] = {"flat", "masked", "hierarchical", "auto", NULL};
static const char *const feedings[] = {"teacher", "self", NULL};
static const char *const distributed_backends[] = {"auto", "gloo", "nccl", NULL};
static const char *const precisions[] = {"fp32", "bf16", NULL};
static const char *const embedding_places[] = {"auto", "on", "off", NULL};
static const char *const schedulers[] = {"constant", "linear", "cosine", "wsd", NULL};

#define AT(key) offsetof(mtp_train_config, key)
#define LARGE 9007199254740992.0 /* 2^53 */
/* how a row of the table begins */
#define KEY(table, name, type) .section = table, .key = #name, .kind = MTP__FIELD_##type, .offset = AT(name)
#define RANGE(low, high) .min = (low), .max = (high)
#define SAME .resume = MTP__RESUME_SAME
#define BATCH .resume = MTP__RESUME_BATCH
#define FREE .resume = MTP__RESUME_FREE
#define SCHEDULE .resume = MTP__RESUME_SCHEDULE

static const mtp__field fields[] = {
    /* clang-format off */
    {KEY("model", drafter, STRING), .value = "\"\"", .example = "\"drafters/e2b-init\"", FREE,
     .help = "Directory of the drafter to start from: config.json and model.safetensors, as published or as `mtp init` "
             "makes it."},
    {KEY("model", verifier, STRING), .value = "\"\"", .example = "\"verifiers/gemma-4-E2B-it\"", FREE,
     .help = "Directory of the verifier that the samples were taken from: config.json, the embedding table and the "
             "final norm are read."},
    {KEY("model", embedding_from, STRING), .value = "\"\"", FREE,
     .help = "Directory that gives the verifier's embedding and final norm when its own embedding is quantised; \"\": "
             "the verifier itself."},
    {KEY("model", freeze, STRINGS), .value = "[\"*.layer_scalar\"]", SAME,
     .help = "Parameters that stay as they are, as shell patterns of their names; they take part in neither optimizer "
             "nor gradient norm. A pattern that matches nothing is an error."},

    {KEY("data", train_data, STRINGS), .value = "[]", .example = "[\"data/train\"]", FREE,
     .help = "What to train on: stores that mtp pack wrote, directories with *.safetensors files, or single files of "
             "either. Every document once an epoch."},
    {KEY("data", sources, SOURCES), .value = "[]", RANGE(1e-6, 1e6), FREE,
     .help = "In place of train_data: several of them mixed. A source's share of the tokens of an epoch is its weight over "
             "the sum of the weights; an epoch has as many tokens as all sources together, small ones are repeated and of "
             "large ones every epoch takes the next part. May be written as [[data.sources]] tables, behind the last key "
             "of [data], or as [[data]] ones in a file without a table [data], whose other keys --set gives then. [{ path = \"data/chat\", weight = 3 }, { path = \"data/code\" }]: three "
             "quarters are chat. A weight that is left out is 1."},
    {KEY("data", eval_data, STRINGS), .value = "[]", FREE,
     .help = "The same to measure acceptance and loss on; []: no evaluation."},
    {KEY("data", validation_share, REAL), .value = "0.0", RANGE(0, 0.9), SAME,
     .help = "Share of the documents of train_data or sources that is not trained on but takes the place of eval_data, which is "
             "then []. A hash of its tokens decides for each document, so none changes sides when data is added; 0: "
             "none."},
    {KEY("data", hidden_norm, CHOICE), .value = "\"label\"", .choices = hidden_norms, SAME,
     .help = "What hidden states of files without a label are: before (\"pre\") or after (\"post\") the verifier's "
             "final norm. \"label\": every file must say it. A label that contradicts the setting is an error."},
    {KEY("data", overlong, CHOICE), .value = "\"error\"", .choices = overlongs, SAME,
     .help = "A document of more than tokens_per_batch tokens is an error, cut to that length, or left out."},
    {KEY("data", tokens_per_batch, INT), .value = "4096", RANGE(3, 16777216), SAME,
     .help = "Token budget of a micro-batch: documents are packed back to back up to it. Memory of activations grows "
             "with the supervised positions among them, that of the loader with the tokens."},
    {KEY("data", shuffle, BOOL), .value = "true", SAME,
     .help = "Take the documents in an order drawn from (seed, epoch); false: in the order of their names."},
    {KEY("data", prefetch, INT), .value = "2", RANGE(1, 1024), FREE,
     .help = "Micro-batches that are read ahead of the step at work. The loader's memory is a ring of prefetch + "
             "gradient_accumulation_steps + 1 of them (`mtp plan` says how much)."},
    {KEY("data", num_workers, INT), .value = "2", RANGE(0, 1024), FREE,
     .help = "Threads that read, each one micro-batch at a time, so that more than are read ahead have nothing to do; 0: "
             "read when a step asks. No result depends on it."},
    {KEY("data", direct_io, CHOICE), .value = "\"auto\"", .choices = direct_ios, FREE,
     .help = "Read stores past the page cache, which takes a third of the processor time and leaves the cache to others, but reads "
             "the disk in every epoch: \"auto\" does it when they are larger than half the memory and the file system can."},

    {KEY("loss", num_speculative_steps, INT), .value = "3", RANGE(1, 64), SAME,
     .help = "Draft steps K that are trained, each on the state of the one before."},
    {KEY("loss", step_weight_beta, REAL), .value = "0.6", RANGE(1e-3, 1e3), SAME,
     .help = "Weight of draft step k: beta^k over the sum of all beta^j. 0.6 gives 0.51, 0.31, 0.18 at K = 3; 1 weighs "
             "all the same."},
    {KEY("loss", head, CHOICE), .value = "\"auto\"", .choices = heads, SAME,
     .help = "Candidates of the softmax. \"flat\": the vocabulary; \"masked\": the tokens of the top-k centroids and of "
             "the target's centroid; \"hierarchical\": the centroid, then the tokens of that centroid. \"auto\": "
             "masked for an ordered drafter, flat for a dense one, which has no other."},
    {KEY("loss", centroid_weight, REAL), .value = "1.0", RANGE(0, 1e3), SAME,
     .help = "Weight of the centroid cross-entropy that flat and masked add for ordered drafters: it is what teaches "
             "the centroids. Zero for dense drafters and for hierarchical, which contains the term."},
    {KEY("loss", feeding, CHOICE), .value = "\"teacher\"", .choices = feedings, SAME,
     .help = "What draft steps after the first take in: the data's token (\"teacher\") or the drafter's own argmax "
             "(\"self\"), as in serving."},
    {KEY("loss", position_offset, INT), .value = "0", RANGE(0, 1), SAME,
     .help = "Rotary position of a row at t is t + position_offset: 0 as vLLM and sglang serve, 1 as transformers and "
             "llama.cpp do."},
    {KEY("loss", detach_state, BOOL), .value = "false", SAME,
     .help = "Cut the gradient between draft steps: each step learns for itself alone."},

    {KEY("optimizer", learning_rate, REAL), .value = "1e-4", RANGE(0, 10), SAME,
     .help = "Peak learning rate of AdamW."},
    {KEY("optimizer", lr_scheduler_type, CHOICE), .value = "\"cosine\"", .choices = schedulers, SAME,
     .help = "How the learning rate goes on after the warm-up: it stays, falls linearly or along a cosine over the rest "
             "of the steps, or (\"wsd\": warm-up, stable, decay) stays and falls linearly at the end."},
    {KEY("optimizer", warmup_steps, INT), .value = "0", RANGE(0, LARGE), SAME,
     .help = "Steps of linear warm-up; step s of them (from 1) runs at s / warmup_steps of the peak."},
    {KEY("optimizer", lr_decay_ratio, REAL), .value = "0.1", RANGE(0, 1), SCHEDULE,
     .help = "wsd: share of all steps, at the end, in which the learning rate falls."},
    {KEY("optimizer", min_lr_ratio, REAL), .value = "0.0", RANGE(0, 1), SAME,
     .help = "The learning rate falls to this share of the peak."},
    {KEY("optimizer", adam_beta1, REAL), .value = "0.9", RANGE(0, 0.999999), SAME,
     .help = "Decay of the first moment."},
    {KEY("optimizer", adam_beta2, REAL), .value = "0.95", RANGE(0, 0.999999), SAME,
     .help = "Decay of the second moment."},
    {KEY("optimizer", adam_epsilon, REAL), .value = "1e-8", RANGE(1e-30, 1), SAME,
     .help = "Added to the root of the second moment."},
    {KEY("optimizer", weight_decay, REAL), .value = "0.0", RANGE(0, 10), SAME,
     .help = "Decoupled weight decay of the parameters with two axes, the embedding and the centroids included."},
    {KEY("optimizer", no_decay, STRINGS), .value = "[]", SAME,
     .help = "Parameters without weight decay, as shell patterns. A pattern that matches nothing is an error."},
    {KEY("optimizer", max_grad_norm, REAL), .value = "1.0", RANGE(0, 1e9), SAME,
     .help = "Gradients whose global norm is larger are scaled down to it; 0: never."},
    {KEY("optimizer", master_weights, CHOICE), .value = "\"fp32\"", .choices = precisions, SAME,
     .help = "What AdamW updates: \"fp32\", or \"bf16\": matrices are kept in bf16 alone and rounded stochastically, with "
             "random numbers that are a function of seed, step and place. Two bytes a value, where fp32 takes four, and six "
             "with the bf16 copy that precision = \"bf16\" keeps for products. Norms, scalars and moments are fp32 in both."},

    {KEY("train", max_steps, INT), .value = "0", .example = "2000", RANGE(0, LARGE), SCHEDULE,
     .help = "Optimizer updates of the whole run. Exactly one of max_steps and num_train_epochs is given (the other is "
             "0)."},
    {KEY("train", num_train_epochs, INT), .value = "0", RANGE(0, LARGE), SCHEDULE,
     .help = "Passes over the training data; the last update takes the micro-batches that are left."},
    {KEY("train", gradient_accumulation_steps, INT), .value = "1", RANGE(1, 4096), BATCH,
     .help = "Micro-batches of one update on each rank. The loss is the mean over all of them together, so the result is "
             "that of one larger batch but for the order of float sums."},
    {KEY("train", seed, INT), .value = "0", RANGE(0, LARGE), SAME,
     .help = "Of everything random. The same configuration, data and seed give the same bits."},
    {KEY("train", eval_steps, INT), .value = "0", RANGE(0, LARGE), FREE,
     .help = "Evaluate on eval_data after every so many updates; 0: before the first and after the last only."},
    {KEY("train", keep_best, BOOL), .value = "false", FREE,
     .help = "Keep the checkpoint with the longest accepted length (rounds) on eval_data, and export it in place of the "
             "last one. Needs eval_steps."},
    {KEY("train", patience, INT), .value = "0", RANGE(0, LARGE), FREE,
     .help = "End the run after so many evaluations in a row without a longer accepted length; 0: never. Needs "
             "eval_steps."},
    {KEY("train", max_bad_steps, INT), .value = "10", RANGE(0, LARGE), FREE,
     .help = "Skip so many steps of the run whose loss or gradient has a NaN or an infinity: weights and moments stay as "
             "they are, bad_steps.jsonl names the samples. The next one ends the run. A handful is an overflow here and "
             "there, more is bad data or a learning rate that is too high; 0: the first one ends the run."},

    {KEY("output", output_dir, STRING), .value = "\"\"", .example = "\"runs/e2b\"", FREE,
     .help = "Directory of the run, made when missing: configuration, metrics.jsonl, TensorBoard events in tb/, "
             "checkpoints/, and the trained drafter in export/."},
    {KEY("output", resume, STRING), .value = "\"never\"", FREE,
     .help = "\"never\": refuse an output_dir that holds a run. \"auto\": go on from its newest good checkpoint, or "
             "start when it has no checkpoint at all. Otherwise the checkpoint directory to go on from."},
    {KEY("output", logging_steps, INT), .value = "10", RANGE(1, LARGE), FREE,
     .help = "Write metrics after every so many updates."},
    {KEY("output", save_steps, INT), .value = "500", RANGE(0, LARGE), FREE,
     .help = "Write a checkpoint after every so many updates; 0: only at the end and when interrupted."},
    {KEY("output", keep_last, INT), .value = "3", RANGE(0, LARGE), FREE,
     .help = "Keep this many newest checkpoints, those of keep_every, and with keep_best the best one; 0: all."},
    {KEY("output", keep_every, INT), .value = "0", RANGE(0, LARGE), FREE,
     .help = "Keep also every checkpoint whose step is a multiple of this; 0: none."},

    {KEY("device", device, STRING), .value = "\"cpu\"", FREE,
     .help = "What computes: \"cpu\"; \"cuda\": the GPU of the local rank (LOCAL_RANK under a launcher, else the first); "
             "\"cuda:1\": that GPU. `mtp devices` lists them."},
    {KEY("device", precision, CHOICE), .value = "\"fp32\"", .choices = precisions, SAME,
     .help = "Factors of matrix products, activations in memory among them: \"fp32\", or \"bf16\" (GPUs only). The residual "
             "stream, sums, softmax, norms, losses and moments are fp32 in both; master_weights is a setting of its own."},
    {KEY("device", num_threads, INT), .value = "0", RANGE(0, 1024), FREE,
     .help = "Threads of the computation; 0: the cores this process may use. No result depends on it."},
    {KEY("device", isa, STRING), .value = "\"\"", FREE,
     .help = "cpu: \"plain\", \"avx2\" or \"avx512\"; \"\": the best this machine has. Bits depend on it."},
    {KEY("device", rows_per_chunk, INT), .value = "0", RANGE(0, 1048576), FREE,
     .help = "Rows computed at once, 64 or more: memory against speed. Only the order of float sums depends on it. 0: 512 on a "
             "CPU; on a GPU, which many keep busy, tokens_per_batch but at most 8192."},
    {KEY("device", logits_budget_mib, INT), .value = "0", RANGE(0, 1048576), FREE,
     .help = "MiB of logits that the flat head holds at once, and on a GPU of what the other heads hold of their pairs of a "
             "row and a centroid. Only the order of float sums depends on it. 0: 256 on a CPU, 2048 on a GPU."},
    {KEY("device", embedding_on_device, CHOICE), .value = "\"auto\"", .choices = embedding_places, FREE,
     .help = "Keep the verifier's embedding table in the GPU's memory, so that tokens go there as ids alone. \"auto\": when it "
             "fits beside everything else that the run needs, with a margin (the log and `mtp plan` say it); \"off\": the rows "
             "that a step needs are brought from host memory. No result depends on it; not used by device \"cpu\"."},

    {KEY("distributed", backend, CHOICE), .value = "\"auto\"", .choices = distributed_backends, FREE,
     .help = "What ranks exchange gradients and weights by: \"gloo\" between CPUs, and between GPUs through host memory; "
             "\"nccl\" between GPUs. \"auto\": gloo for device \"cpu\", nccl for GPUs."},
    {KEY("distributed", bucket_mib, INT), .value = "25", RANGE(1, 65536), FREE,
     .help = "Gradients are summed over ranks in pieces of this many MiB, each as soon as the backward pass has "
             "finished it. Only the order of float sums depends on it."},
    {KEY("distributed", zero_stage, INT), .value = "0", RANGE(0, 1), FREE,
     .help = "1: each rank keeps the moments of AdamW for an equal share of the parameters, updates that share, and hands "
             "it to the others (ZeRO stage 1): less memory on each rank for some more communication, the same bits. 0: "
             "each rank keeps all of them."},
    {KEY("distributed", timeout_seconds, REAL), .value = "0.0", RANGE(0, 1e6), FREE,
     .help = "How long a rank waits for the others, and within which one that is killed or stopped is noticed: it counts "
             "as lost and the run ends on all. It must be longer than the slowest thing that rank 0 does alone. 0: what "
             "mtprun --time-limit says (MTP_COMM_TIME_LIMIT), or else 60."},
    {KEY("distributed", heartbeat_seconds, REAL), .value = "0.0", RANGE(0, 1e6), FREE,
     .help = "Between signs of life that ranks give each other, at most a third of timeout_seconds. 0: what mtprun "
             "--heartbeat says (MTP_COMM_HEARTBEAT), or else 5."},
    /* clang-format on */
};

static const struct {
    const char *name, *help;
} sections[] = {
    {"model", "What is trained, and for which verifier."},
    {"data", "Stored samples of the verifier."},
    {"loss", "What is minimised, and how drafts are fed while training."},
    {"optimizer", "AdamW, clipping and the learning rate."},
    {"train", "How long, and when to look."},
    {"output", "Where the run is written."},
    {"device", "What computes."},
    {"distributed", "Several processes that train together (mtprun)."},
};

const mtp__field *mtp__config_fields(size_t *count)
{
    *count = sizeof fields / sizeof *fields;
    return fields;
}

const char *mtp__config_section_help(const char *section)
{
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++)
        if (strcmp(sections[i].name, section) == 0) return sections[i].help;
    return NULL;
}

size_t mtp__config_find(const char *key)
{
    const size_t count = sizeof fields / sizeof *fields;
    for (size_t i = 0; i < count; i++)
        if (strcmp(fields[i].key, key) == 0) return i;
    return count;
}
