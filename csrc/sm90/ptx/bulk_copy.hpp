// Bulk copies between global memory (of any rank) and the shared memory of this CTA. One thread issues and waits.
// Addresses and sizes are multiples of 16 bytes.
#pragma once
#include <cuda/ptx>

#include "faults.hpp"

namespace megamoe::sm90 {

// An mbarrier on which one load completes at a time. Called by one thread, before a barrier over those that use it.
MEGAMOE_FN void init_load_barrier(uint64_t* barrier) {
  cuda::ptx::mbarrier_init(barrier, 1);
  cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
}

// What generic stores wrote into the source must be ordered before by fence_generic_to_async_proxy().
MEGAMOE_FN void load_bulk(void* shared, const void* global, uint32_t num_bytes, uint64_t* barrier) {
  cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared, barrier,
                                       num_bytes);
  cuda::ptx::cp_async_bulk(cuda::ptx::space_shared, cuda::ptx::space_global, shared, global, num_bytes, barrier);
}

// Wait for the load of a phase. Only a lost machine lets it pass the deadline; then it says so like any other wait.
MEGAMOE_FN void wait_for_load(const Context& context, uint64_t* barrier, uint32_t parity, const Fault& fault) {
  uint64_t started = 0;
  while (!cuda::ptx::mbarrier_try_wait_parity(barrier, parity)) {
    const uint64_t now = now_ns();
    if (started == 0) started = now;
    if (now - started <= context.timeout_ns) continue;
    Fault late = fault;
    late.waited_ns = now - started;
    record_fault(context, late);
    raise_abort(context);
    return;
  }
}

// Generic stores into shared memory, before a barrier, for a bulk store that another thread issues after it.
MEGAMOE_FN void fence_shared_for_bulk_store() { cuda::ptx::fence_proxy_async(cuda::ptx::space_shared); }

// A store is a group of its own, in the order of issue.
MEGAMOE_FN void store_bulk(void* global, const void* shared, uint32_t num_bytes) {
  cuda::ptx::cp_async_bulk(cuda::ptx::space_global, cuda::ptx::space_shared, global, shared, num_bytes);
  cuda::ptx::cp_async_bulk_commit_group();
}
// All but the newest `kNewest` stores of this thread have read their shared memory.
template <int kNewest>
MEGAMOE_FN void wait_for_store_reads() {
  cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<kNewest>());
}
// All stores of this thread are performed and visible to it; a barrier and a release pass that on.
MEGAMOE_FN void wait_for_stores() { cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>()); }

}  // namespace megamoe::sm90
