// What an engine multiplies at once: a few rows by the outputs of a block, over any depth. Engines: vectors.h, tiles.h.
#pragma once

#include "numbers.h"

namespace {

template <typename T> constexpr int64_t NUMBER = sizeof(T); // bytes
template <typename T> constexpr int64_t IN_LINE = LINE / NUMBER<T>; // numbers of a line
constexpr int64_t WORD = 4; // bytes: a pair of bfloat16, or one float

inline int64_t parts(int64_t all, int64_t most) { return (all + most - 1) / most; }

// rows: [depth / IN_LINE][the engine's ROWS][IN_LINE], so that what is read together lies in one piece. words: those of the
// depth one after the other, `stride` bytes apart, each for LANES outputs; `beside`: bytes to the next LANES outputs. The
// depth is a multiple of IN_LINE. before, sums: [ROWS][its OUTPUTS], `sum_stride` numbers from one row's to the next; what is
// before is added to, unless it is null.
template <typename T> struct Block {
    const T *rows;
    const void *words;
    int64_t beside, stride, depth;
    const float *before;
    float *sums;
    int64_t sum_stride;
    bool looks_ahead; // whether words come from memory
};

} // namespace
