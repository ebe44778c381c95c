// Products with a packed weight, by blocks. Those of few rows take as long as memory takes to hand over the weight.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "blocks.h"

namespace {

constexpr int64_t WIDTH = 2 * LANES; // outputs of a block

// A weight [outputs, depth] as layers.py packs it: [outputs / WIDTH][depth / pair][WIDTH][pair], filled up with zeros to
// whole blocks, and to whole lines of the depth. A pair is two numbers of bfloat16, or one of float.
struct Packed {
    const void *numbers;
    int64_t outputs, depth;
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

// Puts a row's sums of WIDTH outputs from `output` on; ups: the same of up, where it is gated, which fills its last block.
template <typename T>
inline void put_sums(const Product<T> &product, const float *sums, const float *ups, int64_t row, int64_t output) {
    const T *bias = product.bias ? product.bias + output : nullptr;
    T *to = product.out + row * product.outputs + output;
    if (product.outputs - output < WIDTH) {
        for (int64_t i = 0; i < product.outputs - output; ++i) put(to[i], sums[i] + (bias ? get(bias[i]) : 0.0f));
        return;
    }
    for (int64_t i = 0; i < WIDTH; i += LANES) {
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
    static constexpr int64_t ROWS = Engine::ROWS, MOST_DEPTH = 4096 / NUMBER<T>;

  public:
    // Sums of a band for WIDTH outputs from `output` on, and of up's; they leave row by row: those before `put` are out.
    struct Leaving {
        alignas(LINE) float sums[ROWS][WIDTH], ups[ROWS][WIDTH];
        int64_t first = 0, rows = 0, output = 0, put = 0;

        void begin(int64_t row, int64_t count, int64_t block) { first = row, rows = count, output = block, put = 0; }
        void put_rows(const Product<T> &product, int64_t count) {
            for (; count > 0 && put < rows; --count, ++put) put_sums(product, sums[put], ups[put], first + put, output);
        }
    };

    explicit BandedProduct(const Product<T> &product)
        : product(product), whole(parts(product.weight.depth, IN_LINE<T>) * IN_LINE<T>) {
        const int64_t all = parts(product.rows, ROWS), band_bytes = ROWS * whole * NUMBER<T>;
        const int64_t pieces = all * band_bytes > Engine::BYTES ? parts(whole, MOST_DEPTH) : 1;
        depth = parts(whole / IN_LINE<T>, pieces) * IN_LINE<T>;
        bands = parts(all, parts(all, std::max(Engine::BYTES / (ROWS * depth * NUMBER<T>), int64_t(1))));
        packed = make_lines<T>(bands * ROWS * depth);
        if (is_cut()) waiting = make_lines<float>(parts(product.weight.outputs, WIDTH) * bands * ROWS * WIDTH);
    }

    bool has_memory() const { return packed && (waiting || !is_cut()); }

    void multiply_all(const Engine &engine) const {
        Leaving turns[2];
        int turn = 0;
        for (int64_t first = 0; first < product.rows; first += bands * ROWS)
            for (int64_t start = 0; start < whole; start += depth) {
                const Part part = {first, std::min(product.rows - first, bands * ROWS), start, std::min(whole - start, depth)};
                const int64_t count = parts(part.rows, ROWS);
#pragma omp for
                for (int64_t band = 0; band < count; ++band) pack(part, band);
#pragma omp for
                for (int64_t output = 0; output < product.outputs; output += WIDTH)
                    for (int64_t band = 0; band < count; ++band) {
                        Leaving &now = turns[turn], &before = turns[turn ^ 1];
                        multiply(engine, part, band, output, before, now.sums[0]);
                        if (product.gated) multiply(engine, part, band, product.outputs + output, before, now.ups[0]);
                        before.put_rows(product, ROWS);
                        if (!ends_with(part)) continue;
                        now.begin(first + band * ROWS, std::min(part.rows - band * ROWS, ROWS), output);
                        turn ^= 1;
                    }
            }
        turns[turn ^ 1].put_rows(product, ROWS);
        if (product.streams) finish_streams();
    }

  private:
    bool is_cut() const { return depth < whole; }
    bool ends_with(const Part &part) const { return part.start + part.depth == whole; }

    // Packs a band; what is beyond the last row, or the depth, is zeros.
    void pack(const Part &part, int64_t band) const {
        for (int64_t row = 0; row < ROWS; ++row) {
            const bool is_there = band * ROWS + row < part.rows;
            const T *x = product.x + (part.first + band * ROWS + row) * product.weight.depth;
            T *line = packed.get() + band * ROWS * depth + row * IN_LINE<T>;
            for (int64_t i = part.start; i < part.start + part.depth; i += IN_LINE<T>, line += ROWS * IN_LINE<T>) {
                const int64_t left = is_there ? product.weight.depth - i : 0;
                if (left >= IN_LINE<T>) {
                    look_ahead(x + i, IN_LINE<T>);
                    __builtin_memcpy(line, x + i, LINE);
                } else {
                    __builtin_memset(line, 0, LINE);
                    __builtin_memcpy(line, x + i, left * NUMBER<T>);
                }
            }
        }
    }

    // A band times the weight's block of outputs from `output` on; the sums go to `sums`, unless they have to wait.
    // Meanwhile some of those before leave.
    void multiply(const Engine &engine, const Part &part, int64_t band, int64_t output, Leaving &before, float *sums) const {
        const int64_t block = output / WIDTH, count = parts(part.rows, ROWS);
        const char *numbers = (const char *)product.weight.numbers + block * WIDTH * whole * NUMBER<T>;
        const char *words = numbers + part.start * WIDTH * NUMBER<T>;
        // One band asks for what it reads in a moment; several meanwhile ask for the next block, each for its share
        const int64_t lines = count > 1 ? parts(WIDTH, count) : 0;
        const char *asked = words + (WIDTH * whole * NUMBER<T>) + band * lines * LINE * (part.depth / IN_LINE<T>);
        float *kept = is_cut() ? waiting.get() + (block * bands + band) * ROWS * WIDTH : nullptr;
        const Block<T> read = {packed.get() + band * ROWS * depth, words, LANES * WORD, WIDTH * WORD, part.depth,
                               part.start ? kept : nullptr, ends_with(part) ? sums : kept, WIDTH, count == 1};
        engine.multiply(read, [&] {
            for (int64_t line = 0; line < lines; ++line, asked += LINE) __builtin_prefetch(asked, 0, Engine::NEAR);
            before.put_rows(product, Engine::ROWS_MEANWHILE);
        });
    }

    const Product<T> product;
    const int64_t whole; // the depth in whole lines
    int64_t depth, bands; // at once
    Lines<T> packed = {nullptr, std::free};
    Lines<float> waiting = {nullptr, std::free}; // [block][band][ROWS][WIDTH]
};

// Returns false where memory is short: then nothing was done.
template <typename Engine, typename T> bool multiply(Product<T> product, int threads) {
    static_assert(Engine::OUTPUTS == WIDTH);
    const bool is_large = product.rows * product.outputs * NUMBER<T> >= 1 << 20;
    product.streams = is_large && product.outputs % WIDTH == 0 && uintptr_t(product.out) % LINE == 0;
    const BandedProduct<Engine> banded(product);
    if (!banded.has_memory()) return false;
#pragma omp parallel if (threads > 1) num_threads(threads)
    banded.multiply_all(Engine(product.rows));
    return true;
}

} // namespace
