/* The shared memory of a block. Filled with 0xff before every block (NaN as a floating-point number, -1 as an integer):
 * who reads what nobody wrote, sees it. The zones between the variables are poisoned for AddressSanitizer; in every
 * build they hold a pattern, and a write there is found when the block ends; the page behind the end is no memory. */
#include "emu/fault.h"
#include "emu/profile.h"
#include "emu/scheduler.h"

#include <cstdio>
#include <cstdlib>

#include <sys/mman.h>
#ifdef MTP_EMU_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace emu
{

static constexpr size_t PAGE = 4096, ZONE = 64, MOST = 256 * 1024, SLOT = PAGE + MOST + PAGE;
#ifdef MTP_EMU_TSAN
static constexpr size_t SLOTS = 256; /* a block gets memory that no earlier block has touched */
#else
static constexpr size_t SLOTS = 1;
#endif
static constexpr unsigned char PATTERN = 0xa5;

static void map_region(SharedMemory &shared)
{
    if (shared.region) munmap(shared.region, SLOT * SLOTS);
    void *at = mmap(shared.region, SLOT * SLOTS, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (shared.region ? MAP_FIXED : 0), -1, 0);
    if (at == MAP_FAILED) {
        perror("emu: no memory for shared memory");
        abort();
    }
    shared.region = static_cast<char *>(at);
    for (size_t i = 0; i < SLOTS; i++) mprotect(shared.region + i * SLOT + PAGE + MOST, PAGE, PROT_NONE);
    shared.slot = 0;
}

static void poison(const void *at, size_t bytes)
{
#ifdef MTP_EMU_ASAN
    __asan_poison_memory_region(at, bytes); /* the macro does nothing in a file that is not instrumented */
#else
    (void)at, (void)bytes;
#endif
}

static void unpoison(const void *at, size_t bytes)
{
#ifdef MTP_EMU_ASAN
    __asan_unpoison_memory_region(at, bytes);
#else
    (void)at, (void)bytes;
#endif
}

void shared_begin(SharedMemory &shared, size_t dynamic_bytes)
{
    if (!shared.region || (SLOTS > 1 && ++shared.slot == SLOTS)) map_region(shared);
    shared.tags = shared.region + shared.slot * SLOT;
    shared.base = shared.tags + PAGE;
    shared.end = shared.base + MOST;
    shared.slots.clear();
    shared.static_bytes = 0;
    shared.top = shared.base + ZONE;
    memset(shared.base, PATTERN, ZONE);
    shared.dynamic_bytes = dynamic_bytes;
    /* 1024: what the widest swizzled layouts ask for is there only if the size is a multiple of it */
    const size_t align = dynamic_bytes % 1024 == 0 ? 1024 : 128;
    shared.dynamic = shared.end - (dynamic_bytes + align - 1) / align * align;
    if (dynamic_bytes == 0) {
        shared.dynamic = shared.end;
    } else {
        memset(shared.dynamic, 0xff, dynamic_bytes);
        memset(shared.dynamic + dynamic_bytes, PATTERN,
               static_cast<size_t>(shared.end - shared.dynamic) - dynamic_bytes);
    }
    memset(shared.dynamic - ZONE, PATTERN, ZONE);
    poison(shared.base, MOST);
    unpoison(shared.dynamic, dynamic_bytes);
}

void *static_shared(const void *key, const char *name, size_t bytes, size_t align)
{
    SharedMemory &shared = here.thread->block->shared;
    for (const SharedSlot &slot : shared.slots)
        if (slot.key == key) return slot.at;
    shared.static_bytes = (shared.static_bytes + align - 1) / align * align + bytes;
    const size_t most = profile().shared_static;
    if (shared.static_bytes > most)
        kernel_fault(nullptr, 0, "static shared memory: %zu bytes with `%s`, a kernel may have %zu",
                     shared.static_bytes, name, most);
    const size_t all = shared.static_bytes + shared.dynamic_bytes;
    if (all > profile().shared_optin)
        kernel_fault(nullptr, 0, "shared memory: %zu bytes static (with `%s`) and %zu dynamic, %s has %zu a block",
                     shared.static_bytes, name, shared.dynamic_bytes, profile().name, profile().shared_optin);
    if (align < 16) align = 16;
    char *at = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(shared.top) + align - 1) / align * align);
    unpoison(at, bytes);
    memset(shared.top, PATTERN, static_cast<size_t>(at - shared.top));
    memset(at, 0xff, bytes);
    memset(at + bytes, PATTERN, ZONE);
    poison(at + bytes, ZONE);
    shared.top = at + bytes + ZONE;
    shared.slots.push_back({key, at, bytes});
    return at;
}

static void look(SharedMemory &shared, const char *from, const char *to)
{
    for (const char *at = from; at < to; at++) {
        if (static_cast<unsigned char>(*at) == PATTERN) continue;
        fault_begin("out of bounds: a write to shared memory outside of its variables, found when the block ended");
        for (const SharedSlot &slot : shared.slots)
            if (at >= slot.at - ZONE && at < slot.at + slot.bytes + ZONE)
                fault_line("%td bytes from the start of a static variable of %zu bytes", at - slot.at, slot.bytes);
        if (shared.dynamic_bytes && at >= shared.dynamic - ZONE)
            fault_line("%td bytes from the start of the %zu bytes of dynamic shared memory", at - shared.dynamic,
                       shared.dynamic_bytes);
        fault_end();
    }
}

void shared_end(SharedMemory &shared)
{
    unpoison(shared.base, MOST);
    const char *from = shared.base;
    for (const SharedSlot &slot : shared.slots) {
        look(shared, from, slot.at);
        from = slot.at + slot.bytes;
    }
    look(shared, from, shared.top);
    look(shared, shared.dynamic - ZONE, shared.dynamic);
    if (shared.dynamic_bytes) look(shared, shared.dynamic + shared.dynamic_bytes, shared.end);
}

bool shared_guard(const SharedMemory &shared, const void *address)
{
    return address >= shared.end && address < shared.end + PAGE;
}

bool is_shared(const void *pointer, size_t bytes)
{
    const SharedMemory &shared = here.thread->block->shared;
    const char *at = static_cast<const char *>(pointer);
    if (at >= shared.dynamic && at + bytes <= shared.dynamic + shared.dynamic_bytes) return true;
    for (const SharedSlot &slot : shared.slots)
        if (at >= slot.at && at + bytes <= slot.at + slot.bytes) return true;
    return false;
}

} // namespace emu
