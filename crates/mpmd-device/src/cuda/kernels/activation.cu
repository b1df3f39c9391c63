// Activation functions of one number: 0 is GELU by the hyperbolic tangent, 1 GELU by the error
// function, 2 SiLU. The formulas are those of the host.

// Functions and slopes beyond this number are those of infinity.
#define BOUND 1e4f

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The factor of `x` in GELU, (1 + tanh u) / 2 = 1 / (1 + e^-2u), and the derivative of 2u. Here u
// is sqrt(2 / pi) (x + 0.044715 x^3).
DEVICE float gelu_weight(float x, float *slope) {
    const float twice = 1.5957691216f, cube = twice * 0.044715f;
    float square = x * x;
    *slope = twice + 3.0f * cube * square;
    return sigmoid(x * (twice + cube * square));
}

// The distribution function of the normal distribution, and its density. Formula 7.1.26 of
// Abramowitz and Stegun, "Handbook of Mathematical Functions": the error is below 1e-7.
DEVICE float normal(float x, float *density) {
    float power = expf(-0.5f * x * x), t = 1.0f / (1.0f + 0.3275911f * 0.70710678f * fabsf(x));
    float series = 1.0614054f;
    series = series * t - 1.453152f;
    series = series * t + 1.4214137f;
    series = series * t - 0.28449674f;
    series = series * t + 0.2548296f;
    float tail = 0.5f * series * t * power;
    *density = power * 0.39894228f;
    return x > 0.0f ? 1.0f - tail : tail;
}

DEVICE float curve(u32 which, float x) {
    float unused, from = fmaxf(x, -BOUND);
    if (which == 0) return from * gelu_weight(x, &unused);
    return from * (which == 1 ? normal(x, &unused) : sigmoid(x));
}

DEVICE float slope(u32 which, float x) {
    float more;
    x = x > BOUND ? BOUND : x < -BOUND ? -BOUND : x;
    if (which == 1) {
        float share = normal(x, &more);
        return share + x * more;
    }
    float share = which == 0 ? gelu_weight(x, &more) : sigmoid(x);
    return share + x * share * (1.0f - share) * (which == 0 ? more : 1.0f);
}

extern "C" __global__ void activate(u64 rows, u64 width, u32 which, const T *x, const T *bias, T *y) {
    bool vector = width % 4 == 0 && is_aligned(x) && is_aligned(bias) && is_aligned(y);
    EACH_FOUR_OF_ROWS(rows, width) {
        u64 at = row * width + column;
        float4 from = load_some(x + at, left, vector);
        if (bias) from = from + load_some(bias + column, left, vector);
        store_some(y + at, each(from, [=](float x) { return curve(which, x); }), left, vector);
    }
}

extern "C" __global__ void activate_backward(
    u64 rows, u64 width, u32 which, const T *x, const T *bias, const T *d_y, T *d_x, u32 adds
) {
    bool vector = width % 4 == 0 && is_aligned(x) && is_aligned(bias) && is_aligned(d_y) && is_aligned(d_x);
    EACH_FOUR_OF_ROWS(rows, width) {
        u64 at = row * width + column;
        float4 from = load_some(x + at, left, vector), d = load_some(d_y + at, left, vector);
        if (bias) from = from + load_some(bias + column, left, vector);
        d = each(from, d, [=](float x, float d) { return d * slope(which, x); });
        store_some(d_x + at, adds ? d + load_some(d_x + at, left, vector) : d, left, vector);
    }
}

// curve(a) b, where rows of `a` and of `b` begin `stride` apart.
extern "C" __global__ void gate(u64 rows, u64 width, u64 stride, u32 which, const T *a, const T *b, T *y) {
    bool vector = width % 4 == 0 && stride % 4 == 0 && is_aligned(a) && is_aligned(b) && is_aligned(y);
    EACH_FOUR_OF_ROWS(rows, width) {
        u64 at = row * stride + column;
        float4 from = load_some(a + at, left, vector), other = load_some(b + at, left, vector);
        float4 out = each(from, other, [=](float x, float y) { return curve(which, x) * y; });
        store_some(y + row * width + column, out, left, vector);
    }
}

extern "C" __global__ void gate_backward(
    u64 rows, u64 width, u64 stride, u32 which, const T *a, const T *b, const T *d_y, T *d_a, T *d_b
) {
    bool vector = width % 4 == 0 && stride % 4 == 0 && is_aligned(a) && is_aligned(b) && is_aligned(d_y) &&
                  is_aligned(d_a) && is_aligned(d_b);
    EACH_FOUR_OF_ROWS(rows, width) {
        u64 at = row * stride + column;
        float4 from = load_some(a + at, left, vector), other = load_some(b + at, left, vector);
        float4 d = load_some(d_y + row * width + column, left, vector);
        float4 through = each(d, other, [](float x, float y) { return x * y; });
        store_some(d_a + at, each(from, through, [=](float x, float d) { return d * slope(which, x); }), left, vector);
        store_some(d_b + at, each(from, d, [=](float x, float d) { return d * curve(which, x); }), left, vector);
    }
}
