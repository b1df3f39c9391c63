// Brain floating point for kernels: stored in 16 bits, computed in float.
#pragma once
#include "cuda_fp16.h"
struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float value);
    operator float() const;
    __nv_bfloat16 &operator+=(__nv_bfloat16 other) { return *this = __nv_bfloat16((float)*this + (float)other); }
    __nv_bfloat16 &operator-=(__nv_bfloat16 other) { return *this = __nv_bfloat16((float)*this - (float)other); }
    __nv_bfloat16 &operator*=(__nv_bfloat16 other) { return *this = __nv_bfloat16((float)*this * (float)other); }
    __nv_bfloat16 &operator/=(__nv_bfloat16 other) { return *this = __nv_bfloat16((float)*this / (float)other); }
};
typedef __nv_bfloat16 nv_bfloat16;
static inline float __bfloat162float(__nv_bfloat16 b) { return __uint_as_float((unsigned)b.bits << 16); }
static inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    unsigned bits = __float_as_uint(value);
    __nv_bfloat16 b;
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) b.bits = 0x7FFF;
    else b.bits = (unsigned short)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
    return b;
}
static inline __nv_bfloat16 __float2bfloat16(float value) { return __float2bfloat16_rn(value); }
inline __nv_bfloat16::__nv_bfloat16(float value) { *this = __float2bfloat16_rn(value); }
inline __nv_bfloat16::operator float() const { return __bfloat162float(*this); }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { __nv_bfloat16 b; b.bits = bits; return b; }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.bits; }
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
typedef __nv_bfloat162 nv_bfloat162;
static inline float2 __bfloat1622float2(__nv_bfloat162 b) { return {(float)b.x, (float)b.y}; }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 f) {
    return {__float2bfloat16_rn(f.x), __float2bfloat16_rn(f.y)};
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
__SC_HALF(__nv_bfloat16, __float2bfloat16_rn)
#define __SC_PAIR(name, sign)                                                                                       \
    static inline __nv_bfloat162 name(__nv_bfloat162 a, __nv_bfloat162 b) {                                         \
        return __floats2bfloat162_rn((float)a.x sign(float) b.x, (float)a.y sign(float) b.y);                       \
    }
__SC_PAIR(__hadd2, +) __SC_PAIR(__hsub2, -) __SC_PAIR(__hmul2, *) __SC_PAIR(__h2div, /)
