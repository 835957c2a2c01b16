// What a math warpgroup does with the tiles that the schedule role hands on: products and epilogue.
#pragma once
#include "ptx/store.hpp"
#include "roles/l2_epilogue.hpp"
#include "roles/swapped_epilogue.hpp"
#include "tiles.hpp"

namespace megamoe::sm90 {

// Metadata and weights of a tile's rows, fetched beside the products: two lanes a row, two words each.
template <class Shared>
MEGAMOE_FN void fetch_row_targets(const Context& context, Shared& shared, const TileSlot& tile, bool tall) {
  const ThreadPlace place = ThreadPlace::here();
  const auto& layout = *context.layout;
  RowTargets& targets = shared.targets[place.warpgroup];
  const uint32_t row_of_warp = place.lane % 16;
  const uint32_t row = place.warp_row(false) + row_of_warp;
  const uint64_t pool_row = uint64_t(tile.block) * kBlockM + place.warp_row(tall) + row_of_warp;
  const uint32_t* metadata =
      context.own<uint32_t>(layout.token_src_metadata) + pool_row * layout.token_src_metadata.stride[0];
  const float* weight = context.own<float>(layout.l1_topk_weights) + pool_row;
  uint32_t(&to)[3] = targets.metadata[row];
  const bool upper_half = place.lane >= 16;
  copy_word_async(upper_half ? &to[2] : &to[0], upper_half ? metadata + 2 : metadata);
  copy_word_async(upper_half ? static_cast<void*>(&targets.weight[row]) : &to[1],
                  upper_half ? static_cast<const void*>(weight) : metadata + 1);
  commit_word_copies();
}

// The 128x128 window of L1 accumulators that the launch asks for, from every tile that has a part in it.
template <uint32_t kPieces>
MEGAMOE_FN void store_accum_debug(const Context& context, const LaunchArguments& launch, const TileResult& tile,
                                  const float (&sums)[kPieces * kSumsPerPiece]) {
  constexpr bool tall = kPieces == 2;
  const ThreadPlace place = ThreadPlace::here();
  if (uniform(tile.block) != uniform(launch.debug_row_block)) return;
  float* window = context.own<float>(context.layout->l1_accum_debug);
#pragma unroll
  for (uint32_t piece = 0; piece < kPieces; ++piece) {
    const uint32_t column_block = tile.column * (kBlockN / kPieceN) + (tall ? piece : place.warpgroup);
    if (uniform(column_block) != uniform(launch.debug_column_block)) continue;
#pragma unroll
    for (uint32_t i = 0; i < kSumsPerPiece; ++i) {
      const uint32_t row = place.first_row(tall) + 8 * (i / 2 % 2);
      const uint32_t column = i / 4 * 8 + place.lane % 4 * 2 + i % 2;
      store_if(row < tile.rows, window + row * kAccumDebugEdge + column, __float_as_uint(sums[piece * kSumsPerPiece + i]));
    }
  }
}

template <uint32_t kM>
MEGAMOE_FN void store_swapped_debug(const Context& context, const LaunchArguments& launch, const TileResult& tile,
                                    const SwappedSums<kM>& result) {
  const ThreadPlace place = ThreadPlace::here();
  if (uniform(tile.block) != uniform(launch.debug_row_block)) return;
  if (uniform(tile.column * (kBlockN / kPieceN) + place.warpgroup) != uniform(launch.debug_column_block)) return;
  float* window = context.own<float>(context.layout->l1_accum_debug);
#pragma unroll
  for (uint32_t group = 0; group < result.kGroups; ++group)
#pragma unroll
    for (uint32_t q = 0; q < 2; ++q) {
      const uint32_t row = result.token_of(group, q, place.lane);
#pragma unroll
      for (uint32_t piece = 0; piece < kSwappedPieces; ++piece)
#pragma unroll
        for (uint32_t r = 0; r < 2; ++r) {
          const uint32_t column = piece * kSwappedPieceN + 16 * place.warp + 8 * r + place.lane / 4;
          store_if(row < tile.rows, window + row * kAccumDebugEdge + column,
                   __float_as_uint(result.sums[result.at(piece, group, r, q)]));
        }
    }
}

template <uint32_t kScaleGroups, bool kFast, bool kBringUp>
class MathRole {
 public:
  using Shared = SharedStorage<kScaleGroups>;

  MEGAMOE_FN MathRole(const Context& context, Shared& shared)
      : context_(context), shared_(shared) {}

  MEGAMOE_FN void run() {
    RingPosition<kTileSlots> next;
    for (;;) {
      wait_barrier(&shared_.tile_full[next.slot()], next.parity());
      const TileSlot& tile = shared_.tiles[next.slot()];
      if (uniform(tile.work) == TileWork::stop) return;
      next.turn = run_tile(tile);
      next.advance();
    }
  }

 private:
  // Returns the tile's turn: beside the products there is no register to keep it.
  MEGAMOE_FN uint32_t run_tile(const TileSlot& slot) {
    const uint32_t height = uniform(slot.height);
    if (height > kShortM) return run_in_place<2>(slot);
    if (height > kMostSwapped) return run_in_place<1>(slot);
    if (height > kMostSwapped / 2) return run_swapped<kMostSwapped>(slot);
    if (height > kMostSwapped / 4) return run_swapped<kMostSwapped / 2>(slot);
    return run_swapped<kMostSwapped / 4>(slot);
  }
  template <uint32_t kPieces>
  MEGAMOE_FN uint32_t run_in_place(const TileSlot& slot) {
    return uniform(slot.work) == TileWork::l1 ? run_l1<kPieces>(slot) : run_l2<kPieces>(slot);
  }
  template <uint32_t kM>
  MEGAMOE_FN uint32_t run_swapped(const TileSlot& slot) {
    return uniform(slot.work) == TileWork::l1 ? run_swapped_l1<kM>(slot) : run_swapped_l2<kM>(slot);
  }

  template <TileWork kWork, uint32_t kPieces, uint32_t kGroups>
  MEGAMOE_FN void multiply(const TileSlot& slot, float (&sums)[kPieces * kSumsPerPiece]) {
    const auto fetch = [&] { fetch_row_targets(context_, shared_, slot, kPieces == 2); };
    if constexpr (kFast) {
      multiply_tile_fast<kWork, kPieces, kGroups>(shared_, stage_, slot, fetch, sums);
    } else {
      multiply_tile<kWork, kPieces, kGroups>(shared_, stage_, slot, fetch, sums);
    }
  }

  template <uint32_t kPieces>
  MEGAMOE_FN uint32_t run_l1(const TileSlot& slot) {
    float sums[kPieces * kSumsPerPiece];
    multiply<TileWork::l1, kPieces, 1>(slot, sums);
    const TileResult tile = take_slot(slot);
    if (tile.failed) return end_tile(tile);
    if constexpr (kBringUp) {
      if (uniform(shared_.launch.debug)) store_accum_debug<kPieces>(context_, shared_.launch, tile, sums);
      if (uniform(context_.stage) < Stage::l1_epilogue) return end_tile(tile);
    }
    ActivationStore<kPieces, Shared>(context_, shared_, tile).run(sums, tile.turn);
    return end_tile(tile);
  }

  template <uint32_t kPieces>
  MEGAMOE_FN uint32_t run_l2(const TileSlot& slot) {
    float sums[kPieces * kSumsPerPiece];
    multiply<TileWork::l2, kPieces, kScaleGroups>(slot, sums);
    const TileResult tile = take_slot(slot);
    if (tile.failed) return end_tile(tile);
    scatter_results<kPieces>(context_, shared_, tile, sums);
    return end_tile(tile);
  }

  template <uint32_t kM>
  MEGAMOE_FN uint32_t run_swapped_l1(const TileSlot& slot) {
    SwappedSums<kM> sums;
    SwappedTarget target;
    multiply_swapped<TileWork::l1, 1, kFast>(shared_, stage_, slot, [&] { target.fetch(context_, slot); }, sums);
    const TileResult tile = take_slot(slot);
    if (tile.failed) return end_tile(tile);
    if constexpr (kBringUp) {
      if (uniform(shared_.launch.debug)) store_swapped_debug(context_, shared_.launch, tile, sums);
      if (uniform(context_.stage) < Stage::l1_epilogue) return end_tile(tile);
    }
    SwappedActivationStore<kM, Shared>(context_, shared_, tile).run(sums, target.weight);
    return end_tile(tile);
  }

  template <uint32_t kM>
  MEGAMOE_FN uint32_t run_swapped_l2(const TileSlot& slot) {
    SwappedSums<kM> sums;
    SwappedTarget target;
    multiply_swapped<TileWork::l2, kScaleGroups, kFast>(
        shared_, stage_, slot, [&] { target.fetch(context_, slot); }, sums);
    const TileResult tile = take_slot(slot);
    if (!tile.failed) scatter_swapped(context_, tile, target, sums);
    return end_tile(tile);
  }

  // Done with the slot: what it said, in the end also whether the rows ever came. Waits for the row targets as well.
  MEGAMOE_FN TileResult take_slot(const TileSlot& slot) {
    wait_word_copies();
    const TileResult tile{slot.block, slot.column, slot.rows, slot.expert, uniform(slot.pieces), slot.turn,
                          uniform(slot.failed) != 0};
    __syncwarp();
    if (ThreadPlace::here().lane == 0) arrive(&shared_.tile_empty[tile.turn % kTileSlots]);
    return tile;
  }

  // The schedule role tells of a tile when every warp has stored its part, or has none.
  MEGAMOE_FN uint32_t end_tile(const TileResult& tile) {
    __syncwarp();
    if (ThreadPlace::here().lane == 0) arrive(&shared_.stored[tile.turn % kUntoldTiles]);
    return tile.turn;
  }

  const Context& context_;
  Shared& shared_;
  RingPosition<kStages> stage_;
};

}  // namespace megamoe::sm90
