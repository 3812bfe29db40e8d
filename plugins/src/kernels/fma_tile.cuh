// A tile of C = A * W^T on the ordinary FMA units: true float32 products and sums for any dimensions.
#pragma once

#include "common.cuh"

namespace dspine::fma
{

inline constexpr int kThreads = 256;
inline constexpr int kRows = 16;
inline constexpr int kColumns = 64;
inline constexpr int kInner = 32;

struct Stage
{
    float a[kRows][kInner];
    float w[kColumns][kInner + 1]; // the odd stride keeps the 32 columns of a warp in 32 banks
};

//! Row of the tile held by this thread in accumulator [index][.].
__device__ __forceinline__ int threadRow(int index)
{
    return (threadIdx.x / kWarp) * 2 + index;
}

//! Column of the tile held by this thread in accumulator [.][index].
__device__ __forceinline__ int threadColumn(int index)
{
    return threadIdx.x % kWarp + index * kWarp;
}

//! Adds A[rows] * W[firstColumn ..]^T over the whole inner dimension to `acc`.
//!
//! `rowOf(i)` is the i-th row of A, null for a row of zeros; `weight` is [columns, inner].
template<typename T, typename RowOf>
__device__ void multiply(
    Stage& stage, RowOf rowOf, T const* weight, int64_t columns, int64_t inner, int64_t firstColumn, float (&acc)[2][2])
{
    int const lane = threadIdx.x % kWarp;
    int const warp = threadIdx.x / kWarp;
    int constexpr kWarps = kThreads / kWarp;
    for (int64_t base = 0; base < inner; base += kInner)
    {
        bool const inside = base + lane < inner;
        __syncthreads();
        for (int row = warp; row < kRows; row += kWarps)
        {
            T const* source = rowOf(row);
            stage.a[row][lane] = inside && source != nullptr ? toFloat(source[base + lane]) : 0.0F;
        }
        for (int column = warp; column < kColumns; column += kWarps)
        {
            int64_t const w = firstColumn + column;
            stage.w[column][lane] = inside && w < columns ? toFloat(weight[w * inner + base + lane]) : 0.0F;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kInner; ++k)
        {
            float const a0 = stage.a[threadRow(0)][k];
            float const a1 = stage.a[threadRow(1)][k];
            float const w0 = stage.w[threadColumn(0)][k];
            float const w1 = stage.w[threadColumn(1)][k];
            acc[0][0] = fmaf(a0, w0, acc[0][0]);
            acc[0][1] = fmaf(a0, w1, acc[0][1]);
            acc[1][0] = fmaf(a1, w0, acc[1][0]);
            acc[1][1] = fmaf(a1, w1, acc[1][1]);
        }
    }
}

} // namespace dspine::fma
