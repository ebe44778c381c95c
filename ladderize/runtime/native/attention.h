// The attention of one token of each row.
#pragma once

#include <cstddef>
#include <utility>

#include "between.h"

namespace {

constexpr float NOTHING = -__builtin_inff();
constexpr int64_t BLOCK = 64, TOGETHER = 4; // columns whose scores are held, queries that share what is loaded

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

} // namespace
