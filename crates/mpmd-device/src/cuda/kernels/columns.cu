// Sums of columns: of chunks of rows, then of the chunks.

extern "C" __global__ void column_sums(u64 rows, u64 width, u64 chunk, const T *x, float *parts) {
    u64 column = blockIdx.x * 32 + threadIdx.x, end = min(rows, (blockIdx.y + 1) * chunk);
    float sum = 0.0f;
    if (column < width) {
        for (u64 row = blockIdx.y * chunk + threadIdx.y; row < end; row += 8) sum += load(x + row * width + column);
    }
    sum = join_rows(sum);
    if (column < width && threadIdx.y == 0) parts[blockIdx.y * width + column] = sum;
}

extern "C" __global__ void add_chunks(u64 chunks, u64 width, const float *parts, float *sums, u32 adds) {
    for (u64 column = FIRST; column < width; column += STEP) {
        float sum = 0.0f;
        for (u64 chunk = 0; chunk < chunks; chunk++) sum += parts[chunk * width + column];
        put(sums + column, sum, adds);
    }
}
