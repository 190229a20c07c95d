/* How fast a GPU reads: a kernel that does nothing but read --kib KiB again and again, --passes times in one launch,
 * past the cache of a multiprocessor. A buffer that fits the L2 cache gives the rate of that (16384 KiB, many passes),
 * one many times larger the rate of the device's memory (1048576 KiB, one pass; --sets buffers in turn). The sum of all
 * words is checked against the host's before anything is timed; times are events around each launch, the median of
 * --repeats. */
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/device.cuh"

namespace
{

constexpr int BLOCK = 512, BLOCKS_EACH = 2; /* blocks a multiprocessor: few registers, so all of them run at once */

struct settings {
    long device = 0, kib = 16384, passes = 100, sets = 1, repeats = 20;
};

[[noreturn]] void fail(const char *what, const char *why)
{
    std::fprintf(stderr, "error: %s: %s\n", what, why);
    std::exit(1);
}

void need(cudaError_t code, const char *what)
{
    if (code != cudaSuccess) fail(what, cudaGetErrorString(code));
}

/* Every thread's sum of the words that it read; sums[i] of thread i of the grid. Two vectors are under way at a time,
 * and in every pass a block reads what another one read before. */
__global__ void __launch_bounds__(BLOCK) read_words(const uint4 *words, long long count, int passes, uint32_t *sums)
{
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    uint32_t sum = 0;
    for (int pass = 0; pass < passes; pass++) {
        const long long block = (blockIdx.x + static_cast<unsigned>(pass) * 37u) % gridDim.x;
        long long i = block * blockDim.x + threadIdx.x;
        for (; i + step < count; i += 2 * step) {
            const uint4 a = __ldcg(words + i), b = __ldcg(words + i + step);
            sum += (a.x + a.y) + (a.z + a.w) + (b.x + b.y) + (b.z + b.w);
        }
        if (i < count) {
            const uint4 a = __ldcg(words + i);
            sum += (a.x + a.y) + (a.z + a.w);
        }
    }
    sums[static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x] = sum;
}

bool parse(int count, char **words, settings &s)
{
    const struct {
        const char *name;
        long *value, least;
    } options[] = {{"--device", &s.device, 0},
                   {"--kib", &s.kib, 1},
                   {"--passes", &s.passes, 1},
                   {"--sets", &s.sets, 1},
                   {"--repeats", &s.repeats, 1}};
    for (int i = 1; i < count; i += 2) {
        bool taken = false;
        for (const auto &option : options) {
            if (i + 1 == count || std::strcmp(option.name, words[i]) != 0) continue;
            char *end;
            *option.value = std::strtol(words[i + 1], &end, 10);
            taken = end != words[i + 1] && !*end && *option.value >= option.least && *option.value <= 1L << 30;
        }
        if (!taken) return false;
    }
    return true;
}

class bench
{
  public:
    explicit bench(const settings &chosen) : s(chosen), count(chosen.kib * 64)
    {
        cudaDeviceProp prop;
        need(cudaSetDevice(static_cast<int>(s.device)), "the device");
        need(cudaGetDeviceProperties(&prop, static_cast<int>(s.device)), "the device");
        name = prop.name;
        blocks = BLOCKS_EACH * prop.multiProcessorCount;
        need(cudaMalloc(&sums, static_cast<size_t>(blocks) * BLOCK * sizeof *sums), "memory of the device");
        for (long set = 0; set < s.sets; set++) make_set(static_cast<uint32_t>(set));
    }

    ~bench()
    {
        for (uint4 *set : sets) cudaFree(set);
        cudaFree(sums);
    }

    void check()
    {
        std::vector<uint32_t> got(static_cast<size_t>(blocks) * BLOCK);
        for (size_t set = 0; set < sets.size(); set++) {
            launch(set);
            need(cudaMemcpy(got.data(), sums, got.size() * sizeof got[0], cudaMemcpyDeviceToHost), "the sums");
            uint32_t sum = 0;
            for (const uint32_t each : got) sum += each;
            if (sum != expected[set] * static_cast<uint32_t>(s.passes))
                fail("the sum of all words", "is not the host's; not timed");
        }
    }

    void report()
    {
        std::vector<float> times;
        cudaEvent_t from, to;
        need(cudaEventCreate(&from), "an event");
        need(cudaEventCreate(&to), "an event");
        for (long repeat = 0; repeat < s.repeats; repeat++) {
            float milliseconds;
            need(cudaEventRecord(from, nullptr), "an event");
            launch(static_cast<size_t>(repeat) % sets.size());
            need(cudaEventRecord(to, nullptr), "an event");
            need(cudaEventSynchronize(to), "the kernel");
            need(cudaEventElapsedTime(&milliseconds, from, to), "the time");
            times.push_back(milliseconds);
        }
        need(cudaEventDestroy(from), "an event");
        need(cudaEventDestroy(to), "an event");
        std::sort(times.begin(), times.end());
        const double seconds = 1e-3 * static_cast<double>(times[times.size() / 2]);
        const double bytes = 16.0 * static_cast<double>(count) * static_cast<double>(s.passes);
        std::printf(
            "{\"op\": \"read\", \"case\": \"%ld KiB, %ld passes, %ld sets\", \"device\": \"%s\", \"seconds\": %.9f, "
            "\"gbytes_per_second\": %.1f}\n",
            s.kib, s.passes, s.sets, name.c_str(), seconds, seconds > 0 ? 1e-9 * bytes / seconds : 0.0);
    }

  private:
    settings s;
    long long count; /* of 16-byte vectors */
    int blocks = 0;
    uint32_t *sums = nullptr;
    std::vector<uint4 *> sets;
    std::vector<uint32_t> expected;
    std::string name;

    void make_set(uint32_t seed)
    {
        std::vector<uint32_t> words(4 * static_cast<size_t>(count));
        uint32_t state = 2463534242u + seed, sum = 0;
        for (uint32_t &word : words) {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            word = state;
            sum += state;
        }
        uint4 *memory = nullptr;
        need(cudaMalloc(&memory, words.size() * sizeof words[0]), "memory of the device");
        need(cudaMemcpy(memory, words.data(), words.size() * sizeof words[0], cudaMemcpyHostToDevice), "the words");
        sets.push_back(memory);
        expected.push_back(sum);
    }

    void launch(size_t set)
    {
        need(MTP_LAUNCH(read_words, dim3(static_cast<unsigned>(blocks)), dim3(BLOCK), 0, nullptr, sets[set], count,
                        static_cast<int>(s.passes), sums),
             "the kernel");
    }
};

} // namespace

int main(int count, char **words)
{
    settings s;
    if (!parse(count, words, s)) {
        std::fprintf(stderr, "usage: %s [--device N] [--kib N] [--passes N] [--sets N] [--repeats N]\n", words[0]);
        return 2;
    }
    bench b(s);
    b.check();
    b.report();
    return 0;
}
