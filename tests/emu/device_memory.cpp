#include "emu/device_memory.h"
#include "emu/block.h"
#include "emu/fault.h"
#include "emu/profile.h"

#include <cstdlib>
#include <map>
#include <mutex>

#include <sys/mman.h>
#ifdef MTP_EMU_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace emu
{

static constexpr size_t PAGE = 4096, RANGE = size_t(256) << 30;
/* From here on only the ends of an allocation are closed to the host: changing every page of it costs more than running
 * small kernels. */
static constexpr size_t LARGE = size_t(4) << 20, ENDS = 64 * 1024, HUGE_PAGE = size_t(2) << 20;

struct Allocation {
    char *at; /* what the caller has: the end lies against the page behind, as far as 256 bytes allow */
    size_t bytes;
    char *pages;
    size_t page_bytes; /* without the page behind, which is never memory */
    unsigned serial;
    bool live;
};

static std::mutex mutex;
static char *range, *range_next;
static size_t used;
static unsigned serials, opened;
static std::map<uintptr_t, Allocation> &allocations() /* by the address of their first page, dead ones too */
{
    static auto *map = new std::map<uintptr_t, Allocation>;
    return *map;
}
static std::map<uintptr_t, size_t> &pinned()
{
    static auto *map = new std::map<uintptr_t, size_t>;
    return *map;
}

static uintptr_t number(const void *pointer)
{
    return reinterpret_cast<uintptr_t>(pointer);
}

static Allocation *find(const void *pointer)
{
    auto after = allocations().upper_bound(number(pointer));
    if (after == allocations().begin()) return nullptr;
    return &std::prev(after)->second;
}

static void protect(const Allocation &a, int access)
{
    if (a.page_bytes < LARGE) {
        mprotect(a.pages, a.page_bytes, access);
    } else {
        mprotect(a.pages, ENDS, access);
        mprotect(a.pages + a.page_bytes - ENDS, ENDS, access);
    }
}

/* An address is never given twice, so that use after free shows. */
void *device_allocate(size_t bytes)
{
    std::lock_guard<std::mutex> lock(mutex);
    if (!range) {
        void *at = mmap(nullptr, RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) {
            perror("emu: no address range for device memory");
            abort();
        }
        range = range_next = static_cast<char *>(at);
    }
    const size_t pages = (bytes + PAGE - 1) / PAGE * PAGE;
    if (pages >= LARGE) /* on huge pages, where the system has them */
        range_next += (HUGE_PAGE - number(range_next) % HUGE_PAGE) % HUGE_PAGE;
    if (pages + used > options().memory_bytes || range_next + pages + PAGE > range + RANGE) return nullptr;
    Allocation a = {range_next + (pages - (bytes + 255) / 256 * 256), bytes, range_next, pages, ++serials, true};
    range_next += pages + PAGE;
    used += pages;
    mprotect(a.pages, pages, PROT_READ | PROT_WRITE);
    if (pages >= LARGE) madvise(a.pages, pages, MADV_HUGEPAGE);
    memset(a.pages, 0xff, pages);
#ifdef MTP_EMU_ASAN
    ASAN_POISON_MEMORY_REGION(a.pages, pages);
    ASAN_UNPOISON_MEMORY_REGION(a.at, bytes);
#endif
    if (!opened) protect(a, PROT_NONE);
    allocations()[number(a.pages)] = a;
    return a.at;
}

bool device_free(void *pointer)
{
    std::lock_guard<std::mutex> lock(mutex);
    Allocation *a = find(pointer);
    if (!a || a->at != pointer || !a->live) return false;
    a->live = false;
    used -= a->page_bytes;
    madvise(a->pages, a->page_bytes, MADV_DONTNEED);
    mprotect(a->pages, a->page_bytes, PROT_NONE);
    return true;
}

size_t device_memory_used()
{
    std::lock_guard<std::mutex> lock(mutex);
    return used;
}

static void protect_all(int access)
{
    for (const auto &entry : allocations())
        if (entry.second.live) protect(entry.second, access);
}

DeviceOpen::DeviceOpen()
{
    std::lock_guard<std::mutex> lock(mutex);
    if (opened++ == 0) protect_all(PROT_READ | PROT_WRITE);
}

DeviceOpen::~DeviceOpen()
{
    std::lock_guard<std::mutex> lock(mutex);
    if (--opened == 0) protect_all(PROT_NONE);
}

bool device_address(const void *pointer)
{
    return range && pointer >= range && pointer < range + RANGE;
}

bool is_device(const void *pointer, size_t bytes)
{
    if (!device_address(pointer)) return false;
    std::lock_guard<std::mutex> lock(mutex);
    const Allocation *a = find(pointer);
    return a && a->live && pointer >= a->at && static_cast<const char *>(pointer) + bytes <= a->at + a->bytes;
}

void device_describe(const void *pointer, char *text, size_t bytes)
{
    const char *at = static_cast<const char *>(pointer);
    const Allocation *a = find(pointer);
    if (!a)
        snprintf(text, bytes, "an address before all of device memory");
    else if (at >= a->at + a->bytes)
        snprintf(text, bytes, "%td bytes behind the end of device allocation %u of %zu bytes%s",
                 at - (a->at + a->bytes), a->serial, a->bytes, a->live ? "" : ", which was freed");
    else if (at < a->at)
        snprintf(text, bytes, "%td bytes before the start of device allocation %u of %zu bytes%s", a->at - at,
                 a->serial, a->bytes, a->live ? "" : ", which was freed");
    else
        snprintf(text, bytes, "byte %td of device allocation %u of %zu bytes%s", at - a->at, a->serial, a->bytes,
                 a->live ? "" : ", which was freed");
}

/* ---- pinned host memory ------------------------------------------------------------------------------------------ */

void *pinned_allocate(size_t bytes)
{
    void *at = nullptr;
    if (posix_memalign(&at, PAGE, bytes ? bytes : 1) != 0) return nullptr;
    pinned_register(at, bytes);
    return at;
}

bool pinned_free(void *pointer)
{
    if (!pinned_unregister(pointer)) return false;
    free(pointer);
    return true;
}

bool pinned_register(void *pointer, size_t bytes)
{
    std::lock_guard<std::mutex> lock(mutex);
    return pinned().emplace(number(pointer), bytes).second;
}

bool pinned_unregister(void *pointer)
{
    std::lock_guard<std::mutex> lock(mutex);
    return pinned().erase(number(pointer)) == 1;
}

bool is_pinned(const void *pointer)
{
    std::lock_guard<std::mutex> lock(mutex);
    auto after = pinned().upper_bound(number(pointer));
    if (after == pinned().begin()) return false;
    --after;
    return number(pointer) < after->first + after->second;
}

size_t device_leaks(FILE *out)
{
    std::lock_guard<std::mutex> lock(mutex);
    size_t leaks = 0;
    for (const auto &entry : allocations()) {
        const Allocation &a = entry.second;
        if (a.live && ++leaks <= 8) fprintf(out, "emu:     device allocation %u of %zu bytes\n", a.serial, a.bytes);
    }
    return leaks;
}

} // namespace emu
