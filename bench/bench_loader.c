/* How fast packed stores are read: bench_loader [--directory DIR] [--gib N] [--shards N] [--workers N,N] [--repeat N]
 * [--json]
 *
 * Writes a verifier and shards of the geometry of E2B (hidden 1536, local 1 x 256, global 1 x 512, documents of 4096
 * tokens, 512 of them a prompt), N GiB together (4) in N files (4), into DIR (bench_loader_data) unless they are there,
 * with random bits that are bf16 numbers. Then reads them N times (3), with cold and with warm page cache: from front
 * to back with read(2) and, cold, with read(2) past the page cache (O_DIRECT), as dd does, which are the yardsticks;
 * and all documents in shuffled order through the loader with each number of workers (1,2), through the page cache and
 * (cold) past it. For each: GB/s and CPU seconds (user and system) a GB, the median of the repeats with the extremes,
 * and what the loader reaches of the yardstick beside it. GB are of what was read: the K/V that no row sees is not
 * counted. Wall times mean something on a quiet machine only; ratios and CPU seconds on most. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/rng.h"
#include "data/store.h"
#include "mtp/data.h"
#include "mtp/safetensors.h"

enum { HB = 1536, LOCAL = 256, GLOBAL = 512, V = 1024, TOKENS = 4096, PROMPT = 512 };
enum { MOST_SHARDS = 64, MOST_WORKERS = 8, MOST_REPEATS = 32, PIECE = 8 << 20 };

typedef struct settings {
    const char *directory;
    double gib;
    int64_t shards, workers[MOST_WORKERS];
    int num_workers, repeats;
    bool json;
} settings;

static const char config[] =
    "{\"model_type\": \"gemma4_text\", \"vocab_size\": 1024, \"hidden_size\": 1536, \"num_hidden_layers\": 2, "
    "\"head_dim\": 256, \"layer_types\": [\"sliding_attention\", \"full_attention\"], \"num_key_value_heads\": 1, "
    "\"global_head_dim\": 512, \"sliding_window\": 512, \"rms_norm_eps\": 1e-06}";

static void need(mtp_status status)
{
    if (status == MTP_OK) return;
    fprintf(stderr, "bench_loader: %s\n", mtp_last_error()->message);
    exit(1);
}

static double now(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* ---- data ----------------------------------------------------------------------------------------------------- */

static mtp_status write_verifier(const char *directory)
{
    static uint16_t table[V * HB], norm[HB];
    const int64_t table_shape[] = {V, HB}, norm_shape[] = {HB};
    const mtp_safetensors_source tensors[] = {
        {.name = "model.embed_tokens.weight", .dtype = MTP_BF16, .rank = 2, .shape = table_shape, .data = table},
        {.name = "model.norm.weight", .dtype = MTP_BF16, .rank = 1, .shape = norm_shape, .data = norm}};
    char path[4096];
    for (int i = 0; i < V * HB; i++) table[i] = 0x3f80;
    for (int i = 0; i < HB; i++) norm[i] = 0x3f80;
    snprintf(path, sizeof path, "%s/config.json", directory);
    MTP_TRY(mtp__file_write(path, config, sizeof config - 1));
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    return mtp_safetensors_write(path, NULL, 0, tensors, 2);
}

static void fill(uint16_t *words, int64_t n, mtp__rng *rng)
{
    for (int64_t i = 0; i < n; i++) words[i] = (uint16_t)(mtp__rng_u32(rng) & 0xbfff); /* below 2: no NaN */
}

static mtp_status put(int fd, const char *path, uint64_t offset, const void *data, size_t size, uint32_t *crc)
{
    *crc = mtp__crc32c(0, data, size);
    return mtp__store_pwrite(fd, path, offset, data, size);
}

/* A shard of `documents` documents of the same values; only their place differs. */
static mtp_status write_shard(const char *path, const mtp_verifier_config *verifier, int64_t documents)
{
    mtp__store_layout layout = mtp__store_layout_of(verifier);
    uint64_t offsets[MTP__STORE_FIELDS];
    uint32_t crc[MTP__STORE_FIELDS] = {0};
    layout.num_tokens = documents * TOKENS;
    MTP_TRY(mtp__store_create(path, &layout, "bench", offsets));
    const int fd = open(path, O_WRONLY);
    if (fd < 0) return MTP_FAIL(MTP_E_IO, "%s: cannot open", path);
    mtp__rng rng = mtp__rng_make(1, 0);
    void *rows[MTP__STORE_FIELDS] = {NULL};
    for (int f = 0; f < MTP__STORE_FIELDS; f++) {
        const size_t bytes = TOKENS * mtp__store_row_bytes(&layout, (mtp__store_field)f);
        if (bytes == 0 || offsets[f] == 0) continue;
        rows[f] = calloc(1, bytes);
        if (!rows[f]) return MTP_FAIL(MTP_E_MEMORY, "out of memory");
        if (f >= MTP__STORE_HIDDEN) fill(rows[f], (int64_t)bytes / 2, &rng);
    }
    memset((uint8_t *)rows[MTP__STORE_MASK] + PROMPT, 1, TOKENS - PROMPT);
    mtp__store_row *index = calloc((size_t)documents, sizeof *index);
    uint32_t *checksums = calloc((size_t)documents * MTP__STORE_FIELDS, sizeof *checksums);
    if (!index || !checksums) return MTP_FAIL(MTP_E_MEMORY, "out of memory");
    for (int64_t i = 0; i < documents; i++) {
        index[i] = (mtp__store_row){.sample_id = (uint64_t)i,
                                    .first_token = (uint64_t)i * TOKENS,
                                    .num_tokens = TOKENS,
                                    .num_supervised = TOKENS - PROMPT,
                                    .prompt_len = PROMPT,
                                    .first_target = PROMPT,
                                    .last_target = TOKENS};
        for (int f = 0; f < MTP__STORE_FIELDS; f++) {
            const size_t bytes = TOKENS * mtp__store_row_bytes(&layout, (mtp__store_field)f);
            if (rows[f]) MTP_TRY(put(fd, path, offsets[f] + (uint64_t)i * bytes, rows[f], bytes, &crc[f]));
        }
        memcpy(checksums + i * MTP__STORE_FIELDS, crc, sizeof crc);
    }
    close(fd);
    const mtp__store_tail tail = {index, checksums, documents, "bench", 6, "", 0};
    const mtp_status status = mtp__store_finish(path, &tail);
    for (int f = 0; f < MTP__STORE_FIELDS; f++) free(rows[f]);
    free(index);
    free(checksums);
    return status;
}

/* ---- measuring ------------------------------------------------------------------------------------------------ */

/* What was read, how fast. */
typedef struct rate {
    double gb_per_s, cpu_s_per_gb;
} rate;

typedef struct stopwatch {
    double wall, cpu;
} stopwatch;

static stopwatch start(void)
{
    return (stopwatch){now(CLOCK_MONOTONIC), now(CLOCK_PROCESS_CPUTIME_ID)};
}

static rate stop(stopwatch begin, double bytes)
{
    return (rate){bytes / 1e9 / (now(CLOCK_MONOTONIC) - begin.wall),
                  (now(CLOCK_PROCESS_CPUTIME_ID) - begin.cpu) / (bytes / 1e9)};
}

/* Drop the files from the page cache: works without privileges on clean pages. */
static void make_cold(char *const *paths, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const int fd = open(paths[i], O_RDONLY);
        if (fd < 0) continue;
        fdatasync(fd);
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
}

/* All files from front to back. Where the file system has no O_DIRECT the rate is 0. */
static rate read_plain(char *const *paths, int64_t count, int flags)
{
    char *piece = aligned_alloc(4096, PIECE);
    if (piece) memset(piece, 0, PIECE);
    double bytes = 0;
    const stopwatch begin = start();
    for (int64_t i = 0; i < count && piece; i++) {
        const int fd = open(paths[i], O_RDONLY | flags);
        if (fd < 0) {
            free(piece);
            return (rate){0, 0};
        }
        for (ssize_t n; (n = read(fd, piece, PIECE)) > 0;) bytes += (double)n;
        close(fd);
    }
    free(piece);
    return stop(begin, bytes);
}

/* One epoch. */
static rate read_loader(const mtp_dataset *dataset, int64_t workers, mtp_direct_io direct, size_t *ring)
{
    const mtp_loader_options options = {.tokens_per_batch = 2 * TOKENS,
                                        .shuffle = true,
                                        .seed = 1,
                                        .num_speculative_steps = 3,
                                        .prefetch = 4,
                                        .num_workers = workers,
                                        .direct_io = direct};
    mtp_loader *loader = NULL;
    int64_t batches = 0;
    const stopwatch begin = start();
    need(mtp_loader_create(dataset, &options, &loader));
    need(mtp_loader_batches(loader, 0, &batches));
    mtp_loader_stats stats = {0};
    for (int64_t i = 0; i < batches; i++) {
        const mtp_batch *batch = NULL;
        int64_t epoch, index;
        need(mtp_loader_next(loader, &batch, &epoch, &index));
        if (i == batches - 1 || options.num_workers == 0) stats = mtp_loader_get_stats(loader);
        mtp_loader_release(loader, batch);
    }
    const rate reached = stop(begin, (double)stats.bytes_read);
    *ring = stats.memory_bytes;
    mtp_loader_free(loader);
    return reached;
}

/* ---- cases ---------------------------------------------------------------------------------------------------- */

typedef struct result {
    char what[64];
    rate rates[MOST_REPEATS];
    double of_read[MOST_REPEATS], of_direct[MOST_REPEATS]; /* share of the yardsticks of the same repeat; 0: none */
    size_t ring;                                           /* 0: not of the loader */
} result;

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct spread {
    double median, least, most;
} spread;

static spread spread_of(const double *values, int count)
{
    double sorted[MOST_REPEATS];
    memcpy(sorted, values, (size_t)count * sizeof *values);
    qsort(sorted, (size_t)count, sizeof *sorted, by_size);
    return (spread){(sorted[(count - 1) / 2] + sorted[count / 2]) / 2, sorted[0], sorted[count - 1]};
}

static void print_result(const settings *s, const result *r)
{
    double speeds[MOST_REPEATS], costs[MOST_REPEATS];
    for (int i = 0; i < s->repeats; i++) {
        speeds[i] = r->rates[i].gb_per_s;
        costs[i] = r->rates[i].cpu_s_per_gb;
    }
    const spread speed = spread_of(speeds, s->repeats), cost = spread_of(costs, s->repeats);
    const spread of_read = spread_of(r->of_read, s->repeats), of_direct = spread_of(r->of_direct, s->repeats);
    if (s->json) {
        printf("{\"bench\": \"loader\", \"case\": \"%s\", \"gib\": %g, \"gb_per_s\": %.3f, \"gb_per_s_least\": %.3f, "
               "\"gb_per_s_most\": %.3f, \"cpu_s_per_gb\": %.3f",
               r->what, s->gib, speed.median, speed.least, speed.most, cost.median);
        if (of_read.median > 0) printf(", \"of_read\": %.3f", of_read.median);
        if (of_direct.median > 0) printf(", \"of_direct\": %.3f", of_direct.median);
        if (r->ring) printf(", \"ring_bytes\": %zu", r->ring);
        printf("}\n");
        return;
    }
    printf("%-36s %6.2f GB/s (%.2f to %.2f)  %.3f CPU s a GB", r->what, speed.median, speed.least, speed.most,
           cost.median);
    if (of_read.median > 0) printf("  %.0f %% of read(2)", 100 * of_read.median);
    if (of_direct.median > 0) printf(", %.0f %% of O_DIRECT", 100 * of_direct.median);
    if (r->ring) printf("  ring %.0f MiB", (double)r->ring / (1 << 20));
    printf("\n");
}

/* The loader as it is measured. */
typedef struct way {
    int64_t workers;
    mtp_direct_io direct;
} way;

/* One repeat of a case: 0 and 1 are the yardsticks. */
static rate run_case(const settings *s, char *const *paths, const mtp_dataset *dataset, const way *ways, int c,
                     size_t *ring)
{
    if (c < 2) return read_plain(paths, s->shards, c == 1 ? O_DIRECT : 0);
    return read_loader(dataset, ways[c - 2].workers, ways[c - 2].direct, ring);
}

/* The yardsticks, then the loader in each way; cold: the page cache is emptied before each. Past the page cache there
 * is no other state. */
static void measure(const settings *s, char *const *paths, const mtp_dataset *dataset, bool cold)
{
    static result results[2 + 2 * MOST_WORKERS];
    way ways[2 * MOST_WORKERS];
    const char *state = cold ? "cold" : "page cache";
    int count = 2;
    memset(results, 0, sizeof results);
    snprintf(results[0].what, sizeof results[0].what, "read(2), %s", state);
    snprintf(results[1].what, sizeof results[1].what, "read(2) O_DIRECT");
    for (int direct = 0; direct < 1 + cold; direct++)
        for (int w = 0; w < s->num_workers; w++, count++) {
            ways[count - 2] = (way){s->workers[w], direct ? MTP_DIRECT_IO_ON : MTP_DIRECT_IO_OFF};
            snprintf(results[count].what, sizeof results[count].what, "loader%s, %s, %lld worker%s",
                     direct ? " direct_io" : "", state, (long long)s->workers[w], s->workers[w] == 1 ? "" : "s");
        }
    if (!cold) (void)read_plain(paths, s->shards, 0);
    for (int i = 0; i < s->repeats; i++) {
        for (int c = 0; c < count; c++) {
            if (cold) make_cold(paths, s->shards);
            if (cold || c != 1) results[c].rates[i] = run_case(s, paths, dataset, ways, c, &results[c].ring);
        }
        for (int c = 2; c < count; c++) {
            const double reached = results[c].rates[i].gb_per_s, direct = results[1].rates[i].gb_per_s;
            results[c].of_read[i] = reached / results[0].rates[i].gb_per_s;
            results[c].of_direct[i] = direct > 0 ? reached / direct : 0;
        }
    }
    for (int c = 0; c < count; c++)
        if (results[c].rates[0].gb_per_s > 0) print_result(s, &results[c]);
}

/* ---- command line --------------------------------------------------------------------------------------------- */

static bool take_workers(settings *s, const char *list)
{
    for (s->num_workers = 0; *list && s->num_workers < MOST_WORKERS; s->num_workers++) {
        char *end;
        s->workers[s->num_workers] = strtoll(list, &end, 10);
        if (end == list || s->workers[s->num_workers] < 0 || (*end && *end != ',')) return false;
        list = *end ? end + 1 : end;
    }
    return s->num_workers > 0 && !*list;
}

static bool take_arguments(settings *s, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) {
            s->json = true;
            continue;
        }
        if (i + 1 == argc) return false;
        const char *name = argv[i], *value = argv[++i];
        if (strcmp(name, "--directory") == 0)
            s->directory = value;
        else if (strcmp(name, "--gib") == 0)
            s->gib = strtod(value, NULL);
        else if (strcmp(name, "--shards") == 0)
            s->shards = strtoll(value, NULL, 10);
        else if (strcmp(name, "--repeat") == 0)
            s->repeats = (int)strtol(value, NULL, 10);
        else if (strcmp(name, "--workers") != 0 || !take_workers(s, value))
            return false;
    }
    return s->gib > 0 && s->shards >= 1 && s->shards <= MOST_SHARDS && s->repeats >= 1 && s->repeats <= MOST_REPEATS;
}

int main(int argc, char **argv)
{
    settings s = {
        .directory = "bench_loader_data", .gib = 4, .shards = 4, .workers = {1, 2}, .num_workers = 2, .repeats = 3};
    if (!take_arguments(&s, argc, argv)) {
        fprintf(stderr, "usage: bench_loader [--directory DIR] [--gib N] [--shards N] [--workers N,N] [--repeat N] "
                        "[--json]\n");
        return 2;
    }
    const int64_t document_bytes = TOKENS * (5 + 2 * HB + 4 * (LOCAL + GLOBAL));
    const int64_t documents = (int64_t)(s.gib * 1073741824.0 / (double)(document_bytes * s.shards));
    char *paths[MOST_SHARDS], name[64];
    mtp_verifier *verifier = NULL;
    mtp_dataset *dataset = NULL;
    if (documents < 1) {
        fprintf(stderr, "bench_loader: a shard holds no document; give more --gib or fewer --shards\n");
        return 2;
    }
    need(mtp__dir_create(s.directory));
    need(write_verifier(s.directory));
    need(mtp_verifier_open(s.directory, NULL, &verifier));
    for (int64_t i = 0; i < s.shards; i++) {
        snprintf(name, sizeof name, "e2b-%lld-%lld.h5", (long long)documents, (long long)i);
        need(mtp__path_join(s.directory, name, &paths[i]));
        if (!mtp__path_exists(paths[i])) need(write_shard(paths[i], mtp_verifier_get_config(verifier), documents));
    }
    const mtp_dataset_options options = {.hidden_norm = MTP_HIDDEN_UNSET};
    need(mtp_dataset_open((const char *const *)paths, s.shards, verifier, &options, &dataset));
    measure(&s, paths, dataset, true);
    measure(&s, paths, dataset, false);
    mtp_dataset_close(dataset);
    mtp_verifier_close(verifier);
    for (int64_t i = 0; i < s.shards; i++) free(paths[i]);
    return 0;
}
