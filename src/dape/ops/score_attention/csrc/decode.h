// The forward pass for a few queries against many keys: lanes are keys, and keys are split over threads.
//
// A part is a run of one query's keys. It is walked in chunks; each chunk computes its own margins of the
// maps, [channel][column], and feeds an online softmax. The parts of a query are merged in order.
#pragma once

#include "forward.h"

namespace {

// No part shorter than this is worth a thread.
constexpr int64_t PART_KEYS = 256;

struct Decoder {
  const Call &c;
  const Geometry g;
  const Shared shared;
  const int64_t columns, x_stride, a_stride, size;
  int64_t entry = 0, query = 0, lo = 0, hi = -1;
  float *q, *x, *a, *logits, *results;

  // The convolutions run over whole blocks of ROWS columns: a chunk and its margins fill them.
  Decoder(const Call &call, const float *memory, Arena &arena)
      : c(call),
        g(call),
        shared(call, const_cast<float *>(memory)),
        columns(6 * ROWS - g.reach % ROWS),
        x_stride(columns + 2 * g.reach + 2 * ROWS),
        a_stride(columns + g.reach + ROWS),
        size(c.head_width + 2) {
    q = arena.take(c.heads * c.head_width);
    x = arena.take((c.width ? c.channels : c.heads) * x_stride);
    a = arena.take(c.width * a_stride);
    logits = arena.take(c.heads * a_stride);
    results = arena.take((c.batch * c.queries + 1) * c.heads * size);
  }

  void clear() const {
    memset(x, 0, (c.width ? c.channels : c.heads) * x_stride * sizeof(float));
    memset(a, 0, c.width * a_stride * sizeof(float));
    memset(logits, 0, c.heads * a_stride * sizeof(float));
  }

  const float *key(const float *data, const int64_t *stride, int64_t head, int64_t column) const {
    return data + entry * stride[0] + head * c.groups / c.heads * stride[1] + column * stride[2];
  }

  void run(int64_t row, int64_t part, int64_t parts, float *result) {
    entry = row / c.queries, query = row % c.queries;
    const int64_t limit = c.causal ? query + g.offset : c.keys - 1;
    lo = c.first ? most(c.first[row], 0) : 0;
    hi = c.last ? least(c.last[row], limit) : limit;
    for (int64_t h = 0; h < c.heads; ++h) {
      float *r = result + h * size;
      r[0] = -__builtin_inff();
      memset(r + 1, 0, (size - 1) * sizeof(float));
      const float *p = c.q + entry * c.q_stride[0] + h * c.q_stride[1] + query * c.q_stride[2];
      for (int64_t d = 0; d < c.head_width; ++d) q[h * c.head_width + d] = p[d] * static_cast<float>(c.scale);
    }
    const int64_t keys = hi - lo + 1;
    if (keys <= 0) return;
    const int64_t end = lo + keys * (part + 1) / parts;
    for (int64_t from = lo + keys * part / parts; from < end; from += columns)
      chunk(from, least(from + columns, end), result);
  }

  void chunk(int64_t from, int64_t to, float *result) {
    const int64_t x0 = from - (c.width ? 2 * c.left : 0), count = to - from;
    const int64_t x_from = most(x0, lo), x_to = least(to + 2 * g.right, hi + 1);
    fill_scores(x0, x_from, x_to, to + 2 * g.right);
    if (c.width) {
      fill_bias(x0, x_from, x_to, to + 2 * g.right);
      convolve(a, a_stride, c.width, c.channels, shared.expand.single, x, x_stride, shared.b1, ROWS, 0, count + g.reach, true);
      const int64_t a0 = from - c.left;
      hide(a, a_stride, c.width, a0, lo, hi + g.ahead, to + g.right);
      convolve(logits, a_stride, c.heads, c.width, shared.project.single, a, a_stride, x + 2 * c.left, x_stride, ROWS, count, false);
    } else {
      for (int64_t h = 0; h < c.heads; ++h)
        memcpy(logits + h * a_stride, x + h * x_stride, count * sizeof(float));
    }
    for (int64_t h = 0; h < c.heads; ++h) {
      add_bias(h, from, count);
      attend(h, from, count, result + h * size);
    }
  }

  // Zeros outside lo … hi in a map whose first column is `start`, up to column `end`.
  static void hide(float *map, int64_t stride, int64_t channels, int64_t start, int64_t lo, int64_t hi, int64_t end) {
    const int64_t before = most(0, least(lo, end) - start), after = most(start, hi + 1);
    for (int64_t i = 0; i < channels; ++i) {
      memset(map + i * stride, 0, before * sizeof(float));
      if (after < end) memset(map + i * stride + after - start, 0, (end - after) * sizeof(float));
    }
  }

  void fill_scores(int64_t x0, int64_t from, int64_t to, int64_t end) const {
    for (int64_t h = 0; h < c.heads; ++h) {
      float *out = x + h * x_stride - x0;
      const float *query_row = q + h * c.head_width;
      int64_t j = from;
      for (; j + 4 <= to; j += 4) dot<4>(out + j, query_row, key(c.k, c.k_stride, h, j));
      for (; j < to; ++j) dot<1>(out + j, query_row, key(c.k, c.k_stride, h, j));
    }
    hide(x, x_stride, c.heads, x0, lo, hi, end);
  }

  template <int N>
  INLINE void dot(float *out, const float *query_row, const float *keys) const {
    vec acc[N] = {};
    int64_t d = 0;
    for (; d + LANES <= c.head_width; d += LANES) {
      const vec in = load(query_row + d);
      for (int n = 0; n < N; ++n) acc[n] += in * load(keys + n * c.k_stride[2] + d);
    }
    for (int n = 0; n < N; ++n) {
      float total = sum(acc[n]);
      for (int64_t e = d; e < c.head_width; ++e) total += query_row[e] * keys[n * c.k_stride[2] + e];
      out[n] = total;
    }
  }

  float bias(int64_t head, int64_t column) const {
    if (c.bias == DENSE) {
      const int64_t b = c.dense_batch == 1 ? 0 : entry;
      return c.dense[((b * c.heads + head) * c.queries + query) * c.keys + column];
    }
    return c.values[head * c.distances + query + g.offset - column - c.lowest];
  }

  void fill_bias(int64_t x0, int64_t from, int64_t to, int64_t end) const {
    if (c.channels == c.heads) return;
    float *map = x + c.heads * x_stride;
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t j = from; j < to; ++j) map[h * x_stride + j - x0] = bias(h, j);
    hide(map, x_stride, c.heads, x0, lo, hi, end);
  }

  // out[p][column] = init[p] + Σ taps, whole blocks of columns; `step`: how far init moves with a block.
  void convolve(float *out, int64_t out_stride, int64_t outputs, int64_t inputs, const float *weights,
                const float *in, int64_t in_stride, const float *init, int64_t init_stride, int64_t step,
                int64_t count, bool activated) const {
    const vec slope = broadcast(static_cast<float>(c.slope));
    const auto activate = [slope](vec z, int, int) { return leaky(z, slope); };
    for (int64_t j = 0; j < count; j += ROWS)
      for (int64_t t = 0; t < c.taps; ++t) {
        const float *start = t ? out + j : init + j / ROWS * step;
        const int64_t stride = t ? out_stride : init_stride;
        const float *coef = weights + t * inputs * outputs;
        if (activated && t == c.taps - 1)
          product<VECTORS, OUTPUTS>(out + j, out_stride, start, stride, coef, outputs, 1, in + j + t, in_stride, inputs,
                           outputs, activate);
        else
          product<VECTORS>(out + j, out_stride, start, stride, coef, outputs, 1, in + j + t, in_stride, inputs, outputs);
      }
  }

  void add_bias(int64_t h, int64_t from, int64_t count) const {
    float *row = logits + h * a_stride;
    const float b2 = c.width ? c.b2[h] : 0.0f;
    const bool biased = c.bias != NO_BIAS && c.residual_bias;
    for (int64_t j = 0; j < count; ++j) row[j] += biased ? bias(h, from + j) + b2 : b2;
    // Whole vectors follow: what lies past the end weighs nothing.
    for (int64_t j = count; j % LANES; ++j) row[j] = -__builtin_inff();
  }

  // result: largest logit, sum of weights, weighted sum of values [D].
  void attend(int64_t h, int64_t from, int64_t count, float *result) const {
    float *row = logits + h * a_stride;
    float top = result[0];
    for (int64_t j = 0; j < count; ++j) top = row[j] > top ? row[j] : top;
    const float safe = top == -__builtin_inff() ? 0.0f : top;
    if (top != result[0]) {
      const float factor = exponential(broadcast(result[0] - safe))[0];
      for (int64_t d = 1; d < size; ++d) result[d] *= factor;
      result[0] = top;
    }
    vec total = vec{};
    for (int64_t j = 0; j < count; j += LANES) {
      const vec weight = exponential(load(row + j) - safe);
      store(row + j, weight);
      total += weight;
    }
    result[1] += sum(total);
    add_values(h, from, count, row, result + 2);
  }

  // Adds the values of one head by their weights.
  void add_values(int64_t h, int64_t from, int64_t count, const float *weights, float *out) const {
    const float *values = key(c.v, c.v_stride, h, from);
    int64_t d = 0;
    const auto add = [&](auto tile) {
      constexpr int V = decltype(tile)::vectors;
      product_tile<1, V>(out + d, 0, out + d, 0, weights, 1, 0, values + d, c.v_stride[2], count, 0, Keep());
      d += V * LANES;
    };
    while (d + 8 * LANES <= c.head_width) add(Tile<8, 1>());
    if (d + 4 * LANES <= c.head_width) add(Tile<4, 1>());
    while (d + LANES <= c.head_width) add(Tile<1, 1>());
    for (; d < c.head_width; ++d)
      for (int64_t j = 0; j < count; ++j) out[d] += weights[j] * values[j * c.v_stride[2] + d];
  }
};

// How many parts each query's keys are split into.
int64_t decode_parts(const Call &c, int workers) {
  return most(1, least(ceil_div(workers, c.batch * c.queries), c.keys / PART_KEYS));
}

int64_t decode_units(const Call &c, int workers) { return c.batch * c.queries * decode_parts(c, workers); }

size_t decode_scratch(const Call &c, int) {
  Arena arena{nullptr};
  Decoder decoder(c, nullptr, arena);
  return arena.used;
}

// Unit u belongs to thread u % count, which keeps its result at place u / count.
void decode_run(const Call &c, const Worker &worker) {
  Arena arena{worker.scratch};
  Decoder decoder(c, worker.shared, arena);
  decoder.clear();
  const int64_t parts = decode_parts(c, worker.count), units = decode_units(c, worker.count);
  float *result = decoder.results;
  for (int64_t unit = worker.index; unit < units; unit += worker.count, result += c.heads * decoder.size)
    decoder.run(unit / parts, unit % parts, parts, result);
}

// Merges the parts of one query and head, in order; part_of gives largest logit, sum of weights and weighted values of
// each. sink: the logit of one more key, whose value is zero, or null.
template <class PartOf>
void merge_parts(const Call &c, int64_t row, int64_t h, int64_t parts, const float *sink, const PartOf &part_of) {
  float top = -__builtin_inff(), total = 0;
  float *out = c.out + row / c.queries * c.out_stride[0] + h * c.out_stride[1] + row % c.queries * c.out_stride[2];
  for (int64_t d = 0; d < c.head_width; ++d) out[d] = 0;
  const auto add = [&](float part_top, float part_total, const float *values) {
    const float next = part_top > top ? part_top : top;
    const float safe = next == -__builtin_inff() ? 0.0f : next;
    const float before = __builtin_expf(top - safe), after = __builtin_expf(part_top - safe);
    total = total * before + part_total * after;
    for (int64_t d = 0; d < c.head_width; ++d) out[d] = out[d] * before + (values ? values[d] * after : 0.0f);
    top = next;
  };
  for (int64_t part = 0; part < parts; ++part) {
    const float *found = part_of(part);
    add(found[0], found[1], found + 2);
  }
  // Nothing visible, or nothing but −∞.
  const bool empty = total == 0.0f;
  if (sink && !empty) add(*sink, 1.0f, nullptr);
  for (int64_t d = 0; d < c.head_width; ++d) out[d] = empty ? 0.0f : out[d] / total;
  c.lse[((row / c.queries) * c.heads + h) * c.queries + row % c.queries] =
      empty ? 0.0f : top + __builtin_logf(total);
}

void decode_finish(const Call &c, const Worker *workers, int count) {
  const int64_t parts = decode_parts(c, count);
  for (int64_t row = 0; row < c.batch * c.queries; ++row)
    for (int64_t h = 0; h < c.heads; ++h)
      merge_parts(c, row, h, parts, nullptr, [&](int64_t part) {
        const int64_t unit = row * parts + part;
        Arena arena{workers[unit % count].scratch};
        const Decoder decoder(c, nullptr, arena);
        return decoder.results + (unit / count * c.heads + h) * decoder.size;
      });
}

}  // namespace
