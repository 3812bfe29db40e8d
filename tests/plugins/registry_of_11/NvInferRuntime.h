// The plugin registry of TensorRT 11 and TensorRT-RTX 1.7 as far as the tests call it: the order of its virtual functions, nothing else.
// Four virtuals of TensorRT 10 are gone there, which moves all others. Stands in for headers that cannot be installed.
#pragma once

namespace nvinfer1
{

class IPluginCreatorInterface;

class IPluginRegistry
{
protected:
    virtual ~IPluginRegistry() noexcept = default;

public:
    virtual void setErrorRecorder(void* recorder) noexcept = 0;
    virtual void* getErrorRecorder() const noexcept = 0;
    virtual bool isParentSearchEnabled() const = 0;
    virtual void setParentSearchEnabled(bool enabled) = 0;
    virtual void* loadLibrary(char const* path) noexcept = 0;
    virtual void deregisterLibrary(void* handle) noexcept = 0;
    virtual bool registerCreator(IPluginCreatorInterface& creator, char const* space) noexcept = 0;
    virtual IPluginCreatorInterface* const* getAllCreators(int* count) const noexcept = 0;
    virtual IPluginCreatorInterface* getCreator(char const* name, char const* version, char const* space) noexcept = 0;
};

} // namespace nvinfer1
