// At the owner: from the counts of all sources to the order of the pool. Rows are ordered by (local expert,
// (source - me) mod R, token, slot); every expert starts on a block boundary; the order never depends on timing.
#pragma once
#include "faults.hpp"
#include "team.hpp"

namespace megamoe {

struct PoolBlock {
  uint32_t expert;  // local
  uint32_t rows;    // in use; the rest of the block is padding
};

MEGAMOE_FN uint32_t rotated_source(const Context& context, uint32_t step) {
  return (context.rank + step) % context.problem->num_ranks;
}
MEGAMOE_FN PoolBlock* pool_blocks(const Context& context) {
  return context.own<PoolBlock>(context.layout->pool_blocks);
}
// Rows of an expert that come from the sources before `step`, in pool order.
MEGAMOE_FN uint32_t* source_rows(const Context& context, uint32_t expert) {
  return context.own<uint32_t>(context.layout->source_rows) + expert * context.layout->source_rows.stride[0];
}
MEGAMOE_FN uint32_t* expert_blocks(const Context& context) {
  return context.own<uint32_t>(context.layout->expert_blocks);
}
MEGAMOE_FN uint32_t expert_rows(const Context& context, uint32_t expert) {
  return source_rows(context, expert)[context.problem->num_ranks];
}

// Routes that a source sends to a local expert in this epoch. A source without routes for anyone who is still busy
// may have gone on to a later epoch: it ended this one, so it sent nothing here.
MEGAMOE_FN uint32_t routes_in_epoch(const Context& context, uint64_t word) {
  if constexpr (mutated(Mutation::later_epoch_read_as_this) || mutated(Mutation::wait_for_stale_epoch))
    return value_of(word);
  return stamp_of(word) == context.epoch ? value_of(word) : 0;
}

// Each thread waits for the words it will add up. False when the launch drains.
template <class Team>
MEGAMOE_FN bool wait_for_counts(const Context& context, Team& team) {
  const auto& problem = *context.problem;
  const auto& layout = *context.layout;
  const uint64_t wanted = context.epoch - (mutated(Mutation::wait_for_stale_epoch) ? 1 : 0);
  bool reached = true;
  const uint64_t started = now_ns();
  const uint32_t words = problem.experts_per_rank * problem.num_ranks;
  for (uint32_t item = team.rank(); item < words && reached; item += team.size()) {
    const uint32_t source = rotated_source(context, item % problem.num_ranks);
    const uint32_t expert = item / problem.num_ranks;
    uint64_t* word = context.own<uint64_t>(layout.route_count) + source * layout.route_count.stride[0] + expert;
    const auto waited = wait_until(context, SystemRef<uint64_t>(*word),
                                   [&](uint64_t seen) { return stamp_of(seen) >= wanted; },
                                   {FaultKind::timeout, WaitFor::routes, source, expert, context.epoch, 0, 0}, started);
    reached = waited.reached;
    // Remembered here because the word itself may move on to the source's next epoch.
    if (reached) source_rows(context, expert)[item % problem.num_ranks] = routes_in_epoch(context, waited.seen);
  }
  return team.all(reached);
}

// The claimed table: counts, prefix sums and blocks. `recv_stats` (or null) accumulates the routes of each local expert.
// False when the launch drains.
template <class Team>
MEGAMOE_FN bool build_table(const Context& context, Team& team, int32_t* recv_stats) {
  if (!team.once([&] { return take(context, Claim::table) == 0; })) return true;
  if (!wait_for_counts(context, team)) return false;
  const auto& problem = *context.problem;
  uint32_t* first_block = expert_blocks(context);
  for (uint32_t expert = team.rank(); expert < problem.experts_per_rank; expert += team.size()) {
    uint32_t* rows = source_rows(context, expert);
    uint32_t total = 0;
    for (uint32_t step = 0; step < problem.num_ranks; ++step) {
      const uint32_t routes = rows[step];
      rows[step] = total;
      total += routes;
    }
    rows[problem.num_ranks] = total;
    first_block[expert] = ceil_div(total, problem.block_m);
    SystemRef<uint64_t>(context.own<uint64_t>(context.layout->expert_recv_count_sum)[expert])
        .store(stamped(context.epoch, total), release);
    if (recv_stats != nullptr) recv_stats[expert] += int32_t(total);
  }
  team.sync();
  const uint32_t num_blocks = team.exclusive_sum(first_block, problem.experts_per_rank);
  const auto announce = [&] {
    perturb(Point::publish);
    DeviceRef<uint64_t>(*context.own<uint64_t>(context.layout->table_ready))
        .store(stamped(context.epoch, num_blocks), release);
    return true;
  };
  team.once([&] { return first_block[problem.experts_per_rank] = num_blocks; });
  team.sync();
  if (num_blocks > problem.num_pool_blocks) {
    team.once([&] {
      record_fault(context, {FaultKind::overflow, WaitFor::nothing, context.rank, 0, problem.num_pool_rows,
                             uint64_t(num_blocks) * problem.block_m, 0});
      raise_abort(context);
      return true;
    });
    return false;
  }
  if constexpr (mutated(Mutation::table_before_blocks)) team.once(announce);
  for (uint32_t expert = team.rank(); expert < problem.experts_per_rank; expert += team.size()) {
    uint32_t rows = expert_rows(context, expert);
    perturb(Point::store);
    for (uint32_t block = first_block[expert]; rows > 0; ++block) {
      const uint32_t here = smaller(rows, problem.block_m);
      pool_blocks(context)[block] = {expert, here};
      rows -= here;
    }
  }
  team.sync();
  if constexpr (!mutated(Mutation::table_before_blocks)) team.once(announce);
  return true;
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
