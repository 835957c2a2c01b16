// What every role knows of its launch: the problem, where the ranks' buffers lie, the epoch.
#pragma once
#include "primitives.hpp"

namespace megamoe {

enum class Stage : uint32_t { interface = 1, dispatch, l1_gemm, l1_epilogue, l2_gemm, combine };

struct Context {
  const Problem* problem;
  const BufferLayout* layout;
  uint8_t* const* bases;  // start of each rank's buffer, as this rank addresses it
  uint8_t* own_base;      // its own, so that no access to its own buffer waits for a load of `bases`
  HostStatus* host_status;
  uint64_t timeout_ns;
  uint64_t epoch;
  uint32_t rank;
  uint32_t num_tokens;
  Stage stage;

  template <class T>
  MEGAMOE_FN T* peer(uint32_t other, const Region& region) const {
    return reinterpret_cast<T*>(bases[other] + region.offset);
  }
  template <class T>
  MEGAMOE_FN T* own(const Region& region) const {
    return reinterpret_cast<T*>(own_base + region.offset);
  }
  MEGAMOE_FN uint32_t bank() const { return uint32_t(epoch & 1); }
  MEGAMOE_FN uint32_t other_bank() const { return uint32_t(~epoch & 1); }
  // The part of a banked region that this launch uses.
  template <class T>
  MEGAMOE_FN T* banked(const Region& region) const {
    return own<T>(region) + bank() * region.stride[0];
  }
  MEGAMOE_FN uint32_t* claim_word(Claim claim) const {
    return banked<uint32_t>(layout->claims) + uint32_t(claim) * layout->claims.stride[1];
  }
  MEGAMOE_FN uint32_t first_expert() const { return rank * problem->experts_per_rank; }
  MEGAMOE_FN bool has_l2() const { return stage >= Stage::l2_gemm; }
};

// A word that carries the epoch it belongs to: epoch << 32 | value.
MEGAMOE_FN uint64_t stamped(uint64_t epoch, uint32_t value) { return epoch << 32 | value; }
MEGAMOE_FN uint64_t stamp_of(uint64_t word) { return word >> 32; }
MEGAMOE_FN uint32_t value_of(uint64_t word) { return uint32_t(word); }

MEGAMOE_FN constexpr uint32_t ceil_div(uint32_t value, uint32_t divisor) { return (value + divisor - 1) / divisor; }
MEGAMOE_FN constexpr uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

// Take the next item of a queue. Nothing is handed over by the counter itself, so the order is relaxed: what an item
// needs is awaited through its own word.
MEGAMOE_FN uint32_t take(const Context& context, Claim claim) {
  perturb(Point::claim);
  DeviceRef<uint32_t> counter(*context.claim_word(claim));
  if constexpr (mutated(Mutation::claim_taken_twice)) {
    const uint32_t item = counter.load(relaxed);
    perturb(Point::claim);
    counter.store(item + 1, relaxed);
    return item;
  }
  return counter.fetch_add(1, relaxed);
}

// Count a finished item; true for whoever finishes the last one, who then sees what all the others wrote.
MEGAMOE_FN bool finish(const Context& context, Claim counter, uint32_t total) {
  perturb(Point::publish);
  return DeviceRef<uint32_t>(*context.claim_word(counter)).fetch_add(1, acquire_release) + 1 == total;
}

}  // namespace megamoe
