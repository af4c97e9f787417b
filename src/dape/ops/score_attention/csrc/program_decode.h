// Any score program for a few queries against many keys: lanes are keys, as in decode.h, and the rows of one entry are
// computed together, because stages may read the rows before their own.
//
// Maps lie as [row][channel][column]. A chunk of keys computes the margins that its stages read. Stages after the
// softmax need the sum of a row's weights first: one thread then keeps the logits of all keys.
#pragma once

#include "decode.h"
#include "program.h"

namespace {

struct ProgramDecoder : Decoder {
  const Program &p;
  const ProgramShared filters;
  const int64_t num_pre, num_stages, rows, channels;
  const bool reads_bias;
  // Keys that the stages before the softmax, and those after it, reach.
  int64_t left[2] = {0, 0}, right[2] = {0, 0};
  int64_t map_stride, row_stride, widest, lo_all = 0, hi_all = -1;
  int64_t first[ROWS], last[ROWS], earlier[ROWS];
  float *q_rows, *image, *maps[2], *all;

  ProgramDecoder(const Call &call, const float *memory, Arena &arena)
      : Decoder(call, memory, arena),
        p(*call.program),
        filters(call, const_cast<float *>(memory)),
        num_pre(p.num_pre),
        num_stages(p.num_pre + p.num_post),
        rows(call.queries),
        channels(p.num_pre ? p.stages[0].inputs : call.heads),
        reads_bias(p.num_pre && p.stages[0].inputs > call.heads) {
    widest = c.heads;
    for (int64_t n = 0; n < num_stages; ++n) {
      const StageCall &s = p.stages[n];
      left[n >= num_pre] += s.left, right[n >= num_pre] += s.taps - 1 - s.left;
      widest = most(widest, s.outputs);
    }
    const int64_t reach = most(left[0] + right[0], left[1] + right[1]);
    map_stride = ceil_div(columns + reach, ROWS) * ROWS + reach + ROWS;
    row_stride = left[1] + c.keys + right[1] + 2 * ROWS + columns;
    q_rows = arena.take(rows * c.heads * c.head_width);
    image = arena.take(rows * channels * map_stride);
    for (float *&map : maps) map = arena.take(num_stages ? rows * widest * map_stride : 0);
    all = arena.take(post() ? rows * c.heads * row_stride : 0);
  }

  bool post() const { return num_stages > num_pre; }
  int64_t stage_right(int64_t n) const { return p.stages[n].taps - 1 - p.stages[n].left; }

  // Rows that see nothing have an interval past every column.
  void begin(int64_t b, float *result) {
    entry = b, lo_all = c.keys, hi_all = -1;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t limit = c.causal ? r + g.offset : c.keys - 1;
      first[r] = c.first ? most(c.first[entry * rows + r], 0) : 0;
      last[r] = c.last ? least(c.last[entry * rows + r], limit) : limit;
      earlier[r] = p.earlier ? least(r, p.earlier[entry * rows + r]) : r;
      if (first[r] > last[r]) first[r] = int64_t{1} << 40, last[r] = -1;
      lo_all = least(lo_all, first[r]), hi_all = most(hi_all, last[r]);
      for (int64_t h = 0; h < c.heads; ++h) {
        float *place = result + (r * c.heads + h) * size;
        place[0] = -__builtin_inff();
        memset(place + 1, 0, (size - 1) * sizeof(float));
        read_query(q_rows + (r * c.heads + h) * c.head_width, h, r);
      }
    }
  }

  void run(int64_t b, int64_t part, int64_t parts, float *result) {
    begin(b, result);
    const int64_t keys = hi_all - lo_all + 1;
    if (keys <= 0) return;
    if (post()) memset(all, 0, rows * c.heads * row_stride * sizeof(float));
    const int64_t end = lo_all + keys * (part + 1) / parts;
    for (int64_t from = lo_all + keys * part / parts; from < end; from += columns) {
      const int64_t to = least(from + columns, end);
      const float *made = fill_logits(from, to);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t h = 0; h < c.heads; ++h) {
          const float *row = made + (r * c.heads + h) * map_stride;
          if (post()) memcpy(at(r, h, from), row, (to - from) * sizeof(float));
          else weigh(r, h, row, from, to, result);
        }
    }
    if (post()) attend_after(result);
  }

  float *at(int64_t r, int64_t h, int64_t column) const {
    return all + (r * c.heads + h) * row_stride + left[1] + column - lo_all;
  }

  // One head of one row: the visible part of the logits.
  void weigh(int64_t r, int64_t h, const float *row, int64_t from, int64_t to, float *result) {
    const int64_t begins = most(from, first[r]), ends = least(to, last[r] + 1), count = ends - begins;
    if (count <= 0) return;
    float *place = logits + h * a_stride;
    memcpy(place, row + begins - from, count * sizeof(float));
    for (int64_t j = count; j % LANES; ++j) place[j] = -__builtin_inff();
    result += (r * c.heads + h) * size;
    if (!p.stick) return attend(h, begins, count, result);
    const float sum = take_shares(place, count), factor = __builtin_expf(-sum);
    for (int64_t d = 2; d < size; ++d) result[d] *= factor;
    result[1] += sum;
    add_values(h, begins, count, place, result + 2);
  }

  // Logits become what each key takes of the stick, from the last to the first; minus the logarithm of what they leave. Past
  // the end there is room for a vector.
  static float take_shares(float *row, int64_t count) {
    double sum = 0;
    for (int64_t j = (count - 1) / LANES * LANES; j >= 0; j -= LANES) {
      vec z = load(row + j);
      for (int64_t n = count - j; n < LANES; ++n) z[n] = -__builtin_inff();
      const vec log = log_of_1_plus(exponential(-larger(z, -z))), after = larger(z, vec{}) + log;
      vec share = (z < vec{} ? z : vec{}) - log;
      for (int n = LANES; n-- > 0;) share[n] = static_cast<float>(share[n] - sum), sum += after[n];
      store(row + j, exponential(share));
    }
    return static_cast<float>(sum);
  }

  // The image of the columns begin … end - 1, 0 where a row does not see them.
  void fill_image(int64_t begin, int64_t end) const {
    const int64_t split = reads_bias ? c.heads / p.stages[0].groups : 0;
    const float most_score = static_cast<float>(p.softcap), inverse = p.softcap ? 1.0f / most_score : 0.0f;
    memset(image, 0, rows * channels * map_stride * sizeof(float));
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t from = most(begin, first[r]), to = least(end, last[r] + 1);
      for (int64_t h = 0; h < c.heads && from < to; ++h) {
        const int64_t channel = split ? h / split * 2 * split + h % split : h;
        float *out = image + (r * channels + channel) * map_stride - begin;
        dots(out, q_rows + (r * c.heads + h) * c.head_width, h, from, to);
        // Past the end the map has room for a vector, which the stages read as zeros.
        for (int64_t j = from; p.softcap && j < to; j += LANES) {
          const vec capped = hyperbolic_tangent(load(out + j) * inverse) * most_score;
          store(out + j, capped);
        }
        if (!reads_bias) continue;
        bias_row<false>(out + split * map_stride + from, h, r, from, to);
      }
    }
  }

  // Runs the stages from … to - 1 on `in` ([row][inputs][in_stride]), whose first column is `begin`; returns the last map,
  // whose columns from … count - 1 are those past the margins.
  const float *run_stages(int64_t from, int64_t to, const float *in, int64_t in_row, int64_t in_stride, int64_t begin,
                          int64_t count) {
    for (int64_t n = from; n < to; ++n) {
      float *out = maps[n & 1];
      int64_t margin = 0;
      for (int64_t m = n + 1; m < to; ++m) margin += p.stages[m].taps - 1;
      begin += p.stages[n].left;
      for (int64_t r = 0; r < rows; ++r) {
        float *made = out + r * p.stages[n].outputs * map_stride;
        for (int64_t j = 0; j < count + margin; j += ROWS) convolve(n, r, in, in_row, in_stride, made, j);
        hide(made, p.stages[n].outputs, r, begin, count + margin);
      }
      in = out, in_row = p.stages[n].outputs * map_stride, in_stride = map_stride;
    }
    return in;
  }

  // ROWS columns of one row of a stage, from column j of its own map on.
  void convolve(int64_t n, int64_t r, const float *in, int64_t in_row, int64_t in_stride, float *out, int64_t j) const {
    const Filter &f = filters.stages[n].forward;
    const float *offset = filters.stages[n].offset;
    const int64_t readable = least(f.rows - 1, earlier[r]);
    if (f.by_channel()) {
      for (int64_t i = 0; i < f.groups; ++i) {
        vec acc[VECTORS];
        for (int v = 0; v < VECTORS; ++v) acc[v] = load(offset + i * ROWS);
        for (int64_t d = 0; d <= readable; ++d)
          for (int64_t t = 0; t < f.taps; ++t) {
            const vec w = broadcast(f.at(i, d, t, 0, 0));
            const float *x = in + (r - d) * in_row + i * in_stride + j + t;
            for (int v = 0; v < VECTORS; ++v) acc[v] += w * load(x + v * LANES);
          }
        for (int v = 0; v < VECTORS; ++v) store(out + i * map_stride + j + v * LANES, acc[v]);
      }
    } else {
      for (int64_t group = 0; group < f.groups; ++group) {
        float *to = out + group * f.outputs * map_stride + j;
        const float *start = offset + group * f.outputs * ROWS;
        int64_t stride = ROWS;
        for (int64_t d = 0; d <= readable; ++d)
          for (int64_t t = 0; t < f.taps; ++t) {
            const float *x = in + (r - d) * in_row + group * f.inputs * in_stride + j + t;
            product<VECTORS>(to, map_stride, start, stride, &f.at(group, d, t, 0, 0), f.outputs, 1, x, in_stride,
                             static_cast<int>(f.inputs), static_cast<int>(f.outputs));
            start = to, stride = map_stride;
          }
      }
    }
    const float slope = static_cast<float>(p.stages[n].slope);
    if (slope == 1.0f) return;
    for (int64_t i = 0; i < f.groups * f.outputs; ++i)
      for (int v = 0; v < VECTORS; ++v) {
        float *place = out + i * map_stride + j + v * LANES;
        store(place, leaky(load(place), broadcast(slope)));
      }
  }

  // Zeros where a row's hidden map has none: before its first key and, without causality, after its last.
  void hide(float *map, int64_t num_channels, int64_t r, int64_t begin, int64_t count) const {
    const int64_t before = least(count, most(0, first[r] - begin));
    const int64_t after = c.causal ? count : least(count, most(0, last[r] + 1 - begin));
    for (int64_t i = 0; i < num_channels; ++i) {
      memset(map + i * map_stride, 0, before * sizeof(float));
      if (after < count) memset(map + i * map_stride + after, 0, (count - after) * sizeof(float));
    }
  }

  // Logits [row][H][map_stride] of the columns from … to - 1.
  const float *fill_logits(int64_t from, int64_t to) {
    const int64_t begin = from - left[0], count = to - from;
    fill_image(begin, to + right[0]);
    const bool scores = !num_pre || p.residual_scores, bias = c.bias != NO_BIAS && (!num_pre || p.residual_bias);
    const float *made = run_stages(0, num_pre, image, channels * map_stride, map_stride, begin, count);
    const int64_t split = reads_bias ? c.heads / p.stages[0].groups : 0;
    float *out = num_pre ? const_cast<float *>(made) : image;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t h = 0; h < c.heads; ++h) {
        const int64_t channel = split ? h / split * 2 * split + h % split : h;
        const float *s = image + (r * channels + channel) * map_stride + left[0];
        float *row = out + (r * c.heads + h) * map_stride;
        const int64_t begins = most(from, first[r]), ends = least(to, last[r] + 1);
        for (int64_t j = 0; num_pre && scores && j < count; ++j) row[j] += s[j];
        if (bias && begins < ends) bias_row<true>(row + begins - from, h, r, begins, ends);
        if (!p.factor) continue;
        const float factor = p.factor[(entry * c.heads + h) * c.queries + r];
        for (int64_t j = 0; j < count; ++j) row[j] *= factor;
      }
    return out;
  }

  // The logits of all keys become weights, go through the stages after the softmax and weigh the values.
  void attend_after(float *result) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t h = 0; h < c.heads; ++h) normalise(r, h, result + (r * c.heads + h) * size);
    for (int64_t from = lo_all; from <= hi_all; from += columns) {
      const int64_t to = least(from + columns, hi_all + 1);
      const float *made =
          run_stages(num_pre, num_stages, at(0, 0, from) - left[1], c.heads * row_stride, row_stride, from - left[1], to - from);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t h = 0; h < c.heads; ++h) {
          const int64_t begins = most(from, first[r]), ends = least(to, last[r] + 1);
          if (begins >= ends) continue;
          const float *weights = made + (r * c.heads + h) * map_stride + begins - from;
          add_values(h, begins, ends - begins, weights, result + (r * c.heads + h) * size + 2);
        }
    }
  }

  void normalise(int64_t r, int64_t h, float *result) const {
    float *row = at(r, h, lo_all);
    const int64_t begins = first[r] - lo_all, ends = last[r] + 1 - lo_all, keys = hi_all - lo_all + 1;
    if (begins >= ends) {
      memset(row, 0, keys * sizeof(float));
      return;
    }
    if (p.stick) {
      take_shares(row + begins, ends - begins);
      memset(row, 0, begins * sizeof(float));
      memset(row + ends, 0, (keys - ends) * sizeof(float));
      return;
    }
    float top = p.sink ? p.sink[h] : -__builtin_inff();
    for (int64_t j = begins; j < ends; ++j) top = row[j] > top ? row[j] : top;
    if (top == -__builtin_inff()) {
      memset(row, 0, keys * sizeof(float));
      return;
    }
    memset(row, 0, begins * sizeof(float));
    memset(row + ends, 0, (keys - ends) * sizeof(float));
    double total = p.sink ? __builtin_expf(p.sink[h] - top) : 0.0f;
    for (int64_t j = begins; j < ends; j += LANES) {
      vec weight = exponential(load(row + j) - top);
      for (int64_t n = ends - j; n < LANES; ++n) weight[n] = 0;
      store(row + j, weight);
      total += sum(weight);
    }
    result[0] = top + __builtin_logf(static_cast<float>(total)), result[1] = 1;
    const float inverse = static_cast<float>(1 / total);
    for (int64_t j = begins; j < ends; ++j) row[j] *= inverse;
  }
};

int64_t program_decode_parts(const Call &c, int workers) {
  if (c.program->num_post) return 1;
  return most(1, least(ceil_div(workers, c.batch), c.keys / PART_KEYS));
}

int64_t program_decode_units(const Call &c, int workers) { return c.batch * program_decode_parts(c, workers); }

size_t program_decode_scratch(const Call &c, int) {
  Arena arena{nullptr};
  ProgramDecoder decoder(c, nullptr, arena);
  return arena.used;
}

// As decode_run and decode_finish; a unit has the results of all rows of an entry.
void program_decode_run(const Call &c, const Worker &worker) {
  Arena arena{worker.scratch};
  ProgramDecoder decoder(c, worker.shared, arena);
  decoder.clear();
  const int64_t parts = program_decode_parts(c, worker.count), units = c.batch * parts;
  float *result = decoder.results;
  for (int64_t unit = worker.index; unit < units; unit += worker.count, result += c.queries * c.heads * decoder.size)
    decoder.run(unit / parts, unit % parts, parts, result);
}

// As merge_parts: what a part leaves scales all before it.
template <class PartOf>
void merge_shares(const Call &c, int64_t row, int64_t h, int64_t parts, const PartOf &part_of) {
  float *values = part_of(0) + 2;
  for (int64_t part = 1; part < parts; ++part) {
    const float *found = part_of(part), factor = __builtin_expf(-found[1]);
    for (int64_t d = 0; d < c.head_width; ++d) values[d] = values[d] * factor + found[2 + d];
  }
  write_result(c, row, h, values);
}

void program_decode_finish(const Call &c, const Worker *workers, int count) {
  const int64_t parts = program_decode_parts(c, count);
  const float *sink = c.program->num_post ? nullptr : c.program->sink;
  Arena arena{workers[0].scratch};
  const Decoder decoder(c, nullptr, arena);
  const int64_t results = decoder.results - workers[0].scratch;
  for (int64_t row = 0; row < c.batch * c.queries; ++row)
    for (int64_t h = 0; h < c.heads; ++h) {
      const auto part_of = [&](int64_t part) {
        const int64_t unit = row / c.queries * parts + part, place = unit / count * c.queries + row % c.queries;
        return workers[unit % count].scratch + results + (place * c.heads + h) * decoder.size;
      };
      if (c.program->stick) merge_shares(c, row, h, parts, part_of);
      else merge_parts(c, row, h, parts, sink ? sink + h : nullptr, part_of);
    }
}

}  // namespace
