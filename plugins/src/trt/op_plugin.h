// The part of an IPluginV3 that follows from the operator schema; an operator adds its limits, its workspace and its
// launch.
#pragma once

#include "dspine/kernels.h"
#include "shape_binding.h"

#include <NvInferRuntime.h>
#include <memory>
#include <vector>

namespace dspine
{

//! Values of the schema's attributes, in its order.
using Attributes = std::vector<float>;

//! Holds nothing but the attributes: shapes come with each call, so one object may serve several streams at once.
class OpPlugin
    : public nvinfer1::IPluginV3
    , public nvinfer1::IPluginV3OneCore
    , public nvinfer1::IPluginV3OneBuild
    , public nvinfer1::IPluginV3OneRuntime
{
public:
    OpPlugin(OpSchema const& schema, Attributes attributes);

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    nvinfer1::AsciiChar const* getPluginName() const noexcept override;
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override;
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override;

    int32_t getNbOutputs() const noexcept override;
    int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t nbOutputs, nvinfer1::DataType const* inputTypes,
        int32_t nbInputs) const noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
        int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
        nvinfer1::IExprBuilder& exprBuilder) noexcept override;
    bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
        int32_t nbOutputs) noexcept override;
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
        nvinfer1::DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept override;
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t nbInputs,
        nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t nbOutputs) const noexcept override;

    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const* out,
        int32_t nbOutputs) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const* outputDesc,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

protected:
    float attribute(int32_t index) const
    {
        return mAttributes[static_cast<size_t>(index)];
    }

    //! Scratch bytes for every size up to `sizes`.
    virtual size_t workspaceBytes(Sizes const& sizes, Element element) const noexcept = 0;

    virtual cudaError_t launch(Sizes const& sizes, Element element, void const* const* inputs, void* const* outputs,
        void* workspace, cudaStream_t stream) const noexcept = 0;

private:
    bool countsMatch(int32_t nbInputs, int32_t nbOutputs) const noexcept;
    template<typename Desc, typename DimsOf>
    bool bindAll(Desc const* in, Desc const* out, DimsOf dimsOf, Sizes& sizes) const noexcept;

    OpSchema const& mSchema;
    Attributes mAttributes;
    std::vector<nvinfer1::PluginField> mFields;
    nvinfer1::PluginFieldCollection mFieldCollection{};
};

//! New plugin object of the operator that `schema` describes.
std::unique_ptr<OpPlugin> makePlugin(OpSchema const& schema, Attributes attributes);

std::unique_ptr<OpPlugin> makeAdjacentInjection(Attributes attributes);
std::unique_ptr<OpPlugin> makeTransitionScores(Attributes attributes);
std::unique_ptr<OpPlugin> makeLatticeWalk(Attributes attributes);

} // namespace dspine
