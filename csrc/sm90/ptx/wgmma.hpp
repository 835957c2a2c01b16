// Warpgroup products on e4m3 tiles in shared memory: rows of 128 bytes under the 128-byte swizzle.
#pragma once
#include "primitives.hpp"
#include "wgmma_fp8.hpp"

namespace megamoe::sm90 {

constexpr uint32_t kSwizzledRowBytes = 128;
constexpr uint32_t kProductDepth = 32;  // of K, of one instruction

MEGAMOE_FN uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// Matrix descriptor: start address, 1024 bytes between groups of eight rows, 128-byte swizzle.
MEGAMOE_FN uint64_t matrix_descriptor(uint32_t address) {
  return uint64_t((address & 0x3ffff) >> 4) | 1ull << 16 | uint64_t(8 * kSwizzledRowBytes >> 4) << 32 | 1ull << 62;
}

MEGAMOE_FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MEGAMOE_FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
MEGAMOE_FN void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Where this lane reads its part of a fragment of 16 rows x 32 columns: offset in a swizzled tile aligned to 1024 bytes.
// `row` is the first of the warp's 16 rows.
MEGAMOE_FN uint32_t fragment_offset(uint32_t row, uint32_t lane) {
  const uint32_t mine = row + lane % 16;
  return mine * kSwizzledRowBytes + ((lane / 16 ^ (mine & 7)) * 16);
}
// Such a fragment is what wgmma takes as rows from registers; `step` says which 32 of the 128 columns.
MEGAMOE_FN void load_row_fragment(uint32_t (&fragment)[4], uint32_t address, uint32_t step) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address ^ step * kProductDepth)
               : "memory");
}

template <uint32_t kRegisters>
MEGAMOE_FN void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <uint32_t kRegisters>
MEGAMOE_FN void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace megamoe::sm90
