// The forward pass by tiles of rows: online softmax over chunks of keys.
#pragma once

#include "rows.h"

namespace {

struct ForwardTile : RowTile {
  Map logits;
  float *out, *top, *total, *dense;

  ForwardTile(const Call &call, const float *memory, Arena &arena) : RowTile(call, memory, arena) {
    logits = make_map(arena, g, c.heads);
    out = arena.take(c.heads * c.head_width * ROWS);
    top = arena.take(c.heads * ROWS);
    total = arena.take(c.heads * ROWS);
    dense = arena.take(c.heads * ROWS);
  }

  void run(int64_t unit) {
    move(unit);
    memset(out, 0, c.heads * c.head_width * ROWS * sizeof(float));
    memset(total, 0, c.heads * ROWS * sizeof(float));
    for (int64_t i = 0; i < c.heads * ROWS; ++i) top[i] = -__builtin_inff();
    if (sees_something()) {
      transpose_in(q, c.q, c.q_stride, static_cast<float>(c.scale));
      walk();
    }
    write();
  }

  void walk() {
    const int64_t start = first_base();
    x.begin(start), a.begin(start), logits.begin(start);
    for (int64_t base = start; base - 2 * g.right <= hi; base += CHUNK) {
      fill_image(base);
      if (c.width) fill_hidden(base - g.right);
      const Columns cols(base - 2 * g.right, lo, hi);
      if (cols.count()) {
        fill_logits(logits, cols, dense);
        for (int64_t h = 0; h < c.heads; ++h) attend(h, cols);
      }
      if (c.width) x.advance(), a.advance(), logits.advance();
      else x.base += CHUNK, logits.base += CHUNK;
    }
  }

  // Turns the logits of one head into weights and adds their values to the output.
  void attend(int64_t h, Columns cols) {
    const int64_t stride = c.heads * ROWS;
    bool rescale = false;
    vec factor[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
      float *p = logits.at(cols.from) + h * ROWS + v * LANES;
      const vec before = load(top + h * ROWS + v * LANES);
      vec now = before;
      for (int64_t j = 0; j < cols.count(); ++j) now = larger(load(p + j * stride), now);
      // A row that has seen nothing yet: e^(−∞ − 0) = 0.
      const vec safe = now == broadcast(-__builtin_inff()) ? vec{} : now;
      vec sum = vec{};
      for (int64_t j = 0; j < cols.count(); ++j) {
        const vec weight = exponential(load(p + j * stride) - safe);
        store(p + j * stride, weight);
        sum += weight;
      }
      factor[v] = exponential(before - safe);
      float *t = total + h * ROWS + v * LANES;
      store(t, load(t) * factor[v] + sum);
      store(top + h * ROWS + v * LANES, now);
      rescale |= any(factor[v] != broadcast(1.0f));
    }
    float *head_out = out + h * c.head_width * ROWS;
    if (rescale)
      for (int64_t d = 0; d < c.head_width; ++d)
        for (int v = 0; v < VECTORS; ++v) {
          float *p = head_out + d * ROWS + v * LANES;
          store(p, load(p) * factor[v]);
        }
    product<VECTORS>(head_out, ROWS, head_out, ROWS, key(c.v, c.v_stride, h, cols.from), c.v_stride[2], 1,
                     logits.at(cols.from) + h * ROWS, stride, cols.count(), c.head_width);
  }

  void write() const {
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t r = 0; r < rows; ++r) {
        const float sum = total[h * ROWS + r];
        // Nothing visible, or nothing but −∞.
        const bool empty = sum == 0.0f;
        const float inverse = empty ? 0.0f : 1.0f / sum;
        float *row = c.out + entry * c.out_stride[0] + h * c.out_stride[1] + (i0 + r) * c.out_stride[2];
        const float *p = out + h * c.head_width * ROWS + r;
        for (int64_t d = 0; d < c.head_width; ++d) row[d] = p[d * ROWS] * inverse;
        c.lse[(entry * c.heads + h) * c.queries + i0 + r] =
            empty ? 0.0f : top[h * ROWS + r] + __builtin_logf(sum);
      }
  }
};

size_t forward_scratch(const Call &c, int) {
  Arena arena{nullptr};
  ForwardTile tile(c, nullptr, arena);
  return arena.used;
}

int64_t forward_units(const Call &c, int) { return c.batch * Geometry(c).tiles; }

int64_t no_tickets(const Call &) { return 0; }

void forward_run(const Call &c, const Worker &worker) {
  Arena arena{worker.scratch};
  ForwardTile tile(c, worker.shared, arena);
  const int64_t units = forward_units(c, 0);
  for (int64_t unit = worker.index; unit < units; unit += worker.count) tile.run(unit);
}

void nothing(const Call &, const Worker *, int) {}

}  // namespace
