// Headers of the host that sources for nvcc include, and that those for NVRTC cannot: only what the
// sources of candle's kernels need of them.
#ifndef __SC_NVCC
#define __SC_NVCC
typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef __SIZE_TYPE__ size_t;
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_2_SQRTPI 1.12837916709551257390
#define M_SQRT1_2 0.70710678118654752440
static inline bool signbit(float x) { return __builtin_signbit(x); }
static inline bool signbit(double x) { return __builtin_signbit(x); }
#define CUDA_VERSION 13000
static inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752440f); }
static inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }
namespace cuda { namespace std {
template <class T> struct numeric_limits {
    static constexpr bool is_signed = T(-1) < T(0);
    static constexpr T max() { return is_signed ? T(~(1ull << (sizeof(T) * 8 - 1))) : T(~0ull); }
    static constexpr T lowest() { return is_signed ? T(1ull << (sizeof(T) * 8 - 1)) : T(0); }
};
} }
#endif
