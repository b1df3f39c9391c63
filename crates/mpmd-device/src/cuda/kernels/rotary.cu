// Rotary position embeddings: rotate pairs of elements by angles that depend on the position.

// Pairs are (i, i + half), or (2i, 2i + 1) if `beside`. Token `t` of a sequence has the angles in
// row `sequence * angles + t` of `cos` and `sin`, or in row `positions[token]`.
extern "C" __global__ void rotate(
    u64 tokens, u64 time, u64 heads, u64 half, u32 beside, float direction, const T *x, u64 x_sequence, u64 x_token,
    u64 x_head, T *y, u64 y_sequence, u64 y_token, u64 y_head, const float *cos, const float *sin, u64 angles,
    const u32 *positions
) {
    for (u64 i = FIRST; i < tokens * heads * half; i += STEP) {
        u64 pair = i % half, head = i / half % heads, token = i / half / heads, s = token / time, t = token % time;
        u64 first = beside ? 2 * pair : pair, second = beside ? first + 1 : first + half;
        u64 angle = (positions ? positions[token] : s * angles + t) * half + pair;
        const T *from = x + s * x_sequence + t * x_token + head * x_head;
        T *to = y + s * y_sequence + t * y_token + head * y_head;
        float a = load(from + first), b = load(from + second), c = cos[angle], d = direction * sin[angle];
        store(to + first, a * c - b * d);
        store(to + second, a * d + b * c);
    }
}
