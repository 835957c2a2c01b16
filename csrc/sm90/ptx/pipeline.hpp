// mbarriers and tensor copies of the load and math roles.
#pragma once
#include <cuda/ptx>

#include "ptx/cluster.hpp"
#include "ptx/wgmma.hpp"

namespace megamoe::sm90 {

MEGAMOE_FN void init_barrier(uint64_t* barrier, uint32_t arrivals) { cuda::ptx::mbarrier_init(barrier, arrivals); }
// Anew, while nobody uses it; `over`: its first phase has ended.
MEGAMOE_FN void restart_barrier(uint64_t* barrier, uint32_t arrivals, bool over) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
  init_barrier(barrier, arrivals);
  if (over) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
MEGAMOE_FN void publish_barrier_init() {
  cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
}
MEGAMOE_FN void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// By one lane of a whole warp, whichever; what the others did before must have been ordered by __syncwarp(). Arrives at this
// barrier and, if `both`, at the one in the cluster whose address is `there`. The reads of a stage are over by then: their
// values are there, so the second arrival needs no release over the cluster.
MEGAMOE_FN void arrive_here_and_there(uint64_t* barrier, bool both, uint32_t there) {
  asm volatile(
      "{\n\t"
      ".reg .pred chosen, both;\n\t"
      "elect.sync _|chosen, 0xffffffff;\n\t"
      "setp.ne.and.u32 both, %1, 0, chosen;\n\t"
      "@chosen mbarrier.arrive.shared::cta.b64 _, [%0];\n\t"
      "@both mbarrier.arrive.shared::cluster.b64 _, [%2];\n\t"
      "}" ::"r"(shared_address(barrier)),
      "r"(uint32_t(both)), "r"(there)
      : "memory");
}
MEGAMOE_FN void arrive_expect(uint64_t* barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_bytes)
               : "memory");
}
// A word for the partner, in its shared memory: the barrier's phase ends when the word is there.
struct Mail {
  uint64_t full;
  uint32_t word;

  MEGAMOE_FN void init() {
    init_barrier(&full, 1);
    expect();
  }
  MEGAMOE_FN void expect() { arrive_expect(&full, sizeof(word)); }
  // To the CTA `rank`, at the same place of its shared memory.
  MEGAMOE_FN void send(uint32_t value, uint32_t rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                     cluster_address(&word, rank)),
                 "r"(value), "r"(cluster_address(&full, rank))
                 : "memory");
  }
};

// Waits only where `needed`: to the compiler no branch, which between products and their registers would serialise them.
// Between roles of one CTA, or of two that work together, only: the role on the other side waits for ranks with a deadline and
// always goes on, so this wait needs none of its own.
MEGAMOE_FN void wait_barrier_if(bool needed, uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n\t"
      ".reg .pred reached, skipped;\n\t"
      "setp.eq.u32 skipped, %2, 0;\n\t"
      "@skipped bra done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 reached, [%0], %1;\n\t"
      "@reached bra done;\n\t"
      "bra again;\n\t"
      "done:\n\t"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity), "r"(uint32_t(needed))
      : "memory");
}

// Asks once: no branch, so that it can stand between products and their registers, and no wait, for which the stage of the
// products would be kept. True where not `needed`. Only a branch on the answer holds back later loads.
MEGAMOE_FN bool test_barrier_if(bool needed, uint64_t* barrier, uint32_t parity) {
  uint32_t reached;
  asm volatile(
      "{\n\t"
      ".reg .pred reached, needed;\n\t"
      "setp.ne.u32 needed, %3, 0;\n\t"
      "setp.eq.u32 reached, %3, 0;\n\t"
      "@needed mbarrier.test_wait.parity.shared::cta.b64 reached, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, reached;\n\t"
      "}"
      : "=r"(reached)
      : "r"(shared_address(barrier)), "r"(parity), "r"(uint32_t(needed))
      : "memory");
  return reached != 0;
}

MEGAMOE_FN void wait_barrier(uint64_t* barrier, uint32_t parity) { wait_barrier_if(true, barrier, parity); }

// Whether that wait would return at once.
MEGAMOE_FN bool test_barrier(uint64_t* barrier, uint32_t parity) {
  uint32_t reached;
  asm volatile(
      "{\n\t"
      ".reg .pred reached;\n\t"
      "mbarrier.test_wait.parity.shared::cta.b64 reached, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, reached;\n\t"
      "}"
      : "=r"(reached)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return reached != 0;
}

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

MEGAMOE_FN void load_tensor(void* shared, const TensorMap* map, uint64_t* barrier, uint32_t inner, uint32_t outer) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(inner), "r"(outer)
      : "memory");
}
// The same to both CTAs of the cluster, each of whose barriers counts the bytes.
MEGAMOE_FN void load_tensor_for_both(void* shared, const TensorMap* map, uint64_t* barrier, uint32_t inner, uint32_t outer) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(inner), "r"(outer), "h"(uint16_t(3))
      : "memory");
}
// Four bytes of global memory into shared memory, without waiting.
MEGAMOE_FN void copy_word_async(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
MEGAMOE_FN void commit_word_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
MEGAMOE_FN void wait_word_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Position in a ring of barriers, as one number: which slot comes next, and the parity that its next phase ends.
template <uint32_t kSlots>
struct RingPosition {
  static_assert((kSlots & (kSlots - 1)) == 0);
  uint32_t turn = 0;
  MEGAMOE_FN uint32_t slot() const { return turn % kSlots; }
  MEGAMOE_FN uint32_t parity() const { return turn / kSlots & 1; }
  MEGAMOE_FN void advance() { ++turn; }
};

}  // namespace megamoe::sm90
