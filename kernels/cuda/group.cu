/* Devices of several processes joined by NCCL. The library is opened when the first group is made, so that a machine
 * with one GPU does not need it. Operations run on a stream of the group, beside the device's own. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <mutex>
#include <new>

#include "cuda/cuda.h"
#include "cuda/nccl_numbers.h"

extern const mtp_group_ops mtp__cuda_group;

namespace
{

/* What is called of NCCL, whose interface is stable within version 2. */
struct nccl_comm;
struct nccl_id {
    char internal[MTP_GROUP_ID];
};

struct nccl_library {
    int (*get_unique_id)(nccl_id *id);
    int (*comm_init_rank)(nccl_comm **comm, int size, nccl_id id, int rank);
    int (*all_reduce)(const void *from, void *to, size_t count, int type, int reduce, nccl_comm *comm, cudaStream_t on);
    int (*broadcast)(const void *from, void *to, size_t count, int type, int root, nccl_comm *comm, cudaStream_t on);
    int (*comm_get_async_error)(nccl_comm *comm, int *error);
    int (*comm_abort)(nccl_comm *comm);
    int (*comm_destroy)(nccl_comm *comm);
    const char *(*get_error_string)(int result);
};

template <typename Function>
mtp_status look_up(void *handle, const char *name, Function *function)
{
    *function = reinterpret_cast<Function>(dlsym(handle, name));
    if (*function) return MTP_OK;
    return MTP_FAIL(MTP_E_UNSUPPORTED, "NCCL has no function %s: it is not version 2", name);
}

/* Opened once, and kept. */
mtp_status open_library(nccl_library *nccl)
{
#ifdef MTP_EMULATOR
    const char *name = "libmtp_emu.so";
#else
    const char *name = "libnccl.so.2";
#endif
    const char *named = getenv("MTP_NCCL_LIBRARY");
    if (named && *named) name = named;
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!handle)
        return MTP_FAIL(MTP_E_UNSUPPORTED,
                        "several GPUs need NCCL, which cannot be opened (%s); install libnccl2, or name its library in "
                        "MTP_NCCL_LIBRARY",
                        dlerror());
    MTP_TRY(look_up(handle, "ncclGetUniqueId", &nccl->get_unique_id));
    MTP_TRY(look_up(handle, "ncclCommInitRank", &nccl->comm_init_rank));
    MTP_TRY(look_up(handle, "ncclAllReduce", &nccl->all_reduce));
    MTP_TRY(look_up(handle, "ncclBroadcast", &nccl->broadcast));
    MTP_TRY(look_up(handle, "ncclCommGetAsyncError", &nccl->comm_get_async_error));
    MTP_TRY(look_up(handle, "ncclCommAbort", &nccl->comm_abort));
    MTP_TRY(look_up(handle, "ncclCommDestroy", &nccl->comm_destroy));
    return look_up(handle, "ncclGetErrorString", &nccl->get_error_string);
}

} // namespace

struct mtp_device_group {
    mtp_device *device;
    nccl_library nccl;
    nccl_comm *comm;
    cudaStream_t stream;
    cudaEvent_t done;
    std::mutex lock; /* of `comm` and `cancelled`: cancel comes from another thread */
    bool cancelled;
};

namespace
{

mtp_status nccl_failed(const nccl_library *nccl, int result, const char *what)
{
    return MTP_FAIL_FOREIGN(MTP_E_BACKEND, result, "%s: NCCL reports %s", what, nccl->get_error_string(result));
}

mtp_status group_make_id(uint8_t id[MTP_GROUP_ID])
{
    nccl_library nccl;
    nccl_id made;
    MTP_TRY(open_library(&nccl));
    const int result = nccl.get_unique_id(&made);
    if (result != NCCL_SUCCESS) return nccl_failed(&nccl, result, "beginning a group of GPUs");
    memcpy(id, made.internal, MTP_GROUP_ID);
    return MTP_OK;
}

void group_cancel(mtp_device_group *group)
{
    const std::lock_guard<std::mutex> hold(group->lock);
    if (group->cancelled) return;
    group->cancelled = true;
    if (group->comm) group->nccl.comm_abort(group->comm);
    group->comm = NULL;
}

void group_close(mtp_device_group *group)
{
    if (!group) return;
    cudaSetDevice(group->device->ordinal);
    if (group->comm) group->nccl.comm_destroy(group->comm);
    if (group->stream) cudaStreamDestroy(group->stream);
    if (group->done) cudaEventDestroy(group->done);
    delete group;
}

mtp_status join(mtp_device_group *group, const uint8_t *id, int rank, int size)
{
    nccl_id shared;
    MTP_TRY(open_library(&group->nccl));
    MTP_CUDA_TRY("a group of GPUs", cudaSetDevice(group->device->ordinal));
    MTP_CUDA_TRY("a group of GPUs", cudaStreamCreateWithFlags(&group->stream, cudaStreamNonBlocking));
    MTP_CUDA_TRY("a group of GPUs", cudaEventCreateWithFlags(&group->done, cudaEventDisableTiming));
    memcpy(shared.internal, id, MTP_GROUP_ID);
    const int result = group->nccl.comm_init_rank(&group->comm, size, shared, rank);
    if (result == NCCL_SUCCESS) return MTP_OK;
    group->comm = NULL;
    return nccl_failed(&group->nccl, result, "joining the GPUs of all ranks");
}

mtp_status group_open(mtp_device *device, const uint8_t id[MTP_GROUP_ID], int rank, int size, mtp_device_group **group)
{
    *group = NULL;
    mtp_device_group *made = new (std::nothrow) mtp_device_group();
    if (!made) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a group of GPUs");
    made->device = device;
    const mtp_status status = join(made, id, rank, size);
    if (status != MTP_OK) {
        group_close(made);
        return status;
    }
    *group = made;
    return MTP_OK;
}

mtp_status group_mark(mtp_device_group *group, void **mark)
{
    cudaEvent_t event;
    *mark = NULL;
    MTP_CUDA_TRY("a mark in the device's work", cudaSetDevice(group->device->ordinal));
    MTP_CUDA_TRY("a mark in the device's work", cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    *mark = event;
    MTP_CUDA_TRY("a mark in the device's work", cudaEventRecord(event, group->device->stream));
    return MTP_OK;
}

void group_mark_free(mtp_device_group *group, void *mark)
{
    (void)group;
    if (mark) cudaEventDestroy(static_cast<cudaEvent_t>(mark));
}

double now_seconds()
{
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Another device may have died, so nobody waits on the stream itself. */
mtp_status wait_done(mtp_device_group *group, const char *what, double seconds)
{
    const double deadline = now_seconds() + seconds;
    MTP_CUDA_TRY(what, cudaEventRecord(group->done, group->stream));
    for (;;) {
        const cudaError_t state = cudaEventQuery(group->done);
        int error = NCCL_SUCCESS;
        if (state != cudaErrorNotReady) MTP_CUDA_TRY(what, state);
        {
            const std::lock_guard<std::mutex> hold(group->lock);
            if (group->cancelled) return MTP_FAIL(MTP_E_BACKEND, "%s: ended, since another rank is lost", what);
            const int result = group->nccl.comm_get_async_error(group->comm, &error);
            if (result != NCCL_SUCCESS) error = result;
        }
        if (error != NCCL_SUCCESS && error != NCCL_IN_PROGRESS) return nccl_failed(&group->nccl, error, what);
        if (state == cudaSuccess) return MTP_OK;
        if (now_seconds() > deadline) return MTP_FAIL(MTP_E_BACKEND, "%s: not done within %g s", what, seconds);
        const timespec pause = {0, 20000};
        nanosleep(&pause, NULL);
    }
}

template <typename Call>
mtp_status perform(mtp_device_group *group, void *mark, const char *what, double seconds, Call call)
{
    MTP_CUDA_TRY(what, cudaSetDevice(group->device->ordinal));
    if (mark) MTP_CUDA_TRY(what, cudaStreamWaitEvent(group->stream, static_cast<cudaEvent_t>(mark), 0));
    {
        const std::lock_guard<std::mutex> hold(group->lock);
        if (group->cancelled) return MTP_FAIL(MTP_E_BACKEND, "%s: ended, since another rank is lost", what);
        const int result = call(group->comm);
        if (result != NCCL_SUCCESS) return nccl_failed(&group->nccl, result, what);
    }
    const mtp_status status = wait_done(group, what, seconds);
    if (status != MTP_OK) group_cancel(group); /* nobody knows what the others have done of it */
    return status;
}

mtp_status group_sum(mtp_device_group *group, void *mark, void *memory, size_t count, mtp_dtype dtype, double seconds)
{
    if (dtype != MTP_F32 && dtype != MTP_BF16)
        return MTP_FAIL(MTP_E_UNSUPPORTED, "a sum between GPUs of dtype %d; they add F32 and BF16", (int)dtype);
    return perform(group, mark, "a sum between GPUs", seconds, [&](nccl_comm *comm) {
        return group->nccl.all_reduce(memory, memory, count, dtype == MTP_F32 ? NCCL_FLOAT32 : NCCL_BFLOAT16, NCCL_SUM,
                                      comm, group->stream);
    });
}

mtp_status group_broadcast(mtp_device_group *group, void *mark, void *memory, size_t bytes, int root, double seconds)
{
    return perform(group, mark, "a broadcast between GPUs", seconds, [&](nccl_comm *comm) {
        return group->nccl.broadcast(memory, memory, bytes, NCCL_INT8, root, comm, group->stream);
    });
}

} // namespace

const mtp_group_ops mtp__cuda_group = {group_make_id, group_open,      group_mark,   group_mark_free,
                                       group_sum,     group_broadcast, group_cancel, group_close};
