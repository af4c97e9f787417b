// The bias half of the first convolution, for a bias by distance, as tables by distance: made of the bias and the
// weights, and differentiated. A column n of a table is the distance n − right; see tables.py for why.
#pragma once

#include "simd.h"

namespace {

INLINE void add_scaled(float *__restrict out, const float *__restrict x, float factor, int64_t count) {
  for (int64_t n = 0; n < count; ++n) out[n] += factor * x[n];
}

INLINE float dot(const float *x, const float *y, int64_t count) {
  vec sums = vec{};
  int64_t n = 0;
  for (; n + LANES <= count; n += LANES) sums += load(x + n) * load(y + n);
  float total = sum(sums);
  for (; n < count; ++n) total += x[n] * y[n];
  return total;
}

INLINE float sum(const float *x, int64_t count) {
  vec sums = vec{};
  int64_t n = 0;
  for (; n + LANES <= count; n += LANES) sums += load(x + n);
  float total = sum(sums);
  for (; n < count; ++n) total += x[n];
  return total;
}

// The tables of a call without a program: `hidden` [W] rows of `length` columns, `edges` [left][W] such rows for
// the first `left` columns of a row, where the first taps would read before its first key.
struct BiasTables {
  const Call &c;
  // `padded`: numbers of one head of the bias with zeros on both sides, for distances that no key has.
  const int64_t right, length, padded;

  explicit BiasTables(const Call &call)
      : c(call), right(c.taps - 1 - c.left), length(c.keys + right), padded(length + c.taps - 1) {}

  // Whether a call has them; those of a program are made by the caller.
  static bool wanted(const Call &c) { return c.bias_tables && !c.program; }
  // Inputs of w1; those of the bias come last, and are no channels of the image where there are tables.
  static int64_t weight_inputs(const Call &c) { return wanted(c) ? 2 * c.heads : c.channels; }

  int64_t weight(int64_t w, int64_t h, int64_t tap) const { return (w * 2 * c.heads + c.heads + h) * c.taps + tap; }
  // What a tap reads of a head's bias.
  int64_t place(int64_t h, int64_t tap) const { return h * padded + c.taps - 1 - tap; }
  int64_t edge(int64_t w, int64_t column) const { return column * c.width + w; }

  // Runs step(n, place) for the place of every distance of the bias in the padded one.
  template <class Step>
  void each_value(const Step &step) const {
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t d = most(0, c.lowest); d < least(c.keys, c.lowest + c.distances); ++d)
        step(h * c.distances + d - c.lowest, h * padded + 2 * right + d);
  }

  void pad(float *out) const {
    memset(out, 0, c.heads * padded * sizeof(float));
    each_value([&](int64_t n, int64_t at) { out[at] = c.values[n]; });
  }

  // From the last tap to the first: column `left` − tap of a row has no tap before that one.
  void fill(float *hidden, int64_t stride, float *edges, int64_t edges_stride, const float *bias) const {
    for (int64_t w = 0; w < c.width; ++w, hidden += stride) {
      for (int64_t n = 0; n < length; ++n) hidden[n] = c.b1[w];
      for (int64_t tap = c.taps - 1; tap >= 0; --tap) {
        for (int64_t h = 0; h < c.heads; ++h)
          add_scaled(hidden, bias + place(h, tap), c.w1[weight(w, h, tap)], length);
        if (tap > 0 && tap <= c.left) memcpy(edges + edge(w, c.left - tap) * edges_stride, hidden, length * sizeof(float));
      }
    }
  }

  // Adds to the gradients of b1, w1 and values; `hidden` ends as the sum of all tables, `dbias` is scratch memory.
  void add_gradients(float *hidden, int64_t stride, const float *edges, int64_t edges_stride, const float *bias,
                     float *dbias) const {
    memset(dbias, 0, c.heads * padded * sizeof(float));
    for (int64_t w = 0; w < c.width; ++w, hidden += stride) {
      for (int64_t tap = 0; tap < c.taps; ++tap) {
        if (tap > 0 && tap <= c.left) add_scaled(hidden, edges + edge(w, c.left - tap) * edges_stride, 1.0f, length);
        for (int64_t h = 0; h < c.heads; ++h) {
          c.dw1[weight(w, h, tap)] += dot(hidden, bias + place(h, tap), length);
          add_scaled(dbias + place(h, tap), hidden, c.w1[weight(w, h, tap)], length);
        }
      }
      c.db1[w] += sum(hidden, length);
    }
    each_value([&](int64_t n, int64_t at) { c.dvalues[n] += dbias[at]; });
  }
};

}  // namespace
