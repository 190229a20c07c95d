/* The part of NCCL that data-parallel training calls: one communicator over the processes of this machine. An operation
 * is work of its stream; rank 0 gathers the parts in the order of the ranks, computes, and gives everybody the result.
 * A rank that is gone makes the operation fail asynchronously: the result is all ones, ncclCommGetAsyncError says so.
 * Ranks that call different operations end here with both named (NCCL hangs, or mixes them). */
#include "emu/block.h"
#include "emu/device_memory.h"
#include "emu/fault.h"
#include "emu/nccl_link.h"
#include "emu/stream.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <nccl.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <set>

#include <sys/random.h>
#include <unistd.h>

using namespace emu;

struct ncclComm {
    int rank, ranks;
    Link link;
    std::atomic<ncclResult_t> error{ncclSuccess};

    ncclComm(std::string name, int r, int n) : rank(r), ranks(n), link(std::move(name), r, n)
    {
    }
};

namespace
{

enum class Kind : uint32_t { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER };
const char *const NAMES[] = {"ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter"};

struct Operation {
    Kind kind;
    uint32_t type, op;
    int32_t root;
    uint64_t count;
};

thread_local int groups;

std::set<ncclComm *> &comms()
{
    static auto *set = new std::set<ncclComm *>;
    return *set;
}

size_t type_bytes(ncclDataType_t type)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        return 0;
    }
}

/* ---- sums -------------------------------------------------------------------------------------------------------- */

float wide(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}
float wide(__half x)
{
    return __half2float(x);
}
template <class T>
T wide(T x)
{
    return x;
}
void narrow(__nv_bfloat16 *to, float x)
{
    *to = __float2bfloat16_rn(x);
}
void narrow(__half *to, float x)
{
    *to = __float2half_rn(x);
}
template <class T>
void narrow(T *to, T x)
{
    *to = x;
}

template <class T>
void reduce(const char *parts, uint64_t count, int ranks, ncclRedOp_t op, char *out)
{
    for (uint64_t i = 0; i < count; i++) {
        T x;
        memcpy(static_cast<void *>(&x), parts + i * sizeof(T), sizeof(T));
        auto value = wide(x);
        for (int rank = 1; rank < ranks; rank++) {
            memcpy(static_cast<void *>(&x), parts + (static_cast<uint64_t>(rank) * count + i) * sizeof(T), sizeof(T));
            const auto other = wide(x);
            if (op == ncclMax)
                value = value > other ? value : other;
            else if (op == ncclMin)
                value = value < other ? value : other;
            else
                value = static_cast<decltype(value)>(value + other);
        }
        if (op == ncclAvg) value = static_cast<decltype(value)>(value / static_cast<decltype(value)>(ranks));
        narrow(&x, value);
        memcpy(out + i * sizeof(T), &x, sizeof(T));
    }
}

void reduce_type(ncclDataType_t type, const char *parts, uint64_t count, int ranks, ncclRedOp_t op, char *out)
{
    switch (type) {
    case ncclFloat32:
        return reduce<float>(parts, count, ranks, op, out);
    case ncclFloat64:
        return reduce<double>(parts, count, ranks, op, out);
    case ncclBfloat16:
        return reduce<__nv_bfloat16>(parts, count, ranks, op, out);
    case ncclFloat16:
        return reduce<__half>(parts, count, ranks, op, out);
    case ncclInt32:
        return reduce<int32_t>(parts, count, ranks, op, out);
    case ncclUint32:
        return reduce<uint32_t>(parts, count, ranks, op, out);
    case ncclInt64:
        return reduce<int64_t>(parts, count, ranks, op, out);
    case ncclUint64:
        return reduce<uint64_t>(parts, count, ranks, op, out);
    case ncclInt8:
        return reduce<int8_t>(parts, count, ranks, op, out);
    default:
        return reduce<uint8_t>(parts, count, ranks, op, out);
    }
}

/* ---- an operation when its stream gets there -----------------------------------------------------------------------
 */

void must_match(const Operation &mine, const Operation &theirs, int rank)
{
    if (memcmp(&mine, &theirs, sizeof mine) == 0) return;
    host_fault(
        "NCCL: rank 0 calls %s(count %llu, type %u, op %u, root %d), rank %d calls %s(count %llu, type %u, op %u, "
        "root %d)",
        NAMES[static_cast<int>(mine.kind)], static_cast<unsigned long long>(mine.count), mine.type, mine.op, mine.root,
        rank, NAMES[static_cast<int>(theirs.kind)], static_cast<unsigned long long>(theirs.count), theirs.type,
        theirs.op, theirs.root);
}

/* Rank 0: parts of all ranks, one after the other. */
bool gather(ncclComm &comm, const Operation &operation, const void *own, size_t part, std::vector<char> *parts)
{
    parts->resize(part * static_cast<size_t>(comm.ranks));
    memcpy(parts->data(), own, part);
    for (int rank = 1; rank < comm.ranks; rank++) {
        Operation theirs;
        if (!comm.link.receive(rank, &theirs, sizeof theirs)) return false;
        must_match(operation, theirs, rank);
        if (!comm.link.receive(rank, parts->data() + part * static_cast<size_t>(rank), part)) return false;
    }
    return true;
}

/* What rank 0 gives to each: the whole result, or its part of it. */
bool give(ncclComm &comm, const Operation &operation, const std::vector<char> &result, size_t out, void *own)
{
    const bool apart = operation.kind == Kind::REDUCE_SCATTER;
    for (int rank = 0; rank < comm.ranks; rank++) {
        if (operation.kind == Kind::REDUCE && rank != operation.root) continue;
        const char *from = result.data() + (apart ? out * static_cast<size_t>(rank) : 0);
        if (rank == 0)
            memcpy(own, from, out);
        else if (!comm.link.send(rank, from, out))
            return false;
    }
    return true;
}

bool as_first(ncclComm &comm, const Operation &operation, const void *in, size_t in_bytes, void *out, size_t out_bytes)
{
    std::vector<char> parts, result;
    const ncclDataType_t type = static_cast<ncclDataType_t>(operation.type);
    if (!gather(comm, operation, in, in_bytes, &parts)) return false;
    switch (operation.kind) {
    case Kind::ALL_GATHER:
        result.swap(parts);
        break;
    case Kind::BROADCAST: {
        const char *from = parts.data() + in_bytes * static_cast<size_t>(operation.root);
        result.assign(from, from + in_bytes);
        break;
    }
    default:
        result.resize(in_bytes);
        reduce_type(type, parts.data(), in_bytes / type_bytes(type), comm.ranks, static_cast<ncclRedOp_t>(operation.op),
                    result.data());
    }
    return give(comm, operation, result, out_bytes, out);
}

void perform(ncclComm *comm, const Operation &operation, const void *in, size_t in_bytes, void *out, size_t out_bytes)
{
    if (!comms().count(comm)) return;
    const bool gets = operation.kind != Kind::REDUCE || operation.root == comm->rank;
    bool ok = comm->error == ncclSuccess;
    if (ok && comm->rank == 0)
        ok = as_first(*comm, operation, in, in_bytes, out, out_bytes);
    else if (ok)
        ok = comm->link.send(0, &operation, sizeof operation) && comm->link.send(0, in, in_bytes) &&
             (!gets || comm->link.receive(0, out, out_bytes));
    if (ok) return;
    comm->error = ncclRemoteError;
    if (gets) memset(out, 0xff, out_bytes);
}

/* ---- what a call is checked for ------------------------------------------------------------------------------------
 */

void must_be_device(const char *call, const char *what, const void *data, size_t bytes)
{
    if (is_device(data, bytes) || is_pinned(data)) return;
    char where[160];
    if (device_address(data))
        device_describe(data, where, sizeof where);
    else
        snprintf(where, sizeof where, "an address of host memory");
    host_fault("%s: %s, %zu bytes at %s, is not within live device memory", call, what, bytes, where);
}

ncclResult_t queue(Kind kind, const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                   ncclComm_t comm, cudaStream_t stream)
{
    const Lock lock(api_mutex());
    const char *name = NAMES[static_cast<int>(kind)];
    if (!comms().count(comm)) return ncclInvalidArgument;
    const size_t element = type_bytes(type), n = static_cast<size_t>(comm->ranks);
    const bool reduces = kind == Kind::ALL_REDUCE || kind == Kind::REDUCE || kind == Kind::REDUCE_SCATTER;
    if (!element || root < 0 || root >= comm->ranks) return ncclInvalidArgument;
    if (reduces && op != ncclSum && op != ncclMax && op != ncclMin && op != ncclAvg) return ncclInvalidArgument;
    if (count == 0) return ncclSuccess;
    const size_t in_bytes = count * element * (kind == Kind::REDUCE_SCATTER ? n : 1);
    const size_t out_bytes = count * element * (kind == Kind::ALL_GATHER ? n : 1);
    const bool sends = kind != Kind::BROADCAST || comm->rank == root;
    const bool gets = kind != Kind::REDUCE || comm->rank == root;
    if ((sends && !in) || (gets && !out)) return ncclInvalidArgument;
    if (sends) must_be_device(name, "the data", in, in_bytes);
    if (gets) must_be_device(name, "the result", out, out_bytes);
    /* in place means: the own part of the longer buffer */
    const char *a = static_cast<const char *>(in), *b = static_cast<const char *>(out);
    const size_t offset = static_cast<size_t>(comm->rank) * count * element;
    const bool in_place = kind == Kind::ALL_GATHER       ? a == b + offset
                          : kind == Kind::REDUCE_SCATTER ? b == a + offset
                                                         : a == b;
    if (sends && gets && !in_place && a < b + out_bytes && b < a + in_bytes)
        host_fault("%s: data and result overlap, and it is not the in-place form", name);
    const Operation operation = {kind, static_cast<uint32_t>(type), reduces ? static_cast<uint32_t>(op) : 0, root,
                                 count};
    const void *from = sends ? in : out; /* who does not send gives bytes that nobody looks at */
    const cudaError_t error =
        enqueue(stream, WorkKind::LIBRARY, name, [=] { perform(comm, operation, from, in_bytes, out, out_bytes); });
    return error == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

} // namespace

extern "C" {

ncclResult_t ncclGetVersion(int *version)
{
    if (!version) return ncclInvalidArgument;
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclUnhandledCudaError:
        return "unhandled cuda error";
    case ncclSystemError:
        return "unhandled system error";
    case ncclInternalError:
        return "internal error";
    case ncclInvalidArgument:
        return "invalid argument";
    case ncclInvalidUsage:
        return "invalid usage";
    case ncclRemoteError:
        return "remote process exited or there was a network error";
    case ncclInProgress:
        return "NCCL operation in progress";
    default:
        return "unknown result code";
    }
}

const char *ncclGetLastError(ncclComm_t)
{
    return "";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    uint64_t random = 0;
    if (!id) return ncclInvalidArgument;
    if (getrandom(&random, sizeof random, 0) != sizeof random) return ncclSystemError;
    *id = ncclUniqueId();
    snprintf(id->internal, sizeof id->internal, "mtp-emu-nccl-%ld-%016llx", static_cast<long>(getpid()),
             static_cast<unsigned long long>(random));
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank)
{
    if (!comm || ranks < 1 || rank < 0 || rank >= ranks) return ncclInvalidArgument;
    if (strncmp(id.internal, "mtp-emu-nccl-", 13) != 0 || !memchr(id.internal, 0, 64)) return ncclInvalidArgument;
    auto made = std::make_unique<ncclComm>(id.internal, rank, ranks);
    if (!made->link.open()) return ncclSystemError;
    const Lock lock(api_mutex());
    *comm = made.release();
    comms().insert(*comm);
    return ncclSuccess;
}

/* A communicator here is always blocking. */
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    if (config && config->blocking == 0) return ncclInvalidArgument;
    return ncclCommInitRank(comm, ranks, id, rank);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    const Lock lock(api_mutex());
    if (!comms().count(comm)) return ncclInvalidArgument;
    run_all();
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (!comm) return ncclSuccess;
    const Lock lock(api_mutex());
    if (!comms().count(comm)) return ncclInvalidArgument;
    run_all();
    comms().erase(comm);
    delete comm;
    return ncclSuccess;
}

/* May be called while another thread waits for an operation, which then ends. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    if (!comm) return ncclSuccess;
    comm->error = ncclRemoteError;
    comm->link.abort();
    const Lock lock(api_mutex());
    comms().erase(comm);
    delete comm;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    if (!comm || !error) return ncclInvalidArgument;
    *error = comm->error;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count)
{
    if (!comm || !count) return ncclInvalidArgument;
    *count = comm->ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    if (!comm || !rank) return ncclInvalidArgument;
    *rank = comm->rank;
    return ncclSuccess;
}

/* Operations are queued as they are called, in the order that all ranks share; a group changes nothing of that. */
ncclResult_t ncclGroupStart(void)
{
    groups++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    if (groups == 0) return ncclInvalidUsage;
    groups--;
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream)
{
    return queue(Kind::ALL_REDUCE, in, out, count, type, op, 0, comm, stream);
}

ncclResult_t ncclReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream)
{
    return queue(Kind::REDUCE, in, out, count, type, op, root, comm, stream);
}

ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream)
{
    return queue(Kind::BROADCAST, in, out, count, type, ncclSum, root, comm, stream);
}

ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream)
{
    return queue(Kind::ALL_GATHER, in, out, count, type, ncclSum, 0, comm, stream);
}

ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream)
{
    return queue(Kind::REDUCE_SCATTER, in, out, count, type, op, 0, comm, stream);
}

} // extern "C"
