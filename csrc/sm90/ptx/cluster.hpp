// A cluster of one CTA, or of two that reach into each other's shared memory.
#pragma once
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
// What this thread did before, or saw done, comes before what it does after, for the whole cluster.
MEGAMOE_FN void fence_cluster() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }
// In a cluster of two.
MEGAMOE_FN uint32_t partner() { return cluster_rank() ^ 1; }

}  // namespace megamoe::sm90
