// The forward pass by tiles of rows: online softmax over chunks of keys.
#pragma once

#include "rows.h"

namespace {

struct ForwardTile : RowTile {
  Map logits;
  float *out, *top, *total;

  ForwardTile(const Call &call, const float *memory, Arena &arena) : RowTile(call, memory, arena, Geometry(call).forward_history) {
    logits = make_map(arena, g.forward_history, c.heads);
    out = arena.take(c.heads * c.head_width * ROWS);
    top = arena.take(c.heads * ROWS);
    total = arena.take(c.heads * ROWS);
  }

  void run(int64_t unit) {
    move(unit);
    clear();
    if (sees_something()) {
      transpose_in(q, c.q, c.q_stride, static_cast<float>(c.scale), begin);
      walk();
    }
    write();
  }

  void clear() {
    memset(out, 0, c.heads * c.head_width * ROWS * sizeof(float));
    memset(total, 0, c.heads * ROWS * sizeof(float));
    for (int64_t i = 0; i < c.heads * ROWS; ++i) top[i] = -__builtin_inff();
  }

  void walk() {
    const int64_t start = first_base();
    x.begin(start), a.begin(start), logits.begin(start, false);
    for (int64_t base = start; base - 2 * g.right <= hi; base += CHUNK) {
      fill_image(base);
      if (c.width) fill_hidden(base - g.right);
      const Columns cols(base - 2 * g.right, lo, hi);
      if (cols.count()) {
        fill_logits(logits, cols);
        for (int64_t h = 0; h < c.heads; ++h) {
          weigh(h, cols);
          add_values(h, cols);
        }
      }
      x.advance(), a.advance(), logits.restart();
    }
  }

  // Turns the logits of one head into weights, relative to the largest logit so far.
  void weigh(int64_t h, Columns cols) {
    const int64_t stride = c.heads * ROWS;
    float *const first_logit = logits.at(cols.from) + h * ROWS, *const end = first_logit + cols.count() * stride;
    vec now[VECTORS], safe[VECTORS], sums[VECTORS];
    for (int v = 0; v < VECTORS; ++v) now[v] = broadcast(-__builtin_inff());
    for (const float *p = first_logit; p < end; p += stride)
      for (int v = 0; v < VECTORS; ++v) now[v] = larger(load(p + v * LANES), now[v]);
    raise_top(h, now);
    for (int v = 0; v < VECTORS; ++v) {
      const vec reference = load(top + h * ROWS + v * LANES);
      // A row that has seen nothing yet: e^(−∞ − 0) = 0.
      safe[v] = reference == broadcast(-__builtin_inff()) ? vec{} : reference;
      sums[v] = load(total + h * ROWS + v * LANES);
    }
    for (float *p = first_logit; p < end; p += stride)
      for (int v = 0; v < VECTORS; ++v) {
        const vec weight = exponential(load(p + v * LANES) - safe[v]);
        store(p + v * LANES, weight);
        sums[v] += weight;
      }
    for (int v = 0; v < VECTORS; ++v) store(total + h * ROWS + v * LANES, sums[v]);
  }

  // Adds the values of one head by their weights to the output.
  void add_values(int64_t h, Columns cols) {
    float *const head_out = out + h * c.head_width * ROWS;
    const KeyRows values = keys(c.v, c.v_stride, h, cols);
    product<VECTORS>(head_out, ROWS, head_out, ROWS, values.data, values.stride, 1,
                     logits.at(cols.from) + h * ROWS, c.heads * ROWS, cols.count(), c.head_width, Keep(),
                     next_head(c.v, c.v_stride, h, cols, c.head_width, cols.count()));
  }

  // Rescales what one head has summed up so far, if some row's largest logit has grown by so much that
  // weights relative to the old one could become too large. A little growth needs no rescaling.
  void raise_top(int64_t h, const vec *now) {
    constexpr float GROWTH = 8.0f;
    bool grown = false;
    for (int v = 0; v < VECTORS; ++v) grown |= any(now[v] > load(top + h * ROWS + v * LANES) + GROWTH);
    if (!grown) return;
    for (int v = 0; v < VECTORS; ++v) {
      float *p = top + h * ROWS + v * LANES, *t = total + h * ROWS + v * LANES;
      const vec before = load(p), after = larger(now[v], before);
      const vec factor = before == after ? broadcast(1.0f) : exponential(before - after);
      store(p, after);
      store(t, load(t) * factor);
      float *o = out + h * c.head_width * ROWS + v * LANES;
      for (int64_t d = 0; d < c.head_width; ++d, o += ROWS) store(o, load(o) * factor);
    }
  }

  // The sums of weights become their inverses.
  void write() const {
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t r = g.halo; r < rows; ++r) {
        float &sum = total[h * ROWS + r];
        // Nothing visible, or nothing but −∞.
        const bool empty = sum == 0.0f;
        if (c.lse)
          c.lse[(entry * c.heads + h) * c.queries + i0 + r] = empty ? 0.0f : top[h * ROWS + r] + __builtin_logf(sum);
        sum = empty ? 0.0f : 1.0f / sum;
      }
    transpose_out(out, g.halo, [&](int64_t h, int64_t r) {
      return element(c, c.out, entry * c.out_stride[0] + h * c.out_stride[1] + (i0 + r) * c.out_stride[2]);
    }, c.out_stride[2], [&](int64_t h, int64_t r) { return total[h * ROWS + r]; });
  }
};

size_t forward_scratch(const Call &c, int) {
  Arena arena{nullptr};
  ForwardTile tile(c, nullptr, arena);
  return arena.used;
}

int64_t forward_units(const Call &c, int) { return c.batch * Geometry(c).tiles; }

int64_t no_tickets(const Call &) { return 0; }
int64_t no_sums(const Call &, int) { return 0; }
size_t no_floats(const Call &) { return 0; }

// Takes the next unit of work: threads that lost their core for a while take fewer of them.
INLINE int64_t next_unit(const Worker &worker) { return __atomic_fetch_add(worker.dealt, 1, __ATOMIC_RELAXED); }

void forward_run(const Call &c, const Worker &worker) {
  Arena arena{worker.scratch};
  ForwardTile tile(c, worker.shared, arena);
  const int64_t units = forward_units(c, 0);
  for (int64_t unit; (unit = next_unit(worker)) < units;) tile.run(unit);
}

void nothing(const Call &, const Worker *, int) {}

}  // namespace
