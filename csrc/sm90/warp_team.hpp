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
constexpr uint32_t kSharedPlaces = 512;  // experts whose places are taken in shared memory; more are taken where they lie

// `kScratchWords`: kRoutesPerChunk for a team that lists routes.
template <uint32_t kWarps, uint32_t kScratchWords = 0>
class WarpTeam {
 public:
  static constexpr uint32_t kThreads = kWarps * kWarpThreads;
  static constexpr uint32_t kSlotWords = kWarps < 8 ? 8 : kWarps;
  // Two slots in turn: between two uses of one there is the barrier of the other, so a slot needs no barrier of its own
  // before it is written again.
  struct Shared {
    uint32_t scratch[kScratchWords == 0 ? 1 : kScratchWords];
    uint32_t places[kScratchWords == 0 ? 1 : kSharedPlaces];
    uint32_t slots[2][kSlotWords];
  };

  // `barrier` is a named barrier (1 to 15) that no other team uses meanwhile. A team of one warp needs neither that nor
  // shared memory.
  MEGAMOE_FN WarpTeam(uint32_t first_warp, uint32_t barrier, Shared* shared)
      : rank_(threadIdx.x - first_warp * kWarpThreads), barrier_(barrier), turn_(0), shared_(shared) {}

  MEGAMOE_FN uint32_t rank() const { return rank_; }
  MEGAMOE_FN static constexpr uint32_t size() { return kThreads; }

  MEGAMOE_FN uint32_t* scratch() const {
    static_assert(kScratchWords == kRoutesPerChunk);
    return shared_->scratch;
  }

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

  // One warp goes through the ids, 32 at a time: equal ones find each other, the first of them moves the place on.
  MEGAMOE_FN void take_places(uint32_t* ids, uint32_t count, uint32_t* places, uint32_t num_places) {
    const uint32_t lane = rank_ % kWarpThreads;
    uint32_t* next = places;
    if (num_places <= kSharedPlaces) {
      next = shared_->places;
      for (uint32_t i = rank_; i < num_places; i += kThreads) next[i] = places[i];
      sync();
    }
    for (uint32_t first = 0; rank_ < kWarpThreads && first < count; first += kWarpThreads) {
      const uint32_t id = first + lane < count ? ids[first + lane] : kNoPlace;
      const uint32_t equal = __match_any_sync(kFullWarp, id);
      const uint32_t place = id == kNoPlace ? 0 : next[id];
      __syncwarp();
      if (id != kNoPlace) {
        if (lane == uint32_t(__ffs(equal)) - 1) next[id] = place + __popc(equal);
        ids[first + lane] = place + __popc(equal & ((1u << lane) - 1));
      }
      __syncwarp();
    }
    sync();
  }

  // A thread reads and writes its own elements only (those congruent to its rank), before and after.
  MEGAMOE_FN uint32_t exclusive_sum(uint32_t* data, uint32_t count) {
    const uint32_t lane = rank_ % kWarpThreads, warp = rank_ / kWarpThreads;
    uint32_t before = 0;  // sum of the elements of earlier rounds
    for (uint32_t first = 0; first < count; first += kThreads) {
      const uint32_t index = first + rank_;
      const uint32_t value = index < count ? data[index] : 0;
      uint32_t sum = value;  // inclusive, within the warp
      for (uint32_t distance = 1; distance < kWarpThreads; distance *= 2) {
        const uint32_t other = __shfl_up_sync(kFullWarp, sum, distance);
        if (lane >= distance) sum += other;
      }
      uint32_t earlier_warps = 0, total = 0;
      if constexpr (kWarps == 1) {
        total = __shfl_sync(kFullWarp, sum, kWarpThreads - 1);
      } else {
        uint32_t* slot = next_slot();
        if (lane == kWarpThreads - 1) slot[warp] = sum;
        sync();
        for (uint32_t other = 0; other < kWarps; ++other) {
          if (other < warp) earlier_warps += slot[other];
          total += slot[other];
        }
      }
      if (index < count) data[index] = before + earlier_warps + sum - value;
      before += total;
    }
    return before;
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
