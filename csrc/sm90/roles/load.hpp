// Load role, one warp of which one lane copies: claims tiles in their static order and keeps the stages filled across their borders. Weights do
// not depend on dispatch, so the first stages of a tile get theirs before its rows are there.
#pragma once
#include "shared_storage.hpp"
#include "tiles.hpp"

namespace megamoe::sm90 {

struct OperandMaps {
  TensorMap rows;        // activations, boxes of 64 rows x 128
  TensorMap row_scales;  // boxes of 1 group x 128 rows
  TensorMap columns;     // weights, boxes of 128 rows x 128
};
struct TensorMaps {
  OperandMaps l1, l2;
};

template <uint32_t kScaleGroups>
class Loader {
 public:
  using Shared = SharedStorage<kScaleGroups>;

  MEGAMOE_FN Loader(Shared& shared, const TensorMaps& maps, WarpTeam<1>& warp)
      : shared_(shared), maps_(maps), warp_(warp) {}

  MEGAMOE_FN void run(const Context& context, const TileOrder& order) {
    for (;;) {
      const uint32_t index = warp_.once([&] { return aborted(context) ? ~0u : take(context, Claim::tile); });
      if (index >= order.count()) break;
      if (!load_tile(context, order.at(index))) break;
    }
    TileSlot& slot = next_slot();
    if (warp_.rank() == 0) {
      slot.work = TileWork::stop;
      arrive(&shared_.tile_full[slot_.slot()]);
    }
  }

 private:
  // What one tile loads for each stage. Worked out twice rather than kept: this role has few registers.
  struct Operands {
    const OperandMaps* maps;
    uint32_t first_row, first_column, row_boxes, column_boxes, groups, depth;
  };
  MEGAMOE_FN Operands operands_of(const TileSlot& tile) const {
    const Problem& problem = shared_.problem;
    const bool l1 = tile.work == TileWork::l1;
    const uint32_t columns = l1 ? 2 * problem.intermediate : problem.hidden;
    return {l1 ? &maps_.l1 : &maps_.l2,
            tile.block * kBlockM,
            tile.expert * columns + tile.column * kBlockN,
            tile.rows > kShortM ? 2u : 1u,
            tile.pieces,
            l1 ? 1u : kScaleGroups,
            tile.depth};
  }

  MEGAMOE_FN TileSlot& next_slot() {
    wait_barrier(&shared_.tile_empty[slot_.slot()], slot_.parity() ^ 1);
    return shared_.tiles[slot_.slot()];
  }

  // Tell the math role what comes, with the weight scales, which every thread of it needs for every stage.
  MEGAMOE_FN TileSlot& push(const Context& context, const Tile& tile) {
    TileSlot& slot = next_slot();
    const Problem& problem = shared_.problem;
    const PoolBlock block = pool_blocks(context)[tile.block];
    const bool l1 = tile.kind == TileKind::l1;
    const uint32_t depth = (l1 ? problem.hidden : problem.intermediate) / kBlockK;
    const uint32_t scale_rows = (l1 ? 2 * problem.intermediate : problem.hidden) / kScaleBlock;
    const uint32_t scale_row = (l1 ? 1 : 2) * tile.column;
    const uint32_t pieces = l1 ? 2 : smaller(2, scale_rows - scale_row);
    if (warp_.rank() == 0) {
      slot.work = l1 ? TileWork::l1 : TileWork::l2;
      slot.block = tile.block;
      slot.column = tile.column;
      slot.rows = block.rows;
      slot.expert = block.expert;
      slot.depth = depth;
      slot.pieces = pieces;
      slot.failed = 0;
      slot.turn = slot_.turn;
    }
    const float* first = reinterpret_cast<const float*>(l1 ? shared_.launch.l1_sf : shared_.launch.l2_sf) +
                         (uint64_t(block.expert) * scale_rows + scale_row) * depth;
    const float* second = first + (l1 ? scale_rows / 2 : pieces - 1) * depth;
#pragma unroll 1
    for (uint32_t k = warp_.rank(); k < depth; k += warp_.size()) {
      slot.scales[0][k] = __ldg(first + k);
      slot.scales[1][k] = __ldg(second + k);
    }
    __syncwarp();
    if (warp_.rank() == 0) arrive(&shared_.tile_full[slot_.slot()]);
    slot_.advance();
    return slot;
  }

  // False when the launch drains; the math role has then been told not to store.
  MEGAMOE_FN bool load_tile(const Context& context, const Tile& tile) {
    TileSlot& slot = push(context, tile);
    return warp_.once([&] { return fill_stages(context, slot); });
  }

  MEGAMOE_FN bool fill_stages(const Context& context, TileSlot& slot) {
    const Operands operands = operands_of(slot);
    const uint32_t lead = smaller(kStages, operands.depth);
    RingPosition<kStages> rows_stage = stage_;
    for (uint32_t k = 0; k < lead; ++k) load_columns(operands, k);
    const bool ready =
        slot.work == TileWork::l1 ? wait_for_rows(context, slot.block) : wait_for_l1_tiles(context, slot.block);
    if (!ready) slot.failed = 1;  // seen by whoever sees the rows' arrivals below
    fence_generic_to_async_proxy();
    for (uint32_t k = 0; k < lead; ++k) load_rows(operands, k, ready, rows_stage);
    for (uint32_t k = lead; k < operands.depth; ++k) {
      load_columns(operands, k);
      load_rows(operands, k, ready, rows_stage);
    }
    return ready;
  }

  MEGAMOE_FN void load_columns(const Operands& operands, uint32_t k) {
    uint64_t* full = &shared_.full[stage_.slot()];
    wait_barrier(&shared_.empty[stage_.slot()], stage_.parity() ^ 1);
    arrive_expect(full, operands.column_boxes * kPieceN * kBlockK);
    for (uint32_t box = 0; box < operands.column_boxes; ++box)
      load_tensor(&shared_.columns[stage_.slot()][box * kPieceN * kBlockK], &operands.maps->columns, full, k * kBlockK,
                  operands.first_column + box * kPieceN);
    stage_.advance();
  }

  MEGAMOE_FN void load_rows(const Operands& operands, uint32_t k, bool ready, RingPosition<kStages>& stage) {
    uint64_t* full = &shared_.full[stage.slot()];
    if (ready) {
      arrive_expect(full, operands.row_boxes * kShortM * kBlockK + operands.groups * kBlockM * sizeof(float));
      for (uint32_t box = 0; box < operands.row_boxes; ++box)
        load_tensor(&shared_.rows[stage.slot()][box * kShortM * kBlockK], &operands.maps->rows, full, k * kBlockK,
                    operands.first_row + box * kShortM);
      for (uint32_t group = 0; group < operands.groups; ++group)
        load_tensor(&shared_.row_scales[stage.slot()][group][0], &operands.maps->row_scales, full, operands.first_row,
                    k * operands.groups + group);
    } else {
      arrive(full);
    }
    stage.advance();
  }

  Shared& shared_;
  const TensorMaps& maps_;
  WarpTeam<1>& warp_;
  RingPosition<kStages> stage_;  // of the copying lane
  RingPosition<kTileSlots> slot_;
};

}  // namespace megamoe::sm90
