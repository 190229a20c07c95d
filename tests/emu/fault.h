/* Reports of the emulator: what a kernel or the host did wrong, to stderr, then abort(). */
#ifndef MTP_EMU_FAULT_H
#define MTP_EMU_FAULT_H

namespace emu
{

/* A report of more than one line: begin names kernel, block and thread, if one runs; end does not return. */
void fault_begin(const char *format, ...) __attribute__((format(printf, 1, 2)));
void fault_line(const char *format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fault_end();

/* Of one line, by the host. */
[[noreturn]] void host_fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* SIGSEGV and SIGBUS are explained; an alternate stack for the calling thread. Once a thread. */
void fault_watch();

} // namespace emu

#endif
