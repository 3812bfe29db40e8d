#include "op_creator.h"

#include "op_plugin.h"

#include <cstring>
#include <exception>
#include <utility>

namespace dspine
{

using namespace nvinfer1;

namespace
{

bool readAttribute(PluginFieldCollection const& fields, char const* name, float& value)
{
    for (int32_t i = 0; i < fields.nbFields; ++i)
    {
        PluginField const& field = fields.fields[i];
        if (field.name == nullptr || std::strcmp(field.name, name) != 0 || field.data == nullptr || field.length != 1)
        {
            continue;
        }
        if (field.type == PluginFieldType::kFLOAT32)
        {
            value = *static_cast<float const*>(field.data);
            return true;
        }
        if (field.type == PluginFieldType::kFLOAT64)
        {
            value = static_cast<float>(*static_cast<double const*>(field.data));
            return true;
        }
    }
    return false;
}

} // namespace

OpCreator::OpCreator(OpSchema const& schema)
    : mSchema(schema)
{
    for (int32_t i = 0; i < schema.nbAttributes; ++i)
    {
        mFields.emplace_back(schema.attributes[i], nullptr, PluginFieldType::kFLOAT32, 1);
    }
    mFieldCollection.nbFields = schema.nbAttributes;
    mFieldCollection.fields = mFields.data();
}

IPluginV3* OpCreator::createPlugin(
    AsciiChar const* /*name*/, PluginFieldCollection const* fields, TensorRTPhase /*phase*/) noexcept
{
    try
    {
        Attributes attributes(static_cast<size_t>(mSchema.nbAttributes));
        for (int32_t i = 0; i < mSchema.nbAttributes; ++i)
        {
            if (fields == nullptr || !readAttribute(*fields, mSchema.attributes[i], attributes[static_cast<size_t>(i)]))
            {
                reportError(mSchema.name, "attribute %s is missing or is no scalar float", mSchema.attributes[i]);
                return nullptr;
            }
        }
        return makePlugin(mSchema, std::move(attributes)).release();
    }
    catch (std::exception const& error)
    {
        reportError(mSchema.name, "creation failed: %s", error.what());
        return nullptr;
    }
}

PluginFieldCollection const* OpCreator::getFieldNames() noexcept
{
    return &mFieldCollection;
}

AsciiChar const* OpCreator::getPluginName() const noexcept
{
    return mSchema.name;
}

AsciiChar const* OpCreator::getPluginVersion() const noexcept
{
    return kVersion;
}

AsciiChar const* OpCreator::getPluginNamespace() const noexcept
{
    return kNamespace;
}

} // namespace dspine
