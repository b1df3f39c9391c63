// Layer norm and RMS norm. A block has one row; statistics are (mean, 1 / standard deviation).

extern "C" __global__ void norm_forward(
    u64 width, float eps, u32 remove_mean, const T *x, const T *weight, const T *bias, T *y, float *statistics
) {
    __shared__ float room[32];
    x += blockIdx.x * width;
    y += blockIdx.x * width;
    bool vector = width % 4 == 0 && is_aligned(x) && is_aligned(weight) && is_aligned(bias) && is_aligned(y);
    float mean = 0.0f;
    if (remove_mean) {
        float sum = 0.0f;
        EACH_FOUR_OF_BLOCK(width) sum += sum_of(load_some(x + at, left, vector), left);
        mean = block_sum(sum, room) / (float)width;
    }
    float squares = 0.0f;
    EACH_FOUR_OF_BLOCK(width) {
        float4 square = each(load_some(x + at, left, vector), [=](float x) { return (x - mean) * (x - mean); });
        squares += sum_of(square, left);
    }
    float scale = 1.0f / sqrtf(block_sum(squares, room) / (float)width + eps);
    EACH_FOUR_OF_BLOCK(width) {
        float4 from = load_some(x + at, left, vector), by = load_some(weight + at, left, vector);
        float4 value = each(from, by, [=](float x, float by) { return (x - mean) * scale * by; });
        if (bias) value = value + load_some(bias + at, left, vector);
        store_some(y + at, value, left, vector);
    }
    if (threadIdx.x == 0) {
        statistics[2 * blockIdx.x] = mean;
        statistics[2 * blockIdx.x + 1] = scale;
    }
}

extern "C" __global__ void norm_backward(
    u64 width, u32 remove_mean, const T *x, const T *weight, const T *d_y, const float *statistics, T *d_x, u32 adds
) {
    __shared__ float room[32];
    x += blockIdx.x * width;
    d_y += blockIdx.x * width;
    d_x += blockIdx.x * width;
    bool vector = width % 4 == 0 && is_aligned(x) && is_aligned(weight) && is_aligned(d_y) && is_aligned(d_x);
    float mean = statistics[2 * blockIdx.x], scale = statistics[2 * blockIdx.x + 1];
    auto times = [](float x, float y) { return x * y; };
    auto normal = [=](float x) { return (x - mean) * scale; };
    // Mean and variance depend on all elements of the row: their parts of the gradient.
    float sum = 0.0f, along = 0.0f;
    EACH_FOUR_OF_BLOCK(width) {
        float4 d = each(load_some(d_y + at, left, vector), load_some(weight + at, left, vector), times);
        sum += sum_of(d, left);
        along += sum_of(each(d, each(load_some(x + at, left, vector), normal), times), left);
    }
    sum = block_sum(sum, room) / (float)width;
    along = block_sum(along, room) / (float)width;
    float shift = remove_mean ? sum : 0.0f;
    EACH_FOUR_OF_BLOCK(width) {
        float4 d = each(load_some(d_y + at, left, vector), load_some(weight + at, left, vector), times);
        float4 from = each(load_some(x + at, left, vector), normal);
        d = each(d, from, [=](float d, float x) { return scale * (d - shift - x * along); });
        store_some(d_x + at, adds ? d + load_some(d_x + at, left, vector) : d, left, vector);
    }
}

// Sums over a chunk of rows for the gradients of weight and bias, for 32 columns.
extern "C" __global__ void norm_weight_sums(
    u64 rows, u64 width, u64 chunk, const T *x, const T *d_y, const float *statistics, float *d_weight, float *d_bias
) {
    u64 column = blockIdx.x * 32 + threadIdx.x, end = min(rows, (blockIdx.y + 1) * chunk);
    float weight = 0.0f, bias = 0.0f;
    if (column < width) {
        for (u64 row = blockIdx.y * chunk + threadIdx.y; row < end; row += 8) {
            float d = load(d_y + row * width + column);
            weight += d * ((load(x + row * width + column) - statistics[2 * row]) * statistics[2 * row + 1]);
            bias += d;
        }
    }
    weight = join_rows(weight);
    bias = join_rows(bias);
    if (column < width && threadIdx.y == 0) {
        d_weight[blockIdx.y * width + column] = weight;
        d_bias[blockIdx.y * width + column] = bias;
    }
}
