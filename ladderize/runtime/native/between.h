// What stands between two products: norms, silu(gate) * up, sums of messages, rotated heads on their way to the KV cache.
#pragma once

#include "numbers.h"

namespace {

template <typename From, typename Weight, typename To>
inline void norm_row(const From *from, const Weight *weight, float eps, int64_t width, To *to) {
    Vector squares = {};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) squares += load(from + i) * load(from + i);
    float sum = sum_of(squares);
    for (; i < width; ++i) sum += get(from[i]) * get(from[i]);
    const float factor = 1.0f / __builtin_sqrtf(sum / float(width) + eps);
    for (i = 0; i + LANES <= width; i += LANES) store(to + i, load(from + i) * factor * load(weight + i));
    for (; i < width; ++i) put(to[i], get(from[i]) * factor * get(weight[i]));
}

template <typename T>
void rms_norm(const T *x, const T *weight, T *out, int64_t rows, int64_t width, float eps, int threads) {
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
        look_ahead(x + row * width, width);
        norm_row(x + row * width, weight, eps, width, out + row * width);
    }
}

template <typename T> void gated(const T *gate_up, T *out, int64_t rows, int64_t inner, int threads) {
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
        const T *gate = gate_up + row * 2 * inner, *up = gate + inner;
        T *to = out + row * inner;
        look_ahead(gate, 2 * inner);
#pragma omp simd
        for (int64_t i = 0; i < inner; ++i) put(to[i], silu(get(gate[i])) * get(up[i]));
    }
}

// The sum over the ranks of their messages, which lie `stride` bytes apart, rounded; then plus residual, unless that is
// null.
template <typename T>
void sum(const char *messages, int64_t stride, int64_t ranks, const T *residual, T *out, int64_t count, int threads) {
    constexpr int64_t PIECE = 1024; // numbers that a thread adds at once
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t begin = 0; begin < count; begin += PIECE) {
        const int64_t end = count - begin < PIECE ? count : begin + PIECE;
        int64_t i = begin;
        for (; i + LANES <= end; i += LANES) {
            Vector total = {};
            for (int64_t rank = 0; rank < ranks; ++rank) {
                const T *message = (const T *)(messages + rank * stride) + i;
                look_ahead(message, LANES);
                total = rank ? total + load(message) : load(message);
            }
            if (residual) {
                look_ahead(residual + i, LANES);
                total = load(residual + i) + rounded<T>(total);
            }
            store(out + i, total);
        }
        for (; i < end; ++i) {
            float total = get(((const T *)messages)[i]);
            for (int64_t rank = 1; rank < ranks; ++rank) total += get(((const T *)(messages + rank * stride))[i]);
            put(out[i], residual ? get(residual[i]) + rounded<T>(total) : total);
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

} // namespace
