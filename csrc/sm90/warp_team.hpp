// Teams of the SM90 target: consecutive warps of a CTA, from one warp to all of them. The interface is that of
// protocol/team.hpp.
#pragma once
#include <cuda/std/cstring>
#include <cuda/std/type_traits>

#include "ptx/barrier.hpp"
#include "team.hpp"

namespace megamoe::sm90 {

constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kFullWarp = ~0u;

// By a whole warp, of a value that all its lanes have: tells the compiler that they do. It keeps what follows from such values in
// uniform registers, from which products take their descriptors. A branch on any other value, around something that the whole
// warp does together, makes it keep descriptors in vector registers and move them before each product (DEVLOG.md, 2026-11-30).
template <class T>
MEGAMOE_FN T uniform(T value) {
  static_assert(sizeof(T) <= sizeof(uint32_t) && !cuda::std::is_floating_point_v<T>, "uint32_t would not hold it");
  return T(__shfl_sync(kFullWarp, uint32_t(value), 0));
}

// `Scratch`: RouteScratch for a team that sorts routes or builds the table.
template <uint32_t kWarps, class Scratch = uint32_t>
class WarpTeam {
 public:
  static constexpr uint32_t kThreads = kWarps * kWarpThreads;
  static constexpr uint32_t kSlotWords = kWarps < 8 ? 8 : kWarps;
  // Two slots in turn: between two uses of one there is the barrier of the other, so a slot needs no barrier of its own
  // before it is written again.
  struct Shared {
    Scratch scratch;
    uint32_t slots[2][kSlotWords];
  };

  // `barrier` is a named barrier (1 to 15) that no other team uses meanwhile. A team of one warp needs neither that nor
  // shared memory.
  MEGAMOE_FN WarpTeam(uint32_t first_warp, uint32_t barrier, Shared* shared)
      : rank_(threadIdx.x - first_warp * kWarpThreads), barrier_(barrier), turn_(0), shared_(shared) {}

  MEGAMOE_FN uint32_t rank() const { return rank_; }
  MEGAMOE_FN static constexpr uint32_t size() { return kThreads; }

  MEGAMOE_FN Scratch& scratch() const { return shared_->scratch; }

  MEGAMOE_FN void sync() const {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      barrier_sync(barrier_, kThreads);
    }
  }

  template <class Function>
  MEGAMOE_FN auto once(Function function) {
    using Result = decltype(function());
    constexpr uint32_t words = (sizeof(Result) + 3) / 4;
    static_assert(cuda::std::is_trivially_copyable_v<Result> && words <= kSlotWords);
    uint32_t packed[words] = {};
    if (rank_ == 0) {
      const Result result = function();
      cuda::std::memcpy(packed, &result, sizeof(Result));
    }
    if constexpr (kWarps == 1) {
      __syncwarp();  // the shuffle alone does not order memory
      for (uint32_t word = 0; word < words; ++word) packed[word] = __shfl_sync(kFullWarp, packed[word], 0);
    } else {
      uint32_t* slot = next_slot();
      if (rank_ == 0)
        for (uint32_t word = 0; word < words; ++word) slot[word] = packed[word];
      sync();
      for (uint32_t word = 0; word < words; ++word) packed[word] = slot[word];
    }
    Result result;
    cuda::std::memcpy(&result, packed, sizeof(Result));
    return result;
  }

  MEGAMOE_FN bool all(bool flag) const {
    if constexpr (kWarps == 1) {
      __syncwarp();
      return __all_sync(kFullWarp, flag);
    } else {
      return barrier_all(barrier_, kThreads, flag);
    }
  }

  // A warp goes through its part, 32 routes at a time: equal ones find each other, the first of them moves the count on.
  MEGAMOE_FN void number_equal(uint32_t count, uint32_t first_expert) const {
    const uint32_t lane = rank_ % kWarpThreads;
    for (uint32_t part = rank_ / kWarpThreads; part < kRouteParts; part += kWarps) {
      const uint32_t last = smaller(count, (part + 1) * kRoutesPerPart);
#pragma unroll 1
      for (uint32_t first = part * kRoutesPerPart; first < last; first += kWarpThreads) {
        const uint32_t word = first + lane < last ? scratch().words[first + lane] : kIdMask;
        const uint32_t expert = (word & kIdMask) - first_expert;
        const bool counts = expert < kExpertWindow;
        const uint32_t equal = __match_any_sync(kFullWarp, counts ? expert : kExpertWindow);
        const uint32_t before = counts ? scratch().counts[part][expert] : 0;
        __syncwarp();
        if (counts) {
          if (lane == uint32_t(__ffs(equal)) - 1) scratch().counts[part][expert] = uint16_t(before + __popc(equal));
          scratch().words[first + lane] = word | (before + __popc(equal & ((1u << lane) - 1))) << kIdBits;
        }
        __syncwarp();
      }
    }
  }

  MEGAMOE_FN PartialSum exclusive_sum(uint32_t value) {
    const uint32_t lane = rank_ % kWarpThreads, warp = rank_ / kWarpThreads;
    uint32_t sum = value;  // inclusive, within the warp
    for (uint32_t distance = 1; distance < kWarpThreads; distance *= 2) {
      const uint32_t other = __shfl_up_sync(kFullWarp, sum, distance);
      if (lane >= distance) sum += other;
    }
    if constexpr (kWarps == 1) {
      return {sum - value, __shfl_sync(kFullWarp, sum, kWarpThreads - 1)};
    } else {
      uint32_t* slot = next_slot();
      if (lane == kWarpThreads - 1) slot[warp] = sum;
      sync();
      uint32_t earlier_warps = 0, total = 0;
      for (uint32_t other = 0; other < kWarps; ++other) {
        if (other < warp) earlier_warps += slot[other];
        total += slot[other];
      }
      return {earlier_warps + sum - value, total};
    }
  }

 private:
  MEGAMOE_FN uint32_t* next_slot() {
    turn_ ^= 1;
    return shared_->slots[turn_];
  }

  uint32_t rank_, barrier_, turn_;
  Shared* shared_;
};

}  // namespace megamoe::sm90
