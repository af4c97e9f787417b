// A bias that is a piecewise linear function of distance and query: f_h(values[distance] · row_scale[query]).
//
// Neighbouring queries lie on few pieces, mostly on one: a column of the bias is a multiply-add a head, and its gradient
// two sums by piece, kept by lanes.
#pragma once

#include "call.h"
#include "simd.h"

namespace {

// The piece on which each lane lies: how many knots are below it.
INLINE ivec piece_of(const Call &c, vec x) {
  ivec found = ivec{};
  // A comparison that holds is −1.
  for (int64_t p = 0; p + 1 < c.pieces; ++p) found -= broadcast(c.knots[p]) < x;
  return found;
}

// Runs step(piece, lanes that lie on it) for every piece that has any.
template <class Step>
INLINE void each_piece(ivec pieces, const Step &step) {
  int32_t lowest = pieces[0], highest = lowest;
  for (int n = 1; n < LANES; ++n) {
    lowest = pieces[n] < lowest ? pieces[n] : lowest;
    highest = pieces[n] > highest ? pieces[n] : highest;
  }
  for (int32_t p = lowest; p <= highest; ++p) {
    const ivec on = pieces == broadcast(p);
    if (lowest == highest || any(on)) step(p, on);
  }
}

}  // namespace
