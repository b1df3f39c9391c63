// Softmax and cross-entropy of rows. A block has one row. Normalizers are (largest element, 1 / sum
// of the exponentials).

// The normalizer of a row, for all threads of a block.
DEVICE float2 normalizer(u64 width, const T *x, bool vector, float *room) {
    float largest = NOTHING, sum = 0.0f;
    EACH_FOUR_OF_BLOCK(width) largest = fmaxf(largest, largest_of(load_some(x + at, left, vector), left));
    largest = block_largest(largest, room);
    EACH_FOUR_OF_BLOCK(width) {
        float4 power = each(load_some(x + at, left, vector), [=](float x) { return expf(x - largest); });
        sum += sum_of(power, left);
    }
    return make_float2(largest, 1.0f / block_sum(sum, room));
}

extern "C" __global__ void softmax(u64 width, u32 is_log, const T *x, T *y) {
    __shared__ float room[32];
    x += blockIdx.x * width;
    y += blockIdx.x * width;
    bool vector = width % 4 == 0 && is_aligned(x) && is_aligned(y);
    float2 of = normalizer(width, x, vector, room);
    float log = is_log ? logf(of.y) : 0.0f;
    EACH_FOUR_OF_BLOCK(width) {
        auto share = [=](float x) { return is_log ? x - of.x + log : expf(x - of.x) * of.y; };
        store_some(y + at, each(load_some(x + at, left, vector), share), left, vector);
    }
}

extern "C" __global__ void softmax_backward(u64 width, u32 is_log, const T *y, const T *d_y, T *d_x) {
    __shared__ float room[32];
    y += blockIdx.x * width;
    d_y += blockIdx.x * width;
    d_x += blockIdx.x * width;
    bool vector = width % 4 == 0 && is_aligned(y) && is_aligned(d_y) && is_aligned(d_x);
    float sum = 0.0f;
    EACH_FOUR_OF_BLOCK(width) {
        float4 y4 = load_some(y + at, left, vector), d = load_some(d_y + at, left, vector);
        sum += sum_of(each(y4, d, [=](float y, float d) { return is_log ? d : d * y; }), left);
    }
    sum = block_sum(sum, room);
    EACH_FOUR_OF_BLOCK(width) {
        float4 y4 = load_some(y + at, left, vector), d = load_some(d_y + at, left, vector);
        auto through = [=](float y, float d) { return is_log ? d - expf(y) * sum : y * (d - sum); };
        store_some(d_x + at, each(y4, d, through), left, vector);
    }
}

extern "C" __global__ void cross_entropy(
    u64 classes, const T *logits, const void *targets, u32 bytes, const float *weights, float *losses,
    float *normalizers
) {
    __shared__ float room[32];
    u64 row = blockIdx.x, target = index_at(targets, bytes, row);
    logits += row * classes;
    float weight = weights ? weights[row] : 1.0f;
    bool vector = classes % 4 == 0 && is_aligned(logits);
    // A row of weight 0 may have infinite logits.
    float2 of = weight == 0.0f ? make_float2(0.0f, 0.0f) : normalizer(classes, logits, vector, room);
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
    bool vector = classes % 4 == 0 && is_aligned(logits) && is_aligned(d_logits);
    EACH_FOUR_OF_BLOCK(classes) {
        float4 d = each(load_some(logits + at, left, vector), [=](float x) { return share * expf(x - largest); });
        if (at == target) d.x -= factor;
        if (at + 1 == target) d.y -= factor;
        if (at + 2 == target) d.z -= factor;
        if (at + 3 == target) d.w -= factor;
        if (weight == 0.0f) d = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        store_some(d_logits + at, d, left, vector);
    }
}
