/* How fast a packed store is read: bench_loader DIRECTORY [GIB]
 *
 * Writes a verifier and shards of the geometry of E2B (hidden 1536, local 1 x 256, global 1 x 512, 4096-token
 * documents) of GIB together (4) into DIRECTORY, unless they are there, with random bits that are bf16 numbers. Then
 * reads them: from front to back with read(2), the yardstick, and all documents in shuffled order through the loader,
 * with cold and with warm page cache. Prints GB/s, CPU seconds a GB and the memory of the loader's ring. */
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

static const char config[] =
    "{\"model_type\": \"gemma4_text\", \"vocab_size\": 1024, \"hidden_size\": 1536, \"num_hidden_layers\": 2, "
    "\"head_dim\": 256, \"layer_types\": [\"sliding_attention\", \"full_attention\"], \"num_key_value_heads\": 1, "
    "\"global_head_dim\": 512, \"sliding_window\": 512, \"rms_norm_eps\": 1e-06}";

static int fail(void)
{
    fprintf(stderr, "bench_loader: %s\n", mtp_last_error()->message);
    return 1;
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

/* ---- reading -------------------------------------------------------------------------------------------------- */

/* Drop a file from the page cache: works without privileges on clean pages. */
static void make_cold(const char *path)
{
    const int fd = open(path, O_RDONLY);
    if (fd < 0) return;
    fdatasync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
}

static void report(const char *what, double bytes, double seconds, double cpu)
{
    printf("%-34s %7.2f GB/s %7.2f CPU s a GB\n", what, bytes / 1e9 / seconds, cpu / (bytes / 1e9));
}

static int read_plain(const char *path, const char *what)
{
    enum { PIECE = 8 << 20 };
    char *piece = malloc(PIECE);
    const int fd = open(path, O_RDONLY);
    const double begin = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID);
    double bytes = 0;
    for (ssize_t n; piece && fd >= 0 && (n = read(fd, piece, PIECE)) > 0;) bytes += (double)n;
    report(what, bytes, now(CLOCK_MONOTONIC) - begin, now(CLOCK_PROCESS_CPUTIME_ID) - cpu);
    if (fd >= 0) close(fd);
    free(piece);
    return 0;
}

static int read_loader(const mtp_dataset *dataset, double bytes, const char *what)
{
    const mtp_loader_options options = {.tokens_per_batch = 2 * TOKENS, .shuffle = true, .seed = 1, .prefetch = 2, .num_workers = 2};
    mtp_loader *loader = NULL;
    int64_t batches = 0;
    if (mtp_loader_create(dataset, &options, &loader) != MTP_OK || mtp_loader_batches(loader, 0, &batches) != MTP_OK)
        return fail();
    const double begin = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID);
    for (int64_t i = 0; i < batches; i++) {
        const mtp_batch *batch = NULL;
        int64_t epoch, index;
        if (mtp_loader_next(loader, &batch, &epoch, &index) != MTP_OK) return fail();
        mtp_loader_release(loader, batch);
    }
    report(what, bytes, now(CLOCK_MONOTONIC) - begin, now(CLOCK_PROCESS_CPUTIME_ID) - cpu);
    printf("%-34s %7.1f MiB\n", "  memory of the ring", (double)mtp_loader_get_stats(loader).memory_bytes / (1 << 20));
    mtp_loader_free(loader);
    return 0;
}

int main(int argc, char **argv)
{
    const double gib = argc > 2 ? strtod(argv[2], NULL) : 4;
    const char *directory = argc > 1 ? argv[1] : "bench_loader_data";
    const int64_t document_bytes = TOKENS * (5 + 2 * HB + 4 * (LOCAL + GLOBAL));
    const int64_t documents = (int64_t)(gib * 1073741824.0 / (double)document_bytes);
    char path[4096];
    mtp_verifier *verifier = NULL;
    mtp_dataset *dataset = NULL;
    if (documents < 2) return fprintf(stderr, "bench_loader: GIB is too small\n"), 2;
    snprintf(path, sizeof path, "%s/e2b-%lld.h5", directory, (long long)documents);
    if (mtp__dir_create(directory) != MTP_OK || write_verifier(directory) != MTP_OK ||
        mtp_verifier_open(directory, NULL, &verifier) != MTP_OK)
        return fail();
    if (!mtp__path_exists(path) && write_shard(path, mtp_verifier_get_config(verifier), documents) != MTP_OK)
        return fail();
    const mtp_dataset_options options = {.hidden_norm = MTP_HIDDEN_UNSET};
    const char *paths[] = {path};
    if (mtp_dataset_open(paths, 1, verifier, &options, &dataset) != MTP_OK) return fail();
    const double bytes = (double)documents * (double)document_bytes;
    int bad = 0;
    make_cold(path);
    bad |= read_plain(path, "read(2), cold");
    make_cold(path);
    bad |= read_loader(dataset, bytes, "loader, cold");
    bad |= read_plain(path, "read(2), page cache");
    bad |= read_loader(dataset, bytes, "loader, page cache");
    mtp_dataset_close(dataset);
    mtp_verifier_close(verifier);
    return bad;
}
