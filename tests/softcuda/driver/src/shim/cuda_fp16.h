// Half precision for kernels: stored in 16 bits, computed in float.
#pragma once
struct __half {
    unsigned short bits;
    __half() = default;
    __half(float value);
    operator float() const;
    __half &operator+=(__half other) { return *this = __half((float)*this + (float)other); }
    __half &operator-=(__half other) { return *this = __half((float)*this - (float)other); }
    __half &operator*=(__half other) { return *this = __half((float)*this * (float)other); }
    __half &operator/=(__half other) { return *this = __half((float)*this / (float)other); }
};
typedef __half half;
static inline float __half2float(__half h) {
    unsigned sign = (h.bits & 0x8000u) << 16, exponent = h.bits >> 10 & 31, part = h.bits & 0x3FFu;
    if (exponent == 31) return __uint_as_float(sign | 0x7F800000u | part << 13);
    if (exponent != 0) return __uint_as_float(sign | (exponent + 112) << 23 | part << 13);
    float small = (float)part * 5.9604644775390625e-8f;
    return sign ? -small : small;
}
static inline __half __float2half_rn(float value) {
    unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
    __half h;
    if (size > 0x7F800000u) h.bits = (unsigned short)0x7FFF;
    else if (size >= 0x47800000u) h.bits = (unsigned short)(sign | 0x7C00u);
    else if (size < 0x38800000u) h.bits = (unsigned short)(sign | (unsigned)rintf(__uint_as_float(size) * 16777216.0f));
    else {
        size += 0xFFFu + (size >> 13 & 1);
        h.bits = (unsigned short)(sign | (size - 0x38000000u) >> 13);
    }
    return h;
}
static inline __half __float2half(float value) { return __float2half_rn(value); }
inline __half::__half(float value) { *this = __float2half_rn(value); }
inline __half::operator float() const { return __half2float(*this); }
static inline __half __ushort_as_half(unsigned short bits) { __half h; h.bits = bits; return h; }
static inline unsigned short __half_as_ushort(__half h) { return h.bits; }
struct alignas(4) __half2 { __half x, y; };
typedef __half2 half2;
static inline float2 __half22float2(__half2 h) { return {(float)h.x, (float)h.y}; }
static inline __half2 __float22half2_rn(float2 f) { return {__float2half_rn(f.x), __float2half_rn(f.y)}; }
static inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
// Arithmetic, computed in float and rounded once.
#define __SC_HALF(T, round)                                                                                        \
    static inline bool __hisnan(T x) { return isnan((float)x); }                                                   \
    static inline T __habs(T x) { return round(fabsf((float)x)); }                                                 \
    static inline T __hmax(T x, T y) { return round(fmaxf((float)x, (float)y)); }                                  \
    static inline T __hmin(T x, T y) { return round(fminf((float)x, (float)y)); }                                  \
    static inline T __hmax_nan(T x, T y) { return __hisnan(x) ? x : __hisnan(y) ? y : __hmax(x, y); }              \
    static inline T __hmin_nan(T x, T y) { return __hisnan(x) ? x : __hisnan(y) ? y : __hmin(x, y); }              \
    static inline T hsqrt(T x) { return round(sqrtf((float)x)); }                                                  \
    static inline T hcos(T x) { return round(cosf((float)x)); }                                                    \
    static inline T hsin(T x) { return round(sinf((float)x)); }                                                    \
    static inline T hlog(T x) { return round(logf((float)x)); }                                                    \
    static inline T hexp(T x) { return round(expf((float)x)); }                                                    \
    static inline T atomicAdd(T *at, T by) { return __sc_atomic(at, [=](T old) { return round((float)old + (float)by); }); }
__SC_HALF(__half, __float2half_rn)
