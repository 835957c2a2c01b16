// Schedule role, one warp: claims tiles in their static order, fetches what is known of them, waits for their rows, and tells
// the others on this rank of results once they are stored. The load role never waits for more than one word, and the math
// role for no store: a release takes a microsecond, in which its warps would multiply nothing.
#pragma once
#include "shared_storage.hpp"
#include "table.hpp"
#include "tiles.hpp"

namespace megamoe::sm90 {

// Pool blocks whose tiles are claimed together: with few blocks smaller groups, so that L2 tiles fill the last wave of L1.
constexpr uint32_t kGroupBlocks = 16, kSmallGroupBlocks = 8;
constexpr uint32_t kGroupLag = 1;
constexpr uint32_t kRehearsedStages = 1;  // of a tile; two were no faster
static_assert(2 * kRehearsedStages <= kStages);  // begin() counts one phase a stage

// What a CTA says to its partner when the table is there or the launch drains: that it drains, or what it claimed and whether
// it rehearsed.
constexpr uint32_t kDrains = 0;
MEGAMOE_FN uint32_t ready_state(uint32_t first, bool rehearsed) { return 2 * first + 2 + rehearsed; }

template <class Shared>
MEGAMOE_FN void tell_partner(Shared& shared, uint32_t state) {
  if (cluster_size() == 2) shared.state_of_partner.send(state, partner());
}

// Every CTA that is let in says it once, and hears it once before it ends. It comes: who says it waits with a deadline for
// the table.
template <class Shared>
MEGAMOE_FN uint32_t hear_partner(Shared& shared) {
  if (cluster_size() == 1) return kDrains;
  wait_barrier(&shared.state_of_partner.full, 0);
  return shared.state_of_partner.word;
}

MEGAMOE_FN TileOrder tile_order(const Context& context, uint32_t num_blocks, bool in_pairs) {
  const uint32_t l1_tiles = context.stage >= Stage::l1_gemm ? context.problem->num_l1_tiles : 0;
  const uint32_t l2_tiles = context.has_l2() ? context.problem->num_l2_tiles : 0;
  if (in_pairs) {
    const uint32_t* groups = pair_groups(context);
    return {groups[1 + groups[0]], l1_tiles, l2_tiles, 0, kGroupLag, groups};
  }
  return {num_blocks, l1_tiles, l2_tiles, many_blocks(context, num_blocks) ? kGroupBlocks : kSmallGroupBlocks, kGroupLag};
}

template <uint32_t kScaleGroups>
class Scheduler {
 public:
  using Shared = SharedStorage<kScaleGroups>;

  MEGAMOE_FN Scheduler(Shared& shared, WarpTeam<1>& warp) : shared_(shared), warp_(warp) {}

  // Before the first tile two of the expected height, without rows and results, whose stages hold anything: a launch finds none
  // of its code in the caches of a GPU that streams weights, and fetching an epilogue takes longer than running it. The math
  // role has nothing to do yet. What it fetches of block 0's rows may be half written; nobody uses it.
  MEGAMOE_FN void rehearse(uint32_t height) {
    for (const TileWork work : {TileWork::l1, TileWork::l2}) {
      if (warp_.rank() == 0) {
        TileSlot& slot = shared_.tiles[next_.slot()];
        slot.work = work;
        slot.block = slot.column = slot.expert = slot.rows = slot.failed = slot.shared = 0;
        slot.height = height;
        slot.depth = kRehearsedStages;
        slot.end = next_stage_ + kRehearsedStages;
        slot.stages = kStages;
        slot.pieces = 2;
        slot.turn = next_.turn;
        shared_.untold[next_.turn % kUntoldTiles].failed = 1;
        arrive(&shared_.rows_ready[next_.slot()]);
        arrive(&shared_.tile_full[next_.slot()]);
      }
      next_stage_ += kRehearsedStages;
      next_.advance();
      ++rehearsed_;
    }
    warp_.sync();
  }

  // `first`: number of the first tile, claimed before the table was there: a claim needs nothing of it.
  MEGAMOE_FN void run(const Context& context, const Table& table, uint32_t first) {
    together_ = table.ready && cluster_size() == 2 && many_blocks(context, table.num_blocks);
    first_ = first;
    const bool runs = warp_.once([&] { return begin(context, table); });
    if (runs) {
      TileStep step = shared_.order.step(0);
      for (;; next_.advance()) {
        const uint32_t index = warp_.once([&] { return claim_next(context); });
        if (index >= shared_.order.count()) break;
        step = shared_.order.step_of(index, step);
        push(context, shared_.order.in_step(step, index));
      }
    }
    warp_.once([&] { return stop(context); });
  }

 private:
  static constexpr uint32_t kNoIndex = ~0u;
  static constexpr uint32_t kIdleNs = 40;

  // By the first lane: the order, and with many blocks an understanding with the partner. The two then take the tiles of two
  // blocks at a time, of which the leader claims the number, and keep step: a stage is free when both are done with it. Numbers
  // that both have claimed are done in their order. False when this CTA or its partner drains, or when the number of tokens
  // changed as they entered, so that only one rehearsed.
  MEGAMOE_FN bool begin(const Context& context, const Table& table) {
    if (!table.ready) tell_partner(shared_, kDrains);
    // Rehearsed tiles end: their stages are this CTA's alone, and who drains says at once in the first of the two slots to stop.
    while ((together_ || !table.ready) && told_ != next_.turn) {
      tell(context);
      __nanosleep(kIdleNs);
    }
    if (!table.ready) return false;
    shared_.order = tile_order(context, table.num_blocks, together_);
    const bool rehearsed = rehearsed_ != 0;
    if (together_) {  // before the partner may arrive; the stages that rehearsed tiles had are free
      for (uint32_t stage = 0; stage < kStages; ++stage)
        restart_barrier(&shared_.empty[stage], 2 * kMathWarps, stage < next_stage_);
      publish_barrier_init();
      fence_cluster();
    }
    tell_partner(shared_, ready_state(first_, rehearsed));
    if (!together_) return true;
    const uint32_t state = hear_partner(shared_);
    fence_cluster();
    if (state == kDrains || state % 2 != rehearsed) return false;
    const uint32_t mine = first_, other = state / 2 - 1;
    first_ = smaller(mine, other);
    second_ = mine + other - first_;
    shared_.partner_empty = cluster_address(shared_.empty, partner());
    return true;
  }

  // By the first lane: waits until the next tile may be pushed. Its number, or kNoIndex when the launch drains.
  MEGAMOE_FN uint32_t claim_next(const Context& context) {
    uint32_t index = 0;
    bool claimed = false;
    for (;;) {
      tell(context);
      if (waits_) wait_for_inputs(context);
      if (!claimed) claimed = look_for_claim(context, index);
      if (claimed && next_.turn - told_ < kUntoldTiles &&
          test_barrier(&shared_.tile_empty[next_.slot()], next_.parity() ^ 1))
        return index;
      __nanosleep(kIdleNs);
    }
  }

  // By the first lane: whether there is a number for the next tile: not before the load role, which waits for the inputs of this
  // one, is about to end it. A leader may be ahead of that.
  MEGAMOE_FN bool look_for_claim(const Context& context, uint32_t& index) {
    const uint32_t before = next_.turn - rehearsed_;  // tiles
    Mail& mail = shared_.claimed[before % kMailSlots];
    if (before != 0 && !test_barrier(&shared_.claim_next, (before - 1) & 1)) return false;
    if (together_ && cluster_rank() != 0) {
      if (!test_barrier(&mail.full, before / kMailSlots & 1)) return false;
      index = mail.word;
      mail.expect();
      return true;
    }
    if (before == 0) {
      index = first_;
    } else {
      index = aborted(context) ? kNoIndex : together_ && before == 1 ? second_ : take(context, Claim::tile);
    }
    if (together_) mail.send(index, partner());
    return true;
  }

  // By the first lane.
  MEGAMOE_FN bool stop(const Context& context) {
    shared_.tiles[next_.slot()].work = TileWork::stop;
    arrive(&shared_.tile_full[next_.slot()]);
    while (told_ != next_.turn) {
      tell(context);
      __nanosleep(kIdleNs);
    }
    hear_partner(shared_);
    return true;
  }

  // By the first lane: says of every tile that is stored that it is. Tiles are stored in the order of their turns.
  MEGAMOE_FN void tell(const Context& context) {
    while (told_ != next_.turn && test_barrier(&shared_.stored[told_ % kUntoldTiles], told_ / kUntoldTiles & 1)) {
      const UntoldTile& tile = shared_.untold[told_ % kUntoldTiles];
      ++told_;
      if (tile.failed) continue;
      if (tile.work == TileWork::l2) {
        advance_expert(context, tile.expert, 1, tile.expert_steps);
      } else if (context.stage >= Stage::l1_epilogue) {
        mark_l1_tile(context, tile.block, tile.column);
      }
    }
  }

  // With few blocks the memory is what all wait for, and it serves by requests under way. If the L1 tiles are a few more than
  // there are CTAs, the last ones run beside L2 tiles of the first group and have L2 tiles behind them: those before them then
  // ask for less.
  MEGAMOE_FN bool yields(const Context& context, const Tile& tile) const {
    const TileOrder& order = shared_.order;
    return tile.kind == TileKind::l2 && !together_ && !many_blocks(context, order.num_units) && order.groups() == 2 &&
           tile.unit < order.group_units;
  }

  // This CTA's block of a tile, and its partner's.
  struct Blocks {
    uint32_t mine, other;
  };
  MEGAMOE_FN Blocks blocks_of(const Context& context, const Tile& tile) const {
    if (!together_) return {tile.unit, kUnpaired};
    const uint32_t* pair = pair_blocks(context, tile.unit);
    return {pair[cluster_rank()], pair[partner()]};
  }

  // Tell the others what comes, so that weights are loaded at once. The weight scales, which every thread of the math role
  // needs for every stage, are there before a stage is full: its rows are loaded after wait_for_inputs() said so.
  MEGAMOE_FN void push(const Context& context, const Tile& tile) {
    TileSlot& slot = shared_.tiles[next_.slot()];
    const Problem& problem = shared_.problem;
    const Blocks blocks = blocks_of(context, tile);
    const bool idle = blocks.mine == kUnpaired;  // keeps step with the partner, and loads and stores nothing
    const PoolBlock block = idle ? PoolBlock{0, 0} : pool_blocks(context)[blocks.mine];
    const bool shared = !idle && blocks.other != kUnpaired && pool_blocks(context)[blocks.other].expert == block.expert;
    const bool l1 = tile.kind == TileKind::l1;
    const uint32_t depth = (l1 ? problem.hidden : problem.intermediate) / kBlockK;
    const uint32_t scale_rows = (l1 ? 2 * problem.intermediate : problem.hidden) / kScaleBlock;
    const uint32_t scale_row = (l1 ? 1 : 2) * tile.column;
    const uint32_t pieces = l1 ? 2 : smaller(2, scale_rows - scale_row);
    if (warp_.rank() == 0) {
      slot.work = l1 ? TileWork::l1 : TileWork::l2;
      slot.block = idle ? 0 : blocks.mine;
      slot.column = tile.column;
      slot.rows = slot.height = block.rows;
      slot.expert = block.expert;
      slot.depth = depth;
      slot.end = next_stage_ + depth;
      slot.pieces = pieces;
      slot.failed = idle;
      slot.stages = yields(context, tile) ? kLeanStages : kStages;
      slot.shared = shared;
      slot.turn = next_.turn;
      shared_.patience = {};
      arrive(&shared_.tile_full[next_.slot()]);
      shared_.untold[next_.turn % kUntoldTiles] = {slot.work, blocks.mine, tile.column, block.expert, idle,
                                                   l1 ? 0 : expert_steps(context, block.expert)};
    }
    const float* first = reinterpret_cast<const float*>(l1 ? shared_.launch.l1_sf : shared_.launch.l2_sf) +
                         (uint64_t(block.expert) * scale_rows + scale_row) * depth;
    const float* second = first + (l1 ? scale_rows / 2 : pieces - 1) * depth;
#pragma unroll 1
    for (uint32_t k = warp_.rank(); k < depth; k += warp_.size()) {
      const uint32_t place = (next_stage_ + k) % kMaxDepth;
      slot.scales[0][place] = __ldg(first + k);
      slot.scales[1][place] = __ldg(second + k);
    }
    next_stage_ += depth;
    __syncwarp();
    if (idle && warp_.rank() == 0) arrive(&shared_.rows_ready[next_.slot()]);
    waits_ = !idle;
  }

  // By the first lane: looks for the rows of the tile pushed last. When the launch drains, the others are told not to load
  // rows and not to store.
  MEGAMOE_FN void wait_for_inputs(const Context& context) {
    const uint32_t turn = next_.turn - 1;
    TileSlot& slot = shared_.tiles[turn % kTileSlots];
    const Look look = slot.work == TileWork::l1 ? look_for_rows(context, slot.block, shared_.patience)
                                                : look_for_l1_tiles(context, slot.block, shared_.patience);
    if (look == Look::not_yet) return;
    if (look == Look::drains) slot.failed = shared_.untold[turn % kUntoldTiles].failed = 1;
    arrive(&shared_.rows_ready[turn % kTileSlots]);
    waits_ = false;
  }

  Shared& shared_;
  WarpTeam<1>& warp_;
  RingPosition<kTileSlots> next_;  // the tile to push
  uint32_t next_stage_ = 0;        // number of the first stage of the tile to push
  uint32_t rehearsed_ = 0;         // tiles before the first real one
  uint32_t told_ = 0;              // turn of the tile to tell of
  bool waits_ = false;             // for the inputs of the tile before next_
  bool together_ = false;          // with the partner in the cluster
  uint32_t first_ = 0, second_ = 0;  // numbers that were claimed before the table was there
};

}  // namespace megamoe::sm90
