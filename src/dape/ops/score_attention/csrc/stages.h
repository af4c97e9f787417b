// Single stages of the forward and the backward pass, run again and again on one chunk of one tile: what
// `dev/stages.py` times. The code is that of the passes themselves; the data stays in the caches.
#pragma once

#include "backward.h"

namespace {

// Multiply-accumulates of one stage on some columns: those that are computed, after Winograd where it is used.
struct StageWork {
  const Call &c;
  double pixels;
  StageWork(const Call &call, Columns cols) : c(call), pixels(static_cast<double>(ROWS) * cols.count()) {}

  double products() const { return pixels * c.heads * c.head_width; }
  double convolution(const Weights &w, int64_t outputs) const {
    return pixels * w.inputs * outputs * (w.pair ? 2.0 : w.taps);
  }
  double outer_products(const GradientSums &sums) const {
    return pixels * sums.inputs * sums.outputs * (sums.paired ? 2.0 : sums.taps);
  }
};

// Independent chains of multiply-adds, as many as registers allow: the most that this core computes.
double peak(int64_t repeats, float *result) {
  constexpr int CHAINS = LANES == 16 ? 24 : 12;
  constexpr int64_t STEPS = 4096;
  vec sums[CHAINS];
  for (int i = 0; i < CHAINS; ++i) sums[i] = broadcast(static_cast<float>(i));
  vec factor = broadcast(0.9999f), addend = broadcast(1e-4f);
  for (int64_t n = 0; n < repeats; ++n)
    for (int64_t step = 0; step < STEPS; ++step)
#pragma GCC unroll 24
      for (int i = 0; i < CHAINS; ++i) sums[i] = sums[i] * factor + addend;
  for (int i = 1; i < CHAINS; ++i) sums[0] += sums[i];
  *result = sum(sums[0]);
  return static_cast<double>(STEPS) * CHAINS * LANES;
}

enum Stage { PEAK, DOTS, EXPAND, PROJECT, SOFTMAX, VALUES, ROWS_IN, DWEIGHTS, DPROJECT, DHIDDEN, DEXPAND, DIMAGE, DQ, DKEYS };

// Runs one stage `repeats` times and returns its multiply-accumulates each time, 0 where it has none worth counting;
// less than 0: there is no such stage in this call.
double run_stage(const Call &c, const Worker &worker, int stage, int64_t repeats) {
  float ignored = 0;
  if (stage == PEAK) return peak(repeats, &ignored) + (ignored == 1.5f);
  const bool needs_width = stage == EXPAND || stage == PROJECT || (stage >= DPROJECT && stage <= DIMAGE);
  if (stage > DKEYS || (needs_width && !c.width)) return -1;
  const auto again = [repeats](const auto &step) {
    for (int64_t n = 0; n < repeats; ++n) step();
  };
  Arena arena{worker.scratch};
  if (stage <= ROWS_IN) {
    ForwardTile tile(c, worker.shared, arena);
    tile.move(0);
    tile.clear();
    tile.transpose_in(tile.q, c.q, c.q_stride, static_cast<float>(c.scale), 0);
    const int64_t base = most(0, tile.lo + (tile.hi - tile.lo) / 2) / CHUNK * CHUNK;
    tile.x.begin(base), tile.a.begin(base), tile.logits.begin(base);
    const Columns cols(base, tile.lo, tile.hi);
    const StageWork work(c, cols);
    tile.fill_image(base);
    if (c.width) tile.fill_hidden(base);
    tile.fill_logits(tile.logits, cols);
    switch (stage) {
      case DOTS: return again([&] { tile.dots(tile.x, tile.q, c.k, c.k_stride, cols); }), work.products();
      case EXPAND: return again([&] { tile.fill_hidden(base); }), work.convolution(tile.shared.expand, c.width);
      case PROJECT:
        return again([&] { tile.fill_logits(tile.logits, cols); }), work.convolution(tile.shared.project, c.heads);
      case SOFTMAX:
        return again([&] {
          for (int64_t h = 0; h < c.heads; ++h) tile.weigh(h, cols);
        }), 0;
      case VALUES:
        return again([&] {
          for (int64_t h = 0; h < c.heads; ++h) tile.add_values(h, cols);
        }), work.products();
      default:
        return again([&] {
          tile.transpose_in(tile.q, c.q, c.q_stride, static_cast<float>(c.scale), 0);
          tile.write();
        }), 0;
    }
  }
  BackwardTile tile(c, worker, arena);
  memset(tile.sums.dw1, 0, tile.sums.floats * sizeof(float));
  tile.move(0);
  tile.read_rows();
  const int64_t base = most(0, tile.lo + (tile.hi - tile.lo) / 2) / CHUNK * CHUNK;
  Map *maps[] = {&tile.x, &tile.a, &tile.weights, &tile.dlogits, &tile.dhidden, &tile.dimage};
  for (Map *map : maps) map->begin(base);
  const Columns cols(base, tile.lo, tile.hi);
  const StageWork work(c, cols);
  tile.fill_image(base);
  if (c.width) tile.fill_hidden(base);
  tile.fill_dlogits(base);
  if (c.width) tile.fill_dhidden(base), tile.fill_dimage(base);
  const Map &dscores = c.width ? tile.dimage : tile.dlogits;
  switch (stage) {
    case DWEIGHTS: return again([&] { tile.dots(tile.dlogits, tile.grad, c.v, c.v_stride, cols); }), work.products();
    case DPROJECT: return again([&] { tile.add_project_gradients(base); }), work.outer_products(Partials::project(c));
    case DHIDDEN: return again([&] { tile.fill_dhidden(base); }), work.convolution(tile.shared.project_back, c.width);
    case DEXPAND: return again([&] { tile.add_expand_gradients(base); }), work.outer_products(Partials::expand(c));
    case DIMAGE: return again([&] { tile.fill_dimage(base); }), work.convolution(tile.shared.expand_back, c.channels);
    case DQ: return again([&] { tile.add_dq(dscores, cols); }), work.products();
    default:
      return again([&] {
        tile.add_to_keys(c.dk, c.dk_low, dscores, tile.q_rows, cols, tile.entry);
        tile.add_to_keys(c.dv, c.dv_low, tile.weights, tile.grad_rows, cols, tile.entry);
      }), 2 * work.products();
  }
}

}  // namespace
