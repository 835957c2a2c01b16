// The static order in which output tiles are claimed, and what a tile waits for.
#pragma once
#include "done.hpp"

namespace megamoe {

enum class TileKind : uint32_t { l1, l2 };

struct Tile {
  TileKind kind;
  uint32_t block;
  uint32_t column;  // index of the tile within the block's row of tiles
};

// Blocks are taken in groups. The order is: L1 of group 0 .. lag-1, then for every further group g the L1 tiles of g
// and the L2 tiles of g - lag, then the L2 tiles that remain. Within a group the block moves fastest, so that blocks
// of one expert use a weight tile one after the other. An L2 tile waits only for L1 tiles that come before it.
struct TileOrder {
  uint32_t num_blocks;
  uint32_t l1_tiles;  // of a block
  uint32_t l2_tiles;  // of a block; 0 in a launch that stops before L2
  uint32_t group_blocks;
  uint32_t lag;  // groups

  MEGAMOE_FN uint64_t count() const { return uint64_t(num_blocks) * (l1_tiles + l2_tiles); }
  MEGAMOE_FN uint32_t groups() const { return ceil_div(num_blocks, group_blocks); }
  MEGAMOE_FN uint32_t blocks_of(uint32_t group) const {
    return smaller(group_blocks, num_blocks - group * group_blocks);
  }

  // Tile number `index`, index < count().
  MEGAMOE_FN Tile at(uint64_t index) const {
    const uint64_t l1_of_group = uint64_t(group_blocks) * l1_tiles;
    const uint64_t l2_of_group = uint64_t(group_blocks) * l2_tiles;
    const uint32_t lead = smaller(lag, groups());  // groups whose L1 tiles come before any L2 tile
    const uint64_t all_l1 = uint64_t(num_blocks) * l1_tiles;
    const uint64_t lead_tiles = lead == groups() ? all_l1 : lead * l1_of_group;
    if (index < lead_tiles) return in_group(TileKind::l1, uint32_t(index / l1_of_group), index % l1_of_group);
    index -= lead_tiles;
    // Steps of one group of L1 and one of L2. Only the last group can be short, and its L1 comes in the last step.
    const uint32_t steps = groups() - lead;
    const uint32_t step = steps == 0 ? 0 : uint32_t(index / (l1_of_group + l2_of_group));
    if (step < steps) {
      const uint64_t rest = index - step * (l1_of_group + l2_of_group);
      const uint64_t l1_here = uint64_t(blocks_of(lead + step)) * l1_tiles;
      if (rest < l1_here) return in_group(TileKind::l1, lead + step, rest);
      if (rest < l1_here + l2_of_group) return in_group(TileKind::l2, step, rest - l1_here);
    }
    // What remains is L2 only, of the last `lead` groups.
    const uint64_t before = steps == 0 ? 0 : all_l1 - lead_tiles + steps * l2_of_group;
    const uint64_t rest = index - before;
    return in_group(TileKind::l2, steps + uint32_t(rest / l2_of_group), rest % l2_of_group);
  }

 private:
  MEGAMOE_FN Tile in_group(TileKind kind, uint32_t group, uint64_t rest) const {
    const uint32_t blocks = blocks_of(group);
    return {kind, group * group_blocks + uint32_t(rest % blocks), uint32_t(rest / blocks)};
  }
};

// What a tile waits for comes in two forms: look_for_... polls once, wait_for_... stays until it is there; false when the
// launch drains. Both are called by one thread.

template <class LookFor>
MEGAMOE_FN bool keep_looking(const Context& context, WaitFor wait, LookFor look_for) {
  perturb(Point::wait);
  const uint32_t doublings = pause_doublings(context, wait);
  Patience patience;
  for (;;) {
    const Look look = look_for(patience);
    if (look != Look::not_yet) return look == Look::reached;
    pause(patience.polls, doublings);
  }
}

// All rows of the block have been pulled.
MEGAMOE_FN Look look_for_rows(const Context& context, uint32_t block, Patience& patience) {
  const uint32_t rows = pool_blocks(context)[block].rows;
  uint32_t* word = context.banked<uint32_t>(context.layout->l1_arrival_count) + block;
  return look_at(context, DeviceRef<uint32_t>(*word), [&](uint32_t seen) { return seen >= rows; },
                 {FaultKind::timeout, WaitFor::rows, context.rank, block, rows, 0, 0}, patience);
}
MEGAMOE_FN bool wait_for_rows(const Context& context, uint32_t block) {
  return keep_looking(context, WaitFor::rows,
                      [&](Patience& patience) { return look_for_rows(context, block, patience); });
}

MEGAMOE_FN uint64_t* mask_words(const Context& context, uint32_t block) {
  return context.banked<uint64_t>(context.layout->l2_arrival_mask) + block * context.problem->num_mask_words;
}
// Bits of mask word `word` once every L1 tile of a block is there.
MEGAMOE_FN uint64_t full_mask(const Context& context, uint32_t word) {
  const uint32_t bits = smaller(64, context.problem->num_l1_tiles - 64 * word);
  return bits == 64 ? ~0ull : (1ull << bits) - 1;
}

// All L1 tiles of the block are stored.
MEGAMOE_FN Look look_for_l1_tiles(const Context& context, uint32_t block, Patience& patience) {
  for (uint32_t word = 0; word < context.problem->num_mask_words; ++word) {
    const uint64_t full = full_mask(context, word);
    const Look look = look_at(context, DeviceRef<uint64_t>(mask_words(context, block)[word]),
                              [&](uint64_t seen) { return seen == full; },
                              {FaultKind::timeout, WaitFor::l1_tiles, context.rank, block, full, 0, 0}, patience);
    if (look != Look::reached) return look;
  }
  return Look::reached;
}
MEGAMOE_FN bool wait_for_l1_tiles(const Context& context, uint32_t block) {
  return keep_looking(context, WaitFor::l1_tiles,
                      [&](Patience& patience) { return look_for_l1_tiles(context, block, patience); });
}

// An L1 tile is quantised and stored. Called by one thread, after a barrier over the threads that stored.
MEGAMOE_FN void mark_l1_tile(const Context& context, uint32_t block, uint32_t column) {
  perturb(Point::mark_tile);
  constexpr auto order = mutated(Mutation::relaxed_mask) ? relaxed : acquire_release;
  if constexpr (mutated(Mutation::mask_bit_missing)) {
    if (column == 0) return;
  }
  DeviceRef<uint64_t>(mask_words(context, block)[column / 64]).fetch_or(1ull << column % 64, order);
}

}  // namespace megamoe
