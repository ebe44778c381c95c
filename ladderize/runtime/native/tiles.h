// The engine of a processor with tiles of bfloat16 (AMX): the sums of a block stay in tiles.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "blocks.h"

namespace {

constexpr int64_t TILE = 16; // rows of a tile, and the words of each

// Linux lends a process its tiles when it asks (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
const bool has_tiles = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

// The intrinsics for tiles do not tell GCC what they read: what was stored before could wait until after them.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// Tiles 0 to 3 hold the sums of two tiles of rows and two of outputs, 4 and 5 the rows, 6 and 7 the weights.
struct Tiles {
    using Number = bfloat16;
    static constexpr int64_t ROWS = 2 * TILE, OUTPUTS = 2 * TILE;
    static constexpr int64_t BYTES = 1 << 20; // of rows that wait for their turn: half the second cache, which has 2 MB
    static constexpr int64_t ROWS_MEANWHILE = 2; // that leave beside a line: stores wait for memory, tiles need not
    static constexpr int NEAR = 3;

    // rows: of each block; the others have zeros.
    explicit Tiles(int64_t rows) : has_two(rows > TILE) {
        struct alignas(64) {
            uint8_t palette = 1, rest[15] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } sizes;
        const int64_t first = rows < TILE ? rows : TILE, second = (rows < ROWS ? rows : ROWS) - first;
        const int64_t of_tile[] = {first, first, second, second, first, second, TILE, TILE};
        for (int tile = 0; tile < 8; ++tile) sizes.rows[tile] = of_tile[tile], sizes.bytes[tile] = of_tile[tile] ? 64 : 0;
        finish_stores();
        _tile_loadconfig(&sizes);
    }
    ~Tiles() { _tile_release(); }

    // meanwhile: called for each line of the depth.
    template <typename Meanwhile> void multiply(const Block<bfloat16> &block, Meanwhile meanwhile) const {
        has_two ? multiply<true>(block, meanwhile) : multiply<false>(block, meanwhile);
    }

  private:
    template <bool TWO, typename Meanwhile> void multiply(const Block<bfloat16> &block, Meanwhile meanwhile) const {
        const int64_t stride = block.stride, sum_bytes = block.sum_stride * sizeof(float);
        const float *const before = block.before;
        float *const sums = block.sums, *const below = sums + TILE * block.sum_stride;
        finish_stores();
        if (before) {
            _tile_loadd(0, before, sum_bytes);
            _tile_loadd(1, before + TILE, sum_bytes);
            if (TWO) {
                _tile_loadd(2, before + TILE * block.sum_stride, sum_bytes);
                _tile_loadd(3, before + TILE * block.sum_stride + TILE, sum_bytes);
            }
        } else {
            _tile_zero(0);
            _tile_zero(1);
            if (TWO) {
                _tile_zero(2);
                _tile_zero(3);
            }
        }
        const bfloat16 *rows = block.rows;
        const char *words = (const char *)block.words;
        for (int64_t i = 0; i < block.depth; i += 2 * TILE, rows += ROWS * 2 * TILE, words += TILE * stride) {
            if (block.looks_ahead) look_ahead(words, TILE * stride);
            _tile_loadd(6, words, stride);
            _tile_loadd(7, words + block.beside, stride);
            _tile_loadd(4, rows, LINE);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (TWO) {
                _tile_loadd(5, rows + TILE * 2 * TILE, LINE);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            meanwhile();
        }
        _tile_stored(0, sums, sum_bytes);
        _tile_stored(1, sums + TILE, sum_bytes);
        if (TWO) {
            _tile_stored(2, below, sum_bytes);
            _tile_stored(3, below + TILE, sum_bytes);
        }
    }

    const bool has_two;
};

} // namespace
