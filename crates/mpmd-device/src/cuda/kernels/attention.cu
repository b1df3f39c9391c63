// Attention in tiles of N queries and N keys, for vectors of up to D elements, both defined before
// this text. BLOCKS blocks share a multiprocessor.
//
// A block of 256 threads has a tile of queries, or for gradients of keys and values a tile of keys,
// and walks over the other side. Tiles are in shared memory, in f32. Thread (x, y) of 16 x 16 has
// the scores in rows y + 16 i and columns x + 16 j, and of results the rows y + 16 i and the
// columns 64 c + 4 x and the next three. No sum has more than one block, so none needs atomics.
//
// Normalizers are (largest score, 1 / sum of the exponentials) of each query.

// Vectors of heads: distances between sequences, tokens and heads.
struct Heads {
    T *at;
    u64 sequence, token, head;
    __device__ T *of(u32 s, u32 t, u32 h) const { return at + s * sequence + t * token + h * head; }
};

struct Sizes {
    u32 heads, groups, queries, keys;
    float scale;
    u32 capped;
    float cap;
    u32 causal;
    const u32 *first_keys;
    u64 first_sequence;
    const float *mask;
    u64 mask_sequence, mask_head, mask_query;
};

// A sequence and a head of queries, with the sizes of all.
struct Place : Sizes {
    u32 sequence, at_head;
    __device__ Place(const Sizes &sizes, u32 sequence, u32 head) : Sizes(sizes), sequence(sequence), at_head(head) {}

    __device__ u32 group() const { return at_head / (heads / groups); }
    __device__ u64 row(u32 query) const { return ((u64)sequence * heads + at_head) * queries + query; }
    __device__ u32 first_key(u32 query) const { return first_keys ? first_keys[sequence * first_sequence + query] : 0; }
    // The end of the keys that a query sees.
    __device__ u32 end(u32 query) const { return causal ? keys - queries + query + 1 : keys; }
    __device__ bool sees(u32 query, u32 key) const {
        return query < queries && key < end(query) && key >= first_key(query);
    }
    // The first key that one of N queries sees. All threads of a warp call it.
    __device__ u32 first_of(u32 query) const {
        if (!first_keys) return 0;
        u32 least = ALL;
        for (u32 i = threadIdx.x % 32; i < N && query + i < queries; i += 32) least = min(least, first_key(query + i));
        for (int step = 16; step > 0; step /= 2) least = min(least, __shfl_xor_sync(ALL, least, step));
        return least;
    }
    // The score of a product of query and key, and its slope.
    __device__ float score(float product, u32 query, u32 key, float *slope) const {
        float x = product * scale;
        *slope = scale;
        if (capped) {
            float share = tanhf(x / cap);
            x = cap * share;
            *slope = scale * (1.0f - share * share);
        }
        return mask ? x + mask[sequence * mask_sequence + at_head * mask_head + query * mask_query + key] : x;
    }
};

#define HEADS(x) T *x, u64 x##sequence, u64 x##token, u64 x##head
#define THESE(x) Heads{x, x##sequence, x##token, x##head}
#define SIZES                                                                                                          \
    u32 heads, u32 groups, u32 queries, u32 keys, u32 dim, float scale, u32 capped, float cap, u32 causal,             \
        const u32 *first_keys, u64 first_sequence, const float *mask, u64 mask_sequence, u64 mask_head, u64 mask_query
#define THE_SIZES                                                                                                      \
    Sizes{heads,      groups,         queries, keys,          scale,     capped,    cap, causal,                       \
          first_keys, first_sequence, mask,    mask_sequence, mask_head, mask_query}

#define X (threadIdx.x % 16)
#define Y (threadIdx.x / 16)
#define EACH(i, n) for (int i = 0; i < (n); i++)

// Loads the tile of N vectors that begins at `from`, `token` elements apart. `count` of them exist;
// others, and elements from `dim` on, become zeros.
DEVICE void load_tile(float *tile, const T *from, u64 token, u32 count, u32 dim) {
    bool vector = dim % 4 == 0 && token % 4 == 0 && is_aligned(from);
    for (u32 i = threadIdx.x; i < N * D / 4; i += 256) {
        u32 row = i / (D / 4), column = i % (D / 4) * 4;
        u32 left = row < count && column < dim ? dim - column : 0;
        *(float4 *)(tile + row * (D + 4) + column) = load_some(from + row * token + column, left, vector);
    }
}

#define R (N / 16)
#define C (D / 64)

// Sets `s` to the products of the rows of tiles `a` and `b`.
DEVICE void rows_by_rows(float (&s)[R][R], const float *a, const float *b) {
    EACH(i, R) EACH(j, R) s[i][j] = 0.0f;
    #pragma unroll 1
    for (int d = 0; d < D; d += 4) {
        float4 x[R], y[R];
        #pragma unroll
        EACH(i, R) x[i] = *(const float4 *)(a + (Y + 16 * i) * (D + 4) + d);
        #pragma unroll
        EACH(j, R) y[j] = *(const float4 *)(b + (X + 16 * j) * (D + 4) + d);
        #pragma unroll
        EACH(i, R)
            #pragma unroll
            EACH(j, R) s[i][j] += x[i].x * y[j].x + x[i].y * y[j].y + x[i].z * y[j].z + x[i].w * y[j].w;
    }
}

// Adds to `out` the product of the square tile `p` and tile `v`.
DEVICE void square_by_tile(float4 (&out)[R][C], const float *p, const float *v) {
    #pragma unroll 2
    for (int k = 0; k < N; k += 4) {
        float x[R][4];
        #pragma unroll
        EACH(i, R) {
            float4 row = *(const float4 *)(p + (Y + 16 * i) * (N + 4) + k);
            x[i][0] = row.x; x[i][1] = row.y; x[i][2] = row.z; x[i][3] = row.w;
        }
        #pragma unroll
        EACH(next, 4)
            #pragma unroll
            EACH(c, C) {
                float4 y = *(const float4 *)(v + (k + next) * (D + 4) + 64 * c + 4 * X);
                #pragma unroll
                EACH(i, R) {
                    out[i][c].x += x[i][next] * y.x;
                    out[i][c].y += x[i][next] * y.y;
                    out[i][c].z += x[i][next] * y.z;
                    out[i][c].w += x[i][next] * y.w;
                }
            }
    }
}

// Stores one element of each of a thread's rows and columns in a square tile.
DEVICE void store_square(float *tile, const float (&s)[R][R]) {
    #pragma unroll
    EACH(i, R)
        #pragma unroll
        EACH(j, R) tile[(Y + 16 * i) * (N + 4) + X + 16 * j] = s[i][j];
}

// Stores the rows of a result that exist.
DEVICE void store_tile(T *to, u64 token, u32 count, u32 dim, const float4 (&out)[R][C]) {
    bool vector = dim % 4 == 0 && token % 4 == 0 && is_aligned(to);
    #pragma unroll
    EACH(i, R)
        #pragma unroll
        EACH(c, C) {
            u32 row = Y + 16 * i, column = 64 * c + 4 * X;
            u32 left = row < count && column < dim ? dim - column : 0;
            store_some(to + row * token + column, out[i][c], left, vector);
        }
}

// Joins the numbers of the 16 threads of a row.
template <class Join> DEVICE float join_row(float x) {
    for (int step = 8; step > 0; step /= 2) x = Join::of(x, __shfl_xor_sync(ALL, x, step));
    return x;
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
attention(HEADS(q_), HEADS(k_), HEADS(v_), HEADS(out_), float *normalizers, SIZES) {
    const Heads q = THESE(q_), k = THESE(k_), v = THESE(v_), out = THESE(out_);
    const Sizes sizes = THE_SIZES;
    extern __shared__ __align__(16) float room[];
    float *of_queries = room, *others = of_queries + N * (D + 4), *square = others + N * (D + 4);
    // The tiles with the most keys come first.
    u32 tiles = (sizes.queries + N - 1) / N, first = (tiles - 1 - blockIdx.x % tiles) * N;
    Place at(sizes, blockIdx.x / tiles / heads, blockIdx.x / tiles % heads);
    u32 count = min((u32)N, at.queries - first), end = at.end(first + count - 1);
    load_tile(of_queries, q.of(at.sequence, first, at.at_head), q.token, count, dim);
    float4 sums[R][C] = {};
    float largest[R], total[R];
    EACH(i, R) {
        largest[i] = NOTHING;
        total[i] = 0.0f;
    }
    for (u32 key = at.first_of(first) / N * N; key < end; key += N) {
        u32 there = min((u32)N, at.keys - key);
        __syncthreads();
        load_tile(others, k.of(at.sequence, key, at.group()), k.token, there, dim);
        __syncthreads();
        float s[R][R], slope;
        rows_by_rows(s, of_queries, others);
        #pragma unroll
        EACH(i, R) {
            u32 query = first + Y + 16 * i;
            float most = largest[i], sum = 0.0f;
            #pragma unroll
            EACH(j, R) {
                u32 other = key + X + 16 * j;
                s[i][j] = at.sees(query, other) ? at.score(s[i][j], query, other, &slope) : NOTHING;
                most = fmaxf(most, s[i][j]);
            }
            most = join_row<Largest>(most);
            // As long as a query sees nothing, its sums stay zero.
            float base = most == NOTHING ? 0.0f : most, factor = expf(largest[i] - base);
            #pragma unroll
            EACH(j, R) {
                s[i][j] = expf(s[i][j] - base);
                sum += s[i][j];
            }
            largest[i] = most;
            total[i] = total[i] * factor + join_row<Sum>(sum);
            #pragma unroll
            EACH(c, C) sums[i][c] = sums[i][c] * factor;
        }
        store_square(square, s);
        __syncthreads();
        load_tile(others, v.of(at.sequence, key, at.group()), v.token, there, dim);
        __syncthreads();
        square_by_tile(sums, square, others);
    }
    #pragma unroll
    EACH(i, R) {
        float share = 1.0f / total[i];
        #pragma unroll
        EACH(c, C) sums[i][c] = sums[i][c] * share;
        u32 query = first + Y + 16 * i;
        if (X == 0 && query < at.queries) {
            normalizers[2 * at.row(query)] = largest[i];
            normalizers[2 * at.row(query) + 1] = share;
        }
    }
    store_tile(out.of(at.sequence, first, at.at_head), out.token, count, dim, sums);
}

// From products of queries and keys, `s`, and of gradients and values, `d`: the probability of a
// key, and the gradient of the product.
DEVICE void gradient(
    const Place &at, u32 query, u32 key, const float *normalizers, const float *means, float &s, float &d
) {
    if (!at.sees(query, key)) {
        s = d = 0.0f;
        return;
    }
    u64 row = at.row(query);
    float slope, score = at.score(s, query, key, &slope);
    s = normalizers[2 * row + 1] * expf(score - normalizers[2 * row]);
    d = slope * s * (d - means[row]);
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS) attention_queries(
    HEADS(q_), HEADS(k_), HEADS(v_), HEADS(d_out_), HEADS(d_q_), const float *normalizers, const float *means, SIZES
) {
    const Heads q = THESE(q_), k = THESE(k_), v = THESE(v_), d_out = THESE(d_out_), d_q = THESE(d_q_);
    const Sizes sizes = THE_SIZES;
    extern __shared__ __align__(16) float room[];
    const int size = N * (D + 4);
    float *of_queries = room, *gradients = room + size, *of_keys = room + 2 * size, *values = room + 3 * size;
    float *square = room + 4 * size;
    u32 tiles = (sizes.queries + N - 1) / N, first = (tiles - 1 - blockIdx.x % tiles) * N;
    Place at(sizes, blockIdx.x / tiles / heads, blockIdx.x / tiles % heads);
    u32 count = min((u32)N, at.queries - first), end = at.end(first + count - 1);
    load_tile(of_queries, q.of(at.sequence, first, at.at_head), q.token, count, dim);
    load_tile(gradients, d_out.of(at.sequence, first, at.at_head), d_out.token, count, dim);
    float4 sums[R][C] = {};
    for (u32 key = at.first_of(first) / N * N; key < end; key += N) {
        u32 there = min((u32)N, at.keys - key);
        __syncthreads();
        load_tile(of_keys, k.of(at.sequence, key, at.group()), k.token, there, dim);
        load_tile(values, v.of(at.sequence, key, at.group()), v.token, there, dim);
        __syncthreads();
        float s[R][R], d[R][R];
        rows_by_rows(s, of_queries, of_keys);
        rows_by_rows(d, gradients, values);
        #pragma unroll
        EACH(i, R)
            #pragma unroll
            EACH(j, R) gradient(at, first + Y + 16 * i, key + X + 16 * j, normalizers, means, s[i][j], d[i][j]);
        store_square(square, d);
        __syncthreads();
        square_by_tile(sums, square, of_keys);
    }
    store_tile(d_q.of(at.sequence, first, at.at_head), d_q.token, count, dim, sums);
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS) attention_keys(
    HEADS(q_), HEADS(k_), HEADS(v_), HEADS(d_out_), HEADS(d_k_), HEADS(d_v_), const float *normalizers,
    const float *means, SIZES
) {
    const Heads q = THESE(q_), k = THESE(k_), v = THESE(v_), d_out = THESE(d_out_), d_k = THESE(d_k_), d_v = THESE(d_v_);
    const Sizes sizes = THE_SIZES;
    extern __shared__ __align__(16) float room[];
    const int size = N * (D + 4);
    float *of_queries = room, *gradients = room + size, *of_keys = room + 2 * size, *values = room + 3 * size;
    float *square = room + 4 * size;
    u32 tiles = (sizes.keys + N - 1) / N, first = blockIdx.x % tiles * N, count = min((u32)N, sizes.keys - first);
    u32 sequence = blockIdx.x / tiles / groups, group = blockIdx.x / tiles % groups, shared = heads / groups;
    load_tile(of_keys, k.of(sequence, first, group), k.token, count, dim);
    load_tile(values, v.of(sequence, first, group), v.token, count, dim);
    float4 key_sums[R][C] = {}, value_sums[R][C] = {};
    // The first query that sees a key.
    u32 start = causal && first + queries > keys ? first + queries - keys : 0;
    for (u32 head = group * shared; head < (group + 1) * shared; head++) {
        Place at(sizes, sequence, head);
        for (u32 query = start / N * N; query < at.queries; query += N) {
            if (at.first_of(query) >= first + count) continue;
            u32 there = min((u32)N, at.queries - query);
            __syncthreads();
            load_tile(of_queries, q.of(sequence, query, head), q.token, there, dim);
            load_tile(gradients, d_out.of(sequence, query, head), d_out.token, there, dim);
            __syncthreads();
            float s[R][R], d[R][R];
            rows_by_rows(s, of_keys, of_queries);
            rows_by_rows(d, values, gradients);
            #pragma unroll
            EACH(i, R)
                #pragma unroll
                EACH(j, R) gradient(at, query + X + 16 * j, first + Y + 16 * i, normalizers, means, s[i][j], d[i][j]);
            store_square(square, s);
            __syncthreads();
            square_by_tile(value_sums, square, gradients);
            __syncthreads();
            store_square(square, d);
            __syncthreads();
            square_by_tile(key_sums, square, of_queries);
        }
    }
    store_tile(d_k.of(sequence, first, group), d_k.token, count, dim, key_sums);
    store_tile(d_v.of(sequence, first, group), d_v.token, count, dim, value_sums);
}

// The products of results and their gradients, for each query. A warp has one.
extern "C" __global__ void attention_means(HEADS(out_), HEADS(d_out_), u32 heads, u32 queries, u64 rows, u32 dim, float *means) {
    u64 row = FIRST / 32;
    u32 lane = threadIdx.x % 32;
    if (row >= rows) return;
    u32 sequence = row / queries / heads, head = row / queries % heads, query = row % queries;
    const T *x = THESE(out_).of(sequence, query, head), *d = THESE(d_out_).of(sequence, query, head);
    float sum = 0.0f;
    for (u32 i = lane; i < dim; i += 32) sum += load(x + i) * load(d + i);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
    if (lane == 0) means[row] = sum;
}
