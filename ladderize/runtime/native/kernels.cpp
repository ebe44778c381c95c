// What a CPU computes between two products of a decoder's layer.
//
// A number is float (type 0) or bfloat16 (type 1); sums, roots and exponentials are in float, and results are rounded to
// nearest even. NaN and infinities pass through. library.py compiles this file and describes it to Python.

#include <cstddef>
#include <cstdint>
#include <omp.h>

namespace {

struct bfloat16 {
    uint16_t bits;
};

inline float get(float x) { return x; }
inline float get(bfloat16 x) { return __builtin_bit_cast(float, uint32_t(x.bits) << 16); }

inline void put(float &to, float x) { to = x; }
inline void put(bfloat16 &to, float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

// e^x to 2 units in the last place: e^x = 2^n e^r with |r| <= ln 2 / 2, and a polynomial of degree 6 for e^r.
inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float n = __builtin_rintf(x * 1.44269504f);
    const int32_t exponent = int32_t(n == n ? n : 0.0f);
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * __builtin_bit_cast(float, uint32_t(exponent + 127) << 23);
}

template <typename From, typename Weight, typename To>
inline void norm_row(const From *from, const Weight *weight, float eps, int64_t width, To *to) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += get(from[i]) * get(from[i]);
    const float factor = 1.0f / __builtin_sqrtf(sum / float(width) + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) put(to[i], get(from[i]) * factor * get(weight[i]));
}

template <typename T>
void rms_norm(const T *x, const T *weight, T *out, int64_t rows, int64_t width, float eps, int threads) {
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) norm_row(x + row * width, weight, eps, width, out + row * width);
}

template <typename T> void gated(const T *gate_up, T *out, int64_t rows, int64_t inner, int64_t stride, int threads) {
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
        const T *gate = gate_up + row * 2 * inner, *up = gate + inner;
        T *to = out + row * stride;
#pragma omp simd
        for (int64_t i = 0; i < inner; ++i) {
            const float g = get(gate[i]);
            const float silu = g < -88.0f ? g * 0.0f : g / (1.0f + exponential(-g)); // of minus infinity: NaN
            put(to[i], silu * get(up[i]));
        }
    }
}

template <typename T> inline float rounded(float x) {
    T stored;
    put(stored, x);
    return get(stored);
}

// The sum over the ranks of their messages, which lie `stride` bytes apart, rounded; then plus residual, unless that is
// null.
template <typename T>
void sum(const char *messages, int64_t stride, int64_t ranks, const T *residual, T *out, int64_t count, int threads) {
    constexpr int64_t PIECE = 4096; // numbers whose totals stay in the fastest cache
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t begin = 0; begin < count; begin += PIECE) {
        const int64_t size = count - begin < PIECE ? count - begin : PIECE;
        float total[PIECE];
        const T *first = (const T *)messages + begin, *second = (const T *)(messages + stride) + begin;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) total[i] = get(first[i]) + get(second[i]);
        for (int64_t rank = 2; rank < ranks; ++rank) {
            const T *next = (const T *)(messages + rank * stride) + begin;
#pragma omp simd
            for (int64_t i = 0; i < size; ++i) total[i] += get(next[i]);
        }
        T *to = out + begin;
        const T *from = residual + begin;
        if (residual) {
#pragma omp simd
            for (int64_t i = 0; i < size; ++i) put(to[i], get(from[i]) + rounded<T>(total[i]));
        } else {
#pragma omp simd
            for (int64_t i = 0; i < size; ++i) put(to[i], total[i]);
        }
    }
}

// One layer of the KV cache, float: a column of a row's head is head_dim numbers.
struct Cache {
    float *keys, *values;
    int64_t row, head; // strides, in numbers
    int64_t column; // the first one of a pass's tokens
    int64_t all_rows, all_columns; // that there are

    int64_t place(int64_t of_row, int64_t of_head) const { return of_row * row + of_head * head; }
};

struct Heads {
    int64_t batch, tokens, heads, kv_heads, dim;
};

// Whether a cache has the rows of a pass, the columns that it writes, and `length` columns to look at.
inline bool has_room(const Cache &cache, const Heads &size, int64_t length) {
    return length <= cache.all_columns && size.batch <= cache.all_rows && cache.column >= 0 &&
           cache.column + size.tokens <= cache.all_columns;
}

// qkv: [batch, tokens, (heads + 2 kv_heads) * dim]. norms: [heads + kv_heads, dim], or null. rope: pairs (cos, sin)
// [batch or 1, tokens, dim / 2], or null; rope_row: numbers from one row's to the next. query: [batch, tokens, heads, dim].
template <typename T>
void rotate(const Heads &size, const T *qkv, const float *norms, float eps, const float *rope, int64_t rope_row,
            float *query, const Cache &cache, int threads) {
    const int64_t batch = size.batch, tokens = size.tokens, heads = size.heads, kv_heads = size.kv_heads, dim = size.dim;
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t place = 0; place < batch * tokens; ++place) {
        const int64_t row = place / tokens, token = place % tokens;
        const T *from = qkv + place * (heads + 2 * kv_heads) * dim;
        const float *turn = rope ? rope + row * rope_row + token * dim : nullptr;
        const int64_t column = (cache.column + token) * dim;
        for (int64_t head = 0; head < heads + 2 * kv_heads; ++head, from += dim) {
            const int64_t own = head - heads, value = own - kv_heads;
            float *to = own < 0     ? query + (place * heads + head) * dim
                        : value < 0 ? cache.keys + cache.place(row, own) + column
                                    : cache.values + cache.place(row, value) + column;
            if (norms && value < 0)
                norm_row(from, norms + head * dim, eps, dim, to);
            else
                for (int64_t i = 0; i < dim; ++i) to[i] = get(from[i]);
            for (int64_t i = 0; turn && value < 0 && i < dim; i += 2) {
                const float a = to[i], b = to[i + 1];
                to[i] = a * turn[i] - b * turn[i + 1];
                to[i + 1] = a * turn[i + 1] + b * turn[i];
            }
        }
    }
}

inline float dot(const float *a, const float *b, int64_t dim) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < dim; ++i) sum += a[i] * b[i];
    return sum;
}

// Which columns a token sees: those of `bytes` that are not 0, [batch or 1, tokens, columns] with strides; null: all of
// them, or with `causal` those up to its own, where the last token's is the last one. Who sees none gets 0.
struct Seen {
    const uint8_t *bytes;
    int64_t row, token, causal;
};

constexpr float NOTHING = -__builtin_inff();
constexpr int64_t BLOCK = 64; // columns whose scores are held at a time

// What softmax makes of `count` scores that follow others: scores become shares, `most` and `total` go on. Returns what
// the sums so far are multiplied by.
inline float soften(float *scores, int64_t count, float &most, float &total) {
    float highest = most;
#pragma omp simd reduction(max : highest)
    for (int64_t i = 0; i < count; ++i) highest = scores[i] > highest ? scores[i] : highest;
    const float base = highest == NOTHING ? 0.0f : highest; // nothing was seen so far
    const float shrink = most == NOTHING ? 0.0f : exponential(most - base);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) {
        const float below = scores[i] - base;
        scores[i] = below < -87.0f ? 0.0f : exponential(below);
        sum += scores[i];
    }
    most = highest;
    total = total * shrink + sum;
    return shrink;
}

// One query of one token. DIM: head_dim where the compiler knows it, else 0.
template <int64_t DIM, typename T>
void attend_head(const float *query, const float *keys, const float *values, const uint8_t *seen, int64_t length,
                 int64_t any_dim, float scale, T *out) {
    const int64_t dim = DIM ? DIM : any_dim;
    float scores[BLOCK], sum[dim], most = NOTHING, total = 0;
    for (int64_t i = 0; i < dim; ++i) sum[i] = 0;
    for (int64_t begin = 0; begin < length; begin += BLOCK) {
        const int64_t count = length - begin < BLOCK ? length - begin : BLOCK;
        for (int64_t i = 0; i < count; ++i)
            scores[i] = !seen || seen[begin + i] ? dot(query, keys + (begin + i) * dim, dim) * scale : NOTHING;
        const float shrink = soften(scores, count, most, total);
        for (int64_t i = 0; i < dim; ++i) sum[i] *= shrink;
        for (int64_t column = 0; column < count; ++column) {
            const float *value = values + (begin + column) * dim;
#pragma omp simd
            for (int64_t i = 0; i < dim; ++i) sum[i] += scores[column] * value[i];
        }
    }
    for (int64_t i = 0; i < dim; ++i) put(out[i], total ? sum[i] / total : 0.0f);
}

typedef float Vector __attribute__((vector_size(64)));
typedef float Loose __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int64_t LANES = 16, QUERIES = 8; // numbers of a vector; queries that share what is loaded

inline Vector load(const float *from) { return *(const Loose *)from; }
inline void store(float *to, Vector x) { *(Loose *)to = x; }

// scores[QUERIES][BLOCK] of QUERIES queries [dim] and keys [dim][BLOCK].
inline void score_block(const float *const *queries, const float *keys, int64_t dim, float scale, float *scores) {
    for (int64_t half = 0; half < BLOCK; half += 2 * LANES) {
        Vector sum[QUERIES][2] = {};
        for (int64_t i = 0; i < dim; ++i) {
            const Vector a = load(keys + i * BLOCK + half), b = load(keys + i * BLOCK + half + LANES);
#pragma GCC unroll 8
            for (int64_t q = 0; q < QUERIES; ++q) {
                sum[q][0] += queries[q][i] * a;
                sum[q][1] += queries[q][i] * b;
            }
        }
#pragma GCC unroll 8
        for (int64_t q = 0; q < QUERIES; ++q) {
            store(scores + q * BLOCK + half, sum[q][0] * scale);
            store(scores + q * BLOCK + half + LANES, sum[q][1] * scale);
        }
    }
}

// sums[4][dim], shrunk, plus shares[4][BLOCK] times `count` values [column][dim]: VECTORS vectors of them.
template <int VECTORS>
inline void add_values(float *sums, const float *shrink, const float *shares, const float *values, int64_t count,
                       int64_t dim) {
    Vector sum[4][VECTORS];
    for (int64_t q = 0; q < 4; ++q)
        for (int v = 0; v < VECTORS; ++v) sum[q][v] = load(sums + q * dim + v * LANES) * shrink[q];
    for (int64_t column = 0; column < count; ++column) {
        Vector value[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) value[v] = load(values + column * dim + v * LANES);
#pragma GCC unroll 4
        for (int64_t q = 0; q < 4; ++q)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sum[q][v] += shares[q * BLOCK + column] * value[v];
    }
    for (int64_t q = 0; q < 4; ++q)
        for (int v = 0; v < VECTORS; ++v) store(sums + q * dim + v * LANES, sum[q][v]);
}

// The queries of one KV head for all tokens of a row, QUERIES at a time: those of a token's heads, then of the next
// token's. turned: room for the keys [blocks][dim][BLOCK]. dim: a multiple of LANES.
template <typename T>
void attend_tokens(const Heads &size, int64_t row, int64_t kv_head, const float *query, const float *keys,
                   const float *values, const Seen &seen, int64_t length, float scale, T *out, float *turned) {
    const int64_t dim = size.dim, group = size.heads / size.kv_heads, count = size.tokens * group;
    for (int64_t column = 0; column < length; ++column)
        for (int64_t i = 0; i < dim; ++i)
            turned[(column / BLOCK * dim + i) * BLOCK + column % BLOCK] = keys[column * dim + i];
    float sums[QUERIES * dim], scores[QUERIES * BLOCK];
    for (int64_t first = 0; first < count; first += QUERIES) {
        const int64_t own = count - first < QUERIES ? count - first : QUERIES;
        const float *queries[QUERIES];
        int64_t at[QUERIES], token[QUERIES];
        float most[QUERIES], total[QUERIES], shrink[QUERIES];
        for (int64_t q = 0; q < QUERIES; ++q) {
            const int64_t number = first + (q < own ? q : own - 1); // what is too much repeats the last one
            token[q] = number / group;
            at[q] = ((row * size.tokens + token[q]) * size.heads + kv_head * group + number % group) * dim;
            queries[q] = query + at[q], most[q] = NOTHING, total[q] = 0;
            for (int64_t i = 0; i < dim; ++i) sums[q * dim + i] = 0;
        }
        const int64_t end = seen.causal ? length - size.tokens + token[QUERIES - 1] + 1 : length;
        for (int64_t begin = 0; begin < end; begin += BLOCK) {
            const int64_t columns = end - begin < BLOCK ? end - begin : BLOCK;
            score_block(queries, turned + begin * dim, dim, scale, scores);
            for (int64_t q = 0; q < QUERIES; ++q) {
                float *of_query = scores + q * BLOCK;
                const int64_t last = seen.causal ? length - size.tokens + token[q] - begin : columns - 1;
                for (int64_t i = last < 0 ? 0 : last + 1; i < columns; ++i) of_query[i] = NOTHING;
                if (seen.bytes) {
                    const uint8_t *sees = seen.bytes + row * seen.row + token[q] * seen.token + begin;
                    for (int64_t i = 0; i < columns; ++i) of_query[i] = sees[i] ? of_query[i] : NOTHING;
                }
                shrink[q] = soften(of_query, columns, most[q], total[q]);
            }
            for (int64_t q = 0; q < QUERIES; q += 4)
                for (int64_t i = 0; i < dim;) {
                    const float *value = values + begin * dim + i;
                    if (dim - i >= 4 * LANES) {
                        add_values<4>(sums + q * dim + i, shrink + q, scores + q * BLOCK, value, columns, dim);
                        i += 4 * LANES;
                    } else {
                        add_values<1>(sums + q * dim + i, shrink + q, scores + q * BLOCK, value, columns, dim);
                        i += LANES;
                    }
                }
        }
        for (int64_t q = 0; q < own; ++q)
            for (int64_t i = 0; i < dim; ++i) put(out[at[q] + i], total[q] ? sums[q * dim + i] / total[q] : 0.0f);
    }
}

// query: [batch, tokens, heads, dim]. length: columns in view. out: like query. room: [threads][columns in view, rounded
// up to whole blocks][dim], where there is more than one token.
template <typename T>
void attend(const Heads &size, const float *query, const Cache &cache, const Seen &seen, int64_t length, float scale,
            T *out, float *room, int threads) {
    const int64_t heads = size.heads, dim = size.dim, group = size.heads / size.kv_heads;
    if (size.tokens == 1) {
#pragma omp parallel for if (threads > 1) num_threads(threads)
        for (int64_t place = 0; place < size.batch * heads; ++place) {
            const int64_t row = place / heads, at = cache.place(row, place % heads / group);
            const auto kernel = dim == 64 ? attend_head<64, T> : dim == 128 ? attend_head<128, T> : attend_head<0, T>;
            kernel(query + place * dim, cache.keys + at, cache.values + at,
                   seen.bytes ? seen.bytes + row * seen.row : nullptr, length, dim, scale, out + place * dim);
        }
        return;
    }
    const int64_t turned = (length + BLOCK - 1) / BLOCK * BLOCK * dim;
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t place = 0; place < size.batch * size.kv_heads; ++place) {
        const int64_t row = place / size.kv_heads, head = place % size.kv_heads, at = cache.place(row, head);
        attend_tokens(size, row, head, query, cache.keys + at, cache.values + at, seen, length, scale, out,
                      room + omp_get_thread_num() * turned);
    }
}

} // namespace

extern "C" {

void ladderize_rms_norm(int type, const void *x, const void *weight, void *out, int64_t rows, int64_t width, float eps,
                        int threads) {
    if (type)
        rms_norm((const bfloat16 *)x, (const bfloat16 *)weight, (bfloat16 *)out, rows, width, eps, threads);
    else
        rms_norm((const float *)x, (const float *)weight, (float *)out, rows, width, eps, threads);
}

void ladderize_gated(int type, const void *gate_up, void *out, int64_t rows, int64_t inner, int64_t stride, int threads) {
    if (type)
        gated((const bfloat16 *)gate_up, (bfloat16 *)out, rows, inner, stride, threads);
    else
        gated((const float *)gate_up, (float *)out, rows, inner, stride, threads);
}

void ladderize_sum(int type, const void *messages, int64_t stride, int64_t ranks, const void *residual, void *out,
                   int64_t count, int threads) {
    if (type)
        sum((const char *)messages, stride, ranks, (const bfloat16 *)residual, (bfloat16 *)out, count, threads);
    else
        sum((const char *)messages, stride, ranks, (const float *)residual, (float *)out, count, threads);
}

// Returns 0, or 1 where the cache has no such rows or columns: then nothing was written.
int ladderize_rotate(int type, const Heads *size, const void *qkv, const float *norms, float eps, const float *rope,
                      int64_t rope_row, float *query, const Cache *cache, int threads) {
    if (!has_room(*cache, *size, 0)) return 1;
    if (type)
        rotate(*size, (const bfloat16 *)qkv, norms, eps, rope, rope_row, query, *cache, threads);
    else
        rotate(*size, (const float *)qkv, norms, eps, rope, rope_row, query, *cache, threads);
    return 0;
}

// Returns as ladderize_rotate.
int ladderize_attend(int type, const Heads *size, const float *query, const Cache *cache, const Seen *seen, int64_t length,
                      float scale, void *out, float *room, int threads) {
    if (!has_room(*cache, *size, length)) return 1;
    if (type)
        attend(*size, query, *cache, *seen, length, scale, (bfloat16 *)out, room, threads);
    else
        attend(*size, query, *cache, *seen, length, scale, (float *)out, room, threads);
    return 0;
}
}
