/* Gloo behind a C facade: it throws, so every entry point catches. */
#include "comm/collectives.h"

#if MTP__GLOO

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>

#include "base/real.h"
#include "comm/broken_pipe.h"

namespace
{

using milliseconds = std::chrono::milliseconds;

/* Our key-value store as Gloo wants it. It lives as long as the rendezvous. */
class rendezvous_store : public gloo::rendezvous::Store
{
  public:
    rendezvous_store(mtp_store *connection, const char *key_prefix, milliseconds limit)
        : store(connection), prefix(key_prefix), timeout(limit)
    {
    }

    void set(const std::string &key, const std::vector<char> &data) override
    {
        check(mtp_store_set(store, full(key).c_str(), data.data(), data.size()));
    }

    std::vector<char> get(const std::string &key) override
    {
        void *value = nullptr;
        size_t size = 0;
        check(mtp_store_get(store, full(key).c_str(), seconds(timeout), &value, &size));
        const std::unique_ptr<void, decltype(&std::free)> owner(value, &std::free);
        const char *bytes = static_cast<const char *>(value);
        return std::vector<char>(bytes, bytes + size);
    }

    void wait(const std::vector<std::string> &keys) override
    {
        wait(keys, timeout);
    }

    void wait(const std::vector<std::string> &keys, const milliseconds &limit) override
    {
        const auto end = std::chrono::steady_clock::now() + limit;
        for (const std::string &key : keys) {
            const auto left = std::chrono::duration_cast<milliseconds>(end - std::chrono::steady_clock::now());
            void *value = nullptr;
            check(mtp_store_get(store, full(key).c_str(), left.count() > 0 ? seconds(left) : 0, &value, nullptr));
            std::free(value);
        }
    }

  private:
    static double seconds(milliseconds time)
    {
        return static_cast<double>(time.count()) / 1000;
    }

    static void check(mtp_status status)
    {
        if (status != MTP_OK) throw std::runtime_error(mtp_last_error()->message);
    }

    std::string full(const std::string &key) const
    {
        return prefix + key;
    }

    mtp_store *store;
    std::string prefix;
    milliseconds timeout;
};

struct gloo_self {
    std::shared_ptr<gloo::rendezvous::Context> context;
    milliseconds timeout;
    uint32_t tag = 0; /* a new one for each operation, the same on all ranks */
};

/* ---- reductions: out = a op b, for each value ----------------------------------------------------------------- */

template <mtp_reduce reduce>
float combine(float a, float b)
{
    if constexpr (reduce == MTP_REDUCE_SUM) return a + b;
    if (std::isnan(a) || std::isnan(b)) return a + b;
    if constexpr (reduce == MTP_REDUCE_MAX)
        return a > b ? a : b;
    else
        return a < b ? a : b;
}

template <mtp_reduce reduce>
void reduce_f32(void *out, const void *a, const void *b, size_t count)
{
    float *to = static_cast<float *>(out);
    const float *left = static_cast<const float *>(a), *right = static_cast<const float *>(b);
    for (size_t i = 0; i < count; i++) to[i] = combine<reduce>(left[i], right[i]);
}

template <mtp_reduce reduce>
void reduce_bf16(void *out, const void *a, const void *b, size_t count)
{
    constexpr size_t block = 256;
    uint16_t *to = static_cast<uint16_t *>(out);
    const uint16_t *left = static_cast<const uint16_t *>(a), *right = static_cast<const uint16_t *>(b);
    float x[block], y[block];
    for (size_t start = 0; start < count; start += block) {
        const size_t size = count - start < block ? count - start : block;
        mtp__real_to_f32(x, left + start, MTP_BF16, static_cast<int64_t>(size));
        mtp__real_to_f32(y, right + start, MTP_BF16, static_cast<int64_t>(size));
        for (size_t i = 0; i < size; i++) x[i] = combine<reduce>(x[i], y[i]);
        mtp__real_from_f32(to + start, MTP_BF16, x, static_cast<int64_t>(size));
    }
}

template <mtp_reduce reduce>
gloo::AllreduceOptions::Func reduce_function(mtp_dtype dtype)
{
    return dtype == MTP_F32 ? &reduce_f32<reduce> : &reduce_bf16<reduce>;
}

gloo::AllreduceOptions::Func reduce_function(mtp_dtype dtype, mtp_reduce reduce)
{
    if (reduce == MTP_REDUCE_SUM) return reduce_function<MTP_REDUCE_SUM>(dtype);
    if (reduce == MTP_REDUCE_MAX) return reduce_function<MTP_REDUCE_MAX>(dtype);
    return reduce_function<MTP_REDUCE_MIN>(dtype);
}

/* ---- the entry points ----------------------------------------------------------------------------------------- */

/* While Gloo runs in this thread, and in the thread that it makes: it writes to the sockets of ranks that have died. */
class no_broken_pipe
{
  public:
    no_broken_pipe()
    {
        mtp__broken_pipe_hold(&state);
    }
    ~no_broken_pipe()
    {
        mtp__broken_pipe_release(&state);
    }
    no_broken_pipe(const no_broken_pipe &) = delete;
    no_broken_pipe &operator=(const no_broken_pipe &) = delete;

  private:
    mtp__broken_pipe state;
};

/* Run `body`; what it throws becomes a status. */
template <typename body_type>
mtp_status guarded(const char *what, const body_type &body)
{
    const no_broken_pipe held;
    try {
        body();
        return MTP_OK;
    } catch (const std::bad_alloc &) {
        return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", what);
    } catch (const std::exception &error) {
        return MTP_FAIL(MTP_E_BACKEND, "%s: %s", what, error.what());
    }
}

mtp_status all_reduce(void *opaque, void *data, size_t count, mtp_dtype dtype, mtp_reduce reduce)
{
    gloo_self *self = static_cast<gloo_self *>(opaque);
    return guarded("all-reduce", [&] {
        gloo::AllreduceOptions options(self->context);
        /* the ring's order of summation follows from the rank, the world size and the count alone */
        options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
        if (dtype == MTP_F32)
            options.setOutput(static_cast<float *>(data), count);
        else
            options.setOutput(static_cast<uint16_t *>(data), count);
        options.setReduceFunction(reduce_function(dtype, reduce));
        options.setTag(self->tag++);
        options.setTimeout(self->timeout);
        gloo::allreduce(options);
    });
}

mtp_status broadcast(void *opaque, void *data, size_t size, int root)
{
    gloo_self *self = static_cast<gloo_self *>(opaque);
    return guarded("broadcast", [&] {
        gloo::BroadcastOptions options(self->context);
        options.setOutput(static_cast<char *>(data), size);
        options.setRoot(root);
        options.setTag(self->tag++);
        options.setTimeout(self->timeout);
        gloo::broadcast(options);
    });
}

mtp_status all_gather(void *opaque, const void *data, size_t size, void *out)
{
    gloo_self *self = static_cast<gloo_self *>(opaque);
    return guarded("all-gather", [&] {
        gloo::AllgatherOptions options(self->context);
        /* Gloo takes the input as something that it could write to, and does not */
        options.setInput(const_cast<char *>(static_cast<const char *>(data)), size);
        options.setOutput(static_cast<char *>(out), size * static_cast<size_t>(self->context->size));
        options.setTag(self->tag++);
        options.setTimeout(self->timeout);
        gloo::allgather(options);
    });
}

mtp_status barrier(void *opaque)
{
    gloo_self *self = static_cast<gloo_self *>(opaque);
    return guarded("barrier", [&] {
        gloo::BarrierOptions options(self->context);
        options.setTag(self->tag++);
        options.setTimeout(self->timeout);
        gloo::barrier(options);
    });
}

void cancel_all(void *opaque)
{
    gloo_self *self = static_cast<gloo_self *>(opaque);
    const no_broken_pipe held;
    try {
        self->context->closeConnections();
    } catch (const std::exception &) { /* a connection that is closed already */
    }
}

void free_self(void *opaque)
{
    const no_broken_pipe held;
    delete static_cast<gloo_self *>(opaque);
}

} // namespace

mtp_status mtp__gloo_create(const mtp_comm_place *place, mtp_store *store, const char *prefix, const char *address,
                            double seconds, mtp__collectives *made)
{
    return guarded("connecting the ranks over Gloo", [&] {
        const milliseconds timeout(static_cast<int64_t>(seconds * 1000));
        gloo::transport::tcp::attr attributes;
        attributes.hostname = address;
        std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(attributes);
        rendezvous_store meeting(store, prefix, timeout);
        std::unique_ptr<gloo_self> self(new gloo_self{nullptr, timeout});
        self->context = std::make_shared<gloo::rendezvous::Context>(place->rank, place->world_size);
        self->context->setTimeout(timeout);
        self->context->connectFullMesh(meeting, device);
        *made = mtp__collectives{all_reduce, broadcast,  all_gather, barrier,   nullptr,
                                 nullptr,    cancel_all, free_self,  self.get()};
        self.release();
    });
}

#else

mtp_status mtp__gloo_create(const mtp_comm_place *place, mtp_store *store, const char *prefix, const char *address,
                            double seconds, mtp__collectives *made)
{
    (void)store, (void)prefix, (void)address, (void)seconds, (void)made;
    return MTP_FAIL(MTP_E_UNSUPPORTED,
                    "%d ranks: this build has no Gloo; install libgloo-dev and configure with -DMTP_GLOO=ON",
                    place->world_size);
}

#endif
