// The attention of a prompt in bfloat16, by blocks (FlashAttention, arXiv 2205.14135).
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "blocks.h"

namespace {

constexpr int64_t KEYS = 256; // columns that tokens look at at once
constexpr int64_t WHOLE = IN_LINE<bfloat16>; // what columns, and a head's numbers, come in: also an engine's outputs divide it

inline uint32_t pair_of(bfloat16 low, bfloat16 high) { return low.bits | uint32_t(high.bits) << 16; }

// Makes words of one head's keys and values, [tokens, dim] each, as if there were `columns` tokens, the last ones zeros.
// A key's word has two neighbours of one column, [columns / LANES][dim / 2][LANES]; a value's has one number of two
// columns, [columns / 2][dim].
void pack_head(const bfloat16 *keys, const bfloat16 *values, int64_t tokens, int64_t columns, int64_t dim,
               uint32_t *key_words, uint32_t *value_words) {
    constexpr bfloat16 NONE = {0};
    for (int64_t column = 0; column < columns; ++column) {
        const bfloat16 *key = keys + column * dim;
        uint32_t *to = key_words + column / LANES * LANES * (dim / 2) + column % LANES;
        for (int64_t i = 0; i < dim / 2; ++i) to[i * LANES] = column < tokens ? pair_of(key[2 * i], key[2 * i + 1]) : 0;
    }
    for (int64_t column = 0; column < columns; column += 2, value_words += dim) {
        const bfloat16 *low = values + column * dim, *high = low + dim;
        for (int64_t i = 0; i < dim; ++i)
            value_words[i] = pair_of(column < tokens ? low[i] : NONE, column + 1 < tokens ? high[i] : NONE);
    }
}

// Where number i of row q lies in a block's rows.
template <typename Engine> inline int64_t at(int64_t q, int64_t i) {
    return i / WHOLE * WHOLE * Engine::ROWS + q * WHOLE + i % WHOLE;
}

// The attention of the engine's ROWS tokens of one head to themselves and those before, from token `first` on, of which
// there are `count`. query, out: of these, `stride` numbers from one token's to the next.
template <typename Engine>
void attend_block(const Engine &engine, const bfloat16 *query, int64_t first, int64_t count, int64_t stride, int64_t dim,
                  float scale, const uint32_t *key_words, const uint32_t *value_words, bfloat16 *out) {
    constexpr int64_t QUERIES = Engine::ROWS, OUTPUTS = Engine::OUTPUTS;
    alignas(LINE) bfloat16 rows[QUERIES * dim], shares[QUERIES * KEYS];
    alignas(LINE) float sums[QUERIES * dim], scores[QUERIES][KEYS];
    float most[QUERIES], total[QUERIES];
    const auto nothing = [] {};
    for (int64_t q = 0; q < QUERIES; ++q) {
        most[q] = NOTHING, total[q] = 0;
        for (int64_t i = 0; i < dim; ++i) rows[at<Engine>(q, i)] = q < count ? query[q * stride + i] : bfloat16{0};
        for (int64_t i = 0; i < dim; ++i) sums[q * dim + i] = 0;
    }
    for (int64_t begin = 0; begin < first + count; begin += KEYS) {
        const int64_t columns = std::min(parts(first + QUERIES - begin, WHOLE) * WHOLE, KEYS);
        for (int64_t column = 0; column < columns; column += OUTPUTS)
            engine.multiply({rows, key_words + (begin + column) * (dim / 2), LANES * (dim / 2) * WORD, LANES * WORD, dim,
                             nullptr, scores[0] + column, KEYS, false}, nothing);
        for (int64_t q = 0; q < QUERIES; ++q) {
            const int64_t seen = std::min(first + q + 1 - begin, columns);
            const float shrink = soften(scores[q], seen, scale, most[q], total[q]);
            for (int64_t i = parts(seen, LANES) * LANES; i < columns; i += LANES) store(scores[q] + i, Vector{});
            for (int64_t i = 0; i < columns; i += LANES) store(shares + at<Engine>(q, i), load(scores[q] + i));
            if (shrink != 1)
                for (int64_t i = 0; i < dim; ++i) sums[q * dim + i] *= shrink;
        }
        for (int64_t i = 0; i < dim; i += OUTPUTS)
            engine.multiply({shares, value_words + begin / 2 * dim + i, LANES * WORD, dim * WORD, columns, sums + i,
                             sums + i, dim, false}, nothing);
    }
    for (int64_t q = 0; q < count; ++q)
        for (int64_t i = 0; i < dim; ++i) put(out[q * stride + i], sums[q * dim + i] / total[q]);
}

// Returns false for heads of another size than the engine takes, or tokens that follow others: then nothing was done.
template <typename Engine>
bool attend_prompt(const Heads &size, const bfloat16 *query, const Cache &cache, float scale, bfloat16 *out, int threads) {
    constexpr int64_t QUERIES = Engine::ROWS;
    const int64_t tokens = size.tokens, dim = size.dim, stride = size.heads * dim, group = size.heads / size.kv_heads;
    const int64_t columns = parts(tokens, WHOLE) * WHOLE;
    if (dim % WHOLE || cache.column) return false;
#pragma omp parallel if (threads > 1) num_threads(threads)
    {
        const Engine engine(QUERIES);
        std::vector<uint32_t> key_words(columns * dim / 2), value_words(columns * dim / 2);
#pragma omp for
        for (int64_t place = 0; place < size.batch * size.kv_heads; ++place) {
            const int64_t row = place / size.kv_heads, head = place % size.kv_heads, at = cache.place(row, head);
            pack_head((const bfloat16 *)cache.keys + at, (const bfloat16 *)cache.values + at, tokens, columns, dim,
                      key_words.data(), value_words.data());
            for (int64_t first = 0; first < tokens; first += QUERIES)
                for (int64_t number = head * group; number < (head + 1) * group; ++number) {
                    const int64_t from = (row * tokens + first) * stride + number * dim;
                    attend_block(engine, query + from, first, std::min(tokens - first, QUERIES), stride, dim, scale,
                                 key_words.data(), value_words.data(), out + from);
                }
        }
    }
    return true;
}

} // namespace
