#include "comm/heartbeat.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "comm/net.h"

enum { KEY_LETTERS = 400, NAME_LETTERS = 160 };

/* added to the number of a rank that leaves */
static const int64_t left_mark = (int64_t)1 << 40;

struct mtp__heartbeat {
    mtp__heartbeat_options options;
    mtp_store *store; /* a connection of its own */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool ending;
    int watched;       /* the rank whose number is looked at; this one itself when all others have left */
    int64_t number;    /* its number */
    int64_t seen;      /* when that changed */
    int64_t last_beat; /* when this rank was last here */
};

static void make_key(const char *prefix, const char *name, int rank, char key[KEY_LETTERS])
{
    snprintf(key, KEY_LETTERS, "%s%s/%d", prefix, name, rank);
}

/* The number of a rank, after adding to it. */
static mtp_status add(mtp_store *store, const char *prefix, int rank, int64_t amount, int64_t *number)
{
    char key[KEY_LETTERS];
    make_key(prefix, "beat", rank, key);
    return mtp_store_add(store, key, amount, number);
}

void mtp__heartbeat_name(mtp_store *store, const char *prefix, int rank, mtp__text *text)
{
    char key[KEY_LETTERS];
    void *name = NULL;
    make_key(prefix, "name", rank, key);
    const bool known = mtp_store_get(store, key, 0, &name, NULL) == MTP_OK;
    mtp__text_add(text, known ? "rank %d (%s)" : "rank %d", rank, (const char *)name);
    free(name);
}

/* ---- the thread -------------------------------------------------------------------------------------------------- */

/* The store does not answer: nothing can be learnt any more. */
static bool store_lost(mtp__heartbeat *own)
{
    char message[512];
    snprintf(message, sizeof message, "the store is lost, so its host died, is stopped or has ended: %.300s",
             mtp_last_error()->message);
    own->options.lost(own->options.user, message);
    return false;
}

/* Tell all: only the first loss is told, since others may follow from it. */
static bool tell_loss(mtp__heartbeat *own, double seconds)
{
    char key[KEY_LETTERS];
    int64_t count = 0;
    mtp__text text = {0};
    mtp__heartbeat_name(own->store, own->options.prefix, own->watched, &text);
    mtp__text_add(&text, " has given no sign of life for %.0f s: it was killed or stopped, or its machine is lost",
                  seconds);
    snprintf(key, sizeof key, "%slosses", own->options.prefix);
    if (mtp_store_add(own->store, key, 1, &count) == MTP_OK && count == 1) {
        snprintf(key, sizeof key, "%sloss", own->options.prefix);
        (void)mtp_store_set(own->store, key, mtp__text_get(&text), strlen(mtp__text_get(&text)));
    }
    own->options.lost(own->options.user, mtp__text_get(&text));
    mtp__text_free(&text);
    return false;
}

/* Whether another rank has told of a loss. */
static mtp_status hear_loss(mtp__heartbeat *own, bool *told)
{
    char key[KEY_LETTERS];
    void *text = NULL;
    snprintf(key, sizeof key, "%sloss", own->options.prefix);
    const mtp_status status = mtp_store_get(own->store, key, 0, &text, NULL);
    *told = status == MTP_OK;
    if (*told) own->options.lost(own->options.user, text);
    free(text);
    return status == MTP_E_NOT_FOUND ? MTP_OK : status;
}

/* Look at the next rank that has not left. */
static mtp_status look(mtp__heartbeat *own, int64_t now)
{
    const int size = own->options.place.world_size;
    int64_t number = left_mark;
    while (own->watched != own->options.place.rank) {
        MTP_TRY(add(own->store, own->options.prefix, own->watched, 0, &number));
        if (number < left_mark) break;
        own->watched = (own->watched + 1) % size;
        own->number = -1;
    }
    if (number != own->number) own->seen = now;
    own->number = number;
    return MTP_OK;
}

/* False: a loss was told, and nothing is left to do. */
static bool beat(mtp__heartbeat *own)
{
    const mtp__heartbeat_options *options = &own->options;
    const int64_t now = mtp__net_now(), interval = (int64_t)(options->interval * 1000);
    int64_t number;
    bool told = false;
    /* this process itself was stopped, or its machine asleep: what it has not seen is nobody's fault */
    if (now - own->last_beat > 2 * interval) own->seen = now;
    own->last_beat = now;
    if (add(own->store, options->prefix, options->place.rank, 1, &number) != MTP_OK) return store_lost(own);
    if (hear_loss(own, &told) != MTP_OK) return store_lost(own);
    if (told) return false;
    if (look(own, now) != MTP_OK) return store_lost(own);
    /* the others hear of it with their next beat, which is within the limit too */
    const double silent = (double)(now - own->seen) / 1000;
    if (own->watched != options->place.rank && silent >= options->limit - options->interval)
        return tell_loss(own, silent);
    return true;
}

static void sleep_until_next(mtp__heartbeat *own)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    const int64_t nanoseconds = until.tv_nsec + (int64_t)(own->options.interval * 1e9);
    until.tv_sec += (time_t)(nanoseconds / 1000000000);
    until.tv_nsec = (long)(nanoseconds % 1000000000);
    while (!own->ending && pthread_cond_timedwait(&own->changed, &own->lock, &until) != ETIMEDOUT) continue;
}

static void *work(void *argument)
{
    mtp__heartbeat *own = argument;
    bool going = true;
    pthread_mutex_lock(&own->lock);
    while (going && !own->ending) {
        pthread_mutex_unlock(&own->lock);
        going = beat(own);
        pthread_mutex_lock(&own->lock);
        if (going) sleep_until_next(own);
    }
    pthread_mutex_unlock(&own->lock);
    return NULL;
}

/* ---- start and stop ---------------------------------------------------------------------------------------------- */

static mtp_status introduce(mtp__heartbeat *own)
{
    char key[KEY_LETTERS], name[NAME_LETTERS], host[64] = "?";
    int64_t number;
    const mtp_comm_place *place = &own->options.place;
    gethostname(host, sizeof host - 1);
    snprintf(name, sizeof name, "%s, process %d", host, (int)getpid());
    make_key(own->options.prefix, "name", place->rank, key);
    MTP_TRY(mtp_store_set(own->store, key, name, strlen(name)));
    return add(own->store, own->options.prefix, place->rank, 1, &number);
}

static mtp_status start(mtp__heartbeat *own)
{
    pthread_condattr_t attributes;
    MTP_TRY(mtp_store_connect(own->options.endpoint, own->options.secret, own->options.limit, &own->store));
    MTP_TRY(introduce(own));
    own->watched = (own->options.place.rank + 1) % own->options.place.world_size;
    own->number = -1;
    own->seen = own->last_beat = mtp__net_now();
    pthread_mutex_init(&own->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&own->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    const int code = pthread_create(&own->thread, NULL, work, own);
    if (code == 0) return MTP_OK;
    pthread_cond_destroy(&own->changed);
    pthread_mutex_destroy(&own->lock);
    return MTP_FAIL_FOREIGN(MTP_E_IO, code, "the thread of the heartbeat: %s", strerror(code));
}

mtp_status mtp__heartbeat_start(const mtp__heartbeat_options *options, mtp__heartbeat **heartbeat)
{
    *heartbeat = NULL;
    mtp__heartbeat *made = calloc(1, sizeof *made);
    if (!made) return MTP_FAIL(MTP_E_MEMORY, "out of memory for the heartbeat");
    made->options = *options;
    const mtp_status status = start(made);
    if (status != MTP_OK) {
        mtp_store_close(made->store);
        free(made);
        return status;
    }
    *heartbeat = made;
    return MTP_OK;
}

void mtp__heartbeat_stop(mtp__heartbeat *heartbeat)
{
    int64_t number;
    if (!heartbeat) return;
    pthread_mutex_lock(&heartbeat->lock);
    heartbeat->ending = true;
    pthread_cond_broadcast(&heartbeat->changed);
    pthread_mutex_unlock(&heartbeat->lock);
    pthread_join(heartbeat->thread, NULL);
    /* when the store is lost there is nobody to tell */
    (void)add(heartbeat->store, heartbeat->options.prefix, heartbeat->options.place.rank, left_mark, &number);
    mtp_store_close(heartbeat->store);
    pthread_cond_destroy(&heartbeat->changed);
    pthread_mutex_destroy(&heartbeat->lock);
    free(heartbeat);
}
