// Schedule role, one warp: claims tiles in their static order, fetches what is known of them, and waits for their rows, so
// that the load role never waits for more than one word.
#pragma once
#include "shared_storage.hpp"
#include "tiles.hpp"

namespace megamoe::sm90 {

template <uint32_t kScaleGroups>
class Scheduler {
 public:
  using Shared = SharedStorage<kScaleGroups>;

  MEGAMOE_FN Scheduler(Shared& shared, WarpTeam<1>& warp) : shared_(shared), warp_(warp) {}

  MEGAMOE_FN void run(const Context& context, const TileOrder& order) {
    for (RingPosition<kTileSlots> next;; next.advance()) {
      // The load role is about to end its tile, or this is the first.
      if (next.turn > 0) wait_barrier(&shared_.claim_next, (next.turn - 1) & 1);
      const uint32_t index = warp_.once([&] { return aborted(context) ? ~0u : take(context, Claim::tile); });
      wait_barrier(&shared_.tile_empty[next.slot()], next.parity() ^ 1);
      if (index >= order.count()) return stop(next);
      push(context, order.at(index), next);
      if (!warp_.once([&] { return wait_for_inputs(context, next); })) {
        next.advance();
        wait_barrier(&shared_.tile_empty[next.slot()], next.parity() ^ 1);
        return stop(next);
      }
    }
  }

 private:
  MEGAMOE_FN void stop(const RingPosition<kTileSlots>& position) {
    if (warp_.rank() != 0) return;
    shared_.tiles[position.slot()].work = TileWork::stop;
    arrive(&shared_.tile_full[position.slot()]);
  }

  // Tell the others what comes, with the weight scales, which every thread of the math role needs for every stage.
  MEGAMOE_FN void push(const Context& context, const Tile& tile, const RingPosition<kTileSlots>& position) {
    TileSlot& slot = shared_.tiles[position.slot()];
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
      slot.turn = position.turn;
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
    if (warp_.rank() == 0) arrive(&shared_.tile_full[position.slot()]);
  }

  // False when the launch drains; the others have then been told not to load rows and not to store.
  MEGAMOE_FN bool wait_for_inputs(const Context& context, const RingPosition<kTileSlots>& position) {
    TileSlot& slot = shared_.tiles[position.slot()];
    const bool ready =
        slot.work == TileWork::l1 ? wait_for_rows(context, slot.block) : wait_for_l1_tiles(context, slot.block);
    if (!ready) slot.failed = 1;
    arrive(&shared_.rows_ready[position.slot()]);
    return ready;
  }

  Shared& shared_;
  WarpTeam<1>& warp_;
};

}  // namespace megamoe::sm90
