// The serial part of decoding: one block a sequence stages the scores, its first warp walks them.
#include "common.cuh"

#include <climits>

namespace dspine
{
namespace
{

constexpr int kThreads = 256;
constexpr int kPerLane = kMaxCandidates / kWarp;
constexpr size_t kMaxStagedBytes = 40 * 1024;
constexpr unsigned kFull = 0xffffffffu;

struct Row
{
    float value[kPerLane]; // entries lane and lane + 32
    int count;

    __device__ Row(float const* source, int candidates)
        : count(candidates)
    {
        for (int i = 0; i < kPerLane; ++i)
        {
            int const j = index(i);
            value[i] = j < count ? source[j] : -INFINITY;
        }
    }
    __device__ static int index(int i)
    {
        return threadIdx.x % kWarp + i * kWarp;
    }
};

//! Order of torch.argmax: NaN is the largest value, the lower index wins a tie.
__device__ __forceinline__ bool before(float value, int index, float other, int otherIndex)
{
    bool const isNan = isnan(value);
    bool const otherIsNan = isnan(other);
    if (isNan != otherIsNan)
    {
        return isNan;
    }
    return !isNan && value != other ? value > other : index < otherIndex;
}

__device__ int argmax(Row const& row)
{
    float best = -INFINITY;
    int bestIndex = INT_MAX;
    for (int i = 0; i < kPerLane; ++i)
    {
        int const j = Row::index(i);
        if (j < row.count && before(row.value[i], j, best, bestIndex))
        {
            best = row.value[i];
            bestIndex = j;
        }
    }
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
    {
        float const other = __shfl_xor_sync(kFull, best, offset);
        int const otherIndex = __shfl_xor_sync(kFull, bestIndex, offset);
        if (before(other, otherIndex, best, bestIndex))
        {
            best = other;
            bestIndex = otherIndex;
        }
    }
    return bestIndex;
}

//! Replaces the scores by softmax(scores / temperature). The maximum is subtracted first, so no temperature overflows.
__device__ void softmax(Row& row, float temperature)
{
    float peak = -INFINITY;
    for (float value : row.value)
    {
        peak = fmaxf(peak, value);
    }
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
    {
        peak = fmaxf(peak, __shfl_xor_sync(kFull, peak, offset));
    }
    float sum = 0.0F;
    for (int i = 0; i < kPerLane; ++i)
    {
        row.value[i] = Row::index(i) < row.count ? expf((row.value[i] - peak) / temperature) : 0.0F;
        sum += row.value[i];
    }
    sum = warpSum(sum);
    for (float& value : row.value)
    {
        value /= sum;
    }
}

//! Smallest j with cumsum(q)[j] > uniform, the last j if there is none.
//!
//! Each prefix is summed in index order in double and rounded to float once: what torch.cumsum gives for a float32 row
//! on the CPU.
__device__ int inverseCdf(Row const& row, float uniform, float* scratch)
{
    for (int i = 0; i < kPerLane; ++i)
    {
        if (Row::index(i) < row.count)
        {
            scratch[Row::index(i)] = row.value[i];
        }
    }
    __syncwarp();
    double prefix[kPerLane] = {};
    for (int j = 0; j < row.count; ++j)
    {
        double const q = static_cast<double>(scratch[j]);
        for (int i = 0; i < kPerLane; ++i)
        {
            prefix[i] += j <= Row::index(i) ? q : 0.0;
        }
    }
    __syncwarp();
    for (int i = 0; i < kPerLane; ++i)
    {
        bool const above = Row::index(i)<row.count&& static_cast<float>(prefix[i])> uniform;
        unsigned const lanes = __ballot_sync(kFull, above);
        if (lanes != 0)
        {
            return i * kWarp + __ffs(static_cast<int>(lanes)) - 1;
        }
    }
    return row.count - 1;
}

__device__ void walk(
    WalkTensors const& t, float const* scores, int64_t sequence, int slots, int candidates, float* scratch)
{
    float const temperature = t.temperature[sequence];
    bool const sampled = temperature > 0.0F;
    int index = 0;
    for (int slot = 0; slot < slots; ++slot)
    {
        int64_t const at = sequence * slots + slot;
        Row row(scores + (static_cast<int64_t>(slot) * candidates + index) * candidates, candidates);
        if (sampled)
        {
            softmax(row, temperature);
            index = inverseCdf(row, t.uniforms[at], scratch);
        }
        else
        {
            index = argmax(row);
        }
        for (int i = 0; i < kPerLane; ++i)
        {
            int const j = Row::index(i);
            if (j < candidates)
            {
                t.q[at * candidates + j] = sampled ? row.value[i] : (j == index ? 1.0F : 0.0F);
            }
        }
        if (threadIdx.x == 0)
        {
            t.tokens[at] = t.candidateIds[at * candidates + index];
        }
    }
}

__global__ void __launch_bounds__(kThreads) walkKernel(WalkTensors t, int slots, int candidates, bool staged)
{
    extern __shared__ float stagedScores[];
    __shared__ float scratch[kMaxCandidates];
    int64_t const sequence = blockIdx.x;
    int const count = slots * candidates * candidates;
    float const* scores = t.transitionScores + sequence * count;
    if (staged)
    {
        for (int i = threadIdx.x; i < count; i += kThreads)
        {
            stagedScores[i] = scores[i];
        }
        __syncthreads();
        scores = stagedScores;
    }
    if (threadIdx.x < kWarp)
    {
        walk(t, scores, sequence, slots, candidates, scratch);
    }
}

} // namespace

cudaError_t latticeWalk(WalkShape const& shape, WalkTensors const& tensors, cudaStream_t stream)
{
    if (shape.batch < 0 || shape.slots < kMinBlock - 1 || shape.slots > kMaxBlock - 1 || shape.candidates < 1
        || shape.candidates > kMaxCandidates)
    {
        return cudaErrorInvalidValue;
    }
    if (shape.batch == 0)
    {
        return cudaSuccess;
    }
    size_t const bytes = static_cast<size_t>(shape.slots * shape.candidates * shape.candidates) * sizeof(float);
    bool const staged = bytes <= kMaxStagedBytes;
    walkKernel<<<static_cast<unsigned>(shape.batch), kThreads, staged ? bytes : 0, stream>>>(
        tensors, static_cast<int>(shape.slots), static_cast<int>(shape.candidates), staged);
    return cudaPeekAtLastError();
}

} // namespace dspine
