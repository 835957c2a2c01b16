// At the owner: the blocks of the pool two by two, for targets in which two workers take tiles of two blocks together and share
// their weights. Two blocks of a pair are of one expert wherever that has two of one kind left, tall (more than half full) or
// short: tiles of one kind take equally long. What an expert has over pairs up with the next that has the like over.
#pragma once
#include "pool.hpp"

namespace megamoe {

constexpr uint32_t kUnpaired = ~0u;

// Groups of pairs whose tiles are claimed together, so that the weights of an expert are read from memory once: an expert of at
// least kOwnGroup pairs begins a group, and another after at most kMostPairs; smaller ones begin one about every kGroupPairs.
constexpr uint32_t kGroupPairs = 8, kOwnGroup = 5, kMostPairs = 12;

// Up to this many blocks an expert, its weights are read once or twice whoever takes which tile, and no worker should wait for
// another.
constexpr uint32_t kFewBlocksPerExpert = 2;

MEGAMOE_FN bool many_blocks(const Context& context, uint32_t num_blocks) {
  return num_blocks > kFewBlocksPerExpert * context.problem->experts_per_rank;
}

// The two blocks of a pair; the second of the last one may be kUnpaired.
MEGAMOE_FN uint32_t* pair_blocks(const Context& context, uint32_t pair) {
  return context.own<uint32_t>(context.layout->pair_blocks) + 2 * pair;
}
// Number of groups, the first pair of each, number of pairs.
MEGAMOE_FN uint32_t* pair_groups(const Context& context) { return context.own<uint32_t>(context.layout->pair_groups); }

// By the whole team, from expert_rows() and expert_blocks(); its scratch must be free.
template <class Team>
MEGAMOE_FN void build_pairs(const Context& context, Team& team) {
  const auto& problem = *context.problem;
  // Blocks that wait for another of their kind, by their number. A place is reused 1024 blocks of the kind later; a round has
  // less.
  constexpr uint32_t places = kRoutesPerChunk / 2;
  uint32_t* tall_left = team.scratch().words;
  uint32_t* short_left = tall_left + places;
  uint32_t num_whole = 0, num_groups = 0, num_tall = 0, num_short = 0;  // pairs of one expert, groups, blocks left over so far
  MEGAMOE_ROLLED
  for (uint32_t round = 0; round < problem.experts_per_rank; round += team.size()) {
    const uint32_t expert = round + team.rank();
    const bool mine = expert < problem.experts_per_rank;
    const uint32_t rows = mine ? expert_rows(context, expert) : 0;
    const uint32_t first_block = mine ? expert_blocks(context)[expert] : 0;
    const uint32_t blocks = ceil_div(rows, problem.block_m);
    const uint32_t last_block = first_block + blocks - 1;
    const bool ends_short = blocks > 0 && rows - (blocks - 1) * problem.block_m <= problem.block_m / 2;
    const uint32_t tall = blocks - ends_short;
    const bool odd = tall % 2 == 1;
    const PartialSum whole = team.exclusive_sum(tall / 2);
    const PartialSum left = team.exclusive_sum(uint32_t(odd) | uint32_t(ends_short) << 16);
    const uint32_t tall_number = num_tall + (left.before & 0xffff), short_number = num_short + (left.before >> 16);
    const bool closes_tall = odd && tall_number % 2 == 1, closes_short = ends_short && short_number % 2 == 1;
    // Of the experts before: whole pairs, and two blocks over make one.
    const uint32_t first_pair = num_whole + whole.before + tall_number / 2 + short_number / 2;
    uint32_t& other_tall = tall_left[tall_number / 2 % places];
    uint32_t& other_short = short_left[short_number / 2 % places];
    if (odd && !closes_tall) other_tall = first_block + tall - 1;
    if (ends_short && !closes_short) other_short = last_block;
    team.sync();
    uint32_t next = first_pair;
    const auto add = [&](uint32_t first, uint32_t second) {
      uint32_t* pair = pair_blocks(context, next++);
      pair[0] = first;
      pair[1] = second;
    };
    MEGAMOE_ROLLED
    for (uint32_t block = 0; block + 1 < tall; block += 2) add(first_block + block, first_block + block + 1);
    if (closes_tall) add(other_tall, first_block + tall - 1);
    if (closes_short) add(other_short, last_block);

    const uint32_t here = next - first_pair;
    // A small expert starts a group where a multiple of kGroupPairs lies among its pairs.
    const bool starts = ceil_div(first_pair, kGroupPairs) * kGroupPairs < next;
    const uint32_t groups = here >= kOwnGroup ? ceil_div(here, kMostPairs) : starts;
    const PartialSum started = team.exclusive_sum(groups);
    MEGAMOE_ROLLED
    for (uint32_t group = 0; group < groups; ++group)
      pair_groups(context)[1 + num_groups + started.before + group] = first_pair + group * ceil_div(here, groups);

    num_whole += whole.total;
    num_groups += started.total;
    num_tall += left.total & 0xffff;
    num_short += left.total >> 16;
  }
  if (team.rank() != 0) return;
  uint32_t num_pairs = num_whole + num_tall / 2 + num_short / 2;
  const uint32_t last_tall = num_tall % 2 == 1 ? tall_left[num_tall / 2 % places] : kUnpaired;
  const uint32_t last_short = num_short % 2 == 1 ? short_left[num_short / 2 % places] : kUnpaired;
  if (last_tall != kUnpaired || last_short != kUnpaired) {
    if (num_groups == 0) pair_groups(context)[1 + num_groups++] = 0;
    uint32_t* pair = pair_blocks(context, num_pairs++);
    pair[0] = last_tall != kUnpaired ? last_tall : last_short;
    pair[1] = last_tall != kUnpaired ? last_short : kUnpaired;
  }
  pair_groups(context)[0] = num_groups;
  pair_groups(context)[1 + num_groups] = num_pairs;
}

}  // namespace megamoe
