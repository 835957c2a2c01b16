// accumulate="fast": the sums of a tile stay in the tensor cores over all of K. Before each scale group they are multiplied
// into the unit of its scales, so that the products can be added as they are. Fewer instructions than promotion (one wide
// product that reads its rows once) and less exact: the tensor core adds with few bits below the largest term.
#pragma once
#include "ptx/convert.hpp"
#include "roles/products.hpp"

namespace megamoe::sm90 {

// The unit in which sums are kept: the scale of the last group. A scale of next to nothing would blow the sums up beyond fp32
// when they are taken into its unit; a unit is therefore not smaller than 2^-60 of the largest before it, whose products such
// a group does not show beside. NaN and inf go through.
struct SumUnit {
  float unit, floor;

  MEGAMOE_FN static SumUnit none() { return {0.0f, 1e-30f}; }
  // Takes the scale of the next group and returns what to multiply the sums with.
  MEGAMOE_FN float change_to(float scale) {
    const float size = fabsf(scale);
    const float next = size < floor ? floor : scale;
    floor = fmaxf(floor, size * 0x1p-60f);
    const float factor = __fmul_rn(unit, approximate_reciprocal(next));
    unit = next;
    return factor;
  }
};

// Which of the scales belongs to sums[i].
template <TileWork kWork, uint32_t kKinds>
MEGAMOE_FN constexpr uint32_t kind_of(uint32_t i) {
  return kKinds == 1 ? 0 : kWork == TileWork::l1 ? i / 4 % 2 : i / kSumsPerPiece;
}

// What the lanes of a quad hold for their two rows and up to two kinds of columns: lane q that of row q / 2 and kind q % 2.
template <TileWork kWork, uint32_t kKinds, uint32_t kSums>
MEGAMOE_FN void multiply_by_quad(float held, float (&sums)[kSums]) {
  float factor[2][kKinds];
#pragma unroll
  for (uint32_t i = 0; i < 2 * kKinds; ++i)
    factor[i / kKinds][i % kKinds] = __shfl_sync(kFullWarp, held, 2 * (i / kKinds) + i % kKinds, 4);
#pragma unroll
  for (uint32_t i = 0; i < kSums; ++i) sums[i] = __fmul_rn(sums[i], factor[i / 2 % 2][kind_of<kWork, kKinds>(i)]);
}

// multiply_tile() of products.hpp, the other way to add. Nothing but the loop's condition is made ready for the next group
// beside the products of this one: no form of that was faster, with one product or two under way (DEVLOG.md, 2026-11-30).
template <TileWork kWork, uint32_t kPieces, uint32_t kGroups, class Shared, class OnFirstStage>
MEGAMOE_FN void multiply_tile_fast(Shared& shared, RingPosition<kStages>& stage, const TileSlot& tile,
                                   OnFirstStage on_first_stage, float (&sums)[kPieces * kSumsPerPiece]) {
  constexpr bool tall = kPieces == 2;
  constexpr uint32_t steps = kStepsPerStage / kGroups;
  // Columns come with two scales: gate and up in turn, or the two pieces of a tall L2 tile.
  constexpr uint32_t kinds = kWork == TileWork::l1 || tall ? 2 : 1;
  const ThreadPlace place = ThreadPlace::here();
  const uint32_t warpgroup = uniform(place.warpgroup), end = uniform(tile.end),
                 partner_empty = uniform(shared.partner_empty);
  const uint32_t first_piece = tall ? 0 : warpgroup;
  stage.turn = uniform(stage.turn);
  const uint32_t row_of_lane = place.first_row(tall) + 8 * (place.lane / 2 % 2);
  const float* column_scales = tile.scales[kinds == 2 ? place.lane % 2 : first_piece];
  SumUnit unit = SumUnit::none();
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  wait_barrier(&shared.full[stage.slot()], stage.parity());
  on_first_stage();
  bool more = true;
#pragma unroll kPieces  // two stages a turn for tall tiles; short ones wait for memory
  while (more) {
    const uint32_t slot = stage.slot();
    const uint32_t place_of_scales = stage.turn % kMaxDepth;
    const uint32_t rows =
        matrix_start(shared.rows, slot) + (tall ? warpgroup * kShortM * kBlockK / kDescriptorBytes : 0);
    const uint32_t columns = matrix_start(shared.columns, slot) + first_piece * kPieceN * kBlockK / kDescriptorBytes;
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group) {
      const float scale = __fmul_rn(shared.row_scales[slot][group][row_of_lane], column_scales[place_of_scales]);
      multiply_by_quad<kWork, kinds>(unit.change_to(scale), sums);
      wgmma_fence(sums);
#pragma unroll
      for (uint32_t step = 0; step < steps; ++step) {
        const uint32_t depth = (group * steps + step) * kProductDepth / kDescriptorBytes;
        WgmmaShared<kPieces * kPieceN>::run(sums, matrix_descriptor(rows + depth), matrix_descriptor(columns + depth));
      }
      wgmma_commit();
      if (group + 1 == kGroups) {
        stage.advance();
        more = stage.turn != end;
      }
      wgmma_wait(sums);
    }
    __syncwarp();
    release_stage(shared, slot, partner_empty);
    wait_barrier_if(more, &shared.full[stage.slot()], stage.parity());
  }
  multiply_by_quad<kWork, kinds>(unit.unit, sums);
}

}  // namespace megamoe::sm90
