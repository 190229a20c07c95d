/* A kernel launch: the arguments are copied now, the blocks run when the stream gets there. */
#ifndef MTP_EMU_LAUNCH_H
#define MTP_EMU_LAUNCH_H

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
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
    unsigned bound; /* of __launch_bounds__, whole warps; 0: none, or not known */
    dim3 grid, block;
    size_t shared;
    std::shared_ptr<const Call> call;
};

/* The number of __launch_bounds__ outlives the compiler as so many nops before the kernel, one a warp, whose place
 * stands in a section of the linked file (GCC's patchable_function_entry). */
#ifdef MTP_EMU_BOUNDS
extern "C" {
extern const uintptr_t __start___patchable_function_entries[] __attribute__((weak, visibility("hidden")));
extern const uintptr_t __stop___patchable_function_entries[] __attribute__((weak, visibility("hidden")));
}
__attribute__((visibility("hidden"))) inline unsigned launch_bound(const void *kernel)
{
    const uintptr_t entry = reinterpret_cast<uintptr_t>(kernel);
    uintptr_t nops = 0;
    for (const uintptr_t *at = __start___patchable_function_entries; at < __stop___patchable_function_entries; at++)
        if (*at<entry && * at> nops) nops = *at;
    for (uintptr_t at = nops; at < entry; at++)
        if (entry - nops > 32 || *reinterpret_cast<const unsigned char *>(at) != 0x90) return 0;
    return nops ? static_cast<unsigned>(entry - nops) * 32 : 0;
}
#else
inline unsigned launch_bound(const void *)
{
    return 0;
}
#endif

/* Checks against the device profile, checks the arguments for host addresses, queues. */
cudaError_t launch_call(const Launch &launch, cudaStream_t stream, const Argument *arguments, size_t count);

template <class... P, class... A>
cudaError_t launch(const char *name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                   A &&...a)
{
    static_assert(sizeof...(P) == sizeof...(A), "a launch gives every parameter of the kernel");
    auto call = std::make_shared<KernelCall<P...>>(kernel, std::forward<A>(a)...);
    const void *const entry = reinterpret_cast<const void *>(kernel);
    Launch what{name, entry, launch_bound(entry), grid, block, shared, call};
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
