// Launchers of the DSpine kernels. Plain C++: usable from the TensorRT plugins and from any other host program.
//
// Symbols: N sequences, B slots of a block (slot 0 is the anchor), d hidden size, r transfer rank, m message size,
// K candidates, V vocabulary rows. All tensors are dense and row-major. T is float or bfloat16; sums, norms,
// exponentials and scores are float32 throughout, and the float32 variants never use TF32.
//
// Every launcher is asynchronous on `stream`, allocates nothing, keeps no state and gives the same bits for the same
// arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

namespace dspine
{

inline constexpr int32_t kMinBlock = 2;
inline constexpr int32_t kMaxBlock = 32;
inline constexpr int32_t kMaxCandidates = 64;

enum class Element : int32_t
{
    kFloat32,
    kBFloat16,
};

struct InjectionShape
{
    int64_t batch;   // N
    int64_t block;   // B
    int64_t hidden;  // d
    int64_t rank;    // r
    int64_t message; // m
};

struct InjectionTensors
{
    void const* hidden;                // T [N, B, d]
    void const* feature;               // T [N, B, r]
    void const* anchorMessage;         // T [N, 2m], the anchor's row of the token table
    void const* messageWeight;         // T [m, r]
    void const* receiverGateWeight;    // T [m, r]
    void const* predecessorGateWeight; // T [m, r]
    void const* gateBias;              // T [m]
    void const* writeWeight;           // T [d, m]
    void* injected;                    // T [N, B, d]
};

//! Bytes of scratch memory; enough for every smaller batch as well.
size_t adjacentInjectionWorkspace(InjectionShape const& shape, Element element);
cudaError_t adjacentInjection(InjectionShape const& shape, Element element, InjectionTensors const& tensors,
    void* workspace, cudaStream_t stream);

struct TransitionShape
{
    int64_t batch;      // N
    int64_t slots;      // B-1
    int64_t hidden;     // d
    int64_t message;    // m
    int64_t candidates; // K
    int64_t vocab;      // V
};

struct TransitionTensors
{
    void const* preInjection;    // T [N, B-1, d]
    void const* receiverGate;    // T [N, B-1, m], bias included
    int64_t const* anchorIds;    // [N]
    int64_t const* candidateIds; // [N, B-1, K]; ids outside [0, V) are clamped
    void const* tokenTable;      // T [V, 2m], row v = [M p_v ; G_p p_v]
    void const* writeWeight;     // T [d, m]
    void const* normWeight;      // T [d]
    void const* lmHead;          // T [V, d]
    float* transitionScores;     // [N, B-1, K, K], predecessor before successor
};

size_t transitionScoresWorkspace(TransitionShape const& shape, Element element);
cudaError_t transitionScores(TransitionShape const& shape, Element element, float eps, TransitionTensors const& tensors,
    void* workspace, cudaStream_t stream);

struct WalkShape
{
    int64_t batch;      // N
    int64_t slots;      // B-1
    int64_t candidates; // K
};

struct WalkTensors
{
    float const* transitionScores; // [N, B-1, K, K]
    int64_t const* candidateIds;   // [N, B-1, K]
    float const* temperature;      // [N]; greedy unless > 0
    float const* uniforms;         // [N, B-1] in [0, 1)
    int64_t* tokens;               // [N, B-1]
    float* q;                      // [N, B-1, K], the rows that were sampled from; one-hot where greedy
};

cudaError_t latticeWalk(WalkShape const& shape, WalkTensors const& tensors, cudaStream_t stream);

} // namespace dspine
