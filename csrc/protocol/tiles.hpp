// The static order in which output tiles are claimed, and what a tile waits for.
#pragma once
#include "done.hpp"

namespace megamoe {

enum class TileKind : uint32_t { l1, l2 };

struct Tile {
  TileKind kind;
  uint32_t unit;    // block, or pair of blocks
  uint32_t column;  // index of the tile within the block's row of tiles
};

// A stretch of the order: the L1 tiles of one group and the L2 tiles of the group `lag` before it.
struct TileStep {
  uint32_t number;
  uint32_t l1_first, l1_units, l2_first, l2_units;
  uint32_t begin, end;  // numbers of its first tile, and of the first one behind it
};

// Units are blocks, or pairs of blocks, and are taken in groups. The order is: L1 of group 0 .. lag-1, then for every further
// group g the L1 tiles of g and the L2 tiles of g - lag, then the L2 tiles that remain. Within a group the unit moves fastest,
// so that blocks of one expert use a weight tile one after the other. An L2 tile waits only for L1 tiles that come before it.
struct TileOrder {
  uint32_t num_units;
  uint32_t l1_tiles;  // of a block
  uint32_t l2_tiles;  // of a block; 0 in a launch that stops before L2
  uint32_t group_units;
  uint32_t lag;  // groups
  const uint32_t* groups_given = nullptr;  // as pair_groups(), in place of groups of `group_units`

  MEGAMOE_FN uint64_t count() const { return uint64_t(num_units) * (l1_tiles + l2_tiles); }
  MEGAMOE_FN uint32_t groups() const {
    return groups_given != nullptr ? groups_given[0] : ceil_div(num_units, group_units);
  }
  // Units of the groups before this one; group <= groups().
  MEGAMOE_FN uint32_t units_before(uint32_t group) const {
    return groups_given != nullptr ? groups_given[1 + group] : smaller(group * group_units, num_units);
  }

  MEGAMOE_FN TileStep step(uint32_t number) const {
    const uint32_t all = groups();
    const auto before = [&](uint32_t group) { return units_before(smaller(group, all)); };
    const auto lagging = [&](uint32_t group) { return group < lag ? 0 : before(group - lag); };
    TileStep step{number, before(number), 0, lagging(number), 0, 0, 0};
    step.l1_units = before(number + 1) - step.l1_first;
    step.l2_units = lagging(number + 1) - step.l2_first;
    step.begin = step.l1_first * l1_tiles + step.l2_first * l2_tiles;  // below 2^32, as all tiles together
    step.end = step.begin + step.l1_units * l1_tiles + step.l2_units * l2_tiles;
    return step;
  }

  // The step of tile number `index` < count(), from a step that is not behind it.
  MEGAMOE_FN TileStep step_of(uint32_t index, TileStep from) const {
    while (index >= from.end) from = step(from.number + 1);
    return from;
  }
  // Tile number `index` of this step.
  MEGAMOE_FN Tile in_step(const TileStep& step, uint32_t index) const {
    const uint32_t rest = index - step.begin, l1_here = step.l1_units * l1_tiles;
    return rest < l1_here ? tile(TileKind::l1, step.l1_first, step.l1_units, rest)
                          : tile(TileKind::l2, step.l2_first, step.l2_units, rest - l1_here);
  }
  // Tile number `index` < count(), looked for from the first step on.
  MEGAMOE_FN Tile at(uint32_t index) const { return in_step(step_of(index, step(0)), index); }

 private:
  MEGAMOE_FN static Tile tile(TileKind kind, uint32_t first, uint32_t units, uint32_t rest) {
    return {kind, first + rest % units, rest / units};
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
