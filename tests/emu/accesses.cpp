/* The accesses that the emulator makes in the name of a thread: the one file of the scheduler that is instrumented. */
#include <cstring>

namespace emu
{

void copy_bytes(char *to, const char *from, unsigned bytes, unsigned from_source);
void poison_bytes(char *to, unsigned bytes);

void copy_bytes(char *to, const char *from, unsigned bytes, unsigned from_source)
{
    for (unsigned i = 0; i < from_source; i++) to[i] = from[i];
    for (unsigned i = from_source; i < bytes; i++) to[i] = 0;
}

void poison_bytes(char *to, unsigned bytes)
{
    for (unsigned i = 0; i < bytes; i++) to[i] = static_cast<char>(0xff);
}

} // namespace emu
