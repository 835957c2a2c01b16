// Everything that differs between the targets, and nothing else: qualifiers, clock, pause, memory scopes, proxy fence,
// and the switches of the test builds. No other file of the protocol asks what it is compiled for.
#pragma once
#include <cuda/atomic>
#include <cuda/std/cstdint>

#include "buffer_layout.hpp"

#if defined(__CUDACC__)
#define MEGAMOE_FN __device__ __forceinline__
#else
#include <sched.h>
#include <time.h>
#define MEGAMOE_FN inline
#if defined(MEGAMOE_PERTURB)
#include "perturb.hpp"
#endif
#endif

#if !defined(MEGAMOE_MUTATION)
#define MEGAMOE_MUTATION none
#endif

namespace megamoe {

// Deliberate faults, one at most in a build, to show that the tests see them. DESIGN.md lists what catches each.
enum class Mutation : uint32_t {
  none,
  publish_before_list,
  wait_for_stale_epoch,
  later_epoch_read_as_this,
  done_before_last_store,
  relaxed_publish,
  relaxed_wait,
  relaxed_tile_counter,
  arrival_one_too_few,
  arrival_one_too_many,
  mask_bit_missing,
  mask_before_store,
  claim_taken_twice,
  wrong_bank_cleared,
  bank_not_cleared,
  pool_order_by_arrival,
  combine_before_done,
  launch_ends_early,
};
constexpr Mutation kMutation = Mutation::MEGAMOE_MUTATION;
constexpr bool mutated(Mutation fault) { return kMutation == fault; }

// Places at which the perturbation build of the host target may yield or sleep.
enum class Point : uint32_t { claim, publish, wait, arrive, mark_tile, tile_done, store, enter, leave, number_of_points };

constexpr auto relaxed = cuda::std::memory_order_relaxed;
constexpr auto acquire = cuda::std::memory_order_acquire;
constexpr auto release = cuda::std::memory_order_release;
constexpr auto acquire_release = cuda::std::memory_order_acq_rel;

// Words that another rank reads or writes.
template <class T>
using SystemRef = cuda::atomic_ref<T, cuda::thread_scope_system>;
// Words that only this rank's workers touch.
template <class T>
using DeviceRef = cuda::atomic_ref<T, cuda::thread_scope_device>;

#if defined(__CUDACC__)
MEGAMOE_FN uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}
MEGAMOE_FN void pause() { __nanosleep(40); }
// Data stored through the generic proxy is read by a bulk copy next: called after the acquire, by the thread that copies.
MEGAMOE_FN void fence_generic_to_async_proxy() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
MEGAMOE_FN void perturb(Point) {}
#else
MEGAMOE_FN uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return uint64_t(time.tv_sec) * 1'000'000'000ull + uint64_t(time.tv_nsec);
}
MEGAMOE_FN void pause() { sched_yield(); }
MEGAMOE_FN void fence_generic_to_async_proxy() {}
#if defined(MEGAMOE_PERTURB)
MEGAMOE_FN void perturb(Point point) { perturbation::at(uint32_t(point)); }
#else
MEGAMOE_FN void perturb(Point) {}
#endif
#endif

}  // namespace megamoe
