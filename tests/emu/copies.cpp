/* cp.async. The device may copy at any time between the instruction and the wait; here it happens at the wait, and the
 * destination holds 0xff until then, so a wait that is missing or counts wrongly shows. The reads and the writes are
 * made by the thread itself: under ThreadSanitizer they are its own. */
#include "emu/scheduler.h"

namespace emu
{

struct Copy {
    char *to;
    const char *from;
    unsigned bytes, from_source; /* the rest becomes zero */
    unsigned group;              /* how many commits came before */
};

/* accesses.cpp: instrumented, so that the sanitizers see the accesses. */
void copy_bytes(char *to, const char *from, unsigned bytes, unsigned from_source);
void poison_bytes(char *to, unsigned bytes);

void copy_async(void *shared, const void *global, unsigned bytes, unsigned from_source, const char *file, int line)
{
    if (bytes != 4 && bytes != 8 && bytes != 16)
        kernel_fault(file, line, "cp.async of %u bytes: 4, 8 or 16 are possible", bytes);
    if (from_source > bytes) kernel_fault(file, line, "cp.async: %u bytes of source for %u", from_source, bytes);
    if (reinterpret_cast<uintptr_t>(shared) % bytes != 0)
        kernel_fault(file, line, "misaligned cp.async: %u bytes to %p", bytes, shared);
    if (from_source && reinterpret_cast<uintptr_t>(global) % bytes != 0)
        kernel_fault(file, line, "misaligned cp.async: %u bytes from %p", bytes, global);
    if (!is_shared(shared, bytes))
        kernel_fault(file, line, "out of bounds: cp.async of %u bytes to %p, which is not in the block's shared memory",
                     bytes, shared);
    if (from_source && !is_device(global, from_source))
        kernel_fault(file, line, "cp.async of %u bytes from %p, which is not in device memory", from_source, global);
    Task &task = me();
    if (!task.copies) task.copies = new std::vector<Copy>;
    poison_bytes(static_cast<char *>(shared), bytes);
    task.copies->push_back(
        {static_cast<char *>(shared), static_cast<const char *>(global), bytes, from_source, task.commits});
}

void copy_commit()
{
    me().commits++;
}

/* All copies of the groups before `group` happen. */
static void copy_until(Task &task, unsigned group)
{
    if (!task.copies) return;
    size_t done = 0;
    for (; done < task.copies->size() && (*task.copies)[done].group < group; done++) {
        const Copy &copy = (*task.copies)[done];
        copy_bytes(copy.to, copy.from, copy.bytes, copy.from_source);
    }
    task.copies->erase(task.copies->begin(), task.copies->begin() + static_cast<std::ptrdiff_t>(done));
}

void copy_wait(unsigned groups_left)
{
    Task &task = me();
    const unsigned committed = task.commits;
    copy_until(task, committed > groups_left ? committed - groups_left : 0);
}

void copy_wait_all()
{
    copy_until(me(), me().commits + 1);
}

void copies_thread_exits(Task &task)
{
    if (task.copies) task.copies->clear();
    task.commits = 0;
}

} // namespace emu
