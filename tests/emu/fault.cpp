#include "emu/fault.h"
#include "emu/device_memory.h"
#include "emu/scheduler.h"

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include <sys/mman.h>
#include <unistd.h>

namespace emu
{

static void say(const char *format, va_list values)
{
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
}

static void name_thread()
{
    const Thread *thread = here.thread;
    if (!thread) return;
    const uint3 b = here.block_index, t = thread->index;
    fprintf(stderr, "kernel %s, block (%u,%u,%u), thread (%u,%u,%u): ", thread->block->launch->name, b.x, b.y, b.z, t.x,
            t.y, t.z);
}

static void begin(const char *format, va_list values)
{
    fflush(stdout);
    fprintf(stderr, "emu: ");
    name_thread();
    say(format, values);
}

void fault_begin(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    begin(format, values);
    va_end(values);
}

void fault_line(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    fprintf(stderr, "emu:     ");
    say(format, values);
    va_end(values);
}

void fault_end()
{
    fflush(stderr);
    abort();
}

void host_fault(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    fflush(stdout);
    fprintf(stderr, "emu: ");
    say(format, values);
    va_end(values);
    fault_end();
}

void kernel_fault(const char *file, int line, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    begin(format, values);
    va_end(values);
    if (file) fault_line("at %s:%d", file, line);
    fault_end();
}

/* ---- signals ----------------------------------------------------------------------------------------------------- */

static std::mutex handler_mutex;
static struct sigaction before_segv, before_bus;

/* stdio in a handler: the process ends here in any case, and the fault was no fault of stdio. */
static void explain(int number, siginfo_t *info, void *context)
{
    const void *at = info->si_addr;
    const Thread *thread = here.thread;
    if (device_address(at)) {
        char where[160];
        device_describe(at, where, sizeof where);
        if (thread) kernel_fault(nullptr, 0, "out of bounds or freed: access to %s", where);
        host_fault("host code touches device memory: %s; it is reached by copies and kernels only", where);
    }
    if (thread && shared_guard(thread->block->shared, at))
        kernel_fault(nullptr, 0, "out of bounds: access %td bytes behind the end of shared memory",
                     static_cast<const char *>(at) - thread->block->shared.end);
    if (thread) {
        const Fiber *fiber = static_cast<const Task *>(thread)->fiber;
        const char *byte = static_cast<const char *>(at);
        if (byte < fiber->stack && byte >= fiber->stack - STACK_GUARD)
            kernel_fault(nullptr, 0, "the thread's local variables take more than %zu KiB of stack",
                         fiber->stack_bytes >> 10);
        if (info->si_code == SI_KERNEL)
            kernel_fault(nullptr, 0, "misaligned vector access, or an address that can be none");
        fault_begin("access to %p, which is neither device nor shared memory", at);
    }
    const struct sigaction &before = number == SIGBUS ? before_bus : before_segv;
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else {
        sigaction(number, &before, nullptr); /* the access happens again and ends the process */
    }
}

namespace
{

struct HandlerStack {
    void *at;
    static constexpr size_t BYTES = 64 * 1024;

    HandlerStack() : at(mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))
    {
        stack_t stack = {};
        stack.ss_sp = at;
        stack.ss_size = BYTES;
        if (at != MAP_FAILED) sigaltstack(&stack, nullptr);
    }
    ~HandlerStack()
    {
        stack_t none = {};
        none.ss_flags = SS_DISABLE;
        sigaltstack(&none, nullptr);
        munmap(at, BYTES);
    }
};

} // namespace

/* A test frame may have put its own handler there since the last time. */
static void take_over(int number, struct sigaction *before)
{
    struct sigaction now;
    if (sigaction(number, nullptr, &now) != 0) return;
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == explain) return;
    const std::lock_guard<std::mutex> lock(handler_mutex);
    struct sigaction action = {};
    action.sa_sigaction = explain;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    *before = now;
    sigaction(number, &action, nullptr);
}

void fault_watch()
{
    static thread_local const HandlerStack stack;
    (void)stack;
    take_over(SIGSEGV, &before_segv);
    take_over(SIGBUS, &before_bus);
}

} // namespace emu
