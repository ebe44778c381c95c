// Products, and the attention of a prompt, by tiles of bfloat16 (AMX).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "attention.h"
#include "products.h"

namespace {

constexpr int64_t TILE = 16; // rows of a tile, and the words of each

// Linux lends a process its tiles when it asks (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
const bool has_tiles = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

// The intrinsics for tiles do not tell GCC what they read: what was stored before could wait until after them.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// Tiles 0 to 3 hold the sums of two tiles of rows and two of outputs, 4 and 5 the rows, 6 and 7 the weights.
struct Tiles {
    explicit Tiles(int64_t rows) {
        struct alignas(64) {
            uint8_t palette = 1, rest[15] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } sizes;
        const int64_t first = rows < TILE ? rows : TILE, second = rows - first;
        const int64_t of_tile[] = {first, first, second, second, first, second, TILE, TILE};
        for (int tile = 0; tile < 8; ++tile) sizes.rows[tile] = of_tile[tile], sizes.bytes[tile] = of_tile[tile] ? 64 : 0;
        finish_stores();
        _tile_loadconfig(&sizes);
    }
    ~Tiles() { _tile_release(); }
};

// BOTH: whether there are two tiles of rows. Strides are in bytes.
template <bool BOTH> inline void clear_sums() {
    finish_stores();
    _tile_zero(0);
    _tile_zero(1);
    if (BOTH) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

template <bool BOTH> inline void load_sums(const float *sums, int64_t stride) {
    finish_stores();
    _tile_loadd(0, sums, stride);
    _tile_loadd(1, sums + TILE, stride);
    if (BOTH) {
        _tile_loadd(2, (const char *)sums + TILE * stride, stride);
        _tile_loadd(3, (const char *)(sums + TILE) + TILE * stride, stride);
    }
}

template <bool BOTH> inline void store_sums(float *sums, int64_t stride) {
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + TILE, stride);
    if (BOTH) {
        _tile_stored(2, (char *)sums + TILE * stride, stride);
        _tile_stored(3, (char *)(sums + TILE) + TILE * stride, stride);
    }
}

// Adds the products of 2 * TILE numbers of each row with a tile of words for TILE outputs, and with the one beside it.
template <bool BOTH>
inline void add_tiles(const bfloat16 *rows, int64_t row_stride, const void *words, const void *beside, int64_t stride) {
    _tile_loadd(6, words, stride);
    _tile_loadd(7, beside, stride);
    _tile_loadd(4, rows, row_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (BOTH) {
        _tile_loadd(5, (const char *)rows + TILE * row_stride, row_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// ---- products ----

// Rows are multiplied in bands of 2 * TILE, [depth / (2 * TILE)][2 * TILE][2 * TILE]: a tile lies in one piece. As many
// bands as fill half the second cache (2 MB with tiles) meet each block of a weight, so that memory hands it over once.
// Where they would be too few, the depth is cut, too, and sums of one part wait in memory for those of the next.
constexpr int64_t BAND = 2 * TILE, BANDS_BYTES = 1 << 20, MOST_DEPTH = 2048, NUMBER = sizeof(bfloat16);

inline int64_t parts(int64_t all, int64_t most) { return (all + most - 1) / most; }

template <typename T> using Lines = std::unique_ptr<T, void (*)(void *)>;
template <typename T> Lines<T> make_lines(int64_t count) { return {(T *)std::aligned_alloc(LINE, count * sizeof(T)), std::free}; }

// Sums of a band for WIDTH outputs from `output` on, and of up's, whose rows leave one by one: those before `put` are out.
struct Leaving {
    alignas(LINE) float sums[BAND][WIDTH], ups[BAND][WIDTH];
    int64_t first = 0, rows = 0, output = 0, put = 0;

    void put_rows(const Product<bfloat16> &product, int64_t count) {
        for (; count > 0 && put < rows; --count, ++put) put_sums(product, sums[put], ups[put], first + put, output);
    }
};

// Rows from `first` on, and numbers of the depth from `start` on, that are multiplied at once.
struct Part {
    int64_t first, rows, start, depth;
    int64_t bands() const { return parts(rows, BAND); }
};

class TiledProduct {
  public:
    explicit TiledProduct(const Product<bfloat16> &product) : product(product) {
        const int64_t all = parts(product.rows, BAND), band_bytes = BAND * product.weight.depth * NUMBER;
        const int64_t pieces = all * band_bytes > BANDS_BYTES ? parts(product.weight.depth, MOST_DEPTH) : 1;
        depth = parts(product.weight.depth / BAND, pieces) * BAND;
        bands = parts(all, parts(all, std::max(BANDS_BYTES / (BAND * depth * NUMBER), int64_t(1))));
        packed = make_lines<bfloat16>(bands * BAND * depth);
        if (is_cut()) waiting = make_lines<float>(parts(product.weight.outputs, WIDTH) * bands * BAND * WIDTH);
    }

    bool has_memory() const { return packed && (waiting || !is_cut()); }
    int64_t height() const { return std::min(product.rows, BAND); }
    int64_t rows_at_once() const { return bands * BAND; }
    int64_t depth_at_once() const { return depth; }
    bool ends_with(const Part &part) const { return part.start + part.depth == product.weight.depth; }

    // Packs a band; rows beyond the last one are zeros.
    void pack(const Part &part, int64_t band) const {
        const bfloat16 *x = product.x + (part.first + band * BAND) * product.weight.depth + part.start;
        bfloat16 *to = packed.get() + band * BAND * depth;
        for (int64_t row = 0; row < height(); ++row)
            for (int64_t i = 0; i < part.depth; i += BAND) {
                const bfloat16 *from = x + row * product.weight.depth + i;
                look_ahead(from, BAND);
                const bool is_there = band * BAND + row < part.rows;
                _mm512_store_si512(to + i * BAND + row * BAND, is_there ? _mm512_loadu_si512(from) : _mm512_setzero_si512());
            }
    }

    // A band times the weight's block of WIDTH outputs from `output` on; the sums go to `sums`, unless they have to wait.
    // Meanwhile those before leave: stores wait for memory, tiles need not. BOTH: whether bands have more than TILE rows.
    template <bool BOTH>
    void multiply(const Part &part, int64_t band, int64_t output, Leaving &before, float (*sums)[WIDTH]) const {
        constexpr int64_t STRIDE = WIDTH * sizeof(float); // of the words, and of sums
        const int64_t block = output / WIDTH, block_bytes = WIDTH * product.weight.depth * NUMBER;
        const char *words = (const char *)product.weight.numbers + block * block_bytes + part.start * WIDTH * NUMBER;
        // One band asks for what it reads in a moment; of several each asks for its share of the next block
        const int64_t lines = parts(BAND, part.bands()), share = lines * LINE * (part.depth / BAND);
        const char *asked = words + (part.bands() > 1 ? block_bytes + band * share : AHEAD);
        float *kept = is_cut() ? waiting.get() + (block * bands + band) * BAND * WIDTH : nullptr;
        part.start ? load_sums<BOTH>(kept, STRIDE) : clear_sums<BOTH>();
        const bfloat16 *rows = packed.get() + band * BAND * depth;
        for (int64_t i = 0; i < part.depth; i += BAND, words += TILE * STRIDE) {
            for (int64_t line = 0; line < lines; ++line, asked += LINE) __builtin_prefetch(asked);
            add_tiles<BOTH>(rows + i * BAND, LINE, words, words + STRIDE / 2, STRIDE);
            before.put_rows(product, 2);
        }
        store_sums<BOTH>(ends_with(part) ? sums[0] : kept, STRIDE);
    }

  private:
    bool is_cut() const { return depth < product.weight.depth; }

    const Product<bfloat16> product;
    int64_t bands, depth; // at once
    Lines<bfloat16> packed = {nullptr, std::free};
    Lines<float> waiting = {nullptr, std::free}; // [block][band][BAND][WIDTH]
};

bool product_of_tiles(Product<bfloat16> product, int threads) {
    const int64_t rows = product.rows, depth = product.weight.depth, outputs = product.outputs;
    if (!has_tiles || product.weight.width != WIDTH || depth % BAND) return false;
    const bool is_large = rows * outputs * NUMBER >= BANDS_BYTES;
    product.streams = is_large && outputs % WIDTH == 0 && uintptr_t(product.out) % LINE == 0;
    const TiledProduct tiled(product);
    if (!tiled.has_memory()) return false;
    const auto multiply = rows > TILE ? &TiledProduct::multiply<true> : &TiledProduct::multiply<false>;
#pragma omp parallel if (threads > 1) num_threads(threads)
    {
        const Tiles tiles(tiled.height());
        Leaving turns[2];
        int turn = 0;
        for (int64_t first = 0; first < rows; first += tiled.rows_at_once())
            for (int64_t start = 0; start < depth; start += tiled.depth_at_once()) {
                const Part part = {first, std::min(rows - first, tiled.rows_at_once()), start,
                                   std::min(depth - start, tiled.depth_at_once())};
#pragma omp for
                for (int64_t band = 0; band < part.bands(); ++band) tiled.pack(part, band);
#pragma omp for
                for (int64_t output = 0; output < outputs; output += WIDTH)
                    for (int64_t band = 0; band < part.bands(); ++band) {
                        Leaving &now = turns[turn], &before = turns[turn ^ 1];
                        (tiled.*multiply)(part, band, output, before, now.sums);
                        if (product.gated) (tiled.*multiply)(part, band, outputs + output, before, now.ups);
                        before.put_rows(product, BAND);
                        if (!tiled.ends_with(part)) continue;
                        now.first = first + band * BAND, now.rows = std::min(part.rows - band * BAND, BAND);
                        now.output = output, now.put = 0;
                        turn ^= 1;
                    }
            }
        turns[turn ^ 1].put_rows(product, BAND);
        if (product.streams) _mm_sfence();
    }
    return true;
}

// ---- attention of a prompt ----

constexpr int64_t QUERIES = 2 * TILE, KEYS = 256; // tokens that look together, and columns that they look at at once

inline uint32_t pair_of(bfloat16 low, bfloat16 high) { return low.bits | uint32_t(high.bits) << 16; }

// Makes words of one head's keys and values, [tokens, dim] each, as if there were `columns` tokens, the last ones zeros.
// A key's word has two neighbours of one column, [columns / TILE][dim / 2][TILE]; a value's has one number of two
// columns, [columns / 2][dim].
void pack_head(const bfloat16 *keys, const bfloat16 *values, int64_t tokens, int64_t columns, int64_t dim,
               uint32_t *key_words, uint32_t *value_words) {
    constexpr bfloat16 NONE = {0};
    for (int64_t column = 0; column < columns; ++column) {
        const bfloat16 *key = keys + column * dim;
        uint32_t *to = key_words + column / TILE * TILE * (dim / 2) + column % TILE;
        for (int64_t i = 0; i < dim / 2; ++i) to[i * TILE] = column < tokens ? pair_of(key[2 * i], key[2 * i + 1]) : 0;
    }
    for (int64_t column = 0; column < columns; column += 2, value_words += dim) {
        const bfloat16 *low = values + column * dim, *high = low + dim;
        for (int64_t i = 0; i < dim; ++i)
            value_words[i] = pair_of(column < tokens ? low[i] : NONE, column + 1 < tokens ? high[i] : NONE);
    }
}

// The attention of QUERIES tokens of one head to themselves and those before, from token `first` on, of which there are
// `count`. query, out: of these, `stride` numbers from one token's to the next (FlashAttention, arXiv 2205.14135).
void attend_block(const bfloat16 *query, int64_t first, int64_t count, int64_t stride, int64_t dim, float scale,
                  const uint32_t *key_words, const uint32_t *value_words, bfloat16 *out) {
    bfloat16 rows[QUERIES * dim], shares[QUERIES][KEYS];
    float sums[QUERIES * dim], scores[QUERIES][KEYS], most[QUERIES], total[QUERIES];
    for (int64_t q = 0; q < QUERIES; ++q) {
        most[q] = NOTHING, total[q] = 0;
        for (int64_t i = 0; i < dim; ++i) rows[q * dim + i] = q < count ? query[q * stride + i] : bfloat16{0};
        for (int64_t i = 0; i < dim; ++i) sums[q * dim + i] = 0;
    }
    for (int64_t begin = 0; begin < first + count; begin += KEYS) {
        const int64_t left = first + QUERIES - begin, columns = left < KEYS ? left : KEYS;
        for (int64_t column = 0; column < columns; column += 2 * TILE) {
            const uint32_t *words = key_words + (begin + column) * (dim / 2);
            clear_sums<true>();
            for (int64_t i = 0; i < dim; i += 2 * TILE, words += TILE * TILE)
                add_tiles<true>(rows + i, dim * sizeof(bfloat16), words, words + TILE * (dim / 2), LINE);
            store_sums<true>(scores[0] + column, KEYS * sizeof(float));
        }
        for (int64_t q = 0; q < QUERIES; ++q) {
            const int64_t all = first + q + 1 - begin, seen = all < columns ? all : columns;
            const float shrink = soften(scores[q], seen, scale, most[q], total[q]);
            for (int64_t i = (seen + LANES - 1) / LANES * LANES; i < columns; i += LANES) store(scores[q] + i, Vector{});
            for (int64_t i = 0; i < columns; i += LANES) store(shares[q] + i, load(scores[q] + i));
            if (shrink != 1)
                for (int64_t i = 0; i < dim; ++i) sums[q * dim + i] *= shrink;
        }
        for (int64_t i = 0; i < dim; i += 2 * TILE) {
            const uint32_t *words = value_words + begin / 2 * dim + i;
            float *to = sums + i;
            const int64_t bytes = dim * sizeof(float);
            load_sums<true>(to, bytes);
            for (int64_t column = 0; column < columns; column += 2 * TILE, words += TILE * dim)
                add_tiles<true>(shares[0] + column, KEYS * sizeof(bfloat16), words, words + TILE, bytes);
            store_sums<true>(to, bytes);
        }
    }
    for (int64_t q = 0; q < count; ++q)
        for (int64_t i = 0; i < dim; ++i) put(out[q * stride + i], sums[q * dim + i] / total[q]);
}

bool attend_prompt(const Heads &size, const bfloat16 *query, const Cache &cache, float scale, bfloat16 *out, int threads) {
    const int64_t tokens = size.tokens, dim = size.dim, stride = size.heads * dim, group = size.heads / size.kv_heads;
    const int64_t columns = (tokens + QUERIES - 1) / QUERIES * QUERIES;
    if (!has_tiles || dim % (2 * TILE) || cache.column) return false;
#pragma omp parallel if (threads > 1) num_threads(threads)
    {
        const Tiles tiles(QUERIES);
        std::vector<uint32_t> key_words(columns * dim / 2), value_words(columns * dim / 2);
#pragma omp for
        for (int64_t place = 0; place < size.batch * size.kv_heads; ++place) {
            const int64_t row = place / size.kv_heads, head = place % size.kv_heads, at = cache.place(row, head);
            pack_head((const bfloat16 *)cache.keys + at, (const bfloat16 *)cache.values + at, tokens, columns, dim,
                      key_words.data(), value_words.data());
            for (int64_t first = 0; first < tokens; first += QUERIES)
                for (int64_t number = head * group; number < (head + 1) * group; ++number) {
                    const int64_t from = (row * tokens + first) * stride + number * dim;
                    const int64_t left = tokens - first, count = left < QUERIES ? left : QUERIES;
                    attend_block(query + from, first, count, stride, dim, scale, key_words.data(), value_words.data(),
                                 out + from);
                }
        }
    }
    return true;
}

} // namespace
