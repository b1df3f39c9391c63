// Rows of a table by their indices. Indices beyond the table are errors: they give rows of NaN, and
// have no gradient.

// A block has one token. Row `i` of `positions` is added to tokens `i` modulo `time`.
extern "C" __global__ void embed(
    u64 entries, u64 width, u64 time, const T *table, const void *indices, u32 bytes, const T *positions, T *y
) {
    u64 token = blockIdx.x, index = index_at(indices, bytes, token);
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        float value = index < entries ? load(table + index * width + i) : NOT_A_NUMBER;
        store(y + token * width + i, positions ? value + load(positions + token % time * width + i) : value);
    }
}

extern "C" __global__ void clear(u64 n, float *values) {
    for (u64 i = FIRST; i < n; i += STEP) values[i] = 0.0f;
}

// Sorts tokens by index, then by place: the rank of a token is the number of tokens before it.
extern "C" __global__ void sort_tokens(u64 tokens, const void *indices, u32 bytes, u32 *order) {
    __shared__ u64 others[256];
    u64 token = blockIdx.x * (u64)blockDim.x + threadIdx.x, rank = 0;
    u64 index = token < tokens ? index_at(indices, bytes, token) : 0;
    for (u64 first = 0; first < tokens; first += 256) {
        __syncthreads();
        if (first + threadIdx.x < tokens) others[threadIdx.x] = index_at(indices, bytes, first + threadIdx.x);
        __syncthreads();
        u64 count = min((u64)256, tokens - first);
        for (u64 i = 0; i < count; i++) rank += others[i] < index || (others[i] == index && first + i < token);
    }
    if (token < tokens) order[rank] = (u32)token;
}

#define CHUNK 32

// Adds gradients of tokens in a chunk of the sorted ones. Sums of indices that lie in this chunk
// alone are complete. `open` gets the others, for each chunk: that of its last index, if it began
// here and goes on; that of its first index, if it began before.
extern "C" __global__ void embed_backward(
    u64 tokens, u64 entries, u64 width, const void *indices, u32 bytes, const u32 *order, const T *d_y, float *open,
    float *d_table
) {
    u64 start = blockIdx.x * (u64)CHUNK, end = min(tokens, start + CHUNK);
    open += 2 * blockIdx.x * width;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        float sum = 0.0f;
        bool began = start == 0 || index_at(indices, bytes, order[start - 1]) != index_at(indices, bytes, order[start]);
        for (u64 at = start; at < end; at++) {
            u64 index = index_at(indices, bytes, order[at]);
            sum += load(d_y + order[at] * width + i);
            bool ends = at + 1 == tokens || index_at(indices, bytes, order[at + 1]) != index;
            if (!ends && at + 1 < end) continue;
            if (!began) open[width + i] = sum;
            else if (!ends) open[i] = sum;
            else if (index < entries) d_table[index * width + i] += sum;
            sum = 0.0f;
            began = true;
        }
    }
}

// Adds the sums of an index that begins in a block's chunk and goes on in the next ones.
extern "C" __global__ void embed_backward_open(
    u64 tokens, u64 entries, u64 width, const void *indices, u32 bytes, const u32 *order, const T *, const float *open,
    float *d_table
) {
    u64 start = blockIdx.x * (u64)CHUNK, next = start + CHUNK;
    if (next >= tokens) return;
    u64 index = index_at(indices, bytes, order[next - 1]);
    bool began = start == 0 || index_at(indices, bytes, order[start - 1]) != index;
    if (!began || index_at(indices, bytes, order[next]) != index || index >= entries) return;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        float sum = open[2 * blockIdx.x * width + i];
        for (u64 at = next; at < tokens && index_at(indices, bytes, order[at]) == index; at += CHUNK) {
            sum += open[(2 * (at / CHUNK) + 1) * width + i];
        }
        d_table[index * width + i] += sum;
    }
}
