// Element conversion, warp sums and row norms shared by all kernels.
#pragma once

#include "dspine/kernels.h"

#include <cuda_bf16.h>
#include <cstring>
#include <cuda_runtime.h>

namespace dspine
{

inline constexpr int kWarp = 32;

template<typename T>
__device__ __forceinline__ float toFloat(T value)
{
    return static_cast<float>(value);
}

template<typename T>
__device__ __forceinline__ T fromFloat(float value)
{
    return static_cast<T>(value);
}

template<>
__device__ __forceinline__ __nv_bfloat16 fromFloat<__nv_bfloat16>(float value)
{
    return __float2bfloat16_rn(value);
}

__device__ __forceinline__ float warpSum(float value)
{
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
    {
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
}

__device__ __forceinline__ float sigmoid(float value)
{
    return 1.0F / (1.0F + expf(-value));
}

template<typename T>
__device__ __forceinline__ float addSquare(T element, float sum)
{
    float const value = toFloat(element);
    return fmaf(value, value, sum);
}

//! |row| / sqrt(size); every lane of the calling warp returns it.
template<typename T>
__device__ float rowScale(T const* row, int64_t size)
{
    constexpr int kVector = 16 / sizeof(T);
    int const lane = threadIdx.x % kWarp;
    float square = 0.0F;
    if (size % kVector == 0 && reinterpret_cast<uintptr_t>(row) % 16 == 0)
    {
#pragma unroll 4
        for (int64_t i = lane; i < size / kVector; i += kWarp)
        {
            uint4 const packed = reinterpret_cast<uint4 const*>(row)[i];
            T elements[kVector];
            memcpy(elements, &packed, sizeof(elements));
#pragma unroll
            for (int j = 0; j < kVector; ++j)
            {
                square = addSquare(elements[j], square);
            }
        }
    }
    else
    {
        for (int64_t i = lane; i < size; i += kWarp)
        {
            square = addSquare(row[i], square);
        }
    }
    return sqrtf(warpSum(square) / static_cast<float>(size));
}

__device__ __forceinline__ int64_t clampId(int64_t id, int64_t vocab)
{
    return id < 0 ? 0 : (id < vocab ? id : vocab - 1);
}

//! Copies 8 bfloat16 values, or zeros where `source` is null; both addresses are 16-byte aligned.
__device__ __forceinline__ void copyOrZero8(__nv_bfloat16* destination, __nv_bfloat16 const* source)
{
    uint4 const zero = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(destination) = source != nullptr ? *reinterpret_cast<uint4 const*>(source) : zero;
}

template<typename... Pointers>
bool alignedTo32(Pointers... pointers)
{
    return ((reinterpret_cast<uintptr_t>(pointers) % 32 == 0) && ...);
}

inline int64_t ceilDiv(int64_t value, int64_t divisor)
{
    return (value + divisor - 1) / divisor;
}

} // namespace dspine
