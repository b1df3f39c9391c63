// Causal self-attention, except its matrix products.

// Returns the start of a head of one position in an array [batch, time, groups, heads, head_dim].
// `number` is its index in [groups, batch, heads, time]. Groups are queries, keys and values.
__device__ __forceinline__ u64 place_in_rows(u32 number, u32 groups, u32 batch, u32 heads, u32 time, u32 head_dim)
{
    u32 place = number % time, rest = number / time;
    u32 head = rest % heads;
    rest /= heads;
    u32 sequence = rest % batch, group = rest / batch;
    u64 row = (u64)sequence * time + place;
    return ((row * groups + group) * heads + head) * head_dim;
}

// Copies rows to a layout by head. Adds `bias` to each row if `with_bias` is set.
extern "C" __global__ void split_heads(float *by_head, const float *rows, const float *bias, u32 with_bias, u32 groups,
                                       u32 batch, u32 heads, u32 time, u32 head_dim)
{
    u32 count = groups * batch * heads * time;
    for (u32 number = first_row(); number < count; number += row_step()) {
        u64 from = place_in_rows(number, groups, batch, heads, time, head_dim);
        u64 to = (u64)number * head_dim;
        u32 group = number / (batch * heads * time), head = number / time % heads;
        u32 bias_at = (group * heads + head) * head_dim;
        for (u32 column = lane(); column < head_dim; column += WARP) {
            float value = rows[from + column];
            by_head[to + column] = with_bias ? bias[bias_at + column] + value : value;
        }
    }
}

// Copies from the layout by head back to rows.
extern "C" __global__ void merge_heads(float *rows, const float *by_head, u32 groups, u32 batch, u32 heads, u32 time,
                                       u32 head_dim)
{
    u32 count = groups * batch * heads * time;
    for (u32 number = first_row(); number < count; number += row_step()) {
        u64 to = place_in_rows(number, groups, batch, heads, time, head_dim);
        u64 from = (u64)number * head_dim;
        for (u32 column = lane(); column < head_dim; column += WARP)
            rows[to + column] = by_head[from + column];
    }
}

// Turns scores into probabilities, in place. Row i of each `time` rows becomes the softmax of its
// first i + 1 elements times `scale`, followed by zeros.
extern "C" __global__ void causal_softmax(float *scores, u32 rows, u32 time, float scale)
{
    for (u32 number = first_row(); number < rows; number += row_step()) {
        float *row = scores + (u64)number * time;
        u32 seen = number % time + 1;
        // Every lane can start with the first element, which is never masked.
        float largest = row[0];
        for (u32 column = lane(); column < seen; column += WARP)
            largest = row[column] > largest ? row[column] : largest;
        largest = warp_max(largest);
        // No lane may overwrite an element before every lane has read it.
        __syncwarp(ALL_LANES);
        float sum = 0.0f;
        for (u32 column = lane(); column < seen; column += WARP) {
            float weight = exp_limited(scale * (row[column] - largest));
            row[column] = weight;
            sum += weight;
        }
        float share = 1.0f / warp_sum(sum);
        for (u32 column = lane(); column < time; column += WARP)
            row[column] = column < seen ? row[column] * share : 0.0f;
    }
}

// Turns the gradient of the probabilities into that of the scores, in place.
extern "C" __global__ void causal_softmax_backward(float *d_scores, const float *probabilities, u32 rows, u32 time,
                                                   float scale)
{
    for (u32 number = first_row(); number < rows; number += row_step()) {
        float *d_row = d_scores + (u64)number * time;
        const float *row = probabilities + (u64)number * time;
        u32 seen = number % time + 1;
        float dot = 0.0f;
        for (u32 column = lane(); column < seen; column += WARP)
            dot += d_row[column] * row[column];
        float mean = warp_sum(dot);
        for (u32 column = lane(); column < time; column += WARP)
            d_row[column] = column < seen ? scale * row[column] * (d_row[column] - mean) : 0.0f;
    }
}
