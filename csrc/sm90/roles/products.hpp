// Math role, one warpgroup: products of a tile in the tensor cores, promoted in fp32 after every scale group.
#pragma once
#include "shared_storage.hpp"

namespace megamoe::sm90 {

constexpr uint32_t kSumsPerPiece = kPieceN / 2;
constexpr uint32_t kStepsPerStage = kBlockK / kProductDepth;

// Where this thread's accumulators lie in a tile. sums[64 * piece + 4 * i + 2 * r + q] is row first_row() + 8 * r and
// column 128 * piece + 8 * i + 2 * (lane % 4) + q.
struct ThreadPlace {
  uint32_t warpgroup, warp, lane;  // warp of the warpgroup

  // Read anew at each call: kept, these values would take the registers that the accumulators need.
  MEGAMOE_FN static ThreadPlace here() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return {thread / 128 - 1, thread / 32 % 4, thread % 32};
  }
  // First of the warp's 16 rows: the warpgroups share the rows of a short tile and halve those of a tall one.
  MEGAMOE_FN uint32_t warp_row(bool tall) const { return (tall ? warpgroup * 64 : 0) + warp * 16; }
  MEGAMOE_FN uint32_t first_row(bool tall) const { return warp_row(tall) + lane / 4; }
};

// A tile whose products are done, and whose slot is given back.
struct TileResult {
  uint32_t block, column, rows, expert, pieces, turn;
  bool failed;
};

// One tile's products into `sums`. `kPieces` pieces of 128 columns a warpgroup: 2 for a tall tile, 1 for a short one, of
// which those before `tile.pieces` exist. `kGroups` scale groups of K a stage. `on_first_stage()` runs once the tile's rows
// are there.
template <TileWork kWork, uint32_t kPieces, uint32_t kGroups, class Shared, class OnFirstStage>
MEGAMOE_FN void multiply_tile(Shared& shared, RingPosition<kStages>& stage, const TileSlot& tile,
                              OnFirstStage on_first_stage, float (&sums)[kPieces * kSumsPerPiece]) {
  constexpr bool tall = kPieces == 2;
  const ThreadPlace place = ThreadPlace::here();
  const uint32_t fragment = fragment_offset(place.warp_row(tall), place.lane);
  const uint32_t first_row = place.first_row(tall);
  const uint32_t first_piece = tall ? 0 : place.warpgroup;
  const bool first_lane = place.lane == 0;
#pragma unroll
  for (uint32_t i = 0; i < kPieces * kSumsPerPiece; ++i) sums[i] = 0.0f;
  for (uint32_t k = 0; k < tile.depth; ++k) {
    const uint32_t slot = stage.slot();
    wait_barrier(&shared.full[slot], stage.parity());
    if (k == 0) on_first_stage();
    const uint32_t rows = shared_address(shared.rows[slot]) + fragment;
    const uint32_t columns = shared_address(shared.columns[slot]) + first_piece * kPieceN * kBlockK;
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group) {
      constexpr uint32_t steps = kStepsPerStage / kGroups;
      uint32_t fragments[steps][4];  // read once for all pieces
#pragma unroll
      for (uint32_t step = 0; step < steps; ++step) load_row_fragment(fragments[step], rows, group * steps + step);
#pragma unroll
      for (uint32_t piece = 0; piece < kPieces; ++piece) {
        const bool last_piece =
            piece + 1 == kPieces || (kWork == TileWork::l2 && first_piece + piece + 1 >= tile.pieces);
        if (kWork == TileWork::l2 && first_piece + piece >= tile.pieces) break;
        float part[kSumsPerPiece];
        wgmma_fence();
#pragma unroll
        for (uint32_t step = 0; step < steps; ++step)
          Wgmma<kPieceN>::run(part, fragments[step],
                              matrix_descriptor(columns + piece * kPieceN * kBlockK +
                                                (group * steps + step) * kProductDepth),
                              step > 0);
        wgmma_commit();
        wgmma_wait();
        // Only now: beside the accumulators and fragments there is no register to hold these meanwhile.
        const float* row_scales = &shared.row_scales[slot][group][first_row];
        const float upper = row_scales[0], lower = row_scales[8];
        const float even = tile.scales[kWork == TileWork::l1 ? 0 : first_piece + piece][k];
        const float odd = kWork == TileWork::l1 ? tile.scales[1][k] : even;
        __syncwarp();
        if (last_piece && group + 1 == kGroups && first_lane) arrive(&shared.empty[slot]);
        const float scale[2][2] = {{__fmul_rn(upper, even), __fmul_rn(upper, odd)},
                                   {__fmul_rn(lower, even), __fmul_rn(lower, odd)}};
#pragma unroll
        for (uint32_t i = 0; i < kSumsPerPiece; ++i) {
          float& sum = sums[piece * kSumsPerPiece + i];
          sum = __fmaf_rn(part[i], scale[i / 2 % 2][i / 4 % 2], sum);
        }
      }
    }
    if (kWork == TileWork::l2 && first_piece >= tile.pieces && first_lane) arrive(&shared.empty[slot]);
    stage.advance();
  }
}

}  // namespace megamoe::sm90
