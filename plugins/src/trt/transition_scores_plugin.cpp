// IPluginV3 of dspine::TransitionScores.
#include "op_plugin.h"

#include <utility>

namespace dspine
{
namespace
{

class TransitionScoresPlugin final : public OpPlugin
{
public:
    explicit TransitionScoresPlugin(Attributes attributes)
        : OpPlugin(kTransitionScoresSchema, std::move(attributes))
    {
    }

protected:
    size_t workspaceBytes(Sizes const& sizes, Element element) const noexcept override
    {
        return transitionScoresWorkspace(shapeOf(sizes), element);
    }

    cudaError_t launch(Sizes const& sizes, Element element, void const* const* inputs, void* const* outputs,
        void* workspace, cudaStream_t stream) const noexcept override
    {
        TransitionTensors const tensors{inputs[0], inputs[1], static_cast<int64_t const*>(inputs[2]),
            static_cast<int64_t const*>(inputs[3]), inputs[4], inputs[5], inputs[6], inputs[7],
            static_cast<float*>(outputs[0])};
        float const eps = attribute(0);
        return transitionScores(shapeOf(sizes), element, eps, tensors, workspace, stream);
    }

private:
    static TransitionShape shapeOf(Sizes const& s)
    {
        return {s[kBatch], s[kBlock] - 1, s[kHidden], s[kMessage], s[kCandidates], s[kVocab]};
    }
};

} // namespace

std::unique_ptr<OpPlugin> makeTransitionScores(Attributes attributes)
{
    return std::make_unique<TransitionScoresPlugin>(std::move(attributes));
}

} // namespace dspine
