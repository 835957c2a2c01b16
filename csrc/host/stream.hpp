// A stream of the host target: its workers run one launch after the other, as a GPU runs the kernels of a stream.
#pragma once
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "roles.hpp"

namespace megamoe::host {

// One rank's buffer as its process addresses it.
struct Rank {
  Problem problem;
  BufferLayout layout;
  uint32_t rank;
  std::vector<uint8_t*> bases;
  HostStatus* host_status;
};

// What worker `worker` of `num_workers` does for a launch.
inline void run_worker(const Rank& rank, const LaunchArguments& launch, uint32_t worker, uint32_t num_workers,
                       Scratch& scratch) {
  const auto* word = reinterpret_cast<const int32_t*>(launch.num_tokens_word);
  const int64_t tokens = word == nullptr ? int64_t(launch.num_tokens) : int64_t(*word);
  const uint32_t num_tokens = uint32_t(std::clamp<int64_t>(tokens, 0, launch.num_tokens));  // y has room for no more
  Context context{&rank.problem, &rank.layout, rank.bases.data(), rank.bases[rank.rank], rank.host_status,
                  launch.timeout_ns, 0, rank.rank, num_tokens, Stage(launch.stage)};
  const auto y = reinterpret_cast<uint16_t*>(launch.y);
  const uint64_t y_elements = uint64_t(num_tokens) * rank.problem.hidden;
  SoloTeam team;
  const Entry entry = enter_launch(context, launch.launch);
  acknowledge_entry(context, launch.launch, num_workers);
  if (entry == Entry::refused) {
    if (worker == 0 && y != nullptr) fill_nan(y, y_elements);
    return;
  }
  if (worker == 0 && tokens != int64_t(num_tokens))
    record_fault(context, {FaultKind::token_count, WaitFor::nothing, rank.rank, 0, launch.num_tokens, uint64_t(tokens), 0});
  if (!aborted(context)) run_roles(context, launch, scratch);
  clear_other_bank(context, team);
  leave_launch(context, team, num_workers, [&](const Context&) {
    if (y != nullptr) fill_nan(y, y_elements);
  });
}

class Stream {
 public:
  // Throws std::system_error where the system gives no more threads.
  explicit Stream(uint32_t num_workers) {
    try {
      for (uint32_t worker = 0; worker < num_workers; ++worker)
        workers_.emplace_back([this, worker, num_workers] { work(worker, num_workers); });
    } catch (...) {
      close();
      throw;
    }
  }
  ~Stream() { close(); }

  // Returns the ticket to wait for.
  uint64_t launch(const Rank* rank, const LaunchArguments& arguments) {
    const std::lock_guard lock(mutex_);
    queue_.push_back({rank, arguments, 0});
    changed_.notify_all();
    return ++submitted_;
  }

  bool wait(uint64_t ticket, uint64_t timeout_ns) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns),
                               [&] { return completed_ >= ticket; });
  }

 private:
  void close() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  struct Item {
    const Rank* rank;
    LaunchArguments arguments;
    uint32_t finished_workers;
  };

  void work(uint32_t worker, uint32_t num_workers) {
    Scratch scratch;
    for (uint64_t next = 0;; ++next) {
      Item item;
      {
        std::unique_lock lock(mutex_);
        // Closing waits for the queue too: a launch that lacks a worker would never end.
        changed_.wait(lock, [&] { return queue_.empty() ? closing_ : completed_ == next; });
        if (queue_.empty()) return;
        item = queue_.front();
      }
      run_worker(*item.rank, item.arguments, worker, num_workers, scratch);
      const std::lock_guard lock(mutex_);
      if (++queue_.front().finished_workers < num_workers) continue;
      queue_.pop_front();
      ++completed_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;
  uint64_t submitted_ = 0, completed_ = 0;
  bool closing_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace megamoe::host
