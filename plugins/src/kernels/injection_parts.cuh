// What both variants of the adjacent injection share: the problem as typed pointers and the two epilogues.
#pragma once

#include "common.cuh"

namespace dspine::injection
{

//! Rows are the N*B slots in order; `z` and `scale` live in the workspace.
template<typename T>
struct Problem
{
    int64_t rows;
    int64_t block;
    int64_t hiddenSize;
    int64_t rank;
    int64_t message;
    T const* hidden;
    T const* feature;
    T const* anchorMessage;
    T const* messageWeight;
    T const* receiverGateWeight;
    T const* predecessorGateWeight;
    T const* gateBias;
    T const* writeWeight;
    T* injected;
    T* z;         // [rows, m], gate * message; zero for slot 0
    float* scale; // [rows], |h| / sqrt(d)
};

//! Writes z[row, column] from the three dot products of that row; slot 1 takes its predecessor, the anchor, from the
//! table row.
template<typename T>
__device__ __forceinline__ void storeGatedMessage(
    Problem<T> const& p, int64_t row, int64_t column, float receiver, float predecessor, float message)
{
    int64_t const slot = row % p.block;
    float z = 0.0F;
    if (slot > 0)
    {
        if (slot == 1)
        {
            T const* anchor = p.anchorMessage + (row / p.block) * 2 * p.message;
            message = toFloat(anchor[column]);
            predecessor = toFloat(anchor[p.message + column]);
        }
        z = sigmoid(receiver + predecessor + toFloat(p.gateBias[column])) * message;
    }
    p.z[row * p.message + column] = fromFloat<T>(z);
}

//! injected = hidden + scale * written; slot 0 is copied, whatever its values.
template<typename T>
__device__ __forceinline__ void storeInjected(Problem<T> const& p, int64_t row, int64_t column, float written)
{
    int64_t const at = row * p.hiddenSize + column;
    T const hidden = p.hidden[at];
    p.injected[at] = row % p.block == 0 ? hidden : fromFloat<T>(fmaf(p.scale[row], written, toFloat(hidden)));
}

//! The norm of one row a warp; `group` counts the blocks that do this.
template<typename T>
__device__ void storeScales(Problem<T> const& p, int64_t group)
{
    int64_t const row = group * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    if (row < p.rows)
    {
        float const scale = rowScale(p.hidden + row * p.hiddenSize, p.hiddenSize);
        if (threadIdx.x % kWarp == 0)
        {
            p.scale[row] = scale;
        }
    }
}

template<typename T>
cudaError_t launchFma(Problem<T> const& problem, cudaStream_t stream);

//! Tensor cores; needs d, r and m divisible by 16 and pointers aligned to 32 bytes.
cudaError_t launchWmma(Problem<__nv_bfloat16> const& problem, cudaStream_t stream);

} // namespace dspine::injection
