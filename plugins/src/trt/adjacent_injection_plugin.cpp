// IPluginV3 of dspine::AdjacentInjection.
#include "op_plugin.h"

#include <utility>

namespace dspine
{
namespace
{

class AdjacentInjectionPlugin final : public OpPlugin
{
public:
    explicit AdjacentInjectionPlugin(Attributes attributes)
        : OpPlugin(kAdjacentInjectionSchema, std::move(attributes))
    {
    }

protected:
    size_t workspaceBytes(Sizes const& sizes, Element element) const noexcept override
    {
        return adjacentInjectionWorkspace(shapeOf(sizes), element);
    }

    cudaError_t launch(Sizes const& sizes, Element element, void const* const* inputs, void* const* outputs,
        void* workspace, cudaStream_t stream) const noexcept override
    {
        InjectionTensors const tensors{
            inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], inputs[5], inputs[6], inputs[7], outputs[0]};
        return adjacentInjection(shapeOf(sizes), element, tensors, workspace, stream);
    }

private:
    static InjectionShape shapeOf(Sizes const& s)
    {
        return {s[kBatch], s[kBlock], s[kHidden], s[kRank], s[kMessage]};
    }
};

} // namespace

std::unique_ptr<OpPlugin> makeAdjacentInjection(Attributes attributes)
{
    return std::make_unique<AdjacentInjectionPlugin>(std::move(attributes));
}

} // namespace dspine
