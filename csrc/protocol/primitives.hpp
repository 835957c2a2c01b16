// Everything that differs between the targets, and nothing else: qualifiers, clock, pause, memory scopes, fences, and the
// switches of the test builds. No other file of the protocol asks what it is compiled for.
#pragma once
#include <cuda/atomic>
#include <cuda/std/cstdint>

#include "buffer_layout.hpp"

#if defined(__CUDACC__)
#define MEGAMOE_FN __device__ __forceinline__
// A loop that runs once or twice, while its code is in no cache.
#define MEGAMOE_ROLLED _Pragma("unroll 1")
#else
#include <sched.h>
#include <time.h>
#define MEGAMOE_FN inline
#define MEGAMOE_ROLLED
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
  publish_before_list,       // the counts are told before the list behind them is written
  wait_for_stale_epoch,      // the owner takes counts of the epoch before
  later_epoch_read_as_this,  // counts of a source that has gone on are taken for this epoch's
  table_before_blocks,       // the table is announced before its blocks are written
  done_before_last_store,    // a tile is counted before its results are stored
  done_of_last_epoch,        // combine takes the expert's last "done" for this one
  relaxed_publish,           // release left out: counts
  relaxed_arrival,           // release left out: pulled rows
  relaxed_mask,              // release left out: L1 tiles
  relaxed_tile_counter,      // acquire and release left out: L2 tiles
  relaxed_wait,              // acquire left out: every wait
  arrival_one_too_few,
  arrival_one_too_many,
  mask_bit_missing,
  mask_before_store,
  claim_taken_twice,    // read and write instead of one addition
  wrong_bank_cleared,   // the counters in use
  bank_not_cleared,
  pool_order_by_arrival,
  combine_before_done,   // the last slot of a token is not waited for
  launch_ends_early,     // a launch with nothing to reduce does not wait until its inputs have been read
  exit_before_last_worker,
};
constexpr Mutation kMutation = Mutation::MEGAMOE_MUTATION;
MEGAMOE_FN constexpr bool mutated(Mutation fault) { return kMutation == fault; }

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
// Longer and longer, up to `doublings` times: hundreds of warps that poll one line at full speed slow down all that goes
// through its slice of the L2.
MEGAMOE_FN void pause(uint32_t polls, uint32_t doublings) {
  constexpr uint32_t shortest_ns = 32, polls_each = 8;
  __nanosleep(shortest_ns << (polls / polls_each < doublings ? polls / polls_each : doublings));
}
// Data stored through the generic proxy is read by a bulk copy next: called after the acquire, by the thread that copies.
MEGAMOE_FN void fence_generic_to_async_proxy() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Ahead of several stores of order `fenced_release`, to any rank: one fence in place of a release at each store, which would
// wait for the store before it.
MEGAMOE_FN void fence_before_releases() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
constexpr auto fenced_release = relaxed;
MEGAMOE_FN void perturb(Point) {}
#else
MEGAMOE_FN uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return uint64_t(time.tv_sec) * 1'000'000'000ull + uint64_t(time.tv_nsec);
}
MEGAMOE_FN void pause(uint32_t, uint32_t) { sched_yield(); }
MEGAMOE_FN void fence_generic_to_async_proxy() {}
MEGAMOE_FN void fence_before_releases() {}
constexpr auto fenced_release = release;
#if defined(MEGAMOE_PERTURB)
MEGAMOE_FN void perturb(Point point) { perturbation::at(uint32_t(point)); }
#else
MEGAMOE_FN void perturb(Point) {}
#endif
#endif

}  // namespace megamoe
