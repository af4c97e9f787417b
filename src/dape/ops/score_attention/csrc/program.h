// Any score program: stages before the softmax, a residual, a normaliser, stages after it; forward and backward.
//
// A tile walks along the keys as in forward.h and backward.h. Map m of a stage lies `lag` columns behind the image;
// every map keeps as many columns of earlier chunks as its readers need. Stages after the softmax need the sum of
// a row's weights first, so the forward pass walks twice: once for the log-sum-exp, once for the weights. Their
// backward pass walks twice for the same reason: a row's Σ P · dP comes first.
//
// Stick-breaking gives key j the weight σ(l_j) Π_{m>j} (1 − σ(l_m)). A chunk's keys take theirs from the last to the first,
// and what the chunk leaves of the stick scales all that came before it, as a larger logit does in an online softmax: one
// walk. The way back knows what the whole row left and what the chunks so far left of that, in double precision, because
// their difference counts; the gradient of a logit needs only the keys before it:
// dl_n = (1 − σ(l_n)) P_n dP_n − σ(l_n) Σ_{j<n} P_j dP_j.
#pragma once

#include "backward.h"
#include "filter.h"

namespace {

struct StageFilters {
  Filter forward, back;
  float *offset;  // [outputs][ROWS]
};

// Read-only state shared by all threads: tables as for the pair, the stages' weights; and dq of rows of another tile.
struct ProgramShared {
  Shared base;
  StageFilters stages[MAX_STAGES];
  float *halo_dq;  // [B · tiles][H][halo][D]
  size_t floats;

  ProgramShared(const Call &c, float *memory) : base(c, memory) {
    Arena arena = base.arena;
    for (int64_t n = 0; n < num_stages(c); ++n) {
      const StageCall &s = c.program->stages[n];
      const int64_t in = s.inputs / s.groups, out = s.outputs / s.groups;
      stages[n] = {Filter(arena, s.groups, in, out, s.rows, s.taps, -1),
                   Filter(arena, s.groups, out, in, s.rows, s.taps, 1), arena.take(s.outputs * ROWS)};
    }
    const Geometry g(c);
    halo_dq = arena.take(c.dq ? c.batch * g.tiles * c.heads * g.halo * c.head_width : 0);
    floats = arena.used;
  }

  static int64_t num_stages(const Call &c) { return c.program->num_pre + c.program->num_post; }
};

size_t program_shared(const Call &c) { return ProgramShared(c, nullptr).floats; }

// The weights of all stages.
void prepare_stages(const Call &c, float *memory) {
  const ProgramShared shared(c, memory);
  for (int64_t n = 0; n < shared.num_stages(c); ++n) {
    const StageCall &s = c.program->stages[n];
    const StageFilters &f = shared.stages[n];
    const int64_t in = s.inputs / s.groups, out = s.outputs / s.groups;
    for (int64_t o = 0; o < s.outputs; ++o) {
      for (int64_t i = 0; i < in; ++i)
        for (int64_t row = 0; row < s.rows; ++row)
          for (int64_t t = 0; t < s.taps; ++t) {
            const float w = s.weight[((o * in + i) * s.rows + row) * s.taps + t];
            // The last row of weights belongs to the query itself.
            const int64_t d = s.rows - 1 - row;
            f.forward.at(o / out, d, t, i, o % out) = w;
            f.back.at(o / out, d, s.taps - 1 - t, o % out, i) = w;
          }
      for (int r = 0; r < ROWS; ++r) f.offset[o * ROWS + r] = s.offset ? s.offset[o] : 0.0f;
    }
    f.forward.finish(), f.back.finish();
  }
}

void program_prepare(const Call &c, float *memory) {
  prepare(c, memory);
  prepare_stages(c, memory);
}

// The maps of a tile up to the weights and past them, and the gradients of all of them.
struct Chain {
  RowTile &t;
  const Call &c;
  const Program &p;
  const ProgramShared shared;
  const int64_t num_pre, num_stages;
  const bool reads_bias;
  RowMask mask;
  // hidden[n]: output of stage n; weights: logits, then softmax weights; raw: logits before their factor, where the way
  // back needs them.
  Map image, hidden[MAX_STAGES], weights, raw;
  // dhidden[n]: the gradient of stage n's convolution; dlogits: of the weights, then of the logits.
  Map dimage, dhidden[MAX_STAGES], dlogits;
  // How far maps lie behind the image, and the gradients of hidden maps; columns past the last key.
  int64_t lag[MAX_STAGES], dlag[MAX_STAGES], ahead[MAX_STAGES], weights_lag, end_lag, dweights_lag, dimage_lag;
  int64_t delay;
  float *scratch, *factor, *row_bias, *bias_column;
  // Of stick-breaking, [H][ROWS]: minus the logarithms of what a row leaves and of what the chunks to come leave; Σ P · dP.
  double *left_over, *to_come, *taken;
  size_t scratch_floats;
  Map *maps[2 * MAX_STAGES + 5];
  int num_maps;

  Chain(RowTile &tile, const float *memory, Arena &arena, bool backward)
      : t(tile),
        c(tile.c),
        p(*tile.c.program),
        shared(tile.c, const_cast<float *>(memory)),
        num_pre(p.num_pre),
        num_stages(p.num_pre + p.num_post),
        reads_bias(num_pre && p.stages[0].inputs > c.heads),
        num_maps(0) {
    plan();
    size_t most_scratch = 0;
    for (int64_t n = 0; n < num_stages; ++n) {
      const StageCall &s = p.stages[n];
      most_scratch = static_cast<size_t>(
          most(static_cast<int64_t>(most_scratch), filter_scratch(s.inputs, s.outputs, s.rows, s.taps)));
    }
    scratch_floats = most_scratch;
    scratch = take_with_margins(arena, scratch_floats);
    factor = arena.take(p.factor ? c.heads * ROWS : 0);
    row_bias = arena.take(c.bias == SEPARABLE ? c.heads * ROWS : 0);
    bias_column = arena.take(c.heads * ROWS);
    double **const sums[] = {&left_over, &to_come, &taken};
    for (double **sum : sums) *sum = reinterpret_cast<double *>(arena.take(p.stick ? 2 * c.heads * ROWS : 0));
    make_maps(arena, backward);
  }

  int64_t left(int64_t n) const { return p.stages[n].left; }
  int64_t right(int64_t n) const { return p.stages[n].taps - 1 - p.stages[n].left; }
  bool after(int64_t n) const { return n >= num_pre; }
  Map &input(int64_t n) { return n == num_pre ? weights : n == 0 ? image : hidden[n - 1]; }
  // The gradient of what stage n - 1 made of its convolution, or of the maps before all stages.
  Map &dinput(int64_t n) { return n == num_pre ? dlogits : n == 0 ? dimage : doutput(n - 1); }
  // A linear last stage before the softmax has the logits' gradient.
  Map &doutput(int64_t n) { return n == num_pre - 1 && p.stages[n].slope == 1 ? dlogits : dhidden[n]; }

  // Lags: each stage lies its right reach behind its input; on the way back, its left reach.
  void plan() {
    int64_t now = 0;
    for (int64_t n = 0; n < num_stages; ++n) lag[n] = now += right(n);
    end_lag = now, weights_lag = num_pre ? lag[num_pre - 1] : 0;
    for (int64_t n = num_stages; n-- > num_pre;) dlag[n] = now, now += left(n);
    dweights_lag = now;
    for (int64_t n = num_pre; n-- > 0;) dlag[n] = now, now += left(n);
    dimage_lag = delay = now;
    for (int64_t n = num_stages, reach = 0; n-- > 0; reach += right(n)) {
      if (n == num_pre - 1) reach = 0;
      ahead[n] = c.causal ? reach : 0;
      delay = most(delay, dlag[n] + ahead[n]);
    }
  }

  // Without stages and a cap, the gradient of the scores is that of the logits.
  bool has_dimage() const { return num_pre || p.softcap != 0; }

  void keep(Map &map, int64_t map_lag, int64_t oldest) const { map.history = most(map.history, oldest - map_lag); }

  void make_maps(Arena &arena, bool backward) {
    Map *all[] = {&image, &weights, &raw, &dimage, &dlogits};
    for (Map *map : all) *map = {nullptr, 0, 0, 0, 0};
    image.channels = num_pre ? p.stages[0].inputs : c.heads;
    image.split = reads_bias ? c.heads / p.stages[0].groups : 0;
    weights.channels = c.heads;
    keep(image, 0, weights_lag);
    for (int64_t n = 0; n < num_stages; ++n) {
      hidden[n] = {nullptr, p.stages[n].outputs, 0, 0, 0}, dhidden[n] = hidden[n];
      const int64_t input_lag = n == num_pre ? weights_lag : n == 0 ? 0 : lag[n - 1];
      keep(input(n), input_lag, lag[n] + left(n));
      if (!backward) continue;
      keep(input(n), input_lag, dlag[n] + left(n));
      keep(hidden[n], lag[n], dlag[n]);
      keep(doutput(n), dlag[n], dlag[n] + left(n) + right(n));
    }
    if (backward) {
      keep(weights, weights_lag, dweights_lag);
      dlogits.channels = c.heads;
      keep(dlogits, dweights_lag, dimage_lag);
      if (has_dimage()) dimage.channels = image.channels, dimage.split = image.split;
      if (p.softcap) keep(image, 0, dimage_lag);
      if (p.factor || p.stick) raw.channels = c.heads, raw.history = dweights_lag - weights_lag;
    }
    for (Map *map : all) add_map(*map, arena);
    for (int64_t n = 0; n < num_stages; ++n) {
      add_map(hidden[n], arena);
      if (backward && &doutput(n) == &dhidden[n]) add_map(dhidden[n], arena);
    }
  }

  void add_map(Map &map, Arena &arena) {
    if (!map.channels) return;
    map.memory = take_with_margins(arena, size(map));
    maps[num_maps++] = &map;
  }
  static size_t size(const Map &map) { return static_cast<size_t>((map.history + CHUNK) * map.channels * ROWS); }

  void begin(int64_t start) {
    for (int i = 0; i < num_maps; ++i) {
      clear_margins(maps[i]->memory, size(*maps[i]));
      maps[i]->begin(start - map_lag(maps[i]));
    }
    clear_margins(scratch, scratch_floats);
    for (int64_t i = 0; p.stick && i < c.heads * ROWS; ++i) to_come[i] = left_over[i], taken[i] = 0;
  }
  void advance() {
    for (int i = 0; i < num_maps; ++i) maps[i]->advance();
  }
  int64_t map_lag(const Map *map) const {
    if (map == &image) return 0;
    if (map == &weights || map == &raw) return weights_lag;
    if (map == &dlogits) return dweights_lag;
    if (map == &dimage) return dimage_lag;
    for (int64_t n = 0; n < num_stages; ++n) {
      if (map == &hidden[n]) return lag[n];
      if (map == &dhidden[n]) return dlag[n];
    }
    return 0;
  }

  // State by row of the tile: visible keys, factors, the row part of a separable bias.
  void read_rows() {
    for (int d = 0; d < MAX_ROWS; ++d) mask.cuts[d] = false;
    for (int64_t r = 0; r < ROWS; ++r) {
      const int64_t i = t.i0 + r;
      mask.earlier[r] = MAX_ROWS;
      if (!p.earlier || r < t.begin || r >= t.rows) continue;
      mask.earlier[r] = least(i, p.earlier[t.entry * c.queries + i]);
      for (int64_t d = mask.earlier[r] + 1; d < MAX_ROWS && d <= i; ++d) mask.cuts[d] = true;
    }
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t r = 0; r < ROWS; ++r) {
        const bool exists = r >= t.begin && r < t.rows;
        const int64_t place = (t.entry * c.heads + h) * c.queries + t.i0 + r;
        // On the way back, lanes without a row have weights e^(−∞) = 0.
        if (p.stick) left_over[h * ROWS + r] = !c.grad_out ? 0 : exists ? p.left[place] : __builtin_inf();
        if (p.factor) factor[h * ROWS + r] = exists ? p.factor[place] : 0.0f;
        if (c.bias == SEPARABLE) row_bias[h * ROWS + r] = exists ? static_cast<float>(p.row[place] - anchor(h)) : 0.0f;
      }
  }

  // Both parts of a separable bias are relative to the tile's first row: in float, sums would lose their last digits.
  double anchor(int64_t h) const { return p.row[(t.entry * c.heads + h) * c.queries + t.i0 + t.begin]; }

  // The bias of one head in one column.
  INLINE void fill_bias(float *out, int64_t h, int64_t column) const {
    if (c.bias == SEPARABLE) {
      const vec part =
          broadcast(static_cast<float>(p.column[(t.entry * c.heads + h) * c.keys + column] + anchor(h)));
      for (int v = 0; v < VECTORS; ++v) store(out + v * LANES, load(row_bias + h * ROWS + v * LANES) + part);
    } else {
      const float *place = t.shared.addend + h * t.shared.addend_stride + t.value_place(column);
      for (int v = 0; v < VECTORS; ++v) store(out + v * LANES, load(place + v * LANES));
    }
  }

  void fill_image(int64_t base) {
    const Columns cols(base, t.lo, t.hi);
    cols.clear_rest(image, base);
    if (!cols.count()) return;
    t.dots(image, t.q, c.k, c.k_stride, cols);
    if (p.softcap) cap(cols);
    if (!num_pre) return;
    for (int64_t j = cols.from; j < cols.to; ++j) {
      float *column = image.at(j);
      if (reads_bias) {
        if (c.bias == DENSE) t.dense_column(bias_column, j);
        for (int64_t h = 0; h < c.heads; ++h) {
          float *out = column + (image.head(h) + image.split) * ROWS;
          if (c.bias == DENSE) memcpy(out, bias_column + h * ROWS, ROWS * sizeof(float));
          else fill_bias(out, h, j);
        }
      }
      t.hide(column, image.channels, j);
    }
  }

  void cap(Columns cols) const {
    const float most_score = static_cast<float>(p.softcap), inverse = 1.0f / most_score;
    for (int64_t j = cols.from; j < cols.to; ++j)
      for (int64_t h = 0; h < c.heads; ++h)
        for (int v = 0; v < VECTORS; ++v) {
          float *place = image.at(j) + image.head(h) * ROWS + v * LANES;
          store(place, hyperbolic_tangent(load(place) * inverse) * most_score);
        }
  }

  // Zeros where a hidden map has none: before a row's first key and, without causality, after its last.
  void hide_hidden(float *column_data, int64_t channels, int64_t column) const {
    if (column >= t.first_max && (c.causal || column <= t.last_min)) return;
    for (int v = 0; v < VECTORS; ++v) {
      const ivec j = broadcast(static_cast<int32_t>(column));
      ivec inside = j >= load(t.first + v * LANES);
      if (!c.causal) inside &= j <= load(t.last + v * LANES);
      float *q = column_data + v * LANES;
      for (int64_t i = 0; i < channels; ++i, q += ROWS) store(q, inside ? load(q) : vec{});
    }
  }

  void fill_stage(int64_t n, int64_t base) {
    const Map &out = hidden[n];
    const int64_t start = base - lag[n];
    const Columns cols(start, t.lo, t.hi + ahead[n]);
    cols.clear_rest(out, start);
    const vec slope = broadcast(static_cast<float>(p.stages[n].slope));
    const auto activate = [slope](vec z, int, int) { return leaky(z, slope); };
    const float *offset = shared.stages[n].offset;
    const bool from_table = n == 0 && c.bias_tables;
    if (from_table && cols.count()) t.fill_slice(cols);
    filter_columns(shared.stages[n].forward, input(n), left(n), cols, mask, scratch, [&](int64_t j) {
      return from_table ? t.from_table(out, j, cols, activate) : target(out.at(j), offset, ROWS, activate);
    });
    for (int64_t j = cols.from; j < cols.to; ++j) hide_hidden(out.at(j), out.channels, j);
  }

  Columns weight_columns(int64_t base) const { return Columns(base - weights_lag, t.lo, t.hi); }

  // Logits of a chunk, −∞ where not visible; image and the stages before the softmax first.
  Columns fill_logits(int64_t base) {
    fill_image(base);
    for (int64_t n = 0; n < num_pre; ++n) fill_stage(n, base);
    const Columns cols = weight_columns(base);
    cols.clear_rest(weights, base - weights_lag);
    const bool scores = !num_pre || p.residual_scores, bias = c.bias != NO_BIAS && (!num_pre || p.residual_bias);
    for (int64_t j = cols.from; j < cols.to; ++j) {
      float *out = weights.at(j);
      const float *x = image.at(j), *y = num_pre ? hidden[num_pre - 1].at(j) : nullptr;
      if (bias && !reads_bias) {
        if (c.bias == DENSE) t.dense_column(bias_column, j);
        else
          for (int64_t h = 0; h < c.heads; ++h) fill_bias(bias_column + h * ROWS, h, j);
      }
      for (int64_t h = 0; h < c.heads; ++h)
        for (int v = 0; v < VECTORS; ++v) {
          const int64_t at = h * ROWS + v * LANES, in = image.head(h) * ROWS + v * LANES;
          vec z = y ? load(y + at) : vec{};
          if (scores) z += load(x + in);
          if (bias) z += reads_bias ? load(x + in + image.split * ROWS) : load(bias_column + at);
          if (raw.channels) store(raw.at(j) + at, z);
          if (p.factor) z *= load(factor + at);
          store(out + at, z);
        }
      hide_logits(out, j);
    }
    return cols;
  }

  // Lanes before those that the stages so far can compute have no logits.
  void hide_logits(float *out, int64_t j) const {
    int64_t halo = 0;
    for (int64_t n = 0; n < num_pre; ++n) halo += p.stages[n].rows - 1;
    if (!halo && j >= t.first_max && j <= t.last_min) return;
    t.hide_logits(out, j);
    for (int64_t h = 0; halo && h < c.heads; ++h)
      for (int64_t r = 0; r < halo; ++r) out[h * ROWS + r] = -__builtin_inff();
  }

  // Logits of one head become weights σ(l_j) Π (1 − σ(l_m)) e^(−after) over the later keys m of the chunk; rest(v, sum)
  // gives `after`, where e^(−sum) is what the whole chunk leaves.
  template <class Rest>
  INLINE void take_shares(int64_t h, Columns cols, const Rest &rest) const {
    vec after[VECTORS] = {};
    for (int64_t j = cols.to; j-- > cols.from;)
      for (int v = 0; v < VECTORS; ++v) {
        float *place = weights.at(j) + h * ROWS + v * LANES;
        const vec z = load(place), size = larger(z, -z), log = log_of_1_plus(exponential(-size));
        store(place, (z < vec{} ? z : vec{}) - log - after[v]);
        after[v] += larger(z, vec{}) + log;
      }
    for (int v = 0; v < VECTORS; ++v) after[v] = rest(v, after[v]);
    for (int64_t j = cols.from; j < cols.to; ++j)
      for (int v = 0; v < VECTORS; ++v) {
        float *place = weights.at(j) + h * ROWS + v * LANES;
        store(place, exponential(load(place) - after[v]));
      }
  }

  // Weights relative to the chunk's end; what all chunks leave adds up.
  void add_left_over(int64_t h, Columns cols) const {
    take_shares(h, cols, [&](int v, vec sum) {
      for (int n = 0; n < LANES; ++n) left_over[h * ROWS + v * LANES + n] += sum[n];
      return vec{};
    });
  }

  // Logits become weights, given the log-sum-exp of each row ([H][ROWS]).
  void normalise(Columns cols, const float *lse) {
    for (int64_t h = 0; p.stick && h < c.heads; ++h)
      take_shares(h, cols, [&](int v, vec sum) {
        double *place = to_come + h * ROWS + v * LANES;
        for (int n = 0; n < LANES; ++n) place[n] -= sum[n], sum[n] = static_cast<float>(place[n]);
        return sum;
      });
    if (p.stick) return;
    for (int64_t j = cols.from; j < cols.to; ++j) {
      float *w = weights.at(j);
      for (int64_t i = 0; i < c.heads * ROWS; i += LANES) store(w + i, exponential(load(w + i) - load(lse + i)));
    }
  }

  // The weights that multiply the values: those after the last stage, 0 where not visible.
  const Map &fill_post(int64_t base, Columns &cols) {
    for (int64_t n = num_pre; n < num_stages; ++n) fill_stage(n, base);
    if (num_stages == num_pre) return weights;
    const Map &map = hidden[num_stages - 1];
    cols = Columns(base - end_lag, t.lo, t.hi);
    for (int64_t j = cols.from; j < cols.to; ++j) t.hide(map.at(j), c.heads, j);
    return map;
  }
};

struct ProgramForward : ForwardTile {
  Chain chain;
  float *lse;

  ProgramForward(const Call &call, const float *memory, Arena &arena)
      : ForwardTile(call, memory, arena), chain(*this, memory, arena, false) {
    lse = arena.take(c.heads * ROWS);
  }

  void run(int64_t unit) {
    move(unit);
    clear();
    if (sees_something()) {
      transpose_in(q, c.q, c.q_stride, static_cast<float>(c.scale), begin);
      chain.read_rows();
      const bool post = chain.num_stages > chain.num_pre;
      if (c.program->stick) memset(top, 0, c.heads * ROWS * sizeof(float));
      walk_weights(!post);
      if (c.program->sink) add_sink();
      if (post) {
        for (int64_t i = 0; i < c.heads * ROWS; ++i) {
          if (c.program->stick) total[i] = 1.0f, top[i] = 0.0f;
          const bool empty = total[i] == 0.0f;
          lse[i] = empty ? __builtin_inff() : top[i] + __builtin_logf(total[i]);
          if (!empty) top[i] = lse[i], total[i] = 1.0f;
        }
        walk_values();
      }
    }
    if (c.program->stick) write_left();
    write();
  }

  void write_left() {
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t r = g.halo; r < rows; ++r) {
        const bool sees = first[r] <= last[r];
        c.program->left[(entry * c.heads + h) * c.queries + i0 + r] = sees ? chain.left_over[h * ROWS + r] : 0;
        total[h * ROWS + r] = sees ? __builtin_expf(top[h * ROWS + r]) : 0.0f;
      }
  }

  // Sums of weights, and of values where no stage comes between them.
  void walk_weights(bool values) {
    const int64_t start = first_base();
    chain.begin(start);
    for (int64_t base = start; base - chain.weights_lag <= hi; base += CHUNK) {
      const Columns cols = chain.fill_logits(base);
      logits = chain.weights;
      for (int64_t h = 0; cols.count() && h < c.heads; ++h) {
        if (c.program->stick) weigh_shares(h, cols);
        else weigh(h, cols);
        if (values) add_values(h, cols);
      }
      chain.advance();
    }
  }

  void walk_values() {
    const int64_t start = first_base();
    chain.begin(start);
    for (int64_t base = start; base - chain.end_lag <= hi; base += CHUNK) {
      chain.normalise(chain.fill_logits(base), lse);
      Columns cols = chain.weight_columns(base);
      logits = chain.fill_post(base, cols);
      for (int64_t h = 0; cols.count() && h < c.heads; ++h) add_values(h, cols);
      chain.advance();
    }
  }

  // Weights of one head relative to the chunk's end, or to one before it since which little was taken: then `top` is minus
  // the logarithm of what that left, and nothing has to be scaled.
  void weigh_shares(int64_t h, Columns cols) {
    constexpr float MOST = 1.0f;
    chain.take_shares(h, cols, [&](int v, vec sum) {
      const int64_t at = h * ROWS + v * LANES;
      for (int n = 0; n < LANES; ++n) chain.left_over[at + n] += sum[n];
      const vec pending = load(top + at) + sum;
      if (!any(pending > MOST)) return store(top + at, pending), -pending;
      const vec factor = exponential(-pending);
      float *o = out + h * c.head_width * ROWS + v * LANES;
      for (int64_t d = 0; d < c.head_width; ++d, o += ROWS) store(o, load(o) * factor);
      return store(top + at, vec{}), vec{};
    });
  }

  // One more key with value zero.
  void add_sink() {
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t r = 0; r < ROWS; ++r) {
        float &most_logit = top[h * ROWS + r], &sum = total[h * ROWS + r];
        if (sum == 0.0f) continue;
        const float sink = c.program->sink[h], reference = sink > most_logit ? sink : most_logit;
        const float scale = __builtin_expf(most_logit - reference);
        sum = sum * scale + __builtin_expf(sink - reference);
        most_logit = reference;
        if (scale != 1.0f)
          for (int64_t d = 0; d < c.head_width; ++d) out[(h * c.head_width + d) * ROWS + r] *= scale;
      }
  }
};

// Sums over some of the tiles, beside those of Partials.
struct ProgramPartials {
  float *weight[MAX_STAGES], *offset[MAX_STAGES];  // by lanes
  float *sink, *factor, *row;                      // [H][LANES], [B, H, Tq], [B, H, Tq]
  float *memory;
  size_t floats;

  ProgramPartials(const Call &c, float *start) : memory(start) {
    const Program &p = *c.program;
    Arena arena{memory};
    for (int64_t n = 0; n < p.num_pre + p.num_post; ++n) {
      const StageCall &s = p.stages[n];
      // As many for each row of weights as GradientSums has, where there is one group.
      weight[n] = arena.take(s.groups * s.rows * GradientSums{s.outputs / s.groups, s.inputs / s.groups, s.taps}.floats());
      offset[n] = arena.take(s.outputs * LANES);
    }
    sink = arena.take(c.heads * LANES);
    factor = arena.take(p.factor ? c.batch * c.heads * c.queries : 0);
    row = arena.take(c.bias == SEPARABLE ? c.batch * c.heads * c.queries : 0);
    floats = arena.used;
  }
};

struct ProgramBackward : BackwardTile {
  Chain chain;
  ProgramPartials partials;
  float *dfactor, *drow;
  int64_t unit = 0;

  ProgramBackward(const Call &call, const Worker &w, Arena &arena)
      : BackwardTile(call, w, arena), chain(*this, w.shared, arena, true), partials(call, nullptr) {
    dfactor = arena.take(call.program->factor ? c.heads * ROWS : 0);
    drow = arena.take(c.bias == SEPARABLE ? c.heads * ROWS : 0);
  }

  // Turns to a set of sums.
  void use(float *memory) {
    sums = Partials(c, shared, memory);
    partials = ProgramPartials(c, memory + sums.floats);
  }

  void run(int64_t place) {
    unit = place;
    move(unit);
    if (!sees_something()) memset(dq, 0, c.heads * c.head_width * ROWS * sizeof(float));
    else {
      read_rows();
      chain.read_rows();
      for (int64_t i = 0; i < c.heads * ROWS; ++i) {
        if (c.program->factor) dfactor[i] = 0;
        if (c.bias == SEPARABLE) drow[i] = 0;
        // A row that saw nothing has weights of 0.
        if (last[i % ROWS] < 0) lse[i] = __builtin_inff();
      }
      if (c.program->num_post) c.program->stick ? find_left_over() : find_delta();
      walk();
      add_row_sums();
    }
    write_dq();
    write_halo();
  }

  // The gradient of the softmax weights of a chunk, in chain.dlogits; what they weigh values by comes along.
  const Map &fill_dweights(int64_t base, Columns &values, bool gradients) {
    chain.normalise(chain.fill_logits(base), lse);
    values = chain.weight_columns(base);
    const Map &weighing = chain.fill_post(base, values);
    Map &end = chain.num_stages > chain.num_pre ? chain.dhidden[chain.num_stages - 1] : chain.dlogits;
    const int64_t start = base - chain.end_lag;
    const Columns cols(start, lo, hi);
    cols.clear_rest(end, start);
    if (cols.count()) dots(end, grad, c.v, c.v_stride, cols);
    if (chain.num_stages == chain.num_pre) return weighing;
    for (int64_t j = cols.from; j < cols.to; ++j) hide(end.at(j), c.heads, j);
    activate_back(chain.num_stages - 1, end, cols);
    stages_back(base, chain.num_stages, chain.num_pre, gradients);
    return weighing;
  }

  // Σ P · dP of each row, where stages after the softmax make it differ from Σ out · grad.
  void find_delta() {
    memset(delta, 0, c.heads * ROWS * sizeof(float));
    const int64_t start = first_base();
    chain.begin(start);
    for (int64_t base = start; base - chain.dweights_lag <= hi; base += CHUNK) {
      Columns values = chain.weight_columns(base);
      fill_dweights(base, values, false);
      const Columns cols(base - chain.dweights_lag, lo, hi);
      for (int64_t j = cols.from; j < cols.to; ++j)
        for (int64_t i = 0; i < c.heads * ROWS; i += LANES)
          store(delta + i, load(delta + i) + load(chain.weights.at(j) + i) * load(chain.dlogits.at(j) + i));
      chain.advance();
    }
  }

  // Rows of the tile before have logits of their own here: those of a separable bias are relative to a tile's first row.
  void find_left_over() {
    for (int64_t i = 0; i < c.heads * ROWS; ++i)
      if (chain.left_over[i] < __builtin_inf()) chain.left_over[i] = 0;
    const int64_t start = first_base();
    chain.begin(start);
    for (int64_t base = start; base - chain.weights_lag <= hi; base += CHUNK) {
      const Columns cols = chain.fill_logits(base);
      for (int64_t h = 0; h < c.heads; ++h) chain.add_left_over(h, cols);
      chain.advance();
    }
  }

  void walk() {
    const int64_t start = first_base();
    chain.begin(start);
    for (int64_t base = start; base <= hi + chain.delay; base += CHUNK) {
      Columns values = chain.weight_columns(base);
      const Map &weighing = fill_dweights(base, values, true);
      fill_dlogits(base);
      if (chain.num_pre) {
        Map &last_stage = chain.doutput(chain.num_pre - 1);
        if (&last_stage != &chain.dlogits) {
          const int64_t start_column = base - chain.dweights_lag;
          const Columns cols(start_column, lo, hi);
          cols.clear_rest(last_stage, start_column);
          for (int64_t j = cols.from; j < cols.to; ++j)
            memcpy(last_stage.at(j), chain.dlogits.at(j), c.heads * ROWS * sizeof(float));
          activate_back(chain.num_pre - 1, last_stage, cols);
        }
        stages_back(base, chain.num_pre, 0, true);
      }
      const Columns cols(base - chain.dimage_lag, lo, hi);
      if (chain.num_pre) add_residual(cols);
      if (c.program->softcap) cap_back(cols);
      const Map &dscores = chain.has_dimage() ? chain.dimage : chain.dlogits;
      if (cols.count()) {
        add_dq(dscores, cols);
        add_bias_gradients(cols);
      }
      take_turn(base / CHUNK, dscores, cols, weighing, values, [&] { add_in_turn(cols); });
      chain.advance();
    }
  }

  void fill_dlogits(int64_t base) {
    const Columns cols(base - chain.dweights_lag, lo, hi);
    const float *factor = c.program->factor ? chain.factor : nullptr;
    for (int64_t i = 0; c.program->stick && i < c.heads * ROWS; i += LANES) give_back(cols, i);
    for (int64_t j = cols.from; j < cols.to; ++j) {
      const float *w = chain.weights.at(j);
      float *d = chain.dlogits.at(j);
      if (!c.program->stick)
        for (int64_t i = 0; i < c.heads * ROWS; i += LANES) store(d + i, load(w + i) * (load(d + i) - load(delta + i)));
      hide(d, c.heads, j);
      if (!factor) continue;
      const float *raw = chain.raw.at(j);
      for (int64_t i = 0; i < c.heads * ROWS; i += LANES) {
        const vec dz = load(d + i);
        store(dfactor + i, load(dfactor + i) + dz * load(raw + i));
        store(d + i, dz * load(factor + i));
      }
    }
  }

  // From the gradient of the weights to that of the logits, of the lanes from `at` on.
  void give_back(Columns cols, int64_t at) {
    double *taken = chain.taken + at;
    vec before, here = vec{};
    for (int n = 0; n < LANES; ++n) before[n] = static_cast<float>(taken[n]);
    for (int64_t j = cols.from; j < cols.to; ++j) {
      float *place = chain.dlogits.at(j) + at;
      vec z = load(chain.raw.at(j) + at);
      if (c.program->factor) z *= load(chain.factor + at);
      const vec small = exponential(-larger(z, -z)), near = 1.0f / (1.0f + small), far = small * near;
      const vec part = load(chain.weights.at(j) + at) * load(place);
      store(place, z > vec{} ? far * part - near * (before + here) : near * part - far * (before + here));
      here += part;
    }
    for (int n = 0; n < LANES; ++n) taken[n] += here[n];
  }

  // From the gradient of what a stage made to that of its convolution.
  void activate_back(int64_t n, const Map &map, Columns cols) const {
    const float slope = static_cast<float>(c.program->stages[n].slope);
    if (slope == 1.0f) return;
    for (int64_t j = cols.from; j < cols.to; ++j) {
      float *d = map.at(j);
      const float *made = chain.hidden[n].at(j);
      for (int64_t i = 0; i < map.channels * ROWS; i += LANES)
        store(d + i, load(made + i) > vec{} ? load(d + i) : load(d + i) * slope);
    }
  }

  // The stages from - 1 … to, in reverse: the gradients of their weights and of their inputs.
  void stages_back(int64_t base, int64_t from, int64_t to, bool gradients) {
    for (int64_t n = from; n-- > to;) {
      const StageFilters &f = chain.shared.stages[n];
      const Map &dout = chain.doutput(n);
      if (gradients) {
        const Columns cols(base - chain.dlag[n], lo, hi + chain.ahead[n]);
        if (cols.count()) {
          filter_gradient(partials.weight[n], f.forward, dout, chain.input(n), chain.left(n), cols, chain.mask, chain.scratch);
          if (n == 0 && c.bias_tables) add_table_gradients(dout, cols);
          if (c.program->stages[n].offset) add_column_sums(partials.offset[n], dout, cols);
        }
      }
      Map &din = chain.dinput(n);
      const int64_t start = base - chain.dlag[n] - chain.left(n);
      const bool inner = n > to;
      const Columns cols(start, lo, hi + (inner ? chain.ahead[n - 1] : 0));
      cols.clear_rest(din, start);
      filter_columns(f.back, dout, chain.right(n), cols, chain.mask, chain.scratch,
                     [&](int64_t j) { return target(din.at(j), nullptr, 0, Keep()); });
      if (inner) {
        activate_back(n - 1, din, cols);
        for (int64_t j = cols.from; j < cols.to; ++j) chain.hide_hidden(din.at(j), din.channels, j);
      }
    }
  }

  // The scores' and the bias' own way into the logits.
  void add_residual(Columns cols) {
    const Map &map = chain.dimage;
    const bool scores = c.program->residual_scores, bias = chain.reads_bias && c.program->residual_bias;
    for (int64_t j = cols.from; j < cols.to; ++j) {
      for (int64_t h = 0; h < c.heads; ++h)
        for (int v = 0; v < VECTORS; ++v) {
          const vec d = load(chain.dlogits.at(j) + h * ROWS + v * LANES);
          float *s = map.at(j) + map.head(h) * ROWS + v * LANES, *b = s + map.split * ROWS;
          if (scores) store(s, load(s) + d);
          if (bias) store(b, load(b) + d);
        }
      hide(map.at(j), map.channels, j);
    }
  }

  // From the gradient of the capped scores to that of the scores.
  void cap_back(Columns cols) const {
    const float inverse = static_cast<float>(1 / c.program->softcap);
    for (int64_t j = cols.from; j < cols.to; ++j)
      for (int64_t h = 0; h < c.heads; ++h)
        for (int v = 0; v < VECTORS; ++v) {
          const int64_t at = chain.image.head(h) * ROWS + v * LANES;
          const vec tangent = load(chain.image.at(j) + at) * inverse;
          const float *d = chain.num_pre ? chain.dimage.at(j) + at : chain.dlogits.at(j) + at;
          store(chain.dimage.at(j) + at, load(d) * (1.0f - tangent * tangent));
        }
  }

  // The gradient of the bias of one head in one column, or null.
  const float *dbias(int64_t h, int64_t column) const {
    if (chain.reads_bias) return chain.dimage.at(column) + (chain.dimage.head(h) + chain.dimage.split) * ROWS;
    if (chain.num_pre && !c.program->residual_bias) return nullptr;
    return chain.dlogits.at(column) + h * ROWS;
  }

  void add_bias_gradients(Columns cols) {
    if (c.bias != BY_DISTANCE && c.bias != SEPARABLE) return;
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t j = cols.from; j < cols.to; ++j) {
        const float *d = dbias(h, j);
        if (!d) return;
        if (c.bias == BY_DISTANCE)
          add_to_table(sums.values + h * shared.values_stride + value_place(j), 0, d, 1);
        else
          add_to_table(drow + h * ROWS, 0, d, 1);
      }
  }

  // What several tiles add to: the dense bias of rows that two of them read, and a separable one's columns.
  void add_in_turn(Columns cols) const {
    if (c.bias != SEPARABLE && !(c.bias == DENSE && c.dense_grad)) return;
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t j = cols.from; j < cols.to; ++j) {
        const float *d = dbias(h, j);
        if (!d) return;
        if (c.bias == SEPARABLE) {
          vec total = vec{};
          for (int v = 0; v < VECTORS; ++v) total += load(d + v * LANES);
          c.program->dcolumn[(entry * c.heads + h) * c.keys + j] += sum(total);
        } else {
          const int64_t b = c.dense_batch == 1 ? 0 : entry;
          float *place = c.ddense + ((b * c.heads + h) * c.queries + i0) * c.keys + j;
          for (int64_t r = begin; r < rows; ++r) place[r * c.keys] += d[r];
        }
      }
  }

  void add_row_sums() {
    const Program &p = *c.program;
    for (int64_t h = 0; h < c.heads; ++h) {
      for (int64_t r = begin; r < rows; ++r) {
        const int64_t place = (entry * c.heads + h) * c.queries + i0 + r;
        if (p.factor) partials.factor[place] += dfactor[h * ROWS + r];
        if (c.bias == SEPARABLE) partials.row[place] += drow[h * ROWS + r];
      }
      for (int v = 0; p.sink && v < VECTORS; ++v) {
        const int64_t at = h * ROWS + v * LANES;
        const vec weight = exponential(broadcast(p.sink[h]) - load(lse + at));
        store(partials.sink + h * LANES, load(partials.sink + h * LANES) - weight * load(delta + at));
      }
    }
  }

  // dq of the rows that the tile before writes.
  void write_halo() const {
    if (!g.halo) return;
    float *rows_out = chain.shared.halo_dq + unit * c.heads * g.halo * c.head_width;
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t r = 0; r < g.halo; ++r)
        for (int64_t d = 0; d < c.head_width; ++d)
          rows_out[(h * g.halo + r) * c.head_width + d] =
              dq[(h * c.head_width + d) * ROWS + r] * static_cast<float>(c.scale);
  }

  // Counts a tile that another thread runs.
  void pass(int64_t place) {
    move(place);
    if (!sees_something()) return;
    int32_t *turns = worker.turns + entry * worker.num_tickets;
    for (int64_t base = first_base(); base <= hi + chain.delay; base += CHUNK) ++turns[base / CHUNK];
  }
};

size_t program_forward_scratch(const Call &c, int) {
  Arena arena{nullptr};
  ProgramForward tile(c, nullptr, arena);
  return arena.used;
}

void program_forward_run(const Call &c, const Worker &worker) {
  Arena arena{worker.scratch};
  ProgramForward tile(c, worker.shared, arena);
  const int64_t units = forward_units(c, 0);
  for (int64_t unit; (unit = next_unit(worker)) < units;) tile.run(unit);
}

size_t program_backward_scratch(const Call &c, int) {
  Arena arena{nullptr};
  const Worker worker{};
  ProgramBackward tile(c, worker, arena);
  return arena.used;
}

int64_t program_backward_tickets(const Call &c) {
  Arena arena{nullptr};
  const Worker worker{};
  const ProgramBackward tile(c, worker, arena);
  return (c.keys - 1 + tile.chain.delay) / CHUNK + 1;
}

// Turns are taken inside an entry of a batch: a dense bias that all entries share has one thread, where tiles
// share rows.
int64_t program_backward_units(const Call &c, int workers) {
  if (by_tile(c) && c.batch > 1 && Geometry(c).halo) return 1;
  return backward_units(c, workers);
}

size_t program_backward_sums_floats(const Call &c) {
  return backward_sums_floats(c) + ProgramPartials(c, nullptr).floats;
}

int64_t program_backward_sums(const Call &c, int workers) { return num_sets(c, program_backward_units(c, workers), workers); }

void program_backward_run(const Call &c, const Worker &worker) {
  Arena arena{worker.scratch};
  ProgramBackward tile(c, worker, arena);
  const int64_t units = program_backward_units(c, 0), tiles = c.batch * tile.g.tiles;
  run_units(tile, worker, units, tiles / units, [&](float *sums) { tile.use(sums); },
            [&] { memset(tile.sums.dw1, 0, worker.sums_floats * sizeof(float)); });
}

// Adds a row to the gradient of q, which begins at number `place`.
void add_to_dq(const Call &c, int64_t place, const float *row, float *scratch) {
  uint16_t *high = static_cast<uint16_t *>(c.dq) + place;
  float *sums = c.dq_low ? scratch : static_cast<float *>(c.dq) + place;
  if (c.dq_low) join_row(sums, high, c.dq_low + place, c.head_width);
  for (int64_t d = 0; d < c.head_width; ++d) sums[d] += row[d];
  if (c.dq_low) split_row(high, c.dq_low + place, sums, c.head_width);
}

void program_backward_finish(const Call &c, const Worker *workers, int count) {
  const Program &p = *c.program;
  Arena arena{workers[0].scratch};
  ProgramBackward tile(c, workers[0], arena);
  const int64_t units = program_backward_units(c, count), sets = least(units, num_sets(c, units, count));
  for (int64_t set = 0; set < sets; ++set) {
    tile.use(workers[0].sums + set * workers[0].sums_floats);
    const ProgramPartials &s = tile.partials;
    for (int64_t n = 0; n < p.num_pre + p.num_post; ++n) {
      const StageCall &stage = p.stages[n];
      const Filter &f = tile.chain.shared.stages[n].forward;
      for (int64_t o = 0; o < stage.outputs; ++o) {
        for (int64_t in = 0; in < f.inputs; ++in)
          for (int64_t row = 0; row < f.rows; ++row)
            for (int64_t t = 0; t < f.taps; ++t)
              stage.dweight[((o * f.inputs + in) * f.rows + row) * f.taps + t] +=
                  filter_gradient_at(s.weight[n], f, o / f.outputs, f.rows - 1 - row, t, in, o % f.outputs);
        if (stage.offset) stage.doffset[o] += sum(load(s.offset[n] + o * LANES));
      }
    }
    for (int64_t h = 0; h < c.heads; ++h) {
      if (p.sink) p.dsink[h] += sum(load(s.sink + h * LANES));
      for (int64_t n = 0; c.bias == BY_DISTANCE && n < c.distances; ++n)
        c.dvalues[h * c.distances + n] += tile.sums.values[h * tile.shared.values_stride + ROWS + n];
    }
    tile.finish_tables(tile.sums);
    for (int64_t n = 0; n < c.batch * c.heads * c.queries; ++n) {
      if (p.factor) p.dfactor[n] += s.factor[n];
      if (c.bias == SEPARABLE) p.drow[n] += s.row[n];
    }
    if (set || !tile.g.halo) continue;
    for (int64_t unit = 0; unit < c.batch * tile.g.tiles; ++unit) {
      tile.move(unit);
      const float *rows = tile.chain.shared.halo_dq + unit * c.heads * tile.g.halo * c.head_width;
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t r = tile.begin; r < tile.g.halo; ++r)
          add_to_dq(c, ((tile.entry * c.heads + h) * c.queries + tile.i0 + r) * c.head_width,
                    rows + (h * tile.g.halo + r) * c.head_width, tile.row_scratch);
    }
  }
  round_gradients(c);
}

}  // namespace
