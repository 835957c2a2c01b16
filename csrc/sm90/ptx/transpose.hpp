// Small matrices that lanes of a warp hold in parts, transposed.
#pragma once
#include "warp_team.hpp"

namespace megamoe::sm90 {

// Four lanes of a quad exchange: lane c gives v[i] to lane i and gets in v[i] what lane i had for it.
MEGAMOE_FN void transpose_quad(uint32_t (&v)[4], uint32_t lane) {
  const uint32_t c = lane % 4;
  uint32_t a = c & 1 ? v[0] : v[1], b = c & 1 ? v[2] : v[3];
  a = __shfl_xor_sync(kFullWarp, a, 1);
  b = __shfl_xor_sync(kFullWarp, b, 1);
  if (c & 1) {
    v[0] = a;
    v[2] = b;
  } else {
    v[1] = a;
    v[3] = b;
  }
  a = c & 2 ? v[0] : v[2];
  b = c & 2 ? v[1] : v[3];
  a = __shfl_xor_sync(kFullWarp, a, 2);
  b = __shfl_xor_sync(kFullWarp, b, 2);
  if (c & 2) {
    v[0] = a;
    v[1] = b;
  } else {
    v[2] = a;
    v[3] = b;
  }
}

// 8 x 8 of 16 bits, of which lane l holds columns 2 * (l % 4) and the next of row l / 4: of the transposed matrix afterwards.
MEGAMOE_FN uint32_t transpose_8x8(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

}  // namespace megamoe::sm90
