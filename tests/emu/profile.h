/* The device that the emulator stands for: MTP_EMU_DEVICE, sm_80 if it is not set. */
#ifndef MTP_EMU_PROFILE_H
#define MTP_EMU_PROFILE_H

#include <cstddef>
#include <cstdint>

namespace emu
{

struct Profile {
    const char *name;
    int major, minor;
    size_t shared_static;    /* bytes of shared memory that a block has without asking */
    size_t shared_optin;     /* and with cudaFuncAttributeMaxDynamicSharedMemorySize */
    size_t shared_processor; /* of a multiprocessor */
    int threads_processor, blocks_processor;
    int processors;
    int l2_bytes;
};
const Profile &profile();

/* MTP_EMU_SEED: 0 natural order of blocks and threads, else permuted. MTP_EMU_THREADS: blocks in parallel.
 * MTP_EMU_MEMORY: MiB of device memory (16384). */
struct Options {
    uint64_t seed;
    unsigned workers;
    size_t memory_bytes;
};
Options &options();

} // namespace emu

#endif
