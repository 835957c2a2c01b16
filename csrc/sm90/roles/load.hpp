// Load role, one lane of a warp: keeps the stages filled across the borders of tiles. Weights do not depend on dispatch,
// so the first stages of a tile get theirs before its rows are there. Of weights that the partner in the cluster needs
// too, each of the two loads half, for both.
#pragma once
#include "roles/schedule.hpp"

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

  MEGAMOE_FN void run() {
    for (RingPosition<kTileSlots> next;; next.advance()) {
      wait_barrier(&shared_.tile_full[next.slot()], next.parity());
      const TileSlot& tile = shared_.tiles[next.slot()];
      if (tile.work == TileWork::stop) break;
      load_tile(tile, next);
    }
    // Both CTAs have arrived for the last time at the barriers here.
    const uint32_t first = stage_.turn < kStages ? 0 : stage_.turn - kStages;
    for (RingPosition<kStages> last{first}; last.turn != stage_.turn; last.advance())
      wait_barrier(&shared_.empty[last.slot()], last.parity());
  }

 private:
  // What one tile loads for each stage. A rehearsed one has no rows and loads nothing.
  struct Operands {
    const OperandMaps* maps;
    uint32_t first_row, first_column, row_boxes, column_boxes, groups, depth;
    bool shared;  // columns, with the partner
  };
  MEGAMOE_FN Operands operands_of(const TileSlot& tile) const {
    const Problem& problem = shared_.problem;
    const bool l1 = tile.work == TileWork::l1;
    const uint32_t columns = l1 ? 2 * problem.intermediate : problem.hidden;
    return {l1 ? &maps_.l1 : &maps_.l2,
            tile.block * kBlockM,
            tile.expert * columns + tile.column * kBlockN,
            tile.rows > kShortM ? 2u : 1u,
            tile.rows == 0 ? 0 : tile.pieces,
            l1 ? 1u : kScaleGroups,
            tile.depth,
            tile.shared != 0};
  }

  MEGAMOE_FN void load_tile(const TileSlot& tile, const RingPosition<kTileSlots>& position) {
    const Operands operands = operands_of(tile);
    uint64_t* rows_ready = &shared_.rows_ready[position.slot()];
    // Rows that are there go with their weights, stage by stage: a stage is then complete a whole ring earlier.
    const bool early = test_barrier(rows_ready, position.parity());
    const uint32_t lead = early ? 0 : smaller(tile.stages, operands.depth);
    // The next tile is claimed late, so that the last tiles go to whoever is free, and early enough to be ready in time.
    const uint32_t claim_next = operands.depth > kClaimLead ? operands.depth - kClaimLead : 0;
    RingPosition<kStages> rows_stage = stage_;
    for (uint32_t k = 0; k < lead; ++k) load_columns(tile, operands, k);
    wait_barrier(rows_ready, position.parity());
    const bool rehearsed = is_rehearsed(tile);
    const bool ready = tile.failed == 0 && !rehearsed;
    // From here on only `stages` is read of the slot, and that before the last stage is handed on.
    arrive(&shared_.tile_empty[position.slot()]);
    fence_generic_to_async_proxy();
    for (uint32_t k = 0; k < operands.depth; ++k) {
      if (k >= lead) load_columns(tile, operands, k);
      load_rows(operands, k, ready, rows_stage);
      if (k == claim_next && !rehearsed) arrive(&shared_.claim_next);
    }
  }

  MEGAMOE_FN void load_columns(const TileSlot& tile, const Operands& operands, uint32_t k) {
    uint64_t* full = &shared_.full[stage_.slot()];
    const RingPosition<kStages> before{stage_.turn - tile.stages};  // must be free again
    if (stage_.turn >= tile.stages) wait_barrier(&shared_.empty[before.slot()], before.parity());
    arrive_expect(full, operands.column_boxes * kPieceN * kBlockK);
    const uint32_t first = operands.shared ? cluster_rank() : 0, step = operands.shared ? cluster_size() : 1;
    for (uint32_t box = first; box < operands.column_boxes; box += step) {
      uint8_t* to = &shared_.columns[stage_.slot()][box * kPieceN * kBlockK];
      const uint32_t column = operands.first_column + box * kPieceN;
      if (operands.shared) {
        load_tensor_for_both(to, &operands.maps->columns, full, k * kBlockK, column);
      } else {
        load_tensor(to, &operands.maps->columns, full, k * kBlockK, column);
      }
    }
    stage_.advance();
  }

  // Without rows the stages are passed on all the same: the math role computes on and stores nothing.
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
};

}  // namespace megamoe::sm90
