/* What the module exports, and how its errors reach the host: libmtp's record lies in libmtp, so mtp__fail and
 * mtp__fail_prefix of this module format the message and hand it over. */
#include "module.h"

#include <stdio.h>
#include <string.h>

#include <atomic>

#include "cuda/cuda.h"

extern const mtp_backend mtp__backend_cuda; /* backend.cu */

/* Written once, when the module is opened; every later opening has the same host. */
static std::atomic<const mtp_module_host *> host_of_module;

extern "C" mtp_status mtp__fail(mtp_status status, int foreign, const char *file, int line, const char *format, ...)
{
    char message[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    return host_of_module.load()->fail(status, foreign, file, line, message);
}

extern "C" mtp_status mtp__fail_prefix(mtp_status status, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return host_of_module.load()->prefix(status, text);
}

extern "C" MTP_API const mtp_backend *mtp_module_open(const mtp_module_host *host, const char **version)
{
    *version = MTP__VERSION;
    if (host->interface != MTP_MODULE_INTERFACE || strcmp(host->version, MTP__VERSION) != 0 ||
        host->backend_size != sizeof(mtp_backend))
        return NULL;
    host_of_module.store(host);
    return &mtp__backend_cuda;
}
