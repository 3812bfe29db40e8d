// Adjacent injection on the FMA units: the float32 path, and bfloat16 sizes that tensor cores cannot tile.
#include "fma_tile.cuh"
#include "injection_parts.cuh"

namespace dspine::injection
{
namespace
{

//! One block: 16 rows x 64 message columns. The blocks after the last tile compute row norms instead.
template<typename T>
__global__ void __launch_bounds__(fma::kThreads) messageKernel(Problem<T> p, int64_t columnTiles, int64_t tiles)
{
    __shared__ fma::Stage stage;
    if (blockIdx.x >= tiles)
    {
        storeScales(p, blockIdx.x - tiles);
        return;
    }
    int64_t const firstRow = blockIdx.x / columnTiles * fma::kRows;
    int64_t const tile = blockIdx.x % columnTiles;
    int64_t const firstColumn = tile * fma::kColumns;
    auto receiverRow = [&](int i) -> T const*
    {
        int64_t const row = firstRow + i;
        return row < p.rows ? p.feature + row * p.rank : nullptr;
    };
    auto predecessorRow = [&](int i) -> T const*
    {
        int64_t const row = firstRow + i;
        return row < p.rows && row % p.block > 1 ? p.feature + (row - 1) * p.rank : nullptr;
    };
    float receiver[2][2] = {};
    float predecessor[2][2] = {};
    float message[2][2] = {};
    fma::multiply(stage, receiverRow, p.receiverGateWeight, p.message, p.rank, firstColumn, receiver);
    fma::multiply(stage, predecessorRow, p.predecessorGateWeight, p.message, p.rank, firstColumn, predecessor);
    fma::multiply(stage, predecessorRow, p.messageWeight, p.message, p.rank, firstColumn, message);
    for (int i = 0; i < 2; ++i)
    {
        for (int j = 0; j < 2; ++j)
        {
            int64_t const row = firstRow + fma::threadRow(i);
            int64_t const column = firstColumn + fma::threadColumn(j);
            if (row < p.rows && column < p.message)
            {
                storeGatedMessage(p, row, column, receiver[i][j], predecessor[i][j], message[i][j]);
            }
        }
    }
}

template<typename T>
__global__ void __launch_bounds__(fma::kThreads) writeKernel(Problem<T> p, int64_t columnTiles)
{
    __shared__ fma::Stage stage;
    int64_t const firstRow = blockIdx.x / columnTiles * fma::kRows;
    int64_t const firstColumn = blockIdx.x % columnTiles * fma::kColumns;
    auto zRow = [&](int i) -> T const*
    {
        int64_t const row = firstRow + i;
        return row < p.rows ? p.z + row * p.message : nullptr;
    };
    float written[2][2] = {};
    fma::multiply(stage, zRow, p.writeWeight, p.hiddenSize, p.message, firstColumn, written);
    for (int i = 0; i < 2; ++i)
    {
        for (int j = 0; j < 2; ++j)
        {
            int64_t const row = firstRow + fma::threadRow(i);
            int64_t const column = firstColumn + fma::threadColumn(j);
            if (row < p.rows && column < p.hiddenSize)
            {
                storeInjected(p, row, column, written[i][j]);
            }
        }
    }
}

} // namespace

template<typename T>
cudaError_t launchFma(Problem<T> const& p, cudaStream_t stream)
{
    int64_t const rowTiles = ceilDiv(p.rows, fma::kRows);
    int64_t const messageTiles = ceilDiv(p.message, fma::kColumns);
    int64_t const hiddenTiles = ceilDiv(p.hiddenSize, fma::kColumns);
    int64_t const tiles = rowTiles * messageTiles;
    int64_t const normBlocks = ceilDiv(p.rows, fma::kThreads / kWarp);
    messageKernel<T><<<static_cast<unsigned>(tiles + normBlocks), fma::kThreads, 0, stream>>>(p, messageTiles, tiles);
    writeKernel<T><<<static_cast<unsigned>(rowTiles * hiddenTiles), fma::kThreads, 0, stream>>>(p, hiddenTiles);
    return cudaPeekAtLastError();
}

template cudaError_t launchFma<float>(Problem<float> const&, cudaStream_t);
template cudaError_t launchFma<__nv_bfloat16>(Problem<__nv_bfloat16> const&, cudaStream_t);

} // namespace dspine::injection
