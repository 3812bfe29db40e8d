// Warp matrix operations on 16 x 16 x 16 tiles. The first lane of a warp holds the whole tile and does all the work;
// the alignment rules of the hardware are enforced.
#pragma once

#include "cuda_bf16.h"
#include "cuda_runtime.h"

#include <cstdio>
#include <cstdlib>

namespace nvcuda::wmma
{

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;

enum layout_t
{
    mem_row_major
};

template<typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment
{
    float tile[16][16]; // [m][k], [k][n] or [m][n]
};

inline bool firstLane()
{
    return emulation::machine.current % emulation::kWarpSize == 0;
}

inline void requireAligned(void const* address, size_t strideBytes)
{
    if (reinterpret_cast<uintptr_t>(address) % 32 != 0 || strideBytes % 16 != 0)
    {
        std::fprintf(stderr, "misaligned matrix: address %p, stride %zu bytes\n", address, strideBytes);
        std::abort();
    }
}

template<typename Use, typename T, typename Layout>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout>& fragment, T const* source, unsigned stride)
{
    requireAligned(source, stride * sizeof(T));
    constexpr bool kColumns = std::is_same_v<Layout, col_major>;
    for (unsigned i = 0; firstLane() && i < 16; ++i)
    {
        for (unsigned j = 0; j < 16; ++j)
        {
            fragment.tile[i][j] = static_cast<float>(kColumns ? source[j * stride + i] : source[i * stride + j]);
        }
    }
}

template<typename Fragment>
void fill_fragment(Fragment& fragment, float value)
{
    std::fill_n(&fragment.tile[0][0], 256, value);
}

template<typename A, typename B, typename C>
void mma_sync(C& result, A const& a, B const& b, C const& c)
{
    for (int i = 0; firstLane() && i < 16; ++i)
    {
        for (int j = 0; j < 16; ++j)
        {
            float sum = c.tile[i][j];
            for (int k = 0; k < 16; ++k)
            {
                sum += a.tile[i][k] * b.tile[k][j];
            }
            result.tile[i][j] = sum;
        }
    }
}

template<typename Fragment>
void store_matrix_sync(float* target, Fragment const& fragment, unsigned stride, layout_t)
{
    requireAligned(target, stride * sizeof(float));
    for (unsigned i = 0; firstLane() && i < 16; ++i)
    {
        std::copy_n(fragment.tile[i], 16, target + i * stride);
    }
}

} // namespace nvcuda::wmma
