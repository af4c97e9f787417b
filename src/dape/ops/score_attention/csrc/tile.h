// The two inner loops that all the arithmetic runs in: small matrix products held in registers.
#pragma once

#include "simd.h"

namespace {

// Zeros before and after a map, which loads shifted by some lanes may touch.
constexpr int64_t MARGIN = 16;

struct Keep {
  INLINE vec operator()(vec x, int, int) const { return x; }
};

struct Yes {
  constexpr operator bool() const { return true; }
};
struct No {
  constexpr operator bool() const { return false; }
};

// `EVERY`: steps of a product from one call of step() to the next.
struct NoPrefetch {
  static constexpr int EVERY = 1 << 30;
  INLINE void step() {}
};

// Asks for the lines of a block of memory, a few at each step, so that requests do not pile up.
struct Prefetch {
  static constexpr int EVERY = 8;
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
  static constexpr int EVERY = Prefetch::EVERY;
  Prefetch &ahead;
  INLINE void step() { ahead.step(); }
};

// V vectors × P outputs, as a type.
template <int V, int P>
struct Tile {
  static constexpr int vectors = V, outputs = P;
};

// acc[p][v] += Σ_m coef[m · cm + p · cp] · x[m · xs + lane], P outputs × V vectors.
template <int P, int V, class Ahead>
INLINE void accumulate(vec (&acc)[P][V], const float *coef, ptrdiff_t cm, ptrdiff_t cp, const float *x, ptrdiff_t xs,
                       int depth, Ahead &ahead) {
  for (int m = 0; m < depth;) {
    ahead.step();
    const int end = depth - m > Ahead::EVERY ? m + Ahead::EVERY : depth;
    for (; m < end; ++m) {
      vec in[V];
#pragma GCC unroll 32
      for (int v = 0; v < V; ++v) in[v] = load(x + v * LANES);
#pragma GCC unroll 32
      for (int p = 0; p < P; ++p) {
        const vec c = broadcast(coef[p * cp]);
#pragma GCC unroll 32
        for (int v = 0; v < V; ++v) acc[p][v] += c * in[v];
      }
      coef += cm;
      x += xs;
    }
  }
}

template <int P, int V>
INLINE void accumulate(vec (&acc)[P][V], const float *coef, ptrdiff_t cm, ptrdiff_t cp, const float *x, ptrdiff_t xs,
                       int depth) {
  NoPrefetch ahead;
  accumulate(acc, coef, cm, cp, x, xs, depth, ahead);
}

// out[p][lane] = finish(init[p][lane] + Σ_m coef[m · cm + p · cp] · x[m · xs + lane]), P outputs × V vectors.
template <int P, int V, class Finish, class Ahead>
INLINE void product_tile(float *out, ptrdiff_t os, const float *init, ptrdiff_t is, const float *coef,
                         ptrdiff_t cm, ptrdiff_t cp, const float *x, ptrdiff_t xs, int depth, int first,
                         Finish finish, Ahead &ahead) {
  vec acc[P][V];
#pragma GCC unroll 32
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
    for (int v = 0; v < V; ++v) acc[p][v] = init ? load(init + p * is + v * LANES) : vec{};
  accumulate(acc, coef, cm, cp, x, xs, depth, ahead);
#pragma GCC unroll 32
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
    for (int v = 0; v < V; ++v) store(out + p * os + v * LANES, finish(acc[p][v], first + p, v));
}

// Runs step(Tile<V, P>, first) over all outputs: most of them P at a time, the rest by smaller tiles.
template <int V, int P, class Step>
INLINE void by_outputs(int outputs, const Step &step, int from = 0) {
  for (; from + P <= outputs; from += P) step(Tile<V, P>(), from);
  constexpr int next = P > 8 ? 8 : P > 4 ? 4 : P > 2 ? 2 : 1;
  if constexpr (P > 1)
    if (from < outputs) by_outputs<V, next>(outputs, step, from);
}

// The same for any number of outputs, P at a time.
template <int V, int P = SUMS / V, class Finish = Keep, class Ahead = NoPrefetch>
INLINE void product(float *out, ptrdiff_t os, const float *init, ptrdiff_t is, const float *coef,
                    ptrdiff_t cm, ptrdiff_t cp, const float *x, ptrdiff_t xs, int depth, int outputs,
                    Finish finish = Finish(), Ahead ahead = Ahead()) {
  by_outputs<V, P>(outputs, [&](auto tile, int p) __attribute__((always_inline)) {
    product_tile<decltype(tile)::outputs, V>(out + p * os, os, init ? init + p * is : nullptr, is, coef + p * cp, cm, cp,
                                             x, xs, depth, p, finish, ahead);
  });
}

// Two neighbouring columns of a convolution with three taps, by Winograd's F(2, 3): of the columns d0 … d3 that they
// read, the combinations d0 − d2, d1 + d2, d2 − d1 and d3 − d1 are multiplied by the weights' own (below), and of the
// products m0 … m3 the columns are m0 + m1 + m2 and m1 − m2 + m3. Four products where six would be needed. The first
// column reads no d3 and the second no d0, so each depends on its own window alone, bit for bit.

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
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
      for (int v = 0; v < V; ++v)
        acc[p][v] += init ? load(init + (first + p) * init_stride + v * LANES) : vec{};
  }
  template <int P, int V>
  INLINE void end(const vec (&acc)[P][V], ptrdiff_t os, int first) const {
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
      for (int v = 0; v < V; ++v)
        store(out + (first + p) * os + v * LANES, finish(acc[p][v], first + p, v));
  }
};

template <class Finish>
INLINE Target<Finish> target(float *out, const float *init, ptrdiff_t init_stride, Finish finish) {
  return {out, init, init_stride, finish};
}

// one[p][v] += Σ_m w[m][p] · u[m] and two[p][v] += Σ_m w'[m][p] · u'[m], where the step `combine` makes u and u' of the
// columns at x: both columns of a pair, whose sums stay in registers.
template <int P, int V, class Combine>
INLINE void accumulate_pair(vec (&one)[P][V], vec (&two)[P][V], const float *coef_one, const float *coef_two, ptrdiff_t cm,
                            const float *x, ptrdiff_t xs, int depth, const Combine &combine) {
  for (int m = 0; m < depth; ++m) {
    vec u[V], other[V];
#pragma GCC unroll 32
    for (int v = 0; v < V; ++v) combine(x + v * LANES, u[v], other[v]);
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p) {
      const vec c = broadcast(coef_one[p]);
#pragma GCC unroll 32
      for (int v = 0; v < V; ++v) one[p][v] += c * u[v];
    }
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p) {
      const vec c = broadcast(coef_two[p]);
#pragma GCC unroll 32
      for (int v = 0; v < V; ++v) two[p][v] += c * other[v];
    }
    coef_one += cm, coef_two += cm;
    x += xs;
  }
}

// With several rows of weights, [4][rows][depth][outputs], row d reads the inputs `lane` · d lanes further.
// x: the first of the four columns, which lie `column` apart.
template <int P, int V, class Finish>
INLINE void pair_tile(const Target<Finish> &one, const Target<Finish> &two, ptrdiff_t os, const float *coef,
                      ptrdiff_t cm, const float *x, ptrdiff_t column, int depth, int first, int rows, ptrdiff_t lane) {
  const ptrdiff_t block = rows * depth * cm;
  coef += first;
  vec left[P][V] = {}, right[P][V] = {};
  for (int d = 0; d < rows; ++d)
    accumulate_pair(left, right, coef + block + d * depth * cm, coef + 2 * block + d * depth * cm, cm, x + d * lane, os,
                    depth, [column](const float *d0, vec &u, vec &other) __attribute__((always_inline)) {
                      const vec d1 = load(d0 + column), d2 = load(d0 + 2 * column);
                      u = d1 + d2, other = d2 - d1;
                    });
#pragma GCC unroll 32
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
    for (int v = 0; v < V; ++v) {
      const vec m1 = left[p][v], m2 = right[p][v];
      left[p][v] = m1 + m2;
      right[p][v] = m1 - m2;
    }
  one.begin(left, first);
  two.begin(right, first);
  for (int d = 0; d < rows; ++d)
    accumulate_pair(left, right, coef + d * depth * cm, coef + 3 * block + d * depth * cm, cm, x + d * lane, os, depth,
                    [column](const float *d0, vec &u, vec &other) __attribute__((always_inline)) {
                      u = load(d0) - load(d0 + 2 * column);
                      other = load(d0 + 3 * column) - load(d0 + column);
                    });
  one.end(left, os, first);
  two.end(right, os, first);
}

// The same with one column's sums in registers while the other's wait in memory: for processors with few of them.
// `inputs` are the combinations of pair_inputs.
template <int P, int V, class Finish>
INLINE void pair_tile_in_turn(const Target<Finish> &one, const Target<Finish> &two, ptrdiff_t os, const float *coef,
                              ptrdiff_t cm, const float *inputs, int depth, int first, int rows, ptrdiff_t lane) {
  const ptrdiff_t block = rows * depth * cm, column = depth * os;
  coef += first;
  const auto rows_of = [=](vec(&acc)[P][V], const float *w, const float *x) __attribute__((always_inline)) {
    for (int d = 0; d < rows; ++d) accumulate(acc, w + d * depth * cm, cm, 1, x + d * lane, os, depth);
  };
  vec acc[P][V] = {}, waiting[P][V] = {};
  rows_of(acc, coef + 2 * block, inputs + 2 * column);
#pragma GCC unroll 32
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
    for (int v = 0; v < V; ++v) waiting[p][v] = acc[p][v], acc[p][v] = vec{};
  rows_of(acc, coef + block, inputs + column);
#pragma GCC unroll 32
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
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

INLINE void pair_inputs(float *out, const float *d, ptrdiff_t column) {
  for (ptrdiff_t i = 0; i < column; i += LANES) {
    const vec d0 = load(d + i), d1 = load(d + column + i), d2 = load(d + 2 * column + i), d3 = load(d + 3 * column + i);
    store(out + i, d0 - d2);
    store(out + column + i, d1 + d2);
    store(out + 2 * column + i, d2 - d1);
    store(out + 3 * column + i, d3 - d1);
  }
}

// Whether registers hold the sums of both columns of a pair; else their inputs are combined in memory.
constexpr bool PAIRS_IN_REGISTERS = LANES == 16;
// From how many inputs on pairs gain something.
constexpr int PAIR_INPUTS = PAIRS_IN_REGISTERS ? 4 : 8;

// Both columns for any number of outputs. x: the first of four columns, `column` apart; scratch: room for as many.
template <int V, class Finish>
INLINE void pair_product(const Target<Finish> &one, const Target<Finish> &two, ptrdiff_t os, const float *coef,
                         ptrdiff_t cm, const float *x, ptrdiff_t column, int depth, int outputs, float *scratch,
                         int rows = 1, ptrdiff_t lane = 0) {
  if constexpr (PAIRS_IN_REGISTERS) {
    by_outputs<V, SUMS / 2 / V>(outputs, [&](auto tile, int p) __attribute__((always_inline)) {
      pair_tile<decltype(tile)::outputs, V>(one, two, os, coef, cm, x, column, depth, p, rows, lane);
    });
  } else {
    pair_inputs(scratch, x, column);
    // Lanes past the last channel, which rows of weights may reach.
    if (rows > 1) memset(scratch + 4 * column, 0, MARGIN * sizeof(float));
    by_outputs<V, SUMS / V>(outputs, [&](auto tile, int p) __attribute__((always_inline)) {
      pair_tile_in_turn<decltype(tile)::outputs, V>(one, two, os, coef, cm, scratch, depth, p, rows, lane);
    });
  }
}

// acc[p][m] += Σ over columns and lanes of y[column][p] · x[column][m], lane by lane: P × M vectors of sums.
template <int P, int M, int V>
INLINE void outer_tile(float *sums, ptrdiff_t row, const float *y, ptrdiff_t ys, const float *x,
                       ptrdiff_t xs, int columns) {
  vec acc[P][M];
#pragma GCC unroll 32
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
    for (int m = 0; m < M; ++m) acc[p][m] = load(sums + p * row + m * LANES);
  for (int j = 0; j < columns; ++j) {
#pragma GCC unroll 32
    for (int v = 0; v < V; ++v) {
      vec in[M];
#pragma GCC unroll 32
      for (int m = 0; m < M; ++m) in[m] = load(x + (m * V + v) * LANES);
#pragma GCC unroll 32
      for (int p = 0; p < P; ++p) {
        const vec c = load(y + (p * V + v) * LANES);
#pragma GCC unroll 32
        for (int m = 0; m < M; ++m) acc[p][m] += c * in[m];
      }
    }
    x += xs;
    y += ys;
  }
#pragma GCC unroll 32
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
    for (int m = 0; m < M; ++m) store(sums + p * row + m * LANES, acc[p][m]);
}

template <int P, int V>
INLINE void outer_row(float *sums, ptrdiff_t row, const float *y, ptrdiff_t ys, const float *x,
                      ptrdiff_t xs, int columns, int inputs) {
  // As many sums as registers hold: fewer outputs, more inputs.
  constexpr int M = LANES == 16 ? (P >= 6 ? SUMS / P : P >= 4 ? 6 : 8) : (P >= 4 ? 3 : P >= 2 ? 4 : 6);
  by_outputs<V, M>(inputs, [&](auto tile, int m) __attribute__((always_inline)) {
    outer_tile<P, decltype(tile)::outputs, V>(sums + m * LANES, row, y, ys, x + m * V * LANES, xs, columns);
  });
}

// sums[outputs][inputs][lane]: y[column][outputs][lanes], x[column][inputs][lanes], V vectors of lanes.
template <int V>
void outer(float *sums, const float *y, ptrdiff_t ys, const float *x, ptrdiff_t xs, int columns,
           int outputs, int inputs) {
  const ptrdiff_t row = static_cast<ptrdiff_t>(inputs) * LANES;
  by_outputs<V, LANES == 16 ? 8 : 4>(outputs, [&](auto tile, int p) {
    outer_row<decltype(tile)::outputs, V>(sums + p * row, row, y + p * V * LANES, ys, x, xs, columns, inputs);
  });
}

// Two columns of the gradient of three taps by Winograd's F(3, 2), the same combinations as above: with g0 … g3 the sums
// of y0 · (d0 − d2), (y0 + y1) · (d1 + d2), (y0 − y1) · (d2 − d1) and y1 · (d3 − d1), the gradients of the taps are
// g0 + (g1 + g2) / 2, (g1 − g2) / 2 and (g1 + g2) / 2 + g3. An odd last column has no y1.
template <int P, int M, int V>
INLINE void pair_outer_tile(float *sums, ptrdiff_t part, ptrdiff_t row, const float *y, ptrdiff_t ys, const float *x,
                            ptrdiff_t xs, int columns) {
  vec g[4][P][M];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k)
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
      for (int m = 0; m < M; ++m) g[k][p][m] = load(sums + k * part + p * row + m * LANES);
  const auto add = [&](auto both) __attribute__((always_inline)) {
    // Side by side, the steps would need more registers than there are.
#pragma GCC unroll 1
    for (int v = 0; v < V; ++v) {
      vec y0[P], y1[P];
#pragma GCC unroll 32
      for (int p = 0; p < P; ++p) {
        y0[p] = load(y + (p * V + v) * LANES);
        y1[p] = both ? load(y + ys + (p * V + v) * LANES) : vec{};
      }
#pragma GCC unroll 32
      for (int m = 0; m < M; ++m) {
        const float *d = x + (m * V + v) * LANES;
        const vec u0 = load(d) - load(d + 2 * xs);
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) g[0][p][m] += y0[p] * u0;
        if (!both) continue;
        const vec u3 = load(d + 3 * xs) - load(d + xs);
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) g[3][p][m] += y1[p] * u3;
      }
#pragma GCC unroll 32
      for (int p = 0; p < P; ++p) {
        const vec total = y0[p] + y1[p];
        y1[p] = y0[p] - y1[p], y0[p] = total;
      }
#pragma GCC unroll 32
      for (int m = 0; m < M; ++m) {
        const float *d = x + (m * V + v) * LANES;
        const vec d1 = load(d + xs), d2 = load(d + 2 * xs), u1 = d1 + d2, u2 = d2 - d1;
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) g[1][p][m] += y0[p] * u1;
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) g[2][p][m] += y1[p] * u2;
      }
    }
  };
  int j = 0;
  for (; j + 2 <= columns; j += 2, y += 2 * ys, x += 2 * xs) add(Yes());
  if (j < columns) add(No());
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k)
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
      for (int m = 0; m < M; ++m) store(sums + k * part + p * row + m * LANES, g[k][p][m]);
}

// Sums by lanes of the gradient of a convolution's weights, `taps` columns of all inputs at a time.
struct GradientSums {
  int64_t outputs, inputs, taps;
  bool paired = PAIRS_IN_REGISTERS && taps == 3;

  // [outputs][taps][inputs][LANES], or [4][outputs][inputs][LANES] of pairs.
  size_t floats() const { return static_cast<size_t>((paired ? 4 : taps) * outputs * inputs * LANES); }

  // Adds y[column][outputs] · x[column + tap][inputs].
  template <int V>
  void add(float *sums, const float *y, ptrdiff_t ys, const float *x, ptrdiff_t xs, int columns) const {
    if (!paired)
      return outer<V>(sums, y, ys, x, xs, columns, static_cast<int>(outputs), static_cast<int>(inputs * taps));
    const ptrdiff_t row = inputs * LANES, part = outputs * row;
    by_outputs<V, 3>(static_cast<int>(outputs), [&](auto rows, int p) __attribute__((always_inline)) {
      constexpr int P = decltype(rows)::outputs;
      by_outputs<V, SUMS / 4 / P>(static_cast<int>(inputs), [&](auto tile, int m) __attribute__((always_inline)) {
        pair_outer_tile<P, decltype(tile)::outputs, V>(sums + p * row + m * LANES, part, row, y + p * V * LANES, ys,
                                                       x + m * V * LANES, xs, columns);
      });
    });
  }

  // The gradient of one weight.
  float at(const float *sums, int64_t output, int64_t tap, int64_t input) const {
    if (!paired) return sum(load(sums + ((output * taps + tap) * inputs + input) * LANES));
    const auto part = [&](int64_t k) { return load(sums + ((k * outputs + output) * inputs + input) * LANES); };
    if (tap == 1) return sum(0.5f * (part(1) - part(2)));
    return sum((tap == 0 ? part(0) : part(3)) + 0.5f * (part(1) + part(2)));
  }
};

}  // namespace
