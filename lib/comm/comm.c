/* The communicator: finds the other ranks, and runs what is asked of it in order, on a thread of its own. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/text.h"
#include "comm/collectives.h"
#include "comm/heartbeat.h"
#include "comm/place.h"

static const double longest_seconds = 1e6;
enum { DEFAULT_SECONDS = 60, DEFAULT_HEARTBEAT = 5, RETRY_MS = 50, MESSAGE_LETTERS = 2048 };

typedef enum operation { ALL_REDUCE, BROADCAST, ALL_GATHER, BARRIER } operation;

struct mtp_comm_request {
    operation kind;
    void *data, *out;
    size_t size; /* values of an all-reduce, bytes of the others */
    mtp_dtype dtype;
    mtp_reduce reduce;
    int root;
    void *mark; /* of the device: the operation begins behind it */
    bool done;
    mtp_status status;
    mtp_comm_request *next;
};

struct mtp_comm {
    mtp_comm_place place;
    mtp__collectives backend; /* of more than one rank */
    mtp_store_server *server; /* where this rank hosts the store */
    mtp_store *store;
    char prefix[300];
    double seconds, heartbeat_seconds;
    mtp__heartbeat *heartbeat;
    mtp_comm *ranks, *device; /* of mtp_comm_create_device: each knows the other */
    void (*failed)(void *user, const char *message);
    void *user;
    bool running; /* the thread was started */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* something was queued, was done, or the end has come */
    mtp_comm_request *first, *last;
    bool ending;
    mtp_status failure; /* the first one */
    char message[MESSAGE_LETTERS];
};

/* ---- failures ------------------------------------------------------------------------------------------------- */

/* Make this the failure of everything that follows, unless there is one already. */
static void set_failure(mtp_comm *comm, mtp_status status, const char *message)
{
    pthread_mutex_lock(&comm->lock);
    const bool first = comm->failure == MTP_OK;
    if (first) {
        snprintf(comm->message, sizeof comm->message, "rank %d of %d: %.*s", comm->place.rank, comm->place.world_size,
                 MESSAGE_LETTERS - 64, message);
        comm->failure = status;
    }
    pthread_mutex_unlock(&comm->lock);
    /* written once, so it may be read without the lock from here on */
    if (first && comm->failed) comm->failed(comm->user, comm->message);
}

static bool has_failed(mtp_comm *comm)
{
    pthread_mutex_lock(&comm->lock);
    const bool failed = comm->failure != MTP_OK;
    pthread_mutex_unlock(&comm->lock);
    return failed;
}

/* On the thread of the collectives, after an operation has failed: which ranks are to blame. */
static void note_failure(mtp_comm *comm, mtp_status status)
{
    mtp__text text = {0};
    if (has_failed(comm)) return;
    mtp__text_add(&text, "%s", mtp_last_error()->message);
    if (status != MTP_E_MEMORY && comm->store)
        mtp__heartbeat_blame(comm->store, comm->prefix, &comm->place, comm->heartbeat_seconds, &text);
    set_failure(comm, status, mtp__text_get(&text));
    mtp__text_free(&text);
}

/* On the thread of the heartbeat. */
static void note_loss(void *user, const char *message)
{
    mtp_comm *comm = user;
    set_failure(comm, MTP_E_BACKEND, message);
    comm->backend.cancel(comm->backend.self);
    pthread_mutex_lock(&comm->lock);
    if (comm->device) {
        set_failure(comm->device, MTP_E_BACKEND, message);
        comm->device->backend.cancel(comm->device->backend.self);
    }
    pthread_mutex_unlock(&comm->lock);
}

/* ---- the thread ----------------------------------------------------------------------------------------------- */

static mtp_status perform(const mtp__collectives *backend, const mtp_comm_request *request)
{
    if (backend->use_mark) backend->use_mark(backend->self, request->mark);
    switch (request->kind) {
    case ALL_REDUCE:
        return backend->all_reduce(backend->self, request->data, request->size, request->dtype, request->reduce);
    case BROADCAST:
        return backend->broadcast(backend->self, request->data, request->size, request->root);
    case ALL_GATHER:
        return backend->all_gather(backend->self, request->data, request->size, request->out);
    case BARRIER:
        return backend->barrier(backend->self);
    }
    return MTP_FAIL(MTP_E_INTERNAL, "an operation of kind %d", (int)request->kind);
}

static void *work(void *argument)
{
    mtp_comm *comm = argument;
    pthread_mutex_lock(&comm->lock);
    for (;;) {
        while (!comm->first && !comm->ending) pthread_cond_wait(&comm->changed, &comm->lock);
        mtp_comm_request *request = comm->first;
        if (!request) break;
        comm->first = request->next;
        if (!comm->first) comm->last = NULL;
        mtp_status status = comm->failure;
        if (status != MTP_OK && comm->backend.use_mark) comm->backend.use_mark(comm->backend.self, request->mark);
        if (status == MTP_OK) {
            pthread_mutex_unlock(&comm->lock);
            status = perform(&comm->backend, request);
            if (status != MTP_OK) note_failure(comm, status);
            pthread_mutex_lock(&comm->lock);
            if (status != MTP_OK) status = comm->failure;
        }
        request->status = status;
        request->done = true;
        pthread_cond_broadcast(&comm->changed);
    }
    pthread_mutex_unlock(&comm->lock);
    return NULL;
}

/* A world of one has nothing to wait for. */
static void finish_alone(mtp_comm_request *request)
{
    if (request->kind == ALL_GATHER) memmove(request->out, request->data, request->size);
    request->done = true;
}

static mtp_status submit(mtp_comm *comm, const mtp_comm_request *wanted, mtp_comm_request **started)
{
    mtp_comm_request *request = malloc(sizeof *request);
    if (!request) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a request");
    *request = *wanted;
    if (comm->running && comm->backend.mark) {
        const mtp_status status = comm->backend.mark(comm->backend.self, &request->mark);
        if (status != MTP_OK) {
            free(request);
            return status;
        }
    }
    *started = request;
    if (!comm->running || (request->size == 0 && request->kind != BARRIER)) {
        finish_alone(request);
        return MTP_OK;
    }
    pthread_mutex_lock(&comm->lock);
    if (comm->last)
        comm->last->next = request;
    else
        comm->first = request;
    comm->last = request;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    return MTP_OK;
}

mtp_status mtp_comm_wait(mtp_comm *comm, mtp_comm_request *request)
{
    MTP_REQUIRE(comm != NULL && request != NULL);
    pthread_mutex_lock(&comm->lock);
    while (!request->done) pthread_cond_wait(&comm->changed, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
    const mtp_status status = request->status;
    free(request);
    /* the message is written once, before the first request is done with a failure */
    return status == MTP_OK ? MTP_OK : MTP_FAIL(status, "%s", comm->message);
}

static mtp_status submit_and_wait(mtp_comm *comm, const mtp_comm_request *wanted)
{
    mtp_comm_request *request = NULL;
    MTP_TRY(submit(comm, wanted, &request));
    return mtp_comm_wait(comm, request);
}

/* ---- what callers see ----------------------------------------------------------------------------------------- */

mtp_status mtp_comm_all_reduce_start(mtp_comm *comm, void *data, int64_t count, mtp_dtype dtype, mtp_reduce reduce,
                                     mtp_comm_request **request)
{
    MTP_REQUIRE(comm != NULL && request != NULL && count >= 0 && (data != NULL || count == 0));
    MTP_REQUIRE(dtype == MTP_F32 || dtype == MTP_BF16);
    MTP_REQUIRE(reduce == MTP_REDUCE_SUM || reduce == MTP_REDUCE_MAX || reduce == MTP_REDUCE_MIN);
    const mtp_comm_request wanted = {
        .kind = ALL_REDUCE, .data = data, .size = (size_t)count, .dtype = dtype, .reduce = reduce};
    return submit(comm, &wanted, request);
}

mtp_status mtp_comm_all_reduce(mtp_comm *comm, void *data, int64_t count, mtp_dtype dtype, mtp_reduce reduce)
{
    mtp_comm_request *request = NULL;
    MTP_TRY(mtp_comm_all_reduce_start(comm, data, count, dtype, reduce, &request));
    return mtp_comm_wait(comm, request);
}

mtp_status mtp_comm_broadcast(mtp_comm *comm, void *data, int64_t size, int root)
{
    MTP_REQUIRE(comm != NULL && size >= 0 && (data != NULL || size == 0));
    MTP_REQUIRE(root >= 0 && root < comm->place.world_size);
    return submit_and_wait(comm,
                           &(mtp_comm_request){.kind = BROADCAST, .data = data, .size = (size_t)size, .root = root});
}

mtp_status mtp_comm_all_gather(mtp_comm *comm, const void *data, int64_t size, void *out)
{
    MTP_REQUIRE(comm != NULL && size >= 0 && ((data != NULL && out != NULL) || size == 0));
    if (size == 0) return MTP_OK;
    return submit_and_wait(
        comm, &(mtp_comm_request){.kind = ALL_GATHER, .data = (void *)data, .size = (size_t)size, .out = out});
}

mtp_status mtp_comm_barrier(mtp_comm *comm)
{
    MTP_REQUIRE(comm != NULL);
    return submit_and_wait(comm, &(mtp_comm_request){.kind = BARRIER});
}

mtp_status mtp_comm_check(mtp_comm *comm)
{
    MTP_REQUIRE(comm != NULL);
    return has_failed(comm) ? MTP_FAIL(comm->failure, "%s", comm->message) : MTP_OK;
}

mtp_comm_place mtp_comm_where(const mtp_comm *comm)
{
    return comm->place;
}

/* ---- finding each other --------------------------------------------------------------------------------------- */

static mtp_status host_store(mtp_comm *comm, const mtp__meeting *meeting, const mtp_logger *logger)
{
    const mtp_store_server_options options = {
        .address = meeting->address, .port = meeting->port, .secret = meeting->secret, .logger = logger};
    MTP_TRY(mtp_store_server_start(&options, &comm->server));
    mtp_store *store;
    MTP_TRY(mtp_store_connect(meeting->endpoint, meeting->secret, comm->seconds, &store));
    const mtp_status status = mtp_store_set(store, "run", meeting->run, strlen(meeting->run));
    if (status == MTP_OK)
        comm->store = store;
    else
        mtp_store_close(store);
    return status;
}

/* Connect to the store that rank 0 of this run and this restart hosts; one of an earlier restart may still be there. */
static mtp_status connect_same_run(mtp_comm *comm, const mtp__meeting *meeting)
{
    const int64_t deadline = mtp__net_deadline(comm->seconds);
    for (;;) {
        mtp_store *store;
        void *run;
        MTP_TRY(mtp_store_connect(meeting->endpoint, meeting->secret, comm->seconds, &store));
        const mtp_status status = mtp_store_get(store, "run", comm->seconds, &run, NULL);
        if (status == MTP_OK && strcmp(run, meeting->run) == 0) {
            free(run);
            comm->store = store;
            return MTP_OK;
        }
        mtp_store_close(store);
        if (mtp__net_now() >= deadline) {
            if (status != MTP_OK) return status;
            const mtp_status other =
                MTP_FAIL(MTP_E_CONFIG, "the store at %s serves run '%s', not '%s'; choose another MTP_RDZV_PORT",
                         meeting->endpoint, (const char *)run, meeting->run);
            free(run);
            return other;
        }
        if (status == MTP_OK) free(run);
        nanosleep(&(struct timespec){.tv_nsec = RETRY_MS * 1000000L}, NULL);
    }
}

static mtp_status start_thread(mtp_comm *comm)
{
    const int code = pthread_create(&comm->thread, NULL, work, comm);
    if (code != 0) return MTP_FAIL_FOREIGN(MTP_E_IO, code, "the thread of the collectives: %s", strerror(code));
    comm->running = true;
    return MTP_OK;
}

/* Which ranks have not said that they are here. False: the store does not tell, or all have. */
static bool name_missing(const mtp_comm *comm, mtp__text *names)
{
    enum { RANKS_NAMED = 16 };
    int missing = 0;
    for (int rank = 0; rank < comm->place.world_size; rank++) {
        char key[sizeof comm->prefix + 32];
        void *value = NULL;
        snprintf(key, sizeof key, "%shere/%d", comm->prefix, rank);
        const mtp_status status = mtp_store_get(comm->store, key, 0, &value, NULL);
        free(value);
        if (status == MTP_OK) continue;
        if (status != MTP_E_NOT_FOUND) return false;
        if (missing++ < RANKS_NAMED) mtp__text_add(names, missing > 1 ? ", %d" : "%d", rank);
    }
    if (missing > RANKS_NAMED) mtp__text_add(names, " and %d more", missing - RANKS_NAMED);
    return missing > 0;
}

/* Gloo knows keys that nobody set; people know ranks that did not come. */
static mtp_status connect_ranks(mtp_comm *comm, const char *address)
{
    char key[sizeof comm->prefix + 32];
    snprintf(key, sizeof key, "%shere/%d", comm->prefix, comm->place.rank);
    MTP_TRY(mtp_store_set(comm->store, key, "", 0));
    const mtp_status status =
        mtp__gloo_create(&comm->place, comm->store, comm->prefix, address, comm->seconds, &comm->backend);
    if (status == MTP_OK || status == MTP_E_UNSUPPORTED) return status;
    const mtp_error first = *mtp_last_error();
    mtp__text names = {0};
    if (name_missing(comm, &names) && mtp__text_check(&names) == MTP_OK)
        MTP_FAIL(status, "of %d ranks these did not come within %g s: %s; are they started, and with the same run id?",
                 comm->place.world_size, comm->seconds, mtp__text_get(&names));
    else
        mtp__fail_again(&first);
    mtp__text_free(&names);
    return status;
}

static mtp_status meet(mtp_comm *comm, const mtp__meeting *meeting, const mtp_logger *logger)
{
    snprintf(comm->prefix, sizeof comm->prefix, "%s/", meeting->run);
    if (meeting->host)
        MTP_TRY(host_store(comm, meeting, logger));
    else if (meeting->address[0])
        MTP_TRY(connect_same_run(comm, meeting));
    else
        MTP_TRY(mtp_store_connect(meeting->endpoint, meeting->secret, comm->seconds, &comm->store));
    /* Gloo's sockets let everybody in: nobody outside reaches them when all ranks are here */
    const char *address = meeting->one_node ? "127.0.0.1" : mtp_store_local_address(comm->store);
    MTP_TRY(connect_ranks(comm, address));
    MTP_TRY(start_thread(comm));
    const mtp__heartbeat_options options = {.place = comm->place,
                                            .prefix = comm->prefix,
                                            .endpoint = meeting->endpoint,
                                            .secret = meeting->secret,
                                            .interval = comm->heartbeat_seconds,
                                            .limit = comm->seconds,
                                            .lost = note_loss,
                                            .user = comm};
    MTP_TRY(mtp__heartbeat_start(&options, &comm->heartbeat));
    /* nobody goes on before all have arrived */
    return mtp_comm_barrier(comm);
}

/* A time that the caller gives, or else the environment, or else the default. */
static mtp_status choose_seconds(double given, const char *name, double otherwise, double *seconds)
{
    const char *text = getenv(name);
    char *end;
    *seconds = given > 0 ? given : otherwise;
    if (given > 0 || !text || !*text) return MTP_OK;
    *seconds = strtod(text, &end);
    if (*end || !(*seconds > 0) || *seconds > longest_seconds)
        return MTP_FAIL(MTP_E_CONFIG, "%s is '%s'; it must be a number of seconds above 0", name, text);
    return MTP_OK;
}

static mtp_status choose_times(mtp_comm *comm, const mtp_comm_options *options)
{
    MTP_TRY(choose_seconds(options->seconds, "MTP_COMM_TIME_LIMIT", DEFAULT_SECONDS, &comm->seconds));
    const double third = comm->seconds / MTP__BEATS_MIN;
    MTP_TRY(choose_seconds(options->heartbeat_seconds, "MTP_COMM_HEARTBEAT",
                           third < DEFAULT_HEARTBEAT ? third : DEFAULT_HEARTBEAT, &comm->heartbeat_seconds));
    if (comm->heartbeat_seconds <= third) return MTP_OK;
    return MTP_FAIL(MTP_E_CONFIG,
                    "a heartbeat every %g s is too rare for a time limit of %g s: at most a third of it "
                    "(heartbeat_seconds and timeout_seconds, or mtprun --heartbeat and --time-limit)",
                    comm->heartbeat_seconds, comm->seconds);
}

mtp_status mtp_comm_create(const mtp_comm_options *options, mtp_comm **comm)
{
    mtp__meeting meeting;
    MTP_REQUIRE(options != NULL && comm != NULL && options->seconds >= 0 && options->seconds <= longest_seconds &&
                options->heartbeat_seconds >= 0);
    *comm = NULL;
    MTP_TRY(mtp__meeting_read(&meeting));
    mtp_comm *made = calloc(1, sizeof *made);
    if (!made) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a communicator");
    made->place = meeting.place;
    made->failed = options->failed;
    made->user = options->user;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->changed, NULL);
    mtp_status status = choose_times(made, options);
    if (status == MTP_OK && meeting.place.world_size > 1) status = meet(made, &meeting, options->logger);
    if (status != MTP_OK) {
        if (!made->running) mtp__fail_prefix(status, "rank %d of %d", meeting.place.rank, meeting.place.world_size);
        mtp_comm_free(made);
        return status;
    }
    *comm = made;
    return MTP_OK;
}

mtp_status mtp_comm_create_device(mtp_comm *ranks, mtp_context *context, mtp_comm **comm)
{
    MTP_REQUIRE(ranks != NULL && context != NULL && comm != NULL);
    *comm = NULL;
    mtp_comm *made = calloc(1, sizeof *made);
    if (!made) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a communicator");
    made->place = ranks->place;
    made->seconds = ranks->seconds;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->changed, NULL);
    mtp_status status = MTP_OK;
    if (made->place.world_size > 1) status = mtp__devices_create(ranks, context, ranks->seconds, &made->backend);
    if (status == MTP_OK && made->place.world_size > 1) status = start_thread(made);
    if (status != MTP_OK) {
        mtp_comm_free(made);
        return status;
    }
    made->ranks = ranks;
    pthread_mutex_lock(&ranks->lock);
    ranks->device = made;
    pthread_mutex_unlock(&ranks->lock);
    *comm = made;
    return MTP_OK;
}

/* The store ends with rank 0 where that hosts it. While all is well the others may still be at work, and their signs of
 * life say for how long; after a failure they need the time to hear of it. */
static void wait_for_others(mtp_comm *comm, const char *key)
{
    int64_t left = 0, deadline = INT64_MAX;
    while (mtp_store_add(comm->store, key, 0, &left) == MTP_OK && left < comm->place.world_size - 1) {
        if (deadline == INT64_MAX && has_failed(comm))
            deadline = mtp__net_deadline(MTP__REPORT_SECONDS + 2 * comm->heartbeat_seconds);
        if (mtp__net_now() >= deadline) return;
        nanosleep(&(struct timespec){.tv_nsec = RETRY_MS * 1000000L}, NULL);
    }
}

static void leave(mtp_comm *comm)
{
    /* who frees after a failure still wants to say which */
    const mtp_error first = *mtp_last_error();
    int64_t left = 0;
    char key[400];
    if (!comm->heartbeat) return;
    snprintf(key, sizeof key, "%sleft", comm->prefix);
    if (comm->server) wait_for_others(comm, key);
    mtp__heartbeat_stop(comm->heartbeat);
    if (!comm->server) (void)mtp_store_add(comm->store, key, 1, &left); /* a store that is lost waits for nobody */
    if (first.status != MTP_OK) mtp__fail_again(&first);
}

void mtp_comm_free(mtp_comm *comm)
{
    if (!comm) return;
    if (comm->ranks) {
        pthread_mutex_lock(&comm->ranks->lock);
        comm->ranks->device = NULL;
        pthread_mutex_unlock(&comm->ranks->lock);
    }
    if (comm->running) {
        pthread_mutex_lock(&comm->lock);
        comm->ending = true;
        pthread_cond_broadcast(&comm->changed);
        pthread_mutex_unlock(&comm->lock);
        pthread_join(comm->thread, NULL);
    }
    leave(comm);
    if (comm->backend.free) comm->backend.free(comm->backend.self);
    mtp_store_close(comm->store);
    mtp_store_server_stop(comm->server);
    pthread_cond_destroy(&comm->changed);
    pthread_mutex_destroy(&comm->lock);
    free(comm);
}
