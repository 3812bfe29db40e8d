#include "shape_binding.h"

#include "dspine/kernels.h"

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
            reportError(op.name, "%s dimension %d is %lld, expected a multiple of %d", operand.name,
                static_cast<int>(axis), static_cast<long long>(size), static_cast<int>(dim.scale));
            return false;
        }
        int64_t& known = mValues[dim.symbol];
        int64_t const value = (size - dim.offset) / dim.scale;
        if (known != kUnknown && known != value)
        {
            reportError(op.name, "%s dimension %d is %lld, expected %lld from the operands before it", operand.name,
                static_cast<int>(axis), static_cast<long long>(size),
                static_cast<long long>(known * dim.scale + dim.offset));
            return false;
        }
        known = value;
    }
    return true;
}

bool Sizes::withinLimits(OpSchema const& op) const
{
    struct Limit
    {
        Symbol symbol;
        char const* meaning;
        int64_t least;
        int64_t most;
    };
    constexpr int64_t kMostIndex = INT32_MAX;
    Limit const limits[] = {{kBatch, "batch", 0, kMostIndex}, {kBlock, "block size", kMinBlock, kMaxBlock},
        {kHidden, "hidden size", 1, kMostIndex}, {kRank, "transfer rank", 1, kMostIndex},
        {kMessage, "message size", 1, kMostIndex}, {kCandidates, "number of candidates", 1, kMaxCandidates},
        {kVocab, "vocabulary", 1, kMostIndex}};
    for (Limit const& limit : limits)
    {
        int64_t const value = mValues[limit.symbol];
        if (value != kUnknown && (value < limit.least || value > limit.most))
        {
            reportError(op.name, "%s is %lld, supported are %lld to %lld", limit.meaning, static_cast<long long>(value),
                static_cast<long long>(limit.least), static_cast<long long>(limit.most));
            return false;
        }
    }
    return true;
}

} // namespace dspine
