// Load role, one thread: claims tiles in their static order and keeps the stages filled across their borders. Weights do
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

  MEGAMOE_FN Loader(Shared& shared, const TensorMaps& maps) : shared_(shared), maps_(maps) {}

  MEGAMOE_FN void run(const Context& context, const TileOrder& order) {
    for (;;) {
      const uint32_t index = take(context, Claim::tile);
      if (index >= order.count() || aborted(context)) break;
      if (!load_tile(context, order.at(index))) break;
    }
    push({TileWork::stop, 0, 0, 0, 0, 0});
  }

 private:
  // What one tile loads for each stage.
  struct Operands {
    const OperandMaps* maps;
    uint32_t first_row, first_column, row_boxes, column_boxes, groups, depth;
  };

  MEGAMOE_FN TileSlot* push(const TileSlot& tile) {
    wait_barrier(&shared_.tile_empty[slot_.slot()], slot_.parity() ^ 1);
    TileSlot* slot = &shared_.tiles[slot_.slot()];
    *slot = tile;
    arrive(&shared_.tile_full[slot_.slot()]);
    slot_.advance();
    return slot;
  }

  // False when the launch drains; the math role has then been told not to store.
  MEGAMOE_FN bool load_tile(const Context& context, const Tile& tile) {
    const Problem& problem = *context.problem;
    const PoolBlock block = pool_blocks(context)[tile.block];
    const bool l1 = tile.kind == TileKind::l1;
    const uint32_t columns = l1 ? 2 * problem.intermediate : problem.hidden;
    TileSlot* slot =
        push({l1 ? TileWork::l1 : TileWork::l2, tile.block, tile.column, block.rows, block.expert, 0});
    const Operands operands{l1 ? &maps_.l1 : &maps_.l2,
                            tile.block * kBlockM,
                            block.expert * columns + tile.column * kBlockN,
                            block.rows > kShortM ? 2u : 1u,
                            columns - tile.column * kBlockN > kPieceN ? 2u : 1u,
                            l1 ? 1u : kScaleGroups,
                            (l1 ? problem.hidden : problem.intermediate) / kBlockK};
    const uint32_t lead = smaller(kStages, operands.depth);
    RingPosition<kStages> rows_stage = stage_;
    for (uint32_t k = 0; k < lead; ++k) load_columns(operands, k);
    const bool ready = l1 ? wait_for_rows(context, tile.block) : wait_for_l1_tiles(context, tile.block);
    if (!ready) slot->failed = 1;  // seen by whoever sees the rows' arrivals below
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
  RingPosition<kStages> stage_;
  RingPosition<kTileSlots> slot_;
};

}  // namespace megamoe::sm90
