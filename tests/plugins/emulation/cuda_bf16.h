// bfloat16 with round-to-nearest-even conversions.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16
{
    uint16_t bits;

    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float value)
    {
        uint32_t word;
        std::memcpy(&word, &value, sizeof(word));
        bool const isNan = (word & 0x7FFFFFFFU) > 0x7F800000U;
        bits = isNan ? 0x7FFF : static_cast<uint16_t>((word + 0x7FFFU + (word >> 16 & 1U)) >> 16);
    }
    explicit operator float() const
    {
        uint32_t const word = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &word, sizeof(value));
        return value;
    }
};

inline __nv_bfloat16 __float2bfloat16_rn(float value)
{
    return __nv_bfloat16(value);
}

inline float __bfloat162float(__nv_bfloat16 value)
{
    return static_cast<float>(value);
}
