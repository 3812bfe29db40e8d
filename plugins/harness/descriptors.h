// Tensor descriptors as TensorRT would pass them, and the checks of what a plugin answers about its outputs.
#pragma once

#include <NvInferRuntime.h>
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <vector>

struct HarnessTensor
{
    void* data;
    int32_t type; // nvinfer1::DataType
    int32_t rank;
    int64_t dims[4];
};

namespace harness
{

using namespace nvinfer1;

inline PluginTensorDesc describe(HarnessTensor const& tensor)
{
    PluginTensorDesc desc{};
    desc.type = static_cast<DataType>(tensor.type);
    desc.format = TensorFormat::kLINEAR;
    desc.dims.nbDims = tensor.rank;
    std::copy_n(tensor.dims, tensor.rank, desc.dims.d);
    return desc;
}

inline std::vector<PluginTensorDesc> describeAll(HarnessTensor const* tensors, int32_t count)
{
    std::vector<PluginTensorDesc> descs;
    std::transform(tensors, tensors + count, std::back_inserter(descs), describe);
    return descs;
}

inline std::vector<DynamicPluginTensorDesc> describeDynamic(HarnessTensor const* tensors, int32_t count)
{
    std::vector<DynamicPluginTensorDesc> descs;
    for (int32_t i = 0; i < count; ++i)
    {
        PluginTensorDesc const desc = describe(tensors[i]);
        descs.push_back({desc, desc.dims, desc.dims, desc.dims});
    }
    return descs;
}

//! Plugins only forward dimension expressions, so objects without an implementation do: what counts is which one comes
//! back.
class Expression : public IDimensionExpr
{
public:
    explicit Expression(int64_t size)
        : size(size)
    {
    }
    int64_t size;
};

class Builder : public IExprBuilder
{
};

inline bool shapesFollow(
    IPluginV3OneBuild& build, std::vector<PluginTensorDesc> const& in, std::vector<PluginTensorDesc> const& out)
{
    std::vector<std::unique_ptr<Expression>> storage;
    std::vector<DimsExprs> inputs;
    for (auto const& desc : in)
    {
        DimsExprs dims{};
        dims.nbDims = desc.dims.nbDims;
        for (int32_t axis = 0; axis < dims.nbDims; ++axis)
        {
            storage.push_back(std::make_unique<Expression>(desc.dims.d[axis]));
            dims.d[axis] = storage.back().get();
        }
        inputs.push_back(dims);
    }
    std::vector<DimsExprs> outputs(out.size());
    Builder builder;
    auto const nbIn = static_cast<int32_t>(in.size());
    auto const nbOut = static_cast<int32_t>(out.size());
    if (build.getOutputShapes(inputs.data(), nbIn, nullptr, 0, outputs.data(), nbOut, builder) != 0)
    {
        return false;
    }
    for (size_t i = 0; i < out.size(); ++i)
    {
        if (outputs[i].nbDims != out[i].dims.nbDims)
        {
            return false;
        }
        for (int32_t axis = 0; axis < outputs[i].nbDims; ++axis)
        {
            auto const* expression = static_cast<Expression const*>(outputs[i].d[axis]);
            if (expression == nullptr || expression->size != out[i].dims.d[axis])
            {
                return false;
            }
        }
    }
    return true;
}

inline bool typesFollow(
    IPluginV3OneBuild& build, std::vector<PluginTensorDesc> const& in, std::vector<PluginTensorDesc> const& out)
{
    std::vector<DataType> inputs;
    std::transform(in.begin(), in.end(), std::back_inserter(inputs), [](auto const& desc) { return desc.type; });
    std::vector<DataType> outputs(out.size());
    auto const status = build.getOutputDataTypes(
        outputs.data(), static_cast<int32_t>(out.size()), inputs.data(), static_cast<int32_t>(in.size()));
    return status == 0
           && std::equal(
               outputs.begin(), outputs.end(), out.begin(), [](auto a, auto const& b) { return a == b.type; });
}

} // namespace harness
