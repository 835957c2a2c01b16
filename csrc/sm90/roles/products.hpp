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

template <class Shared>
MEGAMOE_FN void release_stage(Shared& shared, uint32_t slot, uint32_t partner_empty) {
  arrive_here_and_there(&shared.empty[slot], partner_empty != 0, partner_empty + slot * sizeof(shared.empty[0]));
}

// matrix_start() of a stage's matrix. Shared memory is small enough that stages lie apart in the address alone.
template <uint32_t kBytes>
MEGAMOE_FN uint32_t matrix_start(const uint8_t (&stages)[kStages][kBytes], uint32_t slot) {
  return matrix_start(stages[0]) + slot * (kBytes / kDescriptorBytes);
}

// One tile's products into `sums`. `kPieces` pieces of 128 columns a warpgroup: 2 for a tall tile, 1 for a short one; those
// from `tile.pieces` on are multiplied from what lies there and stored by nobody. `kGroups` scale groups of K a stage.
// `on_first_stage()` runs once the tile's rows are there.
//
// While one warpgroup promotes, the other has the tensor cores: what keeps a warpgroup from its next product is what costs.
// So the rows of the next group are on their way into registers before the promotion of this one's last piece.
template <TileWork kWork, uint32_t kPieces, uint32_t kGroups, class Shared, class OnFirstStage>
MEGAMOE_FN void multiply_tile(Shared& shared, RingPosition<kStages>& stage, const TileSlot& tile,
                              OnFirstStage on_first_stage, float (&sums)[kPieces * kSumsPerPiece]) {
  constexpr bool tall = kPieces == 2;
  constexpr uint32_t steps = kStepsPerStage / kGroups;
  constexpr uint32_t kinds = kWork == TileWork::l1 ? 2 : 1;  // of column scales in a piece: gate and up in turn
  const uint32_t end = uniform(tile.end), partner_empty = uniform(shared.partner_empty);
  const uint32_t first_piece = tall ? 0 : uniform(ThreadPlace::here().warpgroup);
  stage.turn = uniform(stage.turn);
#pragma unroll
  for (uint32_t i = 0; i < kPieces * kSumsPerPiece; ++i) sums[i] = 0.0f;
  if (uniform(tile.depth) == 0) return;  // never so, but without this line ptxas 13.0 spills
  uint32_t fragments[steps][4];  // read once for all pieces
  const auto load_fragments = [&](bool needed, uint32_t slot, uint32_t group, uint32_t fragment) {
#pragma unroll
    for (uint32_t step = 0; step < steps; ++step)
      load_row_fragment_if(needed, fragments[step], shared_address(shared.rows[slot]) + fragment,
                           group * steps + step);
  };
  const ThreadPlace place = ThreadPlace::here();
  const uint32_t fragment = fragment_offset(place.warp_row(tall), place.lane);
  wait_barrier(&shared.full[stage.slot()], stage.parity());
  on_first_stage();
#pragma unroll
  for (uint32_t i = 0; i < 4 * steps; ++i) fragments[i / 4][i % 4] = 0;
  load_fragments(true, stage.slot(), 0, fragment);
  bool more = true;
#pragma unroll 2  // less between products; four would spill
  while (more) {
    const uint32_t slot = stage.slot();
    const uint32_t place_of_scales = stage.turn % kMaxDepth;
    const uint32_t columns = matrix_start(shared.columns, slot) + first_piece * kPieceN * kBlockK / kDescriptorBytes;
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group) {
      float row_scales[2], scale[2][kinds];
#pragma unroll
      for (uint32_t piece = 0; piece < kPieces; ++piece) {
        float part[kSumsPerPiece];
        wgmma_fence();
#pragma unroll
        for (uint32_t step = 0; step < steps; ++step)
          Wgmma<kPieceN>::run(part, fragments[step],
                              matrix_descriptor(columns + (piece * kPieceN * kBlockK +
                                                           (group * steps + step) * kProductDepth) / kDescriptorBytes),
                              step > 0);
        wgmma_commit();
        // While the products run. Where they lie is found anew: there is a register to keep `fragment` in, and no other.
        if (piece == 0) {
          const float* here = &shared.row_scales[slot][group][ThreadPlace::here().first_row(tall)];
          row_scales[0] = here[0];
          row_scales[1] = here[8];
        }
        if (kWork == TileWork::l2 || piece == 0) {  // both pieces of an L1 tile have the same
#pragma unroll
          for (uint32_t kind = 0; kind < kinds; ++kind) {
            const float of_columns = tile.scales[kWork == TileWork::l1 ? kind : first_piece + piece][place_of_scales];
            scale[0][kind] = __fmul_rn(row_scales[0], of_columns);
            scale[1][kind] = __fmul_rn(row_scales[1], of_columns);
          }
        }
        bool reached = true;  // the next stage is known to be there, or there is none
        if (piece + 1 == kPieces && group + 1 == kGroups) {
          stage.advance();
          more = stage.turn != end;
          reached = test_barrier_if(more, &shared.full[stage.slot()], stage.parity());
        }
        wgmma_wait(part);
        if (piece + 1 == kPieces) {
          if (group + 1 < kGroups) {
            load_fragments(true, slot, group + 1, fragment);
          } else {
            __syncwarp();
            release_stage(shared, slot, partner_empty);
            wait_barrier_if(!reached, &shared.full[stage.slot()], stage.parity());
            load_fragments(more, stage.slot(), 0, fragment);
          }
        }
#pragma unroll
        for (uint32_t i = 0; i < kSumsPerPiece; ++i) {
          float& sum = sums[piece * kSumsPerPiece + i];
          sum = __fmaf_rn(part[i], scale[i / 2 % 2][i / 4 % kinds], sum);
        }
      }
    }
  }
}

}  // namespace megamoe::sm90
