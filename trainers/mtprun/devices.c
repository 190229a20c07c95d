#include "devices.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>

/* nvidia0 and so on, not nvidiactl or nvidia-uvm. */
static int is_device(const char *name)
{
    static const char start[] = "nvidia";
    const char *number = name + sizeof start - 1;
    if (strncmp(name, start, sizeof start - 1) != 0 || !*number) return 0;
    return number[strspn(number, "0123456789")] == '\0';
}

static int count_visible(const char *list)
{
    int count = 0;
    for (const char *entry = list; *entry && *entry != '-'; count++) {
        entry += strcspn(entry, ",");
        if (*entry) entry++;
    }
    return count;
}

int devices_count(const char *dir)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    DIR *opened = opendir(dir);
    int count = 0;
    if (!opened) return 0;
    for (const struct dirent *entry = readdir(opened); entry; entry = readdir(opened))
        count += is_device(entry->d_name);
    closedir(opened);
    if (!list) return count;
    const int visible = count_visible(list);
    return visible < count ? visible : count;
}
