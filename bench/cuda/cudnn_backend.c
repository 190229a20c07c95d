#include "cuda/cudnn_backend.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

/* ---- the library ------------------------------------------------------------------------------------------------- */

enum { OLDEST = 91200 }; /* the first one for CUDA 13 */

static mtp_status open_functions(void *handle, cudnn_library *library)
{
    const struct {
        const char *name;
        void *function; /* a pointer to it */
    } functions[] = {
        {"cudnnGetVersion", &library->version},
        {"cudnnGetErrorString", &library->error_string},
        {"cudnnGetLastErrorString", &library->last_error_string},
        {"cudnnCreate", &library->create},
        {"cudnnDestroy", &library->destroy},
        {"cudnnSetStream", &library->set_stream},
        {"cudnnBackendCreateDescriptor", &library->create_descriptor},
        {"cudnnBackendDestroyDescriptor", &library->destroy_descriptor},
        {"cudnnBackendFinalize", &library->finalize},
        {"cudnnBackendSetAttribute", &library->set_attribute},
        {"cudnnBackendGetAttribute", &library->get_attribute},
        {"cudnnBackendExecute", &library->execute},
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *symbol = dlsym(handle, functions[i].name);
        if (!symbol)
            return MTP_FAIL(MTP_E_UNSUPPORTED, "cuDNN has no function %s: it is not version 9", functions[i].name);
        memcpy(functions[i].function, &symbol, sizeof symbol);
    }
    const size_t version = library->version();
    if (version / 10000 == 9 && version >= OLDEST) return MTP_OK;
    return MTP_FAIL(MTP_E_UNSUPPORTED, "cuDNN says version %zu; 9.12 or newer of version 9 is wanted", version);
}

static mtp_status open_library(cudnn_library *library)
{
    const char *named = getenv("MTP_CUDNN_LIBRARY");
    const char *name = named && *named ? named : "libcudnn.so.9";
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE); /* CUDA's libraries are not unloaded */
    if (!handle)
        return MTP_FAIL(MTP_E_UNSUPPORTED,
                        "cuDNN cannot be opened (%s); install libcudnn9, or name its library in MTP_CUDNN_LIBRARY",
                        dlerror());
    const mtp_status status = open_functions(handle, library);
    dlclose(handle);
    return status;
}

static mtp_status fail(const cudnn_session *s, mtp_status kind, int status, const char *what)
{
    char text[512] = "";
    s->library.last_error_string(text, sizeof text);
    text[sizeof text - 1] = '\0';
    return MTP_FAIL_FOREIGN(kind, status, "%s: cuDNN %zu reports %s%s%s", what, s->library.version(),
                            s->library.error_string(status), *text ? ": " : "", text);
}

mtp_status cudnn_failed(const cudnn_session *s, int status, const char *what)
{
    const bool refused = status / 1000 * 1000 == CUDNN_STATUS_NOT_SUPPORTED;
    return fail(s, refused ? MTP_E_UNSUPPORTED : MTP_E_BACKEND, status, what);
}

static void check(cudnn_session *s, int status, const char *what)
{
    if (status != CUDNN_STATUS_SUCCESS) s->status = cudnn_failed(s, status, what);
}

mtp_status cudnn_session_open(cudnn_session *s, void *stream)
{
    memset(s, 0, sizeof *s);
    MTP_TRY(open_library(&s->library));
    const int status = s->library.create(&s->handle);
    if (status != CUDNN_STATUS_SUCCESS) {
        s->handle = NULL;
        return s->status = fail(s, MTP_E_UNSUPPORTED, status, "cuDNN does not start");
    }
    check(s, s->library.set_stream(s->handle, stream), "cudnnSetStream");
    return s->status;
}

void cudnn_session_close(cudnn_session *s)
{
    while (s->count > 0) s->library.destroy_descriptor(s->made[--s->count]);
    if (s->handle) s->library.destroy(s->handle);
    s->handle = NULL;
}

/* ---- descriptors ------------------------------------------------------------------------------------------------- */

cudnn_descriptor cudnn_begin(cudnn_session *s, int type)
{
    if (s->status == MTP_OK && s->count == CUDNN_DESCRIPTORS_MOST)
        s->status = MTP_FAIL(MTP_E_BACKEND, "more than %d descriptors of cuDNN", (int)CUDNN_DESCRIPTORS_MOST);
    if (s->status != MTP_OK) return NULL;
    cudnn_descriptor descriptor = NULL;
    check(s, s->library.create_descriptor(type, &descriptor), "cudnnBackendCreateDescriptor");
    if (s->status != MTP_OK) return NULL;
    return s->made[s->count++] = descriptor;
}

void cudnn_set(cudnn_session *s, cudnn_descriptor descriptor, int attribute, int type, int64_t count,
               const void *values)
{
    if (s->status != MTP_OK) return;
    const int status = s->library.set_attribute(descriptor, attribute, type, count, values);
    if (status == CUDNN_STATUS_SUCCESS) return;
    char what[64];
    snprintf(what, sizeof what, "attribute %d of a descriptor", attribute);
    check(s, status, what);
}

void cudnn_set_int(cudnn_session *s, cudnn_descriptor descriptor, int attribute, int64_t value)
{
    cudnn_set(s, descriptor, attribute, CUDNN_TYPE_INT64, 1, &value);
}

void cudnn_set_enum(cudnn_session *s, cudnn_descriptor descriptor, int attribute, int type, int value)
{
    cudnn_set(s, descriptor, attribute, type, 1, &value);
}

void cudnn_set_descriptor(cudnn_session *s, cudnn_descriptor descriptor, int attribute, cudnn_descriptor value)
{
    cudnn_set(s, descriptor, attribute, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

void cudnn_finish(cudnn_session *s, cudnn_descriptor descriptor, const char *what)
{
    if (s->status == MTP_OK) check(s, s->library.finalize(descriptor), what);
}
