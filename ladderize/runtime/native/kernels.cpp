// The kernels for a CPU that library.py compiles and describes to Python. Numbers are float (type 0) or bfloat16 (type 1);
// sums, roots and exponentials are in float. NaN and infinities pass through.

#include "attention.h"
#include "between.h"
#include "products.h"
#ifdef __AMX_BF16__
#include "tiles.h"
#endif

namespace {

// Without tiles, and for float, nothing is done by them.
template <typename T> bool product_of_tiles(const Product<T> &, int) { return false; }
template <typename T> bool attend_prompt(const Heads &, const T *, const Cache &, float, T *, int) { return false; }

// Returns false for more rows, or another weight, than is multiplied here.
template <typename T> bool multiply(const Product<T> &product, int threads) {
    if (product.gated && product.weight.outputs % (2 * WIDTH)) return false;
    if (product_of_tiles(product, threads)) return true;
    const int64_t rows = product.rows;
    if (LANES < 16 || rows > FEW || product.weight.width % WIDTH || product.weight.depth % PAIR<T>) return false;
    const auto kernel = rows == 1   ? multiply_rows<1, T>
                        : rows == 2 ? multiply_rows<2, T>
                        : rows <= 4 ? multiply_rows<4, T>
                                    : multiply_rows<FEW, T>;
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t output = 0; output < product.outputs; output += WIDTH) kernel(product, output);
    return true;
}

} // namespace

extern "C" {

void ladderize_rms_norm(int type, const void *x, const void *weight, void *out, int64_t rows, int64_t width, float eps,
                        int threads) {
    if (type)
        rms_norm((const bfloat16 *)x, (const bfloat16 *)weight, (bfloat16 *)out, rows, width, eps, threads);
    else
        rms_norm((const float *)x, (const float *)weight, (float *)out, rows, width, eps, threads);
}

void ladderize_gated(int type, const void *gate_up, void *out, int64_t rows, int64_t inner, int threads) {
    if (type)
        gated((const bfloat16 *)gate_up, (bfloat16 *)out, rows, inner, threads);
    else
        gated((const float *)gate_up, (float *)out, rows, inner, threads);
}

void ladderize_sum(int type, const void *messages, int64_t stride, int64_t ranks, const void *residual, void *out,
                   int64_t count, int threads) {
    if (type)
        sum((const char *)messages, stride, ranks, (const bfloat16 *)residual, (bfloat16 *)out, count, threads);
    else
        sum((const char *)messages, stride, ranks, (const float *)residual, (float *)out, count, threads);
}

// Returns 0, or 1 where the cache has no such rows or columns: then nothing was written.
int ladderize_rotate(int type, const Heads *size, const void *qkv, const float *norms, float eps, const float *rope,
                      int64_t rope_row, void *query, const Cache *cache, int threads) {
    if (!has_room(*cache, *size, 0)) return 1;
    if (type)
        rotate(*size, (const bfloat16 *)qkv, norms, eps, rope, rope_row, (bfloat16 *)query, *cache, threads);
    else
        rotate(*size, (const float *)qkv, norms, eps, rope, rope_row, (float *)query, *cache, threads);
    return 0;
}

// Returns as ladderize_rotate.
int ladderize_attend(int type, const Heads *size, const void *query, const Cache *cache, const uint8_t *seen,
                      int64_t seen_row, int64_t length, float scale, void *out, int threads) {
    if (!has_room(*cache, *size, length)) return 1;
    if (type)
        attend(*size, (const bfloat16 *)query, *cache, seen, seen_row, length, scale, (bfloat16 *)out, threads);
    else
        attend(*size, (const float *)query, *cache, seen, seen_row, length, scale, (float *)out, threads);
    return 0;
}

// Returns 0, or 1 for more rows, or another weight, than is multiplied here: then nothing was written.
int ladderize_product(int type, const void *x, int64_t rows, const Packed *weight, const void *bias, int gated, void *out,
                      int threads) {
    bool done;
    if (type)
        done = multiply<bfloat16>({(const bfloat16 *)x, rows, *weight, (const bfloat16 *)bias, gated != 0, (bfloat16 *)out}, threads);
    else
        done = multiply<float>({(const float *)x, rows, *weight, (const float *)bias, gated != 0, (float *)out}, threads);
    return done ? 0 : 1;
}

// Attention of a prompt's tokens, each to itself and those before, all in columns from 0 on; query, out: [batch, tokens,
// heads, dim]. Returns 0; 1 where the cache does not fit; 2 for numbers or heads that have no kernel here.
int ladderize_attend_prompt(int type, const Heads *size, const void *query, const Cache *cache, float scale, void *out,
                            int threads) {
    if (!has_room(*cache, *size, size->tokens)) return 1;
    return type && attend_prompt(*size, (const bfloat16 *)query, *cache, scale, (bfloat16 *)out, threads) ? 0 : 2;
}
}
