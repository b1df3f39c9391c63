// Sums and biases. A thread has four elements at a time.

extern "C" __global__ void add_bias(u64 n, u64 width, const T *x, const T *bias, const T *more, T *y) {
    bool vector = width % 4 == 0 && is_aligned(x) && is_aligned(bias) && is_aligned(more) && is_aligned(y);
    for (u64 i = 4 * FIRST; i < n; i += 4 * STEP) {
        if (vector) {
            float4 sum = load4(x + i);
            if (bias) sum = sum + load4(bias + i % width);
            if (more) sum = sum + load4(more + i);
            store4(y + i, sum);
            continue;
        }
        for (u64 j = i; j < min(n, i + 4); j++) {
            float sum = load(x + j);
            if (bias) sum += load(bias + j % width);
            if (more) sum += load(more + j);
            store(y + j, sum);
        }
    }
}
