/* What the inline code of the emulator's headers sees of a running block: one Thread a CUDA thread, and the calls that
 * meet other threads. The calls stand in block.cpp and warp.cpp, which are compiled without sanitizers: the exchange of
 * data inside them is no race of the kernel. */
#ifndef MTP_EMU_BLOCK_H
#define MTP_EMU_BLOCK_H

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace emu
{

constexpr unsigned WARP = 32;
constexpr unsigned WORDS = 6; /* 64-bit words that a lane gives to a collective, or gets */

struct Block; /* scheduler.h */
struct Copy;  /* copies.cpp: cp.async of a thread that has not happened yet */

struct Thread {
    uint3 index;
    unsigned linear, lane, warp;
    Block *block;
    uint64_t in[WORDS], out[WORDS]; /* of the collective that the thread is in */
    const char *file;               /* where it waits */
    int line;
};

/* The running CUDA thread of this OS thread, and what all threads of its block share. */
struct Here {
    Thread *thread;
    uint3 block_index;
    uint3 block_dim, grid_dim;
    void *dynamic_shared;
};
extern __thread Here here __attribute__((tls_model("initial-exec")));

/* The thread meets the others; out of line, so that no compiler keeps what it knew of memory across it. */
enum class Vote { NONE, COUNT, AND, OR };
int barrier(Vote vote, int predicate, const char *file, int line);
void named_barrier(unsigned id, unsigned threads, bool wait, const char *file, int line);

/* What lanes compute together. Each lane of `mask` puts its words in thread->in; when the last one arrives, `complete`
 * runs once with the lanes' threads and fills their `out`. */
struct Collective {
    const char *name;
    void (*complete)(Thread *const *lanes, unsigned mask);
    bool orders_memory; /* __syncwarp only */
};
void collective(const Collective &what, unsigned mask, const char *file, int line);
/* The words of the running thread's next collective, and of its last one. Out of line: a block's threads lie where
 * those of the block before lay, which is no race of the kernel, so ThreadSanitizer must not see these accesses. */
void give(unsigned word, uint64_t value);
uint64_t got(unsigned word);

extern const Collective syncwarp, shuffle, ballot, match_any, match_all, reduce_add, reduce_min, reduce_max,
    reduce_min_signed, reduce_max_signed, reduce_and, reduce_or, reduce_xor, mma_bf16_16816, load_matrix,
    load_matrix_trans;

/* Static shared memory: the same place for all threads of the block that come with the same key. */
void *static_shared(const void *key, const char *name, size_t bytes, size_t align);

/* cp.async: the copy happens at the wait; until then the destination holds the poison. */
void copy_async(void *shared, const void *global, unsigned bytes, unsigned from_source, const char *file, int line);
void copy_commit();
void copy_wait(unsigned groups_left);
void copy_wait_all();

/* Reports what a kernel did wrong, with kernel, block and thread, and ends the process. */
[[noreturn]] void kernel_fault(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Does [pointer, pointer + bytes) lie in the block's shared memory / in live device memory? */
bool is_shared(const void *pointer, size_t bytes);
bool is_device(const void *pointer, size_t bytes);

template <class T>
inline void check_aligned(const T *pointer, const char *what, const char *file, int line)
{
    if (reinterpret_cast<uintptr_t>(pointer) % sizeof(T) != 0)
        kernel_fault(file, line, "misaligned %s: %zu bytes at %p", what, sizeof(T), static_cast<const void *>(pointer));
}

} // namespace emu

#define MTP_EMU_WHERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

#endif
