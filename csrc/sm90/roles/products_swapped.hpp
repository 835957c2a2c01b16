// Tiles of few rows (at most kMostSwapped), with the operands in each other's place: the products take weights for rows, of
// which they need 64, and the tile's rows (tokens) for columns, of which 8 will do. The sums are the same bit for bit
// (DEVLOG.md, 2026-11-30), at a fraction of the work in the tensor cores.
#pragma once
#include "roles/products_fast.hpp"

namespace megamoe::sm90 {

constexpr uint32_t kSwappedPieceN = 64;  // columns of the tile in one product; a warpgroup has two such pieces
constexpr uint32_t kSwappedPieces = kPieceN / kSwappedPieceN;

// Sums of a thread, in a tile of at most kM rows: those of column 64 * piece + 16 * warp + 8 * r + lane / 4 of its warpgroup
// and token token_of(group, q, lane). In an L1 tile the columns of r = 0 and 1 are gate and up of the same activations.
template <uint32_t kM>
struct SwappedSums {
  static constexpr uint32_t kGroups = kM / 8;  // of tokens
  static constexpr uint32_t kCount = kSwappedPieces * kM / 2;
  float sums[kCount];

  MEGAMOE_FN static constexpr uint32_t at(uint32_t piece, uint32_t group, uint32_t r, uint32_t q) {
    return piece * kM / 2 + 4 * group + 2 * r + q;
  }
  MEGAMOE_FN static uint32_t token_of(uint32_t group, uint32_t q, uint32_t lane) { return 8 * group + 2 * (lane % 4) + q; }

  // `run(i, factor)` for each of the sums, with what lane `token` holds for its token: of kind r, where there are two kinds.
  template <uint32_t kKinds, class Run>
  MEGAMOE_FN static void for_each(const float (&held)[kKinds], uint32_t lane, Run run) {
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group)
#pragma unroll
      for (uint32_t q = 0; q < 2; ++q) {
        float factor[kKinds];
#pragma unroll
        for (uint32_t kind = 0; kind < kKinds; ++kind)
          factor[kind] = __shfl_sync(kFullWarp, held[kind], token_of(group, q, lane));
#pragma unroll
        for (uint32_t piece = 0; piece < kSwappedPieces; ++piece)
#pragma unroll
          for (uint32_t r = 0; r < 2; ++r) run(at(piece, group, r, q), factor[r % kKinds]);
      }
  }
};

// The products of one scale group; `kFresh`: in place of what the sums were.
template <uint32_t kSteps, bool kFresh, uint32_t kM, class Shared>
MEGAMOE_FN void start_swapped(const Shared& shared, uint32_t slot, uint32_t group, uint32_t warpgroup,
                              SwappedSums<kM>& to) {
  const uint32_t rows = matrix_start(shared.rows, slot);
  const uint32_t columns = matrix_start(shared.columns, slot) + warpgroup * kPieceN * kBlockK / kDescriptorBytes;
  wgmma_fence();
#pragma unroll
  for (uint32_t step = 0; step < kSteps; ++step) {
    const uint32_t depth = (group * kSteps + step) * kProductDepth / kDescriptorBytes;
#pragma unroll
    for (uint32_t piece = 0; piece < kSwappedPieces; ++piece)
      WgmmaShared<kM>::run(&to.sums[to.at(piece, 0, 0, 0)],
                           matrix_descriptor(columns + piece * kSwappedPieceN * kBlockK / kDescriptorBytes + depth),
                           matrix_descriptor(rows + depth), !kFresh || step > 0);
  }
  wgmma_commit();
}

// multiply_tile() and multiply_tile_fast() for such a tile.
template <TileWork kWork, uint32_t kGroups, bool kFast, uint32_t kM, class Shared, class OnFirstStage>
MEGAMOE_FN void multiply_swapped(Shared& shared, RingPosition<kStages>& stage, const TileSlot& tile,
                                 OnFirstStage on_first_stage, SwappedSums<kM>& result) {
  constexpr uint32_t steps = kStepsPerStage / kGroups;
  constexpr uint32_t kinds = kWork == TileWork::l1 ? 2 : 1;  // of column scales: gate and up, or of the warpgroup's columns
  const ThreadPlace place = ThreadPlace::here();
  const uint32_t warpgroup = uniform(place.warpgroup), end = uniform(tile.end),
                 partner_empty = uniform(shared.partner_empty);
  auto& sums = result.sums;
  stage.turn = uniform(stage.turn);
  SumUnit units[kinds];  // of token `lane`
#pragma unroll
  for (SumUnit& unit : units) unit = SumUnit::none();
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  wait_barrier(&shared.full[stage.slot()], stage.parity());
  on_first_stage();
  bool more = true;
#pragma unroll 1
  while (more) {
    const uint32_t slot = stage.slot();
    const uint32_t place_of_scales = stage.turn % kMaxDepth;
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group) {
      const bool ends = group + 1 == kGroups;
      SwappedSums<kM> part;
      if constexpr (!kFast) start_swapped<steps, true>(shared, slot, group, warpgroup, part);
      const float row_scale = shared.row_scales[slot][group][place.lane % kM];
      float held[kinds];
#pragma unroll
      for (uint32_t kind = 0; kind < kinds; ++kind) {
        held[kind] =
            __fmul_rn(row_scale, tile.scales[kWork == TileWork::l1 ? kind : warpgroup][place_of_scales]);
        if constexpr (kFast) held[kind] = units[kind].change_to(held[kind]);
      }
      if constexpr (kFast) {
        result.for_each(held, place.lane, [&](uint32_t i, float factor) { sums[i] = __fmul_rn(sums[i], factor); });
        start_swapped<steps, false>(shared, slot, group, warpgroup, result);
      }
      if (ends) {
        stage.advance();
        more = stage.turn != end;
      }
      wgmma_wait(kFast ? sums : part.sums);
      if (ends) {
        __syncwarp();
        release_stage(shared, slot, partner_empty);
      }
      if constexpr (!kFast)
        result.for_each(held, place.lane,
                        [&](uint32_t i, float scale) { sums[i] = __fmaf_rn(part.sums[i], scale, sums[i]); });
    }
    wait_barrier_if(more, &shared.full[stage.slot()], stage.parity());
  }
  if constexpr (kFast) {
    float held[kinds];
#pragma unroll
    for (uint32_t kind = 0; kind < kinds; ++kind) held[kind] = units[kind].unit;
    result.for_each(held, place.lane, [&](uint32_t i, float unit) { sums[i] = __fmul_rn(sums[i], unit); });
  }
}

}  // namespace megamoe::sm90
