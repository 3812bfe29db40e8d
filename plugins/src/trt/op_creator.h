// One plugin creator an operator, driven by the schema.
#pragma once

#include "dspine/schema_generated.h"

#include <NvInferRuntime.h>
#include <vector>

namespace dspine
{

//! Registers itself nowhere: the host finds it through `getCreators`.
class OpCreator final : public nvinfer1::IPluginCreatorV3One
{
public:
    explicit OpCreator(OpSchema const& schema);

    //! Null, with the reason on stderr, when a required attribute is missing or is no scalar float.
    nvinfer1::IPluginV3* createPlugin(nvinfer1::AsciiChar const* name, nvinfer1::PluginFieldCollection const* fields,
        nvinfer1::TensorRTPhase phase) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override;
    nvinfer1::AsciiChar const* getPluginName() const noexcept override;
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override;
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override;

private:
    OpSchema const& mSchema;
    std::vector<nvinfer1::PluginField> mFields;
    nvinfer1::PluginFieldCollection mFieldCollection{};
};

} // namespace dspine
