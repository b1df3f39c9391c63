// Layer norm, and the sum of a block's rows and its branch.

#define EPSILON 1e-5f

// Computes one row of a layer norm with a warp. A thread reads only elements of `x` that no other
// thread has written.
__device__ __forceinline__ void norm_row(float *hat, float *inv_std, float *out, const float *x, const float *gain,
                                         const float *bias, u32 width, float share)
{
    float sum = 0.0f;
    for (u32 column = lane(); column < width; column += WARP)
        sum += x[column];
    float mean = warp_sum(sum) * share;
    float squares = 0.0f;
    for (u32 column = lane(); column < width; column += WARP) {
        float away = x[column] - mean;
        squares += away * away;
    }
    float variance = warp_sum(squares) * share;
    float inv = 1.0f / sqrtf(variance + EPSILON);
    if (lane() == 0)
        *inv_std = inv;
    for (u32 column = lane(); column < width; column += WARP) {
        float normal = (x[column] - mean) * inv;
        hat[column] = normal;
        out[column] = normal * gain[column] + bias[column];
    }
}

// Writes the rows of `x` at mean 0 and variance 1 to `hat`, their factors to `inv_std`, and `out =
// hat * gain + bias`. `share` is one over the width.
extern "C" __global__ void norm_forward(float *hat, float *inv_std, float *out, const float *x, const float *gain,
                                        const float *bias, u32 rows, u32 width, float share)
{
    for (u32 row = first_row(); row < rows; row += row_step()) {
        u64 at = (u64)row * width;
        norm_row(hat + at, inv_std + row, out + at, x + at, gain, bias, width, share);
    }
}

// Computes `y = x + (branch + branch_bias)`, and the norm of `y`.
extern "C" __global__ void branch_norm_forward(float *y, float *hat, float *inv_std, float *out, const float *x,
                                               const float *branch, const float *branch_bias, const float *gain,
                                               const float *bias, u32 rows, u32 width, float share)
{
    for (u32 row = first_row(); row < rows; row += row_step()) {
        u64 at = (u64)row * width;
        for (u32 column = lane(); column < width; column += WARP)
            y[at + column] = x[at + column] + (branch[at + column] + branch_bias[column]);
        norm_row(hat + at, inv_std + row, out + at, y + at, gain, bias, width, share);
    }
}

// Computes `y += branch + bias`.
extern "C" __global__ void add_branch(float *y, const float *branch, const float *bias, u32 rows, u32 width)
{
    for (u32 row = first_row(); row < rows; row += row_step()) {
        u64 at = (u64)row * width;
        for (u32 column = lane(); column < width; column += WARP)
            y[at + column] += branch[at + column] + bias[column];
    }
}

// Computes `dx = base +` the gradient of the norm's input, from that of its output. Without
// `with_base`, `base` is not added. `base` may be `dx`.
extern "C" __global__ void norm_backward_input(float *dx, const float *base, u32 with_base, const float *d_out,
                                               const float *hat, const float *inv_std, const float *gain, u32 rows,
                                               u32 width, float share)
{
    for (u32 row = first_row(); row < rows; row += row_step()) {
        u64 at = (u64)row * width;
        float sum = 0.0f, dot = 0.0f;
        for (u32 column = lane(); column < width; column += WARP) {
            float d_hat = d_out[at + column] * gain[column];
            sum += d_hat;
            dot += d_hat * hat[at + column];
        }
        // Mean and variance depend on all elements of the row. These terms subtract their part of
        // the gradient.
        float mean = warp_sum(sum) * share;
        float along = warp_sum(dot) * share;
        float inv = inv_std[row];
        for (u32 column = lane(); column < width; column += WARP) {
            float d_hat = d_out[at + column] * gain[column];
            float d = inv * (d_hat - mean - hat[at + column] * along);
            dx[at + column] = with_base ? base[at + column] + d : d;
        }
    }
}
