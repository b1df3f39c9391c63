// Optimisers: sums of squares, the figures of a step, and updates of parameters. All have the same
// bits as on the host: no contraction, IEEE square roots and divisions, one fixed order of sums.

// Lanes of a block, and the elements that it adds up: `square_sum` in mpmd-train has the same order.
#define LANES 256
#define BLOCK 4096

static __device__ inline double widen(float x) { return x; }
static __device__ inline double widen(double x) { return x; }

// Each block writes the sum of its elements: lane by lane, then by a binary tree over the lanes.
#define BLOCK_SUMS(NAME, TYPE, TERM)                                                                   \
    extern "C" __global__ void __launch_bounds__(LANES) NAME(u64 n, const TYPE *x, double *sums) {     \
        __shared__ double lanes[LANES];                                                                \
        u64 first = blockIdx.x * (u64)BLOCK;                                                           \
        u64 end = first + BLOCK < n ? first + BLOCK : n;                                               \
        double sum = 0.0;                                                                              \
        for (u64 i = first + threadIdx.x; i < end; i += LANES) {                                       \
            TYPE value = x[i];                                                                         \
            sum += TERM;                                                                               \
        }                                                                                              \
        lanes[threadIdx.x] = sum;                                                                      \
        for (u32 half = LANES / 2; half > 0; half /= 2) {                                              \
            __syncthreads();                                                                           \
            if (threadIdx.x < half) lanes[threadIdx.x] += lanes[threadIdx.x + half];                   \
        }                                                                                              \
        if (threadIdx.x == 0) sums[blockIdx.x] = lanes[0];                                             \
    }

static __device__ inline double squared(double x) { return x * x; }

BLOCK_SUMS(square_sums_f32, float, squared(widen(value)))
BLOCK_SUMS(square_sums_f64, double, squared(value))
BLOCK_SUMS(square_sums_bf16, u16, squared(widen(from_bf16(value))))
BLOCK_SUMS(square_sums_f16, u16, squared(widen(from_f16(value))))
BLOCK_SUMS(sums_f64, double, value)

// Copies a scalar of a loss to `to[at]`, as a double.
extern "C" __global__ void figure_f32(const float *from, double *to, u64 at) { to[at] = from[0]; }
extern "C" __global__ void figure_f64(const double *from, double *to, u64 at) { to[at] = from[0]; }

// Adds the sums of a stage's squares to the total `state[0]`, and notes a stage whose sums are not
// finite in `state[1]`. The first call sets both.
extern "C" __global__ void figure_sums(u64 n, const double *sums, double stage, int first, double *state) {
    double total = first ? 0.0 : state[0];
    bool finite = true;
    for (u64 i = 0; i < n; i++) {
        total = total + sums[i];
        finite = finite && sums[i] - sums[i] == 0.0;
    }
    state[0] = total;
    state[1] = finite ? (first ? -1.0 : state[1]) : stage;
}

// The factor of the gradients and the figures of a step, `[4 + metrics]`. `loss` has the sum, the
// weight and the metrics.
extern "C" __global__ void figures(
    const double *state, const double *loss, double limit, u64 metrics, u64 room, double *factor, double *figures
) {
    double weight = loss[1], items = weight == 0.0 ? 1.0 : weight;
    double norm = sqrt(state[0]), most = limit * items;
    double scale = norm <= most ? 1.0 : most / norm;
    factor[0] = norm - norm == 0.0 ? scale / items : __longlong_as_double(0x7ff8000000000000ll);
    figures[0] = loss[0] / items;
    figures[1] = weight;
    figures[2] = norm / items;
    figures[3] = state[1];
    for (u64 i = 0; i < room; i++) figures[4 + i] = i < metrics ? loss[2 + i] / items : 0.0;
}

static __device__ inline float root_of(float x) { return sqrtf(x); }
static __device__ inline double root_of(double x) { return sqrt(x); }

// A factor that is no number leaves everything as it is.
#define UPDATES(SUFFIX, TYPE)                                                                          \
    extern "C" __global__ void adamw_##SUFFIX(                                                         \
        u64 n, TYPE *w, TYPE *mean, TYPE *square, const TYPE *gradients, const double *factors,        \
        TYPE rate, TYPE root, TYPE keep, TYPE beta1, TYPE fresh1, TYPE beta2, TYPE fresh2, TYPE epsilon \
    ) {                                                                                                \
        if (factors[0] != factors[0]) return;                                                          \
        TYPE factor = (TYPE)factors[0];                                                                \
        for (u64 i = FIRST; i < n; i += STEP) {                                                        \
            TYPE gradient = factor * gradients[i];                                                     \
            TYPE m = beta1 * mean[i] + fresh1 * gradient;                                              \
            TYPE v = beta2 * square[i] + fresh2 * (gradient * gradient);                               \
            mean[i] = m;                                                                               \
            square[i] = v;                                                                             \
            w[i] = keep * w[i] - rate * m / (root_of(v) * root + epsilon);                             \
        }                                                                                              \
    }                                                                                                  \
    extern "C" __global__ void sgd_##SUFFIX(                                                           \
        u64 n, TYPE *w, const TYPE *gradients, const double *factors, TYPE rate, TYPE decay            \
    ) {                                                                                                \
        if (factors[0] != factors[0]) return;                                                          \
        TYPE factor = (TYPE)factors[0];                                                                \
        for (u64 i = FIRST; i < n; i += STEP)                                                          \
            w[i] = w[i] - rate * (factor * gradients[i] + decay * w[i]);                               \
    }                                                                                                  \
    extern "C" __global__ void sgd_momentum_##SUFFIX(                                                  \
        u64 n, TYPE *w, TYPE *sums, const TYPE *gradients, const double *factors,                      \
        TYPE rate, TYPE decay, TYPE momentum, int nesterov                                             \
    ) {                                                                                                \
        if (factors[0] != factors[0]) return;                                                          \
        TYPE factor = (TYPE)factors[0];                                                                \
        for (u64 i = FIRST; i < n; i += STEP) {                                                        \
            TYPE gradient = factor * gradients[i] + decay * w[i];                                      \
            TYPE sum = momentum * sums[i] + gradient;                                                  \
            sums[i] = sum;                                                                             \
            w[i] = w[i] - rate * (nesterov ? gradient + momentum * sum : sum);                         \
        }                                                                                              \
    }

UPDATES(f32, float)
UPDATES(f64, double)
