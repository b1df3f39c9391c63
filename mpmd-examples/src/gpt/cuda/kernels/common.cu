// Helpers of the kernels in this folder. All kernels are one source, with this file first.
//
// Most kernels work on rows, and a warp has one row at a time. Its 32 threads are at adjacent
// columns, so that reads and writes are coalesced. Sums over a row use shuffles between threads. A
// row is computed in the same way for any number of blocks, and no sum depends on thread timing:
// the same inputs give the same bits.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARP 32u
#define ALL_LANES 0xffffffffu

// Returns the sum of `x` over all threads of a warp, in each of them. All threads must call it.
__device__ __forceinline__ float warp_sum(float x)
{
    for (int step = WARP / 2; step > 0; step /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// Returns the largest `x` of all threads of a warp. It may ignore a NaN, which later shows in its
// exponential.
__device__ __forceinline__ float warp_max(float x)
{
    for (int step = WARP / 2; step > 0; step /= 2) {
        float other = __shfl_xor_sync(ALL_LANES, x, step);
        x = other > x ? other : x;
    }
    return x;
}

// Returns this thread's index in its warp.
__device__ __forceinline__ u32 lane() { return threadIdx.x % WARP; }

// The first row of this thread's warp, and the distance to its next row. Blocks consist of whole
// warps.
__device__ __forceinline__ u32 first_row() { return (blockIdx.x * blockDim.x + threadIdx.x) / WARP; }
__device__ __forceinline__ u32 row_step() { return gridDim.x * blockDim.x / WARP; }

// The same for kernels with one thread per element.
__device__ __forceinline__ u64 first_element() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ u64 element_step() { return (u64)gridDim.x * blockDim.x; }

// Returns e to the power of `x`, as on the host. The relative error is below 3e-7. Below -80 the
// result is zero, and above 80 it is that of 80. A NaN stays a NaN.
__device__ __forceinline__ float exp_limited(float x)
{
    const float limit = 80.0f;
    // Adding it to a small number rounds that number to an integer, which is left in the lowest
    // bits.
    const float round = 12582912.0f;
    // ln 2 in two parts. The first has so few bits that its product with `n` is exact.
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
    // The shift removes all of `round` and makes the integer the exponent.
    float power = __int_as_float((int)(((u32)__float_as_int(rounded) << 23) + 0x3f800000u));
    return x < -limit ? 0.0f : series * power;
}
