// Element-wise in-place sums of two arrays, with the same bits as on the host.
//
// Half-precision numbers are added in single precision and rounded to nearest even. They are passed
// as their bits, so that no header is needed.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

// The first element of a thread and the step to its next one. A grid may have fewer threads than
// elements.
#define FIRST (blockIdx.x * (u64)blockDim.x + threadIdx.x)
#define STEP (gridDim.x * (u64)blockDim.x)

static __device__ inline float float_of(u32 bits) {
    union { u32 bits; float value; } both;
    both.bits = bits;
    return both.value;
}

static __device__ inline u32 bits_of(float value) {
    union { u32 bits; float value; } both;
    both.value = value;
    return both.bits;
}

static __device__ inline float from_bf16(u16 half) { return float_of((u32)half << 16); }

static __device__ inline u16 to_bf16(float value) {
    u32 bits = bits_of(value);
    // A NaN stays a NaN.
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40u);
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static __device__ inline float from_f16(u16 half) {
    u32 sign = (u32)(half & 0x8000u) << 16;
    u32 exponent = (half >> 10) & 0x1fu;
    u32 mantissa = half & 0x3ffu;
    // A NaN becomes a quiet NaN.
    if (exponent == 31u) return float_of(sign | 0x7f800000u | (mantissa ? 0x400000u | (mantissa << 13) : 0u));
    if (exponent > 0u) return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    // Subnormal: a multiple of 2^-24, which is exact.
    float value = (float)mantissa * float_of(103u << 23);
    return sign ? -value : value;
}

static __device__ inline u16 to_f16(float value) {
    u32 bits = bits_of(value);
    u32 sign = (bits >> 16) & 0x8000u;
    u32 exponent = (bits >> 23) & 0xffu;
    u32 mantissa = bits & 0x7fffffu;
    if (exponent == 255u) return (u16)(sign | 0x7c00u | (mantissa ? 0x200u | (mantissa >> 13) : 0u));
    int scaled = (int)exponent - 112;
    if (scaled >= 31) return (u16)(sign | 0x7c00u);
    u32 shift = 13u;
    u32 whole = mantissa;
    u32 half = sign;
    if (scaled > 0) {
        half |= (u32)scaled << 10;
    } else {
        // The result is subnormal: the leading one becomes a mantissa bit.
        if (scaled < -10) return (u16)sign;
        whole |= 0x800000u;
        shift = (u32)(14 - scaled);
    }
    half |= whole >> shift;
    u32 rest = whole & ((1u << shift) - 1u);
    u32 middle = 1u << (shift - 1u);
    // A carry goes into the exponent, and from the largest number to infinity.
    if (rest > middle || (rest == middle && (half & 1u))) half += 1u;
    return (u16)half;
}

extern "C" __global__ void add_f32(u64 n, float *sum, const float *more) {
    for (u64 i = FIRST; i < n; i += STEP) sum[i] = sum[i] + more[i];
}

extern "C" __global__ void add_f64(u64 n, double *sum, const double *more) {
    for (u64 i = FIRST; i < n; i += STEP) sum[i] = sum[i] + more[i];
}

extern "C" __global__ void add_f16(u64 n, u16 *sum, const u16 *more) {
    for (u64 i = FIRST; i < n; i += STEP) sum[i] = to_f16(from_f16(sum[i]) + from_f16(more[i]));
}

extern "C" __global__ void add_bf16(u64 n, u16 *sum, const u16 *more) {
    for (u64 i = FIRST; i < n; i += STEP) sum[i] = to_bf16(from_bf16(sum[i]) + from_bf16(more[i]));
}
