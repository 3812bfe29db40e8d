// The only exported symbols: what IPluginRegistry::loadLibrary looks up, and a record that tools can read without
// TensorRT.
//
// Nothing here calls the registry or any other TensorRT function. IPluginRegistry changed its virtual table between
// major versions, so a library that calls it works with one major only; one that merely lists its creators works with
// all that have IPluginV3.
#include "dspine/abi.h"
#include "op_creator.h"
#include "op_plugin.h"

#include <stdexcept>
#include <utility>

namespace dspine
{

std::unique_ptr<OpPlugin> makePlugin(OpSchema const& schema, Attributes attributes)
{
    if (&schema == &kAdjacentInjectionSchema)
    {
        return makeAdjacentInjection(std::move(attributes));
    }
    if (&schema == &kTransitionScoresSchema)
    {
        return makeTransitionScores(std::move(attributes));
    }
    if (&schema == &kLatticeWalkSchema)
    {
        return makeLatticeWalk(std::move(attributes));
    }
    throw std::invalid_argument("no plugin implements this operator");
}

} // namespace dspine

#define DSPINE_EXPORT __attribute__((visibility("default")))

extern "C" DSPINE_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& nbCreators)
{
    static dspine::OpCreator adjacentInjection{dspine::kAdjacentInjectionSchema};
    static dspine::OpCreator transitionScores{dspine::kTransitionScoresSchema};
    static dspine::OpCreator latticeWalk{dspine::kLatticeWalkSchema};
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&adjacentInjection, &transitionScores, &latticeWalk};
    static_assert(std::size(creators) == std::size(dspine::kOps));
    nbCreators = static_cast<int32_t>(std::size(creators));
    return creators;
}

// loadLibrary requires the symbol; messages of these plugins go to stderr, which needs no host object.
extern "C" DSPINE_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* /*finder*/) {}

extern "C" DSPINE_EXPORT DspinePluginsAbi const* dspine_plugins_abi()
{
    static DspinePluginsAbi const abi{sizeof(DspinePluginsAbi), DSPINE_ABI_MAJOR, DSPINE_ABI_MINOR, NV_TENSORRT_MAJOR,
        NV_TENSORRT_MINOR, DSPINE_VERSION_STRING, DSPINE_ARCHITECTURES, DSPINE_SOURCE_HASH};
    return &abi;
}
