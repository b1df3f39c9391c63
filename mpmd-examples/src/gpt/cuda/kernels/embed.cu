// The embedding: rows from bytes and positions, and the gradients of its two tables.

// Computes `x = bytes[token] + positions[place]`.
extern "C" __global__ void embed_forward(float *x, const float *bytes, const float *positions, const u8 *tokens,
                                         u32 rows, u32 time, u32 width)
{
    for (u32 row = first_row(); row < rows; row += row_step()) {
        const float *byte = bytes + (u64)tokens[row] * width;
        const float *position = positions + (u64)(row % time) * width;
        for (u32 column = lane(); column < width; column += WARP)
            x[(u64)row * width + column] = byte[column] + position[column];
    }
}

#define TOKENS 256u

// Adds the gradients of the table of bytes. Block (x, y) handles byte x, in TOKENS columns from y *
// TOKENS on. It checks all tokens in order and adds the rows of its byte, so no other block writes
// there. A block has TOKENS threads.
extern "C" __global__ void embed_backward_bytes(float *d_bytes, const float *dx, const u8 *tokens, u32 rows, u32 width)
{
    // A flag of one byte for each of the next TOKENS tokens: set if it is this byte. Flags are read
    // four at a time, because few are set.
    __shared__ u32 hits[TOKENS / 4];
    u32 column = blockIdx.y * TOKENS + threadIdx.x;
    float sum = column < width ? d_bytes[(u64)blockIdx.x * width + column] : 0.0f;
    for (u32 start = 0; start < rows; start += TOKENS) {
        u32 mine = start + threadIdx.x;
        ((u8 *)hits)[threadIdx.x] = mine < rows && tokens[mine] == blockIdx.x;
        __syncthreads();
        for (u32 word = 0; word < TOKENS / 4; word++) {
            if (hits[word] == 0 || column >= width)
                continue;
            for (u32 i = 0; i < 4; i++)
                if (hits[word] >> (8 * i) & 1)
                    sum += dx[(u64)(start + 4 * word + i) * width + column];
        }
        __syncthreads();
    }
    if (column < width)
        d_bytes[(u64)blockIdx.x * width + column] = sum;
}

// Adds the gradients of the table of positions. For each element, sequences are added in order.
extern "C" __global__ void embed_backward_positions(float *d_positions, const float *dx, u32 batch, u64 elements)
{
    for (u64 at = first_element(); at < elements; at += element_step()) {
        float sum = d_positions[at];
        for (u32 sequence = 0; sequence < batch; sequence++)
            sum += dx[sequence * elements + at];
        d_positions[at] = sum;
    }
}
