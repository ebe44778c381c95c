// What a CPU computes between two products of a decoder's layer.
//
// A number is float (type 0) or bfloat16 (type 1); sums, roots and exponentials are in float, and results are rounded to
// nearest even. NaN and infinities pass through. library.py compiles this file and describes it to Python.

#include <cstddef>
#include <cstdint>
#include <utility>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

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

// One layer of the KV cache, in the type of the pass: a column of a row's head is head_dim numbers.
struct Cache {
    void *keys, *values;
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
void rotate(const Heads &size, const T *qkv, const float *norms, float eps, const float *rope, int64_t rope_row, T *query,
            const Cache &cache, int threads) {
    const int64_t batch = size.batch, tokens = size.tokens, heads = size.heads, kv_heads = size.kv_heads, dim = size.dim;
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t place = 0; place < batch * tokens; ++place) {
        const int64_t row = place / tokens, token = place % tokens;
        const T *from = qkv + place * (heads + 2 * kv_heads) * dim;
        const float *turn = rope ? rope + row * rope_row + token * dim : nullptr;
        const int64_t column = (cache.column + token) * dim;
        float turned[dim];
        for (int64_t head = 0; head < heads + 2 * kv_heads; ++head, from += dim) {
            const int64_t key = head - heads, value = key - kv_heads;
            T *to = key < 0     ? query + (place * heads + head) * dim
                    : value < 0 ? (T *)cache.keys + cache.place(row, key) + column
                                : (T *)cache.values + cache.place(row, value) + column;
            if (norms && value < 0)
                norm_row(from, norms + head * dim, eps, dim, turned);
            else
                for (int64_t i = 0; i < dim; ++i) turned[i] = get(from[i]);
            for (int64_t i = 0; turn && value < 0 && i < dim; i += 2) {
                const float a = turned[i], b = turned[i + 1];
                turned[i] = a * turn[i] - b * turn[i + 1];
                turned[i + 1] = a * turn[i + 1] + b * turn[i];
            }
            for (int64_t i = 0; i < dim; ++i) put(to[i], turned[i]);
        }
    }
}

constexpr float NOTHING = -__builtin_inff();
constexpr int64_t BLOCK = 64, TOGETHER = 4; // columns whose scores are held, queries that share what is loaded

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

#ifdef __AVX512F__
constexpr int LANES = 16; // numbers of a vector
#else
constexpr int LANES = 8;
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

inline Vector load(const float *from) { return *(const Floats *)from; }
inline Vector load(const bfloat16 *from) {
#ifdef __AVX512F__ // of what stands below GCC makes four times as many instructions
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    return (Vector)(__builtin_convertvector(*(const Halves *)from, Words) << 16);
#endif
}
inline void store(float *to, Vector x) { *(Floats *)to = x; }

// Begins to load `count` numbers that are read a block later. Without it memory gives half of its rate.
template <typename T> inline void prefetch(const T *from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
}

// Lanes come in groups of 2 * HALF. Returns the sums of the halves of a's groups, then of b's.
template <int HALF, size_t... LANE> inline Vector halved(Vector a, Vector b, std::index_sequence<LANE...>) {
    constexpr int MIDDLE = LANES / 2;
#define FIRST (LANE / MIDDLE * LANES + LANE % MIDDLE / HALF * 2 * HALF + LANE % HALF)
#if __has_builtin(__builtin_shufflevector)
    return __builtin_shufflevector(a, b, FIRST...) + __builtin_shufflevector(a, b, (FIRST + HALF)...);
#else
    return __builtin_shuffle(a, b, Words{FIRST...}) + __builtin_shuffle(a, b, Words{(FIRST + HALF)...});
#endif
#undef FIRST
}

// The sum of each of 2 * LANES / WIDTH vectors, in their order, where those of WIDTH lanes are wanted.
template <int WIDTH = 1> inline Vector sums(const Vector *vectors) {
    if constexpr (WIDTH == LANES)
        return *vectors;
    else
        return halved<WIDTH>(sums<2 * WIDTH>(vectors), sums<2 * WIDTH>(vectors + LANES / WIDTH / 2),
                             std::make_index_sequence<LANES>());
}

// scores[QUERIES][BLOCK] of queries [dim] and `count` keys [column][dim].
template <int QUERIES, typename T>
inline void score(const float *const *queries, const T *keys, int64_t count, int64_t dim, float scale, float *scores) {
    for (int64_t begin = 0; begin < count; begin += LANES) {
        Vector products[QUERIES][LANES];
        for (int64_t column = 0; column < LANES; ++column) {
            const T *key = keys + (begin + column < count ? begin + column : count - 1) * dim;
            prefetch(key + BLOCK * dim, dim);
            Vector sum[QUERIES] = {};
            int64_t i = 0;
            for (; i + LANES <= dim; i += LANES) {
                const Vector loaded = load(key + i);
#pragma GCC unroll 4
                for (int q = 0; q < QUERIES; ++q) sum[q] += load(queries[q] + i) * loaded;
            }
            for (; i < dim; ++i)
                for (int q = 0; q < QUERIES; ++q) sum[q][0] += queries[q][i] * get(key[i]);
#pragma GCC unroll 4
            for (int q = 0; q < QUERIES; ++q) products[q][column] = sum[q];
        }
        for (int q = 0; q < QUERIES; ++q) store(scores + q * BLOCK + begin, sums(products[q]) * scale);
    }
}

// Adds shares[QUERIES][BLOCK] times `count` values [column][dim] to VECTORS vectors of sums[QUERIES][dim], shrunk first.
template <int QUERIES, int VECTORS, typename T>
inline void add_values(float *sums, const float *shrink, const float *shares, const T *values, int64_t count, int64_t dim) {
    Vector sum[QUERIES][VECTORS];
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECTORS; ++v) sum[q][v] = load(sums + q * dim + v * LANES) * shrink[q];
    for (int64_t column = 0; column < count; ++column) {
        prefetch(values + (column + BLOCK) * dim, VECTORS * LANES);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            const Vector value = load(values + column * dim + v * LANES);
#pragma GCC unroll 4
            for (int q = 0; q < QUERIES; ++q) sum[q][v] += shares[q * BLOCK + column] * value;
        }
    }
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECTORS; ++v) store(sums + q * dim + v * LANES, sum[q][v]);
}

// The `count` queries of one token that share a KV head; to make QUERIES of them, the last one is repeated.
template <int QUERIES, typename T>
void attend_together(const T *query, int64_t count, const T *keys, const T *values, const uint8_t *seen, int64_t length,
                     int64_t dim, float scale, T *out) {
    float wide[QUERIES * dim], sums[QUERIES * dim], scores[QUERIES * BLOCK];
    float most[QUERIES], total[QUERIES], shrink[QUERIES];
    const float *queries[QUERIES];
    for (int q = 0; q < QUERIES; ++q) {
        const T *from = query + (q < count ? q : count - 1) * dim;
        queries[q] = wide + q * dim, most[q] = NOTHING, total[q] = 0;
        for (int64_t i = 0; i < dim; ++i) wide[q * dim + i] = get(from[i]), sums[q * dim + i] = 0;
    }
    for (int64_t begin = 0; begin < length; begin += BLOCK) {
        const int64_t columns = length - begin < BLOCK ? length - begin : BLOCK;
        score<QUERIES>(queries, keys + begin * dim, columns, dim, scale, scores);
        for (int q = 0; q < QUERIES; ++q) {
            float *of_query = scores + q * BLOCK;
            for (int64_t i = 0; seen && i < columns; ++i) of_query[i] = seen[begin + i] ? of_query[i] : NOTHING;
            shrink[q] = soften(of_query, columns, most[q], total[q]);
        }
        const T *value = values + begin * dim;
        int64_t i = 0;
        for (; i + 4 * LANES <= dim; i += 4 * LANES) add_values<QUERIES, 4>(sums + i, shrink, scores, value + i, columns, dim);
        for (; i + LANES <= dim; i += LANES) add_values<QUERIES, 1>(sums + i, shrink, scores, value + i, columns, dim);
        for (; i < dim; ++i)
            for (int q = 0; q < QUERIES; ++q) {
                float sum = sums[q * dim + i] * shrink[q];
                for (int64_t column = 0; column < columns; ++column)
                    sum += scores[q * BLOCK + column] * get(value[column * dim + i]);
                sums[q * dim + i] = sum;
            }
    }
    for (int64_t q = 0; q < count; ++q)
        for (int64_t i = 0; i < dim; ++i) put(out[q * dim + i], total[q] ? sums[q * dim + i] / total[q] : 0.0f);
}

// One token of each row. query, out: [batch, heads, dim]. length: columns in view. seen: those that are not 0, [batch or
// 1, columns], `seen_row` bytes from one row's to the next; null: all of them. Who sees none gets 0.
template <typename T>
void attend(const Heads &size, const T *query, const Cache &cache, const uint8_t *seen, int64_t seen_row, int64_t length,
            float scale, T *out, int threads) {
    const int64_t dim = size.dim, group = size.heads / size.kv_heads, together = (group + TOGETHER - 1) / TOGETHER;
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t place = 0; place < size.batch * size.kv_heads * together; ++place) {
        const int64_t number = place / together, first = place % together * TOGETHER;
        const int64_t row = number / size.kv_heads, at = cache.place(row, number % size.kv_heads);
        const int64_t from = (number * group + first) * dim, count = group - first < TOGETHER ? group - first : TOGETHER;
        const auto kernel = count == 1 ? attend_together<1, T> : count == 2 ? attend_together<2, T> : attend_together<4, T>;
        kernel(query + from, count, (const T *)cache.keys + at, (const T *)cache.values + at,
               seen ? seen + row * seen_row : nullptr, length, dim, scale, out + from);
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
                      int64_t rope_row, void *query, const Cache *cache, int threads) {
    if (!has_room(*cache, *size, 0)) return 1;
    if (type)
        rotate(*size, (const bfloat16 *)qkv, norms, eps, rope, rope_row, (bfloat16 *)query, *cache, threads);
    else
        rotate(*size, (const float *)qkv, norms, eps, rope, rope_row, (float *)query, *cache, threads);
    return 0;
}

// Returns as ladderize_rotate.
int ladderize_attend(int type, const Heads *size, const void *query, const Cache *cache, const uint8_t *seen,
                      int64_t seen_row, int64_t length, float scale, void *out, int threads) {
    if (!has_room(*cache, *size, length)) return 1;
    if (type)
        attend(*size, (const bfloat16 *)query, *cache, seen, seen_row, length, scale, (bfloat16 *)out, threads);
    else
        attend(*size, (const float *)query, *cache, seen, seen_row, length, scale, (float *)out, threads);
    return 0;
}
}
