// Element-wise in-place sums of two arrays, with the same bits as on the host: half-precision
// numbers are added in single precision and rounded to nearest even.

extern "C" __global__ void add_f32(u64 n, float *sum, const float *more) {
    for (u64 i = FIRST; i < n; i += STEP) sum[i] = sum[i] + more[i];
}

extern "C" __global__ void add_f64(u64 n, double *sum, const double *more) {
    for (u64 i = FIRST; i < n; i += STEP) sum[i] = sum[i] + more[i];
}

extern "C" __global__ void add_f16(u64 n, u16 *sum, const u16 *more) {
    for (u64 i = FIRST; i < n; i += STEP) sum[i] = to_f16(from_f16(sum[i]) + from_f16(more[i]));
}

extern "C" __global__ void add_bf16(u64 n, u16 *sum, const u16 *more) {
    for (u64 i = FIRST; i < n; i += STEP) sum[i] = to_bf16(from_bf16(sum[i]) + from_bf16(more[i]));
}
