// What the stages of the transition scores share: the partition of the work, the workspace and the typed problem.
//
// Stage 1 (gate) turns the K possible predecessors of every slot into gated messages z. Stage 2 (partials) splits the
// hidden dimension: per chunk it forms y = pre + scale * Wr z and reduces it at once to |y|^2 [K] and <gamma y, W_j>
// [K, K], so y itself is never stored. Stage 3 (reduce) adds the chunks in a fixed order and divides by the norm.
#pragma once

#include "common.cuh"

namespace dspine::transition
{

inline constexpr int kRowTile = 16;
//! Stage 2 aims at this many blocks; a constant, so that results do not depend on the GPU's size.
inline constexpr int64_t kTargetBlocks = 256;

struct Plan
{
    int64_t slots;       // N * (B-1)
    int64_t paddedK;     // K rounded up to whole row tiles
    int64_t groups;      // sets of slots that one block handles together
    int64_t slotsPadded; // slots rounded up to whole groups
    int64_t parts;       // splits of the hidden dimension
    int64_t chunksPerPart;
};

//! Plan for blocks that take `slotsPerGroup` slots, and for `blocksPerSlot` blocks a slot when they take less than one.
inline Plan makePlan(TransitionShape const& s, int64_t slotsPerGroup, int64_t blocksPerSlot, int64_t chunkColumns)
{
    Plan plan{};
    plan.slots = s.batch * s.slots;
    plan.paddedK = ceilDiv(s.candidates, kRowTile) * kRowTile;
    plan.groups = ceilDiv(plan.slots, slotsPerGroup);
    plan.slotsPadded = plan.groups * slotsPerGroup;
    int64_t const chunks = ceilDiv(s.hidden, chunkColumns);
    int64_t const wanted = ceilDiv(kTargetBlocks, plan.groups * blocksPerSlot);
    plan.chunksPerPart = ceilDiv(chunks, wanted < chunks ? wanted : chunks);
    plan.parts = ceilDiv(chunks, plan.chunksPerPart);
    return plan;
}

template<typename T>
struct Problem
{
    TransitionShape shape;
    Plan plan;
    float eps;
    T const* preInjection;
    T const* receiverGate;
    int64_t const* anchorIds;
    int64_t const* candidateIds;
    T const* tokenTable;
    T const* writeWeight;
    T const* normWeight;
    T const* lmHead;
    float* scores;
    T* z;          // [slots, paddedK, m]; rows from K on are zero
    float* scale;  // [slots], |pre| / sqrt(d)
    float* square; // [parts, slotsPadded, paddedK], partial |y|^2
    float* dot;    // [parts, slotsPadded, paddedK, paddedK], partial <gamma y, W_j>
};

//! Row of lm_head of candidate j of a slot; null for padding.
template<typename T>
__device__ __forceinline__ T const* candidateRow(Problem<T> const& p, int64_t slot, int j)
{
    if (slot >= p.plan.slots || j >= p.shape.candidates)
    {
        return nullptr;
    }
    return p.lmHead + clampId(p.candidateIds[slot * p.shape.candidates + j], p.shape.vocab) * p.shape.hidden;
}

Plan planFma(TransitionShape const& shape);
template<typename T>
void launchPartialsFma(Problem<T> const& problem, cudaStream_t stream);

//! Tensor cores; needs d and m divisible by 16 and pointers aligned to 32 bytes.
Plan planWmma(TransitionShape const& shape);
cudaError_t launchPartialsWmma(Problem<__nv_bfloat16> const& problem, cudaStream_t stream);

} // namespace dspine::transition
