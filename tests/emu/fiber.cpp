/* Stacks and the switch between them. On x86-64 the switch is a dozen instructions; elsewhere, or with
 * MTP_EMU_UCONTEXT, it is swapcontext. The sanitizers are told of every switch. */
#include "emu/scheduler.h"

#include <cstdio>
#include <cstdlib>

#include <sys/mman.h>

#if !defined(__x86_64__) && !defined(MTP_EMU_UCONTEXT)
#define MTP_EMU_UCONTEXT
#endif
#ifdef MTP_EMU_UCONTEXT
#include <ucontext.h>
#endif
#ifdef MTP_EMU_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef MTP_EMU_TSAN
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *);
void __tsan_release(void *);
}
#endif

namespace emu
{

#ifdef MTP_EMU_ASAN
static constexpr size_t STACK = 256 * 1024; /* instrumented frames are larger */
#else
static constexpr size_t STACK = 128 * 1024;
#endif

#ifndef MTP_EMU_UCONTEXT
extern "C" void mtp_emu_switch(void **save, void *load);
asm(".text\n"
    ".p2align 4\n"
    ".globl mtp_emu_switch\n"
    ".hidden mtp_emu_switch\n"
    ".type mtp_emu_switch,@function\n"
    "mtp_emu_switch:\n"
    "pushq %rbp\n"
    "pushq %rbx\n"
    "pushq %r12\n"
    "pushq %r13\n"
    "pushq %r14\n"
    "pushq %r15\n"
    "movq %rsp,(%rdi)\n"
    "movq %rsi,%rsp\n"
    "popq %r15\n"
    "popq %r14\n"
    "popq %r13\n"
    "popq %r12\n"
    "popq %rbx\n"
    "popq %rbp\n"
    "ret\n"
    ".size mtp_emu_switch,.-mtp_emu_switch\n");
#endif

Fiber *fiber_create(void (*entry)())
{
    static thread_local unsigned color; /* stacks that start at different cache sets */
    void *at =
        mmap(nullptr, STACK_GUARD + STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED || mprotect(at, STACK_GUARD, PROT_NONE) != 0) {
        perror("emu: no memory for the stack of a thread");
        abort();
    }
    Fiber *fiber = new Fiber;
    fiber->stack = static_cast<char *>(at) + STACK_GUARD;
    fiber->stack_bytes = STACK;
    char *top = fiber->stack + STACK - (color++ % 31) * 192;
#ifdef MTP_EMU_UCONTEXT
    ucontext_t *context = new ucontext_t;
    getcontext(context);
    context->uc_stack.ss_sp = fiber->stack;
    context->uc_stack.ss_size = static_cast<size_t>(top - fiber->stack) & ~static_cast<size_t>(63);
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    fiber->context = context;
#else
    void **sp = reinterpret_cast<void **>(top);
    *--sp = nullptr; /* where entry would return to; it never does */
    *--sp = reinterpret_cast<void *>(entry);
    fiber->context = sp - 6;
    for (int i = 1; i <= 6; i++) sp[-i] = nullptr;
#endif
#ifdef MTP_EMU_TSAN
    fiber->tsan = __tsan_create_fiber(0);
#endif
    return fiber;
}

static void arrived(Fiber *self, void *fake_stack)
{
#ifdef MTP_EMU_ASAN
    const void *bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(fake_stack, &bottom, &bytes);
    self->from->stack = static_cast<char *>(const_cast<void *>(bottom));
    self->from->stack_bytes = bytes;
#else
    (void)self, (void)fake_stack;
#endif
}

void fiber_entered(Fiber *self)
{
    arrived(self, nullptr);
}

void fiber_switch(Fiber *from, Fiber *to)
{
    to->from = from;
#ifdef MTP_EMU_ASAN
    __sanitizer_start_switch_fiber(&from->asan, to->stack, to->stack_bytes);
#endif
#ifdef MTP_EMU_TSAN
    if (!from->tsan) from->tsan = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(to->tsan, 1);
#endif
#ifdef MTP_EMU_UCONTEXT
    if (!from->context) from->context = new ucontext_t;
    swapcontext(static_cast<ucontext_t *>(from->context), static_cast<ucontext_t *>(to->context));
#else
    mtp_emu_switch(&from->context, to->context);
#endif
    arrived(from, from->asan);
}

void tsan_release(void *tag)
{
#ifdef MTP_EMU_TSAN
    __tsan_release(tag);
#else
    (void)tag;
#endif
}

void tsan_acquire(void *tag)
{
#ifdef MTP_EMU_TSAN
    __tsan_acquire(tag);
#else
    (void)tag;
#endif
}

} // namespace emu
