#include "op_plugin.h"

#include <exception>
#include <utility>

namespace dspine
{

using namespace nvinfer1;

namespace
{

//! The element type of a node's compute operands; float32 for an operator that has none.
Element elementOf(OpSchema const& schema, PluginTensorDesc const* inputs)
{
    for (int32_t i = 0; i < schema.nbInputs; ++i)
    {
        if (schema.inputs[i].element == ElementRule::kCompute)
        {
            return inputs[i].type == DataType::kBF16 ? Element::kBFloat16 : Element::kFloat32;
        }
    }
    return Element::kFloat32;
}

Operand const& operandAt(OpSchema const& schema, int32_t position)
{
    return position < schema.nbInputs ? schema.inputs[position] : schema.outputs[position - schema.nbInputs];
}

Dims staticDims(PluginTensorDesc const& desc)
{
    return desc.dims;
}

IDimensionExpr const* inputDimension(OpSchema const& schema, DimsExprs const* inputs, Dim const& wanted)
{
    for (int32_t i = 0; i < schema.nbInputs; ++i)
    {
        for (int32_t axis = 0; axis < schema.inputs[i].rank; ++axis)
        {
            Dim const& dim = schema.inputs[i].dims[axis];
            if (dim.symbol == wanted.symbol && dim.scale == wanted.scale && dim.offset == wanted.offset)
            {
                return inputs[i].d[axis];
            }
        }
    }
    return nullptr;
}

} // namespace

OpPlugin::OpPlugin(OpSchema const& schema, Attributes attributes)
    : mSchema(schema)
    , mAttributes(std::move(attributes))
{
    for (int32_t i = 0; i < schema.nbAttributes; ++i)
    {
        mFields.emplace_back(schema.attributes[i], &mAttributes[static_cast<size_t>(i)], PluginFieldType::kFLOAT32, 1);
    }
    mFieldCollection.nbFields = schema.nbAttributes;
    mFieldCollection.fields = mFields.data();
}

IPluginCapability* OpPlugin::getCapabilityInterface(PluginCapabilityType type) noexcept
{
    switch (type)
    {
        case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
        case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
        case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

IPluginV3* OpPlugin::clone() noexcept
{
    try
    {
        return makePlugin(mSchema, mAttributes).release();
    }
    catch (std::exception const& error)
    {
        reportError(mSchema.name, "clone failed: %s", error.what());
        return nullptr;
    }
}

IPluginV3* OpPlugin::attachToContext(IPluginResourceContext* /*context*/) noexcept
{
    return clone();
}

AsciiChar const* OpPlugin::getPluginName() const noexcept
{
    return mSchema.name;
}

AsciiChar const* OpPlugin::getPluginVersion() const noexcept
{
    return kVersion;
}

AsciiChar const* OpPlugin::getPluginNamespace() const noexcept
{
    return kNamespace;
}

int32_t OpPlugin::getNbOutputs() const noexcept
{
    return mSchema.nbOutputs;
}

bool OpPlugin::countsMatch(int32_t nbInputs, int32_t nbOutputs) const noexcept
{
    if (nbInputs == mSchema.nbInputs && nbOutputs == mSchema.nbOutputs)
    {
        return true;
    }
    reportError(mSchema.name, "%d inputs and %d outputs, expected %d and %d", static_cast<int>(nbInputs),
        static_cast<int>(nbOutputs), static_cast<int>(mSchema.nbInputs), static_cast<int>(mSchema.nbOutputs));
    return false;
}

int32_t OpPlugin::getOutputDataTypes(
    DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes, int32_t nbInputs) const noexcept
{
    if (!countsMatch(nbInputs, nbOutputs))
    {
        return 1;
    }
    for (int32_t i = 0; i < nbOutputs; ++i)
    {
        switch (mSchema.outputs[i].element)
        {
            case ElementRule::kCompute: outputTypes[i] = inputTypes[0]; break;
            case ElementRule::kFloat32: outputTypes[i] = DataType::kFLOAT; break;
            case ElementRule::kInt64: outputTypes[i] = DataType::kINT64; break;
        }
    }
    return 0;
}

int32_t OpPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const* /*shapeInputs*/,
    int32_t /*nbShapeInputs*/, DimsExprs* outputs, int32_t nbOutputs, IExprBuilder& /*exprBuilder*/) noexcept
{
    if (!countsMatch(nbInputs, nbOutputs))
    {
        return 1;
    }
    for (int32_t i = 0; i < nbInputs; ++i)
    {
        if (inputs[i].nbDims != mSchema.inputs[i].rank)
        {
            reportError(mSchema.name, "%s has %d dimensions, expected %d", mSchema.inputs[i].name,
                static_cast<int>(inputs[i].nbDims), static_cast<int>(mSchema.inputs[i].rank));
            return 1;
        }
    }
    for (int32_t i = 0; i < nbOutputs; ++i)
    {
        Operand const& operand = mSchema.outputs[i];
        outputs[i].nbDims = operand.rank;
        for (int32_t axis = 0; axis < operand.rank; ++axis)
        {
            outputs[i].d[axis] = inputDimension(mSchema, inputs, operand.dims[axis]);
        }
    }
    return 0;
}

bool OpPlugin::supportsFormatCombination(
    int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs, int32_t nbOutputs) noexcept
{
    if (!countsMatch(nbInputs, nbOutputs) || inOut[pos].desc.format != TensorFormat::kLINEAR)
    {
        return false;
    }
    DataType const type = inOut[pos].desc.type;
    switch (operandAt(mSchema, pos).element)
    {
        case ElementRule::kFloat32: return type == DataType::kFLOAT;
        case ElementRule::kInt64: return type == DataType::kINT64;
        case ElementRule::kCompute: break;
    }
    // Positions before `pos` are decided; the first compute operand sets the type of the others.
    int32_t first = 0;
    while (operandAt(mSchema, first).element != ElementRule::kCompute)
    {
        ++first;
    }
    bool const known = type == DataType::kFLOAT || type == DataType::kBF16;
    return known && type == inOut[first].desc.type;
}

template<typename Desc, typename DimsOf>
bool OpPlugin::bindAll(Desc const* in, Desc const* out, DimsOf dimsOf, Sizes& sizes) const noexcept
{
    for (int32_t i = 0; i < mSchema.nbInputs; ++i)
    {
        if (!sizes.bind(mSchema, mSchema.inputs[i], dimsOf(in[i])))
        {
            return false;
        }
    }
    for (int32_t i = 0; i < mSchema.nbOutputs; ++i)
    {
        if (!sizes.bind(mSchema, mSchema.outputs[i], dimsOf(out[i])))
        {
            return false;
        }
    }
    return sizes.withinLimits(mSchema);
}

int32_t OpPlugin::configurePlugin(
    DynamicPluginTensorDesc const* in, int32_t nbInputs, DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept
{
    if (!countsMatch(nbInputs, nbOutputs))
    {
        return 1;
    }
    // -1 stands for a dimension that the profile leaves open; its extremes must be consistent too.
    auto const consistent = [&](auto dimsOf)
    {
        Sizes sizes;
        return bindAll(in, out, dimsOf, sizes);
    };
    bool const all = consistent([](DynamicPluginTensorDesc const& t) { return t.desc.dims; })
                     && consistent([](DynamicPluginTensorDesc const& t) { return t.min; })
                     && consistent([](DynamicPluginTensorDesc const& t) { return t.max; });
    return all ? 0 : 1;
}

size_t OpPlugin::getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t nbInputs,
    DynamicPluginTensorDesc const* /*outputs*/, int32_t nbOutputs) const noexcept
{
    Sizes sizes;
    bool bound = countsMatch(nbInputs, nbOutputs);
    for (int32_t i = 0; bound && i < nbInputs; ++i)
    {
        bound = sizes.bind(mSchema, mSchema.inputs[i], inputs[i].max);
    }
    if (!bound)
    {
        return 0;
    }
    Element const element = inputs[0].desc.type == DataType::kBF16 ? Element::kBFloat16 : Element::kFloat32;
    return workspaceBytes(sizes, element);
}

int32_t OpPlugin::onShapeChange(
    PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* out, int32_t nbOutputs) noexcept
{
    Sizes sizes;
    return countsMatch(nbInputs, nbOutputs) && bindAll(in, out, staticDims, sizes) ? 0 : 1;
}

int32_t OpPlugin::enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const* outputDesc,
    void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept
{
    Sizes sizes;
    if (!bindAll(inputDesc, outputDesc, staticDims, sizes))
    {
        return 1;
    }
    cudaError_t const status = launch(sizes, elementOf(mSchema, inputDesc), inputs, outputs, workspace, stream);
    if (status != cudaSuccess)
    {
        reportError(mSchema.name, "launch failed: %s", cudaGetErrorString(status));
        return 1;
    }
    return 0;
}

PluginFieldCollection const* OpPlugin::getFieldsToSerialize() noexcept
{
    return &mFieldCollection;
}

} // namespace dspine
