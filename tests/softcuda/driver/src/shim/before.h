// The text before a program's kernels when they are compiled for the CPU: CUDA's keywords and
// functions.
//
// As with NVRTC, no header of the host is included, here or in a kernel. A kernel that needs one
// does not compile there either. C's mathematical functions are declared one by one.
extern "C" int printf(const char *, ...);

// Mathematical functions: CUDA overloads C's names for double with versions for float.
#define __SC_ONE(name)                                                                                              \
    extern "C" double name(double);                                                                                \
    extern "C" float name##f(float);                                                                               \
    static inline float name(float x) { return name##f(x); }
#define __SC_TWO(name)                                                                                              \
    extern "C" double name(double, double);                                                                        \
    extern "C" float name##f(float, float);                                                                        \
    static inline float name(float x, float y) { return name##f(x, y); }
__SC_ONE(exp) __SC_ONE(exp2) __SC_ONE(exp10) __SC_ONE(expm1) __SC_ONE(log) __SC_ONE(log2) __SC_ONE(log10)
__SC_ONE(log1p) __SC_ONE(sqrt) __SC_ONE(cbrt) __SC_ONE(sin) __SC_ONE(cos) __SC_ONE(tan) __SC_ONE(sinh) __SC_ONE(cosh)
__SC_ONE(tanh) __SC_ONE(asin) __SC_ONE(acos) __SC_ONE(atan) __SC_ONE(asinh) __SC_ONE(acosh) __SC_ONE(atanh)
__SC_ONE(floor) __SC_ONE(ceil) __SC_ONE(trunc) __SC_ONE(round) __SC_ONE(rint) __SC_ONE(nearbyint) __SC_ONE(fabs)
__SC_ONE(erf) __SC_ONE(erfc) __SC_ONE(lgamma) __SC_ONE(tgamma)
__SC_TWO(pow) __SC_TWO(fmod) __SC_TWO(atan2) __SC_TWO(fmax) __SC_TWO(fmin) __SC_TWO(copysign) __SC_TWO(hypot)
__SC_TWO(remainder) __SC_TWO(fdim) __SC_TWO(nextafter)
extern "C" double fma(double, double, double);
extern "C" float fmaf(float, float, float);
extern "C" double ldexp(double, int);
extern "C" float ldexpf(float, int);
extern "C" void sincos(double, double *, double *);
extern "C" void sincosf(float, float *, float *);

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__
#define __shared__ static thread_local

struct uint3 { unsigned x, y, z; };
struct int3 { int x, y, z; };
struct float3 { float x, y, z; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
struct alignas(4) short2 { short x, y; };
struct alignas(4) ushort2 { unsigned short x, y; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
struct alignas(4) uchar4 { unsigned char x, y, z, w; };
struct alignas(16) longlong2 { long long x, y; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline double2 make_double2(double x, double y) { return {x, y}; }
static inline ushort2 make_ushort2(unsigned short x, unsigned short y) { return {x, y}; }
static inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
    return {x, y, z, w};
}
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Position of the running thread. Kernels of several streams run on several threads of the process.
struct __sc_place {
    uint3 thread, block;
    dim3 size, grid;
    void *shared;
};
static thread_local __sc_place __sc_here;
#define threadIdx (__sc_here.thread)
#define blockIdx (__sc_here.block)
#define blockDim (__sc_here.size)
#define gridDim (__sc_here.grid)
static constexpr int warpSize = 32;

// Barriers and exchanges between threads of a block; defined in `after.h`.
enum __sc_kind { __sc_read_lane, __sc_ballot, __sc_add, __sc_min, __sc_max };
static void __sc_block_barrier(int kind, bool value, int *result);
static unsigned long long __sc_warp(unsigned mask, unsigned long long value, int lane, __sc_kind kind);
static void __sc_stop(int code) __attribute__((noreturn));
static unsigned __sc_lane();

static inline void __syncthreads() { __sc_block_barrier(0, false, nullptr); }
static inline int __syncthreads_count(int value) {
    int result;
    __sc_block_barrier(1, value != 0, &result);
    return result;
}
static inline int __syncthreads_or(int value) { return __syncthreads_count(value) > 0; }
static inline int __syncthreads_and(int value) { return __syncthreads_count(value == 0) == 0; }
static inline void __syncwarp(unsigned mask = 0xffffffffu) { __sc_warp(mask, 0, 0, __sc_ballot); }
static inline unsigned __activemask() { return 0xffffffffu; }
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() {}
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __trap() { __sc_stop(719); }
#define assert(what) ((what) ? (void)0 : (printf("%s: device-side assertion `%s' failed\n", __func__, #what), __sc_stop(710)))

template <class T> static inline unsigned long long __sc_bits(T value) {
    unsigned long long bits = 0;
    static_assert(sizeof(T) <= 8, "no more than eight bytes go between lanes");
    __builtin_memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class T> static inline T __sc_value(unsigned long long bits) {
    T value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
template <class T> static inline T __sc_shuffle(unsigned mask, T value, int lane) {
    return __sc_value<T>(__sc_warp(mask, __sc_bits(value), lane, __sc_read_lane));
}
template <class T> static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    int mine = (int)__sc_lane();
    return __sc_shuffle(mask, value, (mine & ~(width - 1)) | (lane & (width - 1)));
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    int mine = (int)__sc_lane(), other = mine ^ bits;
    return __sc_shuffle(mask, value, other > (mine | (width - 1)) ? mine : other);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    int mine = (int)__sc_lane(), other = mine + (int)by;
    return __sc_shuffle(mask, value, other > (mine | (width - 1)) ? mine : other);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    int mine = (int)__sc_lane(), other = mine - (int)by;
    return __sc_shuffle(mask, value, other < (mine & ~(width - 1)) ? mine : other);
}
static inline unsigned __ballot_sync(unsigned mask, int value) {
    return (unsigned)__sc_warp(mask, value != 0, 0, __sc_ballot);
}
static inline int __any_sync(unsigned mask, int value) { return __ballot_sync(mask, value) != 0; }
static inline int __all_sync(unsigned mask, int value) { return __ballot_sync(mask, value == 0) == 0; }
static inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    return (unsigned)__sc_warp(mask, value, 0, __sc_add);
}
static inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
    return (unsigned)__sc_warp(mask, value, 0, __sc_min);
}
static inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    return (unsigned)__sc_warp(mask, value, 0, __sc_max);
}

// Atomic operations: kernels of other streams run on other threads.
template <class T> struct __sc_same { typedef T type; };
template <class T, class F> static inline T __sc_atomic(T *at, F change) {
    T old, made;
    __atomic_load(at, &old, __ATOMIC_RELAXED);
    do {
        made = change(old);
    } while (!__atomic_compare_exchange(at, &old, &made, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}
static inline float atomicAdd(float *at, float by) { return __sc_atomic(at, [=](float old) { return old + by; }); }
static inline double atomicAdd(double *at, double by) { return __sc_atomic(at, [=](double old) { return old + by; }); }
static inline int atomicAdd(int *at, int by) { return __atomic_fetch_add(at, by, __ATOMIC_RELAXED); }
static inline unsigned atomicAdd(unsigned *at, unsigned by) { return __atomic_fetch_add(at, by, __ATOMIC_RELAXED); }
static inline unsigned long long atomicAdd(unsigned long long *at, unsigned long long by) {
    return __atomic_fetch_add(at, by, __ATOMIC_RELAXED);
}
static inline int atomicSub(int *at, int by) { return __atomic_fetch_sub(at, by, __ATOMIC_RELAXED); }
static inline unsigned atomicSub(unsigned *at, unsigned by) { return __atomic_fetch_sub(at, by, __ATOMIC_RELAXED); }
template <class T> static inline T atomicExch(T *at, typename __sc_same<T>::type to) {
    return __sc_atomic(at, [=](T) { return to; });
}
template <class T> static inline T atomicCAS(T *at, typename __sc_same<T>::type from, typename __sc_same<T>::type to) {
    T old = from;
    __atomic_compare_exchange(at, &old, &to, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return old;
}
template <class T> static inline T atomicMax(T *at, typename __sc_same<T>::type by) {
    return __sc_atomic(at, [=](T old) { return old < by ? by : old; });
}
template <class T> static inline T atomicMin(T *at, typename __sc_same<T>::type by) {
    return __sc_atomic(at, [=](T old) { return by < old ? by : old; });
}
template <class T> static inline T atomicOr(T *at, typename __sc_same<T>::type by) {
    return __atomic_fetch_or(at, by, __ATOMIC_RELAXED);
}
template <class T> static inline T atomicAnd(T *at, typename __sc_same<T>::type by) {
    return __atomic_fetch_and(at, by, __ATOMIC_RELAXED);
}
template <class T> static inline T __ldg(const T *at) { return *at; }
template <class T> static inline T __ldcg(const T *at) { return *at; }
template <class T> static inline T __ldcs(const T *at) { return *at; }
template <class T> static inline void __stcs(T *at, T value) { *at = value; }
template <class T> static inline void __stcg(T *at, T value) { *at = value; }

// Numeric functions.
static inline float __int_as_float(int bits) { return __sc_value<float>((unsigned)bits); }
static inline int __float_as_int(float value) { return (int)__sc_bits(value); }
static inline float __uint_as_float(unsigned bits) { return __sc_value<float>(bits); }
static inline unsigned __float_as_uint(float value) { return (unsigned)__sc_bits(value); }
static inline double __longlong_as_double(long long bits) { return __sc_value<double>((unsigned long long)bits); }
static inline long long __double_as_longlong(double value) { return (long long)__sc_bits(value); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float rsqrt(float x) { return rsqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float __expf(float x) { return expf(x); }
static inline float __exp10f(float x) { return exp10f(x); }
static inline float __logf(float x) { return logf(x); }
static inline float __log2f(float x) { return log2f(x); }
static inline float __powf(float x, float y) { return powf(x, y); }
static inline float __sinf(float x) { return sinf(x); }
static inline float __cosf(float x) { return cosf(x); }
static inline float __tanf(float x) { return tanf(x); }
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
static inline float fdividef(float x, float y) { return x / y; }
static inline int __float2int_rn(float x) { return (int)rintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}
static inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((unsigned long long)x * y >> 32); }
static inline int __mul24(int x, int y) { return x * y; }

static inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
static inline float abs(float x) { return fabsf(x); }
static inline double abs(double x) { return fabs(x); }
static inline int abs(int x) { return x < 0 ? -x : x; }
static inline long long abs(long long x) { return x < 0 ? -x : x; }
static inline bool isnan(double x) { return __builtin_isnan(x); }
static inline bool isnan(float x) { return __builtin_isnan(x); }
static inline bool isinf(double x) { return __builtin_isinf(x); }
static inline bool isinf(float x) { return __builtin_isinf(x); }
static inline bool isfinite(double x) { return __builtin_isfinite(x); }
static inline bool isfinite(float x) { return __builtin_isfinite(x); }
#define __SC_MINMAX(T)                                                                                             \
    static inline T min(T x, T y) { return y < x ? y : x; }                                                        \
    static inline T max(T x, T y) { return x < y ? y : x; }
__SC_MINMAX(int) __SC_MINMAX(unsigned) __SC_MINMAX(long) __SC_MINMAX(unsigned long) __SC_MINMAX(long long)
__SC_MINMAX(unsigned long long)
static inline float min(float x, float y) { return fminf(x, y); }
static inline float max(float x, float y) { return fmaxf(x, y); }
static inline double min(double x, double y) { return fmin(x, y); }
static inline double max(double x, double y) { return fmax(x, y); }
