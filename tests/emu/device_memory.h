/* Device memory: pages that nobody may touch but a kernel or a copy while it runs. */
#ifndef MTP_EMU_DEVICE_MEMORY_H
#define MTP_EMU_DEVICE_MEMORY_H

#include <cstddef>
#include <cstdio>
#include <string>

namespace emu
{

void *device_allocate(size_t bytes); /* null: no memory left */
bool device_free(void *pointer);     /* false: not the start of a live allocation */
size_t device_memory_used();

/* While one lives, kernels and copies of the emulator can reach device memory. Nests. */
struct DeviceOpen {
    DeviceOpen();
    ~DeviceOpen();
    DeviceOpen(const DeviceOpen &) = delete;
    DeviceOpen &operator=(const DeviceOpen &) = delete;
};

/* Anywhere in the range of addresses that device memory has, live or not. */
bool device_address(const void *pointer);
/* "8 bytes behind the end of allocation 3 of 4096 bytes". For reports: it may run in a signal handler. */
void device_describe(const void *pointer, char *text, size_t bytes);

/* Pinned host memory. */
void *pinned_allocate(size_t bytes);
bool pinned_free(void *pointer);
bool pinned_register(void *pointer, size_t bytes);
bool pinned_unregister(void *pointer);
bool is_pinned(const void *pointer);

/* What is still allocated: how many, and a line for each of the first ones to `out`. */
size_t device_leaks(FILE *out);

} // namespace emu

#endif
