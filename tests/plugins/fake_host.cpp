// A stand-in for libnvinfer.so of the headers' own major: a registry that records what it is asked to load.
#include <NvInferRuntime.h>
#include <NvInferVersion.h>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <vector>

using namespace nvinfer1;

namespace
{

class Registry final : public IPluginRegistry
{
public:
    bool registerCreator(IPluginCreator&, AsciiChar const* const) noexcept override
    {
        return false;
    }
    IPluginCreator* const* getPluginCreatorList(int32_t* const) const noexcept override
    {
        return nullptr;
    }
    IPluginCreator* getPluginCreator(
        AsciiChar const* const, AsciiChar const* const, AsciiChar const* const) noexcept override
    {
        return nullptr;
    }
    void setErrorRecorder(IErrorRecorder* const) noexcept override {}
    IErrorRecorder* getErrorRecorder() const noexcept override
    {
        return nullptr;
    }
    bool deregisterCreator(IPluginCreator const&) noexcept override
    {
        return false;
    }
    bool isParentSearchEnabled() const override
    {
        return false;
    }
    void setParentSearchEnabled(bool const) override {}
    void deregisterLibrary(PluginLibraryHandle) noexcept override {}
    bool registerCreator(IPluginCreatorInterface& creator, AsciiChar const* const) noexcept override
    {
        auto const& named = static_cast<IPluginCreatorV3One const&>(creator);
        if (getCreator(named.getPluginName(), named.getPluginVersion(), named.getPluginNamespace()) != nullptr)
        {
            return false;
        }
        mCreators.push_back(&creator);
        return true;
    }
    IPluginCreatorInterface* const* getAllCreators(int32_t* const count) const noexcept override
    {
        *count = static_cast<int32_t>(mCreators.size());
        return mCreators.data();
    }
    bool deregisterCreator(IPluginCreatorInterface const&) noexcept override
    {
        return false;
    }
    IPluginResource* acquirePluginResource(AsciiChar const*, IPluginResource*) noexcept override
    {
        return nullptr;
    }
    int32_t releasePluginResource(AsciiChar const*) noexcept override
    {
        return 0;
    }
    IPluginCreatorInterface* const* getAllCreatorsRecursive(int32_t* const count) noexcept override
    {
        return getAllCreators(count);
    }

    PluginLibraryHandle loadLibrary(AsciiChar const* path) noexcept override
    {
        void* library = dlopen(path, RTLD_NOW);
        auto const creators = library == nullptr ? nullptr
                                                 : reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(
                                                       dlsym(library, "getCreators"));
        bool ok = creators != nullptr;
        int32_t count = 0;
        for (int32_t i = 0; ok && (i == 0 || i < count); ++i)
        {
            ok = registerCreator(*creators(count)[i], "");
        }
        std::printf("loadLibrary %s\n", ok ? "ok" : "failed");
        std::fflush(stdout);
        return ok ? library : nullptr;
    }

    IPluginCreatorInterface* getCreator(
        AsciiChar const* const name, AsciiChar const* const version, AsciiChar const* const space) noexcept override
    {
        for (auto* entry : mCreators)
        {
            auto* creator = static_cast<IPluginCreatorV3One*>(entry);
            if (std::strcmp(creator->getPluginName(), name) == 0
                && std::strcmp(creator->getPluginVersion(), version) == 0
                && std::strcmp(creator->getPluginNamespace(), space) == 0)
            {
                return creator;
            }
        }
        return nullptr;
    }

private:
    std::vector<IPluginCreatorInterface*> mCreators;
};

} // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT IPluginRegistry* getPluginRegistry() noexcept
{
    static Registry registry;
    return &registry;
}

EXPORT int32_t getInferLibVersion() noexcept
{
    return FAKE_MAJOR * 10000 + 300;
}

EXPORT void fake_host_load(char const* path)
{
    getPluginRegistry()->loadLibrary(path);
}
