/* Which ranks are to blame for an operation that failed. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/error.h"
#include "comm/heartbeat.h"
#include "comm/net.h"

enum { KEY_LETTERS = 400, RANKS_NAMED = 16, LOOK_MS = 50 };

typedef enum found { REPORTS, ALIVE, SILENT } found;

typedef struct others {
    mtp_store *store;
    const char *prefix;
    int size;
    found *are;       /* of each rank */
    int64_t *numbers; /* of its heartbeat, when first looked at */
} others;

static void make_key(const others *all, const char *name, int rank, char key[KEY_LETTERS])
{
    snprintf(key, KEY_LETTERS, "%s%s/%d", all->prefix, name, rank);
}

/* Which ranks say that they failed, waiting for a short while. */
static mtp_status ask_who_failed(others *all)
{
    char key[KEY_LETTERS];
    const int64_t deadline = mtp__net_deadline(MTP__REPORT_SECONDS);
    for (int rank = 0; rank < all->size; rank++) {
        void *value = NULL;
        const int64_t left = deadline - mtp__net_now();
        make_key(all, "failed", rank, key);
        const mtp_status status = mtp_store_get(all->store, key, left > 0 ? (double)left / 1000 : 0, &value, NULL);
        free(value);
        if (status != MTP_OK && status != MTP_E_NOT_FOUND) return status;
        all->are[rank] = status == MTP_OK ? REPORTS : SILENT;
    }
    return MTP_OK;
}

static mtp_status read_beats(others *all, bool first, int *silent)
{
    char key[KEY_LETTERS];
    *silent = 0;
    for (int rank = 0; rank < all->size; rank++) {
        int64_t number;
        if (all->are[rank] != SILENT) continue;
        make_key(all, "beat", rank, key);
        MTP_TRY(mtp_store_add(all->store, key, 0, &number));
        if (first)
            all->numbers[rank] = number;
        else if (number != all->numbers[rank])
            all->are[rank] = ALIVE;
        *silent += all->are[rank] == SILENT;
    }
    return MTP_OK;
}

/* Of those that say nothing, which ones still beat. */
static mtp_status ask_who_lives(others *all, double interval)
{
    int silent;
    MTP_TRY(read_beats(all, true, &silent));
    const int64_t deadline = mtp__net_deadline(1.5 * interval);
    while (silent > 0 && mtp__net_now() < deadline) {
        nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * 1000000L}, NULL);
        MTP_TRY(read_beats(all, false, &silent));
    }
    return MTP_OK;
}

static int add_names(const others *all, found what, const char *heading, mtp__text *text)
{
    int count = 0;
    for (int rank = 0; rank < all->size; rank++) {
        if (all->are[rank] != what) continue;
        if (count < RANKS_NAMED) {
            mtp__text_add(text, "%s ", count ? "," : heading);
            mtp__heartbeat_name(all->store, all->prefix, rank, text);
        }
        count++;
    }
    if (count > RANKS_NAMED) mtp__text_add(text, " and %d more", count - RANKS_NAMED);
    return count;
}

static mtp_status ask(others *all, double interval, int rank)
{
    char key[KEY_LETTERS];
    make_key(all, "failed", rank, key);
    MTP_TRY(mtp_store_set(all->store, key, "", 0));
    MTP_TRY(ask_who_failed(all));
    return ask_who_lives(all, interval);
}

void mtp__heartbeat_blame(mtp_store *store, const char *prefix, const mtp_comm_place *place, double interval,
                          mtp__text *text)
{
    const size_t size = (size_t)place->world_size;
    others all = {.store = store, .prefix = prefix, .size = place->world_size};
    all.are = calloc(size, sizeof *all.are);
    all.numbers = calloc(size, sizeof *all.numbers);
    if (all.are && all.numbers) {
        if (ask(&all, interval, place->rank) != MTP_OK)
            mtp__text_add(text, "; the store is lost too: its host died, is stopped or has ended");
        else if (add_names(&all, SILENT, "; dead, stopped or ended:", text) +
                     add_names(&all, ALIVE, "; alive, but hangs or is busy elsewhere:", text) ==
                 0)
            mtp__text_add(text, "; all ranks are alive and report a failure");
    }
    free(all.are);
    free(all.numbers);
}
