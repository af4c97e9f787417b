// Vectors of the instruction set this file is compiled for, and the exponential.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

extern "C" void dape_wait(int spins);

// Everything has internal linkage: the same source is compiled once for each instruction set, and the
// linker must never replace one build's function by another's.
namespace {

// DAPE_LANES: the code for another processor's vectors, which the compiler makes of what there is.
#if defined(DAPE_LANES)
constexpr int LANES = DAPE_LANES;
#elif defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
// How many vectors of sums registers hold beside what is multiplied.
constexpr int SUMS = LANES == 16 ? 24 : 12;

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float unaligned_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t unaligned_ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

#define INLINE inline __attribute__((always_inline))

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE vec load(const float *p) { return *reinterpret_cast<const unaligned_vec *>(p); }
INLINE ivec load(const int32_t *p) { return *reinterpret_cast<const unaligned_ivec *>(p); }
INLINE void store(float *p, vec x) { *reinterpret_cast<unaligned_vec *>(p) = x; }
// Subtracting 0 changes no number, not even −0, and compilers make one broadcast of it.
INLINE vec broadcast(float x) { return x - vec{}; }
INLINE ivec broadcast(int32_t x) { return x - ivec{}; }
// The larger one; b where either is NaN.
INLINE vec larger(vec a, vec b) { return a > b ? a : b; }
// LeakyReLU of any slope.
INLINE vec leaky(vec x, vec slope) { return x > vec{} ? x : x * slope; }
INLINE bool any(ivec mask) {
  int32_t bits = 0;
  for (int i = 0; i < LANES; ++i) bits |= mask[i];
  return bits != 0;
}
INLINE float sum(vec x) {
  float total = 0;
  for (int i = 0; i < LANES; ++i) total += x[i];
  return total;
}

// The sums of four vectors' lanes, added in pairs.
typedef float vec4 __attribute__((vector_size(16)));
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define DAPE_SHUFFLES
#endif
#endif
#if defined(DAPE_SHUFFLES)
INLINE vec4 quarters(vec x) {
  vec4 parts[LANES / 4];
  memcpy(parts, &x, sizeof x);
#pragma GCC unroll 4
  for (int n = LANES / 8; n > 0; n /= 2)
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) parts[i] += parts[i + n];
  return parts[0];
}
INLINE void sums(float *out, vec a, vec b, vec c, vec d) {
  const vec4 p = quarters(a), q = quarters(b), r = quarters(c), s = quarters(d);
  const vec4 pq = __builtin_shufflevector(p, q, 0, 4, 1, 5) + __builtin_shufflevector(p, q, 2, 6, 3, 7);
  const vec4 rs = __builtin_shufflevector(r, s, 0, 4, 1, 5) + __builtin_shufflevector(r, s, 2, 6, 3, 7);
  const vec4 all = __builtin_shufflevector(pq, rs, 0, 1, 4, 5) + __builtin_shufflevector(pq, rs, 2, 3, 6, 7);
  memcpy(out, &all, sizeof all);
}
#else
INLINE void sums(float *out, vec a, vec b, vec c, vec d) { out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d); }
#endif

// Whether square blocks are transposed by shuffles, LANES × LANES at a time.
#if defined(DAPE_SHUFFLES)
constexpr bool TRANSPOSES = LANES == 16;
// Lanes of two rows of a matrix, B apart: their columns with bit B off (or on) side by side.
template <int B, bool ON, int... I>
INLINE vec exchanged(vec a, vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I & B ? LANES + I - (ON ? 0 : B) : I + (ON ? B : 0))...);
}
template <int B>
INLINE void transpose_step(vec (&x)[LANES]) {
  constexpr auto lanes = std::make_integer_sequence<int, LANES>();
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i)
    if (!(i & B)) {
      const vec a = x[i], b = x[i + B];
      x[i] = exchanged<B, false>(a, b, lanes), x[i + B] = exchanged<B, true>(a, b, lanes);
    }
  if constexpr (B > 1) transpose_step<B / 2>(x);
}
// x[i][j] becomes x[j][i].
INLINE void transpose(vec (&x)[LANES]) { transpose_step<LANES / 2>(x); }
#else
constexpr bool TRANSPOSES = false;
INLINE void transpose(vec (&)[LANES]) {}
#endif

// e^x within about one unit in the last place for x <= 88; 0 below the smallest normal result, NaN for NaN.
INLINE vec exponential(vec x) {
  const vec shift = broadcast(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
  const vec rounded = x * 1.44269504f + shift;
  const vec power = reinterpret_cast<vec>((reinterpret_cast<ivec>(rounded) + 127) << 23);
  const vec n = rounded - shift;
  // ln 2 in two parts, the first with trailing zeros.
  vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return x < broadcast(-87.3f) ? vec{} : p * power;
}

// log(1 + x) within about two units in the last place, for 0 <= x <= 1.
INLINE vec log_of_1_plus(vec x) {
  vec p = x * -3.1760571e-3f + 1.9542527e-2f;
  p = p * x - 5.6373613e-2f;
  p = p * x + 0.10543624f;
  p = p * x - 0.15269667f;
  p = p * x + 0.19663274f;
  p = p * x - 0.24951616f;
  p = p * x + 0.33329710f;
  p = p * x - 0.49999893f;
  return x * (p * x + 1.0f);
}

// Within about two units in the last place: a polynomial near zero, where 1 − 2 / (e^2x + 1) would cancel.
INLINE vec hyperbolic_tangent(vec x) {
  const vec square = x * x;
  vec p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const vec size = larger(x, -x), limit = broadcast(9.1f), bounded = size < limit ? size : limit;
  const vec far = 1.0f - 2.0f / (exponential(2.0f * bounded) + 1.0f);
  // A NaN stays one.
  return size < broadcast(0.625f) ? x + x * square * p : x > vec{} ? far : x < vec{} ? -far : x;
}

}  // namespace
