/* The devices of all backends: what `mtp devices` prints. */
#include <stdio.h>
#include <stdlib.h>

#include "base/backends.h"
#include "base/error.h"
#include "mtp/context.h"

enum { DEVICES_MOST = 64 };

static void add(mtp_device_entry *entries, int capacity, int *count, const char *device, const mtp_device_row *row)
{
    if (*count < capacity) {
        mtp_device_entry *entry = &entries[*count];
        *entry = (mtp_device_entry){.memory = row->memory, .usable = row->usable};
        snprintf(entry->device, sizeof entry->device, "%s", device);
        snprintf(entry->name, sizeof entry->name, "%s", row->name);
        snprintf(entry->reason, sizeof entry->reason, "%s", row->why_not);
    }
    ++*count;
}

/* A backend that cannot be used is one entry with the reason. */
static void add_failed(mtp_device_entry *entries, int capacity, int *count, const char *device)
{
    static const mtp_device_row nothing;
    const int at = *count;
    add(entries, capacity, count, device, &nothing);
    if (at < capacity) snprintf(entries[at].reason, sizeof entries->reason, "%.500s", mtp_last_error()->message);
}

static mtp_status add_backend(mtp_device_entry *entries, int capacity, int *count, const char *name, bool numbered)
{
    const mtp_backend *backend = NULL;
    int index = 0, found = 0;
    mtp_device_row *rows = calloc(DEVICES_MOST, sizeof *rows);
    if (!rows) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a list of devices");
    mtp_status status = mtp__backend_of(name, &backend, &index);
    if (status == MTP_OK) status = backend->device_list(rows, DEVICES_MOST, &found);
    if (status != MTP_OK) add_failed(entries, capacity, count, name);
    for (int i = 0; status == MTP_OK && i < found && i < DEVICES_MOST; i++) {
        char device[16];
        if (numbered)
            snprintf(device, sizeof device, "%s:%d", name, i);
        else
            snprintf(device, sizeof device, "%s", name);
        add(entries, capacity, count, device, &rows[i]);
    }
    free(rows);
    return MTP_OK;
}

mtp_status mtp_devices_list(mtp_device_entry *entries, int capacity, int *count)
{
    MTP_REQUIRE(count && (entries || capacity == 0) && capacity >= 0);
    *count = 0;
    MTP_TRY(add_backend(entries, capacity, count, "cpu", false));
    return add_backend(entries, capacity, count, "cuda", true);
}
