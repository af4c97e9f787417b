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

  const void *key(const void *data, const int64_t *stride, int64_t head, int64_t column) const {
    return element(c, data, entry * stride[0] + head * c.groups / c.heads * stride[1] + column * stride[2]);
  }

  // A query of one head, scaled.
  void read_query(float *out, int64_t head, int64_t place) const {
    const int64_t start = entry * c.q_stride[0] + head * c.q_stride[1] + place * c.q_stride[2];
    const float *p = read_row(c, element(c, c.q, start), c.head_width, out);
    for (int64_t d = 0; d < c.head_width; ++d) out[d] = p[d] * static_cast<float>(c.scale);
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
      read_query(q + h * c.head_width, h, query);
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
      convolve(a, a_stride, c.width, c.channels, shared.expand.single, x, x_stride, shared.b1, ROWS, 0, count + g.reach,
               [slope = broadcast(static_cast<float>(c.slope))](vec z, int, int) { return leaky(z, slope); });
      const int64_t a0 = from - c.left;
      hide(a, a_stride, c.width, a0, lo, hi + g.ahead, to + g.right);
      convolve(logits, a_stride, c.heads, c.width, shared.project.single, a, a_stride, x + 2 * c.left, x_stride, ROWS, count, Keep());
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
    for (int64_t h = 0; h < c.heads; ++h) dots(x + h * x_stride - x0, q + h * c.head_width, h, from, to);
    hide(x, x_stride, c.heads, x0, lo, hi, end);
  }

  // out[column] of the dot products of one head's query with its keys.
  void dots(float *out, const float *query_row, int64_t h, int64_t from, int64_t to) const {
    if (c.dtype == FLOAT32) dots_as<FLOAT32>(out, query_row, h, from, to);
    else if (c.dtype == BFLOAT16) dots_as<BFLOAT16>(out, query_row, h, from, to);
    else dots_as<FLOAT16>(out, query_row, h, from, to);
  }

  template <int64_t DTYPE>
  void dots_as(float *out, const float *query_row, int64_t h, int64_t from, int64_t to) const {
    int64_t j = from;
    for (; j + 4 <= to; j += 4) dot<DTYPE, 4>(out + j, query_row, key(c.k, c.k_stride, h, j));
    for (; j < to; ++j) dot<DTYPE, 1>(out + j, query_row, key(c.k, c.k_stride, h, j));
  }

  template <int64_t DTYPE, int N>
  INLINE void dot(float *out, const float *query_row, const void *keys) const {
    vec acc[4] = {};
    const int64_t row = c.k_stride[2];
    int64_t d = 0;
    for (; d + LANES <= c.head_width; d += LANES) {
      const vec in = load(query_row + d);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[n] += in * load_as<DTYPE>(element(c, keys, n * row + d));
    }
    float totals[4];
    sums(totals, acc[0], acc[1], acc[2], acc[3]);
    for (int n = 0; n < N; ++n) {
      if (d < c.head_width) {
        float copied[LANES];
        const float *rest = read_row(c, element(c, keys, n * row + d), c.head_width - d, copied);
        for (int64_t e = d; e < c.head_width; ++e) totals[n] += query_row[e] * rest[e - d];
      }
      out[n] = totals[n];
    }
  }

  // out[0 …] = (or +=) the bias of one head and query at the columns from … to - 1.
  template <bool ADD>
  void bias_row(float *out, int64_t head, int64_t place, int64_t from, int64_t to) const {
    const auto take = [out](int64_t n, float x) { out[n] = ADD ? out[n] + x : x; };
    if (c.bias == DENSE) {
      const int64_t b = c.dense_batch == 1 ? 0 : entry;
      const float *p = c.dense + ((b * c.heads + head) * c.queries + place) * c.keys + from;
      for (int64_t n = 0; n < to - from; ++n) take(n, p[n]);
    } else {
      const float *p = c.values + head * c.distances + place + g.offset - from - c.lowest;
      for (int64_t n = 0; n < to - from; ++n) take(n, p[-n]);
    }
  }

  void fill_bias(int64_t x0, int64_t from, int64_t to, int64_t end) const {
    if (c.channels == c.heads) return;
    float *map = x + c.heads * x_stride;
    for (int64_t h = 0; h < c.heads; ++h) bias_row<false>(map + h * x_stride + from - x0, h, query, from, to);
    hide(map, x_stride, c.heads, x0, lo, hi, end);
  }

  // out[p][column] = finish(init[p] + Σ taps), whole blocks of columns; `step`: how far init moves with a block.
  template <class Finish>
  void convolve(float *out, int64_t out_stride, int64_t outputs, int64_t inputs, const float *weights,
                const float *in, int64_t in_stride, const float *init, int64_t init_stride, int64_t step,
                int64_t count, Finish finish) const {
    for (int64_t j = 0; j < count; j += ROWS) {
      const auto to = target(out + j, init + j / ROWS * step, init_stride, finish);
      const auto tile = [&](auto shape, int64_t p) __attribute__((always_inline)) {
        constexpr int P = decltype(shape)::outputs;
        vec acc[P][VECTORS] = {};
        to.begin(acc, static_cast<int>(p));
        for (int64_t t = 0; t < c.taps; ++t)
          accumulate(acc, weights + t * inputs * outputs + p, outputs, 1, in + j + t, in_stride, static_cast<int>(inputs));
        to.end(acc, out_stride, static_cast<int>(p));
      };
      int64_t p = 0;
      for (; p + OUTPUTS <= outputs; p += OUTPUTS) tile(Tile<VECTORS, OUTPUTS>(), p);
      if (OUTPUTS > 4 && p + 4 <= outputs) tile(Tile<VECTORS, 4>(), p), p += 4;
      for (; p < outputs; ++p) tile(Tile<VECTORS, 1>(), p);
    }
  }

  void add_bias(int64_t h, int64_t from, int64_t count) const {
    float *row = logits + h * a_stride;
    const float b2 = c.width ? c.b2[h] : 0.0f;
    if (c.bias != NO_BIAS && c.residual_bias) bias_row<true>(row, h, query, from, from + count);
    for (int64_t j = 0; c.width && j < count; ++j) row[j] += b2;
    // Whole vectors follow: what lies past the end weighs nothing.
    for (int64_t j = count; j % LANES; ++j) row[j] = -__builtin_inff();
  }

  // result: largest logit, sum of weights, weighted sum of values [D].
  void attend(int64_t h, int64_t from, int64_t count, float *result) const {
    float *row = logits + h * a_stride;
    vec tops = broadcast(result[0]);
    for (int64_t j = 0; j < count; j += LANES) tops = larger(load(row + j), tops);
    float top = result[0];
    for (int n = 0; n < LANES; ++n) top = tops[n] > top ? tops[n] : top;
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
    if (c.dtype == FLOAT32) add_values_as<FLOAT32>(h, from, count, weights, out);
    else if (c.dtype == BFLOAT16) add_values_as<BFLOAT16>(h, from, count, weights, out);
    else add_values_as<FLOAT16>(h, from, count, weights, out);
  }

  template <int64_t DTYPE>
  void add_values_as(int64_t h, int64_t from, int64_t count, const float *weights, float *out) const {
    const void *values = key(c.v, c.v_stride, h, from);
    const int64_t row = c.v_stride[2];
    int64_t d = 0;
    const auto add = [&](auto tile) __attribute__((always_inline)) {
      constexpr int V = decltype(tile)::vectors;
      vec acc[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[v] = load(out + d + v * LANES);
      for (int64_t j = 0; j < count; ++j) {
        const vec weight = broadcast(weights[j]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[v] += weight * load_as<DTYPE>(element(c, values, j * row + d + v * LANES));
      }
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store(out + d + v * LANES, acc[v]);
      d += V * LANES;
    };
    while (d + 8 * LANES <= c.head_width) add(Tile<8, 1>());
    if (d + 4 * LANES <= c.head_width) add(Tile<4, 1>());
    while (d + LANES <= c.head_width) add(Tile<1, 1>());
    if (d == c.head_width) return;
    float copied[LANES];
    for (int64_t j = 0; j < count; ++j) {
      const float *rest = read_row(c, element(c, values, j * row + d), c.head_width - d, copied);
      for (int64_t e = d; e < c.head_width; ++e) out[e] += weights[j] * rest[e - d];
    }
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

void write_result(const Call &c, int64_t row, int64_t h, const float *values) {
  const int64_t place = row / c.queries * c.out_stride[0] + h * c.out_stride[1] + row % c.queries * c.out_stride[2];
  write_row(c, element(c, c.out, place), values, c.head_width);
}

// Merges the parts of one query and head, in order, and writes the output; part_of gives largest logit, sum of weights
// and weighted values of each, of which the first holds the sums. sink: the logit of one more key, whose value is zero,
// or null.
template <class PartOf>
void merge_parts(const Call &c, int64_t row, int64_t h, int64_t parts, const float *sink, const PartOf &part_of) {
  float *first = part_of(0), *values = first + 2, top = first[0], total = first[1];
  const auto add = [&](float part_top, float part_total, const float *part_values) {
    const float next = part_top > top ? part_top : top;
    const float safe = next == -__builtin_inff() ? 0.0f : next;
    const float before = __builtin_expf(top - safe), after = __builtin_expf(part_top - safe);
    total = total * before + part_total * after;
    for (int64_t d = 0; d < c.head_width; ++d)
      values[d] = values[d] * before + (part_values ? part_values[d] * after : 0.0f);
    top = next;
  };
  for (int64_t part = 1; part < parts; ++part) {
    const float *found = part_of(part);
    add(found[0], found[1], found + 2);
  }
  // Nothing visible, or nothing but −∞.
  const bool empty = total == 0.0f;
  if (sink && !empty) add(*sink, 1.0f, nullptr);
  for (int64_t d = 0; d < c.head_width; ++d) values[d] = empty ? 0.0f : values[d] / total;
  write_result(c, row, h, values);
  c.lse[(row / c.queries * c.heads + h) * c.queries + row % c.queries] = empty ? 0.0f : top + __builtin_logf(total);
}

void decode_finish(const Call &c, const Worker *workers, int count) {
  const int64_t parts = decode_parts(c, count);
  Arena arena{workers[0].scratch};
  const Decoder decoder(c, nullptr, arena);
  // Threads have the same memory at different places.
  const int64_t results = decoder.results - workers[0].scratch;
  for (int64_t row = 0; row < c.batch * c.queries; ++row)
    for (int64_t h = 0; h < c.heads; ++h)
      merge_parts(c, row, h, parts, nullptr, [&](int64_t part) {
        const int64_t unit = row * parts + part;
        return workers[unit % count].scratch + results + (unit / count * c.heads + h) * decoder.size;
      });
}

}  // namespace
