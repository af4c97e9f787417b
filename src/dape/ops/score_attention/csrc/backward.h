// The backward pass by tiles of rows: recomputes the logits, then runs the stages in reverse, each some
// columns behind the one before.
//
// Every tile adds to the gradients of all keys it sees. Tiles take turns at each chunk of keys, in their
// own order, so the sums come out the same whatever the threads do, without a copy for each thread.
#pragma once

#include "forward.h"

namespace {

// How many columns past the last visible key the walk goes on, until the last stage is done: the gradient of the
// image up to that key, and that of the hidden map, which goes on `ahead` columns past it.
int64_t backward_delay(const Call &c) {
  const Geometry g(c);
  return c.width ? 2 * g.right + c.left + most(c.left, g.ahead) : 0;
}

// Sums over some of the tiles; `lanes` sums are added up over the lanes at the end.
struct Partials {
  float *dw1, *dw2, *db1, *db2, *values, *slopes, *offsets, *hidden, *edges;
  size_t floats;

  static GradientSums expand(const Call &c) { return {c.width, c.channels, c.taps}; }
  static GradientSums project(const Call &c) { return {c.heads, c.width, c.taps}; }

  Partials(const Call &c, const Shared &s, float *memory) {
    Arena arena{memory};
    dw1 = arena.take(expand(c).floats());
    dw2 = arena.take(project(c).floats());
    db1 = arena.take(c.width * LANES);
    db2 = arena.take(c.heads * LANES);
    values = arena.take(c.bias == BY_DISTANCE ? c.heads * s.values_stride : c.bias == CURVE ? s.values_stride : 0);
    slopes = arena.take(c.pieces * c.heads * LANES);
    offsets = arena.take(c.pieces * c.heads * LANES);
    hidden = arena.take(Table(c).width * s.hidden_stride);
    edges = direct_edges(c) ? s.dedges : arena.take(s.edges_floats);
    floats = arena.used;
  }
};

// Adds what some columns of a map hold, channel by channel; the columns are summed by themselves first.
INLINE void add_column_sums(float *sums, const Map &map, Columns cols) {
  for (int64_t i = 0; i < map.channels; ++i) {
    vec s = vec{};
    for (int64_t j = cols.from; j < cols.to; ++j)
      for (int v = 0; v < VECTORS; ++v) s += load(map.at(j) + i * ROWS + v * LANES);
    store(sums + i * LANES, load(sums + i * LANES) + s);
  }
}

// Adds a column [channels][ROWS] to tables of distances, where the rows stand side by side.
INLINE void add_to_table(float *table, int64_t stride, const float *column, int64_t channels) {
  for (int64_t i = 0; i < channels; ++i)
    for (int v = 0; v < VECTORS; ++v) {
      float *p = table + i * stride + v * LANES;
      store(p, load(p) + load(column + i * ROWS + v * LANES));
    }
}

// What one tile has to add to the gradients of a chunk's keys, put aside until the tiles before it have done so.
struct Turn {
  int32_t *ticket, number;
  int64_t entry;
  Map dscores, weights;
  const float *q_rows, *grad_rows;
  Columns key_columns{0, 0, -1}, value_columns{0, 0, -1};

  bool come() const { return __atomic_load_n(ticket, __ATOMIC_ACQUIRE) == number; }
};

// A queue of turns, so that a thread that lost its core does not hold the others: they go on with their own tiles.
// Their maps take 2 MB at most. There is none for large batches, whose entries do not wait for each other, nor for programs,
// whose tiles share more than keys and values.
struct Turns {
  // ROW_SETS: how many tiles' rows of q and of the output's gradient are kept for turns in the queue.
  static constexpr int64_t MOST = 64, FLOATS = 1 << 19, ROW_SETS = 4;
  Turn queue[MOST];
  int64_t size = 0, first = 0, count = 0;
  // Two maps of map_floats numbers for each place in the queue.
  float *maps;
  int64_t map_floats;

  Turns(const Call &c, const Worker &w, Arena &arena) : map_floats(CHUNK * c.heads * ROWS) {
    if (w.count > 1 && c.batch < 4 * w.count && !c.program) size = least(MOST, FLOATS / (2 * map_floats));
    maps = arena.take(size * 2 * map_floats);
  }
  int64_t row_sets() const { return size ? ROW_SETS : 1; }
  Turn &front() { return queue[first]; }
  // An empty queue begins anew, so that it touches no more memory than it needs.
  void pop() { first = --count ? (first + 1) % size : 0; }
  bool reads(const float *rows) const {
    for (int64_t n = 0; n < count; ++n)
      if (queue[(first + n) % size].q_rows == rows) return true;
    return false;
  }
  Turn &push() { return queue[(first + count++) % size]; }
  // Some columns of a map's scores, copied to where a turn keeps its first or second map.
  Map copy(const Turn &turn, int64_t which, const Map &map, Columns cols, int64_t heads) const {
    float *out = maps + ((&turn - queue) * 2 + which) * map_floats;
    const Map copied{out, heads, 0, cols.from, 0};
    for (int64_t j = cols.from; j < cols.to; ++j)
      for (int64_t h = 0; h < heads; ++h)
        memcpy(copied.at(j) + h * ROWS, map.at(j) + map.head(h) * ROWS, ROWS * sizeof(float));
    return copied;
  }
};

struct BackwardTile : RowTile {
  const Worker &worker;
  const int64_t padded_width;
  Partials sums;
  Map weights, dlogits, dhidden, dimage;
  Turns turns;
  // q_rows and grad_rows lie behind each other, in one of several sets.
  const size_t rows_floats;
  float *row_sets, *q_rows, *grad_rows, *grad, *dq, *lse, *delta;
  float drow_scale[ROWS];

  BackwardTile(const Call &call, const Worker &w, Arena &arena)
      : RowTile(call, w.shared, arena, Geometry(call).backward_history),
        worker(w),
        padded_width(ceil_div(c.head_width, LANES) * LANES),
        sums(call, shared, w.sums),
        turns(call, w, arena),
        rows_floats(c.heads * padded_width * ROWS) {
    weights = make_map(arena, g.backward_history, c.heads);
    dlogits = make_map(arena, g.backward_history, c.heads);
    dhidden = make_map(arena, g.backward_history, c.width);
    dimage = make_map(arena, g.backward_history, c.width ? c.channels : 0);
    const size_t rows_size = c.heads * c.head_width * ROWS;
    row_sets = arena.take(turns.row_sets() * 2 * rows_floats);
    use_rows(0);
    grad = arena.take(rows_size);
    dq = arena.take(rows_size);
    lse = arena.take(c.heads * ROWS);
    delta = arena.take(c.heads * ROWS);
  }

  void run(int64_t unit) {
    move(unit);
    if (!sees_something()) memset(dq, 0, c.heads * c.head_width * ROWS * sizeof(float));
    else {
      read_rows();
      memset(drow_scale, 0, sizeof drow_scale);
      walk();
      if (c.bias == CURVE) memcpy(c.drow_scale + entry * c.queries + i0, drow_scale, rows * sizeof(float));
    }
    write_dq();
  }

  void use_rows(int64_t set) { q_rows = row_sets + set * 2 * rows_floats, grad_rows = q_rows + rows_floats; }

  // Turns to rows that no turn in the queue reads.
  void find_free_rows() {
    if (!turns.reads(q_rows)) return;
    const int64_t set = (q_rows - row_sets) / (2 * rows_floats);
    use_rows((set + 1) % Turns::ROW_SETS);
    while (turns.reads(q_rows)) wait_for_front();
  }

  void read_rows() {
    find_free_rows();
    const float scale = static_cast<float>(c.scale);
    transpose_in(q, c.q, c.q_stride, scale, begin);
    transpose_in(grad, c.grad_out, c.grad_stride, 1.0f, g.halo);
    copy_rows(q_rows, c.q, c.q_stride, scale, begin);
    copy_rows(grad_rows, c.grad_out, c.grad_stride, 1.0f, g.halo);
    read_sums();
  }

  // This tile's rows of x [B, H, Tq, D], from lane `from` on, as [H][ROWS][padded D].
  void copy_rows(float *out, const void *data, const int64_t *stride, float scale, int64_t from) const {
    memset(out, 0, c.heads * ROWS * padded_width * sizeof(float));
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t r = from; r < rows; ++r) {
        const float *row = query_row(data, stride, h, r);
        float *p = out + (h * ROWS + r) * padded_width;
        for (int64_t d = 0; d < c.head_width; ++d) p[d] = row[d] * scale;
      }
  }

  // The log-sum-exp of each row and delta = Σ_d out · grad_out, summed in the same order as the products
  // with single values: a row that sees one key then has a gradient of exactly 0.
  void read_sums() {
    // dq is free until the walk begins.
    transpose_in(dq, c.out, c.out_stride, 1.0f, g.halo);
    for (int64_t h = 0; h < c.heads; ++h) {
      for (int v = 0; v < VECTORS; ++v) {
        vec sum = vec{};
        for (int64_t at = (h * c.head_width) * ROWS + v * LANES; at < (h + 1) * c.head_width * ROWS; at += ROWS)
          sum += load(dq + at) * load(grad + at);
        store(delta + h * ROWS + v * LANES, sum);
      }
      // Lanes past the last row get weights e^(−∞) = 0.
      for (int64_t r = 0; r < ROWS; ++r)
        lse[h * ROWS + r] =
            c.lse && r >= begin && r < rows ? c.lse[(entry * c.heads + h) * c.queries + i0 + r] : __builtin_inff();
    }
    memset(dq, 0, c.heads * c.head_width * ROWS * sizeof(float));
  }

  void walk() {
    const int64_t start = first_base();
    Map *maps[] = {&x, &a, &dlogits, &dhidden};
    for (Map *map : maps) map->begin(start);
    weights.begin(start, false), dimage.begin(start, false);
    for (int64_t base = start; base <= hi + backward_delay(c); base += CHUNK) {
      fill_image(base);
      if (c.width) fill_hidden(base - g.right);
      const int64_t logits_base = base - 2 * g.right;
      fill_dlogits(logits_base);
      const int64_t dhidden_base = logits_base - c.left, dimage_base = dhidden_base - c.left;
      if (c.width) {
        add_project_gradients(logits_base);
        fill_dhidden(dhidden_base);
        add_expand_gradients(dhidden_base);
        fill_dimage(dimage_base);
      }
      const Map &dscores = c.width ? dimage : dlogits;
      const Columns cols(c.width ? dimage_base : base, lo, hi);
      if (cols.count()) {
        add_dq(dscores, cols);
        add_bias_gradients(cols);
      }
      take_turn(base / CHUNK, dscores, cols, weights, Columns(logits_base, lo, hi), [] {});
      x.advance(), a.advance(), dlogits.advance(), dhidden.advance();
      weights.restart(), dimage.restart();
    }
  }

  // Weights P = e^(logits − lse) and dL = P · (grad · v − delta), 0 where not visible.
  void fill_dlogits(int64_t base) {
    const Columns cols(base, lo, hi);
    cols.clear_rest(dlogits, base, g.reach);
    if (!cols.count()) return;
    fill_logits(weights, cols);
    dots(dlogits, grad, c.v, c.v_stride, cols);
    for (int64_t j = cols.from; j < cols.to; ++j) {
      float *w = weights.at(j), *d = dlogits.at(j);
      for (int64_t i = 0; i < c.heads * ROWS; i += LANES) {
        const vec weight = exponential(load(w + i) - load(lse + i));
        store(w + i, weight);
        store(d + i, weight * (load(d + i) - load(delta + i)));
      }
      hide(d, c.heads, j);
    }
  }

  void add_project_gradients(int64_t base) {
    const Columns cols(base, lo, hi);
    if (!cols.count()) return;
    Partials::project(c).add<VECTORS>(sums.dw2, dlogits.at(cols.from), c.heads * ROWS, a.at(cols.from - c.left),
                                      c.width * ROWS, cols.count());
    add_column_sums(sums.db2, dlogits, cols);
  }

  // The gradient of the hidden map before its activation.
  void fill_dhidden(int64_t base) {
    const Columns cols(base, lo, hi + g.ahead);
    cols.clear_rest(dhidden, base, g.reach);
    const vec slope = broadcast(static_cast<float>(c.slope));
    convolve(shared.project_back, dlogits, g.right, cols, c.width, [&](int64_t j) {
      const float *activated = a.at(j);
      return target(dhidden.at(j), nullptr, 0, [slope, activated](vec z, int p, int v) {
        return load(activated + p * ROWS + v * LANES) > vec{} ? z : z * slope;
      });
    });
    for (int64_t j = cols.from; j < cols.to; ++j) hide(dhidden.at(j), c.width, j, g.ahead);
  }

  void add_expand_gradients(int64_t base) {
    const Columns cols(base, lo, hi + g.ahead);
    if (!cols.count()) return;
    Partials::expand(c).add<VECTORS>(sums.dw1, dhidden.at(cols.from), c.width * ROWS, x.at(cols.from - c.left),
                                     c.channels * ROWS, cols.count());
    if (c.bias_tables) return add_table_gradients(dhidden, cols);
    add_column_sums(sums.db1, dhidden, cols);
  }

  // Of a large table, the columns are summed in a slice first: its rows lie side by side, the table's on as many pages.
  void add_table_gradients(const Map &map, Columns cols) {
    if (!small_table()) memset(slice, 0, table.width * SLICE * sizeof(float));
    for (int64_t j = cols.from; j < cols.to; ++j) {
      const TablePlace place = table_column(sums.hidden, cols, j);
      const float *column = map.at(j);
      if (!has_edge(j)) add_to_table(place.data, place.stride, column, table.width);
      else if (same_first() && shared.edges_margin && !direct_edges(c))
        add_to_table(sums.edges + edge_place(0, j, 0), shared.edges_stride, column, table.width);
      else
        for (int64_t w = 0; w < table.width; ++w)
          // A row's place before the first distance would be another row's, which another thread may add to.
          for (int64_t r = first_row(j); r < rows; ++r)
            *(at_edge(r, j) ? sums.edges + edge_place(r, j, w) : place.data + w * place.stride + r) += column[w * ROWS + r];
    }
    if (small_table()) return;
    for (int64_t w = 0; w < table.width; ++w)
      add_scaled(sums.hidden + w * shared.hidden_stride + table_place(cols.to - 1), slice + w * SLICE, 1.0f,
                 cols.count() - 1 + ROWS);
  }

  // The gradient of scores (and bias channels): through the convolutions, and directly.
  void fill_dimage(int64_t base) {
    const Columns cols(base, lo, hi);
    convolve(shared.expand_back, dhidden, g.right, cols, c.heads,
             [&](int64_t j) { return target(dimage.at(j), dlogits.at(j), ROWS, Keep()); });
    if (c.channels > c.heads)
      convolve(shared.expand_back, dhidden, g.right, cols, c.heads, [&](int64_t j) {
        return target(dimage.at(j) + c.heads * ROWS, c.residual_bias ? dlogits.at(j) : nullptr, ROWS, Keep());
      }, c.heads);
    for (int64_t j = cols.from; j < cols.to; ++j) hide(dimage.at(j), c.channels, j);
  }

  void add_dq(const Map &dscores, Columns cols) {
    for (int64_t h = 0; h < c.heads; ++h) {
      float *out = dq + h * c.head_width * ROWS;
      const KeyRows head = keys(c.k, c.k_stride, h, cols);
      product<VECTORS>(out, ROWS, out, ROWS, head.data, head.stride, 1,
                       dscores.at(cols.from) + dscores.head(h) * ROWS, dscores.channels * ROWS, cols.count(), c.head_width,
                       Keep(), next_head(c.k, c.k_stride, h, cols, c.head_width, cols.count()));
    }
  }

  void add_bias_gradients(Columns cols) {
    const bool channel = c.width && c.channels > c.heads;
    if (c.bias == NO_BIAS || !(channel || c.residual_bias)) return;
    if (c.bias == DENSE && !c.dense_grad) return;
    for (int64_t j = cols.from; j < cols.to; ++j) {
      const float *column = channel ? dimage.at(j) + c.heads * ROWS : dlogits.at(j);
      if (c.bias == BY_DISTANCE) {
        add_to_table(sums.values + value_place(j), shared.values_stride, column, c.heads);
        continue;
      }
      if (c.bias == CURVE) {
        add_curve_gradients(column, j);
        continue;
      }
      const int64_t b = c.dense_batch == 1 ? 0 : entry;
      for (int64_t h = 0; h < c.heads; ++h) {
        float *p = c.ddense + ((b * c.heads + h) * c.queries + i0) * c.keys + j;
        for (int r = 0; r < rows; ++r) p[r * c.keys] += column[h * ROWS + r];
      }
    }
  }

  // From the gradient of one column of the bias, [H][ROWS].
  void add_curve_gradients(const float *column, int64_t j) {
    for (int v = 0; v < VECTORS; ++v) {
      const vec value = load(shared.values + value_place(j) + v * LANES), scale = load(row_scale + v * LANES);
      const vec x = value * scale;
      vec dx = vec{};
      each_piece(piece_of(c, x), [&](int32_t piece, ivec on) {
        const float *slope = c.slopes + piece * c.heads;
        float *slopes = sums.slopes + piece * c.heads * LANES, *offsets = sums.offsets + piece * c.heads * LANES;
        for (int64_t h = 0; h < c.heads; ++h) {
          const vec d = on ? load(column + h * ROWS + v * LANES) : vec{};
          store(slopes + h * LANES, load(slopes + h * LANES) + d * x);
          store(offsets + h * LANES, load(offsets + h * LANES) + d);
          dx += d * broadcast(slope[h]);
        }
      });
      float *place = sums.values + value_place(j) + v * LANES, *row = drow_scale + v * LANES;
      store(place, load(place) + dx * scale);
      store(row, load(row) + dx * value);
    }
  }

  // Adds to the gradients of keys and values, and whatever else tiles share, when the tiles before have done so.
  template <class Shared>
  void take_turn(int64_t chunk, const Map &dscores, Columns key_columns, const Map &weighing, Columns value_columns,
                 const Shared &add_shared) {
    take_turns();
    const int64_t place = entry * worker.num_tickets + chunk;
    const Turn turn{worker.tickets + place, worker.turns[place]++, entry, dscores, weighing, q_rows, grad_rows, key_columns, value_columns};
    if (!turns.size)
      for (int spins = 0; !turn.come(); ++spins) dape_wait(spins);
    if (turn.come()) return add(turn, add_shared);
    if (turns.count == turns.size) wait_for_front();
    Turn &later = turns.push() = turn;
    later.dscores = turns.copy(later, 0, dscores, key_columns, c.heads);
    later.weights = turns.copy(later, 1, weighing, value_columns, c.heads);
  }

  template <class Shared>
  void add(const Turn &turn, const Shared &add_shared) const {
    add_to_keys(c.dk, c.dk_low, turn.dscores, turn.q_rows, turn.key_columns, turn.entry);
    add_to_keys(c.dv, c.dv_low, turn.weights, turn.grad_rows, turn.value_columns, turn.entry);
    add_shared();
    __atomic_store_n(turn.ticket, turn.number + 1, __ATOMIC_RELEASE);
  }

  // Runs the queued updates that are ready. A thread that waits for another polls this, because the other may depend on
  // one of them.
  void take_turns() {
    for (; turns.count && turns.front().come(); turns.pop()) add(turns.front(), [] {});
  }

  void wait_for_front() {
    const int64_t before = turns.count;
    for (int spins = 0; take_turns(), turns.count == before; ++spins) dape_wait(spins);
  }

  // Adds Σ_rows coefficients[column][H][row] · rows_data[H][row][D] to the gradient of keys or values.
  void add_to_keys(void *gradient, uint16_t *low, const Map &map, const float *rows_data, Columns cols,
                   int64_t batch_entry) const {
    if (!cols.count()) return;
    const int64_t strides[] = {c.groups * c.keys * c.head_width, c.keys * c.head_width, c.head_width};
    const int64_t steps = cols.count() * ceil_div(c.head_width, 4 * LANES);
    for (int64_t h = 0; h < c.heads; ++h) {
      void *const place = const_cast<void *>(key(gradient, strides, h, cols.from, batch_entry));
      // Key heads of an entry lie side by side, and so do their rows.
      const int64_t numbers = cols.count() * c.head_width;
      uint16_t *const high = static_cast<uint16_t *>(place);
      uint16_t *const rest = low ? low + (high - static_cast<uint16_t *>(gradient)) : nullptr;
      if (rest) join_row(key_scratch, high, rest, numbers);
      float *out = rest ? key_scratch : static_cast<float *>(place);
      const float *coef = map.at(cols.from) + map.head(h) * ROWS, *data = rows_data + h * ROWS * padded_width;
      const ptrdiff_t stride = map.channels * ROWS;
      Prefetch ahead = next_head(gradient, strides, h, cols, steps, ROWS, batch_entry);
      int64_t d = 0;
      const auto add = [&](auto tile) {
        constexpr int V = decltype(tile)::vectors;
        product<V, decltype(tile)::outputs>(out + d, c.head_width, out + d, c.head_width, coef, 1, stride, data + d, padded_width, ROWS,
                   cols.count(), Keep(), PrefetchBy{ahead});
        d += V * LANES;
      };
      while (d + 4 * LANES <= c.head_width) add(Tile<4, SUMS / 4>());
      if (d + 3 * LANES <= c.head_width) add(Tile<3, SUMS / 3>());
      if (d + 2 * LANES <= c.head_width) add(Tile<2, SUMS / 2>());
      if (d + LANES <= c.head_width) add(Tile<1, SUMS>());
      if (d < c.head_width) add_ragged(out + d, coef, stride, data + d, c.head_width - d, cols.count());
      if (rest) split_row(high, rest, key_scratch, numbers);
    }
  }

  // The same for the last lanes of a head width that is no multiple of the vector's.
  void add_ragged(float *out, const float *coef, ptrdiff_t stride, const float *data, int64_t lanes, int64_t columns) const {
    float part[CHUNK * LANES];
    product<1>(part, LANES, nullptr, 0, coef, 1, stride, data, padded_width, ROWS, columns);
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t d = 0; d < lanes; ++d) out[j * c.head_width + d] += part[j * LANES + d];
  }

  void write_dq() const {
    const float scale = static_cast<float>(c.scale);
    const auto place = [&](int64_t h, int64_t r) { return ((entry * c.heads + h) * c.queries + i0 + r) * c.head_width; };
    if (!c.dq_low)
      return transpose_out(dq, g.halo, [&](int64_t h, int64_t r) { return element(c, c.dq, place(h, r)); }, c.head_width,
                           [scale](int64_t, int64_t) { return scale; });
    // Rows that another tile adds to are rounded at the end.
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t r = g.halo; r < rows; ++r) {
        const float *p = dq + h * c.head_width * ROWS + r;
        for (int64_t d = 0; d < c.head_width; ++d) row_scratch[d] = p[d * ROWS] * scale;
        split_row(static_cast<uint16_t *>(c.dq) + place(h, r), c.dq_low + place(h, r), row_scratch, c.head_width);
      }
  }

  // Adds a set of sums to the gradients of the tables, or of those that are made here, to those of the first set.
  void finish_tables(const Partials &first) const {
    const bool made = BiasTables::wanted(c);
    if (made && sums.hidden == first.hidden) return;
    float *hidden = made ? first.hidden + ROWS : c.dhidden, *edges = made ? first.edges : c.dedges;
    const int64_t stride = made ? shared.hidden_stride : c.table_length;
    for (int64_t w = 0; w < table.width; ++w)
      add_scaled(hidden + w * stride, sums.hidden + w * shared.hidden_stride + ROWS, 1.0f, c.table_length);
    if (!direct_edges(c)) add_scaled(edges, sums.edges, 1.0f, shared.edges_floats);
  }

  // Counts a tile that another thread runs.
  void pass(int64_t unit) {
    move(unit);
    if (!sees_something()) return;
    int32_t *turns = worker.turns + entry * worker.num_tickets;
    for (int64_t base = first_base(); base <= hi + backward_delay(c); base += CHUNK) ++turns[base / CHUNK];
  }
};

int64_t backward_tickets(const Call &c) { return (c.keys - 1 + backward_delay(c)) / CHUNK + 1; }

// A bias gradient shared by the batch has one writer for each row: the entries of a tile are one unit of work.
bool by_tile(const Call &c) { return c.bias == DENSE && c.dense_grad && c.dense_batch == 1; }

int64_t backward_units(const Call &c, int) { return (by_tile(c) ? 1 : c.batch) * Geometry(c).tiles; }

size_t backward_scratch(const Call &c, int workers) {
  Arena arena{nullptr};
  Worker worker{};
  worker.count = workers;
  BackwardTile tile(c, worker, arena);
  return arena.used;
}

size_t backward_sums_floats(const Call &c) { return Partials(c, Shared(c, nullptr), nullptr).floats; }

// How many sets of sums units of work share: unit n adds to set n % sets, after unit n - sets has done so. That fixes
// the order of every sum whichever thread takes a unit; with more sets than threads none waits for one that lost its
// core. The tables of long inputs are too large for that.
int64_t num_sets(const Call &c, int64_t units, int workers) {
  if (workers == 1 || c.table_length > 4096) return workers;
  return c.batch == 1 ? most(workers, least(units / 4, 2 * workers)) : most(workers, least(units / 8, 4 * workers));
}

int64_t backward_sums(const Call &c, int workers) { return num_sets(c, backward_units(c, workers), workers); }

// Deals out the units of work; every thread sees all of them in order, those of others to count their turns.
// `size`: tiles a unit; use(set): turns to a set of sums; clear(): sets it to zero.
template <class Tile, class Use, class Clear>
void run_units(Tile &tile, const Worker &worker, int64_t units, int64_t size, const Use &use, const Clear &clear) {
  const int64_t sets = num_sets(tile.c, units, worker.count);
  for (int64_t unit, seen = 0; (unit = next_unit(worker)) < units; ++seen) {
    for (; seen < unit; ++seen)
      for (int64_t n = 0; n < size; ++n) tile.pass(seen * size + n);
    const int64_t set = unit % sets;
    const int32_t before = static_cast<int32_t>(unit / sets);
    for (int spins = 0; __atomic_load_n(worker.finished + set, __ATOMIC_ACQUIRE) != before; ++spins) {
      dape_wait(spins);
      tile.take_turns();
    }
    use(worker.sums + set * worker.sums_floats);
    if (!before) clear();
    for (int64_t n = 0; n < size; ++n) tile.run(unit * size + n);
    __atomic_store_n(worker.finished + set, before + 1, __ATOMIC_RELEASE);
  }
  while (tile.turns.count) tile.wait_for_front();
}

void backward_run(const Call &c, const Worker &worker) {
  Arena arena{worker.scratch};
  BackwardTile tile(c, worker, arena);
  run_units(tile, worker, backward_units(c, 0), by_tile(c) ? c.batch : 1,
            [&](float *sums) { tile.sums = Partials(c, tile.shared, sums); },
            [&] { memset(tile.sums.dw1, 0, tile.sums.floats * sizeof(float)); });
}

// Rounds the gradients that were kept in two halves.
void round_gradients(const Call &c) {
  const int64_t queries = c.batch * c.heads * c.queries * c.head_width, keys = c.batch * c.groups * c.keys * c.head_width;
  round_sums(c, c.dq, c.dq_low, queries);
  round_sums(c, c.dk, c.dk_low, keys);
  round_sums(c, c.dv, c.dv_low, keys);
}

// All sets of sums, in order; those that a unit has added to.
void backward_finish(const Call &c, const Worker *workers, int count) {
  Arena arena{workers[0].scratch};
  BackwardTile tile(c, workers[0], arena);
  const int64_t units = backward_units(c, count), sets = least(units, num_sets(c, units, count));
  const Partials first(c, tile.shared, workers[0].sums);
  for (int64_t set = 0; set < sets; ++set) {
    tile.sums = Partials(c, tile.shared, workers[0].sums + set * workers[0].sums_floats);
    const Partials &s = tile.sums;
    for (int64_t w = 0; w < c.width; ++w) {
      for (int64_t i = 0; i < c.channels; ++i)
        for (int64_t t = 0; t < c.taps; ++t)
          c.dw1[(w * BiasTables::weight_inputs(c) + i) * c.taps + t] += Partials::expand(c).at(s.dw1, w, t, i);
      if (!c.bias_tables) c.db1[w] += sum(load(s.db1 + w * LANES));
    }
    for (int64_t h = 0; c.width && h < c.heads; ++h) {
      for (int64_t w = 0; w < c.width; ++w)
        for (int64_t t = 0; t < c.taps; ++t)
          c.dw2[(h * c.width + w) * c.taps + t] += Partials::project(c).at(s.dw2, h, t, w);
      c.db2[h] += sum(load(s.db2 + h * LANES));
    }
    if (c.bias == BY_DISTANCE)
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t n = 0; n < c.distances; ++n)
          c.dvalues[h * c.distances + n] += s.values[h * tile.shared.values_stride + ROWS + n];
    if (c.bias == CURVE) {
      for (int64_t n = 0; n < c.distances; ++n) c.dvalues[n] += s.values[ROWS + n];
      for (int64_t n = 0; n < c.pieces * c.heads; ++n) {
        c.dslopes[n] += sum(load(s.slopes + n * LANES));
        c.doffsets[n] += sum(load(s.offsets + n * LANES));
      }
    }
    tile.finish_tables(first);
  }
  if (BiasTables::wanted(c) && sets)
    BiasTables(c).add_gradients(first.hidden + ROWS, tile.shared.hidden_stride, first.edges + tile.shared.edges_margin,
                                tile.shared.edges_stride, tile.shared.bias, tile.shared.dbias);
  round_gradients(c);
}

}  // namespace
