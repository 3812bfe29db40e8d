// A plugin library of the common kind: its constructor registers its creator with the TensorRT in the process, and getCreators lists it too.
// It calls through IPluginRegistry, so it fits hosts of one registry generation only: that of the headers, or, with
// REGISTRY_OF_11, that of TensorRT 11. Registers one creator, of a namespace of its own.
#include <NvInferRuntime.h>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <string>

using namespace nvinfer1;

#ifdef REGISTRY_OF_11
#define nvinfer1 generation11
#include "registry_of_11/NvInferRuntime.h"
#undef nvinfer1
using Registry = generation11::IPluginRegistry;
using CreatorArgument = generation11::IPluginCreatorInterface;
#else
using Registry = IPluginRegistry;
using CreatorArgument = IPluginCreatorInterface;
#endif

namespace
{

class Creator final : public IPluginCreatorV3One
{
public:
    IPluginV3* createPlugin(AsciiChar const*, PluginFieldCollection const*, TensorRTPhase) noexcept override
    {
        return nullptr;
    }
    PluginFieldCollection const* getFieldNames() noexcept override
    {
        static PluginFieldCollection const none{0, nullptr};
        return &none;
    }
    AsciiChar const* getPluginName() const noexcept override
    {
        return "SelfRegistered";
    }
    AsciiChar const* getPluginVersion() const noexcept override
    {
        return "1";
    }
    AsciiChar const* getPluginNamespace() const noexcept override
    {
        return "dspine_test";
    }
};

Creator gCreator;

int findHost(dl_phdr_info* info, size_t, void* result)
{
    char const* slash = std::strrchr(info->dlpi_name, '/');
    char const* name = slash != nullptr ? slash + 1 : info->dlpi_name;
    if (std::strncmp(name, "libtensorrt_rtx.so", 18) != 0 && std::strncmp(name, "libnvinfer.so", 13) != 0)
    {
        return 0;
    }
    *static_cast<std::string*>(result) = info->dlpi_name;
    return 1;
}

void say(char const* text)
{
    std::puts(text);
    std::fflush(stdout); // the next call may be the process's last
}

__attribute__((constructor)) void registerOnLoad()
{
    std::string path;
    if (dl_iterate_phdr(&findHost, &path) == 0)
    {
        return;
    }
    void* host = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    auto* registry = reinterpret_cast<Registry* (*)()>(dlsym(host, "getPluginRegistry"))();
    say("self-registering");
    auto& creator = static_cast<IPluginCreatorInterface&>(gCreator);
    bool const done = registry->registerCreator(reinterpret_cast<CreatorArgument&>(creator), "dspine_test");
    say(done ? "self-registered" : "registration refused");
}

} // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT IPluginCreatorInterface* const* getCreators(int32_t& count)
{
    static IPluginCreatorInterface* const creators[] = {&gCreator};
    count = 1;
    return creators;
}

EXPORT void setLoggerFinder(ILoggerFinder*) {}
