// Stores to global memory, of any rank, by those lanes of a warp that have something to store: by a predicate, in place of a
// branch and its reconvergence around each.
#pragma once
#include "primitives.hpp"

namespace megamoe::sm90 {

MEGAMOE_FN void store_if(bool needed, void* to, uint4 value) {
  asm volatile(
      "{\n\t"
      ".reg .pred needed;\n\t"
      "setp.ne.u32 needed, %5, 0;\n\t"
      "@needed st.global.v4.u32 [%0], {%1, %2, %3, %4};\n\t"
      "}" ::"l"(to),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(uint32_t(needed))
      : "memory");
}
MEGAMOE_FN void store_if(bool needed, void* to, uint2 value) {
  asm volatile(
      "{\n\t"
      ".reg .pred needed;\n\t"
      "setp.ne.u32 needed, %3, 0;\n\t"
      "@needed st.global.v2.u32 [%0], {%1, %2};\n\t"
      "}" ::"l"(to),
      "r"(value.x), "r"(value.y), "r"(uint32_t(needed))
      : "memory");
}
MEGAMOE_FN void store_if(bool needed, void* to, uint32_t value) {
  asm volatile(
      "{\n\t"
      ".reg .pred needed;\n\t"
      "setp.ne.u32 needed, %2, 0;\n\t"
      "@needed st.global.u32 [%0], %1;\n\t"
      "}" ::"l"(to),
      "r"(value), "r"(uint32_t(needed))
      : "memory");
}

}  // namespace megamoe::sm90
