// Threads that run one function together, again and again. Between two runs they spin for a moment, since the next token
// is usually asked for at once, and then sleep. The caller is the first of them.

#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // "yield" does nothing on cores with one thread
#else
  std::this_thread::yield();
#endif
}

// Every thread waits until all have arrived. Spinning is short: where there are more threads than cores, whoever is
// waited for needs the core.
class Barrier {
 public:
  explicit Barrier(int64_t threads) : threads_(threads) {}

  void wait() {
    const uint64_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int64_t spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins)
      if (spins < kSpins)
        relax();
      else
        sched_yield();
  }

 private:
  static constexpr int64_t kSpins = 1000;  // some 10 microseconds
  const int64_t threads_;
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<uint64_t> phase_{0};
};

// Keeps the calling thread on one CPU as long as it lives; elsewhere the caller goes where it likes. A caller that is on
// that CPU already, as it is from the second token on, has no reason to leave it within a token, and is let be: the
// kernel takes some 10 microseconds to pin a thread and let it go.
class Pinned {
 public:
  explicit Pinned(int64_t cpu) {
    pinned_ = cpu >= 0 && sched_getcpu() != cpu && pthread_getaffinity_np(pthread_self(), sizeof before_, &before_) == 0;
    if (pinned_) pin(cpu);
  }
  ~Pinned() {
    if (pinned_) pthread_setaffinity_np(pthread_self(), sizeof before_, &before_);
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  static void pin(int64_t cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // one that fails costs time and nothing else
  }

 private:
  cpu_set_t before_;
  bool pinned_;
};

class Team {
 public:
  // `cpus`: one for each thread, or -1 for a thread that is not pinned.
  explicit Team(std::vector<int64_t> cpus) : cpus_(std::move(cpus)), barrier_(static_cast<int64_t>(cpus_.size())) {
    try {
      for (int64_t id = 1; id < size(); ++id) workers_.emplace_back([this, id] { serve(id); });
    } catch (...) {
      dismiss();
      throw;
    }
  }
  ~Team() { dismiss(); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int64_t size() const { return static_cast<int64_t>(cpus_.size()); }

  // Waits for all threads; for `work` alone.
  void meet() { barrier_.wait(); }

  // Calls what(i) for this thread's part of [0, count).
  template <typename Do>
  void share(int64_t id, int64_t count, const Do& what) const {
    for (int64_t i = count * id / size(); i < count * (id + 1) / size(); ++i) what(i);
  }

  // Runs work(context, id) on every thread and returns when all have ended.
  void run(void (*work)(void*, int64_t), void* context) {
    const Pinned pinned(size() > 1 ? cpus_[0] : -1);
    work_ = work;
    context_ = context;
    publish();
    work(context, 0);
    meet();
  }

 private:
  // Between two tokens Python takes up to a third of this, its own memory being pushed out of the caches by the weights;
  // a thread that sleeps would take that long to wake.
  static constexpr std::chrono::microseconds kSpinBeforeSleep{500};

  void publish() {
    orders_.fetch_add(1);
    if (sleeping_.load() == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }

  void dismiss() {
    work_ = nullptr;
    publish();
    for (std::thread& worker : workers_) worker.join();
  }

  void serve(int64_t id) {
    if (cpus_[id] >= 0) Pinned::pin(cpus_[id]);
    for (uint64_t seen = 0;;) {
      seen = next_order(seen);
      if (work_ == nullptr) return;
      work_(context_, id);
      meet();
    }
  }

  uint64_t next_order(uint64_t seen) {
    using Clock = std::chrono::steady_clock;
    for (const Clock::time_point end = Clock::now() + kSpinBeforeSleep; Clock::now() < end; relax())
      if (orders_.load(std::memory_order_acquire) != seen) return seen + 1;
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1);
    wake_.wait(lock, [&] { return orders_.load() != seen; });
    sleeping_.fetch_sub(1);
    return seen + 1;
  }

  const std::vector<int64_t> cpus_;
  Barrier barrier_;
  void (*work_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> orders_{0};
  alignas(64) std::atomic<int64_t> sleeping_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};
