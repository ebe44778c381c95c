// What an engine multiplies at once: a few rows by the outputs of a block, over any depth. Engines: vectors.h, tiles.h.
#pragma once

#include "numbers.h"

namespace {

template <typename T> constexpr int64_t NUMBER = sizeof(T); // bytes
template <typename T> constexpr int64_t IN_LINE = LINE / NUMBER<T>; // numbers of a line
constexpr int64_t WORD = 4; // bytes: a pair of bfloat16, or one float

inline int64_t parts(int64_t all, int64_t most) { return (all + most - 1) / most; }

template <typename T> struct Block {
    const T *rows; // [depth / IN_LINE][the engine's ROWS][IN_LINE]: what is read together lies in one piece
    const void *words; // of the depth one after the other, each for LANES outputs
    int64_t beside, stride; // bytes to the words of the next LANES outputs, to the next word
    int64_t depth; // a multiple of IN_LINE
    const float *before; // sums that are added to; null: none
    float *sums; // [ROWS][the engine's OUTPUTS]
    int64_t sum_stride; // numbers from one row's sums to the next
    bool looks_ahead; // whether words come from memory
};

} // namespace
