// Small matrices that lanes of a warp hold in parts, transposed.
#pragma once
#include "warp_team.hpp"

namespace megamoe::sm90 {

// Lanes `lanes` apart exchange: the lower one gives `second` for what the upper one, which gives `first`, had there.
MEGAMOE_FN void exchange(uint32_t& first, uint32_t& second, bool upper, uint32_t lanes) {
  const uint32_t got = __shfl_xor_sync(kFullWarp, upper ? first : second, lanes);
  (upper ? first : second) = got;
}
// Four lanes of a quad exchange: lane c gives v[i] to lane i and gets in v[i] what lane i had for it.
MEGAMOE_FN void transpose_quad(uint32_t (&v)[4], uint32_t lane) {
  exchange(v[0], v[1], lane & 1, 1);
  exchange(v[2], v[3], lane & 1, 1);
  exchange(v[0], v[2], lane & 2, 2);
  exchange(v[1], v[3], lane & 2, 2);
}

// 8 x 8 of 16 bits, of which lane l holds columns 2 * (l % 4) and the next of row l / 4: of the transposed matrix afterwards.
MEGAMOE_FN uint32_t transpose_8x8(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

}  // namespace megamoe::sm90
