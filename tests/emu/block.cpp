/* Runs the threads of one block: who starts, who waits, barriers. */
#include "emu/fault.h"
#include "emu/scheduler.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace emu
{

__thread Here here;
static __thread Block *current __attribute__((tls_model("initial-exec")));

void TaskList::push(Task *task)
{
    task->next = nullptr;
    if (last)
        last->next = task;
    else
        first = task;
    last = task;
}

Task *TaskList::pop()
{
    Task *task = first;
    if (task) {
        first = task->next;
        if (!first) last = nullptr;
    }
    return task;
}

void TaskList::append(TaskList &other)
{
    if (!other.first) return;
    if (last)
        last->next = other.first;
    else
        first = other.first;
    last = other.last;
    other.first = other.last = nullptr;
}

/* ---- fibers of the block ----------------------------------------------------------------------------------------- */

static void run_tasks();

static void give_back(Block &block, Fiber *fiber)
{
#ifdef MTP_EMU_TSAN
    /* Last in, last out: a thread of the next block is not the same fiber, so that races between blocks show. */
    fiber->next = nullptr;
    if (block.free_last)
        block.free_last->next = fiber;
    else
        block.free_first = fiber;
    block.free_last = fiber;
#else
    fiber->next = block.free_first; /* the one whose stack is in the cache */
    block.free_first = fiber;
#endif
}

static Fiber *take_free(Block &block)
{
#ifdef MTP_EMU_TSAN
    while (block.fibers < block.threads + 7) {
        give_back(block, fiber_create(run_tasks));
        block.fibers++;
    }
#endif
    Fiber *fiber = block.free_first;
    if (!fiber) {
        block.fibers++;
        return fiber_create(run_tasks);
    }
    block.free_first = fiber->next;
    if (!block.free_first) block.free_last = nullptr;
    return fiber;
}

[[noreturn]] static void stuck(Block &block)
{
    fault_begin("the block is stuck: a barrier or a collective is not reached by all threads that must");
    unsigned left = block.threads;
    for (unsigned i = 0; i < block.threads; i++) { /* one line for all that wait at the same place */
        const Task &task = block.tasks[i];
        if (task.done) continue;
        unsigned same = 0;
        bool told = false;
        for (unsigned j = 0; j < block.threads; j++) {
            const Task &other = block.tasks[j];
            if (other.done || other.line != task.line || other.waits_for != task.waits_for) continue;
            if (j < i) told = true;
            same++;
        }
        if (told) continue;
        fault_line("%u threads wait in %s at %s:%d, the first of them is thread %u", same, task.waits_for, task.file,
                   task.line, task.linear);
        left -= same;
    }
    fault_line("%u threads have ended", left);
    fault_end();
}

/* The running fiber has nothing to do: runs someone else. */
static void leave(Block &block, Fiber *self)
{
    Fiber *to;
    if (Task *task = block.ready.pop()) {
        here.thread = task;
        to = task->fiber;
    } else if (block.started < block.threads) {
        to = take_free(block);
    } else if (block.live == 0) {
        to = &block.main;
    } else {
        stuck(block);
    }
    if (to == self) return;
    block.running = to;
    fiber_switch(self, to);
}

void wait_here(Block &block, const char *what, const char *file, int line)
{
    Task &task = me();
    task.waits_for = what;
    task.file = file;
    task.line = line;
    leave(block, task.fiber);
    here.thread = &task;
    task.waits_for = nullptr;
}

/* ---- barriers ---------------------------------------------------------------------------------------------------- */

/* For ThreadSanitizer. Two tags in turn: who is still on its way out of a barrier must not see what others did since,
 * on their way to the next one. */
static void *tag_of(Block &block, unsigned id)
{
    return block.shared.tags + 8 * (2 * id + block.barriers[id].generation % 2);
}

static void release(Block &block, Barrier &barrier)
{
    barrier.result = barrier.vote == Vote::COUNT ? static_cast<int>(barrier.count)
                     : barrier.vote == Vote::AND ? barrier.count == barrier.arrived
                                                 : barrier.count != 0;
    barrier.arrived = barrier.count = 0;
    barrier.generation++;
    block.ready.append(barrier.waiting);
}

int barrier(Vote vote, int predicate, const char *file, int line)
{
    Block &block = *here.thread->block;
    Barrier &barrier = block.barriers[0];
    if (barrier.arrived == 0) {
        barrier.vote = vote;
        barrier.file = file;
        barrier.line = line;
    } else if (barrier.line != line || (barrier.file != file && strcmp(barrier.file, file) != 0)) {
        kernel_fault(file, line,
                     "divergent barrier: %u threads of the block wait in __syncthreads at %s:%d, this one in another",
                     barrier.arrived, barrier.file, barrier.line);
    }
    void *tag = tag_of(block, 0);
    tsan_release(tag);
    barrier.arrived++;
    barrier.count += predicate != 0;
    if (barrier.arrived == block.live) {
        release(block, barrier);
    } else {
        barrier.waiting.push(&me());
        wait_here(block, "__syncthreads", file, line);
    }
    tsan_acquire(tag);
    return barrier.result;
}

void named_barrier(unsigned id, unsigned threads, bool wait, const char *file, int line)
{
    Block &block = *here.thread->block;
    if (id >= BARRIERS) kernel_fault(file, line, "named barrier %u: a block has barriers 0 to 15", id);
    if (threads == 0 || threads % WARP != 0 || threads > (block.threads + WARP - 1) / WARP * WARP)
        kernel_fault(file, line, "named barrier %u for %u threads: a multiple of 32 up to the block's %u is meant", id,
                     threads, block.threads);
    Barrier &barrier = block.barriers[id];
    if (barrier.arrived == 0) {
        barrier.expected = threads;
        barrier.vote = Vote::NONE;
    } else if (barrier.expected != threads) {
        kernel_fault(file, line, "named barrier %u: this thread says %u threads, an earlier one %u", id, threads,
                     barrier.expected);
    }
    void *tag = tag_of(block, id);
    tsan_release(tag);
    barrier.arrived++;
    if (barrier.arrived == threads) {
        release(block, barrier);
    } else if (wait) {
        barrier.waiting.push(&me());
        wait_here(block, "a named barrier", file, line);
    }
    if (wait) tsan_acquire(tag);
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

char end_tag[8]; /* what the threads of a launch did happens before what follows it */

static void finish(Block &block, Task &task)
{
    copies_thread_exits(task);
    task.done = true;
    block.live--;
    warp_thread_exits(block, task);
    Barrier &barrier = block.barriers[0]; /* threads that have ended are not waited for */
    if (barrier.arrived && barrier.arrived == block.live) release(block, barrier);
    tsan_release(end_tag);
}

/* A fiber may go on in another OS thread, in the next launch; so what is local to the thread is looked up anew. */
static __attribute__((noinline)) Block &current_block()
{
    asm volatile("" ::: "memory");
    return *current;
}

static __attribute__((noinline)) void set_here(Task &task)
{
    asm volatile("" ::: "memory");
    here.thread = &task;
}

/* What a fiber does: threads of the block, one after the other. */
static void run_tasks()
{
    fiber_entered(current_block().running);
    for (;;) {
        Block &block = current_block();
        Fiber *self = block.running;
        Task &task = block.tasks[block.order[block.started++]];
        task.fiber = self;
        set_here(task);
        tsan_acquire(block.shared.tags + START_TAG);
        block.launch->call->run();
        finish(block, task);
#ifndef MTP_EMU_TSAN
        if (!block.ready.first && block.started < block.threads) continue;
#endif
        give_back(block, self);
        leave(block, self);
    }
}

void block_prepare(Block &block, const Launch &launch, uint64_t seed)
{
    const unsigned n = launch.block.x * launch.block.y * launch.block.z;
    if (!block.tasks) {
        block.tasks = new Task[MAX_THREADS]();
        block.order = new unsigned[MAX_THREADS];
    }
    block.launch = &launch;
    block.threads = n;
    for (unsigned i = 0; i < n; i++) {
        Task &task = block.tasks[i];
        task.index =
            make_uint3(i % launch.block.x, i / launch.block.x % launch.block.y, i / (launch.block.x * launch.block.y));
        task.linear = i;
        task.lane = i % WARP;
        task.warp = i / WARP;
        task.block = &block;
        block.order[i] = i;
    }
    if (seed == 0) return;
    for (unsigned i = n - 1; i > 0; i--) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        std::swap(block.order[i], block.order[(seed >> 33) % (i + 1)]);
    }
}

void block_run(Block &block, uint3 index)
{
    const Launch &launch = *block.launch;
    current = &block;
    block.started = 0;
    block.live = block.threads;
    for (Barrier &barrier : block.barriers) barrier = Barrier();
    for (unsigned w = 0; w * WARP < block.threads; w++) {
        const unsigned lanes = std::min(WARP, block.threads - w * WARP);
        block.warps[w].live = lanes == WARP ? ~0u : (1u << lanes) - 1;
        for (Meeting &meeting : block.warps[w].meetings) meeting.arrived = meeting.generation = 0;
    }
    for (unsigned i = 0; i < block.threads; i++) {
        block.tasks[i].done = false;
        block.tasks[i].waits_for = nullptr;
    }
    shared_begin(block.shared, launch.shared);
    here.block_index = index;
    here.block_dim = make_uint3(launch.block.x, launch.block.y, launch.block.z);
    here.grid_dim = make_uint3(launch.grid.x, launch.grid.y, launch.grid.z);
    here.dynamic_shared = block.shared.dynamic;
    tsan_release(block.shared.tags + START_TAG);
    Fiber *first = take_free(block);
    block.running = first;
    fiber_switch(&block.main, first);
    here.thread = nullptr;
    shared_end(block.shared);
}

} // namespace emu
