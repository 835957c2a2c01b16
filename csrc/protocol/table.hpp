// At the owner: from the counts of all sources to the blocks of the pool, and their pairs.
#pragma once
#include "pairs.hpp"

namespace megamoe {

// Routes that a source sends to a local expert in this epoch. A source without routes for anyone who is still busy
// may have gone on to a later epoch: it ended this one, so it sent nothing here.
MEGAMOE_FN uint32_t routes_in_epoch(const Context& context, uint64_t word) {
  if constexpr (mutated(Mutation::later_epoch_read_as_this) || mutated(Mutation::wait_for_stale_epoch))
    return value_of(word);
  return stamp_of(word) == context.epoch ? value_of(word) : 0;
}

// Wait for what every source sends to `count` local experts from `first` on. Afterwards a row of num_ranks words of the scratch
// has an expert's routes in pool order. False when the launch drains.
template <class Team>
MEGAMOE_FN bool wait_for_counts(const Context& context, Team& team, uint32_t first, uint32_t count) {
  const auto& layout = *context.layout;
  const uint32_t ranks = context.problem->num_ranks;
  const uint64_t wanted = context.epoch - (mutated(Mutation::wait_for_stale_epoch) ? 1 : 0);
  bool reached = true;
  const uint64_t started = now_ns();
  MEGAMOE_ROLLED
  for (uint32_t item = team.rank(); item < count * ranks && reached; item += team.size()) {
    const uint32_t source = rotated_source(context, item % ranks);
    const uint32_t expert = first + item / ranks;
    uint64_t* word = context.own<uint64_t>(layout.route_count) + source * layout.route_count.stride[0] + expert;
    const auto waited = wait_until(
        context, SystemRef<uint64_t>(*word), [&](uint64_t seen) { return stamp_of(seen) >= wanted; },
        {FaultKind::timeout, WaitFor::routes, source, expert, context.epoch, 0, 0}, started);
    reached = waited.reached;
    // Remembered here because the word itself may move on to the source's next epoch.
    if (reached) team.scratch().words[item] = routes_in_epoch(context, waited.seen);
  }
  return team.all(reached);
}

MEGAMOE_FN void announce_table(const Context& context, uint32_t num_blocks) {
  perturb(Point::publish);
  DeviceRef<uint64_t>(*context.own<uint64_t>(context.layout->table_ready))
      .store(stamped(context.epoch, num_blocks), release);
}

// The source prefix of a local expert, from its row of the scratch. Returns its routes.
MEGAMOE_FN uint32_t store_source_rows(const Context& context, const uint32_t* routes, uint32_t expert) {
  uint32_t* rows = source_rows(context, expert);
  uint32_t total = 0;
  MEGAMOE_ROLLED
  for (uint32_t step = 0; step < context.problem->num_ranks; ++step) {
    rows[step] = total;
    total += routes[step];
  }
  rows[context.problem->num_ranks] = total;
  return total;
}

// The blocks of a local expert, as far as the pool has room.
MEGAMOE_FN void store_blocks(const Context& context, uint32_t expert, uint32_t rows, uint32_t first_block) {
  const auto& problem = *context.problem;
  perturb(Point::store);
  MEGAMOE_ROLLED
  for (uint32_t block = first_block; rows > 0 && block < problem.num_pool_blocks; ++block) {
    const uint32_t here = smaller(rows, problem.block_m);
    pool_blocks(context)[block] = {expert, here};
    rows -= here;
  }
}

// What the host reads of the table. `recv_stats` (or null) accumulates the routes of each local expert.
template <class Team>
MEGAMOE_FN void store_received(const Context& context, Team& team, int32_t* recv_stats) {
  MEGAMOE_ROLLED
  for (uint32_t expert = team.rank(); expert < context.problem->experts_per_rank; expert += team.size()) {
    const uint32_t total = expert_rows(context, expert);
    SystemRef<uint64_t>(context.own<uint64_t>(context.layout->expert_recv_count_sum)[expert])
        .store(stamped(context.epoch, total), relaxed);
    if (recv_stats != nullptr) recv_stats[expert] += int32_t(total);
  }
}

// The claimed table: counts, prefix sums and blocks. False when the launch drains.
template <class Team>
MEGAMOE_FN bool build_table(const Context& context, Team& team, int32_t* recv_stats) {
  if (!team.once([&] { return take(context, Claim::table) == 0; })) return true;
  const auto& problem = *context.problem;
  const uint32_t experts = problem.experts_per_rank, at_once = kRoutesPerChunk / problem.num_ranks;
  uint32_t num_blocks = 0;
  for (uint32_t first = 0; first < experts; first += at_once) {
    const uint32_t count = smaller(at_once, experts - first);
    if (first != 0) team.sync();  // the scratch is free again
    if (!wait_for_counts(context, team, first, count)) return false;
    for (uint32_t round = 0; round < count; round += team.size()) {
      const uint32_t of_window = round + team.rank(), expert = first + of_window;
      const bool mine = of_window < count;
      const uint32_t rows =
          mine ? store_source_rows(context, &team.scratch().words[of_window * problem.num_ranks], expert) : 0;
      const PartialSum blocks = team.exclusive_sum(ceil_div(rows, problem.block_m));
      const uint32_t first_block = num_blocks + blocks.before;
      num_blocks += blocks.total;
      if constexpr (mutated(Mutation::table_before_blocks)) {
        if (team.rank() == 0 && first + round + team.size() >= experts) announce_table(context, num_blocks);
      }
      if (mine) {
        expert_blocks(context)[expert] = first_block;
        store_blocks(context, expert, rows, first_block);
      }
    }
  }
  if (team.rank() == 0) expert_blocks(context)[experts] = num_blocks;
  team.sync();
  const bool fits = num_blocks <= problem.num_pool_blocks;
  if (fits && many_blocks(context, num_blocks)) {
    build_pairs(context, team);
    team.sync();
  }
  if (team.rank() == 0) {
    if (!fits) {
      record_fault(context, {FaultKind::overflow, WaitFor::nothing, context.rank, 0, problem.num_pool_rows,
                             uint64_t(num_blocks) * problem.block_m, 0});
      raise_abort(context);
    } else if constexpr (!mutated(Mutation::table_before_blocks)) {
      announce_table(context, num_blocks);
    }
  }
  store_received(context, team, recv_stats);  // for after the launch: nobody waits for it
  return fits;
}

struct Table {
  bool ready;  // false: the launch drains
  uint32_t num_blocks;
};

template <class Team>
MEGAMOE_FN Table wait_for_table(const Context& context, Team& team) {
  return team.once([&] {
    DeviceRef<uint64_t> word(*context.own<uint64_t>(context.layout->table_ready));
    const auto waited = wait_until(context, word, [&](uint64_t seen) { return stamp_of(seen) == context.epoch; },
                                   {FaultKind::timeout, WaitFor::table, context.rank, 0, context.epoch, 0, 0});
    return Table{waited.reached, value_of(waited.seen)};
  });
}

}  // namespace megamoe
