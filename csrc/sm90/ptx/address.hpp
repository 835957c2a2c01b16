// Addresses of shared memory as instructions take them.
#pragma once
#include "primitives.hpp"

namespace megamoe::sm90 {

MEGAMOE_FN uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }
// For instructions that reach the whole cluster: what lies at `pointer` here, in the shared memory of the CTA `rank`.
MEGAMOE_FN uint32_t cluster_address(const void* pointer, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

}  // namespace megamoe::sm90
