// Partial transition scores on the FMA units: the float32 path, and bfloat16 sizes that tensor cores cannot tile.
#include "fma_tile.cuh"
#include "transition_parts.cuh"

namespace dspine::transition
{
namespace
{

static_assert(fma::kRows == kRowTile);
constexpr int kChunk = fma::kColumns;
constexpr int kRowStep = fma::kThreads / kMaxCandidates;
constexpr int kRowsPerThread = kRowTile / kRowStep;

struct Shared
{
    fma::Stage stage;
    float y[kRowTile][kChunk + 1];          // gamma * y
    float head[kMaxCandidates][kChunk + 1]; // rows of lm_head
};

//! Turns the tile's products into gamma * y in shared memory and adds to the squares of this thread's two rows.
template<typename T>
__device__ void storeRefined(
    Problem<T> const& p, Shared& shared, int64_t slot, int64_t firstColumn, float (&acc)[2][2], float (&square)[2])
{
    T const* pre = p.preInjection + slot * p.shape.hidden;
    float const scale = p.scale[slot];
    for (int j = 0; j < 2; ++j)
    {
        int64_t const column = firstColumn + fma::threadColumn(j);
        bool const inside = column < p.shape.hidden;
        float const base = inside ? toFloat(pre[column]) : 0.0F;
        float const gamma = inside ? toFloat(p.normWeight[column]) : 0.0F;
        for (int i = 0; i < 2; ++i)
        {
            float const y = inside ? fmaf(scale, acc[i][j], base) : 0.0F;
            square[i] = fmaf(y, y, square[i]);
            shared.y[fma::threadRow(i)][fma::threadColumn(j)] = gamma * y;
        }
    }
}

template<typename T>
__device__ void stageHead(Problem<T> const& p, Shared& shared, int64_t slot, int64_t firstColumn)
{
    int const lane = threadIdx.x % kWarp;
    for (int j = threadIdx.x / kWarp; j < p.shape.candidates; j += fma::kThreads / kWarp)
    {
        T const* row = candidateRow(p, slot, j);
        for (int c = lane; c < kChunk; c += kWarp)
        {
            shared.head[j][c] = firstColumn + c < p.shape.hidden ? toFloat(row[firstColumn + c]) : 0.0F;
        }
    }
}

//! One block: 16 predecessors of one slot x the chunks of one part. Thread t accumulates candidate t % 64 for rows t /
//! 64 + 4 i.
template<typename T>
__global__ void __launch_bounds__(fma::kThreads) partialsKernel(Problem<T> p)
{
    __shared__ Shared shared;
    int64_t const tilesPerSlot = p.plan.paddedK / kRowTile;
    int64_t const slot = blockIdx.x / tilesPerSlot;
    int64_t const firstRow = blockIdx.x % tilesPerSlot * kRowTile;
    int64_t const part = blockIdx.y;
    int const candidate = threadIdx.x % kMaxCandidates;
    int const rowOffset = threadIdx.x / kMaxCandidates;
    auto zRow = [&](int i) { return p.z + (slot * p.plan.paddedK + firstRow + i) * p.shape.message; };
    float square[2] = {};
    float dot[kRowsPerThread] = {};
    for (int64_t c = 0; c < p.plan.chunksPerPart; ++c)
    {
        int64_t const firstColumn = (part * p.plan.chunksPerPart + c) * kChunk;
        if (firstColumn >= p.shape.hidden)
        {
            break;
        }
        float acc[2][2] = {};
        fma::multiply(shared.stage, zRow, p.writeWeight, p.shape.hidden, p.shape.message, firstColumn, acc);
        storeRefined(p, shared, slot, firstColumn, acc, square);
        stageHead(p, shared, slot, firstColumn);
        __syncthreads();
        if (candidate < p.shape.candidates)
        {
            for (int column = 0; column < kChunk; ++column)
            {
                float const head = shared.head[candidate][column];
                for (int i = 0; i < kRowsPerThread; ++i)
                {
                    dot[i] = fmaf(shared.y[rowOffset + i * kRowStep][column], head, dot[i]);
                }
            }
        }
        __syncthreads();
    }
    int64_t const base = (part * p.plan.slotsPadded + slot) * p.plan.paddedK + firstRow;
    for (int i = 0; i < 2; ++i)
    {
        float const sum = warpSum(square[i]);
        if (threadIdx.x % kWarp == 0)
        {
            p.square[base + fma::threadRow(i)] = sum;
        }
    }
    if (candidate < p.shape.candidates)
    {
        for (int i = 0; i < kRowsPerThread; ++i)
        {
            p.dot[(base + rowOffset + i * kRowStep) * p.plan.paddedK + candidate] = dot[i];
        }
    }
}

} // namespace

Plan planFma(TransitionShape const& shape)
{
    return makePlan(shape, 1, ceilDiv(shape.candidates, kRowTile), kChunk);
}

template<typename T>
void launchPartialsFma(Problem<T> const& p, cudaStream_t stream)
{
    int64_t const blocks = p.plan.slots * (p.plan.paddedK / kRowTile);
    dim3 const grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.plan.parts));
    partialsKernel<T><<<grid, fma::kThreads, 0, stream>>>(p);
}

template void launchPartialsFma<float>(Problem<float> const&, cudaStream_t);
template void launchPartialsFma<__nv_bfloat16>(Problem<__nv_bfloat16> const&, cudaStream_t);

} // namespace dspine::transition
