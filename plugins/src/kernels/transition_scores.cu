// Transition scores: workspace layout, the gate and reduce stages, and the choice of the middle stage.
#include "transition_parts.cuh"

#include <algorithm>

namespace dspine
{
namespace transition
{
namespace
{

constexpr int kGateThreads = 128;
constexpr int kReduceThreads = 256;

//! One block per (slot, predecessor); the block after a slot's last predecessor computes |pre|.
template<typename T>
__global__ void __launch_bounds__(kGateThreads) gateKernel(Problem<T> p)
{
    int64_t const slot = blockIdx.x / (p.plan.paddedK + 1);
    int64_t const k = blockIdx.x % (p.plan.paddedK + 1);
    int64_t const message = p.shape.message;
    if (k == p.plan.paddedK)
    {
        if (threadIdx.x < kWarp)
        {
            float const scale = rowScale(p.preInjection + slot * p.shape.hidden, p.shape.hidden);
            p.scale[slot] = scale;
        }
        return;
    }
    T* z = p.z + (slot * p.plan.paddedK + k) * message;
    bool const padding = k >= p.shape.candidates;
    int64_t token = 0;
    if (!padding)
    {
        bool const first = slot % p.shape.slots == 0;
        token = first ? p.anchorIds[slot / p.shape.slots] : p.candidateIds[(slot - 1) * p.shape.candidates + k];
    }
    T const* row = p.tokenTable + clampId(token, p.shape.vocab) * 2 * message;
    T const* receiver = p.receiverGate + slot * message;
    for (int64_t c = threadIdx.x; c < message; c += kGateThreads)
    {
        float const gate = sigmoid(toFloat(receiver[c]) + toFloat(row[message + c]));
        z[c] = fromFloat<T>(padding ? 0.0F : gate * toFloat(row[c]));
    }
}

template<typename T>
__global__ void __launch_bounds__(kReduceThreads) reduceKernel(Problem<T> p)
{
    __shared__ float inverseNorm[kMaxCandidates];
    int64_t const slot = blockIdx.x;
    int const candidates = static_cast<int>(p.shape.candidates);
    int64_t const paddedK = p.plan.paddedK;
    if (threadIdx.x < candidates)
    {
        float square = 0.0F;
        for (int64_t part = 0; part < p.plan.parts; ++part)
        {
            square += p.square[(part * p.plan.slotsPadded + slot) * paddedK + threadIdx.x];
        }
        inverseNorm[threadIdx.x] = 1.0F / sqrtf(square / static_cast<float>(p.shape.hidden) + p.eps);
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < candidates * candidates; pair += kReduceThreads)
    {
        int const k = pair / candidates;
        int const j = pair % candidates;
        float const* dot = p.dot + (slot * paddedK + k) * paddedK + j;
        float sum = 0.0F;
#pragma unroll 8
        for (int64_t part = 0; part < p.plan.parts; ++part)
        {
            sum += dot[part * p.plan.slotsPadded * paddedK * paddedK];
        }
        p.scores[slot * candidates * candidates + pair] = sum * inverseNorm[k];
    }
}

struct Layout
{
    size_t scale;
    size_t square;
    size_t dot;
    size_t total;
};

size_t rounded(int64_t bytes)
{
    return static_cast<size_t>(ceilDiv(bytes, 256) * 256);
}

//! z comes first; the fields are the offsets of the other buffers.
Layout layoutOf(TransitionShape const& s, Plan const& plan, Element element)
{
    int64_t const elementBytes = element == Element::kBFloat16 ? 2 : 4;
    int64_t const padded = plan.parts * plan.slotsPadded * plan.paddedK;
    Layout layout{};
    layout.scale = rounded(plan.slots * plan.paddedK * s.message * elementBytes);
    layout.square = layout.scale + rounded(plan.slots * 4);
    layout.dot = layout.square + rounded(padded * 4);
    layout.total = layout.dot + rounded(padded * plan.paddedK * 4);
    return layout;
}

bool valid(TransitionShape const& s)
{
    return s.batch >= 0 && s.slots >= kMinBlock - 1 && s.slots <= kMaxBlock - 1 && s.hidden > 0 && s.message > 0
           && s.candidates >= 1 && s.candidates <= kMaxCandidates && s.vocab > 0;
}

template<typename T>
Problem<T> typed(TransitionShape const& s, TransitionTensors const& t, float eps)
{
    Problem<T> p{};
    p.shape = s;
    p.eps = eps;
    p.preInjection = static_cast<T const*>(t.preInjection);
    p.receiverGate = static_cast<T const*>(t.receiverGate);
    p.anchorIds = t.anchorIds;
    p.candidateIds = t.candidateIds;
    p.tokenTable = static_cast<T const*>(t.tokenTable);
    p.writeWeight = static_cast<T const*>(t.writeWeight);
    p.normWeight = static_cast<T const*>(t.normWeight);
    p.lmHead = static_cast<T const*>(t.lmHead);
    p.scores = t.transitionScores;
    return p;
}

template<typename T>
void placeWorkspace(Problem<T>& p, Plan const& plan, Element element, void* workspace)
{
    Layout const layout = layoutOf(p.shape, plan, element);
    char* base = static_cast<char*>(workspace);
    p.plan = plan;
    p.z = reinterpret_cast<T*>(base);
    p.scale = reinterpret_cast<float*>(base + layout.scale);
    p.square = reinterpret_cast<float*>(base + layout.square);
    p.dot = reinterpret_cast<float*>(base + layout.dot);
}

template<typename T>
void launchGate(Problem<T> const& p, cudaStream_t stream)
{
    auto const blocks = static_cast<unsigned>(p.plan.slots * (p.plan.paddedK + 1));
    gateKernel<T><<<blocks, kGateThreads, 0, stream>>>(p);
}

template<typename T>
cudaError_t launchReduce(Problem<T> const& p, cudaStream_t stream)
{
    reduceKernel<T><<<static_cast<unsigned>(p.plan.slots), kReduceThreads, 0, stream>>>(p);
    return cudaPeekAtLastError();
}

template<typename T>
cudaError_t runFma(Problem<T> p, Element element, void* workspace, cudaStream_t stream)
{
    placeWorkspace(p, planFma(p.shape), element, workspace);
    launchGate(p, stream);
    launchPartialsFma(p, stream);
    return launchReduce(p, stream);
}

bool fitsTensorCores(Problem<__nv_bfloat16> const& p, void const* workspace)
{
    return p.shape.hidden % 16 == 0 && p.shape.message % 16 == 0 && alignedTo32(p.writeWeight, p.lmHead, workspace);
}

} // namespace
} // namespace transition

size_t transitionScoresWorkspace(TransitionShape const& shape, Element element)
{
    // A smaller batch is split into more parts, so the largest one does not need the most: `parts * slotsPadded` stays
    // below the slots plus the target number of blocks times the slots of a block (at most 4), whatever the batch.
    TransitionShape s = shape;
    size_t most = 0;
    for (int64_t candidates = 1; candidates <= shape.candidates; ++candidates)
    {
        s.candidates = candidates;
        for (transition::Plan plan : {transition::planFma(s), transition::planWmma(s)})
        {
            int64_t const slotsPerGroup = plan.groups > 0 ? plan.slotsPadded / plan.groups : 1;
            plan.parts = 1;
            plan.slotsPadded += (transition::kTargetBlocks + 1) * slotsPerGroup;
            most = std::max(most, transition::layoutOf(s, plan, element).total);
        }
    }
    return most;
}

cudaError_t transitionScores(TransitionShape const& shape, Element element, float eps, TransitionTensors const& tensors,
    void* workspace, cudaStream_t stream)
{
    using namespace transition;
    if (!valid(shape) || (workspace == nullptr && shape.batch > 0))
    {
        return cudaErrorInvalidValue;
    }
    if (shape.batch == 0)
    {
        return cudaSuccess;
    }
    if (element == Element::kFloat32)
    {
        return runFma(typed<float>(shape, tensors, eps), element, workspace, stream);
    }
    auto problem = typed<__nv_bfloat16>(shape, tensors, eps);
    if (!fitsTensorCores(problem, workspace))
    {
        return runFma(problem, element, workspace, stream);
    }
    placeWorkspace(problem, planWmma(shape), element, workspace);
    launchGate(problem, stream);
    cudaError_t const status = launchPartialsWmma(problem, stream);
    return status != cudaSuccess ? status : launchReduce(problem, stream);
}

} // namespace dspine
