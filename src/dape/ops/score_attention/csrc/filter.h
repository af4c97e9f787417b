// Convolutions of any stage over maps: several rows of weights, groups of channels, every channel by itself.
//
// A kernel over several queries reads lanes to the left of its own, so its row d is the same product at an address
// d lanes lower (higher for the way back). A tile's first lanes hold the rows before it, as many as all stages
// read; lanes that a shift brings in from a neighbouring channel reach none but those.
#pragma once

#include "rows.h"

namespace {

// Most rows of weights in a stage, the reach of all stages together, and most stages.
constexpr int MAX_ROWS = 12, MAX_STAGES = 12;
// Columns of a channel by itself that are computed at a time.
constexpr int COLUMNS = SUMS * 3 / 4 / VECTORS;

INLINE float *take_with_margins(Arena &arena, size_t floats) {
  float *memory = arena.take(floats + 2 * MARGIN);
  return memory ? memory + MARGIN : nullptr;
}
INLINE void clear_margins(float *memory, size_t floats) {
  memset(memory - MARGIN, 0, MARGIN * sizeof(float));
  memset(memory + floats, 0, MARGIN * sizeof(float));
}

// The weights of one direction of a stage: groups of `inputs` → `outputs` channels.
struct Filter {
  int64_t groups, inputs, outputs, rows, taps;
  // How the lanes move with a row of weights: -1 forward, 1 on the way back.
  ptrdiff_t lane;
  float *single;  // [groups][rows][taps][inputs][outputs]
  float *pair;    // [4][rows][inputs][outputs], for pairs of columns, or null

  Filter() = default;
  Filter(Arena &arena, int64_t g, int64_t in, int64_t out, int64_t num_rows, int64_t num_taps, ptrdiff_t direction)
      : groups(g),
        inputs(in),
        outputs(out),
        rows(num_rows),
        taps(num_taps),
        lane(direction),
        single(arena.take(groups * rows * taps * inputs * outputs)),
        pair(taps == 3 && groups == 1 && inputs >= PAIR_INPUTS ? arena.take(4 * rows * inputs * outputs) : nullptr) {}

  bool by_channel() const { return inputs == 1 && outputs == 1; }
  // Of the gradient of one row of weights, where there is one group.
  GradientSums gradient_sums() const { return {outputs, inputs, taps}; }
  float &at(int64_t group, int64_t row, int64_t tap, int64_t in, int64_t out) const {
    return single[(((group * rows + row) * taps + tap) * inputs + in) * outputs + out];
  }
  void finish() const {
    const int64_t n = inputs * outputs;
    for (int64_t d = 0; pair && d < rows; ++d) {
      float *parts = pair + d * n;
      const float *w0 = single + d * 3 * n, *w1 = w0 + n, *w2 = w1 + n;
      for (int64_t i = 0; i < n; ++i) {
        parts[i] = w0[i];
        parts[rows * n + i] = 0.5f * (w0[i] + w1[i] + w2[i]);
        parts[2 * rows * n + i] = 0.5f * (w0[i] - w1[i] + w2[i]);
        parts[3 * rows * n + i] = w2[i];
      }
    }
  }
};

template <int P, int V, class Finish>
INLINE void filter_tile(const Filter &f, const Target<Finish> &to, const float *const *rows, ptrdiff_t tap,
                        const float *coef, int first) {
  vec acc[P][V] = {};
  to.begin(acc, first);
  // With one group, the taps' inputs lie side by side.
  const int64_t runs = f.groups == 1 ? 1 : f.taps, depth = f.groups == 1 ? f.taps * f.inputs : f.inputs;
  for (int64_t d = 0; d < f.rows; ++d) {
    const float *x = rows[d];
    for (int64_t n = 0; n < runs; ++n, x += tap, coef += depth * f.outputs)
      accumulate(acc, coef, f.outputs, 1, x, ROWS, static_cast<int>(depth));
  }
  to.end(acc, ROWS, first);
}

template <int V, class Finish>
INLINE void filter_column(const Filter &f, const Target<Finish> &to, const float *const *rows, ptrdiff_t tap) {
  for (int64_t g = 0; g < f.groups; ++g) {
    const float *coef = f.single + g * f.rows * f.taps * f.inputs * f.outputs, *x[MAX_ROWS];
    for (int64_t d = 0; d < f.rows; ++d) x[d] = rows[d] + g * f.inputs * ROWS;
    const int first = static_cast<int>(g * f.outputs);
    by_outputs<V, OUTPUTS>(static_cast<int>(f.outputs), [&](auto tile, int p) __attribute__((always_inline)) {
      filter_tile<decltype(tile)::outputs, V>(f, to, x, tap, coef + p, first + p);
    });
  }
}

// J neighbouring columns of one channel by itself: an input column is loaded once for all of them.
template <int J, int V, class TargetOf>
INLINE void channel_tile(const Filter &f, const TargetOf &target, int64_t column, int64_t channel,
                         const float *const *rows, ptrdiff_t tap) {
  vec acc[J][V];
#pragma GCC unroll 32
  for (int j = 0; j < J; ++j) {
    const auto to = target(column + j);
#pragma GCC unroll 32
    for (int v = 0; v < V; ++v)
      acc[j][v] = to.init ? load(to.init + channel * to.init_stride + v * LANES) : vec{};
  }
  const int taps = static_cast<int>(f.taps);
  for (int64_t d = 0; d < f.rows; ++d) {
    const float *coef = f.single + (channel * f.rows + d) * f.taps, *x = rows[d] + channel * ROWS;
    for (int n = 0; n < J + taps - 1; ++n, x += tap) {
      vec in[V];
#pragma GCC unroll 32
      for (int v = 0; v < V; ++v) in[v] = load(x + v * LANES);
#pragma GCC unroll 32
      for (int j = 0; j < J; ++j)
        if (static_cast<unsigned>(n - j) < static_cast<unsigned>(taps)) {
          const vec w = broadcast(coef[n - j]);
#pragma GCC unroll 32
          for (int v = 0; v < V; ++v) acc[j][v] += w * in[v];
        }
    }
  }
#pragma GCC unroll 32
  for (int j = 0; j < J; ++j) {
    const auto to = target(column + j);
#pragma GCC unroll 32
    for (int v = 0; v < V; ++v)
      store(to.out + channel * ROWS + v * LANES, to.finish(acc[j][v], static_cast<int>(channel), v));
  }
}

// Which lanes of a tile may not read the row so many rows before them (padding, another document).
struct RowMask {
  int64_t earlier[ROWS];
  bool cuts[MAX_ROWS];

  // out[lane] = x[lane + lane_step · d] of some channels, 0 where the reading lane may not.
  void shift(float *out, const float *x, int64_t channels, int64_t d, ptrdiff_t lane) const {
    for (int64_t i = 0; i < channels; ++i, out += ROWS, x += ROWS)
      for (int64_t r = 0; r < ROWS; ++r) {
        const int64_t from = r + lane * d, reader = lane < 0 ? r : from;
        out[r] = from >= 0 && from < ROWS && earlier[reader] >= d ? x[from] : 0.0f;
      }
  }
};

// Columns of a stage, forward or back: output j reads the columns j - shift … of `in`.
template <class TargetOf>
INLINE void filter_columns(const Filter &f, const Map &in, int64_t shift, Columns cols, const RowMask &mask,
                           float *scratch, const TargetOf &target) {
  const ptrdiff_t tap = in.channels * ROWS;
  bool masked = false;
  for (int64_t d = 1; d < f.rows; ++d) masked |= mask.cuts[d];
  const float *rows[MAX_ROWS];
  const auto read = [&](int64_t j) {
    const float *window = in.at(j - shift);
    for (int64_t d = 0; d < f.rows; ++d) {
      rows[d] = window + f.lane * d;
      if (d == 0 || !mask.cuts[d]) continue;
      float *shifted = scratch + (d - 1) * f.taps * tap;
      mask.shift(shifted, window, f.taps * in.channels, d, f.lane);
      rows[d] = shifted;
    }
  };
  int64_t j = cols.from;
  if (f.by_channel()) {
    for (; !masked && j + COLUMNS <= cols.to; j += COLUMNS) {
      read(j);
      for (int64_t i = 0; i < f.groups; ++i) channel_tile<COLUMNS, VECTORS>(f, target, j, i, rows, tap);
    }
    for (; j < cols.to; ++j) {
      read(j);
      for (int64_t i = 0; i < f.groups; ++i) channel_tile<1, VECTORS>(f, target, j, i, rows, tap);
    }
    return;
  }
  for (; f.pair && !masked && j + 2 <= cols.to; j += 2) {
    pair_product<VECTORS>(target(j), target(j + 1), ROWS, f.pair, f.outputs, in.at(j - shift), tap,
                          static_cast<int>(f.inputs), static_cast<int>(f.outputs), scratch, static_cast<int>(f.rows),
                          f.lane);
  }
  for (; j < cols.to; ++j) {
    read(j);
    filter_column<VECTORS>(f, target(j), rows, tap);
  }
}

// How much of the scratch memory filter_columns and filter_gradient use.
INLINE int64_t filter_scratch(int64_t inputs, int64_t outputs, int64_t rows, int64_t taps) {
  return most(most(rows * taps, 4), CHUNK) * most(inputs, outputs) * ROWS + MARGIN;
}

// sums[t][lane] += Σ over columns of y[column] · x[column + t], T taps of one channel.
template <int T, int V>
INLINE void channel_outer(float *sums, const float *y, ptrdiff_t ys, const float *x, ptrdiff_t xs, int64_t columns) {
  vec acc[T];
#pragma GCC unroll 32
  for (int t = 0; t < T; ++t) acc[t] = load(sums + t * LANES);
  for (int64_t j = 0; j < columns; ++j, y += ys, x += xs)
#pragma GCC unroll 32
    for (int v = 0; v < V; ++v) {
      const vec c = load(y + v * LANES);
#pragma GCC unroll 32
      for (int t = 0; t < T; ++t) acc[t] += c * load(x + t * xs + v * LANES);
    }
#pragma GCC unroll 32
  for (int t = 0; t < T; ++t) store(sums + t * LANES, acc[t]);
}

// Adds the gradient of a stage's weights from the gradient of its outputs, by lanes. `f` is the forward filter.
// sums: [groups][rows][taps][outputs][inputs][LANES], with one group GradientSums for each of the rows.
inline void filter_gradient(float *sums, const Filter &f, const Map &dout, const Map &in, int64_t shift, Columns cols,
                            const RowMask &mask, float *scratch) {
  const ptrdiff_t ys = dout.channels * ROWS, xs = in.channels * ROWS;
  const int columns = static_cast<int>(cols.count());
  for (int64_t d = 0; d < f.rows; ++d) {
    const float *y = dout.at(cols.from), *x = in.at(cols.from - shift);
    if (d && mask.cuts[d]) {
      mask.shift(scratch, y, columns * dout.channels, d, 1);
      y = scratch;
    } else if (f.by_channel()) {
      y += d;
    } else {
      // Lanes that x brings in from a neighbour meet zeros.
      x -= d;
    }
    for (int64_t g = 0; g < f.groups; ++g, y += f.outputs * ROWS, x += f.inputs * ROWS) {
      float *part = sums + (g * f.rows + d) * f.taps * f.outputs * f.inputs * LANES;
      if (f.by_channel()) {
        int64_t t = 0;
        for (; t + 6 <= f.taps; t += 6) channel_outer<6, VECTORS>(part + t * LANES, y, ys, x + t * xs, xs, columns);
        for (; t + 3 <= f.taps; t += 3) channel_outer<3, VECTORS>(part + t * LANES, y, ys, x + t * xs, xs, columns);
        for (; t < f.taps; ++t) channel_outer<1, VECTORS>(part + t * LANES, y, ys, x + t * xs, xs, columns);
      } else if (f.groups == 1) {
        f.gradient_sums().add<VECTORS>(sums + d * f.gradient_sums().floats(), y, ys, x, xs, columns);
      } else {
        for (int64_t t = 0; t < f.taps; ++t)
          outer<VECTORS>(part + t * f.outputs * f.inputs * LANES, y, ys, x + t * xs, xs, columns,
                         static_cast<int>(f.outputs), static_cast<int>(f.inputs));
      }
    }
  }
}

// The gradient of one weight, of what filter_gradient has summed up.
INLINE float filter_gradient_at(const float *sums, const Filter &f, int64_t group, int64_t row, int64_t tap, int64_t in,
                                int64_t out) {
  if (f.groups == 1 && !f.by_channel())
    return f.gradient_sums().at(sums + row * f.gradient_sums().floats(), out, tap, in);
  const int64_t part = group * f.rows + row;
  return sum(load(sums + (((part * f.taps + tap) * f.outputs + out) * f.inputs + in) * LANES));
}

}  // namespace
