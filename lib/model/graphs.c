#include "model/graphs.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"

void mtp__graphs_create(const mtp_context *context, mtp__graphs *graphs)
{
    const char *wanted = getenv("MTP_CUDA_GRAPHS");
    *graphs =
        (mtp__graphs){.context = context, .on = context->ops->graph != NULL && !(wanted && strcmp(wanted, "0") == 0)};
}

static void drop(mtp__graphs *graphs, mtp__graph_entry *entry)
{
    if (entry->graph) graphs->context->ops->graph->free(graphs->context->device, entry->graph);
    *entry = (mtp__graph_entry){0};
}

void mtp__graphs_clear(mtp__graphs *graphs)
{
    for (int i = 0; i < MTP__GRAPHS_KEPT; i++)
        if (graphs->entries[i].last_used) drop(graphs, &graphs->entries[i]);
}

/* The entry of the key, or else NULL and *place: an empty one, or the one not used for longest. */
static mtp__graph_entry *find(mtp__graphs *graphs, const mtp__graph_key *key, mtp__graph_entry **place)
{
    *place = &graphs->entries[0];
    for (int i = 0; i < MTP__GRAPHS_KEPT; i++) {
        mtp__graph_entry *entry = &graphs->entries[i];
        if (entry->last_used && memcmp(&entry->key, key, sizeof *key) == 0) return entry;
        if (entry->last_used < (*place)->last_used) *place = entry;
    }
    return NULL;
}

/* MTP_OK without a graph: it cannot be captured. The first time that is said, with the reason. */
static mtp_status capture(mtp__graphs *graphs, mtp__graph_entry *entry, mtp_status (*work)(void *user), void *user)
{
    const mtp_context *context = graphs->context;
    MTP_TRY(context->ops->graph->capture_begin(context->device));
    const mtp_status status = work(user);
    const mtp_error first = *mtp_last_error();
    const mtp_status ended = context->ops->graph->capture_end(context->device, &entry->graph);
    if (status == MTP_OK && ended == MTP_OK) {
        graphs->captured++;
        return MTP_OK;
    }
    if (entry->graph) context->ops->graph->free(context->device, entry->graph);
    entry->graph = NULL;
    entry->refused = true;
    if (graphs->refused++ == 0)
        mtp_log(context->logger, MTP_LOG_WARNING,
                "a step cannot be captured as a graph and runs call by call, slower and with the same results: %s",
                status != MTP_OK ? first.message : mtp_last_error()->message);
    return MTP_OK;
}

static mtp_status call(mtp__graphs *graphs, mtp_status (*work)(void *user), void *user)
{
    graphs->called++;
    return work(user);
}

mtp_status mtp__graphs_run(mtp__graphs *graphs, const mtp__graph_key *key, mtp_status (*work)(void *user), void *user)
{
    mtp__graph_entry *place;
    if (!graphs->on) return call(graphs, work, user);
    mtp__graph_entry *entry = find(graphs, key, &place);
    if (!entry) {
        drop(graphs, place);
        *place = (mtp__graph_entry){.key = *key, .last_used = ++graphs->time};
        const mtp_status status = call(graphs, work, user);
        if (status != MTP_OK) *place = (mtp__graph_entry){0};
        return status;
    }
    entry->last_used = ++graphs->time;
    if (!entry->graph && !entry->refused) MTP_TRY(capture(graphs, entry, work, user));
    if (!entry->graph) return call(graphs, work, user);
    const mtp_backend *ops = graphs->context->ops;
    graphs->nodes = ops->graph->num_nodes(entry->graph);
    graphs->launched++;
    return ops->graph->launch(graphs->context->device, entry->graph);
}
