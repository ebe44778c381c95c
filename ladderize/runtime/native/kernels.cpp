// What a CPU computes between two products of a decoder's layer.
//
// A number is float (type 0) or bfloat16 (type 1); sums, roots and exponentials are in float, and results are rounded to
// nearest even. NaN and infinities pass through. library.py compiles this file and describes it to Python.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
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

// Begins to load what lies AHEAD bytes behind `count` numbers, which are read in a moment. What the processor asks for by
// itself leaves memory idle: with it products take half as long here, and what only moves numbers three quarters.
constexpr int64_t AHEAD = 8192, LINE = 64; // bytes
template <typename T> inline void look_ahead(const T *from, int64_t count) {
    const char *begin = (const char *)from + AHEAD;
    for (int64_t i = 0; i < count * int64_t(sizeof(T)); i += LINE) __builtin_prefetch(begin + i);
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
    for (int64_t row = 0; row < rows; ++row) {
        look_ahead(x + row * width, width);
        norm_row(x + row * width, weight, eps, width, out + row * width);
    }
}

template <typename T> void gated(const T *gate_up, T *out, int64_t rows, int64_t inner, int64_t stride, int threads) {
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
        const T *gate = gate_up + row * 2 * inner, *up = gate + inner;
        T *to = out + row * stride;
        look_ahead(gate, 2 * inner);
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
    constexpr int64_t PIECE = 1024; // numbers whose totals stay in the fastest cache
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t begin = 0; begin < count; begin += PIECE) {
        const int64_t size = count - begin < PIECE ? count - begin : PIECE;
        float total[PIECE];
        const T *first = (const T *)messages + begin, *second = (const T *)(messages + stride) + begin;
        look_ahead(first, size);
        look_ahead(second, size);
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) total[i] = get(first[i]) + get(second[i]);
        for (int64_t rank = 2; rank < ranks; ++rank) {
            const T *next = (const T *)(messages + rank * stride) + begin;
            look_ahead(next, size);
#pragma omp simd
            for (int64_t i = 0; i < size; ++i) total[i] += get(next[i]);
        }
        T *to = out + begin;
        const T *from = residual + begin;
        if (residual) {
            look_ahead(from, size);
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
        look_ahead(from, (heads + 2 * kv_heads) * dim);
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

#ifdef __AVX512F__
constexpr int LANES = 16; // numbers of a vector
#else
constexpr int LANES = 8;
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t LooseWords __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t LooseWord __attribute__((aligned(2), may_alias));
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

// As the scalar one, of numbers that are 0 or less; 0 below -87.
inline Vector exponential(Vector x) {
    constexpr float MIDDLE = 1.5f * (1 << 23); // added to a small number it rounds it
    const Vector n = (x * 1.44269504f + MIDDLE) - MIDDLE, r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    Vector p = r * (1.0f / 720) + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Integers exponent = __builtin_convertvector(x < -87.0f ? Vector{} : n, Integers) + 127;
    return x < -87.0f ? Vector{} : p * (Vector)(exponent << 23);
}

#ifdef __AVX512F__
inline float highest_of(Vector x) { return _mm512_reduce_max_ps((__m512)x); }
inline float sum_of(Vector x) { return _mm512_reduce_add_ps((__m512)x); }
#else
inline float highest_of(Vector x) {
    float highest = x[0];
    for (int lane = 1; lane < LANES; ++lane) highest = x[lane] > highest ? x[lane] : highest;
    return highest;
}
inline float sum_of(Vector x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += x[lane];
    return sum;
}
#endif

// What softmax makes of `count` scores times `scale` that follow others: scores become shares, up to a whole vector zeros
// follow, and `most` and `total` go on. Returns what the sums so far are multiplied by.
inline float soften(float *scores, int64_t count, float scale, float &most, float &total) {
    Integers lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    Vector high = Vector{} + most;
    for (int64_t i = 0; i < count; i += LANES) {
        Vector scaled = load(scores + i) * scale;
        if (count - i < LANES) scaled = lane < int(count - i) ? scaled : Vector{} + NOTHING;
        high = scaled > high ? scaled : high;
        store(scores + i, scaled);
    }
    const float highest = highest_of(high);
    const float base = highest == NOTHING ? 0.0f : highest; // nothing was seen so far
    const float shrink = most == NOTHING ? 0.0f : exponential(most - base);
    Vector sum = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const Vector share = exponential(load(scores + i) - base);
        sum += share;
        store(scores + i, share);
    }
    most = highest;
    total = total * shrink + sum_of(sum);
    return shrink;
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
inline void score(const float *const *queries, const T *keys, int64_t count, int64_t dim, float *scores) {
    for (int64_t begin = 0; begin < count; begin += LANES) {
        Vector products[QUERIES][LANES];
        for (int64_t column = 0; column < LANES; ++column) {
            const T *key = keys + (begin + column < count ? begin + column : count - 1) * dim;
            look_ahead(key, dim);
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
        for (int q = 0; q < QUERIES; ++q) store(scores + q * BLOCK + begin, sums(products[q]));
    }
}

// Adds shares[QUERIES][BLOCK] times `count` values [column][dim] to VECTORS vectors of sums[QUERIES][dim], shrunk first.
template <int QUERIES, int VECTORS, typename T>
inline void add_values(float *sums, const float *shrink, const float *shares, const T *values, int64_t count, int64_t dim) {
    Vector sum[QUERIES][VECTORS];
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECTORS; ++v) sum[q][v] = load(sums + q * dim + v * LANES) * shrink[q];
    for (int64_t column = 0; column < count; ++column) {
        look_ahead(values + column * dim, VECTORS * LANES);
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
        score<QUERIES>(queries, keys + begin * dim, columns, dim, scores);
        for (int q = 0; q < QUERIES; ++q) {
            float *of_query = scores + q * BLOCK;
            for (int64_t i = 0; seen && i < columns; ++i) of_query[i] = seen[begin + i] ? of_query[i] : NOTHING;
            shrink[q] = soften(of_query, columns, scale, most[q], total[q]);
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

// ---- products of few rows: they take as long as memory takes to hand over the weights ----

// A weight [outputs, depth] as oneDNN packs it: [outputs / width][depth / pair][width][pair], filled up with zeros. A
// pair is two numbers of bfloat16, or one of float.
struct Packed {
    const void *numbers;
    int64_t outputs, depth, width;
};

template <typename T> constexpr int64_t PAIR = sizeof(float) / sizeof(T);
constexpr int64_t FEW = 8, VECTORS = 2; // the rows of a pass, and the vectors of its outputs

inline Vector plus_products(Vector sum, const float *x, const float *numbers) { return sum + *x * load(numbers); }
inline Vector plus_products(Vector sum, const bfloat16 *x, const bfloat16 *numbers) {
    const Words pairs = *(const LooseWords *)numbers;
#ifdef __AVX512BF16__
    const __m512bh both = (__m512bh)_mm512_set1_epi32(*(const LooseWord *)x);
    return (Vector)_mm512_dpbf16_ps((__m512)sum, both, (__m512bh)pairs);
#else
    return sum + get(x[0]) * (Vector)(pairs << 16) + get(x[1]) * (Vector)(pairs & 0xffff0000u);
#endif
}

template <typename T>
inline void put_sums(const float *sums, int64_t row, int64_t output, int64_t most, const Packed &weight, const T *bias, T *out) {
    const int64_t left = weight.outputs - output, count = left < most ? left : most;
    T *to = out + row * weight.outputs + output;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) put(to[i], sums[i] + (bias ? get(bias[output + i]) : 0.0f));
}

// Up to ROWS rows of x [rows, depth] times the outputs from `output` on; the last row is repeated.
template <int ROWS, typename T>
void multiply(const T *x, int64_t rows, const Packed &weight, const T *bias, int64_t output, T *out) {
    const int64_t line = weight.width * PAIR<T>, before = output % weight.width;
    const T *numbers = (const T *)weight.numbers + (output - before) * weight.depth + before * PAIR<T>;
    const T *from[ROWS];
    for (int64_t row = 0; row < ROWS; ++row) from[row] = x + (row < rows ? row : rows - 1) * weight.depth;
    Vector sum[ROWS][VECTORS] = {};
    for (int64_t i = 0; i < weight.depth; i += PAIR<T>, numbers += line)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) {
            const T *vector = numbers + v * LANES * PAIR<T>;
            look_ahead(vector, LANES * PAIR<T>);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) sum[row][v] = plus_products(sum[row][v], from[row] + i, vector);
        }
    for (int64_t row = 0; row < rows; ++row)
        put_sums((const float *)sum[row], row, output, VECTORS * LANES, weight, bias, out);
}

#ifdef __AMX_BF16__
constexpr int64_t TILE = 16; // rows of a tile, and the words of each

// Linux lends a process its tiles when it asks (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
const bool has_tiles = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

// Tiles 0 to 3 hold the sums of two tiles of rows and two of outputs, 4 and 5 the rows, 6 and 7 the weights.
struct Tiles {
    explicit Tiles(int64_t rows) {
        struct alignas(64) {
            uint8_t palette = 1, rest[15] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } sizes;
        const int64_t first = rows < TILE ? rows : TILE, second = rows - first;
        const int64_t of_tile[] = {first, first, second, second, first, second, TILE, TILE};
        for (int tile = 0; tile < 8; ++tile) sizes.rows[tile] = of_tile[tile], sizes.bytes[tile] = of_tile[tile] ? 64 : 0;
        _tile_loadconfig(&sizes);
    }
    ~Tiles() { _tile_release(); }
};

// BOTH: whether there are two tiles of rows. Strides are in bytes.
template <bool BOTH> inline void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if (BOTH) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

template <bool BOTH> inline void store_sums(float *sums, int64_t stride) {
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + TILE, stride);
    if (BOTH) {
        _tile_stored(2, (char *)sums + TILE * stride, stride);
        _tile_stored(3, (char *)(sums + TILE) + TILE * stride, stride);
    }
}

// Adds the products of 2 * TILE numbers of each row with a tile of words for TILE outputs, and with the one beside it.
template <bool BOTH>
inline void add_tiles(const bfloat16 *rows, int64_t row_stride, const void *words, const void *beside, int64_t stride) {
    _tile_loadd(6, words, stride);
    _tile_loadd(7, beside, stride);
    _tile_loadd(4, rows, row_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (BOTH) {
        _tile_loadd(5, (const char *)rows + TILE * row_stride, row_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// As `multiply`, of up to 2 * TILE rows.
template <bool BOTH>
void multiply_tiles(const bfloat16 *x, int64_t rows, const Packed &weight, const bfloat16 *bias, int64_t output,
                    bfloat16 *out) {
    constexpr int64_t WIDTH = 2 * TILE, STRIDE = WIDTH * sizeof(float); // of the weight's words, and of sums
    const int64_t row_stride = weight.depth * sizeof(bfloat16);
    const char *words = (const char *)weight.numbers + output * row_stride;
    clear_sums<BOTH>();
    for (int64_t i = 0; i < weight.depth; i += 2 * TILE, words += TILE * STRIDE) {
        look_ahead(words, TILE * STRIDE);
        add_tiles<BOTH>(x + i, row_stride, words, words + STRIDE / 2, STRIDE);
    }
    float sums[2 * TILE][WIDTH];
    store_sums<BOTH>(sums[0], STRIDE);
    for (int64_t row = 0; row < rows; ++row) put_sums(sums[row], row, output, WIDTH, weight, bias, out);
}

bool product_of_tiles(const bfloat16 *x, int64_t rows, const Packed &weight, const bfloat16 *bias, bfloat16 *out,
                      int threads) {
    if (!has_tiles || rows > 2 * TILE || weight.width != 2 * TILE || weight.depth % (2 * TILE)) return false;
    const auto kernel = rows > TILE ? multiply_tiles<true> : multiply_tiles<false>;
#pragma omp parallel if (threads > 1) num_threads(threads)
    {
        const Tiles tiles(rows);
#pragma omp for
        for (int64_t output = 0; output < weight.outputs; output += weight.width) kernel(x, rows, weight, bias, output, out);
    }
    return true;
}

// ---- attention of a prompt ----

constexpr int64_t QUERIES = 2 * TILE, KEYS = 256; // tokens that look together, and columns that they look at at once

inline void store(bfloat16 *to, Vector x) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}

inline uint32_t pair_of(bfloat16 low, bfloat16 high) { return low.bits | uint32_t(high.bits) << 16; }

// Makes words of one head's keys and values, [tokens, dim] each, as if there were `columns` tokens, the last ones zeros.
// A key's word has two neighbours of one column, [columns / TILE][dim / 2][TILE]; a value's has one number of two
// columns, [columns / 2][dim].
void pack_head(const bfloat16 *keys, const bfloat16 *values, int64_t tokens, int64_t columns, int64_t dim,
               uint32_t *key_words, uint32_t *value_words) {
    constexpr bfloat16 NONE = {0};
    for (int64_t column = 0; column < columns; ++column) {
        const bfloat16 *key = keys + column * dim;
        uint32_t *to = key_words + column / TILE * TILE * (dim / 2) + column % TILE;
        for (int64_t i = 0; i < dim / 2; ++i) to[i * TILE] = column < tokens ? pair_of(key[2 * i], key[2 * i + 1]) : 0;
    }
    for (int64_t column = 0; column < columns; column += 2, value_words += dim) {
        const bfloat16 *low = values + column * dim, *high = low + dim;
        for (int64_t i = 0; i < dim; ++i)
            value_words[i] = pair_of(column < tokens ? low[i] : NONE, column + 1 < tokens ? high[i] : NONE);
    }
}

// The attention of QUERIES tokens of one head to themselves and those before, from token `first` on, of which there are
// `count`. query, out: of these, `stride` numbers from one token's to the next (FlashAttention, arXiv 2205.14135).
void attend_block(const bfloat16 *query, int64_t first, int64_t count, int64_t stride, int64_t dim, float scale,
                  const uint32_t *key_words, const uint32_t *value_words, bfloat16 *out) {
    bfloat16 rows[QUERIES * dim], shares[QUERIES][KEYS];
    float sums[QUERIES * dim], scores[QUERIES][KEYS], most[QUERIES], total[QUERIES];
    for (int64_t q = 0; q < QUERIES; ++q) {
        most[q] = NOTHING, total[q] = 0;
        for (int64_t i = 0; i < dim; ++i) rows[q * dim + i] = q < count ? query[q * stride + i] : bfloat16{0};
        for (int64_t i = 0; i < dim; ++i) sums[q * dim + i] = 0;
    }
    for (int64_t begin = 0; begin < first + count; begin += KEYS) {
        const int64_t left = first + QUERIES - begin, columns = left < KEYS ? left : KEYS;
        for (int64_t column = 0; column < columns; column += 2 * TILE) {
            const uint32_t *words = key_words + (begin + column) * (dim / 2);
            clear_sums<true>();
            for (int64_t i = 0; i < dim; i += 2 * TILE, words += TILE * TILE)
                add_tiles<true>(rows + i, dim * sizeof(bfloat16), words, words + TILE * (dim / 2), LINE);
            store_sums<true>(scores[0] + column, KEYS * sizeof(float));
        }
        for (int64_t q = 0; q < QUERIES; ++q) {
            const int64_t all = first + q + 1 - begin, seen = all < columns ? all : columns;
            const float shrink = soften(scores[q], seen, scale, most[q], total[q]);
            for (int64_t i = (seen + LANES - 1) / LANES * LANES; i < columns; i += LANES) store(scores[q] + i, Vector{});
            for (int64_t i = 0; i < columns; i += LANES) store(shares[q] + i, load(scores[q] + i));
            if (shrink != 1)
                for (int64_t i = 0; i < dim; ++i) sums[q * dim + i] *= shrink;
        }
        for (int64_t i = 0; i < dim; i += 2 * TILE) {
            const uint32_t *words = value_words + begin / 2 * dim + i;
            float *to = sums + i, *below = to + TILE * dim;
            const int64_t bytes = dim * sizeof(float);
            _tile_loadd(0, to, bytes);
            _tile_loadd(1, to + TILE, bytes);
            _tile_loadd(2, below, bytes);
            _tile_loadd(3, below + TILE, bytes);
            for (int64_t column = 0; column < columns; column += 2 * TILE, words += TILE * dim)
                add_tiles<true>(shares[0] + column, KEYS * sizeof(bfloat16), words, words + TILE, bytes);
            store_sums<true>(to, bytes);
        }
    }
    for (int64_t q = 0; q < count; ++q)
        for (int64_t i = 0; i < dim; ++i) put(out[q * stride + i], sums[q * dim + i] / total[q]);
}

bool attend_prompt(const Heads &size, const bfloat16 *query, const Cache &cache, float scale, bfloat16 *out, int threads) {
    const int64_t tokens = size.tokens, dim = size.dim, stride = size.heads * dim, group = size.heads / size.kv_heads;
    const int64_t columns = (tokens + QUERIES - 1) / QUERIES * QUERIES;
    if (!has_tiles || dim % (2 * TILE) || cache.column) return false;
#pragma omp parallel if (threads > 1) num_threads(threads)
    {
        const Tiles tiles(QUERIES);
        std::vector<uint32_t> key_words(columns * dim / 2), value_words(columns * dim / 2);
#pragma omp for
        for (int64_t place = 0; place < size.batch * size.kv_heads; ++place) {
            const int64_t row = place / size.kv_heads, head = place % size.kv_heads, at = cache.place(row, head);
            pack_head((const bfloat16 *)cache.keys + at, (const bfloat16 *)cache.values + at, tokens, columns, dim,
                      key_words.data(), value_words.data());
            for (int64_t first = 0; first < tokens; first += QUERIES)
                for (int64_t number = head * group; number < (head + 1) * group; ++number) {
                    const int64_t from = (row * tokens + first) * stride + number * dim;
                    const int64_t left = tokens - first, count = left < QUERIES ? left : QUERIES;
                    attend_block(query + from, first, count, stride, dim, scale, key_words.data(), value_words.data(),
                                 out + from);
                }
        }
    }
    return true;
}
#else
inline bool attend_prompt(const Heads &, const bfloat16 *, const Cache &, float, bfloat16 *, int) { return false; }
inline bool product_of_tiles(const bfloat16 *, int64_t, const Packed &, const bfloat16 *, bfloat16 *, int) { return false; }
#endif
inline bool product_of_tiles(const float *, int64_t, const Packed &, const float *, float *, int) { return false; }

// out [rows, outputs] = x [rows, depth] times the weight, plus bias, unless that is null. Returns false for more rows, or
// another weight, than is multiplied here.
template <typename T>
bool product(const T *x, int64_t rows, const Packed &weight, const T *bias, T *out, int threads) {
    if (product_of_tiles(x, rows, weight, bias, out, threads)) return true;
    constexpr int64_t WIDTH = VECTORS * LANES;
    if (LANES < 16 || rows > FEW || weight.width % WIDTH || weight.depth % PAIR<T>) return false;
    const auto kernel = rows == 1   ? multiply<1, T>
                        : rows == 2 ? multiply<2, T>
                        : rows <= 4 ? multiply<4, T>
                                    : multiply<FEW, T>;
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t output = 0; output < weight.outputs; output += WIDTH) kernel(x, rows, weight, bias, output, out);
    return true;
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

// Returns 0, or 1 for more rows, or another weight, than is multiplied here: then nothing was written.
int ladderize_product(int type, const void *x, int64_t rows, const Packed *weight, const void *bias, void *out,
                      int threads) {
    const bool done = type ? product((const bfloat16 *)x, rows, *weight, (const bfloat16 *)bias, (bfloat16 *)out, threads)
                           : product((const float *)x, rows, *weight, (const float *)bias, (float *)out, threads);
    return done ? 0 : 1;
}

// Attention of a prompt's tokens, each to itself and those before, all in columns from 0 on; query, out: [batch, tokens,
// heads, dim]. Returns 0; 1 where the cache does not fit; 2 for numbers or heads that have no kernel here.
int ladderize_attend_prompt(int type, const Heads *size, const void *query, const Cache *cache, float scale, void *out,
                            int threads) {
    if (!has_room(*cache, *size, size->tokens)) return 1;
    return type && attend_prompt(*size, (const bfloat16 *)query, *cache, scale, (bfloat16 *)out, threads) ? 0 : 2;
}
}
