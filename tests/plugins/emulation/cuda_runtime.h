// CUDA C++ on the CPU: every thread of a block is a fiber, blocks run one after the other, barriers and shuffles switch
// fibers.
//
// Good for the logic of a kernel (indices, barriers, padding, reductions), not for speed, races without barriers or the
// hardware's rounding inside tensor cores. Launches and dynamic shared memory are rewritten by emulate.py before
// compilation.
#pragma once

#include "cuda_runtime_api.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>

#define __global__ static
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static

using std::isnan;
using std::max;
using std::min;

struct dim3
{
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1)
        : x(x)
        , y(y)
        , z(z)
    {
    }
};

struct uint4
{
    unsigned x, y, z, w;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
    return {x, y, z, w};
}

inline dim3 threadIdx;
inline dim3 blockIdx;
inline dim3 blockDim;

enum cudaFuncAttribute
{
    cudaFuncAttributeMaxDynamicSharedMemorySize
};

template<typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int)
{
    return cudaSuccess;
}

inline cudaError_t cudaPeekAtLastError()
{
    return cudaSuccess;
}

namespace emulation
{

constexpr int kWarpSize = 32;
constexpr size_t kStackBytes = 128 * 1024;
constexpr int kPoison = 0xFF; // NaN in every float type

//! A barrier for the threads that have not returned yet.
struct Barrier
{
    int alive = 0;
    int arrived = 0;
    unsigned generation = 0;

    void releaseIfComplete()
    {
        if (alive > 0 && arrived == alive)
        {
            arrived = 0;
            ++generation;
        }
    }
};

//! Runs the body of one launch after another. Only its first entry goes through ucontext, whose every switch is a
//! system call.
struct Fiber
{
    jmp_buf resume;
    ucontext_t entry;
    std::unique_ptr<char[]> stack;
    bool finished = false;
};

struct Machine
{
    jmp_buf scheduler;
    std::array<Fiber, 1024> fibers;
    std::vector<Barrier> warps;
    std::vector<float> exchange; // one slot a thread, for shuffles and votes
    Barrier block;
    std::function<void()> body;
    size_t current = 0;
};

inline Machine machine;
inline std::vector<uint4> dynamicMemory;

inline char* dynamicShared()
{
    auto const address = reinterpret_cast<uintptr_t>(dynamicMemory.data());
    return reinterpret_cast<char*>((address + 127) / 128 * 128);
}

inline void yield()
{
    if (_setjmp(machine.fibers[machine.current].resume) == 0)
    {
        _longjmp(machine.scheduler, 1);
    }
}

inline void wait(Barrier& barrier)
{
    unsigned const generation = barrier.generation;
    ++barrier.arrived;
    barrier.releaseIfComplete();
    while (barrier.generation == generation)
    {
        yield();
    }
}

inline Barrier& warpBarrier()
{
    return machine.warps[machine.current / kWarpSize];
}

inline void leave(Barrier& barrier)
{
    --barrier.alive;
    barrier.releaseIfComplete();
}

inline void fiberMain()
{
    for (;;)
    {
        machine.body();
        machine.fibers[machine.current].finished = true;
        leave(warpBarrier());
        leave(machine.block);
        yield();
    }
}

inline void resume(Fiber& fiber)
{
    if (_setjmp(machine.scheduler) != 0)
    {
        return;
    }
    if (fiber.stack)
    {
        _longjmp(fiber.resume, 1);
    }
    fiber.stack = std::make_unique<char[]>(kStackBytes);
    getcontext(&fiber.entry);
    fiber.entry.uc_stack.ss_sp = fiber.stack.get();
    fiber.entry.uc_stack.ss_size = kStackBytes;
    fiber.entry.uc_link = nullptr;
    makecontext(&fiber.entry, fiberMain, 0);
    setcontext(&fiber.entry);
}

inline void startFibers(unsigned threads)
{
    machine.warps.assign((threads + kWarpSize - 1) / kWarpSize, Barrier{});
    machine.exchange.assign(threads, 0.0F);
    machine.block = Barrier{};
    machine.block.alive = static_cast<int>(threads);
    for (unsigned i = 0; i < threads; ++i)
    {
        ++machine.warps[i / kWarpSize].alive;
        machine.fibers[i].finished = false;
    }
}

inline void runBlock(unsigned threads)
{
    startFibers(threads);
    for (bool running = true; running;)
    {
        running = false;
        for (unsigned i = 0; i < threads; ++i)
        {
            if (!machine.fibers[i].finished)
            {
                running = true;
                machine.current = i;
                threadIdx = dim3(i, 0, 0);
                resume(machine.fibers[i]);
            }
        }
    }
}

inline void launch(dim3 grid, dim3 block, size_t sharedBytes, std::function<void()> body)
{
    machine.body = std::move(body);
    dynamicMemory.resize(sharedBytes / sizeof(uint4) + 16);
    blockDim = block;
    for (unsigned y = 0; y < grid.y; ++y)
    {
        for (unsigned x = 0; x < grid.x; ++x)
        {
            std::fill_n(
                reinterpret_cast<unsigned char*>(dynamicMemory.data()), dynamicMemory.size() * sizeof(uint4), kPoison);
            blockIdx = dim3(x, y, 0);
            runBlock(block.x);
        }
    }
}

} // namespace emulation

inline void __syncthreads()
{
    emulation::wait(emulation::machine.block);
}

inline void __syncwarp()
{
    emulation::wait(emulation::warpBarrier());
}

template<typename T>
T __shfl_xor_sync(unsigned, T value, int mask)
{
    static_assert(sizeof(T) == sizeof(float));
    auto& machine = emulation::machine;
    __builtin_memcpy(&machine.exchange[machine.current], &value, sizeof(T));
    __syncwarp();
    T result;
    __builtin_memcpy(&result, &machine.exchange[machine.current ^ static_cast<size_t>(mask)], sizeof(T));
    __syncwarp();
    return result;
}

inline unsigned __ballot_sync(unsigned, bool predicate)
{
    auto& machine = emulation::machine;
    machine.exchange[machine.current] = predicate ? 1.0F : 0.0F;
    __syncwarp();
    unsigned lanes = 0;
    size_t const first = machine.current / emulation::kWarpSize * emulation::kWarpSize;
    for (unsigned lane = 0; lane < emulation::kWarpSize; ++lane)
    {
        lanes |= machine.exchange[first + lane] != 0.0F ? 1U << lane : 0U;
    }
    __syncwarp();
    return lanes;
}

inline int __ffs(int value)
{
    return __builtin_ffs(value);
}
