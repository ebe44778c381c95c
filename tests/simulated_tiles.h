// Tiles (AMX) in plain C++, so that native/tiles.h runs on a processor that has none: g++ -include simulated_tiles.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_BF16__ 1
#define syscall(...) 0L // Linux lends them

namespace simulated {

struct Sizes {
    uint8_t palette, start, rest[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};
thread_local Sizes sizes;
thread_local char tiles[8][16][64];

inline void load(int tile, const void *from, int64_t stride) {
    for (int row = 0; row < sizes.rows[tile]; ++row)
        std::memcpy(tiles[tile][row], (const char *)from + row * stride, sizes.bytes[tile]);
}

inline void store(int tile, void *to, int64_t stride) {
    for (int row = 0; row < sizes.rows[tile]; ++row)
        std::memcpy((char *)to + row * stride, tiles[tile][row], sizes.bytes[tile]);
}

inline float number(const char *from) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}

inline void add_products(int sums, int rows, int words) {
    for (int row = 0; row < sizes.rows[sums]; ++row)
        for (int output = 0; output < sizes.bytes[sums] / 4; ++output) {
            float sum;
            std::memcpy(&sum, tiles[sums][row] + 4 * output, 4);
            for (int word = 0; word < sizes.bytes[rows] / 4; ++word)
                for (int half = 0; half < 4; half += 2)
                    sum += number(tiles[rows][row] + 4 * word + half) * number(tiles[words][word] + 4 * output + half);
            std::memcpy(tiles[sums][row] + 4 * output, &sum, 4);
        }
}

} // namespace simulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) std::memcpy(&simulated::sizes, from, sizeof(simulated::Sizes))
#define _tile_release() std::memset(&simulated::sizes, 0, sizeof(simulated::Sizes))
#define _tile_zero(tile) std::memset(simulated::tiles[tile], 0, sizeof simulated::tiles[tile])
#define _tile_loadd(tile, from, stride) simulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) simulated::store(tile, to, stride)
#define _tile_dpbf16ps(sums, rows, words) simulated::add_products(sums, rows, words)
