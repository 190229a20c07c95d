/* mtp devices: what can train here. */
#include <stdio.h>

#include "args.h"
#include "commands.h"
#include "mtp/context.h"
#include "program.h"

enum { MAX_DEVICES = 64 };

static void print_table(const mtp_device_entry *entries, int count)
{
    for (int i = 0; i < count; i++) {
        const mtp_device_entry *entry = &entries[i];
        printf("%-8s %s", entry->device, entry->name);
        if (entry->memory) printf(", %.1f GiB", (double)entry->memory / (1024.0 * 1024 * 1024));
        if (!entry->usable) printf("%snot usable: %s", *entry->name ? "; " : "", entry->reason);
        putchar('\n');
    }
}

int command_devices(int argc, char **argv)
{
    const args_spec spec = {.command = "mtp devices",
                            .summary =
                                "List the devices that can train here, by the names that the key `device` takes.",
                            .epilogue = "exit codes: 0 done, also when there is no GPU; 2 wrong usage\n"};
    mtp_device_entry entries[MAX_DEVICES];
    int exit_code = 0, count = 0;
    if (!args_parse(&spec, argc, argv, &exit_code)) return exit_code;
    const mtp_status status = mtp_devices_list(entries, MAX_DEVICES, &count);
    if (status == MTP_OK) print_table(entries, count < MAX_DEVICES ? count : MAX_DEVICES);
    return program_finish(status);
}
