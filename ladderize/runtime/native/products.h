// Products with a packed weight, by blocks. Those of few rows take as long as memory takes to hand over the weight.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "blocks.h"

namespace {

// A weight [outputs, depth] as oneDNN packs it: [outputs / width][depth / pair][width][pair], filled up with zeros. A
// pair is two numbers of bfloat16, or one of float.
struct Packed {
    const void *numbers;
    int64_t outputs, depth, width;
};

// out [rows, outputs] = x [rows, depth] times the weight, plus bias, unless that is null. With `gated` the weight has gate's
// outputs and then as many of up, and out is silu(gate) * up.
template <typename T> struct Product {
    const T *x;
    int64_t rows;
    const Packed &weight;
    const T *bias;
    bool gated;
    T *out;
    int64_t outputs = gated ? weight.outputs / 2 : weight.outputs;
    bool streams = false; // whether out goes to memory past the caches, where it would push out what they hold
};

// Puts a row's sums of `width` outputs from `output` on; ups: the same of up, where it is gated, which fills its last block.
template <typename T>
inline void put_sums(const Product<T> &product, const float *sums, const float *ups, int64_t width, int64_t row, int64_t output) {
    const T *bias = product.bias ? product.bias + output : nullptr;
    T *to = product.out + row * product.outputs + output;
    if (product.outputs - output < width) {
        for (int64_t i = 0; i < product.outputs - output; ++i) put(to[i], sums[i] + (bias ? get(bias[i]) : 0.0f));
        return;
    }
    for (int64_t i = 0; i < width; i += LANES) {
        Vector sum = load(sums + i);
        if (bias) sum += load(bias + i);
        if (product.gated) {
            Vector up = load(ups + i);
            if (bias) up += load(bias + product.outputs + i);
            sum = silu(sum) * up;
        }
        product.streams ? stream(to + i, sum) : store(to + i, sum);
    }
}

template <typename T> using Lines = std::unique_ptr<T, void (*)(void *)>;
template <typename T> Lines<T> make_lines(int64_t count) { return {(T *)std::aligned_alloc(LINE, count * sizeof(T)), std::free}; }

// Rows from `first` on, and numbers of the depth from `start` on, that are multiplied at once.
struct Part {
    int64_t first, rows, start, depth;
};

// Rows are multiplied in bands of the engine's ROWS. As many as its BYTES hold meet each block of a weight, so that memory
// hands it over once. Where they would be too few, the depth is cut, too, and sums of one part wait in memory for those of
// the next.
template <typename Engine> class BandedProduct {
    using T = typename Engine::Number;
    static constexpr int64_t ROWS = Engine::ROWS, OUTPUTS = Engine::OUTPUTS, MOST_DEPTH = 2048;

  public:
    // Sums of a band for OUTPUTS outputs from `output` on, and of up's; they leave row by row: those before `put` are out.
    struct Leaving {
        alignas(LINE) float sums[ROWS][OUTPUTS], ups[ROWS][OUTPUTS];
        int64_t first = 0, rows = 0, output = 0, put = 0;

        void put_rows(const Product<T> &product, int64_t count) {
            for (; count > 0 && put < rows; --count, ++put) put_sums(product, sums[put], ups[put], OUTPUTS, first + put, output);
        }
    };

    explicit BandedProduct(const Product<T> &product) : product(product) {
        const int64_t all = bands(product.rows), band_bytes = ROWS * product.weight.depth * NUMBER<T>;
        const int64_t pieces = all * band_bytes > Engine::BYTES ? parts(product.weight.depth, MOST_DEPTH) : 1;
        depth = parts(product.weight.depth / IN_LINE<T>, pieces) * IN_LINE<T>;
        at_once = parts(all, parts(all, std::max(Engine::BYTES / (ROWS * depth * NUMBER<T>), int64_t(1))));
        packed = make_lines<T>(at_once * ROWS * depth);
        if (is_cut()) waiting = make_lines<float>(parts(product.weight.outputs, OUTPUTS) * at_once * ROWS * OUTPUTS);
    }

    bool has_memory() const { return packed && (waiting || !is_cut()); }
    int64_t rows_at_once() const { return at_once * ROWS; }
    int64_t depth_at_once() const { return depth; }
    int64_t bands(int64_t rows) const { return parts(rows, ROWS); }
    bool ends_with(const Part &part) const { return part.start + part.depth == product.weight.depth; }

    // Packs a band; rows beyond the last one are zeros.
    void pack(const Part &part, int64_t band) const {
        const T *x = product.x + (part.first + band * ROWS) * product.weight.depth + part.start;
        T *to = packed.get() + band * ROWS * depth;
        for (int64_t row = 0; row < ROWS; ++row)
            for (int64_t i = 0; i < part.depth; i += IN_LINE<T>) {
                const T *from = x + row * product.weight.depth + i;
                look_ahead(from, IN_LINE<T>);
                T *line = to + i * ROWS + row * IN_LINE<T>;
                if (band * ROWS + row < part.rows)
                    __builtin_memcpy(line, from, LINE);
                else
                    __builtin_memset(line, 0, LINE);
            }
    }

    // A band times the weight's block of outputs from `output` on; the sums go to `sums`, unless they have to wait.
    // Meanwhile some of those before leave.
    void multiply(const Engine &engine, const Part &part, int64_t band, int64_t output, Leaving &before, float *sums) const {
        constexpr int64_t STRIDE = OUTPUTS * WORD;
        const int64_t number = output / OUTPUTS, bytes = OUTPUTS * product.weight.depth * NUMBER<T>;
        const char *words = (const char *)product.weight.numbers + number * bytes + part.start * OUTPUTS * NUMBER<T>;
        // One band asks for what it reads in a moment; of several each asks for its share of the next block
        const int64_t all = bands(part.rows), lines = parts(OUTPUTS, all), share = lines * LINE * (part.depth / IN_LINE<T>);
        const char *asked = words + (all > 1 ? bytes + band * share : AHEAD);
        float *kept = is_cut() ? waiting.get() + (number * at_once + band) * ROWS * OUTPUTS : nullptr;
        const T *rows = packed.get() + band * ROWS * depth;
        float *to = ends_with(part) ? sums : kept;
        engine.multiply({rows, words, LANES * WORD, STRIDE, part.depth, part.start ? kept : nullptr, to, OUTPUTS}, [&] {
            for (int64_t line = 0; line < lines; ++line, asked += LINE) __builtin_prefetch(asked, 0, Engine::NEAR);
            before.put_rows(product, Engine::ROWS_MEANWHILE);
        });
    }

  private:
    bool is_cut() const { return depth < product.weight.depth; }

    const Product<T> product;
    int64_t at_once, depth; // bands, and numbers of the depth
    Lines<T> packed = {nullptr, std::free};
    Lines<float> waiting = {nullptr, std::free}; // [block][band][ROWS][OUTPUTS]
};

// Returns false where the weight, or memory, is not made for the engine: then nothing was done.
template <typename Engine, typename T> bool multiply(Product<T> product, int threads) {
    constexpr int64_t OUTPUTS = Engine::OUTPUTS;
    const int64_t rows = product.rows, depth = product.weight.depth, outputs = product.outputs;
    if (product.weight.width != OUTPUTS || depth % IN_LINE<T> || (product.gated && outputs % OUTPUTS)) return false;
    const bool is_large = rows * outputs * NUMBER<T> >= 1 << 20;
    product.streams = is_large && outputs % OUTPUTS == 0 && uintptr_t(product.out) % LINE == 0;
    const BandedProduct<Engine> banded(product);
    if (!banded.has_memory()) return false;
#pragma omp parallel if (threads > 1) num_threads(threads)
    {
        const Engine engine(rows);
        typename BandedProduct<Engine>::Leaving turns[2];
        int turn = 0;
        for (int64_t first = 0; first < rows; first += banded.rows_at_once())
            for (int64_t start = 0; start < depth; start += banded.depth_at_once()) {
                const Part part = {first, std::min(rows - first, banded.rows_at_once()), start,
                                   std::min(depth - start, banded.depth_at_once())};
                const int64_t bands = banded.bands(part.rows);
#pragma omp for
                for (int64_t band = 0; band < bands; ++band) banded.pack(part, band);
#pragma omp for
                for (int64_t output = 0; output < outputs; output += OUTPUTS)
                    for (int64_t band = 0; band < bands; ++band) {
                        auto &now = turns[turn], &before = turns[turn ^ 1];
                        banded.multiply(engine, part, band, output, before, now.sums[0]);
                        if (product.gated) banded.multiply(engine, part, band, outputs + output, before, now.ups[0]);
                        before.put_rows(product, Engine::ROWS);
                        if (!banded.ends_with(part)) continue;
                        now.first = first + band * Engine::ROWS, now.rows = std::min(part.rows - band * Engine::ROWS, Engine::ROWS);
                        now.output = output, now.put = 0;
                        turn ^= 1;
                    }
            }
        turns[turn ^ 1].put_rows(product, Engine::ROWS);
        if (product.streams) finish_streams();
    }
    return true;
}

} // namespace
