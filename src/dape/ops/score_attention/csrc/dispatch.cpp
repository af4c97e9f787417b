// The plain C interface: chooses a build for the processor at hand and runs its passes on threads.
#ifndef _WIN32
#include <dlfcn.h>
#include <pthread.h>
#endif

#ifdef DAPE_X86
#include <cpuid.h>
#endif

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "call.h"

extern "C" const Build dape_build_portable;
#ifdef DAPE_X86
extern "C" const Build dape_build_avx2, dape_build_avx512;
#endif

// Ends one step of waiting for another thread; called from code that must not pull in library templates.
extern "C" void dape_wait(int spins) {
  if (spins > 64) std::this_thread::yield();
}

namespace {

struct Choice {
  const Build *build;
  bool runs;
};

#ifdef DAPE_X86
struct Instructions {
  bool avx2 = false, avx512 = false;  // with FMA; with DQ, BW and VL
};

// What the processor has and the system saves; __builtin_cpu_supports is not in every compiler's library.
Instructions instructions() {
  unsigned a = 0, b = 0, c = 0, d = 0, saved = 0, unused = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1) || !(c >> 12 & 1)) return {};
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return {};
  const auto all = [](unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; };
  const unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  return {all(saved, 0x06) && all(b, 1u << 5), all(saved, 0xe6) && all(b, avx512)};
}
#endif

// In order of speed.
std::vector<Choice> choices() {
  std::vector<Choice> all;
#ifdef DAPE_X86
  const Instructions has = instructions();
  all.push_back({&dape_build_avx512, has.avx512});
  all.push_back({&dape_build_avx2, has.avx2});
#endif
  all.push_back({&dape_build_portable, true});
  return all;
}

const Build *find(const char *name) {
  for (const Choice &choice : choices())
    if (choice.runs && (!*name || !strcmp(choice.build->name, name))) return choice.build;
  return nullptr;
}

constexpr size_t LINE = 64;
size_t padded(size_t bytes) { return (bytes + LINE - 1) / LINE * LINE + LINE; }

// Memory for one call, freed with it.
struct Block {
  char *data, *next;
  explicit Block(size_t bytes) : data(static_cast<char *>(::operator new(padded(bytes), std::align_val_t(LINE)))), next(data) {}
  ~Block() { ::operator delete(data, std::align_val_t(LINE)); }
  Block(const Block &) = delete;
  template <class T>
  T *take(size_t count) {
    T *part = reinterpret_cast<T *>(next);
    next += padded(count * sizeof(T));
    return part;
  }
};

// The OpenMP team that PyTorch has in this process. Its threads are awake already, where threads of our own
// would be started for every call and compete with them.
struct OpenMP {
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;
  // A forked child has the team's memory but not its threads: to call it there would wait for ever.
  bool forked = false;

  bool usable() const { return parallel && thread_num && num_threads && !forked; }

#ifndef _WIN32  // whose OpenMP has no such entry: threads of our own then
  OpenMP() {
    find(parallel, "GOMP_parallel");
    find(thread_num, "omp_get_thread_num");
    find(num_threads, "omp_get_num_threads");
    pthread_atfork(nullptr, nullptr, [] { team.forked = true; });
  }

  template <class Function>
  static void find(Function &function, const char *name) {
    function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  }
#endif
  static OpenMP team;
};
OpenMP OpenMP::team;

void settle(std::vector<Worker> &workers, size_t count) {
  workers.resize(count);
  for (Worker &worker : workers) worker.count = static_cast<int>(count);
}

// Runs work on every worker at once, each on a thread of the team, which may be smaller than asked for.
template <class Work>
void on_team(std::vector<Worker> &workers, const Work &work) {
  struct Task {
    std::vector<Worker> &workers;
    const Work &work;
    std::atomic<bool> ready{false};
  } task{workers, work};
  const auto body = [](void *data) {
    Task &task = *static_cast<Task *>(data);
    const int index = OpenMP::team.thread_num();
    if (index == 0) {
      settle(task.workers, static_cast<size_t>(OpenMP::team.num_threads()));
      task.ready.store(true, std::memory_order_release);
    }
    for (int spins = 0; !task.ready.load(std::memory_order_acquire); ++spins) dape_wait(spins);
    task.work(task.workers[static_cast<size_t>(index)]);
  };
  OpenMP::team.parallel(body, &task, static_cast<unsigned>(workers.size()), 0);
}

// The same on threads that live for this call only.
template <class Work>
void on_own_threads(std::vector<Worker> &workers, const Work &work) {
  std::atomic<bool> ready{false};
  std::vector<std::thread> threads;
  threads.reserve(workers.size());
  try {
    for (size_t i = 1; i < workers.size(); ++i)
      threads.emplace_back([&, i] {
        while (!ready.load(std::memory_order_acquire)) std::this_thread::yield();
        work(workers[i]);
      });
  } catch (const std::system_error &) {
    // The system has no more threads to give: those we have share the work.
  }
  settle(workers, threads.size() + 1);
  ready.store(true, std::memory_order_release);
  work(workers[0]);
  for (std::thread &thread : threads) thread.join();
}

void run(const Pass &pass, const Call &call, int num_threads) {
  const int64_t most = pass.max_workers(call, num_threads);
  const size_t count = static_cast<size_t>(num_threads < most ? num_threads : most);
  const size_t shared = pass.shared_floats(call), scratch = pass.scratch_floats(call, count);
  const size_t tickets = static_cast<size_t>(pass.num_tickets(call) * call.batch);
  Block block(padded(shared * 4) + padded(tickets * 4) + count * (padded(scratch * 4) + padded(tickets * 4)));
  float *shared_memory = block.take<float>(shared);
  int32_t *ticket_memory = block.take<int32_t>(tickets);
  memset(ticket_memory, 0, tickets * 4);
  pass.prepare(call, shared_memory);
  std::vector<Worker> workers(count);
  for (size_t i = 0; i < count; ++i) {
    int32_t *turns = block.take<int32_t>(tickets);
    memset(turns, 0, tickets * 4);
    workers[i] = {static_cast<int>(i), 0, block.take<float>(scratch), shared_memory, ticket_memory, turns, pass.num_tickets(call)};
  }
  const auto work = [&](const Worker &worker) { pass.run(call, worker); };
  if (count > 1 && OpenMP::team.usable())
    on_team(workers, work);
  else
    on_own_threads(workers, work);
  pass.finish(call, workers.data(), static_cast<int>(workers.size()));
}

int guarded(const char *build, const Call *call, int num_threads, Pass Build::*pass) {
  const Build *found = find(build);
  if (!found) return 1;
  try {
    run(found->*pass, *call, num_threads < 1 ? 1 : num_threads);
  } catch (const std::bad_alloc &) {
    return 2;
  }
  return 0;
}

}  // namespace

// `build`: its name, or "" for the fastest. Returns 0, 1 (this processor cannot run it) or 2 (out of memory).
extern "C" int dape_forward(const char *build, const Call *call, int num_threads) {
  return guarded(build, call, num_threads, &Build::forward);
}

extern "C" int dape_backward(const char *build, const Call *call, int num_threads) {
  return guarded(build, call, num_threads, &Build::backward);
}

extern "C" int dape_decode(const char *build, const Call *call, int num_threads) {
  return guarded(build, call, num_threads, &Build::decode);
}

// The name of the n-th build this processor can run, fastest first, or null.
extern "C" const char *dape_build_name(int n) {
  for (const Choice &choice : choices())
    if (choice.runs && n-- == 0) return choice.build->name;
  return nullptr;
}

// Name, offset and size of the n-th field of Call, or null after the last; the size of Call itself for n = -1.
extern "C" const char *dape_call_field(int n, int64_t *offset, int64_t *size) {
  static const struct {
    const char *name;
    size_t offset, size;
  } fields[] = {
#define FIELD(name) {#name, offsetof(Call, name), sizeof(Call::name)}
      FIELD(batch), FIELD(heads), FIELD(groups), FIELD(queries), FIELD(keys), FIELD(head_width), FIELD(width),
      FIELD(taps), FIELD(left), FIELD(channels), FIELD(causal), FIELD(residual_bias), FIELD(bias), FIELD(tables),
      FIELD(lowest), FIELD(distances), FIELD(table_length), FIELD(dense_batch), FIELD(dense_grad), FIELD(q_stride),
      FIELD(k_stride), FIELD(v_stride), FIELD(out_stride), FIELD(grad_stride), FIELD(scale), FIELD(slope), FIELD(q),
      FIELD(k), FIELD(v), FIELD(w1), FIELD(b1), FIELD(w2), FIELD(b2), FIELD(dense), FIELD(values), FIELD(hidden),
      FIELD(edges), FIELD(first), FIELD(last), FIELD(out), FIELD(lse), FIELD(grad_out), FIELD(dq), FIELD(dk),
      FIELD(dv), FIELD(dw1), FIELD(db1), FIELD(dw2), FIELD(db2), FIELD(ddense), FIELD(dvalues), FIELD(dhidden),
      FIELD(dedges),
#undef FIELD
  };
  if (n < 0) return *offset = 0, *size = sizeof(Call), "Call";
  if (static_cast<size_t>(n) >= sizeof(fields) / sizeof(fields[0])) return nullptr;
  *offset = static_cast<int64_t>(fields[n].offset), *size = static_cast<int64_t>(fields[n].size);
  return fields[n].name;
}
