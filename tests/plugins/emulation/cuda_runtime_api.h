// The few names of the CUDA runtime that the plugins and TensorRT's headers use.
#pragma once

enum cudaError_t
{
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
};
using cudaStream_t = void*;
using cudaEvent_t = void*;

inline char const* cudaGetErrorString(cudaError_t status)
{
    return status == cudaSuccess ? "no error" : "invalid argument";
}
