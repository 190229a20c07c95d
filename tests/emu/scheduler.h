/* Inside the emulator: a block's threads, who of them runs, who waits for what. One Worker an OS thread that runs
 * blocks; a fiber is a stack, and goes through one CUDA thread after the other as long as none of them waits. */
#ifndef MTP_EMU_SCHEDULER_H
#define MTP_EMU_SCHEDULER_H

#include "emu/block.h"
#include "emu/launch.h"

#include <vector>

namespace emu
{

constexpr unsigned MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / WARP, BARRIERS = 16, MEETINGS = 4;
/* Bytes into the page of tags for ThreadSanitizer: barriers come first. */
constexpr size_t START_TAG = 16 * BARRIERS, WARP_TAGS = START_TAG + 8;
static_assert(WARP_TAGS + 16 * MAX_WARPS * MEETINGS <= 4096, "one page");

constexpr size_t STACK_GUARD = size_t(1) << 20; /* below a stack: no memory */

struct Fiber {
    void *context = nullptr; /* the saved stack pointer, or a ucontext_t */
    char *stack = nullptr;
    size_t stack_bytes = 0;
    void *asan = nullptr, *tsan = nullptr;
    Fiber *from = nullptr; /* whom the last switch to it came from */
    Fiber *next = nullptr; /* in the list of free ones */
};

struct Task : Thread {
    Fiber *fiber;
    Task *next; /* in a list of ready or waiting ones */
    const char *waits_for;
    bool done;
    std::vector<Copy> *copies; /* issued by cp.async, not done yet */
    unsigned commits;
};

struct TaskList {
    Task *first = nullptr, *last = nullptr;
    void push(Task *task);
    Task *pop();
    void append(TaskList &other); /* which is empty afterwards */
};

struct Barrier {
    unsigned arrived, expected; /* expected: of a named one */
    unsigned generation;        /* how often it was passed */
    unsigned count, all, any;   /* of the predicates */
    int result;
    Vote vote;
    const char *file;
    int line;
    TaskList waiting;
};

/* Lanes that are on their way to one collective. */
struct Meeting {
    const Collective *what;
    unsigned mask, arrived, generation;
    const char *file;
    int line;
    Thread *lanes[WARP];
};

struct Warp {
    unsigned live;
    Meeting meetings[MEETINGS];
};

struct SharedSlot {
    const void *key;
    char *at;
    size_t bytes;
};

/* The shared memory of the block that runs: tags for ThreadSanitizer, static variables upwards, the dynamic part at the
 * end against a page that nobody may touch. shared.cpp. */
struct SharedMemory {
    char *region = nullptr; /* of all slots */
    size_t slot = 0;        /* which is in use */
    char *tags = nullptr, *base = nullptr, *end = nullptr;
    char *dynamic = nullptr;
    size_t dynamic_bytes = 0, static_bytes = 0;
    char *top = nullptr; /* of the static part */
    std::vector<SharedSlot> slots;
};

struct Block {
    const Launch *launch = nullptr;
    unsigned threads = 0, started = 0, live = 0;
    Task *tasks = nullptr;
    unsigned *order = nullptr; /* in which the tasks start */
    TaskList ready;
    Barrier barriers[BARRIERS];
    Warp warps[MAX_WARPS];
    SharedMemory shared;
    Fiber main, *free_first = nullptr, *free_last = nullptr;
    Fiber *running = nullptr;
    unsigned fibers = 0;
};

/* fiber.cpp */
Fiber *fiber_create(void (*entry)());
void fiber_switch(Fiber *from, Fiber *to);
void fiber_entered(Fiber *self); /* first thing on a new stack */

/* block.cpp */
void block_prepare(Block &block, const Launch &launch, uint64_t seed);
void block_run(Block &block, uint3 index);
extern char end_tag[8];
void wait_here(Block &block, const char *what, const char *file, int line);

inline Task &me()
{
    return *static_cast<Task *>(here.thread);
}

/* warp.cpp */
void warp_thread_exits(Block &block, Task &task);

/* shared.cpp */
void shared_begin(SharedMemory &shared, size_t dynamic_bytes);
void shared_end(SharedMemory &shared); /* looks for writes outside of the variables */
bool shared_guard(const SharedMemory &shared, const void *address);

/* copies.cpp */
void copies_thread_exits(Task &task);

/* grid.cpp: runs all blocks. */
void grid_run(const Launch &launch);

/* Orders memory between threads for ThreadSanitizer; nothing in other builds. */
void tsan_release(void *tag);
void tsan_acquire(void *tag);

} // namespace emu

#endif
