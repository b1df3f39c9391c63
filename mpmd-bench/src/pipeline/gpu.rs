//! The network's arithmetic on a CUDA device. It computes the same as [`mlp`](super::mlp), by
//! cuBLAS products and a few small kernels.

use mpmd_core::Result;
use mpmd_core::cuda::{CUBLAS, Cuda, Gemm, Grid, Source};
use mpmd_core::kernel::{View, ViewMut};

use super::mlp::Shape;
use super::stage::Layer;

/// Returns the sources that all kernels of the network need.
pub(super) fn sources() -> Vec<&'static Source> {
    vec![&FUNCTIONS, &CUBLAS]
}

/// Number of threads of the single block that sums a loss.
const LOSS_THREADS: u32 = 1024;

/// The source of kernels over `n` elements of matrices with `dim` columns. A thread handles several
/// elements if the grid has fewer threads.
static FUNCTIONS: Source = Source::cuda(
    "mlp.cu",
    r#"
#define EACH(i, n) \
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; \
    i < (n); i += gridDim.x * (unsigned long long)blockDim.x

/* y = relu(y + b), b for each row. */
extern "C" __global__ void bias_relu(
    unsigned long long n, unsigned long long dim, const float *b, float *y
) {
    for (EACH(i, n)) {
        float z = y[i] + b[i % dim];
        y[i] = z > 0.0f ? z : 0.0f;
    }
}

/* The gradient before a relu in its output's place. */
extern "C" __global__ void through_relu(unsigned long long n, const float *dy, float *output) {
    for (EACH(i, n)) output[i] = output[i] > 0.0f ? dy[i] : 0.0f;
}

/* The same in the place of the gradient after it. */
extern "C" __global__ void mask(unsigned long long n, const float *output, float *d) {
    for (EACH(i, n)) d[i] = output[i] > 0.0f ? d[i] : 0.0f;
}

/* The output's gradient before relu in the output's place, and the sum over rows of the mean
   square error. */
extern "C" __global__ void loss(
    unsigned long long n, float scale, const float *labels, float *output, float *sum,
    float rows, float *weight
) {
    __shared__ double parts[1024];
    double part = 0.0;
    for (unsigned long long i = threadIdx.x; i < n; i += blockDim.x) {
        float error = output[i] - labels[i];
        part += (double)error * (double)error;
        output[i] = output[i] > 0.0f ? 2.0f * scale * error : 0.0f;
    }
    parts[threadIdx.x] = part;
    __syncthreads();
    for (unsigned int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        sum[0] = (float)(parts[0] * (double)scale);
        weight[0] = rows;
    }
}

extern "C" __global__ void scale(unsigned long long n, const float *by, float *d) {
    for (EACH(i, n)) d[i] *= by[0];
}

/* The sums over rows are added to db. */
extern "C" __global__ void add_rows(
    unsigned long long rows, unsigned long long dim, const float *d, float *db
) {
    for (EACH(column, dim)) {
        float sum = 0.0f;
        for (unsigned long long row = 0; row < rows; row++) sum += d[row * dim + column];
        db[column] += sum;
    }
}

extern "C" __global__ void descend(
    unsigned long long n, float rate, const float *gradient, float *w
) {
    for (EACH(i, n)) w[i] -= rate * gradient[i];
}
"#,
);

/// Queues the layers of a stage on the device. Writes the input of layer `l` to `inputs[l]`, and
/// the last result to `output`, as [`mlp::forward`](super::mlp::forward) does.
pub(super) fn forward(
    cuda: Cuda<'_>,
    shape: &Shape,
    layers: &[Layer<View<'_>>],
    x: &View<'_>,
    inputs: &mut [ViewMut<'_>],
    output: &mut ViewMut<'_>,
) -> Result<()> {
    cuda.copy(x, &mut inputs[0])?;
    for (at, layer) in layers.iter().enumerate() {
        let (known, next) = inputs.split_at_mut(at + 1);
        match next.first_mut() {
            Some(y) => through(cuda, shape, layer, &known[at], y)?,
            None => through(cuda, shape, layer, &known[at], output)?,
        }
    }
    Ok(())
}

/// Queues one layer on the device: `y = relu(x w + b)`.
fn through(
    cuda: Cuda<'_>,
    shape: &Shape,
    layer: &Layer<View<'_>>,
    x: &ViewMut<'_>,
    y: &mut ViewMut<'_>,
) -> Result<()> {
    let (Shape { dim, rows, .. }, n) = (*shape, shape.activations());
    cuda.gemm(Gemm::new(rows, dim, dim), x, &layer.w, &mut *y)?;
    let args = [n.into(), dim.into(), (&layer.b).into(), y.into()];
    cuda.launch(&FUNCTIONS, "bias_relu", Grid::over(n), &args)
}

/// Queues the loss on the device. Sets `sum` to it, `weight` to the number of rows, and `output` to
/// the gradient, as [`mlp::loss`](super::mlp::loss) does.
pub(super) fn loss(
    cuda: Cuda<'_>,
    shape: &Shape,
    output: &mut ViewMut<'_>,
    labels: &View<'_>,
    sum: &mut ViewMut<'_>,
    weight: &mut ViewMut<'_>,
) -> Result<()> {
    let (scale, rows) = (1.0 / shape.dim as f32, shape.rows as f32);
    let n = shape.activations().into();
    let args =
        [n, scale.into(), labels.into(), output.into(), sum.into(), rows.into(), weight.into()];
    cuda.launch(&FUNCTIONS, "loss", Grid::new(1, LOSS_THREADS), &args)
}

/// Queues a kernel that replaces `output` by the gradient before `relu`, as
/// [`mlp::through_relu`](super::mlp::through_relu) does.
pub(super) fn through_relu(
    cuda: Cuda<'_>,
    shape: &Shape,
    output: &mut ViewMut<'_>,
    dy: &View<'_>,
) -> Result<()> {
    let n = shape.activations();
    cuda.launch(&FUNCTIONS, "through_relu", Grid::over(n), &[n.into(), dy.into(), output.into()])
}

/// Queues a kernel that multiplies the gradient of the last output by the scalar `by`, the gradient
/// of the loss.
pub(super) fn scale(
    cuda: Cuda<'_>,
    shape: &Shape,
    by: &View<'_>,
    gradient: &mut ViewMut<'_>,
) -> Result<()> {
    let n = shape.activations();
    cuda.launch(&FUNCTIONS, "scale", Grid::over(n), &[n.into(), by.into(), gradient.into()])
}

/// Queues kernels that compute the earlier layers' gradients, and `dx` if given, as
/// [`mlp::backward_input`](super::mlp::backward_input) does.
pub(super) fn backward_input(
    cuda: Cuda<'_>,
    shape: &Shape,
    layers: &[Layer<View<'_>>],
    inputs: &[ViewMut<'_>],
    gradients: &mut [ViewMut<'_>],
    dx: Option<&mut ViewMut<'_>>,
) -> Result<()> {
    let (Shape { dim, rows, .. }, n) = (*shape, shape.activations());
    let by_weights = Gemm::new(rows, dim, dim).transpose_b();
    for at in (1..layers.len()).rev() {
        let (before, after) = gradients.split_at_mut(at);
        let d = &mut before[at - 1];
        cuda.gemm(by_weights, &after[0], &layers[at].w, &mut *d)?;
        cuda.launch(
            &FUNCTIONS,
            "mask",
            Grid::over(n),
            &[n.into(), (&inputs[at]).into(), d.into()],
        )?;
    }
    match dx {
        Some(dx) => cuda.gemm(by_weights, &gradients[0], &layers[0].w, dx),
        None => Ok(()),
    }
}

/// Queues kernels that add one layer's weight gradients to `into`, as
/// [`mlp::backward_weight`](super::mlp::backward_weight) does.
pub(super) fn backward_weight(
    cuda: Cuda<'_>,
    shape: &Shape,
    input: &View<'_>,
    gradient: &View<'_>,
    into: &mut Layer<ViewMut<'_>>,
) -> Result<()> {
    let Shape { dim, rows, .. } = *shape;
    cuda.gemm(Gemm::new(dim, dim, rows).transpose_a().beta(1.0), input, gradient, &mut into.w)?;
    let args = [rows.into(), dim.into(), gradient.into(), (&mut into.b).into()];
    cuda.launch(&FUNCTIONS, "add_rows", Grid::over(dim), &args)
}

/// Queues a kernel that subtracts `rate * gradient` from `weights`, in place.
pub(super) fn update(
    cuda: Cuda<'_>,
    weights: &mut ViewMut<'_>,
    gradient: &View<'_>,
    rate: f32,
) -> Result<()> {
    let n = gradient.region().elements();
    cuda.launch(
        &FUNCTIONS,
        "descend",
        Grid::over(n),
        &[n.into(), rate.into(), gradient.into(), weights.into()],
    )
}
