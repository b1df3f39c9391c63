// Types and helpers of all kernels. No header of CUDA is needed: half-precision numbers are passed
// as their bits.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

#define DEVICE [[maybe_unused]] static __device__ inline

// The first element of a thread and the step to its next one. A grid may have fewer threads than
// elements.
#define FIRST (blockIdx.x * (u64)blockDim.x + threadIdx.x)
#define STEP (gridDim.x * (u64)blockDim.x)

DEVICE float float_of(u32 bits) {
    union { u32 bits; float value; } both;
    both.bits = bits;
    return both.value;
}

DEVICE u32 bits_of(float value) {
    union { u32 bits; float value; } both;
    both.value = value;
    return both.bits;
}

DEVICE float from_bf16(u16 half) { return float_of((u32)half << 16); }

DEVICE u16 to_bf16(float value) {
    u32 bits = bits_of(value);
    // A NaN stays a NaN.
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40u);
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

DEVICE float from_f16(u16 half) {
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

DEVICE u16 to_f16(float value) {
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


// Half-precision numbers of kernels that are written for any type `T`.
struct bf16 { u16 bits; };

DEVICE float load(const float *at) { return *at; }
DEVICE float load(const bf16 *at) { return from_bf16(at->bits); }
DEVICE void store(float *at, float value) { *at = value; }
DEVICE void store(bf16 *at, float value) { at->bits = to_bf16(value); }

// Four elements that lie at a multiple of their size.
DEVICE float4 load4(const float *at) { return *(const float4 *)at; }
DEVICE float4 load4(const bf16 *at) {
    ushort4 x = *(const ushort4 *)at;
    return make_float4(from_bf16(x.x), from_bf16(x.y), from_bf16(x.z), from_bf16(x.w));
}
DEVICE void store4(float *at, float4 x) { *(float4 *)at = x; }
DEVICE void store4(bf16 *at, float4 x) {
    *(ushort4 *)at = make_ushort4(to_bf16(x.x), to_bf16(x.y), to_bf16(x.z), to_bf16(x.w));
}

// True if `load4` can read there. A null pointer counts.
template <class E> DEVICE bool is_aligned(const E *at) { return (u64)at % (4 * sizeof(E)) == 0; }

// Four elements, of which `left` exist; others are zeros. `vector`: it is aligned.
template <class E> DEVICE float4 load_some(const E *at, u64 left, bool vector) {
    if (vector && left >= 4) return load4(at);
    float4 x = make_float4(left > 0 ? load(at) : 0.0f, 0.0f, 0.0f, 0.0f);
    if (left > 1) x.y = load(at + 1);
    if (left > 2) x.z = load(at + 2);
    if (left > 3) x.w = load(at + 3);
    return x;
}
template <class E> DEVICE void store_some(E *at, float4 x, u64 left, bool vector) {
    if (vector && left >= 4) return store4(at, x);
    if (left > 0) store(at, x.x);
    if (left > 1) store(at + 1, x.y);
    if (left > 2) store(at + 2, x.z);
    if (left > 3) store(at + 3, x.w);
}

template <class F> DEVICE float4 each(float4 x, F f) { return make_float4(f(x.x), f(x.y), f(x.z), f(x.w)); }
template <class F> DEVICE float4 each(float4 x, float4 y, F f) {
    return make_float4(f(x.x, y.x), f(x.y, y.y), f(x.z, y.z), f(x.w, y.w));
}
DEVICE float4 operator+(float4 x, float4 y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); }
DEVICE float4 operator*(float4 x, float by) { return make_float4(x.x * by, x.y * by, x.z * by, x.w * by); }

// Walks over an array, four elements at a time: the place `at` of the first, and how many are `left`.
#define EACH_FOUR(n) for (u64 at = 4 * FIRST, left; left = (n) - at, at < (n); at += 4 * STEP)
// Does so in the rows of a matrix: `row`, the first `column`, and how many are `left` in the row.
#define EACH_FOUR_OF_ROWS(rows, width)                                                                                 \
    for (u64 fours = ((width) + 3) / 4, four = FIRST, row, column, left;                                               \
         row = four / fours, column = four % fours * 4, left = (width) - column, four < (rows) * fours; four += STEP)

// Does so in a row that all threads of a block have together.
#define EACH_FOUR_OF_BLOCK(width)                                                                                      \
    for (u64 at = 4 * threadIdx.x, left; left = (width) - at, at < (width); at += 4 * blockDim.x)

// The sum and the largest of four numbers, of which `left` exist.
DEVICE float sum_of(float4 x, u64 left) {
    return x.x + (left > 1 ? x.y : 0.0f) + (left > 2 ? x.z : 0.0f) + (left > 3 ? x.w : 0.0f);
}
DEVICE float largest_of(float4 x, u64 left) {
    float most = left > 1 ? fmaxf(x.x, x.y) : x.x;
    if (left > 2) most = fmaxf(most, x.z);
    return left > 3 ? fmaxf(most, x.w) : most;
}

// Sets an element, or adds to it.
template <class E> DEVICE void put(E *at, float value, u32 adds) {
    store(at, adds ? load(at) + value : value);
}

// An index of 1, 4 or 8 bytes. A negative one becomes very large.
DEVICE u64 index_at(const void *indices, u32 bytes, u64 at) {
    if (bytes == 1) return ((const unsigned char *)indices)[at];
    return bytes == 4 ? ((const u32 *)indices)[at] : ((const u64 *)indices)[at];
}

#define ALL 0xffffffffu
#define NOTHING __int_as_float(0xff800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)

struct Sum { static __device__ inline float of(float x, float y) { return x + y; } };
struct Largest { static __device__ inline float of(float x, float y) { return fmaxf(x, y); } };

// The sum or the largest of the numbers of all threads of a block, in a fixed order. All threads
// get it. `room` has 32 numbers of shared memory. The number of threads is a multiple of 32.
template <class Join> DEVICE float block_join(float x, float *room) {
    for (int step = 16; step > 0; step /= 2) x = Join::of(x, __shfl_xor_sync(ALL, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    x = room[0];
    for (u32 warp = 1; warp < blockDim.x / 32; warp++) x = Join::of(x, room[warp]);
    return x;
}
DEVICE float block_sum(float x, float *room) { return block_join<Sum>(x, room); }
DEVICE float block_largest(float x, float *room) { return block_join<Largest>(x, room); }

// For blocks of 32 x 8 threads: the sum over y, in order, for threads with y = 0.
DEVICE float join_rows(float x) {
    __shared__ float parts[8][33];
    __syncthreads();
    parts[threadIdx.y][threadIdx.x] = x;
    __syncthreads();
    for (u32 y = 1; y < 8; y++) x += parts[y][threadIdx.x];
    return x;
}
