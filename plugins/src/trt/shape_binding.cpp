#include "shape_binding.h"

#include <cstdarg>
#include <cstdio>

namespace dspine
{

void reportError(char const* op, char const* format, ...)
{
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    std::fprintf(stderr, "[dspine] %s: %s\n", op, message);
}

bool Sizes::bind(OpSchema const& op, Operand const& operand, nvinfer1::Dims const& dims)
{
    if (dims.nbDims != operand.rank)
    {
        reportError(op.name, "%s has %d dimensions, expected %d", operand.name, static_cast<int>(dims.nbDims),
            static_cast<int>(operand.rank));
        return false;
    }
    for (int32_t axis = 0; axis < operand.rank; ++axis)
    {
        int64_t const size = dims.d[axis];
        Dim const& dim = operand.dims[axis];
        if (size < 0)
        {
            continue;
        }
        if ((size - dim.offset) % dim.scale != 0)
        {
            reportError(op.name, "%s dimension %d is %lld, expected a multiple of %d", operand.name, static_cast<int>(axis),
                static_cast<long long>(size), static_cast<int>(dim.scale));
            return false;
        }
        int64_t& known = mValues[dim.symbol];
        int64_t const value = (size - dim.offset) / dim.scale;
        if (known != kUnknown && known != value)
        {
            reportError(op.name, "%s dimension %d is %lld, expected %lld from the operands before it", operand.name,
                static_cast<int>(axis), static_cast<long long>(size), static_cast<long long>(known * dim.scale + dim.offset));
            return false;
        }
        known = value;
    }
    return true;
}

} // namespace dspine
