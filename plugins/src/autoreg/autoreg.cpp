// libdspine_trt_autoreg.so: registers the plugins in hosts that do no more than dlopen a library.
//
// Its constructor asks the TensorRT already present in the process to load the sibling libdspine_trt_plugins.so. That
// is a call through IPluginRegistry, whose virtual table belongs to one ABI generation, so the shim first compares the
// host's with that of the headers it was compiled with and leaves with a message when they differ.
#include <NvInferRuntime.h>
#include <NvInferVersion.h>

#include "dspine/schema_generated.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <string>

namespace
{

#ifdef TRT_MAJOR_RTX
constexpr bool kRtxHeaders = true;
#else
constexpr bool kRtxHeaders = false;
#endif

//! Generation of the registry's virtual table, named after the TensorRT major that introduced it; 0 when not known.
constexpr int32_t registryAbi(bool rtx, int32_t major, int32_t minor)
{
    if (!rtx)
    {
        return major;
    }
    return major > 1 || minor >= 7 ? 11 : 0;
}

constexpr int32_t kHeaderAbi = registryAbi(kRtxHeaders, NV_TENSORRT_MAJOR, NV_TENSORRT_MINOR);

struct Host
{
    std::string path;
    bool rtx = false;
};

int findHost(dl_phdr_info* info, size_t /*size*/, void* result)
{
    char const* name = std::strrchr(info->dlpi_name, '/');
    name = name != nullptr ? name + 1 : info->dlpi_name;
    bool const rtx = std::strncmp(name, "libtensorrt_rtx.so", 18) == 0;
    if (!rtx && std::strncmp(name, "libnvinfer.so", 13) != 0)
    {
        return 0;
    }
    *static_cast<Host*>(result) = {info->dlpi_name, rtx};
    return 1;
}

//! Path of the plugin library, beside this one.
std::string siblingPath()
{
    Dl_info self{};
    if (dladdr(reinterpret_cast<void const*>(&findHost), &self) == 0 || self.dli_fname == nullptr)
    {
        return "libdspine_trt_plugins.so";
    }
    std::string const path = self.dli_fname;
    return path.substr(0, path.rfind('/') + 1) + "libdspine_trt_plugins.so";
}

template<typename Function>
Function symbol(void* library, char const* name)
{
    return reinterpret_cast<Function>(dlsym(library, name));
}

//! getInferLibVersion: major * 10000 + minor * 100 + patch since TensorRT 10, major * 1000 + minor * 100 + patch
//! before.
void decodeVersion(int32_t version, int32_t& major, int32_t& minor)
{
    int32_t const unit = version >= 10000 ? 10000 : 1000;
    major = version / unit;
    minor = version % unit / 100;
}

bool hostMatches(void* library, Host const& host)
{
    auto const version = symbol<int32_t (*)()>(library, "getInferLibVersion");
    if (version == nullptr)
    {
        std::fprintf(stderr, "[dspine] %s has no getInferLibVersion; plugins not registered\n", host.path.c_str());
        return false;
    }
    int32_t major = 0;
    int32_t minor = 0;
    decodeVersion(version(), major, minor);
    if (registryAbi(host.rtx, major, minor) == kHeaderAbi)
    {
        return true;
    }
    std::fprintf(stderr,
        "[dspine] plugins not registered: this shim was built with TensorRT%s %d headers, the host is TensorRT%s %d.%d "
        "(plugin "
        "registry of generation %d, shim %d).\n[dspine]   fix: load libdspine_trt_plugins.so with "
        "IPluginRegistry::loadLibrary, or "
        "build the shim with the host's headers (TENSORRT_ROOT)\n",
        kRtxHeaders ? "-RTX" : "", NV_TENSORRT_MAJOR, host.rtx ? "-RTX" : "", major, minor,
        registryAbi(host.rtx, major, minor), kHeaderAbi);
    return false;
}

void registerPlugins(void* library, Host const& host)
{
    auto const registryOf = symbol<nvinfer1::IPluginRegistry* (*)()>(library, "getPluginRegistry");
    nvinfer1::IPluginRegistry* registry = registryOf != nullptr ? registryOf() : nullptr;
    if (registry == nullptr)
    {
        std::fprintf(stderr, "[dspine] %s has no plugin registry; plugins not registered\n", host.path.c_str());
        return;
    }
    // The host's own loader may have been there first, and a second registration is fatal in some versions.
    if (registry->getCreator(dspine::kOps[0]->name, dspine::kVersion, dspine::kNamespace) != nullptr)
    {
        return;
    }
    std::string const path = siblingPath();
    if (registry->loadLibrary(path.c_str()) == nullptr)
    {
        std::fprintf(stderr, "[dspine] %s could not load %s\n", host.path.c_str(), path.c_str());
    }
}

__attribute__((constructor)) void registerOnLoad()
{
    Host host;
    if (dl_iterate_phdr(&findHost, &host) == 0)
    {
        std::fprintf(stderr, "[dspine] no TensorRT in this process yet; load it before libdspine_trt_autoreg.so\n");
        return;
    }
    void* library = dlopen(host.path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr)
    {
        return;
    }
    if (hostMatches(library, host))
    {
        registerPlugins(library, host);
    }
    dlclose(library);
}

} // namespace

//! TensorRT major of the headers the shim was compiled with.
extern "C" __attribute__((visibility("default"))) int32_t dspine_autoreg_header_major()
{
    return NV_TENSORRT_MAJOR;
}
