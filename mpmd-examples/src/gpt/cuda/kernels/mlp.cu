// The MLP, except its matrix products.

// Writes GELU of `slope + bias` to `activated`, and its derivative to `slope`.
extern "C" __global__ void bias_gelu(float *activated, float *slope, const float *bias, u32 rows, u32 hidden)
{
    // The exponent is (twice + twice_cube x^2) x, as on the host.
    const float twice = 1.5957691216057308f;
    const float twice_cube = 0.07135481627260025f;
    const float twice_cube_slope = 0.21406444881780076f;
    for (u32 row = first_row(); row < rows; row += row_step()) {
        u64 start = (u64)row * hidden;
        for (u32 column = lane(); column < hidden; column += WARP) {
            float x = bias[column] + slope[start + column];
            float square = x * x;
            float weight = 1.0f / (1.0f + exp_limited(-(x * (twice + twice_cube * square))));
            float y = x * weight;
            activated[start + column] = y;
            slope[start + column] = weight + y * (1.0f - weight) * (twice + twice_cube_slope * square);
        }
    }
}

// Computes `x *= by`.
extern "C" __global__ void multiply(float *x, const float *by, u64 elements)
{
    for (u64 at = first_element(); at < elements; at += element_step())
        x[at] *= by[at];
}
