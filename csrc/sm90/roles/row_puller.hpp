// The pull role's copying: one warp brings the rows of a run from their sources into the pool, several in flight.
#pragma once
#include "ptx/bulk_copy.hpp"
#include "pull.hpp"
#include "warp_team.hpp"

namespace megamoe::sm90 {

constexpr uint32_t kScalesPerLoad = 4;      // one 16-byte load
constexpr uint32_t kScaleLoads = 2;         // in flight in each lane
constexpr uint32_t kScaleLanes = kWarpThreads / kRowsPerPull;

// Read along a token's scales, written along the rows of a scale group: a few lanes a row, 16 bytes a lane.
MEGAMOE_FN void copy_scales(const Context& context, const PulledRow& mine, uint32_t first_pool_row, uint32_t rows) {
  const Region &from_region = context.layout->x_sf, &to_region = context.layout->l1_acts_sf;
  const uint32_t groups = context.problem->hidden / kScaleBlock;
  const uint32_t lane = threadIdx.x % kWarpThreads, row = lane % kRowsPerPull;
  const uint32_t source = __shfl_sync(kFullWarp, mine.source, row);
  const uint32_t token = __shfl_sync(kFullWarp, mine.token, row);
  if (row >= rows) return;
  const float* from = context.peer<float>(source, from_region) + token * from_region.stride[0];
  float* to = context.own<float>(to_region) + first_pool_row + row;
  const uint64_t to_stride = to_region.stride[1];
  constexpr uint32_t step = kScaleLanes * kScalesPerLoad;
#pragma unroll 1
  for (uint32_t base = lane / kRowsPerPull * kScalesPerLoad; base < groups; base += kScaleLoads * step) {
    float4 scales[kScaleLoads];
#pragma unroll
    for (uint32_t i = 0; i < kScaleLoads; ++i) {
      const uint32_t group = base + i * step;
      if (group < groups) scales[i] = *reinterpret_cast<const float4*>(from + group);
    }
#pragma unroll
    for (uint32_t i = 0; i < kScaleLoads; ++i) {
      const float values[kScalesPerLoad] = {scales[i].x, scales[i].y, scales[i].z, scales[i].w};
#pragma unroll
      for (uint32_t j = 0; j < kScalesPerLoad; ++j) {
        const uint32_t group = base + i * step + j;
        if (group < groups) to[group * to_stride] = values[j];
      }
    }
  }
}

// The rows of a run, one a lane. Every lane loads a source's part, so that all parts travel together.
MEGAMOE_FN PulledRow locate_run(const Context& context, uint32_t block, uint32_t first_row, uint32_t rows) {
  const uint32_t lane = threadIdx.x % kWarpThreads;
  SourcePart mine{};
  const ListPlace place = list_place(context, block, first_row + lane, [&](uint32_t expert, uint32_t step) {
    if (step % kWarpThreads == 0)
      mine = source_part(context, expert, smaller(step + lane, context.problem->num_ranks - 1));
    return SourcePart{__shfl_sync(kFullWarp, mine.first_row, step % kWarpThreads),
                      __shfl_sync(kFullWarp, mine.list_base, step % kWarpThreads), mine.first_block};
  });
  PulledRow row{};
  if (lane < rows) row = locate_row(context, block, first_row + lane, place);
  __syncwarp();
  return row;
}

// Copies in flight, and the bytes of one: longer rows are copied in pieces.
template <uint32_t kDepth, uint32_t kSlotBytes>
struct alignas(64) PullShared {
  uint8_t slots[kDepth][kSlotBytes];
  uint64_t loaded[kDepth];
};

template <uint32_t kPullDepth, uint32_t kPullSlotBytes>
class RowPuller {
 public:
  using Shared = PullShared<kPullDepth, kPullSlotBytes>;

  // Called by one whole warp; `shared` is this warp's alone.
  MEGAMOE_FN explicit RowPuller(Shared& shared) : shared_(shared), parities_(0) {
    if (lane() == 0)
      for (uint32_t slot = 0; slot < kPullDepth; ++slot) init_load_barrier(&shared_.loaded[slot]);
    __syncwarp();
  }

  // For pull_rows(): when the warp has synchronised after this, all stores of the run are performed.
  MEGAMOE_FN void copy_rows(const Context& context, uint32_t block, uint32_t first_row, uint32_t rows) {
    const Region& to = context.layout->l1_acts;
    const uint32_t hidden = context.problem->hidden;
    const uint32_t first_pool_row = block * context.problem->block_m + first_row;
    const PulledRow mine = locate_run(context, block, first_row, rows);
    Piece to_load, to_store;
#pragma unroll 1
    for (uint32_t slot = 0; slot < kPullDepth && to_load.row() < rows; ++slot) load(context, mine, slot, to_load);
    const float weight = lane() < rows ? load_row_weight(context, mine) : 0.0f;
    copy_scales(context, mine, first_pool_row, rows);
    if (lane() < rows) store_row_metadata(context, mine, weight);
#pragma unroll 1
    for (uint32_t slot = 0; to_store.row() < rows; slot = (slot + 1) % kPullDepth) {
      if (lane() == 0) {
        wait_for_load(context, &shared_.loaded[slot], parities_ >> slot & 1,
                      {FaultKind::timeout, WaitFor::rows, context.rank, block, rows, 0, 0});
        const uint64_t row = first_pool_row + to_store.row();
        store_bulk(context.own<uint8_t>(to) + row * to.stride[0] + to_store.first_byte(), shared_.slots[slot],
                   smaller(kPullSlotBytes, hidden - to_store.first_byte()));
      }
      parities_ ^= 1u << slot;
      const bool first = to_store.packed == 0;
      to_store.advance(hidden);
      if (first || to_load.row() == rows) continue;
      if (lane() == 0) wait_for_store_reads<1>();
      load(context, mine, (slot + kPullDepth - 1) % kPullDepth, to_load);  // the slot of the copy before this one
    }
    if (lane() == 0) wait_for_stores();
  }

 private:
  // What one copy moves: its row of the run and its first byte, in one register.
  struct Piece {
    static constexpr uint32_t kByteBits = 28;
    uint32_t packed = 0;
    MEGAMOE_FN uint32_t row() const { return packed >> kByteBits; }
    MEGAMOE_FN uint32_t first_byte() const { return packed & ((1u << kByteBits) - 1); }
    MEGAMOE_FN void advance(uint32_t hidden) {
      packed += kPullSlotBytes;
      if (first_byte() >= hidden) packed = (row() + 1) << kByteBits;
    }
  };
  static_assert(kRowsPerPull < 1u << (32 - Piece::kByteBits));

  MEGAMOE_FN static uint32_t lane() { return threadIdx.x % kWarpThreads; }

  MEGAMOE_FN void load(const Context& context, const PulledRow& mine, uint32_t slot, Piece& piece) {
    const Region& from = context.layout->x;
    const uint32_t hidden = context.problem->hidden;
    const uint32_t source = __shfl_sync(kFullWarp, mine.source, piece.row());
    const uint32_t token = __shfl_sync(kFullWarp, mine.token, piece.row());
    const uint32_t first_byte = piece.first_byte();
    piece.advance(hidden);
    if (lane() != 0) return;
    load_bulk(shared_.slots[slot], context.peer<uint8_t>(source, from) + token * from.stride[0] + first_byte,
              smaller(kPullSlotBytes, hidden - first_byte), &shared_.loaded[slot]);
  }

  Shared& shared_;
  uint32_t parities_;  // of the phase that each slot waits for next
};

}  // namespace megamoe::sm90
