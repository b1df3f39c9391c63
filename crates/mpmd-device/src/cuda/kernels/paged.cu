// Attention to keys and values in blocks of BLOCK tokens. Keys are [blocks, groups, dim, BLOCK],
// values [blocks, groups, BLOCK, dim]. The numbers of a query depend on its own position and keys
// alone, so its bits are the same whatever else is computed.

#define BLOCK 16
// Keys of a part of a sequence, which a block of as many threads has.
#define KEYS 256

struct Cache {
    u64 blocks, groups, dim;
    // Blocks of each sequence, `most` apart.
    const u32 *tables;
    u64 most;
    // Sequence and position of each token.
    const u32 *sequences, *positions;

    // The block of a position of a token's sequence. A wrong one is not below `blocks`.
    __device__ u64 block(u64 token, u64 position) const {
        u64 at = position / BLOCK;
        return at < most ? tables[sequences[token] * most + at] : blocks;
    }
    // The first of the elements of a group in a block.
    __device__ u64 start(u64 block, u64 group) const { return (block * groups + group) * dim * BLOCK; }
};

#define CACHE u64 blocks, u64 groups, u64 dim, const u32 *tables, u64 most, const u32 *sequences, const u32 *positions
#define THE_CACHE Cache{blocks, groups, dim, tables, most, sequences, positions}

// Writes keys and values of tokens to their places.
extern "C" __global__ void paged_write(
    CACHE, u64 tokens, const T *k, u64 k_token, u64 k_head, const T *v, u64 v_token, u64 v_head, T *keys, T *values
) {
    Cache cache = THE_CACHE;
    for (u64 i = FIRST; i < tokens * groups * dim; i += STEP) {
        u64 column = i % dim, group = i / dim % groups, token = i / dim / groups, position = positions[token];
        u64 block = cache.block(token, position), place = position % BLOCK;
        if (block >= blocks) continue;
        store(keys + cache.start(block, group) + column * BLOCK + place, load(k + token * k_token + group * k_head + column));
        store(values + cache.start(block, group) + place * dim + column, load(v + token * v_token + group * v_head + column));
    }
}

// One part of the keys of a head's query. Parts are [tokens, heads, parts, dim + 2]: the sums of
// values, the largest score, and the sum of exponentials. Tokens begin at `first`.
extern "C" __global__ void paged_parts(
    CACHE, u64 first, u64 heads, u64 parts, u64 window, float scale, u32 capped, float cap, const T *q, u64 q_token, u64 q_head,
    const T *keys, const T *values, float *results
) {
    __shared__ float query[256], shares[KEYS], room[32], sums[KEYS];
    Cache cache = THE_CACHE;
    u64 part = blockIdx.x % parts, head = blockIdx.x / parts % heads, token = first + blockIdx.x / parts / heads;
    u64 end = (u64)positions[token] + 1, start = end > window ? end - window : 0, base = part * KEYS;
    if (base >= end || base + KEYS <= start) return;
    u64 group = head / (heads / groups), position = base + threadIdx.x;
    for (u64 i = threadIdx.x; i < dim; i += KEYS) query[i] = load(q + token * q_token + head * q_head + i);
    __syncthreads();
    float score = NOTHING;
    if (position >= start && position < end) {
        u64 block = cache.block(token, position);
        const T *key = keys + cache.start(block, group) + position % BLOCK;
        score = 0.0f;
        if (block >= blocks) score = NOT_A_NUMBER;
        else for (u64 i = 0; i < dim; i++) score += query[i] * load(key + i * BLOCK);
        score *= scale;
        if (capped) score = cap * tanhf(score / cap);
    }
    float largest = block_largest(score, room), share = expf(score - largest);
    shares[threadIdx.x] = share;
    float total = block_sum(share, room);
    // Threads take columns; where there are fewer columns than threads, some of the keys each.
    u64 width = dim <= 32 ? 32 : dim <= 64 ? 64 : dim <= 128 ? 128 : 256, step = KEYS / width;
    u64 column = threadIdx.x % width, last = min(end, base + KEYS);
    float sum = 0.0f;
    for (position = max(base, start / step * step) + threadIdx.x / width; position < last; position += step) {
        if (position < start || column >= dim) continue;
        u64 block = cache.block(token, position);
        if (block < blocks) sum += shares[position - base] * load(values + cache.start(block, group) + position % BLOCK * dim + column);
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    results += blockIdx.x * (dim + 2);
    if (threadIdx.x < width && column < dim) {
        for (u64 i = 1; i < step; i++) sum += sums[i * width + column];
        results[column] = sum;
    }
    if (threadIdx.x == 0) {
        results[dim] = largest;
        results[dim + 1] = total;
    }
}

// Joins the parts of a head's query in order.
extern "C" __global__ void paged_join(
    u64 first, u64 heads, u64 parts, u64 dim, u64 window, const u32 *positions, const float *results, T *out,
    u64 out_token, u64 out_head
) {
    u64 head = blockIdx.x % heads, token = first + blockIdx.x / heads;
    u64 end = (u64)positions[token] + 1, start = end > window ? end - window : 0;
    u64 from = start / KEYS, to = min(parts, (end + KEYS - 1) / KEYS);
    results += blockIdx.x * parts * (dim + 2);
    float largest = NOTHING, total = 0.0f;
    for (u64 part = from; part < to; part++) largest = fmaxf(largest, results[part * (dim + 2) + dim]);
    for (u64 part = from; part < to; part++) {
        const float *at = results + part * (dim + 2);
        total += at[dim + 1] * expf(at[dim] - largest);
    }
    for (u64 i = threadIdx.x; i < dim; i += blockDim.x) {
        float sum = 0.0f;
        for (u64 part = from; part < to; part++) {
            const float *at = results + part * (dim + 2);
            sum += at[i] * expf(at[dim] - largest);
        }
        store(out + token * out_token + head * out_head + i, sum / total);
    }
}
