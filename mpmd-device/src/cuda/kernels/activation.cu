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

extern "C" __global__ void activate(u64 n, u64 width, u32 which, const T *x, const T *bias, T *y) {
    bool vector = width % 4 == 0 && is_aligned(x) && is_aligned(bias) && is_aligned(y);
    for (u64 i = 4 * FIRST; i < n; i += 4 * STEP) {
        if (vector) {
            float4 from = load4(x + i);
            if (bias) from = from + load4(bias + i % width);
            store4(y + i, make_float4(curve(which, from.x), curve(which, from.y), curve(which, from.z), curve(which, from.w)));
            continue;
        }
        for (u64 j = i; j < min(n, i + 4); j++) {
            store(y + j, curve(which, load(x + j) + (bias ? load(bias + j % width) : 0.0f)));
        }
    }
}

extern "C" __global__ void activate_backward(
    u64 n, u64 width, u32 which, const T *x, const T *bias, const T *d_y, T *d_x, u32 adds
) {
    bool vector = width % 4 == 0 && is_aligned(x) && is_aligned(bias) && is_aligned(d_y) && is_aligned(d_x);
    for (u64 i = 4 * FIRST; i < n; i += 4 * STEP) {
        if (vector) {
            float4 from = load4(x + i), d = load4(d_y + i);
            if (bias) from = from + load4(bias + i % width);
            d = make_float4(
                d.x * slope(which, from.x), d.y * slope(which, from.y), d.z * slope(which, from.z), d.w * slope(which, from.w)
            );
            store4(d_x + i, adds ? d + load4(d_x + i) : d);
            continue;
        }
        for (u64 j = i; j < min(n, i + 4); j++) {
            float from = load(x + j) + (bias ? load(bias + j % width) : 0.0f);
            put(d_x + j, load(d_y + j) * slope(which, from), adds);
        }
    }
}

// curve(a) b, where rows of `a` and of `b` begin `stride` apart.
extern "C" __global__ void gate(u64 n, u64 width, u64 stride, u32 which, const T *a, const T *b, T *y) {
    for (u64 i = FIRST; i < n; i += STEP) {
        u64 at = i / width * stride + i % width;
        store(y + i, curve(which, load(a + at)) * load(b + at));
    }
}

extern "C" __global__ void gate_backward(
    u64 n, u64 width, u64 stride, u32 which, const T *a, const T *b, const T *d_y, T *d_a, T *d_b
) {
    for (u64 i = FIRST; i < n; i += STEP) {
        u64 at = i / width * stride + i % width;
        float x = load(a + at), other = load(b + at), d = load(d_y + i);
        store(d_a + at, d * other * slope(which, x));
        store(d_b + at, d * curve(which, x));
    }
}
