// IPluginV3 of dspine::LatticeWalk.
#include "op_plugin.h"

#include <utility>

namespace dspine
{
namespace
{

class LatticeWalkPlugin final : public OpPlugin
{
public:
    explicit LatticeWalkPlugin(Attributes attributes)
        : OpPlugin(kLatticeWalkSchema, std::move(attributes))
    {
    }

protected:
    size_t workspaceBytes(Sizes const& /*sizes*/, Element /*element*/) const noexcept override
    {
        return 0;
    }

    cudaError_t launch(Sizes const& s, Element /*element*/, void const* const* inputs, void* const* outputs,
        void* /*workspace*/, cudaStream_t stream) const noexcept override
    {
        WalkTensors const tensors{static_cast<float const*>(inputs[0]), static_cast<int64_t const*>(inputs[1]),
            static_cast<float const*>(inputs[2]), static_cast<float const*>(inputs[3]),
            static_cast<int64_t*>(outputs[0]), static_cast<float*>(outputs[1])};
        return latticeWalk({s[kBatch], s[kBlock] - 1, s[kCandidates]}, tensors, stream);
    }
};

} // namespace

std::unique_ptr<OpPlugin> makeLatticeWalk(Attributes attributes)
{
    return std::make_unique<LatticeWalkPlugin>(std::move(attributes));
}

} // namespace dspine
