// Numbers in memory, and vectors of them: float, or bfloat16, which is computed in float and rounded to nearest even.
#pragma once

#include <cstdint>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

struct bfloat16 {
    uint16_t bits;
};

inline float get(float x) { return x; }
inline float get(bfloat16 x) { return __builtin_bit_cast(float, uint32_t(x.bits) << 16); }

inline void put(float &to, float x) { to = x; }
inline void put(bfloat16 &to, float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

// Intel's processors leave memory idle unless they are asked for what is read in a moment: with it products of few rows
// take half as long there, and what only moves numbers three quarters. AMD's ask by themselves, and lose a tenth by it.
#ifdef __x86_64__
const bool asks_ahead = __builtin_cpu_is("intel");
#else
const bool asks_ahead = false;
#endif
constexpr int64_t AHEAD = 8192, LINE = 64; // bytes

// Begins to load what lies AHEAD bytes behind `count` numbers.
template <typename T> inline void look_ahead(const T *from, int64_t count) {
    const char *begin = (const char *)from + AHEAD;
    if (asks_ahead)
        for (int64_t i = 0; i < count * int64_t(sizeof(T)); i += LINE) __builtin_prefetch(begin + i);
}

// e^r for |r| <= ln 2 / 2, by a polynomial of degree 6.
template <typename Number> inline Number exponential_of_rest(Number r) {
    Number p = r * (1.0f / 720) + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    return p * r + 1.0f;
}

// e^x to 2 units in the last place: e^x = 2^n e^r with |r| <= ln 2 / 2.
inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float n = __builtin_rintf(x * 1.44269504f);
    const int32_t exponent = int32_t(n == n ? n : 0.0f);
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    return exponential_of_rest(r) * __builtin_bit_cast(float, uint32_t(exponent + 127) << 23);
}

inline float silu(float x) { return x < -88.0f ? x * 0.0f : x / (1.0f + exponential(-x)); } // of minus infinity: NaN

template <typename T> inline float rounded(float x) {
    T stored;
    put(stored, x);
    return get(stored);
}

#ifdef __AVX512F__
constexpr int LANES = 16; // numbers of a vector
#else
constexpr int LANES = 8;
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t LooseWords __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t LooseWord __attribute__((aligned(2), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

inline Vector load(const float *from) { return *(const Floats *)from; }
inline Vector load(const bfloat16 *from) {
#ifdef __AVX512F__ // of what stands below GCC makes four times as many instructions
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    return (Vector)(__builtin_convertvector(*(const Halves *)from, Words) << 16);
#endif
}
inline void store(float *to, Vector x) { *(Floats *)to = x; }
inline void store(bfloat16 *to, Vector x) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    for (int lane = 0; lane < LANES; ++lane) put(to[lane], x[lane]);
#endif
}

template <typename T> inline Vector rounded(Vector x) {
    T stored[LANES];
    store(stored, x);
    return load(stored);
}

// Past the caches, where that can be said.
template <typename T> inline void stream(T *to, Vector x) { store(to, x); }
inline void finish_streams() {
#ifdef __AVX512BF16__
    _mm_sfence();
#endif
}
#ifdef __AVX512BF16__
inline void stream(bfloat16 *to, Vector x) { _mm256_stream_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
#endif

// As the scalar one, of numbers that are 0 or less; 0 below -87.
inline Vector exponential(Vector x) {
    constexpr float MIDDLE = 1.5f * (1 << 23); // added to a small number it rounds it
    const Vector n = (x * 1.44269504f + MIDDLE) - MIDDLE, r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    const Integers exponent = __builtin_convertvector(x < -87.0f ? Vector{} : n, Integers) + 127;
    return x < -87.0f ? Vector{} : exponential_of_rest(r) * (Vector)(exponent << 23);
}

inline Vector silu(Vector x) {
    const Vector power = exponential(x > 0.0f ? -x : x);
    return (x > 0.0f ? x : x * power) / (1.0f + power);
}

#ifdef __AVX512F__
inline float highest_of(Vector x) { return _mm512_reduce_max_ps((__m512)x); }
inline float sum_of(Vector x) { return _mm512_reduce_add_ps((__m512)x); }
#else
inline float highest_of(Vector x) {
    float highest = x[0];
    for (int lane = 1; lane < LANES; ++lane) highest = x[lane] > highest ? x[lane] : highest;
    return highest;
}
inline float sum_of(Vector x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += x[lane];
    return sum;
}
#endif

} // namespace
