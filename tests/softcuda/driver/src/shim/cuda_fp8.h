// Numbers of 8 bits (4 of exponent, 3 of mantissa) for kernels: stored, and converted to float.
#pragma once
#include "cuda_fp16.h"
enum __nv_fp8_interpretation_t { __NV_E4M3 };
struct __nv_fp8_e4m3 {
    unsigned char __x;
    __nv_fp8_e4m3() = default;
    explicit __nv_fp8_e4m3(float value) {
        unsigned char sign = __float_as_uint(value) >> 24 & 0x80;
        float size = fabsf(value);
        int exponent = size > 0 ? (int)(__float_as_uint(size) >> 23) - 127 : -7;
        if (exponent < -6) exponent = -6;
        // In units of the last place of the mantissa; a carry goes into the exponent.
        int units = (int)rintf(ldexpf(size, 3 - exponent)) + (exponent + 6) * 8;
        __x = sign | (isnan(value) ? 0x7F : size >= 464.0f || units > 0x7E ? 0x7E : units);
    }
    explicit operator float() const {
        int exponent = __x >> 3 & 15, part = __x & 7;
        float size = exponent ? ldexpf(8 + part, exponent - 10) : ldexpf(part, -9);
        if ((__x & 0x7F) == 0x7F) size = __builtin_nanf("");
        return __x & 0x80 ? -size : size;
    }
};
static inline __half __nv_cvt_fp8_to_halfraw(unsigned char bits, __nv_fp8_interpretation_t) {
    __nv_fp8_e4m3 x;
    x.__x = bits;
    return __half((float)x);
}
