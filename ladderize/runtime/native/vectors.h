// The engine of a processor without tiles: the sums of a block stay in registers.
#pragma once

#include "blocks.h"

namespace {

constexpr uint32_t HIGH = 0xffff0000; // of a pair of bfloat16

inline Vector plus_products(Vector sum, const float *x, const float *numbers) { return sum + *x * load(numbers); }
inline Vector plus_products(Vector sum, const bfloat16 *x, const bfloat16 *numbers) {
    const Words pairs = *(const LooseWords *)numbers, both = Words{} + *(const LooseWord *)x;
#ifdef __AVX512BF16__
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)both, (__m512bh)pairs);
#else
    return sum + (Vector)(both << 16) * (Vector)(pairs << 16) + (Vector)(both & HIGH) * (Vector)(pairs & HIGH);
#endif
}

template <typename T, int HEIGHT> struct Vectors {
    using Number = T;
    static constexpr int64_t ROWS = HEIGHT, VECTORS = 2, OUTPUTS = VECTORS * LANES;
    static constexpr int64_t BYTES = 1 << 19; // of rows that wait for their turn: half the second cache
    static constexpr int64_t ROWS_MEANWHILE = 0;
    static constexpr int NEAR = 2; // the next block of a weight waits in the second cache: the first one is too small

    explicit Vectors(int64_t) {}

    // meanwhile: called for each line of the depth.
    template <typename Meanwhile> void multiply(const Block<T> &block, Meanwhile meanwhile) const {
        Vector sums[ROWS][VECTORS];
        for (int64_t row = 0; row < ROWS; ++row)
            for (int64_t v = 0; v < VECTORS; ++v)
                sums[row][v] = block.before ? load(block.before + row * block.sum_stride + v * LANES) : Vector{};
        const T *rows = block.rows;
        const char *words = (const char *)block.words;
        for (int64_t i = 0; i < block.depth; i += IN_LINE<T>, rows += ROWS * IN_LINE<T>) {
            meanwhile();
            for (int64_t word = 0; word < LINE / WORD; ++word, words += block.stride)
#pragma GCC unroll 2
                for (int64_t v = 0; v < VECTORS; ++v) {
                    const T *numbers = (const T *)(words + v * block.beside);
                    if (block.looks_ahead) look_ahead(numbers, LANES * WORD / NUMBER<T>);
#pragma GCC unroll 8
                    for (int64_t row = 0; row < ROWS; ++row)
                        sums[row][v] = plus_products(
                            sums[row][v], rows + row * IN_LINE<T> + word * (WORD / NUMBER<T>), numbers);
                }
        }
        for (int64_t row = 0; row < ROWS; ++row)
            for (int64_t v = 0; v < VECTORS; ++v) store(block.sums + row * block.sum_stride + v * LANES, sums[row][v]);
    }
};

} // namespace
