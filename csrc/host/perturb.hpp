// Perturbation build: at every protocol point a thread may yield or sleep, as a seed decides. Hits are counted.
#pragma once
#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>

namespace megamoe::perturbation {

constexpr uint32_t kMaxPoints = 16;
inline std::atomic<uint64_t> seed{1};
inline std::atomic<uint64_t> threads{0};
inline std::atomic<uint64_t> hits[kMaxPoints];

inline uint64_t mix(uint64_t value) {
  value ^= value >> 33;
  value *= 0xff51afd7ed558ccdull;
  value ^= value >> 33;
  value *= 0xc4ceb9fe1a85ec53ull;
  return value ^ value >> 33;
}

inline void at(uint32_t point) {
  thread_local uint64_t state =
      mix(seed.load(std::memory_order_relaxed) + 0x9e3779b97f4a7c15ull * threads.fetch_add(1, std::memory_order_relaxed));
  hits[point].fetch_add(1, std::memory_order_relaxed);
  state = mix(state + point + 1);
  const uint32_t dice = state % 128;
  if (dice < 24) {
    sched_yield();
  } else if (dice < 28) {
    timespec pause{0, long(1000 + state / 128 % 60'000)};
    nanosleep(&pause, nullptr);
  } else if (dice == 28 && state / 128 % 16 == 0) {
    timespec pause{0, 2'000'000};
    nanosleep(&pause, nullptr);
  }
}

}  // namespace megamoe::perturbation
