// Reads the sizes N, B, d, ... of a node from the dimensions of its operands, as the operator schema names them.
#pragma once

#include "dspine/schema_generated.h"

#include <NvInferRuntime.h>
#include <array>
#include <cstdint>

namespace dspine
{

inline constexpr int64_t kUnknown = -1;

//! Value of every symbol; kUnknown where no dimension has told it.
class Sizes
{
public:
    Sizes()
    {
        mValues.fill(kUnknown);
    }

    int64_t operator[](Symbol symbol) const
    {
        return mValues[symbol];
    }

    //! Binds the symbols of one operand. Prints the reason to stderr and returns false when the rank is wrong, a
    //! dimension contradicts an earlier operand, or it cannot be written as the schema says. Dimensions of -1 are
    //! skipped.
    bool bind(OpSchema const& op, Operand const& operand, nvinfer1::Dims const& dims);

    //! Whether the kernels support the sizes known so far; prints the reason when not.
    bool withinLimits(OpSchema const& op) const;

private:
    std::array<int64_t, kSymbolCount> mValues;
};

//! Prints "[dspine] OP: message" to stderr.
void reportError(char const* op, char const* format, ...) __attribute__((format(printf, 2, 3)));

} // namespace dspine
