/* All blocks of a launch: one after the other, or on several OS threads (MTP_EMU_THREADS); in natural order or permuted
 * (MTP_EMU_SEED). A kernel whose result depends on either is wrong. */
#include "emu/fault.h"
#include "emu/profile.h"
#include "emu/scheduler.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

namespace emu
{

struct Plan {
    const Launch *launch;
    std::vector<uint64_t> order; /* empty: the natural one */
    uint64_t blocks, seed;
    std::atomic<uint64_t> next{0};
};

/* Blocks that do not run, with their fibers. */
static std::mutex pool_mutex;
static std::vector<Block *> &pool()
{
    static auto *blocks = new std::vector<Block *>;
    return *blocks;
}

static Block *take_block()
{
    const std::lock_guard<std::mutex> lock(pool_mutex);
    if (pool().empty()) return new Block;
    Block *block = pool().back();
    pool().pop_back();
    return block;
}

static void give_block(Block *block)
{
    const std::lock_guard<std::mutex> lock(pool_mutex);
    pool().push_back(block);
}

static void run_blocks(Plan &plan)
{
    fault_watch();
    Block &block = *take_block();
    block.main.tsan = nullptr; /* another OS thread may have been the last one to run it */
    const dim3 grid = plan.launch->grid;
    block_prepare(block, *plan.launch, plan.seed);
    for (uint64_t i; (i = plan.next.fetch_add(1)) < plan.blocks;) {
        const uint64_t b = plan.order.empty() ? i : plan.order[i];
        block_run(block, make_uint3(static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                                    static_cast<unsigned>(b / grid.x / grid.y)));
    }
    give_block(&block);
}

void grid_run(const Launch &launch)
{
    static uint64_t launches;
    Plan plan;
    plan.launch = &launch;
    plan.blocks = static_cast<uint64_t>(launch.grid.x) * launch.grid.y * launch.grid.z;
    uint64_t seed = options().seed;
    if (seed) {
        seed += 1000003 * ++launches;
        plan.order.resize(plan.blocks);
        for (uint64_t i = 0; i < plan.blocks; i++) plan.order[i] = i;
        for (uint64_t i = plan.blocks - 1; i > 0; i--) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            std::swap(plan.order[i], plan.order[(seed >> 33) % (i + 1)]);
        }
        seed |= 1;
    }
    plan.seed = seed;
    const unsigned workers = static_cast<unsigned>(std::min<uint64_t>(options().workers, plan.blocks));
    std::vector<std::thread> others;
    for (unsigned i = 1; i < workers; i++) others.emplace_back([&] { run_blocks(plan); });
    run_blocks(plan);
    for (std::thread &other : others) other.join();
    tsan_acquire(end_tag);
}

} // namespace emu
