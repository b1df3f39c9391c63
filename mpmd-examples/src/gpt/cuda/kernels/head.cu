// Cross-entropy of the next byte, in nats: probabilities, losses and gradients from logits.

#define BYTES 256u
#define EACH (BYTES / WARP)

// Turns logits into probabilities, in place. Writes the cross-entropy of each row's target to
// `losses`.
extern "C" __global__ void cross_entropy(float *probabilities, double *losses, const u8 *targets, u32 rows)
{
    for (u32 number = first_row(); number < rows; number += row_step()) {
        float *row = probabilities + (u64)number * BYTES;
        float logits[EACH];
        float largest = row[lane()];
        float aimed = 0.0f;
        for (u32 i = 0; i < EACH; i++) {
            logits[i] = row[lane() + i * WARP];
            largest = logits[i] > largest ? logits[i] : largest;
            if (lane() + i * WARP == targets[number])
                aimed = logits[i];
        }
        largest = warp_max(largest);
        // One lane holds the target's logit, and the others zero.
        float logit = warp_sum(aimed) - largest;
        float sum = 0.0f;
        for (u32 i = 0; i < EACH; i++) {
            logits[i] = exp_limited(logits[i] - largest);
            sum += logits[i];
        }
        float total = warp_sum(sum);
        float share = 1.0f / total;
        for (u32 i = 0; i < EACH; i++)
            row[lane() + i * WARP] = logits[i] * share;
        if (lane() == 0)
            losses[number] = (double)(logf(total) - logit);
    }
}

// Computes the gradient of the sum of the losses times `factor` with respect to the logits.
extern "C" __global__ void cross_entropy_gradient(float *d_logits, const float *probabilities, const u8 *targets,
                                                  const double *factor, u32 rows)
{
    float by = (float)*factor;
    for (u32 number = first_row(); number < rows; number += row_step()) {
        u64 start = (u64)number * BYTES;
        for (u32 i = 0; i < EACH; i++) {
            u32 column = lane() + i * WARP;
            float d = by * probabilities[start + column];
            d_logits[start + column] = column == targets[number] ? d - by : d;
        }
    }
}
