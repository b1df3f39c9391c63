// Sums of columns, for biases and gains, and of whole arrays, for losses and norms. Each is in two stages: parts,
// which blocks sum up on their own, and the sum of these in their order.

// A tile of columns and the rows that its threads are at: a block is of COLUMNS * ROW_LANES threads.
#define COLUMNS 32u
#define ROW_LANES 8u

// What thread `row_lane` of each column found, added up in order; for the first of them.
__device__ __forceinline__ float add_row_lanes(float found[ROW_LANES][COLUMNS + 1], u32 column)
{
    float sum = 0.0f;
    for (u32 other = 0; other < ROW_LANES; other++)
        sum += found[other][column];
    return sum;
}

// Block (x, y) sums the y-th `part` rows of columns 32 x to 32 x + 31: `sums` is [parts, columns]. With `weights`, an array
// of the same shape, `weighted` gets the sums of the products as well.
extern "C" __global__ void column_sums(float *sums, float *weighted, const float *x, const float *weights,
                                       u32 with_weights, u32 rows, u32 columns, u32 part)
{
    // One more in a row, so that threads that are at neighbours do not ask the same bank.
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

// `d +=` the sum of the rows of `parts`, [count, columns], in their order.
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

// What the threads of a block found, added up in a tree; for the first of them. A block is of SUM_THREADS threads, and
// `found` its shared memory.
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

// Each block's part of the sum of squares, in doubles: `parts` is [blocks].
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

// The sum of `x`, by one block.
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

// Of up to 64 `sums` those whose bit is set in `which`, one after another: to `picked`, or with `back` from there.
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
