/* Protects: collectives of NCCL's twin between processes against plain loops, in place and not, in the order of the
 * stream; a rank that is gone, and calls that do not fit together, are reported. */
#include "emu/testing.h"

#include <cerrno>
#include <cstdio>

#include <nccl.h>
#include <sys/wait.h>
#include <unistd.h>

/* In the ranks, which are processes without a test frame: says where, and ends. */
#define need(condition)                                                             \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            _exit(1);                                                               \
        }                                                                           \
    } while (0)

struct Rank {
    int rank, ranks;
    ncclComm_t comm;
    cudaStream_t stream;
};

/* Runs body in every rank; the exit statuses. */
template <class F>
static std::vector<int> in_ranks(int ranks, F body)
{
    ncclUniqueId id;
    std::vector<pid_t> children;
    std::vector<int> statuses;
    assert_int_equal(ncclGetUniqueId(&id), ncclSuccess);
    for (int rank = 0; rank < ranks; rank++) {
        const pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            Rank me = {rank, ranks, nullptr, nullptr};
            need(cudaStreamCreateWithFlags(&me.stream, cudaStreamNonBlocking) == cudaSuccess);
            need(ncclCommInitRank(&me.comm, ranks, id, rank) == ncclSuccess);
            body(me);
            need(ncclCommDestroy(me.comm) == ncclSuccess);
            need(cudaStreamDestroy(me.stream) == cudaSuccess);
            _exit(0);
        }
        children.push_back(child);
    }
    for (pid_t child : children) {
        int status = 0;
        while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
        }
        statuses.push_back(status);
    }
    return statuses;
}

static float *upload(const std::vector<float> &values)
{
    float *data = nullptr;
    need(cudaMalloc(reinterpret_cast<void **>(&data), values.size() * sizeof(float)) == cudaSuccess);
    need(cudaMemcpy(data, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice) == cudaSuccess);
    return data;
}

static std::vector<float> download(const float *data, size_t n, const Rank &me)
{
    std::vector<float> values(n);
    need(cudaMemcpyAsync(values.data(), data, n * sizeof(float), cudaMemcpyDeviceToHost, me.stream) == cudaSuccess);
    need(cudaStreamSynchronize(me.stream) == cudaSuccess);
    return values;
}

static std::vector<float> part(int rank)
{
    return numbers(1000, 10u + static_cast<unsigned>(rank));
}

static void all_good(const std::vector<int> &statuses)
{
    for (int status : statuses) assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void reductions(const Rank &me)
{
    float *in = upload(part(me.rank)), *out = upload(std::vector<float>(1000, 0.0f));
    need(ncclGroupStart() == ncclSuccess);
    need(ncclAllReduce(in, out, 1000, ncclFloat32, ncclSum, me.comm, me.stream) == ncclSuccess);
    need(ncclAllReduce(out, out, 500, ncclFloat32, ncclMax, me.comm, me.stream) == ncclSuccess);
    need(ncclGroupEnd() == ncclSuccess);
    std::vector<float> got = download(out, 1000, me);
    for (size_t i = 0; i < 1000; i++) {
        float sum = 0.0f;
        for (int rank = 0; rank < me.ranks; rank++) sum = rank ? sum + part(rank)[i] : part(rank)[i];
        need(got[i] == sum);
    }
    need(ncclReduce(in, out, 1000, ncclFloat32, ncclAvg, me.ranks - 1, me.comm, me.stream) == ncclSuccess);
    got = download(out, 1000, me);
    need(me.rank != me.ranks - 1 || got[7] != 0.0f);
    const size_t share = 1000 / static_cast<size_t>(me.ranks);
    need(ncclReduceScatter(in, out, share, ncclFloat32, ncclMin, me.comm, me.stream) == ncclSuccess);
    got = download(out, share, me);
    for (size_t i = 0; i < share; i++) {
        float least = 2.0f;
        for (int rank = 0; rank < me.ranks; rank++)
            least = fminf(least, part(rank)[static_cast<size_t>(me.rank) * share + i]);
        need(got[i] == least);
    }
    need(cudaFree(in) == cudaSuccess);
    need(cudaFree(out) == cudaSuccess);
}

static void reduce_ranks(void **)
{
    for (int ranks : {1, 2, 4}) all_good(in_ranks(ranks, reductions));
}

static void movements(const Rank &me)
{
    const size_t n = 100, all = n * static_cast<size_t>(me.ranks), own = n * static_cast<size_t>(me.rank);
    std::vector<float> mine = part(me.rank);
    float *in = upload(mine), *out = upload(std::vector<float>(all, 0.0f));
    need(ncclAllGather(in, out, n, ncclFloat32, me.comm, me.stream) == ncclSuccess);
    std::vector<float> got = download(out, all, me);
    for (size_t i = 0; i < all; i++) need(got[i] == part(static_cast<int>(i / n))[i % n]);
    need(cudaMemset(out, 0, all * sizeof(float)) == cudaSuccess);
    need(cudaMemcpy(out + own, in, n * sizeof(float), cudaMemcpyDeviceToDevice) == cudaSuccess);
    need(ncclAllGather(out + own, out, n, ncclFloat32, me.comm, me.stream) == ncclSuccess);
    got = download(out, all, me);
    for (size_t i = 0; i < all; i++) need(got[i] == part(static_cast<int>(i / n))[i % n]);
    need(ncclBroadcast(in, in, 1000, ncclFloat32, 1, me.comm, me.stream) == ncclSuccess);
    got = download(in, 1000, me);
    need(got == part(1));
    need(cudaFree(in) == cudaSuccess);
    need(cudaFree(out) == cudaSuccess);
}

static void move_between_ranks(void **)
{
    for (int ranks : {2, 3}) all_good(in_ranks(ranks, movements));
}

/* bf16: added in fp32, rounded once. */
static void halves(const Rank &me)
{
    const float value = me.rank == 0 ? 1.0f : 0.00390625f; /* 2^-8: half a unit of 1 */
    const __nv_bfloat16 x = __float2bfloat16_rn(value);
    __nv_bfloat16 got, *data = nullptr;
    need(cudaMalloc(reinterpret_cast<void **>(&data), sizeof x) == cudaSuccess);
    need(cudaMemcpy(data, &x, sizeof x, cudaMemcpyHostToDevice) == cudaSuccess);
    need(ncclAllReduce(data, data, 1, ncclBfloat16, ncclSum, me.comm, me.stream) == ncclSuccess);
    need(cudaStreamSynchronize(me.stream) == cudaSuccess);
    need(cudaMemcpy(&got, data, sizeof got, cudaMemcpyDeviceToHost) == cudaSuccess);
    need(__bfloat162float(got) == 1.015625f); /* 1 + 3 * 2^-8, rounded to even; 1 if each sum were rounded */
    need(cudaFree(data) == cudaSuccess);
}

static void sums_of_bf16(void **)
{
    all_good(in_ranks(4, halves));
}

static void rank_is_gone(void **)
{
    const std::vector<int> statuses = in_ranks(3, [](const Rank &me) {
        if (me.rank == 2) _exit(7);
        float *data = upload(part(me.rank));
        ncclResult_t error = ncclSuccess;
        need(ncclAllReduce(data, data, 1000, ncclFloat32, ncclSum, me.comm, me.stream) == ncclSuccess);
        need(cudaStreamSynchronize(me.stream) == cudaSuccess);
        need(ncclCommGetAsyncError(me.comm, &error) == ncclSuccess);
        if (me.rank == 0) need(error == ncclRemoteError);
        need(ncclCommAbort(me.comm) == ncclSuccess);
        _exit(0);
    });
    assert_true(WIFEXITED(statuses[0]) && WEXITSTATUS(statuses[0]) == 0);
    assert_true(WIFEXITED(statuses[1]) && WEXITSTATUS(statuses[1]) == 0);
    assert_int_equal(WEXITSTATUS(statuses[2]), 7);
}

static void different_calls(void **)
{
    const std::vector<int> statuses = in_ranks(2, [](const Rank &me) {
        float *data = upload(part(me.rank));
        need(ncclAllReduce(data, data, me.rank == 0 ? 10 : 11, ncclFloat32, ncclSum, me.comm, me.stream) ==
             ncclSuccess);
        need(cudaStreamSynchronize(me.stream) == cudaSuccess);
        _exit(0);
    });
    assert_false(WIFEXITED(statuses[0]) && WEXITSTATUS(statuses[0]) == 0);
}

static void refusals(void **)
{
    all_good(in_ranks(1, [](const Rank &me) {
        float *data = upload(part(0));
        ncclUniqueId id = {};
        ncclComm_t other = nullptr;
        int n = 0;
        need(ncclAllReduce(nullptr, data, 1, ncclFloat32, ncclSum, me.comm, me.stream) == ncclInvalidArgument);
        need(ncclAllReduce(data, data, 1, ncclFloat32, ncclSum, nullptr, me.stream) == ncclInvalidArgument);
        need(ncclAllReduce(data, data, 1, ncclNumTypes, ncclSum, me.comm, me.stream) == ncclInvalidArgument);
        need(ncclBroadcast(data, data, 1, ncclFloat32, 1, me.comm, me.stream) == ncclInvalidArgument);
        need(ncclAllReduce(data, data, 0, ncclFloat32, ncclSum, me.comm, me.stream) == ncclSuccess);
        need(ncclGroupEnd() == ncclInvalidUsage);
        need(ncclCommInitRank(&other, 1, id, 0) == ncclInvalidArgument);
        need(ncclCommCount(me.comm, &n) == ncclSuccess && n == 1);
        need(ncclCommUserRank(me.comm, &n) == ncclSuccess && n == 0);
        need(cudaFree(data) == cudaSuccess);
    }));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reduce_ranks), cmocka_unit_test(move_between_ranks), cmocka_unit_test(sums_of_bf16),
        cmocka_unit_test(rank_is_gone), cmocka_unit_test(different_calls),    cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
