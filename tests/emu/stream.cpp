#include "emu/stream.h"
#include "emu/device_memory.h"
#include "emu/graph.h"

#include <algorithm>
#include <ctime>
#include <set>

namespace emu
{

std::recursive_mutex &api_mutex()
{
    static auto *mutex = new std::recursive_mutex;
    return *mutex;
}

static thread_local cudaError_t last_error;

cudaError_t result(cudaError_t error)
{
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    return error;
}

double seconds_now()
{
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

static std::set<Stream *> &streams()
{
    static auto *set = new std::set<Stream *>;
    return *set;
}

static Stream &default_stream()
{
    static Stream *const stream = new Stream{true, {}, 0, nullptr, false};
    return *stream;
}

Stream *stream_of(cudaStream_t handle)
{
    if (handle == nullptr || handle == cudaStreamLegacy) return &default_stream();
    Stream *stream = reinterpret_cast<Stream *>(handle);
    return streams().count(stream) ? stream : nullptr;
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

static void run_first(Stream &stream)
{
    Work work = std::move(stream.queue.front());
    stream.queue.pop_front();
    for (const Place &place : work.after) run_until(place);
    work.run();
}

void run_until(const Place &place)
{
    Stream &stream = *place.stream;
    if (&stream != &default_stream() && !streams().count(&stream)) return; /* destroyed, after all its work ran */
    if (stream.queue.empty() || stream.queue.front().sequence > place.sequence) return;
    DeviceOpen open;
    while (!stream.queue.empty() && stream.queue.front().sequence <= place.sequence) run_first(stream);
}

void run_stream(Stream &stream)
{
    run_until({&stream, stream.last});
}

void run_all()
{
    DeviceOpen open;
    run_stream(default_stream());
    for (Stream *stream : std::set<Stream *>(streams())) run_stream(*stream);
}

cudaError_t enqueue(cudaStream_t handle, WorkKind kind, const char *name, std::function<void()> run)
{
    Stream *stream = stream_of(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (stream->capture) {
        if (stream->capture->broken) return cudaErrorStreamCaptureInvalidated;
        capture_add(*stream, kind, name, std::move(run));
        return cudaSuccess;
    }
    static uint64_t sequence;
    Work work = {kind, name, std::move(run), ++sequence, {}};
    if (stream == &default_stream()) {
        for (Stream *other : streams()) {
            if (!other->blocking) continue;
            if (other->capture) {
                other->capture->broken = true;
                return cudaErrorStreamCaptureImplicit;
            }
            if (!other->queue.empty()) work.after.push_back({other, other->last});
        }
    } else if (stream->blocking && !default_stream().queue.empty()) {
        work.after.push_back({&default_stream(), default_stream().last});
    }
    stream->last = work.sequence;
    stream->queue.push_back(std::move(work));
    return cudaSuccess;
}

} // namespace emu

using namespace emu;

extern "C" {

cudaError_t cudaGetLastError(void)
{
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int)
{
    const Lock lock(api_mutex());
    if (!stream || (flags & ~static_cast<unsigned>(cudaStreamNonBlocking))) return result(cudaErrorInvalidValue);
    Stream *made = new Stream{flags != cudaStreamNonBlocking, {}, 0, nullptr, false};
    streams().insert(made);
    *stream = reinterpret_cast<cudaStream_t>(made);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle)
{
    const Lock lock(api_mutex());
    Stream *stream = stream_of(handle);
    if (!stream || stream == &default_stream()) return result(cudaErrorInvalidResourceHandle);
    if (stream->capture) return result(cudaErrorStreamCaptureUnsupported);
    run_stream(*stream);
    streams().erase(stream);
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle)
{
    const Lock lock(api_mutex());
    Stream *stream = stream_of(handle);
    if (!stream) return result(cudaErrorInvalidResourceHandle);
    if (stream->capture) {
        stream->capture->broken = true;
        return result(cudaErrorStreamCaptureUnsupported);
    }
    if (const cudaError_t error = refuse_while_capturing()) return result(error);
    if (stream == &default_stream()) {
        DeviceOpen open;
        for (Stream *other : streams())
            if (other->blocking) run_stream(*other);
        run_stream(*stream);
    } else {
        run_stream(*stream);
    }
    return cudaSuccess;
}

/* Each question lets one piece of work happen, so who polls gets there. */
cudaError_t cudaStreamQuery(cudaStream_t handle)
{
    const Lock lock(api_mutex());
    Stream *stream = stream_of(handle);
    if (!stream) return result(cudaErrorInvalidResourceHandle);
    if (stream->capture) {
        stream->capture->broken = true;
        return result(cudaErrorStreamCaptureUnsupported);
    }
    if (const cudaError_t error = refuse_while_capturing()) return result(error);
    if (stream->queue.empty()) return cudaSuccess;
    run_until({stream, stream->queue.front().sequence});
    return cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize(void)
{
    const Lock lock(api_mutex());
    if (const cudaError_t error = refuse_while_capturing()) return result(error);
    run_all();
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    const Lock lock(api_mutex());
    if (!function) return result(cudaErrorInvalidValue);
    return result(enqueue(stream, WorkKind::HOST, "a host function", [=] { function(data); }));
}

} // extern "C"

/* ---- events ------------------------------------------------------------------------------------------------------ */

namespace
{

struct Event {
    unsigned flags;
    std::shared_ptr<Moment> moment; /* null: never recorded */
};

std::set<Event *> &events()
{
    static auto *set = new std::set<Event *>;
    return *set;
}

Event *event_of(cudaEvent_t handle)
{
    Event *event = reinterpret_cast<Event *>(handle);
    return events().count(event) ? event : nullptr;
}

} // namespace

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    const Lock lock(api_mutex());
    const unsigned known = cudaEventBlockingSync | cudaEventDisableTiming;
    if (!event || (flags & ~known)) return result(cudaErrorInvalidValue);
    Event *made = new Event{flags, nullptr};
    events().insert(made);
    *event = reinterpret_cast<cudaEvent_t>(made);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle)
{
    const Lock lock(api_mutex());
    Event *event = event_of(handle);
    if (!event) return result(cudaErrorInvalidResourceHandle);
    events().erase(event);
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on)
{
    const Lock lock(api_mutex());
    Event *event = event_of(handle);
    Stream *stream = stream_of(on);
    if (!event || !stream) return result(cudaErrorInvalidResourceHandle);
    auto moment = std::make_shared<Moment>(Moment{{stream, 0}, false, 0, stream->capture});
    if (!stream->capture) {
        const cudaError_t error = enqueue(on, WorkKind::OTHER, "an event", [moment] {
            moment->done = true;
            moment->seconds = seconds_now();
        });
        if (error != cudaSuccess) return result(error);
        moment->place.sequence = stream->last;
    }
    event->moment = moment;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t what, unsigned flags)
{
    const Lock lock(api_mutex());
    Event *event = event_of(what);
    Stream *stream = stream_of(handle);
    if (!event || !stream) return result(cudaErrorInvalidResourceHandle);
    if (flags != 0) return result(cudaErrorInvalidValue);
    if (!event->moment) return cudaSuccess;
    const std::shared_ptr<Moment> moment = event->moment;
    if (moment->capture) return result(capture_join(*stream, *moment));
    if (stream->capture) { /* an event from outside cannot become part of the graph */
        stream->capture->broken = true;
        return result(cudaErrorStreamCaptureIsolation);
    }
    return result(enqueue(handle, WorkKind::OTHER, "a wait for an event", [moment] {
        if (!moment->done) run_until(moment->place);
    }));
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle)
{
    const Lock lock(api_mutex());
    Event *event = event_of(handle);
    if (!event) return result(cudaErrorInvalidResourceHandle);
    if (event->moment && event->moment->capture) return result(cudaErrorCapturedEvent);
    if (const cudaError_t error = refuse_while_capturing()) return result(error);
    if (!event->moment) return cudaSuccess;
    if (!event->moment->done) run_until(event->moment->place);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle)
{
    const Lock lock(api_mutex());
    Event *event = event_of(handle);
    if (!event) return result(cudaErrorInvalidResourceHandle);
    if (event->moment && event->moment->capture) return result(cudaErrorCapturedEvent);
    if (const cudaError_t error = refuse_while_capturing()) return result(error);
    if (!event->moment || event->moment->done) return cudaSuccess;
    Stream *stream = event->moment->place.stream;
    run_until({stream, stream->queue.front().sequence});
    return cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to)
{
    const Lock lock(api_mutex());
    const Event *a = event_of(from), *b = event_of(to);
    if (!milliseconds) return result(cudaErrorInvalidValue);
    if (!a || !b || !a->moment || !b->moment || (a->flags & cudaEventDisableTiming) ||
        (b->flags & cudaEventDisableTiming))
        return result(cudaErrorInvalidResourceHandle);
    if (!a->moment->done || !b->moment->done) return result(cudaErrorNotReady);
    *milliseconds = static_cast<float>(1e3 * (b->moment->seconds - a->moment->seconds));
    return cudaSuccess;
}

} // extern "C"
