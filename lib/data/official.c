#include "data/official.h"

#include <stddef.h>

static const mtp__official official[] = {
    {"E2B", 1536, {1, 1}, false},    {"E4B", 2560, {2, 2}, false}, {"12B", 3840, {8, 1}, true},
    {"26B-A4B", 2816, {8, 2}, true}, {"31B", 5376, {16, 4}, true},
};
enum { OFFICIAL = sizeof official / sizeof *official };

const mtp__official *mtp__official_at(int64_t index)
{
    return index >= 0 && index < OFFICIAL ? &official[index] : NULL;
}

const mtp__official *mtp__official_of_size(int64_t hidden_size)
{
    for (int64_t i = 0; i < OFFICIAL; i++)
        if (official[i].hidden_size == hidden_size) return &official[i];
    return NULL;
}
