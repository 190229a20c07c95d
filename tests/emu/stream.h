/* Streams: queues of work that runs only when someone waits for it, so that a missing synchronisation shows. */
#ifndef MTP_EMU_STREAM_H
#define MTP_EMU_STREAM_H

#include <cuda_runtime_api.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace emu
{

struct Stream;
struct Capture;

/* A place in a stream: the work up to `sequence`. */
struct Place {
    Stream *stream;
    uint64_t sequence;
};

enum class WorkKind { KERNEL, COPY, SET, HOST, LIBRARY, OTHER };

struct Work {
    WorkKind kind;
    const char *name;
    std::function<void()> run;
    uint64_t sequence;
    std::vector<Place> after;
};

struct Stream {
    bool blocking; /* ordered with the default stream */
    std::deque<Work> queue;
    uint64_t last; /* sequence of the work queued last */
    Capture *capture;
    bool unjoined; /* in a capture: work that no other stream of it has waited for */
};

/* What an event stands for: the last cudaEventRecord. */
struct Moment {
    Place place;
    bool done;
    double seconds;
    Capture *capture; /* recorded in a stream that is being captured */
};

/* Every call of the API holds it. */
using Lock = std::lock_guard<std::recursive_mutex>;
std::recursive_mutex &api_mutex();

/* Records the error for cudaGetLastError and returns it. */
cudaError_t result(cudaError_t error);

Stream *stream_of(cudaStream_t handle); /* null: not a live stream */

/* Queues work, or adds it to the graph that the stream's capture makes. */
cudaError_t enqueue(cudaStream_t stream, WorkKind kind, const char *name, std::function<void()> run);

void run_until(const Place &place);
void run_stream(Stream &stream);
void run_all();

/* graph.cpp */

/* A call that waits, allocates or asks whether something is done, and is of no capture: refused to a thread that
 * captures, unless relaxed, and to all while a global capture is under way. The captures that forbid it are broken. */
cudaError_t refuse_while_capturing();
bool thread_captures();

void capture_add(Stream &stream, WorkKind kind, const char *name, std::function<void()> run);
/* What happens whenever a graph is launched that has the node added last, before its work is queued. */
void capture_at_launch(Stream &stream, std::function<void()> act);

double seconds_now();

} // namespace emu

#endif
