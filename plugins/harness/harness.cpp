// Drives the real IPluginV3 objects of a plugin library through the calls that TensorRT makes, without TensorRT.
//
// A C interface for ctypes: device pointers and streams come from the caller. Every function reports failure through
// its return value and `dspine_harness_error`.
#include "descriptors.h"

#include "dspine/schema_generated.h"

#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <string>
#include <vector>

using namespace nvinfer1;
using namespace harness;

namespace
{

using GetCreators = IPluginCreatorInterface* const* (*)(int32_t&);
using PluginPointer = std::unique_ptr<IPluginV3>;

thread_local std::string gError;

template<typename Result>
Result failed(Result result, std::string message)
{
    gError = std::move(message);
    return result;
}

template<typename Interface>
Interface* capability(IPluginV3* plugin, PluginCapabilityType type)
{
    return static_cast<Interface*>(plugin->getCapabilityInterface(type));
}

IPluginV3OneBuild* buildOf(void* plugin)
{
    return capability<IPluginV3OneBuild>(static_cast<IPluginV3*>(plugin), PluginCapabilityType::kBUILD);
}

IPluginV3OneRuntime* runtimeOf(void* plugin)
{
    return capability<IPluginV3OneRuntime>(static_cast<IPluginV3*>(plugin), PluginCapabilityType::kRUNTIME);
}

IPluginCreatorV3One* findCreator(char const* library, char const* op)
{
    void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr)
    {
        return failed<IPluginCreatorV3One*>(nullptr, dlerror());
    }
    auto const getCreators = reinterpret_cast<GetCreators>(dlsym(handle, "getCreators"));
    if (getCreators == nullptr)
    {
        return failed<IPluginCreatorV3One*>(nullptr, "no symbol getCreators");
    }
    int32_t count = 0;
    IPluginCreatorInterface* const* creators = getCreators(count);
    for (int32_t i = 0; i < count; ++i)
    {
        auto* creator = static_cast<IPluginCreatorV3One*>(creators[i]);
        if (std::strcmp(creators[i]->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE") == 0
            && std::strcmp(creator->getPluginName(), op) == 0
            && std::strcmp(creator->getPluginNamespace(), dspine::kNamespace) == 0
            && std::strcmp(creator->getPluginVersion(), dspine::kVersion) == 0)
        {
            return creator;
        }
    }
    return failed<IPluginCreatorV3One*>(nullptr, "no creator of this name, namespace and version");
}

//! The fields that a plan would hold, in memory of their own.
struct SavedFields
{
    std::vector<std::string> names;
    std::vector<float> values;

    bool save(PluginFieldCollection const& fields)
    {
        for (int32_t i = 0; i < fields.nbFields; ++i)
        {
            PluginField const& field = fields.fields[i];
            if (field.type != PluginFieldType::kFLOAT32 || field.length != 1)
            {
                return false;
            }
            names.emplace_back(field.name);
            values.push_back(*static_cast<float const*>(field.data));
        }
        return true;
    }

    PluginPointer create(IPluginCreatorV3One& creator, TensorRTPhase phase) const
    {
        std::vector<PluginField> fields;
        for (size_t i = 0; i < names.size(); ++i)
        {
            fields.emplace_back(names[i].c_str(), &values[i], PluginFieldType::kFLOAT32, 1);
        }
        PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
        return PluginPointer(creator.createPlugin("harness", &collection, phase));
    }
};

} // namespace

#define DSPINE_EXPORT extern "C" __attribute__((visibility("default")))

DSPINE_EXPORT char const* dspine_harness_error()
{
    return gError.c_str();
}

//! A plugin that went through create, serialise, create from the serialised fields, clone and attachToContext; null on
//! failure. All objects before the last are gone, so state shared between them would show.
DSPINE_EXPORT void* dspine_harness_create(
    char const* library, char const* op, int32_t nbAttributes, char const* const* names, float const* values)
{
    IPluginCreatorV3One* creator = findCreator(library, op);
    if (creator == nullptr)
    {
        return nullptr;
    }
    SavedFields fields;
    fields.names.assign(names, names + nbAttributes);
    fields.values.assign(values, values + nbAttributes);
    PluginPointer plugin = fields.create(*creator, TensorRTPhase::kBUILD);
    SavedFields serialised;
    if (plugin == nullptr || buildOf(plugin.get()) == nullptr || runtimeOf(plugin.get()) == nullptr)
    {
        return failed<void*>(nullptr, "createPlugin failed or a capability is missing");
    }
    if (!serialised.save(*runtimeOf(plugin.get())->getFieldsToSerialize()))
    {
        return failed<void*>(nullptr, "a serialised field is no scalar float");
    }
    plugin = serialised.create(*creator, TensorRTPhase::kRUNTIME);
    if (plugin == nullptr)
    {
        return failed<void*>(nullptr, "createPlugin refused the serialised fields");
    }
    plugin.reset(plugin->clone());
    if (plugin == nullptr)
    {
        return failed<void*>(nullptr, "clone failed");
    }
    plugin.reset(runtimeOf(plugin.get())->attachToContext(nullptr));
    return plugin != nullptr ? plugin.release() : failed<void*>(nullptr, "attachToContext failed");
}

DSPINE_EXPORT void dspine_harness_destroy(void* plugin)
{
    delete static_cast<IPluginV3*>(plugin);
}

//! The position of the first operand whose type or format the plugin refuses, -1 when it accepts all.
DSPINE_EXPORT int32_t dspine_harness_refused(
    void* plugin, HarnessTensor const* inputs, int32_t nbInputs, HarnessTensor const* outputs, int32_t nbOutputs)
{
    auto all = describeDynamic(inputs, nbInputs);
    auto const tail = describeDynamic(outputs, nbOutputs);
    all.insert(all.end(), tail.begin(), tail.end());
    for (int32_t position = 0; position < nbInputs + nbOutputs; ++position)
    {
        if (!buildOf(plugin)->supportsFormatCombination(position, all.data(), nbInputs, nbOutputs))
        {
            return position;
        }
    }
    return -1;
}

//! The build-time and shape-time calls; workspace bytes, or -1 with the reason in dspine_harness_error.
DSPINE_EXPORT int64_t dspine_harness_configure(
    void* plugin, HarnessTensor const* inputs, int32_t nbInputs, HarnessTensor const* outputs, int32_t nbOutputs)
{
    auto const in = describeAll(inputs, nbInputs);
    auto const out = describeAll(outputs, nbOutputs);
    auto const dynamicIn = describeDynamic(inputs, nbInputs);
    auto const dynamicOut = describeDynamic(outputs, nbOutputs);
    IPluginV3OneBuild& build = *buildOf(plugin);
    if (build.getNbOutputs() != nbOutputs)
    {
        return failed<int64_t>(-1, "getNbOutputs differs");
    }
    if (dspine_harness_refused(plugin, inputs, nbInputs, outputs, nbOutputs) >= 0)
    {
        return failed<int64_t>(-1, "supportsFormatCombination refused");
    }
    if (!typesFollow(build, in, out) || !shapesFollow(build, in, out))
    {
        return failed<int64_t>(-1, "output types or shapes differ");
    }
    if (build.configurePlugin(dynamicIn.data(), nbInputs, dynamicOut.data(), nbOutputs) != 0)
    {
        return failed<int64_t>(-1, "configurePlugin refused");
    }
    if (runtimeOf(plugin)->onShapeChange(in.data(), nbInputs, out.data(), nbOutputs) != 0)
    {
        return failed<int64_t>(-1, "onShapeChange refused");
    }
    return static_cast<int64_t>(build.getWorkspaceSize(dynamicIn.data(), nbInputs, dynamicOut.data(), nbOutputs));
}

DSPINE_EXPORT int32_t dspine_harness_enqueue(void* plugin, HarnessTensor const* inputs, int32_t nbInputs,
    HarnessTensor const* outputs, int32_t nbOutputs, void* workspace, void* stream)
{
    auto const in = describeAll(inputs, nbInputs);
    auto const out = describeAll(outputs, nbOutputs);
    std::vector<void const*> inputData;
    std::transform(inputs, inputs + nbInputs, std::back_inserter(inputData), [](auto const& t) { return t.data; });
    std::vector<void*> outputData;
    std::transform(outputs, outputs + nbOutputs, std::back_inserter(outputData), [](auto const& t) { return t.data; });
    return runtimeOf(plugin)->enqueue(
        in.data(), out.data(), inputData.data(), outputData.data(), workspace, static_cast<cudaStream_t>(stream));
}
