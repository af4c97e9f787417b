// The plain C interface: chooses a build for the processor at hand and runs its passes on threads.
#ifndef _WIN32
#include <dlfcn.h>
#include <pthread.h>
#endif

#ifdef DAPE_X86
#include <cpuid.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "call.h"

extern "C" const Build dape_build_portable;
#ifdef DAPE_X86
extern "C" const Build dape_build_avx2, dape_build_avx512, dape_build_avx512_short;
#endif

// Multiply-adds for which a thread is worth waking, some ten microseconds; tests set it to 1.
extern "C" int64_t dape_share;
int64_t dape_share = int64_t{1} << 19;

// Ends one step of waiting for another thread; called from code that must not pull in library templates.
// A thread that waits long gives up its core: the one it waits for may need it.
extern "C" void dape_wait(int spins) {
  if (spins > 256) std::this_thread::sleep_for(std::chrono::microseconds(50));
  else if (spins > 64) std::this_thread::yield();
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
  // Asked once: virtual machines take tens of microseconds to answer.
  static const Instructions has = instructions();
  all.push_back({&dape_build_avx512, has.avx512});
  all.push_back({&dape_build_avx512_short, has.avx512});
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

// How many rows before its own a tile computes again for kernels over several queries, and the multiply-adds that all
// stages take for a pair of a query and a key.
struct Stages {
  int64_t earlier = 0, work;
  explicit Stages(const Call &c) : work(c.width * (c.channels + c.heads) * c.taps) {
    for (int64_t n = 0; c.program && n < c.program->num_pre + c.program->num_post; ++n) {
      const StageCall &stage = c.program->stages[n];
      earlier += stage.rows - 1, work += stage.outputs * stage.inputs / stage.groups * stage.rows * stage.taps;
    }
  }
};

// Rows × keys that tiles of so many rows compute, those that they share with the tile before included.
double tile_pixels(const Call &c, int64_t rows) {
  const int64_t own = rows - Stages(c).earlier;
  double pixels = 0;
  for (int64_t start = 0; start < c.queries; start += own) {
    const int64_t end = start + own < c.queries ? start + own : c.queries;
    pixels += static_cast<double>(rows * (c.causal ? end + c.keys - c.queries : c.keys));
  }
  return pixels;
}

// The fastest build, or the one for few queries where its tiles, of a third of the rows, waste less: they read keys and
// values three times as often, which takes a fifth more time.
const Build *find_for(const Call &c) {
  const Build *fastest = find("");
#ifdef DAPE_X86
  if (fastest == &dape_build_avx512 && 1.2 * tile_pixels(c, 16) < tile_pixels(c, 48)) return &dape_build_avx512_short;
#endif
  return fastest;
}

// How many threads have at least `dape_share` multiply-adds each.
int64_t shares(const Call &c) {
  const int64_t work = c.batch * c.queries * c.keys * (2 * c.heads * c.head_width + Stages(c).work);
  return std::max<int64_t>(1, work / dape_share);
}

constexpr size_t LINE = 64;
size_t padded(size_t bytes) { return (bytes + LINE - 1) / LINE * LINE + LINE; }

// Memory for one call. A small block is kept for the next call, because the system hands out pages one fault at a time:
// a training step of a small model had hundreds of them.
struct Block {
  explicit Block(size_t bytes) : size(padded(bytes)), data(size <= KEPT ? kept.exchange(nullptr) : nullptr), next(data) {
    if (!data) data = next = static_cast<char *>(::operator new(size <= KEPT ? KEPT : size, std::align_val_t(LINE)));
  }
  ~Block() {
    if (size <= KEPT) data = kept.exchange(data);
    if (data) ::operator delete(data, std::align_val_t(LINE));
  }
  Block(const Block &) = delete;
  template <class T>
  T *take(size_t count) {
    T *part = reinterpret_cast<T *>(next);
    next += padded(count * sizeof(T));
    return part;
  }

 private:
// AddressSanitizer finds the end of a block only where it is the call's own.
#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t KEPT = 0;
#else
  static constexpr size_t KEPT = size_t{4} << 20;
#endif
  static std::atomic<char *> kept;
  size_t size;
  char *data, *next;
};
std::atomic<char *> Block::kept{nullptr};

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
        for (int spins = 0; !ready.load(std::memory_order_acquire); ++spins) dape_wait(spins);
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
  const size_t count = static_cast<size_t>(std::min({int64_t{num_threads}, pass.max_workers(call, num_threads), shares(call)}));
  const size_t shared = pass.shared_floats(call), scratch = pass.scratch_floats(call, count);
  const size_t tickets = static_cast<size_t>(pass.num_tickets(call) * call.batch);
  const int64_t num_sums = pass.num_sums(call, static_cast<int>(count));
  const size_t sums = pass.sums_floats(call), counts = static_cast<size_t>(num_sums) + 1;
  Block block(padded(shared * 4) + padded(tickets * 4) + padded(counts * 4) + padded(sums * num_sums * 4) +
              count * (padded(scratch * 4) + padded(tickets * 4)));
  float *shared_memory = block.take<float>(shared);
  int32_t *ticket_memory = block.take<int32_t>(tickets), *count_memory = block.take<int32_t>(counts);
  float *sums_memory = block.take<float>(sums * num_sums);
  memset(ticket_memory, 0, tickets * 4);
  memset(count_memory, 0, counts * 4);
  pass.prepare(call, shared_memory);
  std::vector<Worker> workers(count);
  for (size_t i = 0; i < count; ++i) {
    int32_t *turns = block.take<int32_t>(tickets);
    memset(turns, 0, tickets * 4);
    workers[i] = {static_cast<int>(i), 0, block.take<float>(scratch), shared_memory, ticket_memory, turns,
                  pass.num_tickets(call), count_memory, sums_memory, sums, count_memory + 1, num_sums};
  }
  const auto work = [&](const Worker &worker) { pass.run(call, worker); };
  if (count > 1 && OpenMP::team.usable())
    on_team(workers, work);
  else
    on_own_threads(workers, work);
  pass.finish(call, workers.data(), static_cast<int>(workers.size()));
}

int guarded(const char *build, const Call *call, int num_threads, Pass Build::*pass) {
  const bool by_rows = pass != &Build::decode && pass != &Build::program_decode;
  const Build *found = *build || !by_rows ? find(build) : find_for(*call);
  if (!found) return 1;
  try {
    run(found->*pass, *call, num_threads < 1 ? 1 : num_threads);
  } catch (const std::bad_alloc &) {
    return 2;
  }
  return 0;
}

}  // namespace

// `build`: its name, or "" for the one that suits the call. Returns 0, 1 (this processor cannot run it) or 2 (out of memory).
extern "C" int dape_forward(const char *build, const Call *call, int num_threads) {
  return guarded(build, call, num_threads, &Build::forward);
}

extern "C" int dape_backward(const char *build, const Call *call, int num_threads) {
  return guarded(build, call, num_threads, &Build::backward);
}

extern "C" int dape_decode(const char *build, const Call *call, int num_threads) {
  return guarded(build, call, num_threads, &Build::decode);
}

extern "C" int dape_program_forward(const char *build, const Call *call, int num_threads) {
  return guarded(build, call, num_threads, &Build::program_forward);
}

extern "C" int dape_program_backward(const char *build, const Call *call, int num_threads) {
  return guarded(build, call, num_threads, &Build::program_backward);
}

extern "C" int dape_program_decode(const char *build, const Call *call, int num_threads) {
  return guarded(build, call, num_threads, &Build::program_decode);
}

// Runs a stage of a backward call `repeats` times on this thread; returns its multiply-accumulates each time, as
// run_stage does, or -2 where there is no such build or too little memory.
extern "C" double dape_stage(const char *build, const Call *call, int stage, int64_t repeats) {
  const Build *found = find(build);
  if (!found) return -2;
  try {
    const Pass &pass = found->backward;
    const size_t shared = pass.shared_floats(*call), scratch = pass.scratch_floats(*call, 1);
    const size_t most = scratch + found->forward.scratch_floats(*call, 1), sums = pass.sums_floats(*call);
    Block block(padded(shared * 4) + padded(sums * 4) + padded(most * 4));
    float *shared_memory = block.take<float>(shared), *sums_memory = block.take<float>(sums);
    pass.prepare(*call, shared_memory);
    const Worker worker{0, 1, block.take<float>(most), shared_memory, nullptr, nullptr, 0, nullptr, sums_memory, sums, nullptr, 1};
    return found->stage(*call, worker, stage, repeats);
  } catch (const std::bad_alloc &) {
    return -2;
  }
}

// The name of the n-th build this processor can run, fastest first, or null.
extern "C" const char *dape_build_name(int n) {
  for (const Choice &choice : choices())
    if (choice.runs && n-- == 0) return choice.build->name;
  return nullptr;
}

// The name of the build that a forward or backward call runs.
extern "C" const char *dape_build_for(const Call *call) { return find_for(*call)->name; }

// Digest of the sources that this library was built from (setup.py), which native.py compares with those beside it.
extern "C" const char *dape_sources() { return DAPE_SOURCES; }
