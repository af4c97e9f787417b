// Numbers of two bytes: read into float32 a row or a vector at a time, rounded once when a result is stored.
//
// A sum over tiles needs float32. The gradients of keys and values keep it as two halves: the upper 16 bits of each sum
// stand where the result will, the lower ones beside it, and the end rounds in place. So no float32 copy is made.
#pragma once

#include "call.h"
#include "simd.h"

namespace {

typedef uint16_t half_vec __attribute__((vector_size(LANES * 2)));
typedef uint16_t unaligned_half_vec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t bits_vec __attribute__((vector_size(LANES * 4)));

INLINE bits_vec bits(vec x) { return reinterpret_cast<bits_vec>(x); }
INLINE vec from_bits(bits_vec x) { return reinterpret_cast<vec>(x); }
INLINE bits_vec load_half(const uint16_t *p) {
  return __builtin_convertvector(static_cast<half_vec>(*reinterpret_cast<const unaligned_half_vec *>(p)), bits_vec);
}
INLINE void store_half(uint16_t *p, bits_vec x) {
  *reinterpret_cast<unaligned_half_vec *>(p) = __builtin_convertvector(x, half_vec);
}

// The bits of a half as float32, exactly.
template <int64_t DTYPE>
INLINE vec widened(bits_vec half) {
  if (DTYPE == BFLOAT16) return from_bits(half << 16);
  // The exponent moves by 112, which a product does for subnormal numbers too; infinity and NaN have their own.
  const bits_vec size = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
  const vec scaled = from_bits(size) * 5.192296858534828e33f;  // 2^112
  const bits_vec finite = bits(scaled), special = size | 0x7f800000u;
  return from_bits((size >= 0x0f800000u ? special : finite) | sign);
}

// The bits of the half that is nearest, even ones in a tie.
template <int64_t DTYPE>
INLINE bits_vec narrowed(vec x) {
  const bits_vec all = bits(x), sign = all & 0x80000000u, size = all ^ sign;
  if (DTYPE == BFLOAT16) {
    const bits_vec rounded = (all + 0x7fffu + ((all >> 16) & 1u)) >> 16;
    return size > 0x7f800000u ? (all >> 16) | 0x40u : rounded;
  }
  const bits_vec normal = (size + 0xc8000fffu + ((size >> 13) & 1u)) >> 13;
  // Adding 1/2 leaves the digits of a subnormal half at the end of the sum, rounded.
  const bits_vec small = bits(from_bits(size) + 0.5f) - 0x3f000000u;
  const bits_vec infinite = size > 0x7f800000u ? bits_vec{} + 0x7e00u : bits_vec{} + 0x7c00u;
  return (size < 0x38800000u ? small : size >= 0x477ff000u ? infinite : normal) | (sign >> 16);
}

// A vector of numbers of any dtype, from `p` on, which counts elements.
template <int64_t DTYPE>
INLINE vec load_as(const void *p) {
  if (DTYPE == FLOAT32) return load(static_cast<const float *>(p));
  return widened<DTYPE>(load_half(static_cast<const uint16_t *>(p)));
}

// A row of halves as float32, and back; the last vector goes by way of a padded copy.
template <int64_t DTYPE>
inline void widen_row(float *out, const uint16_t *row, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(out + i, load_as<DTYPE>(row + i));
  if (i == n) return;
  uint16_t rest[LANES] = {};
  float made[LANES];
  memcpy(rest, row + i, (n - i) * sizeof(uint16_t));
  store(made, load_as<DTYPE>(rest));
  memcpy(out + i, made, (n - i) * sizeof(float));
}

template <int64_t DTYPE>
inline void narrow_row(uint16_t *row, const float *in, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store_half(row + i, narrowed<DTYPE>(load(in + i)));
  if (i == n) return;
  float rest[LANES] = {};
  uint16_t made[LANES];
  memcpy(rest, in + i, (n - i) * sizeof(float));
  store_half(made, narrowed<DTYPE>(load(rest)));
  memcpy(row + i, made, (n - i) * sizeof(uint16_t));
}

INLINE int64_t element_bytes(const Call &c) { return c.dtype == FLOAT32 ? 4 : 2; }
INLINE const void *element(const Call &c, const void *data, int64_t index) {
  return static_cast<const char *>(data) + index * element_bytes(c);
}
INLINE void *element(const Call &c, void *data, int64_t index) {
  return static_cast<char *>(data) + index * element_bytes(c);
}

// A row of n numbers of q, k, v or the like as float32: where it stands, or a copy in `scratch`.
INLINE const float *read_row(const Call &c, const void *row, int64_t n, float *scratch) {
  if (c.dtype == FLOAT32) return static_cast<const float *>(row);
  if (c.dtype == BFLOAT16) widen_row<BFLOAT16>(scratch, static_cast<const uint16_t *>(row), n);
  else widen_row<FLOAT16>(scratch, static_cast<const uint16_t *>(row), n);
  return scratch;
}

// Stores a row, rounded to the call's dtype.
INLINE void write_row(const Call &c, void *row, const float *in, int64_t n) {
  if (c.dtype == FLOAT32) memcpy(row, in, n * sizeof(float));
  else if (c.dtype == BFLOAT16) narrow_row<BFLOAT16>(static_cast<uint16_t *>(row), in, n);
  else narrow_row<FLOAT16>(static_cast<uint16_t *>(row), in, n);
}

// A float32 number in two halves.
inline void split_row(uint16_t *high, uint16_t *low, const float *in, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const bits_vec all = bits(load(in + i));
    store_half(high + i, all >> 16), store_half(low + i, all & 0xffffu);
  }
  for (; i < n; ++i) {
    uint32_t all;
    memcpy(&all, in + i, sizeof all);
    high[i] = static_cast<uint16_t>(all >> 16), low[i] = static_cast<uint16_t>(all);
  }
}

inline void join_row(float *out, const uint16_t *high, const uint16_t *low, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(out + i, from_bits(load_half(high + i) << 16 | load_half(low + i)));
  for (; i < n; ++i) {
    const uint32_t all = static_cast<uint32_t>(high[i]) << 16 | low[i];
    memcpy(out + i, &all, sizeof all);
  }
}

// Rounds sums that were kept in two halves, in place.
inline void round_sums(const Call &c, void *high, const uint16_t *low, int64_t n) {
  constexpr int64_t BLOCK = 256;
  float sums[BLOCK];
  uint16_t *place = static_cast<uint16_t *>(high);
  for (int64_t i = 0; low && i < n; i += BLOCK) {
    const int64_t count = n - i < BLOCK ? n - i : BLOCK;
    join_row(sums, place + i, low + i, count);
    write_row(c, place + i, sums, count);
  }
}

}  // namespace
