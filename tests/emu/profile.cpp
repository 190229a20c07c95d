#include "emu/profile.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emu
{

/* CUDA C++ Programming Guide, technical specifications per compute capability. */
static const Profile PROFILES[] = {
    {"sm_80", 8, 0, 48 << 10, 163 << 10, 164 << 10, 2048, 32, 108, 40 << 20},
    {"sm_86", 8, 6, 48 << 10, 99 << 10, 100 << 10, 1536, 16, 84, 6 << 20},
    {"sm_90", 9, 0, 48 << 10, 227 << 10, 228 << 10, 2048, 32, 132, 50 << 20},
    {"sm_100", 10, 0, 48 << 10, 227 << 10, 228 << 10, 2048, 32, 148, 126 << 20},
    {"sm_120", 12, 0, 48 << 10, 99 << 10, 100 << 10, 1536, 24, 170, 96 << 20},
};

static const Profile *find()
{
    const char *name = getenv("MTP_EMU_DEVICE");
    if (!name || !*name) return &PROFILES[0];
    for (const Profile &one : PROFILES)
        if (strcmp(one.name, name) == 0) return &one;
    fprintf(stderr, "emu: MTP_EMU_DEVICE is '%s'; known: sm_80, sm_86, sm_90, sm_100, sm_120\n", name);
    exit(2);
}

const Profile &profile()
{
    static const Profile *const chosen = find();
    return *chosen;
}

static uint64_t number(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    if (!text || !*text) return otherwise;
    char *end;
    const unsigned long long value = strtoull(text, &end, 10);
    if (*end) {
        fprintf(stderr, "emu: %s is '%s'; a number is meant\n", name, text);
        exit(2);
    }
    return value;
}

Options &options()
{
    static Options given = {number("MTP_EMU_SEED", 0), static_cast<unsigned>(number("MTP_EMU_THREADS", 1)),
                            static_cast<size_t>(number("MTP_EMU_MEMORY", 16384)) << 20};
    return given;
}

} // namespace emu
