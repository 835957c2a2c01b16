// Named barriers of a CTA, which libcu++ has no words for. The forms without .aligned: the threads of a warp may come to
// them from different branches.
#pragma once
#include "primitives.hpp"

namespace megamoe::sm90 {

MEGAMOE_FN void barrier_sync(uint32_t barrier, uint32_t threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A barrier that also tells whether the flag holds in every thread.
MEGAMOE_FN bool barrier_all(uint32_t barrier, uint32_t threads, bool flag) {
  uint32_t result;
  asm volatile(
      "{\n\t"
      ".reg .pred mine, all;\n\t"
      "setp.ne.u32 mine, %3, 0;\n\t"
      "barrier.cta.red.and.pred all, %1, %2, mine;\n\t"
      "selp.u32 %0, 1, 0, all;\n\t"
      "}"
      : "=r"(result)
      : "r"(barrier), "r"(threads), "r"(uint32_t(flag))
      : "memory");
  return result != 0;
}

}  // namespace megamoe::sm90
