// The kernels for a CPU that library.py compiles and describes to Python. Numbers are float (type 0) or bfloat16 (type 1);
// sums, roots and exponentials are in float. NaN and infinities pass through.

#include "prompts.h"
#include "products.h"
#include "vectors.h"
#ifdef __AMX_BF16__
#include "tiles.h"
#endif

namespace {

constexpr int MANY = LANES == 16 ? 8 : 5; // rows whose sums fit the registers, as GCC hands them out

template <typename T> bool multiply_by_vectors(const Product<T> &product, int threads) {
    if (product.rows == 1) return multiply<Vectors<T, 1>>(product, threads);
    return product.rows <= 4 ? multiply<Vectors<T, 4>>(product, threads) : multiply<Vectors<T, MANY>>(product, threads);
}

bool multiply_by_any(const Product<float> &product, int threads) { return multiply_by_vectors(product, threads); }
bool multiply_by_any(const Product<bfloat16> &product, int threads) {
#ifdef __AMX_BF16__
    if (has_tiles) return multiply<Tiles>(product, threads);
#endif
    return multiply_by_vectors(product, threads);
}

// Returns false for heads that are not multiplied here.
bool attend_any_prompt(const Heads &size, const bfloat16 *query, const Cache &cache, float scale, bfloat16 *out, int threads) {
#ifdef __AMX_BF16__
    if (has_tiles) return attend_prompt<Tiles>(size, query, cache, scale, out, threads);
#endif
    return attend_prompt<Vectors<bfloat16, LANES / 2>>(size, query, cache, scale, out, threads);
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

// How many outputs of a packed weight lie side by side; 0: products were not tried on such a processor, and are PyTorch's.
int ladderize_width() {
#ifdef __x86_64__
    return WIDTH;
#else
    return 0;
#endif
}

// Returns 0, or 1 where memory is short.
int ladderize_product(int type, const void *x, int64_t rows, const Packed *weight, const void *bias, int gated, void *out,
                      int threads) {
    bool done;
    if (type)
        done = multiply_by_any(Product<bfloat16>{(const bfloat16 *)x, rows, *weight, (const bfloat16 *)bias, gated != 0,
                                                 (bfloat16 *)out}, threads);
    else
        done = multiply_by_any(Product<float>{(const float *)x, rows, *weight, (const float *)bias, gated != 0, (float *)out},
                               threads);
    return done ? 0 : 1;
}

// Attention of a prompt's tokens, each to itself and those before, all in columns from 0 on; query, out: [batch, tokens,
// heads, dim]. Returns 0; 1 where the cache does not fit; 2 for numbers or heads that have no kernel here.
int ladderize_attend_prompt(int type, const Heads *size, const void *query, const Cache *cache, float scale, void *out,
                            int threads) {
    if (!has_room(*cache, *size, size->tokens)) return 1;
    return type && attend_any_prompt(*size, (const bfloat16 *)query, *cache, scale, (bfloat16 *)out, threads) ? 0 : 2;
}
}
