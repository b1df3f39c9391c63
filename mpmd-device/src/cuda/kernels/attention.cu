// Attention in tiles of N queries and N keys, for vectors of up to D elements.
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
    __device__ T *of(u64 s, u64 t, u64 h) const { return at + s * sequence + t * token + h * head; }
};

struct Sizes {
    u64 heads, groups, queries, keys, dim;
    float scale, cap;
    u32 causal;
    const u32 *first;
    u64 first_sequence;
    const float *mask;
    u64 mask_sequence, mask_head, mask_query;
};

// A sequence and a head of queries, with the sizes of all.
struct Place : Sizes {
    u64 sequence, at_head;
    __device__ Place(const Sizes &sizes, u64 sequence, u64 head) : Sizes(sizes), sequence(sequence), at_head(head) {}

    __device__ u64 group() const { return at_head / (heads / groups); }
    __device__ u64 row(u64 query) const { return (sequence * heads + at_head) * queries + query; }
    __device__ u64 first_key(u64 query) const { return first ? first[sequence * first_sequence + query] : 0; }
    // The end of the keys that a query sees.
    __device__ u64 end(u64 query) const { return causal ? keys - queries + query + 1 : keys; }
    __device__ bool sees(u64 query, u64 key) const {
        return query < queries && key < end(query) && key >= first_key(query);
    }
    // The first key that one of N queries sees. All threads of a warp call it.
    template <int N> __device__ u64 first_of(u64 query) const {
        if (!first) return 0;
        u32 least = ALL, lane = threadIdx.x % 32;
        for (u64 i = lane; i < N && query + i < queries; i += 32) least = min(least, (u32)first_key(query + i));
        return __reduce_min_sync(ALL, least);
    }
    // The score of a product of query and key, and its slope.
    __device__ float score(float product, u64 query, u64 key, float *slope) const {
        float x = product * scale;
        *slope = scale;
        if (cap != 0.0f) {
            float share = tanhf(x / cap);
            x = cap * share;
            *slope = scale * (1.0f - share * share);
        }
        return mask ? x + mask[sequence * mask_sequence + at_head * mask_head + query * mask_query + key] : x;
    }
};

#define X (threadIdx.x % 16)
#define Y (threadIdx.x / 16)
#define EACH(i, n) for (int i = 0; i < (n); i++)

// Loads the tile of N vectors that begins at `from`, `token` elements apart. `count` of them exist;
// others, and elements from `dim` on, become zeros.
template <int D, int N>
DEVICE void load_tile(float *tile, const T *from, u64 token, u64 count, u64 dim) {
    bool vector = dim % 4 == 0 && token % 4 == 0 && is_aligned(from);
    for (u32 i = threadIdx.x; i < N * D / 4; i += 256) {
        u32 row = i / (D / 4), column = i % (D / 4) * 4;
        u64 left = row < count && column < dim ? dim - column : 0;
        *(float4 *)(tile + row * (D + 4) + column) = load_some(from + row * token + column, left, vector);
    }
}

// Sets `s` to the products of the rows of tiles `a` and `b`.
template <int D, int N>
DEVICE void rows_by_rows(float (&s)[N / 16][N / 16], const float *a, const float *b) {
    EACH(i, N / 16) EACH(j, N / 16) s[i][j] = 0.0f;
    #pragma unroll 4
    for (int d = 0; d < D; d += 4) {
        float4 x[N / 16], y[N / 16];
        #pragma unroll
        EACH(i, N / 16) x[i] = *(const float4 *)(a + (Y + 16 * i) * (D + 4) + d);
        #pragma unroll
        EACH(j, N / 16) y[j] = *(const float4 *)(b + (X + 16 * j) * (D + 4) + d);
        #pragma unroll
        EACH(i, N / 16)
            #pragma unroll
            EACH(j, N / 16) s[i][j] += x[i].x * y[j].x + x[i].y * y[j].y + x[i].z * y[j].z + x[i].w * y[j].w;
    }
}

// Adds to `out` the product of the square tile `p` and tile `v`.
template <int D, int N>
DEVICE void square_by_tile(float4 (&out)[N / 16][D / 64], const float *p, const float *v) {
    #pragma unroll 2
    for (int k = 0; k < N; k += 4) {
        float x[N / 16][4];
        #pragma unroll
        EACH(i, N / 16) {
            float4 row = *(const float4 *)(p + (Y + 16 * i) * (N + 4) + k);
            x[i][0] = row.x; x[i][1] = row.y; x[i][2] = row.z; x[i][3] = row.w;
        }
        #pragma unroll
        EACH(next, 4)
            #pragma unroll
            EACH(c, D / 64) {
                float4 y = *(const float4 *)(v + (k + next) * (D + 4) + 64 * c + 4 * X);
                #pragma unroll
                EACH(i, N / 16) {
                    out[i][c].x += x[i][next] * y.x;
                    out[i][c].y += x[i][next] * y.y;
                    out[i][c].z += x[i][next] * y.z;
                    out[i][c].w += x[i][next] * y.w;
                }
            }
    }
}

// Stores one element of each of a thread's rows and columns in a square tile.
template <int N> DEVICE void store_square(float *tile, const float (&s)[N / 16][N / 16]) {
    #pragma unroll
    EACH(i, N / 16)
        #pragma unroll
        EACH(j, N / 16) tile[(Y + 16 * i) * (N + 4) + X + 16 * j] = s[i][j];
}

// Stores the rows of a result that exist.
template <int D, int N>
DEVICE void store_tile(T *to, u64 token, u64 count, u64 dim, const float4 (&out)[N / 16][D / 64]) {
    bool vector = dim % 4 == 0 && token % 4 == 0 && is_aligned(to);
    #pragma unroll
    EACH(i, N / 16)
        #pragma unroll
        EACH(c, D / 64) {
            u32 row = Y + 16 * i, column = 64 * c + 4 * X;
            u64 left = row < count && column < dim ? dim - column : 0;
            store_some(to + row * token + column, out[i][c], left, vector);
        }
}

// Joins the numbers of the 16 threads of a row.
template <class Join> DEVICE float join_row(float x) {
    for (int step = 8; step > 0; step /= 2) x = Join::of(x, __shfl_xor_sync(ALL, x, step));
    return x;
}

template <int D, int N>
DEVICE void forward(Heads q, Heads k, Heads v, Heads out, float *normalizers, const Sizes &sizes) {
    extern __shared__ __align__(16) float room[];
    float *queries = room, *others = queries + N * (D + 4), *square = others + N * (D + 4);
    // The tiles with the most keys come first.
    u64 tiles = (sizes.queries + N - 1) / N, first = (tiles - 1 - blockIdx.x % tiles) * N;
    Place at(sizes, blockIdx.x / tiles / sizes.heads, blockIdx.x / tiles % sizes.heads);
    u64 count = min((u64)N, at.queries - first), end = at.end(first + count - 1);
    load_tile<D, N>(queries, q.of(at.sequence, first, at.at_head), q.token, count, at.dim);
    float4 sums[N / 16][D / 64] = {};
    float largest[N / 16], total[N / 16];
    EACH(i, N / 16) {
        largest[i] = NOTHING;
        total[i] = 0.0f;
    }
    for (u64 key = at.first_of<N>(first) / N * N; key < end; key += N) {
        u64 keys = min((u64)N, at.keys - key);
        __syncthreads();
        load_tile<D, N>(others, k.of(at.sequence, key, at.group()), k.token, keys, at.dim);
        __syncthreads();
        float s[N / 16][N / 16], slope;
        rows_by_rows<D, N>(s, queries, others);
        #pragma unroll
        EACH(i, N / 16) {
            u64 query = first + Y + 16 * i;
            float most = largest[i], sum = 0.0f;
            #pragma unroll
            EACH(j, N / 16) {
                u64 other = key + X + 16 * j;
                s[i][j] = at.sees(query, other) ? at.score(s[i][j], query, other, &slope) : NOTHING;
                most = fmaxf(most, s[i][j]);
            }
            most = join_row<Largest>(most);
            // As long as a query sees nothing, its sums stay zero.
            float base = most == NOTHING ? 0.0f : most, factor = expf(largest[i] - base);
            #pragma unroll
            EACH(j, N / 16) {
                s[i][j] = expf(s[i][j] - base);
                sum += s[i][j];
            }
            largest[i] = most;
            total[i] = total[i] * factor + join_row<Sum>(sum);
            #pragma unroll
            EACH(c, D / 64) sums[i][c] = sums[i][c] * factor;
        }
        store_square<N>(square, s);
        __syncthreads();
        load_tile<D, N>(others, v.of(at.sequence, key, at.group()), v.token, keys, at.dim);
        __syncthreads();
        square_by_tile<D, N>(sums, square, others);
    }
    #pragma unroll
    EACH(i, N / 16) {
        float share = 1.0f / total[i];
        #pragma unroll
        EACH(c, D / 64) sums[i][c] = sums[i][c] * share;
        u64 query = first + Y + 16 * i;
        if (X == 0 && query < at.queries) {
            normalizers[2 * at.row(query)] = largest[i];
            normalizers[2 * at.row(query) + 1] = share;
        }
    }
    store_tile<D, N>(out.of(at.sequence, first, at.at_head), out.token, count, at.dim, sums);
}

// From products of queries and keys, `s`, and of gradients and values, `d`: the probability of a
// key, and the gradient of the product.
DEVICE void gradient(
    const Place &at, u64 query, u64 key, const float *normalizers, const float *means, float &s, float &d
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

template <int D, int N>
DEVICE void backward_queries(
    Heads q, Heads k, Heads v, Heads d_out, Heads d_q, const float *normalizers, const float *means, const Sizes &sizes
) {
    extern __shared__ __align__(16) float room[];
    const int size = N * (D + 4);
    float *queries = room, *gradients = room + size, *keys = room + 2 * size, *values = room + 3 * size;
    float *square = room + 4 * size;
    u64 tiles = (sizes.queries + N - 1) / N, first = (tiles - 1 - blockIdx.x % tiles) * N;
    Place at(sizes, blockIdx.x / tiles / sizes.heads, blockIdx.x / tiles % sizes.heads);
    u64 count = min((u64)N, at.queries - first), end = at.end(first + count - 1);
    load_tile<D, N>(queries, q.of(at.sequence, first, at.at_head), q.token, count, at.dim);
    load_tile<D, N>(gradients, d_out.of(at.sequence, first, at.at_head), d_out.token, count, at.dim);
    float4 sums[N / 16][D / 64] = {};
    for (u64 key = at.first_of<N>(first) / N * N; key < end; key += N) {
        u64 there = min((u64)N, at.keys - key);
        __syncthreads();
        load_tile<D, N>(keys, k.of(at.sequence, key, at.group()), k.token, there, at.dim);
        load_tile<D, N>(values, v.of(at.sequence, key, at.group()), v.token, there, at.dim);
        __syncthreads();
        float s[N / 16][N / 16], d[N / 16][N / 16];
        rows_by_rows<D, N>(s, queries, keys);
        rows_by_rows<D, N>(d, gradients, values);
        #pragma unroll
        EACH(i, N / 16)
            #pragma unroll
            EACH(j, N / 16) gradient(at, first + Y + 16 * i, key + X + 16 * j, normalizers, means, s[i][j], d[i][j]);
        store_square<N>(square, d);
        __syncthreads();
        square_by_tile<D, N>(sums, square, keys);
    }
    store_tile<D, N>(d_q.of(at.sequence, first, at.at_head), d_q.token, count, at.dim, sums);
}

template <int D, int N>
DEVICE void backward_keys(
    Heads q, Heads k, Heads v, Heads d_out, Heads d_k, Heads d_v, const float *normalizers, const float *means,
    const Sizes &sizes
) {
    extern __shared__ __align__(16) float room[];
    const int size = N * (D + 4);
    float *queries = room, *gradients = room + size, *keys = room + 2 * size, *values = room + 3 * size;
    float *square = room + 4 * size;
    u64 tiles = (sizes.keys + N - 1) / N, first = blockIdx.x % tiles * N;
    u64 sequence = blockIdx.x / tiles / sizes.groups, group = blockIdx.x / tiles % sizes.groups;
    u64 count = min((u64)N, sizes.keys - first), shared = sizes.heads / sizes.groups;
    load_tile<D, N>(keys, k.of(sequence, first, group), k.token, count, sizes.dim);
    load_tile<D, N>(values, v.of(sequence, first, group), v.token, count, sizes.dim);
    float4 of_keys[N / 16][D / 64] = {}, of_values[N / 16][D / 64] = {};
    // The first query that sees a key.
    u64 start = sizes.causal && first + sizes.queries > sizes.keys ? first + sizes.queries - sizes.keys : 0;
    for (u64 head = group * shared; head < (group + 1) * shared; head++) {
        Place at(sizes, sequence, head);
        for (u64 query = start / N * N; query < at.queries; query += N) {
            if (at.first_of<N>(query) >= first + count) continue;
            u64 there = min((u64)N, at.queries - query);
            __syncthreads();
            load_tile<D, N>(queries, q.of(sequence, query, head), q.token, there, at.dim);
            load_tile<D, N>(gradients, d_out.of(sequence, query, head), d_out.token, there, at.dim);
            __syncthreads();
            float s[N / 16][N / 16], d[N / 16][N / 16];
            rows_by_rows<D, N>(s, keys, queries);
            rows_by_rows<D, N>(d, values, gradients);
            #pragma unroll
            EACH(i, N / 16)
                #pragma unroll
                EACH(j, N / 16) gradient(at, query + X + 16 * j, first + Y + 16 * i, normalizers, means, s[i][j], d[i][j]);
            store_square<N>(square, s);
            __syncthreads();
            square_by_tile<D, N>(of_values, square, gradients);
            __syncthreads();
            store_square<N>(square, d);
            __syncthreads();
            square_by_tile<D, N>(of_keys, square, queries);
        }
    }
    store_tile<D, N>(d_k.of(sequence, first, group), d_k.token, count, sizes.dim, of_keys);
    store_tile<D, N>(d_v.of(sequence, first, group), d_v.token, count, sizes.dim, of_values);
}

#define HEADS(x) T *x, u64 x##_sequence, u64 x##_token, u64 x##_head
#define THESE(x) Heads{x, x##_sequence, x##_token, x##_head}
#define SIZES                                                                                                          \
    u64 heads, u64 groups, u64 queries, u64 keys, u64 dim, float scale, float cap, u32 causal, const u32 *first,       \
        u64 first_sequence, const float *mask, u64 mask_sequence, u64 mask_head, u64 mask_query
#define THE_SIZES                                                                                                      \
    Sizes{heads, groups,         queries, keys,          dim,       scale,     cap,                                     \
          causal, first, first_sequence, mask,    mask_sequence, mask_head, mask_query}

// The products of results and their gradients, for each query. A warp has one.
extern "C" __global__ void attention_means(HEADS(out), HEADS(d_out), u64 heads, u64 queries, u64 rows, u64 dim, float *means) {
    u64 row = FIRST / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    u64 sequence = row / queries / heads, head = row / queries % heads, query = row % queries;
    const T *x = THESE(out).of(sequence, query, head), *d = THESE(d_out).of(sequence, query, head);
    float sum = 0.0f;
    for (u64 i = lane; i < dim; i += 32) sum += load(x + i) * load(d + i);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
    if (lane == 0) means[row] = sum;
}

#define KERNELS(D, N)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 1)                                                                  \
        attention_##D(HEADS(q), HEADS(k), HEADS(v), HEADS(out), float *normalizers, SIZES) {                           \
        forward<D, N>(THESE(q), THESE(k), THESE(v), THESE(out), normalizers, THE_SIZES);                               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 1) attention_queries_##D(                                           \
        HEADS(q), HEADS(k), HEADS(v), HEADS(d_out), HEADS(d_q), const float *normalizers, const float *means, SIZES    \
    ) {                                                                                                                \
        backward_queries<D, N>(                                                                                        \
            THESE(q), THESE(k), THESE(v), THESE(d_out), THESE(d_q), normalizers, means, THE_SIZES                      \
        );                                                                                                             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 1) attention_keys_##D(                                              \
        HEADS(q), HEADS(k), HEADS(v), HEADS(d_out), HEADS(d_k), HEADS(d_v), const float *normalizers,                  \
        const float *means, SIZES                                                                                      \
    ) {                                                                                                                \
        backward_keys<D, N>(                                                                                           \
            THESE(q), THESE(k), THESE(v), THESE(d_out), THESE(d_k), THESE(d_v), normalizers, means, THE_SIZES          \
        );                                                                                                             \
    }

KERNELS(64, 64)
KERNELS(128, 64)
KERNELS(256, 32)
