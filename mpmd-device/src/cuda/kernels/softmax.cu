// Softmax and cross-entropy of rows. A block has one row. Normalizers are (largest element, 1 / sum
// of the exponentials).

// The normalizer of a row, for all threads of a block.
DEVICE float2 normalizer(u64 width, const T *x, float *room) {
    float largest = NOTHING, sum = 0.0f;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) largest = fmaxf(largest, load(x + i));
    largest = block_largest(largest, room);
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) sum += expf(load(x + i) - largest);
    return make_float2(largest, 1.0f / block_sum(sum, room));
}

extern "C" __global__ void softmax(u64 width, u32 is_log, const T *x, T *y) {
    __shared__ float room[32];
    x += blockIdx.x * width;
    y += blockIdx.x * width;
    float2 of = normalizer(width, x, room);
    float log = is_log ? logf(of.y) : 0.0f;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        float below = load(x + i) - of.x;
        store(y + i, is_log ? below + log : expf(below) * of.y);
    }
}

extern "C" __global__ void softmax_backward(u64 width, u32 is_log, const T *y, const T *d_y, T *d_x) {
    __shared__ float room[32];
    y += blockIdx.x * width;
    d_y += blockIdx.x * width;
    d_x += blockIdx.x * width;
    float sum = 0.0f;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) sum += load(d_y + i) * (is_log ? 1.0f : load(y + i));
    sum = block_sum(sum, room);
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        float share = load(y + i), d = load(d_y + i);
        store(d_x + i, is_log ? d - expf(share) * sum : share * (d - sum));
    }
}

extern "C" __global__ void cross_entropy(
    u64 classes, const T *logits, const void *targets, u32 bytes, const float *weights, float *losses, float *normalizers
) {
    __shared__ float room[32];
    u64 row = blockIdx.x, target = index_at(targets, bytes, row);
    logits += row * classes;
    float weight = weights ? weights[row] : 1.0f;
    // A row of weight 0 may have infinite logits.
    float2 of = weight == 0.0f ? make_float2(0.0f, 0.0f) : normalizer(classes, logits, room);
    if (threadIdx.x > 0) return;
    float loss = target < classes ? of.x - load(logits + target) - logf(of.y) : NOT_A_NUMBER;
    losses[row] = weight == 0.0f ? 0.0f : weight * loss;
    normalizers[2 * row] = of.x;
    normalizers[2 * row + 1] = of.y;
}

// The sums of losses and of weights, by one block, in double precision.
extern "C" __global__ void loss_total(u64 rows, const float *losses, const float *weights, float *total) {
    __shared__ double parts[2][256];
    double loss = 0.0, weight = 0.0;
    for (u64 row = threadIdx.x; row < rows; row += 256) {
        loss += losses[row];
        weight += weights ? weights[row] : 1.0f;
    }
    parts[0][threadIdx.x] = loss;
    parts[1][threadIdx.x] = weight;
    for (u32 step = 128; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x >= step) continue;
        for (u32 i = 0; i < 2; i++) parts[i][threadIdx.x] += parts[i][threadIdx.x + step];
    }
    if (threadIdx.x == 0) {
        total[0] = (float)parts[0][0];
        total[1] = (float)parts[1][0];
    }
}

extern "C" __global__ void cross_entropy_backward(
    u64 classes, const T *logits, const void *targets, u32 bytes, const float *weights, const float *normalizers,
    float scale, const float *d_loss, T *d_logits
) {
    u64 row = blockIdx.x, target = index_at(targets, bytes, row);
    logits += row * classes;
    d_logits += row * classes;
    float weight = weights ? weights[row] : 1.0f, factor = scale * weight * (d_loss ? *d_loss : 1.0f);
    float largest = normalizers[2 * row], share = factor * normalizers[2 * row + 1];
    if (target >= classes) share = NOT_A_NUMBER;
    for (u64 i = threadIdx.x; i < classes; i += blockDim.x) {
        float d = share * expf(load(logits + i) - largest) - (i == target ? factor : 0.0f);
        store(d_logits + i, weight == 0.0f ? 0.0f : d);
    }
}
