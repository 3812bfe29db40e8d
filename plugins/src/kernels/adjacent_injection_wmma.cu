// Adjacent injection on tensor cores (bfloat16 products, float32 sums).
//
// At decoding sizes the weights dominate: each is read once per 16 or 32 rows, straight from global memory into
// fragments, with the inner dimension split over the warps of a block so that a small batch still keeps many loads in
// flight.
#include "injection_parts.cuh"

#include <mma.h>

namespace dspine::injection
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
constexpr int kTile = 16;
constexpr int kTileArea = kTile * kTile;
constexpr int kWriteColumns = 32;
constexpr int kWriteSlices = kWarps / (kWriteColumns / kTile);
constexpr int kWriteInner = 512;

template<int kRowTiles>
struct MessageShared
{
    static constexpr int kInner = 1024 / kRowTiles;
    // The stride is a multiple of 32 bytes: the receiver's tiles start one row further than the predecessor's.
    static constexpr int kStride = kInner + 16;
    union
    {
        Bf16 rows[(kTile * kRowTiles + 1) * kStride]; // row 0 is the slot before the tile
        float partial[3][kWarps][kTileArea];
    };
};

template<int kRowTiles>
__device__ void accumulateMessages(Problem<Bf16> const& p, MessageShared<kRowTiles>& shared, int64_t firstRow,
    int64_t column, Accumulator (&acc)[3][kRowTiles])
{
    using Shared = MessageShared<kRowTiles>;
    int const warp = threadIdx.x / kWarp;
    Bf16 const* weights[3] = {p.receiverGateWeight, p.predecessorGateWeight, p.messageWeight};
    for (int64_t base = 0; base < p.rank; base += Shared::kInner)
    {
        int const inner = static_cast<int>(min(static_cast<int64_t>(Shared::kInner), p.rank - base));
        int const vectors = inner / 8;
        __syncthreads();
        for (int i = threadIdx.x; i < (kTile * kRowTiles + 1) * vectors; i += kThreads)
        {
            int const q = i / vectors;
            int const at = i % vectors * 8;
            int64_t const row = firstRow - 1 + q;
            bool const inside = row >= 0 && row < p.rows;
            copyOrZero8(
                shared.rows + q * Shared::kStride + at, inside ? p.feature + row * p.rank + base + at : nullptr);
        }
        __syncthreads();
#pragma unroll 4
        for (int k = warp * kTile; k < inner; k += kWarps * kTile)
        {
            FragmentW w[3];
            for (int i = 0; i < 3; ++i)
            {
                wmma::load_matrix_sync(w[i], weights[i] + column * p.rank + base + k, static_cast<unsigned>(p.rank));
            }
            for (int t = 0; t < kRowTiles; ++t)
            {
                FragmentA predecessor;
                FragmentA receiver;
                Bf16 const* tile = shared.rows + t * kTile * Shared::kStride + k;
                wmma::load_matrix_sync(predecessor, tile, Shared::kStride);
                wmma::load_matrix_sync(receiver, tile + Shared::kStride, Shared::kStride);
                wmma::mma_sync(acc[0][t], receiver, w[0], acc[0][t]);
                wmma::mma_sync(acc[1][t], predecessor, w[1], acc[1][t]);
                wmma::mma_sync(acc[2][t], predecessor, w[2], acc[2][t]);
            }
        }
    }
}

//! One block: 16 * kRowTiles rows x 16 message columns. The blocks after the last tile compute row norms instead.
template<int kRowTiles>
__global__ void __launch_bounds__(kThreads) messageKernel(Problem<Bf16> p, int64_t columnTiles, int64_t tiles)
{
    __shared__ __align__(128) MessageShared<kRowTiles> shared;
    if (blockIdx.x >= tiles)
    {
        storeScales(p, blockIdx.x - tiles);
        return;
    }
    int64_t const firstRow = blockIdx.x / columnTiles * (kTile * kRowTiles);
    int64_t const tile = blockIdx.x % columnTiles;
    Accumulator acc[3][kRowTiles];
    for (auto& kind : acc)
    {
        for (auto& fragment : kind)
        {
            wmma::fill_fragment(fragment, 0.0F);
        }
    }
    accumulateMessages<kRowTiles>(p, shared, firstRow, tile * kTile, acc);
    int const warp = threadIdx.x / kWarp;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
    {
        __syncthreads();
        for (int i = 0; i < 3; ++i)
        {
            wmma::store_matrix_sync(shared.partial[i][warp], acc[i][t], kTile, wmma::mem_row_major);
        }
        __syncthreads();
        float sum[3] = {};
        for (int w = 0; w < kWarps; ++w)
        {
            for (int i = 0; i < 3; ++i)
            {
                sum[i] += shared.partial[i][w][threadIdx.x];
            }
        }
        int64_t const row = firstRow + t * kTile + threadIdx.x / kTile;
        if (row < p.rows)
        {
            storeGatedMessage(p, row, tile * kTile + threadIdx.x % kTile, sum[0], sum[1], sum[2]);
        }
    }
}

template<int kRowTiles>
struct WriteShared
{
    static constexpr int kStride = kWriteInner + 8;
    union
    {
        Bf16 rows[kTile * kRowTiles * kStride];
        float partial[kWriteSlices][kRowTiles][kWriteColumns / kTile][kTileArea];
    };
};

//! One block: 16 * kRowTiles rows x 32 hidden columns; warps form 2 column tiles x 4 slices of the inner dimension.
template<int kRowTiles>
__global__ void __launch_bounds__(kThreads) writeKernel(Problem<Bf16> p, int64_t columnTiles)
{
    using Shared = WriteShared<kRowTiles>;
    __shared__ __align__(128) Shared shared;
    int64_t const firstRow = blockIdx.x / columnTiles * (kTile * kRowTiles);
    int64_t const firstColumn = blockIdx.x % columnTiles * kWriteColumns;
    int const slice = threadIdx.x / kWarp % kWriteSlices;
    int const half = threadIdx.x / kWarp / kWriteSlices;
    int64_t const column = firstColumn + half * kTile;
    Accumulator acc[kRowTiles];
    for (auto& fragment : acc)
    {
        wmma::fill_fragment(fragment, 0.0F);
    }
    for (int64_t base = 0; base < p.message; base += kWriteInner)
    {
        int const inner = static_cast<int>(min(static_cast<int64_t>(kWriteInner), p.message - base));
        int const vectors = inner / 8;
        __syncthreads();
        for (int i = threadIdx.x; i < kTile * kRowTiles * vectors; i += kThreads)
        {
            int const q = i / vectors;
            int const at = i % vectors * 8;
            int64_t const row = firstRow + q;
            copyOrZero8(
                shared.rows + q * Shared::kStride + at, row < p.rows ? p.z + row * p.message + base + at : nullptr);
        }
        __syncthreads();
        int const end = column < p.hiddenSize ? inner : 0;
#pragma unroll 4
        for (int k = slice * kTile; k < end; k += kWriteSlices * kTile)
        {
            FragmentW w;
            wmma::load_matrix_sync(w, p.writeWeight + column * p.message + base + k, static_cast<unsigned>(p.message));
            for (int t = 0; t < kRowTiles; ++t)
            {
                FragmentA a;
                wmma::load_matrix_sync(a, shared.rows + t * kTile * Shared::kStride + k, Shared::kStride);
                wmma::mma_sync(acc[t], a, w, acc[t]);
            }
        }
    }
    __syncthreads();
    for (int t = 0; t < kRowTiles; ++t)
    {
        wmma::store_matrix_sync(shared.partial[slice][t][half], acc[t], kTile, wmma::mem_row_major);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kTile * kRowTiles * kWriteColumns; i += kThreads)
    {
        int const r = i / kWriteColumns;
        int const c = i % kWriteColumns;
        int64_t const row = firstRow + r;
        if (row < p.rows && firstColumn + c < p.hiddenSize)
        {
            float written = 0.0F;
            for (int s = 0; s < kWriteSlices; ++s)
            {
                written += shared.partial[s][r / kTile][c / kTile][r % kTile * kTile + c % kTile];
            }
            storeInjected(p, row, firstColumn + c, written);
        }
    }
}

template<int kRowTiles>
cudaError_t launch(Problem<Bf16> const& p, cudaStream_t stream)
{
    int64_t const rowTiles = ceilDiv(p.rows, kTile * kRowTiles);
    int64_t const messageTiles = p.message / kTile;
    int64_t const hiddenTiles = ceilDiv(p.hiddenSize, kWriteColumns);
    int64_t const tiles = rowTiles * messageTiles;
    int64_t const normBlocks = ceilDiv(p.rows, kWarps);
    messageKernel<kRowTiles>
        <<<static_cast<unsigned>(tiles + normBlocks), kThreads, 0, stream>>>(p, messageTiles, tiles);
    writeKernel<kRowTiles><<<static_cast<unsigned>(rowTiles * hiddenTiles), kThreads, 0, stream>>>(p, hiddenTiles);
    return cudaPeekAtLastError();
}

} // namespace

cudaError_t launchWmma(Problem<Bf16> const& problem, cudaStream_t stream)
{
    return problem.rows <= kTile ? launch<1>(problem, stream) : launch<2>(problem, stream);
}

} // namespace dspine::injection
