/* Graphs: the work that a capture collected, in the order of the calls; a replay runs it as one piece of stream work.
 */
#ifndef MTP_EMU_GRAPH_H
#define MTP_EMU_GRAPH_H

#include "emu/stream.h"

#include <set>
#include <thread>

namespace emu
{

struct Node {
    WorkKind kind;
    const char *name;
    std::function<void()> run;
    std::function<void()> at_launch; /* before the graph is queued; may be empty */
};

struct Graph {
    std::vector<Node> nodes;
};

struct Capture {
    std::unique_ptr<Graph> graph;
    Stream *origin;
    std::set<Stream *> streams;
    cudaStreamCaptureMode mode;
    std::thread::id thread; /* that began it */
    bool broken;
};

/* A stream waits for an event of a capture: it takes part from now on. */
cudaError_t capture_join(Stream &stream, const Moment &moment);

} // namespace emu

#endif
