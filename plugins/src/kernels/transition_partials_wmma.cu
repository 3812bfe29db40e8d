// Partial transition scores on tensor cores.
//
// One block handles 64 (slot, predecessor) rows, so that each chunk of the write weight is read once for four slots of
// 16 candidates. The second product, <gamma y, W_j>, would lose the float32 y in bfloat16 operands; y is therefore
// split into a high and a low bfloat16 part (16 significant bits together) and both are multiplied.
#include "transition_parts.cuh"

#include <mma.h>

namespace dspine::transition
{
namespace
{

namespace wmma = nvcuda::wmma;
using Bf16 = __nv_bfloat16;
using FragmentA = wmma::fragment<wmma::matrix_a, 16, 16, 16, Bf16, wmma::row_major>;
using FragmentW = wmma::fragment<wmma::matrix_b, 16, 16, 16, Bf16, wmma::col_major>;
using Accumulator = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTile = kRowTile;
constexpr int kRows = 64;
constexpr int kRowTiles = kRows / kTile;
constexpr int kRowsPerWarp = kRows / kWarps;
constexpr int kChunk = kWarps * kTile; // hidden columns, one tile a warp
constexpr int kInner = 128;            // message columns staged at a time
constexpr int kStageStride = kChunk + 8;
constexpr int kYStride = kChunk + 4;       // floats
constexpr int kSplitStride = 2 * kYStride; // the same rows as bfloat16: high parts, then low parts
constexpr int kMaxDotTiles = 2;            // of one warp: at most 4 x 4 tiles over 8 warps

static_assert(kInner == kChunk, "z and lm_head rows share one buffer");

struct Shared
{
    float y[kRows * kYStride];
    Bf16 stage[kRows * kStageStride];
};

struct Block
{
    int64_t firstSlot;
    int slots;     // slots of the group
    int tilesPerK; // row tiles of one slot
    int paddedK;
};

__device__ void stageZ(Problem<Bf16> const& p, Block const& b, Shared& shared, int64_t base, int inner)
{
    int const vectors = inner / 8;
    int64_t const first = b.firstSlot * b.paddedK;
    int64_t const end = p.plan.slots * b.paddedK;
    for (int i = threadIdx.x; i < b.slots * b.paddedK * vectors; i += kThreads)
    {
        int const row = i / vectors;
        int const at = i % vectors * 8;
        Bf16 const* source = first + row < end ? p.z + (first + row) * p.shape.message + base + at : nullptr;
        copyOrZero8(shared.stage + row * kStageStride + at, source);
    }
}

__device__ void stageHead(Problem<Bf16> const& p, Block const& b, Shared& shared, int64_t firstColumn)
{
    constexpr int kVectors = kChunk / 8;
    for (int i = threadIdx.x; i < b.slots * b.paddedK * kVectors; i += kThreads)
    {
        int const row = i / kVectors;
        int const at = i % kVectors * 8;
        Bf16 const* source = candidateRow(p, b.firstSlot + row / b.paddedK, row % b.paddedK);
        bool const inside = source != nullptr && firstColumn + at < p.shape.hidden;
        copyOrZero8(shared.stage + row * kStageStride + at, inside ? source + firstColumn + at : nullptr);
    }
}

//! shared.y[:, column of this warp] = Wr z for the rows of the block.
__device__ void multiplyWrite(Problem<Bf16> const& p, Block const& b, Shared& shared, int64_t firstColumn)
{
    int const warp = threadIdx.x / kWarp;
    int const tiles = b.slots * b.tilesPerK;
    int64_t const message = p.shape.message;
    int64_t const column = firstColumn + warp * kTile;
    Accumulator acc[kRowTiles];
    for (auto& fragment : acc)
    {
        wmma::fill_fragment(fragment, 0.0F);
    }
    for (int64_t base = 0; base < message; base += kInner)
    {
        int const inner = static_cast<int>(min(static_cast<int64_t>(kInner), message - base));
        __syncthreads();
        stageZ(p, b, shared, base, inner);
        __syncthreads();
        int const end = column < p.shape.hidden ? inner : 0;
#pragma unroll 4
        for (int k = 0; k < end; k += kTile)
        {
            FragmentW w;
            wmma::load_matrix_sync(w, p.writeWeight + column * message + base + k, static_cast<unsigned>(message));
#pragma unroll
            for (int t = 0; t < kRowTiles; ++t)
            {
                if (t < tiles)
                {
                    FragmentA a;
                    wmma::load_matrix_sync(a, shared.stage + t * kTile * kStageStride + k, kStageStride);
                    wmma::mma_sync(acc[t], a, w, acc[t]);
                }
            }
        }
    }
    for (int t = 0; t < kRowTiles; ++t)
    {
        wmma::store_matrix_sync(shared.y + t * kTile * kYStride + warp * kTile, acc[t], kYStride, wmma::mem_row_major);
    }
}

//! Rows of this warp: y = pre + scale * Wr z, its square, and gamma * y split in place into high and low parts.
__device__ void refineRows(
    Problem<Bf16> const& p, Block const& b, Shared& shared, int64_t firstColumn, float (&square)[kRowsPerWarp])
{
    constexpr int kPerLane = kChunk / kWarp;
    int const lane = threadIdx.x % kWarp;
    for (int r = 0; r < kRowsPerWarp; ++r)
    {
        int const row = threadIdx.x / kWarp * kRowsPerWarp + r;
        int64_t const slot = b.firstSlot + row / b.paddedK;
        bool const used = row < b.slots * b.paddedK && slot < p.plan.slots;
        float gammaY[kPerLane];
        for (int i = 0; i < kPerLane; ++i)
        {
            int const c = lane + i * kWarp;
            int64_t const column = firstColumn + c;
            gammaY[i] = 0.0F;
            if (used && column < p.shape.hidden)
            {
                float const y = fmaf(p.scale[slot], shared.y[row * kYStride + c],
                    toFloat(p.preInjection[slot * p.shape.hidden + column]));
                square[r] = fmaf(y, y, square[r]);
                gammaY[i] = y * toFloat(p.normWeight[column]);
            }
        }
        __syncwarp();
        Bf16* split = reinterpret_cast<Bf16*>(shared.y + row * kYStride);
        for (int i = 0; i < kPerLane; ++i)
        {
            Bf16 const high = __float2bfloat16_rn(gammaY[i]);
            split[lane + i * kWarp] = high;
            split[kChunk + lane + i * kWarp] = __float2bfloat16_rn(gammaY[i] - __bfloat162float(high));
        }
    }
}

//! Offsets (in rows of the block) of the predecessor tile and the candidate tile of this warp's i-th product.
__device__ __forceinline__ bool dotTile(Block const& b, int i, int& rowTile, int& headTile)
{
    int const tile = threadIdx.x / kWarp + i * kWarps;
    int const perSlot = b.tilesPerK * b.tilesPerK;
    int const slot = tile / perSlot;
    rowTile = slot * b.tilesPerK + tile % perSlot / b.tilesPerK;
    headTile = slot * b.tilesPerK + tile % b.tilesPerK;
    return slot < b.slots;
}

__device__ void multiplyHead(Block const& b, Shared const& shared, Accumulator (&dot)[kMaxDotTiles])
{
    Bf16 const* split = reinterpret_cast<Bf16 const*>(shared.y);
#pragma unroll
    for (int i = 0; i < kMaxDotTiles; ++i)
    {
        int rowTile = 0;
        int headTile = 0;
        if (!dotTile(b, i, rowTile, headTile))
        {
            continue;
        }
        for (int k = 0; k < kChunk; k += kTile)
        {
            FragmentW head;
            FragmentA high;
            FragmentA low;
            Bf16 const* y = split + rowTile * kTile * kSplitStride + k;
            wmma::load_matrix_sync(head, shared.stage + headTile * kTile * kStageStride + k, kStageStride);
            wmma::load_matrix_sync(high, y, kSplitStride);
            wmma::load_matrix_sync(low, y + kChunk, kSplitStride);
            wmma::mma_sync(dot[i], low, head, dot[i]);
            wmma::mma_sync(dot[i], high, head, dot[i]);
        }
    }
}

__device__ void storePartials(
    Problem<Bf16> const& p, Block const& b, float (&square)[kRowsPerWarp], Accumulator (&dot)[kMaxDotTiles])
{
    int64_t const base = (blockIdx.y * p.plan.slotsPadded + b.firstSlot) * b.paddedK;
    for (int r = 0; r < kRowsPerWarp; ++r)
    {
        int const row = threadIdx.x / kWarp * kRowsPerWarp + r;
        float const sum = warpSum(square[r]);
        if (threadIdx.x % kWarp == 0 && row < b.slots * b.paddedK)
        {
            p.square[base + row] = sum;
        }
    }
#pragma unroll
    for (int i = 0; i < kMaxDotTiles; ++i)
    {
        int rowTile = 0;
        int headTile = 0;
        if (dotTile(b, i, rowTile, headTile))
        {
            float* target = p.dot + (base + rowTile * kTile) * b.paddedK + headTile % b.tilesPerK * kTile;
            wmma::store_matrix_sync(target, dot[i], static_cast<unsigned>(b.paddedK), wmma::mem_row_major);
        }
    }
}

__global__ void __launch_bounds__(kThreads) partialsKernel(Problem<Bf16> p, int slotsPerGroup)
{
    extern __shared__ __align__(128) char sharedBytes[];
    Shared& shared = *reinterpret_cast<Shared*>(sharedBytes);
    int const paddedK = static_cast<int>(p.plan.paddedK);
    Block const b{static_cast<int64_t>(blockIdx.x) * slotsPerGroup, slotsPerGroup, paddedK / kTile, paddedK};
    float square[kRowsPerWarp] = {};
    Accumulator dot[kMaxDotTiles];
    for (auto& fragment : dot)
    {
        wmma::fill_fragment(fragment, 0.0F);
    }
    for (int64_t c = 0; c < p.plan.chunksPerPart; ++c)
    {
        int64_t const firstColumn = (blockIdx.y * p.plan.chunksPerPart + c) * kChunk;
        if (firstColumn >= p.shape.hidden)
        {
            break;
        }
        multiplyWrite(p, b, shared, firstColumn);
        __syncthreads();
        stageHead(p, b, shared, firstColumn);
        refineRows(p, b, shared, firstColumn, square);
        __syncthreads();
        multiplyHead(b, shared, dot);
        __syncthreads();
    }
    storePartials(p, b, square, dot);
}

int64_t slotsPerGroup(TransitionShape const& shape)
{
    return kRows / (ceilDiv(shape.candidates, kTile) * kTile);
}

} // namespace

Plan planWmma(TransitionShape const& shape)
{
    return makePlan(shape, slotsPerGroup(shape), 1, kChunk);
}

cudaError_t launchPartialsWmma(Problem<Bf16> const& p, cudaStream_t stream)
{
    // More than the 48 KiB that every kernel may use: this one has to ask. All supported architectures offer 99 KiB.
    cudaError_t const status = cudaFuncSetAttribute(
        partialsKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Shared)));
    if (status != cudaSuccess)
    {
        return status;
    }
    dim3 const grid(static_cast<unsigned>(p.plan.groups), static_cast<unsigned>(p.plan.parts));
    partialsKernel<<<grid, kThreads, sizeof(Shared), stream>>>(p, static_cast<int>(slotsPerGroup(p.shape)));
    return cudaPeekAtLastError();
}

} // namespace dspine::transition
