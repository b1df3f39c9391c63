// Sums of columns, for biases and gains, and of whole arrays, for losses and norms. Each sum has
// two stages: each block sums one part, then the parts are added in order.

// The columns and rows of a block, which has COLUMNS * ROW_LANES threads.
#define COLUMNS 32u
#define ROW_LANES 8u

// Adds up the values of all row lanes of a column, in order. Only one thread of each column calls
// it.
__device__ __forceinline__ float add_row_lanes(float found[ROW_LANES][COLUMNS + 1], u32 column)
{
    float sum = 0.0f;
    for (u32 other = 0; other < ROW_LANES; other++)
        sum += found[other][column];
    return sum;
}

// Block (x, y) sums the y-th `part` rows of columns 32 x to 32 x + 31. `sums` is [parts, columns].
// With `weights`, an array of the same shape as `x`, `weighted` gets the sums of the products.
extern "C" __global__ void column_sums(float *sums, float *weighted, const float *x, const float *weights,
                                       u32 with_weights, u32 rows, u32 columns, u32 part)
{
    // One more column avoids bank conflicts in shared memory.
    __shared__ float plain[ROW_LANES][COLUMNS + 1];
    __shared__ float products[ROW_LANES][COLUMNS + 1];
    u32 column_lane = threadIdx.x % COLUMNS, row_lane = threadIdx.x / COLUMNS;
    u32 column = blockIdx.x * COLUMNS + column_lane;
    u32 start = blockIdx.y * part;
    u32 end = rows - start < part ? rows : start + part;
    float sum = 0.0f, product = 0.0f;
    if (column < columns) {
        for (u32 row = start + row_lane; row < end; row += ROW_LANES) {
            float value = x[(u64)row * columns + column];
            sum += value;
            if (with_weights)
                product += value * weights[(u64)row * columns + column];
        }
    }
    plain[row_lane][column_lane] = sum;
    products[row_lane][column_lane] = product;
    __syncthreads();
    if (row_lane == 0 && column < columns) {
        u64 at = (u64)blockIdx.y * columns + column;
        sums[at] = add_row_lanes(plain, column_lane);
        if (with_weights)
            weighted[at] = add_row_lanes(products, column_lane);
    }
}

// Computes `d +=` the sum of the rows of `parts`, [count, columns], in their order.
extern "C" __global__ void add_parts(float *d, const float *parts, u32 count, u32 columns)
{
    for (u64 column = first_element(); column < columns; column += element_step()) {
        float sum = 0.0f;
        for (u32 part = 0; part < count; part++)
            sum += parts[(u64)part * columns + column];
        d[column] += sum;
    }
}

#define SUM_THREADS 256u

// Adds up `x` of all threads of a block in a tree. Thread 0 gets the sum, and the others get zero.
// A block has SUM_THREADS threads, and `found` is its shared memory.
__device__ __forceinline__ double block_sum(double found[SUM_THREADS], double x)
{
    found[threadIdx.x] = x;
    for (u32 half = SUM_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            found[threadIdx.x] += found[threadIdx.x + half];
    }
    return threadIdx.x == 0 ? found[0] : 0.0;
}

// Computes each block's part of the sum of squares, in doubles: `parts` is [blocks].
extern "C" __global__ void square_sums(double *parts, const float *x, u64 elements)
{
    __shared__ double found[SUM_THREADS];
    double sum = 0.0;
    for (u64 at = first_element(); at < elements; at += element_step())
        sum += (double)x[at] * (double)x[at];
    sum = block_sum(found, sum);
    if (threadIdx.x == 0)
        parts[blockIdx.x] = sum;
}

// Computes the sum of `x` with one block.
extern "C" __global__ void sum_doubles(double *sum, const double *x, u64 elements)
{
    __shared__ double found[SUM_THREADS];
    double mine = 0.0;
    for (u64 at = threadIdx.x; at < elements; at += SUM_THREADS)
        mine += x[at];
    mine = block_sum(found, mine);
    if (threadIdx.x == 0)
        *sum = mine;
}

// Copies those of up to 64 `sums` with a set bit in `which` to `picked`, without gaps. With `back`,
// copies in the other direction.
extern "C" __global__ void pick_sums(double *picked, double *sums, u64 which, u32 back)
{
    u32 place = 0;
    for (u32 at = 0; at < threadIdx.x; at++)
        place += (u32)(which >> at & 1);
    if (which >> threadIdx.x & 1) {
        if (back)
            sums[threadIdx.x] = picked[place];
        else
            picked[place] = sums[threadIdx.x];
    }
}
