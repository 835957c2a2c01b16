// Warpgroup products on e4m3 tiles in shared memory: rows of 128 bytes under the 128-byte swizzle.
#pragma once
#include "ptx/address.hpp"
#include "wgmma_fp8.hpp"

namespace megamoe::sm90 {

constexpr uint32_t kSwizzledRowBytes = 128;
constexpr uint32_t kProductDepth = 32;  // of K, of one instruction

// Matrix descriptor: start address, 1024 bytes between groups of eight rows, 128-byte swizzle. In two halves, of which only
// the first depends on the address: adding bytes / kDescriptorBytes to it moves on.
constexpr uint32_t kDescriptorBytes = 16;
MEGAMOE_FN uint32_t matrix_start(const void* pointer) {
  return shared_address(pointer) / kDescriptorBytes | 1u << 16;
}
MEGAMOE_FN uint64_t matrix_descriptor(uint32_t start) {
  return start | uint64_t(8 * kSwizzledRowBytes / kDescriptorBytes | 1u << 30) << 32;
}

// The compiler does not know that products change sums between their issue and wgmma_wait(). Named here, sums are neither read nor
// changed across this point.
template <uint32_t kSums>
MEGAMOE_FN void pin_sums(float (&sums)[kSums]) {
#pragma unroll
  for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}

MEGAMOE_FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// The same for products that add to sums which were changed before.
template <uint32_t kSums>
MEGAMOE_FN void wgmma_fence(float (&sums)[kSums]) {
  pin_sums(sums);
  wgmma_fence();
}
MEGAMOE_FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Afterwards the sums may be read.
template <uint32_t kSums>
MEGAMOE_FN void wgmma_wait(float (&sums)[kSums]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  pin_sums(sums);
}

// Where this lane reads its part of a fragment of 16 rows x 32 columns: offset in a swizzled tile aligned to 1024 bytes.
// `row` is the first of the warp's 16 rows.
MEGAMOE_FN uint32_t fragment_offset(uint32_t row, uint32_t lane) {
  const uint32_t mine = row + lane % 16;
  return mine * kSwizzledRowBytes + ((lane / 16 ^ (mine & 7)) * 16);
}
// Such a fragment is what wgmma takes as rows from registers; `step` says which 32 of the 128 columns. Loads only where `needed`
// (as wait_barrier_if()).
MEGAMOE_FN void load_row_fragment_if(bool needed, uint32_t (&fragment)[4], uint32_t address, uint32_t step) {
  asm volatile(
      "{\n\t"
      ".reg .pred needed;\n\t"
      "setp.ne.u32 needed, %5, 0;\n\t"
      "@needed ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n\t"
      "}"
      : "+r"(fragment[0]), "+r"(fragment[1]), "+r"(fragment[2]), "+r"(fragment[3])
      : "r"(address ^ step * kProductDepth), "r"(uint32_t(needed))
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
