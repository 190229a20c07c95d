/* A kernel launch: the arguments are copied now, the blocks run when the stream gets there. */
#ifndef MTP_EMU_LAUNCH_H
#define MTP_EMU_LAUNCH_H

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

namespace emu
{

struct Argument {
    const void *value;
    size_t bytes;
    bool pointer;
};

/* A kernel with its arguments; run() is one CUDA thread. */
struct Call {
    virtual ~Call() = default;
    virtual void run() const = 0;
};

template <class... P>
struct KernelCall final : Call {
    void (*kernel)(P...);
    std::tuple<std::decay_t<P>...> arguments;

    template <class... A>
    KernelCall(void (*k)(P...), A &&...a) : kernel(k), arguments(static_cast<std::decay_t<P>>(a)...)
    {
    }
    void run() const override
    {
        std::apply(kernel, arguments);
    }
};

struct Launch {
    const char *name;
    const void *kernel;
    dim3 grid, block;
    size_t shared;
    std::shared_ptr<const Call> call;
};

/* Checks against the device profile, checks the arguments for host addresses, queues. */
cudaError_t launch_call(const Launch &launch, cudaStream_t stream, const Argument *arguments, size_t count);

template <class... P, class... A>
cudaError_t launch(const char *name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                   A &&...a)
{
    static_assert(sizeof...(P) == sizeof...(A), "a launch gives every parameter of the kernel");
    auto call = std::make_shared<KernelCall<P...>>(kernel, std::forward<A>(a)...);
    Launch what{name, reinterpret_cast<const void *>(kernel), grid, block, shared, call};
    return std::apply(
        [&](const auto &...values) {
            const Argument arguments[] = {
                {nullptr, 0, false}, {&values, sizeof(values), std::is_pointer_v<std::decay_t<decltype(values)>>}...};
            return launch_call(what, stream, arguments + 1, sizeof...(values));
        },
        call->arguments);
}

} // namespace emu

#endif
