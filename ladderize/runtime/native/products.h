// Products of few rows. They take as long as memory takes to hand over the weights.
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

} // namespace
