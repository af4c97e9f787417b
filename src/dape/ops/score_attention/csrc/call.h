// One call of the kernel as the caller describes it, and what each build for an instruction set provides.
//
// B batch, H heads, G key/value heads, Tq/Tk queries/keys, D head width, W convolution width, k taps.
// q, k, v, the output and their gradients have the call's dtype, everything else is float32; the last axis of every
// tensor is contiguous.
#pragma once

#include <cstddef>
#include <cstdint>

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum BiasKind : int64_t { NO_BIAS = 0, BY_DISTANCE = 1, DENSE = 2, SEPARABLE = 3, CURVE = 4 };

// One stage of a score program: a convolution, then LeakyReLU. Mirrored in native.py, like all that follows.
struct StageCall {
  int64_t outputs, inputs, groups, rows, taps, left;
  double slope;
  const float *weight, *offset;  // [outputs, inputs / groups, rows, taps], [outputs] or null
  float *dweight, *doffset;
};

// Any score program (program.h).
struct Program {
  int64_t num_pre, num_post, residual_scores, residual_bias;
  int64_t stick;               // stick-breaking in place of the softmax
  double softcap;              // scores become softcap · tanh(score / softcap); 0: they stay as they are
  const StageCall *stages;     // those before the softmax, then those after it
  const float *sink, *factor;  // [H], [B, H, Tq]: what the logits are multiplied by; null for none
  const double *row, *column;  // [B, H, Tq], [B, H, Tk]: sums over many tokens, whose differences count
  const int32_t *earlier;      // [B, Tq]: how many rows right before its own each may read; null: all that there are
  double *left;                // [B, H, Tq]: minus the logarithm of what is left of each row's stick, in place of lse
  float *dsink, *dfactor, *drow, *dcolumn;
};

// Mirrored field by field in native.py.
struct Call {
  int64_t batch, heads, groups, queries, keys, head_width;
  // width = 0: no convolution. channels: of the image, H or 2H.
  int64_t width, taps, left, channels;
  int64_t causal, residual_bias, bias, bias_tables;
  // bias_tables: the bias half of the first convolution is a table by distance, so the image has H channels though w1 has 2H
  // inputs; hidden and edges are given where there is a program, and made of w1, b1 and values where there is none.
  // values covers distances lowest … lowest + distances - 1; hidden and edges have table_length columns.
  int64_t lowest, distances, table_length, dense_batch, dense_grad, dtype, pieces;
  // Strides of batch, head and token.
  int64_t q_stride[3], k_stride[3], v_stride[3], out_stride[3], grad_stride[3];
  double scale, slope;
  const void *q, *k, *v;         // [B, H or G, T, D]
  const float *w1, *b1;          // [W, H or 2H, k], [W]
  const float *w2, *b2;          // [H, W, k], [H]
  const float *dense;            // [1 or B, H, Tq, Tk]
  const float *values;           // [H, distances]; of a curve [1, distances]
  // Of a curve (curve.h): [pieces - 1], ascending; [pieces, H]; [pieces, H]; [B, Tq].
  const float *knots, *slopes, *offsets, *row_scale;
  const float *hidden, *edges;   // [W, table_length], [left, W, table_length]
  const int32_t *first, *last;   // [B, Tq]; null: every key, up to the query's own place if causal
  void *out;                     // out_stride
  float *lse;                    // [B, H, Tq]
  const void *grad_out;          // grad_stride
  void *dq, *dk, *dv;            // contiguous
  // The lower halves of sums over tiles, where results have two bytes (halves.h); those of dq for programs over rows.
  uint16_t *dq_low, *dk_low, *dv_low;
  float *dw1, *db1, *dw2, *db2, *ddense, *dvalues, *dslopes, *doffsets, *drow_scale, *dhidden, *dedges;
  const Program *program;  // null: none, or the two convolutions above
};

// One thread's part of a call.
struct Worker {
  int index, count;
  // The thread's own memory, and what `prepare` wrote for all of them.
  float *scratch;
  const float *shared;
  // tickets[b · num_tickets + n]: how many tiles have added their gradients to key chunk n of entry b;
  // turns: the thread's own count of the tiles that come before it there.
  int32_t *tickets, *turns;
  int64_t num_tickets;
  // The next unit of work to be dealt out, for all threads.
  int32_t *dealt;
  // num_sums sets of sums over tiles, of sums_floats numbers each, for all threads; finished[n]: how many units have
  // added to set n.
  float *sums;
  size_t sums_floats;
  int32_t *finished;
  int64_t num_sums;
};

struct Pass {
  size_t (*shared_floats)(const Call &);
  size_t (*scratch_floats)(const Call &, int workers);
  int64_t (*num_tickets)(const Call &);
  // Sums over tiles that go by unit of work, not by thread: their number of sets and their size.
  int64_t (*num_sums)(const Call &, int workers);
  size_t (*sums_floats)(const Call &);
  // How many threads can have work.
  int64_t (*max_workers)(const Call &, int workers);
  void (*prepare)(const Call &, float *shared);
  void (*run)(const Call &, const Worker &);
  void (*finish)(const Call &, const Worker *, int workers);
};

struct Build {
  const char *name;
  Pass forward, backward, decode, program_forward, program_backward, program_decode;
  // One stage by itself, for timing (stages.h).
  double (*stage)(const Call &, const Worker &, int stage, int64_t repeats);
};
