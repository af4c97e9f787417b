// A tile of query rows walking along the keys: what the forward and the backward pass share.
//
// Lanes are query rows, ROWS of them. Maps lie as [column][channel][ROWS], a column for each key, so a
// shift along the keys is a change of address and the window of a convolution is one contiguous block.
// Keys come in chunks of CHUNK; the maps keep the last `history` columns of the chunks before, so no
// column is computed twice. A stage that reads columns to its right runs that many columns behind.
#pragma once

#include "curve.h"
#include "halves.h"
#include "tables.h"
#include "tile.h"

namespace {

// DAPE_VECTORS: a build for few queries, whose tiles have fewer rows.
#if defined(DAPE_VECTORS)
constexpr int VECTORS = DAPE_VECTORS;
#else
constexpr int VECTORS = 3;
#endif
constexpr int ROWS = VECTORS * LANES, OUTPUTS = SUMS / VECTORS;
// Tiles of few rows take more keys at a time: 64 of them are one chunk with all that stages run behind, and sums of weight
// gradients go in and out of registers less often.
constexpr int CHUNK = VECTORS == 1 ? 72 : 24, SLICE = CHUNK + ROWS;
// Numbers of a table that stay in the caches.
constexpr int64_t SMALL_TABLE = 16384;

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Hands out parts of one block of memory, each on a cache line; with a null base it only adds up sizes.
struct Arena {
  float *base;
  size_t used = 0;
  float *take(size_t floats) {
    float *part = base ? base + used : nullptr;
    used += (floats + 15) / 16 * 16;
    return part;
  }
};

struct Geometry {
  // halo: lanes at a tile's beginning for rows of the tile before, which this one's rows read.
  // forward_history, backward_history: columns of earlier chunks that the stages of a pass read.
  int64_t halo, right, ahead, forward_history, backward_history, reach, tiles, offset;
  explicit Geometry(const Call &c)
      : halo(earlier_rows(c)),
        right(c.width ? c.taps - 1 - c.left : 0),
        ahead(c.causal ? right : 0),
        forward_history(2 * right + (c.width ? c.left : 0)),
        backward_history(c.width ? 3 * (c.taps - 1) : 0),
        reach(c.width ? c.taps - 1 : 0),
        tiles(ceil_div(c.queries, ROWS - halo)),
        offset(c.keys - c.queries) {}

  static int64_t earlier_rows(const Call &c) {
    int64_t rows = 0;
    if (c.program)
      for (int64_t s = 0; s < c.program->num_pre + c.program->num_post; ++s) rows += c.program->stages[s].rows - 1;
    return rows;
  }
};

// The bias half of the first convolution, where it goes by distance: `width` channels, for columns up to `ahead` past a
// row's last key (later rows read further than the row's own); in its first `left` columns a row has values of its own.
struct Table {
  int64_t width, left, ahead;
  explicit Table(const Call &c) : width(0), left(0), ahead(0) {
    if (!c.bias_tables) return;
    width = c.width, left = c.left, ahead = c.taps - 1 - c.left;
    if (!c.program) return;
    const StageCall *s = c.program->stages;
    width = s->outputs, left = s->left, ahead = 0;
    for (int64_t n = 1; n < c.program->num_pre; ++n) ahead += s[n].taps - 1 - s[n].left + s[n].rows - 1;
  }
};

// The weights of a convolution, [taps][inputs][outputs].
struct Weights {
  int64_t inputs, outputs, taps;
  // For pairs of columns, [4][inputs][outputs], or null. Shallow products would gain nothing.
  float *single, *pair;

  Weights(Arena &arena, int64_t in, int64_t out, int64_t num_taps)
      : inputs(in),
        outputs(out),
        taps(num_taps),
        single(arena.take(taps * inputs * outputs)),
        pair(taps == 3 && inputs >= PAIR_INPUTS ? arena.take(4 * inputs * outputs) : nullptr) {}

  float &at(int64_t tap, int64_t input, int64_t output) const {
    return single[(tap * inputs + input) * outputs + output];
  }
  void finish() const {
    if (pair) pair_weights(pair, single, inputs * outputs);
  }
};

// Whether no two rows share a place in the gradient of `edges`, so that threads write there directly.
bool direct_edges(const Call &c) { return c.batch == 1 && !c.first && !Geometry(c).halo; }

// Read-only state shared by all threads: weights, and tables with room for a tile on both sides.
struct Shared {
  Arena arena;
  // `back`: from the gradient of a convolution's outputs to that of its inputs.
  Weights expand, project, expand_back, project_back;
  float *b1, *values, *hidden;
  // What the logits add to scores and convolutions: b2, and the bias where it goes by distance.
  float *addend;
  // Tables of the first columns; the padded bias that tables are made of, and of a backward pass its gradient and, where
  // threads write there directly, that of `edges`.
  float *edges = nullptr, *bias = nullptr, *dbias = nullptr, *dedges = nullptr;
  // From one channel of `edges` to the next, and the room before the first column.
  int64_t edges_stride, edges_margin, edges_floats;
  int64_t values_stride, hidden_stride, addend_stride;

  Shared(const Call &c, float *memory)
      : arena{memory},
        expand(arena, c.channels, c.width, c.taps),
        project(arena, c.width, c.heads, c.taps),
        expand_back(arena, c.width, c.channels, c.taps),
        project_back(arena, c.heads, c.width, c.taps) {
    b1 = arena.take(c.width * ROWS);
    values_stride = c.distances + 2 * ROWS;
    values = arena.take(value_channels(c) * values_stride);
    addend_stride = c.bias == BY_DISTANCE ? values_stride : ROWS;
    addend = arena.take(c.heads * addend_stride);
    hidden_stride = c.table_length + 2 * ROWS;
    hidden = arena.take(Table(c).width * hidden_stride);
    edges_margin = BiasTables::wanted(c) ? ROWS : 0;
    edges_stride = c.table_length + 2 * edges_margin;
    edges_floats = Table(c).left * Table(c).width * edges_stride;
    if (!BiasTables::wanted(c)) {
      edges = const_cast<float *>(c.edges), dedges = c.dedges;
      return;
    }
    const BiasTables tables(c);
    edges = arena.take(edges_floats);
    bias = arena.take(c.heads * tables.padded);
    if (!c.dw1) return;
    dbias = arena.take(c.heads * tables.padded);
    if (direct_edges(c)) dedges = arena.take(edges_floats);
  }

  // Whether the bias by distance is a channel of the first convolution.
  static bool has_values(const Call &c) { return c.bias == BY_DISTANCE && c.width && c.channels > c.heads; }
  static int64_t value_channels(const Call &c) { return c.bias == CURVE ? 1 : has_values(c) ? c.heads : 0; }
};

size_t shared_floats(const Call &c) { return Shared(c, nullptr).arena.used; }

void pad_table(float *out, int64_t stride, const float *table, int64_t channels, int64_t length) {
  memset(out, 0, channels * stride * sizeof(float));
  for (int64_t i = 0; i < channels; ++i) memcpy(out + i * stride + ROWS, table + i * length, length * sizeof(float));
}

// The weights alone.
void prepare_weights(const Call &c, float *memory) {
  const Shared s(c, memory);
  for (int64_t w = 0; w < c.width; ++w) {
    for (int64_t i = 0; i < c.channels; ++i)
      for (int64_t t = 0; t < c.taps; ++t) {
        const float x = c.w1[(w * BiasTables::weight_inputs(c) + i) * c.taps + t];
        s.expand.at(t, i, w) = x;
        s.expand_back.at(c.taps - 1 - t, w, i) = x;
      }
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t t = 0; t < c.taps; ++t) {
        const float x = c.w2[(h * c.width + w) * c.taps + t];
        s.project.at(t, w, h) = x;
        s.project_back.at(c.taps - 1 - t, h, w) = x;
      }
    for (int r = 0; r < ROWS; ++r) s.b1[w * ROWS + r] = c.bias_tables ? 0.0f : c.b1[w];
  }
  const Weights *all[] = {&s.expand, &s.project, &s.expand_back, &s.project_back};
  for (const Weights *weights : all) weights->finish();
}

void prepare(const Call &c, float *memory) {
  prepare_weights(c, memory);
  const Shared s(c, memory);
  if (s.value_channels(c)) pad_table(s.values, s.values_stride, c.values, s.value_channels(c), c.distances);
  if (c.bias == BY_DISTANCE && c.residual_bias) pad_table(s.addend, s.addend_stride, c.values, c.heads, c.distances);
  else memset(s.addend, 0, c.heads * s.addend_stride * sizeof(float));
  for (int64_t i = 0; c.width && i < c.heads * s.addend_stride; ++i) s.addend[i] += c.b2[i / s.addend_stride];
  if (!c.bias_tables) return;
  if (c.program) return pad_table(s.hidden, s.hidden_stride, c.hidden, Table(c).width, c.table_length);
  const BiasTables tables(c);
  tables.pad(s.bias);
  memset(s.hidden, 0, c.width * s.hidden_stride * sizeof(float));
  memset(s.edges, 0, s.edges_floats * sizeof(float));
  tables.fill(s.hidden + ROWS, s.hidden_stride, s.edges + s.edges_margin, s.edges_stride, s.bias);
  if (s.dedges) memset(s.dedges, 0, s.edges_floats * sizeof(float));
}

// A map over the columns base - history … base + CHUNK - 1.
struct Map {
  float *memory;
  int64_t channels, history, base;
  // Where not 0, the scores of so many heads stand before their bias, group by group.
  int64_t split = 0;

  int64_t head(int64_t h) const { return split ? h / split * 2 * split + h % split : h; }
  float *at(int64_t column) const { return memory + (column - base + history) * channels * ROWS; }
  void clear(int64_t from, int64_t to) const {
    if (from < to) memset(at(from), 0, (to - from) * channels * ROWS * sizeof(float));
  }
  // At the first chunk; where columns before it are read, they are zero.
  void begin(int64_t first_base, bool read_before = true) {
    base = first_base;
    if (read_before) clear(base - history, base);
  }
  // To the next chunk, whose stages read no column of this one.
  void restart() { base += CHUNK; }
  void advance() {
    memmove(memory, memory + CHUNK * channels * ROWS, history * channels * ROWS * sizeof(float));
    base += CHUNK;
  }
};

INLINE Map make_map(Arena &arena, int64_t history, int64_t channels) {
  return {arena.take((history + CHUNK) * channels * ROWS), channels, history, 0, 0};
}

// The columns from … to - 1 of a stage in one chunk, cut to those that exist; the rest are zero.
struct Columns {
  int64_t from, to;
  Columns(int64_t begin, int64_t lo, int64_t hi) : from(most(begin, lo)), to(least(begin + CHUNK, hi + 1)) {
    if (to < from) from = to = begin;
  }
  int64_t count() const { return to - from; }
  // `reach`: how far beside the columns that exist the map is read, at most.
  void clear_rest(const Map &map, int64_t begin, int64_t reach = CHUNK) const {
    if (!count()) reach = CHUNK;
    map.clear(most(begin, from - reach), from);
    map.clear(to, least(begin + CHUNK, to + reach));
  }
};

// Some rows of keys or values of one head.
struct KeyRows {
  const float *data;
  ptrdiff_t stride;
};

// One tile: rows i0 … of one batch entry; the lanes `begin` … rows - 1 have one.
struct RowTile {
  const Call &c;
  const Geometry g;
  const Table table;
  const Shared shared;
  int64_t entry = 0, i0 = 0, begin = 0, rows = 0;
  // Visible keys: of each row, and of all (lo … hi) or some (first_max … last_min) of them.
  int32_t first[ROWS], last[ROWS];
  int64_t lo = 0, hi = -1, first_max = 0, last_min = 0;
  // row_scratch: [D], key_scratch: [CHUNK][D], where the call's dtype is not float32.
  float *q, *column_scratch, *pair_scratch, *slice, *row_scratch, *key_scratch;
  float row_scale[ROWS];
  Map x, a;

  // `history`: columns of earlier chunks that stages read of the image and the hidden map.
  RowTile(const Call &call, const float *memory, Arena &arena, int64_t history)
      : c(call), g(call), table(call), shared(call, const_cast<float *>(memory)) {
    q = arena.take(c.heads * c.head_width * ROWS);
    column_scratch = arena.take(2 * most(table.width, c.heads) * ROWS);
    pair_scratch = arena.take(PAIRS_IN_REGISTERS ? 0 : 4 * most(c.width, c.channels) * ROWS);
    slice = arena.take(small_table() ? 0 : table.width * SLICE);
    row_scratch = arena.take(c.head_width);
    key_scratch = arena.take(c.dtype == FLOAT32 ? 0 : CHUNK * c.head_width);
    x = make_map(arena, history, c.width ? c.channels : c.heads);
    a = make_map(arena, history, c.width);
  }

  // Moves to unit `unit`: tiles from the last to the first, the entries of a batch inside.
  void move(int64_t unit) {
    entry = unit % c.batch;
    i0 = (g.tiles - 1 - unit / c.batch) * (ROWS - g.halo) - g.halo;
    begin = most(0, -i0);
    rows = least(ROWS, c.queries - i0);
    find_visible();
    for (int64_t r = 0; c.bias == CURVE && r < ROWS; ++r)
      row_scale[r] = r < rows ? c.row_scale[entry * c.queries + i0 + r] : 0.0f;
  }

  void find_visible() {
    lo = c.keys, hi = -1, first_max = 0, last_min = c.keys;
    // Past every column, on either side.
    constexpr int32_t nowhere = 1 << 30;
    for (int r = 0; r < ROWS; ++r) first[r] = nowhere, last[r] = -nowhere;
    for (int64_t r = begin; r < rows; ++r) {
      const int64_t limit = c.causal ? i0 + r + g.offset : c.keys - 1;
      const int64_t from = c.first ? most(c.first[entry * c.queries + i0 + r], 0) : 0;
      const int64_t to = c.last ? least(c.last[entry * c.queries + i0 + r], limit) : limit;
      if (from <= to) {
        first[r] = static_cast<int32_t>(from), last[r] = static_cast<int32_t>(to);
        lo = least(lo, from), hi = most(hi, to);
      }
      first_max = most(first_max, first[r]), last_min = least(last_min, last[r]);
    }
    if (begin) first_max = nowhere, last_min = -nowhere;
  }

  bool sees_something() const { return lo <= hi; }
  int64_t first_base() const { return lo / CHUNK * CHUNK; }

  INLINE ivec visible(int64_t column, int v, int64_t ahead = 0) const {
    const ivec j = broadcast(static_cast<int32_t>(column));
    return (j >= load(first + v * LANES)) & (j <= load(last + v * LANES) + broadcast(static_cast<int32_t>(ahead)));
  }

  // Zeros, in some channels of a column, in the rows that do not see it.
  void hide(float *column_data, int64_t channels, int64_t column, int64_t ahead = 0) const {
    if (column >= first_max && column <= last_min + ahead) return;
    for (int v = 0; v < VECTORS; ++v) {
      const ivec shown = visible(column, v, ahead);
      float *p = column_data + v * LANES;
      for (int64_t i = 0; i < channels; ++i, p += ROWS) store(p, shown ? load(p) : vec{});
    }
  }

  // This tile's rows of x [B, H, Tq, D], from lane `from` on, as [H][D][ROWS].
  void transpose_in(float *out, const void *data, const int64_t *stride, float scale, int64_t from) const {
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t r = 0; r < ROWS; ++r) {
        float *p = out + h * c.head_width * ROWS + r;
        int64_t d = 0;
        if (r % LANES == 0 && in_blocks(from, r)) {
          const float *row = query_row(data, stride, h, r);
          for (; d + LANES <= c.head_width; d += LANES) transpose_block(p + d * ROWS, ROWS, row + d, stride[2], scale);
          if (d == c.head_width) {
            r += LANES - 1;
            continue;
          }
        }
        if (r >= from && r < rows) {
          const float *row = query_row(data, stride, h, r);
          for (d = 0; d < c.head_width; ++d) p[d * ROWS] = row[d] * scale;
        } else
          for (d = 0; d < c.head_width; ++d) p[d * ROWS] = 0;
      }
  }

  // Whether the rows r … r + LANES - 1 are there, as numbers that need no conversion.
  bool in_blocks(int64_t from, int64_t r) const {
    return TRANSPOSES && c.dtype == FLOAT32 && r >= from && r + LANES <= rows;
  }

  // Writes rows from lane `from` on of in [H][D][ROWS]: row (h, r) · factor(h, r) to row_of(h, r), `stride` apart.
  template <class RowOf, class Factor>
  void transpose_out(const float *in, int64_t from, const RowOf &row_of, ptrdiff_t stride, const Factor &factor) const {
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t r = from; r < rows; ++r) {
        const float *p = in + h * c.head_width * ROWS + r;
        if (r % LANES == 0 && c.head_width % LANES == 0 && in_blocks(from, r)) {
          float *row = static_cast<float *>(row_of(h, r));
          for (int64_t d = 0; d < c.head_width; d += LANES) {
            vec x[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i) x[i] = load(p + (d + i) * ROWS);
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i) store(row + i * stride + d, x[i] * factor(h, r + i));
          }
          r += LANES - 1;
          continue;
        }
        for (int64_t d = 0; d < c.head_width; ++d) row_scratch[d] = p[d * ROWS] * factor(h, r);
        write_row(c, row_of(h, r), row_scratch, c.head_width);
      }
  }

  // out[j][i] = in[i][j] · scale, for LANES rows and columns.
  static INLINE void transpose_block(float *out, ptrdiff_t out_stride, const float *in, ptrdiff_t in_stride, float scale) {
    vec x[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) x[i] = load(in + i * in_stride) * scale;
    transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) store(out + i * out_stride, x[i]);
  }

  // Lane r's row of x [B, H, Tq, D] as float32, until the next one is read.
  const float *query_row(const void *data, const int64_t *stride, int64_t head, int64_t r) const {
    const int64_t place = entry * stride[0] + head * stride[1] + (i0 + r) * stride[2];
    return read_row(c, element(c, data, place), c.head_width, row_scratch);
  }

  const void *key(const void *data, const int64_t *stride, int64_t head, int64_t column) const {
    return key(data, stride, head, column, entry);
  }
  const void *key(const void *data, const int64_t *stride, int64_t head, int64_t column, int64_t batch_entry) const {
    return element(c, data, batch_entry * stride[0] + head * c.groups / c.heads * stride[1] + column * stride[2]);
  }

  // Rows of keys or values as float32, until the next ones are read.
  KeyRows keys(const void *data, const int64_t *stride, int64_t head, Columns cols) const {
    if (c.dtype == FLOAT32) return {static_cast<const float *>(key(data, stride, head, cols.from)), stride[2]};
    for (int64_t j = cols.from; j < cols.to; ++j)
      read_row(c, key(data, stride, head, j), c.head_width, key_scratch + (j - cols.from) * c.head_width);
    return {key_scratch, c.head_width};
  }

  // What the next head, or the next chunk, needs of keys or values, to be loaded while this one is computed.
  Prefetch next_head(const void *data, const int64_t *stride, int64_t head, Columns cols, int64_t outputs,
                     int64_t depth) const {
    return next_head(data, stride, head, cols, outputs, depth, entry);
  }
  Prefetch next_head(const void *data, const int64_t *stride, int64_t head, Columns cols, int64_t outputs,
                     int64_t depth, int64_t batch_entry) const {
    const bool last_head = head + 1 == c.heads;
    const int64_t column = last_head ? cols.to : cols.from;
    const int64_t rows = last_head ? least(cols.count(), c.keys - column) : cols.count();
    // In units of four bytes.
    const auto floats = [&](int64_t elements) { return (elements * element_bytes(c) + 3) / 4; };
    return {static_cast<const float *>(key(data, stride, last_head ? 0 : head + 1, column, batch_entry)), floats(stride[2]),
            floats(c.head_width), rows, ceil_div(outputs, OUTPUTS) * ceil_div(depth, Prefetch::EVERY)};
  }

  // [column][H] of dot products between the rows ([H][D][ROWS]) and keys or values.
  void dots(const Map &out, const float *rows_data, const void *data, const int64_t *stride, Columns cols) const {
    for (int64_t h = 0; h < c.heads; ++h) {
      const KeyRows head = keys(data, stride, h, cols);
      product<VECTORS>(out.at(cols.from) + out.head(h) * ROWS, out.channels * ROWS, nullptr, 0, head.data, 1,
                       head.stride, rows_data + h * c.head_width * ROWS, ROWS, c.head_width, cols.count(), Keep(),
                       next_head(data, stride, h, cols, cols.count(), c.head_width));
    }
  }

  // Columns of a convolution: output j reads the columns j - shift … of `in`, target(j) says what becomes of it.
  // Weights are used from output `skip` on.
  template <class TargetOf>
  INLINE void convolve(const Weights &weights, const Map &in, int64_t shift, Columns cols, int64_t outputs,
                       TargetOf target, int64_t skip = 0) const {
    const int64_t depth = weights.inputs;
    int64_t j = cols.from;
    for (; weights.pair && j + 2 <= cols.to; j += 2) {
      pair_product<VECTORS>(target(j), target(j + 1), ROWS, weights.pair + skip, weights.outputs, in.at(j - shift),
                            in.channels * ROWS, depth, outputs, pair_scratch);
    }
    for (; j < cols.to; ++j) {
      const auto to = target(j);
      product<VECTORS>(to.out, ROWS, to.init, to.init_stride, weights.single + skip, weights.outputs, 1,
                       in.at(j - shift), ROWS, depth * weights.taps, outputs, to.finish);
    }
  }

  // Where this tile's rows stand in a padded table of distances.
  int64_t value_place(int64_t column) const { return ROWS + i0 + g.offset - column - c.lowest; }

  // [channel][ROWS] of the bias of one column, from the dense tensor.
  void dense_column(float *out, int64_t column) const {
    const int64_t b = c.dense_batch == 1 ? 0 : entry;
    for (int64_t h = 0; h < c.heads; ++h) {
      const float *p = c.dense + ((b * c.heads + h) * c.queries + i0) * c.keys + column;
      for (int r = 0; r < ROWS; ++r) out[h * ROWS + r] = r >= begin && r < rows ? p[r * c.keys] : 0.0f;
    }
  }

  // Whether the bias has to be found column by column.
  bool by_column() const { return c.bias == DENSE || c.bias == CURVE; }

  void bias_column(float *out, int64_t column) const {
    if (c.bias == DENSE) return dense_column(out, column);
    for (int v = 0; v < VECTORS; ++v) {
      const vec x = load(shared.values + value_place(column) + v * LANES) * load(row_scale + v * LANES);
      each_piece(piece_of(c, x), [&](int32_t piece, ivec on) {
        const float *slopes = c.slopes + piece * c.heads, *offsets = c.offsets + piece * c.heads;
        for (int64_t h = 0; h < c.heads; ++h) {
          float *p = out + h * ROWS + v * LANES;
          store(p, on ? x * broadcast(slopes[h]) + broadcast(offsets[h]) : load(p));
        }
      });
    }
  }

  // Scores, and the bias where it is a channel, of the chunk at `base`; 0 where not visible.
  void fill_image(int64_t base) {
    const Columns cols(base, lo, hi);
    if (c.width) cols.clear_rest(x, base, 2 * g.reach);
    if (!cols.count()) return;
    dots(x, q, c.k, c.k_stride, cols);
    if (!c.width) return;
    for (int64_t j = cols.from; j < cols.to; ++j) {
      float *column = x.at(j);
      if (c.channels > c.heads) {
        float *p = column + c.heads * ROWS;
        if (by_column()) bias_column(p, j);
        else
          for (int64_t h = 0; h < c.heads; ++h)
            memcpy(p + h * ROWS, shared.values + h * shared.values_stride + value_place(j), ROWS * sizeof(float));
      }
      hide(column, c.channels, j);
    }
  }

  // Where this tile's rows stand in the padded table of the hidden map.
  int64_t table_place(int64_t column) const { return ROWS + i0 + g.offset - column + table.ahead; }

  // Where the rows of one column stand in the table, or in a slice of it.
  struct TablePlace {
    float *data;
    int64_t stride;
  };

  // Whether a table is small enough to be read where it lies; the rows of a large one lie on as many pages.
  bool small_table() const { return table.width * shared.hidden_stride <= SMALL_TABLE; }
  TablePlace table_column(float *whole, Columns cols, int64_t column) const {
    if (small_table()) return {whole + table_place(column), shared.hidden_stride};
    return {slice + cols.to - 1 - column, SLICE};
  }

  // Copies what the columns need of a large table, so that its rows lie side by side.
  void fill_slice(Columns cols) {
    if (small_table()) return;
    const float *rows_of = shared.hidden + table_place(cols.to - 1);
    for (int64_t w = 0; w < table.width; ++w)
      memcpy(slice + w * SLICE, rows_of + w * shared.hidden_stride, (cols.count() - 1 + ROWS) * sizeof(float));
  }

  // [W][ROWS] of the table at a column where some rows have their first keys; two columns in turn.
  const float *fill_edge(TablePlace place, int64_t column) const {
    float *out = column_scratch + (column & 1) * table.width * ROWS;
    const int64_t from = least(first_row(column), rows);
    if (same_first()) {
      for (int64_t w = 0; w < table.width; ++w) {
        // Numbers in all lanes: sums over them meet weights of 0.
        memset(out + w * ROWS, 0, ROWS * sizeof(float));
        memcpy(out + w * ROWS + from, shared.edges + edge_place(from, column, w), (rows - from) * sizeof(float));
      }
      return out;
    }
    for (int64_t w = 0; w < table.width; ++w)
      for (int64_t r = 0; r < ROWS; ++r)
        out[w * ROWS + r] =
            r >= from && at_edge(r, column) ? shared.edges[edge_place(r, column, w)] : place.data[w * place.stride + r];
    return out;
  }

  bool has_edge(int64_t column) const {
    if (column >= first_max + table.left) return false;
    bool edge = false;
    for (int r = 0; r < rows; ++r) edge |= at_edge(r, column);
    return edge;
  }
  // Whether all rows begin at the same key: what they have of a table by distance lies side by side then.
  bool same_first() const { return !begin && lo == first_max; }
  // The first lane whose row the table has at this column; those before it stand further left than the column reaches.
  int64_t first_row(int64_t column) const { return most(0, column - table.ahead - i0 - g.offset); }
  bool at_edge(int64_t r, int64_t column) const { return column >= first[r] && column - first[r] < table.left; }
  int64_t edge_place(int64_t r, int64_t column, int64_t w) const {
    return ((column - first[r]) * table.width + w) * shared.edges_stride + shared.edges_margin + i0 + r + g.offset -
           column + table.ahead;
  }

  // A column of the first convolution that begins from the table; fill_slice comes before.
  template <class Finish>
  INLINE Target<Finish> from_table(const Map &out, int64_t j, Columns cols, Finish finish) const {
    const TablePlace place = table_column(shared.hidden, cols, j);
    if (!has_edge(j)) return target(out.at(j), place.data, place.stride, finish);
    if (shared.edges_margin && same_first())
      return target(out.at(j), shared.edges + edge_place(0, j, 0), shared.edges_stride, finish);
    return target(out.at(j), fill_edge(place, j), ROWS, finish);
  }

  // The hidden map, activated, of the chunk at `base` (which lies `right` columns behind the image's).
  void fill_hidden(int64_t base) {
    const Columns cols(base, lo, hi + g.ahead);
    cols.clear_rest(a, base, g.reach);
    const vec slope = broadcast(static_cast<float>(c.slope));
    const auto activate = [slope](vec z, int, int) { return leaky(z, slope); };
    if (c.bias_tables && cols.count()) fill_slice(cols);
    convolve(shared.expand, x, c.left, cols, c.width, [&](int64_t j) {
      return c.bias_tables ? from_table(a, j, cols, activate) : target(a.at(j), shared.b1, ROWS, activate);
    });
    for (int64_t j = cols.from; j < cols.to; ++j) hide(a.at(j), c.width, j, g.ahead);
  }

  // Logits of some columns, −∞ where not visible.
  void fill_logits(const Map &logits, Columns cols) const {
    const int64_t stride = shared.addend_stride;
    const auto addend = [&](int64_t j) {
      const float *place = shared.addend + (c.bias == BY_DISTANCE ? value_place(j) : 0);
      return [place, stride](vec z, int p, int v) { return z + load(place + p * stride + v * LANES); };
    };
    if (c.width)
      convolve(shared.project, a, c.left, cols, c.heads,
               [&](int64_t j) { return target(logits.at(j), x.at(j), ROWS, addend(j)); });
    for (int64_t j = cols.from; j < cols.to; ++j) {
      float *out = logits.at(j);
      const float *scores = x.at(j);
      const auto add = addend(j);
      for (int64_t h = 0; !c.width && h < c.heads; ++h)
        for (int v = 0; v < VECTORS; ++v)
          store(out + h * ROWS + v * LANES, add(load(scores + h * ROWS + v * LANES), h, v));
      if (by_column() && c.residual_bias) add_column(out, j);
      if (j < first_max || j > last_min) hide_logits(out, j);
    }
  }

  void add_column(float *out, int64_t j) const {
    const float *bias = c.width ? x.at(j) + c.heads * ROWS : column_scratch;
    if (!c.width) bias_column(column_scratch, j);
    for (int64_t i = 0; i < c.heads * ROWS; i += LANES) store(out + i, load(out + i) + load(bias + i));
  }

  void hide_logits(float *out, int64_t j) const {
    for (int v = 0; v < VECTORS; ++v) {
      const ivec shown = visible(j, v);
      for (float *p = out + v * LANES; p < out + c.heads * ROWS; p += ROWS)
        store(p, shown ? load(p) : broadcast(-__builtin_inff()));
    }
  }
};

}  // namespace
