// Sums, biases, conversions and dropout. A thread has four elements at a time.

extern "C" __global__ void add_bias(u64 rows, u64 width, const T *x, const T *bias, const T *more, T *y) {
    bool vector = (rows == 1 || width % 4 == 0) && is_aligned(x) && is_aligned(bias) && is_aligned(more) && is_aligned(y);
    EACH_FOUR_OF_ROWS(rows, width) {
        u64 at = row * width + column;
        float4 sum = load_some(x + at, left, vector);
        if (bias) sum = sum + load_some(bias + column, left, vector);
        if (more) sum = sum + load_some(more + at, left, vector);
        store_some(y + at, sum, left, vector);
    }
}

template <class E> DEVICE void add_product(u64 n, float factor, const T *x, E *y) {
    bool vector = is_aligned(x) && is_aligned(y);
    EACH_FOUR(n) {
        float4 sum = load_some(x + at, left, vector) * factor + load_some(y + at, left, vector);
        store_some(y + at, sum, left, vector);
    }
}

extern "C" __global__ void add_scaled(u64 n, float factor, const T *x, T *y) { add_product(n, factor, x, y); }
extern "C" __global__ void add_scaled_f32(u64 n, float factor, const T *x, float *y) { add_product(n, factor, x, y); }

template <class From, class To> DEVICE void copy(u64 n, const From *x, To *y) {
    bool vector = is_aligned(x) && is_aligned(y);
    EACH_FOUR(n) store_some(y + at, load_some(x + at, left, vector), left, vector);
}

extern "C" __global__ void from_f32(u64 n, const float *x, T *y) { copy(n, x, y); }
extern "C" __global__ void to_f32(u64 n, const T *x, float *y) { copy(n, x, y); }

// The 64 random bits of a key's block: Philox4x32 with 10 rounds, as on the host.
DEVICE u64 random_bits(u64 key, u64 block) {
    u32 counter[4] = {(u32)block, (u32)(block >> 32), 0, 0}, low = (u32)key, high = (u32)(key >> 32);
    for (int round = 0; round < 10; round++) {
        u64 a = counter[0] * (u64)0xd2511f53u, b = counter[2] * (u64)0xcd9e8d57u;
        counter[0] = (u32)(b >> 32) ^ counter[1] ^ low;
        counter[1] = (u32)b;
        counter[2] = (u32)(a >> 32) ^ counter[3] ^ high;
        counter[3] = (u32)a;
        low += 0x9e3779b9u;
        high += 0xbb67ae85u;
    }
    return counter[0] | (u64)counter[1] << 32;
}

// Four elements share a block of random bits. An element is kept if its 16 bits are not below
// `limit`.
extern "C" __global__ void dropout(u64 n, u64 key, u32 limit, float scale, const T *x, T *y) {
    bool vector = is_aligned(x) && is_aligned(y);
    EACH_FOUR(n) {
        u64 random = random_bits(key, at / 4);
        auto kept = [&](float x) {
            float value = (random & 0xffff) < limit ? 0.0f : x * scale;
            random >>= 16;
            return value;
        };
        float4 value = load_some(x + at, left, vector);
        value.x = kept(value.x);
        value.y = kept(value.y);
        value.z = kept(value.z);
        value.w = kept(value.w);
        store_some(y + at, value, left, vector);
    }
}
