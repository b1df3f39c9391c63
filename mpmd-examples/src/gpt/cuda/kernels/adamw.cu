// The optimiser.

// Updates a leaf in one pass. Gradients are multiplied by `factor` first.
extern "C" __global__ void adamw(float *w, float *mean, float *square, const float *gradient, const double *factor,
                                 u64 elements, float beta1, float beta2, float fresh1, float fresh2, float rate,
                                 float root, float keep, float epsilon)
{
    float by = (float)*factor;
    for (u64 at = first_element(); at < elements; at += element_step()) {
        float g = by * gradient[at];
        float m = beta1 * mean[at] + fresh1 * g;
        float s = beta2 * square[at] + fresh2 * (g * g);
        mean[at] = m;
        square[at] = s;
        w[at] = keep * w[at] - rate * m / (sqrtf(s) * root + epsilon);
    }
}

// Adds up `total` and `sums` in order, with one thread. The bits therefore do not depend on the
// division of leaves into stages.
extern "C" __global__ void add_in_order(double *total, const double *sums, u32 count, u32 from_zero)
{
    double sum = from_zero ? 0.0 : *total;
    for (u32 at = 0; at < count; at++)
        sum += sums[at];
    *total = sum;
}

// Computes the factor that limits the norm of the mean gradient to `limit`, the mean loss, and that
// norm. The inputs are the sum of the squares of all gradients, and the sum and the weight of the
// loss.
extern "C" __global__ void clip(double *factor, double *loss, double *norm, const double *squares,
                                const double *loss_sum, const double *weight, double limit)
{
    double length = sqrt(*squares), most = limit * *weight;
    *factor = (length <= most ? 1.0 : most / length) / *weight;
    *loss = *loss_sum / *weight;
    *norm = length / *weight;
}
