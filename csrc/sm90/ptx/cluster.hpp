// A cluster of one CTA, or of two that reach into each other's shared memory.
#pragma once
#include <cuda/ptx>

#include "ptx/address.hpp"

namespace megamoe::sm90 {

MEGAMOE_FN uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
MEGAMOE_FN uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// A barrier over the cluster, by every thread; without clusters nothing. Orders no memory: what partners send each other
// comes with barriers of its own, and those are published by publish_barrier_init().
MEGAMOE_FN void cluster_sync() {
  if (cluster_size() == 1) return;
  asm volatile(
      "barrier.cluster.arrive.relaxed;\n\t"
      "barrier.cluster.wait;" ::
          : "memory");
}
// In a cluster of two.
MEGAMOE_FN uint32_t partner() { return cluster_rank() ^ 1; }

// A word for the partner, in its shared memory: the barrier's phase ends when the word is there.
struct Mail {
  uint64_t full;
  uint32_t word;

  MEGAMOE_FN void init() {
    cuda::ptx::mbarrier_init(&full, 1);
    expect();
  }
  MEGAMOE_FN void expect() {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 4;" ::"r"(shared_address(&full)) : "memory");
  }
  // To the CTA `rank`, at the same place of its shared memory.
  MEGAMOE_FN void send(uint32_t value, uint32_t rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                     cluster_address(&word, rank)),
                 "r"(value), "r"(cluster_address(&full, rank))
                 : "memory");
  }
};

}  // namespace megamoe::sm90
