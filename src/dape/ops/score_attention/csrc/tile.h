// The two inner loops that all the arithmetic runs in: small matrix products held in registers.
#pragma once

#include "simd.h"

namespace {

struct Keep {
  INLINE vec operator()(vec x, int, int) const { return x; }
};

struct NoPrefetch {
  INLINE void step() {}
};

// Asks for the lines of a block of memory, a few at each step, so that requests do not pile up.
struct Prefetch {
  const float *p;
  ptrdiff_t stride;
  int64_t width, rows, lines_per_step;
  int64_t at = 0;

  // A block of `rows` rows of `width` floats, `stride` apart, in about `steps` steps.
  Prefetch(const float *block, ptrdiff_t row_stride, int64_t row_width, int64_t num_rows, int64_t steps)
      : p(block), stride(row_stride), width(row_width), rows(num_rows) {
    const int64_t lines = (width + 15) / 16 * rows;
    lines_per_step = (lines + steps - 1) / (steps > 0 ? steps : 1);
  }

  INLINE void step() {
    for (int64_t i = 0; i < lines_per_step && rows > 0; ++i) {
      __builtin_prefetch(p + at);
      at += 16;
      if (at >= width) at = 0, p += stride, --rows;
    }
  }
};

// The same block, continued over several products.
struct PrefetchBy {
  Prefetch &ahead;
  INLINE void step() { ahead.step(); }
};

// V vectors × P outputs, as a type.
template <int V, int P>
struct Tile {
  static constexpr int vectors = V, outputs = P;
};

// acc[p][v] += Σ_m coef[m · cm + p · cp] · x[m · xs + lane], P outputs × V vectors.
template <int P, int V>
INLINE void accumulate(vec (&acc)[P][V], const float *coef, ptrdiff_t cm, ptrdiff_t cp, const float *x, ptrdiff_t xs,
                       int depth) {
  for (int m = 0; m < depth; ++m) {
    vec in[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) in[v] = load(x + v * LANES);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const vec c = broadcast(coef[p * cp]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[p][v] += c * in[v];
    }
    coef += cm;
    x += xs;
  }
}

// out[p][lane] = finish(init[p][lane] + Σ_m coef[m · cm + p · cp] · x[m · xs + lane]), P outputs × V vectors.
template <int P, int V, class Finish>
INLINE void product_tile(float *out, ptrdiff_t os, const float *init, ptrdiff_t is, const float *coef,
                         ptrdiff_t cm, ptrdiff_t cp, const float *x, ptrdiff_t xs, int depth, int first,
                         Finish finish) {
  vec acc[P][V];
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[p][v] = init ? load(init + p * is + v * LANES) : vec{};
  accumulate(acc, coef, cm, cp, x, xs, depth);
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(out + p * os + v * LANES, finish(acc[p][v], first + p, v));
}

// The same for any number of outputs, P at a time.
template <int V, int P = OUTPUTS, class Finish = Keep, class Ahead = NoPrefetch>
INLINE void product(float *out, ptrdiff_t os, const float *init, ptrdiff_t is, const float *coef,
                    ptrdiff_t cm, ptrdiff_t cp, const float *x, ptrdiff_t xs, int depth, int outputs,
                    Finish finish = Finish(), Ahead ahead = Ahead()) {
  int p = 0;
  for (; p + P <= outputs; p += P) {
    ahead.step();
    product_tile<P, V>(out + p * os, os, init ? init + p * is : nullptr, is, coef + p * cp, cm, cp, x, xs, depth,
                       p, finish);
  }
  if (P > 4 && p + 4 <= outputs) {
    product_tile<4, V>(out + p * os, os, init ? init + p * is : nullptr, is, coef + p * cp, cm, cp, x, xs, depth,
                       p, finish);
    p += 4;
  }
  for (; p < outputs; ++p)
    product_tile<1, V>(out + p * os, os, init ? init + p * is : nullptr, is, coef + p * cp, cm, cp, x, xs, depth,
                       p, finish);
}

// Two neighbouring columns of a convolution with three taps, by Winograd's F(2, 3): of the columns d0 … d3 that they
// read, the combinations d0 − d2, d1 + d2, d2 − d1 and d3 − d1 are multiplied by the weights' own (below), and of the
// products m0 … m3 the columns are m0 + m1 + m2 and m1 − m2 + m3. Four products where six would be needed. The first
// column reads no d3 and the second no d0, so each depends on its own window alone, bit for bit.
INLINE void pair_inputs(float *out, const float *d, ptrdiff_t column) {
  for (ptrdiff_t i = 0; i < column; i += LANES) {
    const vec d0 = load(d + i), d1 = load(d + column + i), d2 = load(d + 2 * column + i), d3 = load(d + 3 * column + i);
    store(out + i, d0 - d2);
    store(out + column + i, d1 + d2);
    store(out + 2 * column + i, d2 - d1);
    store(out + 3 * column + i, d3 - d1);
  }
}

// weights[tap][n] for single columns as out[4][n] for pairs.
inline void pair_weights(float *out, const float *weights, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float w0 = weights[i], w1 = weights[n + i], w2 = weights[2 * n + i];
    out[i] = w0;
    out[n + i] = 0.5f * (w0 + w1 + w2);
    out[2 * n + i] = 0.5f * (w0 - w1 + w2);
    out[3 * n + i] = w2;
  }
}

// Where an output column begins from, how it is finished, and where it goes.
template <class Finish>
struct Target {
  float *out;
  const float *init;
  ptrdiff_t init_stride;
  Finish finish;

  template <int P, int V>
  INLINE void begin(vec (&acc)[P][V], int first) const {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        acc[p][v] += init ? load(init + (first + p) * init_stride + v * LANES) : vec{};
  }
  template <int P, int V>
  INLINE void end(const vec (&acc)[P][V], ptrdiff_t os, int first) const {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        store(out + (first + p) * os + v * LANES, finish(acc[p][v], first + p, v));
  }
};

template <class Finish>
INLINE Target<Finish> target(float *out, const float *init, ptrdiff_t init_stride, Finish finish) {
  return {out, init, init_stride, finish};
}

// With several rows of weights, [4][rows][depth][outputs], row d reads the inputs `lane` · d lanes further.
template <int P, int V, class Finish>
INLINE void pair_tile(const Target<Finish> &one, const Target<Finish> &two, ptrdiff_t os, const float *coef,
                      ptrdiff_t cm, const float *inputs, int depth, int first, int rows, ptrdiff_t lane) {
  const ptrdiff_t block = rows * depth * cm, column = depth * os;

  coef += first;
  const auto rows_of = [=](vec(&acc)[P][V], const float *w, const float *x) __attribute__((always_inline)) {
    for (int d = 0; d < rows; ++d) accumulate(acc, w + d * depth * cm, cm, 1, x + d * lane, os, depth);
  };
  // Registers hold one set of sums; the other one waits in memory.
  vec acc[P][V] = {}, waiting[P][V] = {};
  rows_of(acc, coef + 2 * block, inputs + 2 * column);
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) waiting[p][v] = acc[p][v], acc[p][v] = vec{};
  rows_of(acc, coef + block, inputs + column);
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const vec m1 = acc[p][v], m2 = waiting[p][v];
      acc[p][v] = m1 + m2;
      waiting[p][v] = m1 - m2;
    }
  one.begin(acc, first);
  rows_of(acc, coef, inputs);
  one.end(acc, os, first);
  two.begin(waiting, first);
  rows_of(waiting, coef + 3 * block, inputs + 3 * column);
  two.end(waiting, os, first);
}

// Both columns for any number of outputs; `inputs` are the combinations of pair_inputs.
template <int V, class Finish>
INLINE void pair_product(const Target<Finish> &one, const Target<Finish> &two, ptrdiff_t os, const float *coef,
                         ptrdiff_t cm, const float *inputs, int depth, int outputs, int rows = 1, ptrdiff_t lane = 0) {
  int p = 0;
  for (; p + OUTPUTS <= outputs; p += OUTPUTS) pair_tile<OUTPUTS, V>(one, two, os, coef, cm, inputs, depth, p, rows, lane);
  if (OUTPUTS > 4 && p + 4 <= outputs) pair_tile<4, V>(one, two, os, coef, cm, inputs, depth, p, rows, lane), p += 4;
  for (; p < outputs; ++p) pair_tile<1, V>(one, two, os, coef, cm, inputs, depth, p, rows, lane);
}

// acc[p][m] += Σ over columns and lanes of y[column][p] · x[column][m], lane by lane: P × M vectors of sums.
template <int P, int M, int V>
INLINE void outer_tile(float *sums, ptrdiff_t row, const float *y, ptrdiff_t ys, const float *x,
                       ptrdiff_t xs, int columns) {
  vec acc[P][M];
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) acc[p][m] = load(sums + p * row + m * LANES);
  for (int j = 0; j < columns; ++j) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      vec in[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) in[m] = load(x + (m * V + v) * LANES);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        const vec c = load(y + (p * V + v) * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) acc[p][m] += c * in[m];
      }
    }
    x += xs;
    y += ys;
  }
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) store(sums + p * row + m * LANES, acc[p][m]);
}

template <int P, int V>
INLINE void outer_row(float *sums, ptrdiff_t row, const float *y, ptrdiff_t ys, const float *x,
                      ptrdiff_t xs, int columns, int inputs) {
  // As many sums as registers hold: fewer outputs, more inputs.
  constexpr int M = LANES == 16 ? (P >= 8 ? 3 : P >= 4 ? 6 : 8) : (P >= 4 ? 3 : P >= 2 ? 4 : 6);
  int m = 0;
  for (; m + M <= inputs; m += M)
    outer_tile<P, M, V>(sums + m * LANES, row, y, ys, x + m * V * LANES, xs, columns);
  for (; m + 3 <= inputs; m += 3)
    outer_tile<P, 3, V>(sums + m * LANES, row, y, ys, x + m * V * LANES, xs, columns);
  for (; m < inputs; ++m)
    outer_tile<P, 1, V>(sums + m * LANES, row, y, ys, x + m * V * LANES, xs, columns);
}

// sums[outputs][inputs][lane]: y[column][outputs][lanes], x[column][inputs][lanes], V vectors of lanes.
template <int V>
void outer(float *sums, const float *y, ptrdiff_t ys, const float *x, ptrdiff_t xs, int columns,
           int outputs, int inputs) {
  const ptrdiff_t row = static_cast<ptrdiff_t>(inputs) * LANES;
  int p = 0;
  for (; p + OUTPUTS <= outputs; p += OUTPUTS)
    outer_row<OUTPUTS, V>(sums + p * row, row, y + p * V * LANES, ys, x, xs, columns, inputs);
  const auto rest = [&](auto count) {
    constexpr int P = decltype(count)::outputs;
    if (p + P > outputs) return;
    outer_row<P, V>(sums + p * row, row, y + p * V * LANES, ys, x, xs, columns, inputs);
    p += P;
  };
  if (OUTPUTS > 4) rest(Tile<V, 4>());
  rest(Tile<V, 2>());
  for (; p < outputs; ++p)
    outer_row<1, V>(sums + p * row, row, y + p * V * LANES, ys, x, xs, columns, inputs);
}

}  // namespace
