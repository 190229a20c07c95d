/* The CPU backend: the device and the table. */
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cpu/cpu.h"

enum { MAX_THREADS = 1024 };

static mtp_status choose_threads(const mtp_device_options *options, int *num_threads)
{
    const int asked = options ? options->num_threads : 0;
    if (asked < 0 || asked > MAX_THREADS)
        return MTP_FAIL(MTP_E_ARGUMENT, "cpu backend: %d threads asked for; use 1 to %d, or 0 for all cores", asked,
                        (int)MAX_THREADS);
    *num_threads = asked > 0 ? asked : omp_get_num_procs();
    if (*num_threads > MAX_THREADS) *num_threads = MAX_THREADS;
    return MTP_OK;
}

static mtp_status choose_vec(const mtp_device_options *options, const mtp__vec **vec)
{
    const char *isa = options ? options->isa : NULL;
    *vec = mtp__vec_choose(isa);
    if (*vec) return MTP_OK;
    char known[64] = "";
    static const char *const names[] = {"plain", "avx2", "avx512"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (mtp__vec_choose(names[i])) {
            const size_t used = strlen(known);
            snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "", names[i]);
        }
    return MTP_FAIL(MTP_E_UNSUPPORTED, "cpu backend: instruction set \"%s\" is not available; this machine has %s", isa,
                    known);
}

static mtp_status cpu_list(mtp_device_row *rows, int capacity, int *count)
{
    MTP_REQUIRE(count != NULL && (rows != NULL || capacity == 0));
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    *count = 1;
    if (capacity < 1) return MTP_OK;
    rows[0] = (mtp_device_row){.memory = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : 0, .usable = true};
    snprintf(rows[0].name, sizeof rows[0].name, "%d cores, %s", omp_get_num_procs(), mtp__vec_choose(NULL)->isa);
    return MTP_OK;
}

static void cpu_close(mtp_device *device)
{
    free(device);
}

static mtp_status cpu_open(const mtp_device_options *options, mtp_device **device)
{
    MTP_REQUIRE(device != NULL);
    *device = NULL;
    mtp_device *opened = calloc(1, sizeof *opened);
    if (!opened) return MTP_FAIL(MTP_E_MEMORY, "out of memory opening the cpu backend");
    mtp_status status;
    MTP_TRY_GOTO(status, choose_threads(options, &opened->num_threads), failed);
    MTP_TRY_GOTO(status, choose_vec(options, &opened->vec), failed);
    MTP_TRY_GOTO(status, mtp__cpu_blas_open(opened), failed);
    opened->info.backend = "cpu";
    opened->info.isa = opened->vec->isa;
    opened->info.blas = opened->blas;
    opened->info.num_threads = opened->num_threads;
    opened->info.factors = MTP_F32;
    opened->info.stored = MTP_F32;
    opened->info.rows_note = opened->note;
    *device = opened;
    return MTP_OK;
failed:
    cpu_close(opened);
    return status;
}

static const mtp_device_info *cpu_info(const mtp_device *device)
{
    return &device->info;
}

/* Nothing waits here, and what is allocated has no limit of its own. */
static mtp_device_counts cpu_counts(const mtp_device *device)
{
    (void)device;
    return (mtp_device_counts){0};
}

static mtp_status cpu_alloc(mtp_device *device, size_t bytes, void **memory)
{
    (void)device;
    MTP_REQUIRE(memory != NULL);
    *memory = NULL;
    if (bytes > (size_t)PTRDIFF_MAX - 64)
        return MTP_FAIL(MTP_E_MEMORY, "cpu backend: cannot allocate %zu bytes", bytes);
    const size_t rounded = bytes == 0 ? 64 : (bytes + 63) / 64 * 64;
    *memory = aligned_alloc(64, rounded);
    if (!*memory) return MTP_FAIL(MTP_E_MEMORY, "cpu backend: out of memory allocating %zu bytes", bytes);
    return MTP_OK;
}

static void cpu_free(mtp_device *device, void *memory)
{
    (void)device;
    free(memory);
}

static mtp_status cpu_zero(mtp_device *device, void *memory, size_t bytes)
{
    (void)device;
    MTP_REQUIRE(memory != NULL || bytes == 0);
    if (bytes > 0) memset(memory, 0, bytes);
    return MTP_OK;
}

static mtp_status copy(void *to, const void *from, size_t bytes)
{
    MTP_REQUIRE((to != NULL && from != NULL) || bytes == 0);
    if (bytes > 0) memcpy(to, from, bytes);
    return MTP_OK;
}

static mtp_status cpu_upload(mtp_device *device, void *memory, const void *host, size_t bytes)
{
    (void)device;
    return copy(memory, host, bytes);
}

static mtp_status cpu_download(mtp_device *device, void *host, const void *memory, size_t bytes)
{
    (void)device;
    return copy(host, memory, bytes);
}

/* All that was called is done. */
struct mtp_mark {
    char unused;
};

static mtp_status cpu_upload_beside(mtp_device *device, void *memory, const void *host, size_t bytes, mtp_mark *after)
{
    (void)after;
    return cpu_upload(device, memory, host, bytes);
}

static mtp_status cpu_uploads_join(mtp_device *device)
{
    (void)device;
    return MTP_OK;
}

static mtp_status cpu_mark(mtp_device *device, mtp_mark **mark)
{
    static const mtp_mark done = {0}; /* nobody writes to it: no variable of the library can change */
    (void)device;
    MTP_REQUIRE(mark != NULL);
    *mark = (mtp_mark *)(uintptr_t)&done;
    return MTP_OK;
}

static mtp_status cpu_mark_wait(mtp_device *device, mtp_mark *mark)
{
    (void)device;
    MTP_REQUIRE(mark != NULL);
    return MTP_OK;
}

static void cpu_mark_free(mtp_device *device, mtp_mark *mark)
{
    (void)device;
    (void)mark;
}

/* Free pages; those that hold copies of files are not counted. */
static mtp_status cpu_memory_info(mtp_device *device, uint64_t *left, uint64_t *total)
{
    (void)device;
    MTP_REQUIRE(left != NULL && total != NULL);
    const long pages = sysconf(_SC_PHYS_PAGES), free_pages = sysconf(_SC_AVPHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    if (pages <= 0 || free_pages < 0 || page <= 0)
        return MTP_FAIL(MTP_E_UNSUPPORTED, "cpu backend: the system does not say how much memory it has");
    *left = (uint64_t)free_pages * (uint64_t)page;
    *total = (uint64_t)pages * (uint64_t)page;
    return MTP_OK;
}

const mtp_backend *mtp__backend_cpu(void)
{
#define ROW_0(op) .op = mtp__cpu_##op,
#define ROW_1(op) .op = mtp__cpu_##op, .op##_scratch = mtp__cpu_##op##_scratch,
#define ROW(op, args, scratch) ROW_##scratch(op)
    static const mtp_backend backend = {.name = "cpu",
                                        .memory_is_host = true,
                                        .device_list = cpu_list,
                                        .device_open = cpu_open,
                                        .device_close = cpu_close,
                                        .device_info = cpu_info,
                                        .device_counts = cpu_counts,
                                        .memory_alloc = cpu_alloc,
                                        .memory_free = cpu_free,
                                        .memory_zero = cpu_zero,
                                        .host_alloc = cpu_alloc, /* all memory is alike */
                                        .host_free = cpu_free,
                                        .upload = cpu_upload,
                                        .download = cpu_download,
                                        .upload_async = cpu_upload,
                                        .download_async = cpu_download,
                                        .upload_beside = cpu_upload_beside,
                                        .uploads_join = cpu_uploads_join,
                                        .mark = cpu_mark,
                                        .mark_wait = cpu_mark_wait,
                                        .mark_free = cpu_mark_free,
                                        .memory_info = cpu_memory_info,
                                        MTP_OP_LIST(ROW)};
#undef ROW
#undef ROW_0
#undef ROW_1
    return &backend;
}
