// Adjacent injection: checks, workspace layout and the choice between tensor cores and FMA units.
#include "injection_parts.cuh"

namespace dspine
{
namespace
{

bool valid(InjectionShape const& s)
{
    return s.batch >= 0 && s.block >= kMinBlock && s.block <= kMaxBlock && s.hidden > 0 && s.rank > 0 && s.message > 0;
}

size_t scaleBytes(InjectionShape const& s)
{
    // Rounded up so that z, which follows, starts on a 256-byte boundary.
    return static_cast<size_t>(ceilDiv(s.batch * s.block * static_cast<int64_t>(sizeof(float)), 256) * 256);
}

template<typename T>
injection::Problem<T> typed(InjectionShape const& s, InjectionTensors const& t, void* workspace)
{
    injection::Problem<T> p{};
    p.rows = s.batch * s.block;
    p.block = s.block;
    p.hiddenSize = s.hidden;
    p.rank = s.rank;
    p.message = s.message;
    p.hidden = static_cast<T const*>(t.hidden);
    p.feature = static_cast<T const*>(t.feature);
    p.anchorMessage = static_cast<T const*>(t.anchorMessage);
    p.messageWeight = static_cast<T const*>(t.messageWeight);
    p.receiverGateWeight = static_cast<T const*>(t.receiverGateWeight);
    p.predecessorGateWeight = static_cast<T const*>(t.predecessorGateWeight);
    p.gateBias = static_cast<T const*>(t.gateBias);
    p.writeWeight = static_cast<T const*>(t.writeWeight);
    p.injected = static_cast<T*>(t.injected);
    p.scale = static_cast<float*>(workspace);
    p.z = reinterpret_cast<T*>(static_cast<char*>(workspace) + scaleBytes(s));
    return p;
}

bool fitsTensorCores(injection::Problem<__nv_bfloat16> const& p)
{
    return p.hiddenSize % 16 == 0 && p.rank % 16 == 0 && p.message % 16 == 0
           && alignedTo32(
               p.feature, p.messageWeight, p.receiverGateWeight, p.predecessorGateWeight, p.writeWeight, p.z);
}

} // namespace

size_t adjacentInjectionWorkspace(InjectionShape const& shape, Element element)
{
    size_t const elementBytes = element == Element::kBFloat16 ? sizeof(__nv_bfloat16) : sizeof(float);
    return scaleBytes(shape) + static_cast<size_t>(shape.batch * shape.block * shape.message) * elementBytes;
}

cudaError_t adjacentInjection(
    InjectionShape const& shape, Element element, InjectionTensors const& tensors, void* workspace, cudaStream_t stream)
{
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
        return injection::launchFma(typed<float>(shape, tensors, workspace), stream);
    }
    auto const problem = typed<__nv_bfloat16>(shape, tensors, workspace);
    return fitsTensorCores(problem) ? injection::launchWmma(problem, stream) : injection::launchFma(problem, stream);
}

} // namespace dspine
