// What the kernels of this folder share; all of them are one source, compiled together, with this file first.
//
// Most kernels work on rows, and a warp has a row at a time: its 32 threads are at neighbouring columns, so that
// they read and write memory in whole lines, and what is summed over a row goes from thread to thread. Whatever the
// number of blocks, a row is computed in the same way, and no sum depends on who comes first: the same inputs give
// the same bits.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARP 32u
#define ALL_LANES 0xffffffffu

// What `x` of all threads of a warp is together, in each of them. All must come here.
__device__ __forceinline__ float warp_sum(float x)
{
    for (int step = WARP / 2; step > 0; step /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// The largest `x` of all threads of a warp. A NaN among others may be passed over, and shows in its exponential.
__device__ __forceinline__ float warp_max(float x)
{
    for (int step = WARP / 2; step > 0; step /= 2) {
        float other = __shfl_xor_sync(ALL_LANES, x, step);
        x = other > x ? other : x;
    }
    return x;
}

// This thread's place in its warp.
__device__ __forceinline__ u32 lane() { return threadIdx.x % WARP; }

// The first row of this thread's warp, and how many rows on its next one is. Blocks are of whole warps.
__device__ __forceinline__ u32 first_row() { return (blockIdx.x * blockDim.x + threadIdx.x) / WARP; }
__device__ __forceinline__ u32 row_step() { return gridDim.x * blockDim.x / WARP; }

// The same for kernels that have a thread for each element.
__device__ __forceinline__ u64 first_element() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ u64 element_step() { return (u64)gridDim.x * blockDim.x; }

// e to the power of `x`, as the functions for the host compute it: within 3e-7 of the value, zero below -80, above 80
// that of 80, and a NaN of a NaN.
__device__ __forceinline__ float exp_limited(float x)
{
    const float limit = 80.0f;
    // Added to a small number, it leaves that number's nearest whole one in the lowest bits.
    const float round = 12582912.0f;
    // ln 2 in two parts, the first of so few bits that its product with `n` is exact.
    const float ln2_high = 355.0f / 512.0f;
    const float ln2_low = (float)(0.693147180559945309417232121458 - 355.0 / 512.0);
    float capped = x > limit ? limit : x;
    float rounded = capped * 1.44269504088896340736f + round;
    float n = rounded - round;
    float r = capped - n * ln2_high - n * ln2_low;
    float series = 1.0f / 720.0f;
    series = series * r + 1.0f / 120.0f;
    series = series * r + 1.0f / 24.0f;
    series = series * r + 1.0f / 6.0f;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    // The shift drops all of `round` and makes the whole number an exponent.
    float power = __int_as_float((int)(((u32)__float_as_int(rounded) << 23) + 0x3f800000u));
    return x < -limit ? 0.0f : series * power;
}
