#include "base/backends.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "module.h"

#define MODULE "libmtp_cuda.so"

/* ---- the host that a module sees ------------------------------------------------------------------------------ */

static mtp_status raise(mtp_status status, int foreign, const char *file, int line, const char *message)
{
    return mtp__fail(status, foreign, file, line, "%s", message);
}

static mtp_status raise_prefix(mtp_status status, const char *text)
{
    return mtp__fail_prefix(status, "%s", text);
}

static const mtp_module_host *host(void)
{
    static const mtp_module_host constant = {.interface = MTP_MODULE_INTERFACE,
                                             .version = MTP__VERSION,
                                             .backend_size = sizeof(mtp_backend),
                                             .fail = raise,
                                             .prefix = raise_prefix};
    return &constant;
}

/* ---- finding the module --------------------------------------------------------------------------------------- */

/* A path from the directory of the library (or program) that holds this function. */
static mtp_status beside(const char *relative, char **path)
{
    Dl_info self;
    *path = NULL;
    if (!dladdr((const void *)(uintptr_t)&mtp__backend_of, &self) || !self.dli_fname) return MTP_OK;
    char *real = realpath(self.dli_fname, NULL);
    if (!real) return MTP_OK;
    char *slash = strrchr(real, '/');
    if (slash) *slash = '\0';
    const mtp_status status = mtp__path_join(real, relative, path);
    free(real);
    return status;
}

static mtp_status find_module(char **path)
{
    static const char *const places[] = {MODULE, ("../" MTP__LIBDIR "/" MODULE), ("../" MODULE)};
    const char *named = getenv("MTP_CUDA_MODULE");
    *path = NULL;
    if (named && *named) {
        *path = strdup(named);
        return *path ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory for a path");
    }
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        MTP_TRY(beside(places[i], path));
        if (*path && access(*path, R_OK) == 0) return MTP_OK;
        free(*path);
        *path = NULL;
    }
    return MTP_OK;
}

static mtp_status open_module(const char *path, const mtp_backend **backend)
{
    /* never unloaded: CUDA's libraries do not like it */
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!handle)
        return MTP_FAIL(MTP_E_CONFIG, "device \"cuda\": %s cannot be loaded: %s; use device = \"cpu\"", path,
                        dlerror());
    mtp_module_open_function *open = NULL;
    void *symbol = dlsym(handle, "mtp_module_open");
    memcpy(&open, &symbol, sizeof open);
    const char *version = "unknown";
    *backend = open ? open(host(), &version) : NULL;
    dlclose(handle);
    if (*backend) return MTP_OK;
    return MTP_FAIL(
        MTP_E_CONFIG,
        "device \"cuda\": %s is of another build (version %s; this is libmtp %s); install both from one build", path,
        version, MTP__VERSION);
}

static mtp_status cuda_backend(const mtp_backend **backend)
{
    char *path = NULL;
    MTP_TRY(find_module(&path));
    if (!path)
        return MTP_FAIL(MTP_E_CONFIG,
                        "device \"cuda\": this build has the cpu backend only (" MODULE " is not beside libmtp); build "
                        "with -DMTP_CUDA=ON, or use device = \"cpu\"");
    const mtp_status status = open_module(path, backend);
    free(path);
    return status;
}

/* ---- names ---------------------------------------------------------------------------------------------------- */

enum { INDEX_MOST = 1023 };

static bool read_index(const char *text, int *index)
{
    char *end = NULL;
    if (*text < '0' || *text > '9') return false;
    const long value = strtol(text, &end, 10);
    if (*end || value > INDEX_MOST) return false;
    *index = (int)value;
    return true;
}

mtp_status mtp__backend_of(const char *name, const mtp_backend **backend, int *index)
{
    *index = 0;
    if (strcmp(name, "cpu") == 0) {
        *backend = mtp__backend_cpu();
        return MTP_OK;
    }
    if (strcmp(name, "cuda") == 0) {
        const char *local = getenv("LOCAL_RANK");
        if (local && !read_index(local, index))
            return MTP_FAIL(MTP_E_CONFIG, "device \"cuda\": LOCAL_RANK is \"%s\", not a number of a device", local);
        return cuda_backend(backend);
    }
    if (strncmp(name, "cuda:", 5) == 0 && read_index(name + 5, index)) return cuda_backend(backend);
    return MTP_FAIL(MTP_E_CONFIG, "device \"%s\" is not known; there are \"cpu\", \"cuda\" and \"cuda:N\"", name);
}
