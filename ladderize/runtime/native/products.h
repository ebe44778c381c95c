// Products with a packed weight; those of few rows by vectors. They take as long as memory takes to hand over the weights.
#pragma once

#include "numbers.h"

namespace {

// A weight [outputs, depth] as oneDNN packs it: [outputs / width][depth / pair][width][pair], filled up with zeros. A
// pair is two numbers of bfloat16, or one of float.
struct Packed {
    const void *numbers;
    int64_t outputs, depth, width;
};

template <typename T> constexpr int64_t PAIR = sizeof(float) / sizeof(T);
constexpr int64_t FEW = 8, VECTORS = 2, WIDTH = VECTORS * LANES; // the rows of a pass, and its outputs

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

// The sums of up to ROWS rows for WIDTH of the weight's outputs from `output` on; the last row is repeated.
template <int ROWS, typename T> void add_products(const Product<T> &product, int64_t output, float (*sums)[WIDTH]) {
    const Packed &weight = product.weight;
    const int64_t line = weight.width * PAIR<T>, before = output % weight.width;
    const T *numbers = (const T *)weight.numbers + (output - before) * weight.depth + before * PAIR<T>;
    const T *from[ROWS];
    for (int64_t row = 0; row < ROWS; ++row)
        from[row] = product.x + (row < product.rows ? row : product.rows - 1) * weight.depth;
    Vector sum[ROWS][VECTORS] = {};
    for (int64_t i = 0; i < weight.depth; i += PAIR<T>, numbers += line)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) {
            const T *vector = numbers + v * LANES * PAIR<T>;
            look_ahead(vector, LANES * PAIR<T>);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) sum[row][v] = plus_products(sum[row][v], from[row] + i, vector);
        }
    __builtin_memcpy(sums, sum, sizeof sum);
}

template <int ROWS, typename T> void multiply_rows(const Product<T> &product, int64_t output) {
    float sums[ROWS][WIDTH], ups[ROWS][WIDTH];
    add_products<ROWS>(product, output, sums);
    if (product.gated) add_products<ROWS>(product, product.outputs + output, ups);
    for (int64_t row = 0; row < product.rows; ++row) put_sums(product, sums[row], ups[row], row, output);
}

} // namespace
