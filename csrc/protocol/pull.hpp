// At the owner: fetch the rows of the pool from their sources, in claimed runs.
#pragma once
#include "done.hpp"
#include "routes.hpp"
#include "table.hpp"

namespace megamoe {

// Where one pool row comes from and goes to.
struct PulledRow {
  uint32_t pool_row;
  uint32_t source;
  uint32_t token;
  uint32_t slot;
};

// What a source has of a local expert's rows: the first of them, and where in its list they begin; and the expert's first block.
// Loaded together. Relaxed: a source that sent nothing here may be writing where its list of its next epoch begins.
struct SourcePart {
  uint32_t first_row, list_base, first_block;
};
MEGAMOE_FN SourcePart source_part(const Context& context, uint32_t expert, uint32_t step) {
  const Region& bases = context.layout->route_base;
  uint32_t& base = context.own<uint32_t>(bases)[rotated_source(context, step) * bases.stride[0] + expert];
  return {source_rows(context, expert)[step], SystemRef<uint32_t>(base).load(relaxed), expert_blocks(context)[expert]};
}

struct ListPlace {
  uint32_t source, entry;
};

// Where a row stands in its source's list: that of the last source whose rows begin at or before it. `part_of(expert, step)` is
// asked for all steps in order.
template <class PartOf>
MEGAMOE_FN ListPlace list_place(const Context& context, uint32_t block, uint32_t row_of_block, PartOf part_of) {
  const uint32_t expert = pool_blocks(context)[block].expert;
  ListPlace place{0, 0};
  for (uint32_t step = 0; step < context.problem->num_ranks; ++step) {
    const SourcePart part = part_of(expert, step);
    const uint32_t row = (block - part.first_block) * context.problem->block_m + row_of_block;
    if (part.first_row <= row) place = {rotated_source(context, step), part.list_base + row - part.first_row};
  }
  return place;
}

// Look a row up in its source's list. Reads remote memory: only under a claim.
MEGAMOE_FN PulledRow locate_row(const Context& context, uint32_t block, uint32_t row_of_block, const ListPlace& place) {
  const auto entry = context.peer<RouteListEntry>(place.source, context.layout->route_list)[place.entry];
  return {block * context.problem->block_m + row_of_block, place.source, entry.token, entry.slot};
}

// The weight is loaded before and stored after a row's other loads, with which it travels.
MEGAMOE_FN float load_row_weight(const Context& context, const PulledRow& row) {
  return context.peer<float>(row.source, context.layout->topk_weights)[row.token * context.problem->num_topk + row.slot];
}

// Metadata and weight of a row; the activations are the target's to copy.
MEGAMOE_FN void store_row_metadata(const Context& context, const PulledRow& row, float weight) {
  const auto& layout = *context.layout;
  uint32_t* metadata =
      context.own<uint32_t>(layout.token_src_metadata) + row.pool_row * layout.token_src_metadata.stride[0];
  metadata[0] = row.source;
  metadata[1] = row.token;
  metadata[2] = row.slot;
  context.own<float>(layout.l1_topk_weights)[row.pool_row] = weight;
}

// Blocks that are pulled side by side: few, since a launch begins with tiles of the first blocks on all workers, and these wait
// for all their rows.
constexpr uint32_t kPullWindow = 4;

constexpr uint32_t kPullDrains = ~0u;
constexpr uint32_t kNoBlock = ~0u;

// Rows of a run in this launch. The first tiles wait for whole blocks, so all workers should share the first few. With full blocks
// they do so in runs of kRowsPerPull; blocks of at most half as many rows have too few such runs, and are cut finer, unless one
// run is all they have. The first block decides for all: every worker sees the same.
MEGAMOE_FN uint32_t rows_per_run(const Context& context, uint32_t num_blocks) {
  const uint32_t rows = num_blocks == 0 ? 0 : pool_blocks(context)[0].rows;
  return rows > kRowsPerPull && rows <= context.problem->block_m / 2 ? kRowsPerPull / 2 : kRowsPerPull;
}

struct PullRun {
  uint32_t block;  // kNoBlock: past the last run
  uint32_t first_row;
};

// Run number `index`, of runs of `run_rows`: windows of blocks one after the other, within a window the first runs of all its
// blocks first.
MEGAMOE_FN PullRun pull_run(const Context& context, uint32_t index, uint32_t num_blocks, uint32_t run_rows) {
  const uint32_t runs_per_block = ceil_div(context.problem->block_m, run_rows);
  const uint32_t window = index / (kPullWindow * runs_per_block);
  const uint32_t first_block = window * kPullWindow;
  if (first_block >= num_blocks) return {kNoBlock, 0};
  const uint32_t blocks = smaller(kPullWindow, num_blocks - first_block);
  const uint32_t rest = index - first_block * runs_per_block;
  if (rest >= blocks * runs_per_block) return {kNoBlock, 0};
  return {first_block + rest % blocks, rest / blocks * run_rows};
}

// The next run to pull, one answer for the whole team; kPullDrains when the launch drains.
template <class Team>
MEGAMOE_FN uint32_t claim_pull_run(const Context& context, Team& team) {
  return team.once([&] {
    const bool drains = aborted(context);
    const uint32_t next = take(context, Claim::pull);
    return drains ? kPullDrains : next;
  });
}

// Pull until no run is left. `copy_rows(block, first_row, rows)` copies the activations, scales, weights and metadata of a run
// and returns when the stores of every thread of the team are complete. False when the launch drains.
template <class Team, class CopyRows>
MEGAMOE_FN bool pull_rows(const Context& context, Team& team, CopyRows copy_rows) {
  uint32_t index = claim_pull_run(context, team);  // before the table is there: a claim needs nothing of it
  const Table table = wait_for_table(context, team);
  if (!table.ready) return false;
  // The sources' activations were written by generic stores and acquired with the table.
  if (team.rank() == 0) fence_generic_to_async_proxy();
  const uint32_t run_rows = rows_per_run(context, table.num_blocks);
  for (;; index = claim_pull_run(context, team)) {
    const auto [block, first_row] = pull_run(context, index, table.num_blocks, run_rows);
    if (block == kNoBlock) return index != kPullDrains;
    const PoolBlock pool_block = pool_blocks(context)[block];
    if (first_row >= pool_block.rows) continue;
    const uint32_t rows = smaller(run_rows, pool_block.rows - first_row);
    copy_rows(block, first_row, rows);
    team.sync();
    team.once([&] {
      perturb(Point::arrive);
      constexpr auto order = mutated(Mutation::relaxed_arrival) ? relaxed : acquire_release;
      uint32_t arrived = rows;
      if constexpr (mutated(Mutation::arrival_one_too_few)) arrived -= first_row == 0 ? 1 : 0;
      if constexpr (mutated(Mutation::arrival_one_too_many)) arrived += first_row == 0 ? 1 : 0;
      DeviceRef<uint32_t>(context.banked<uint32_t>(context.layout->l1_arrival_count)[block])
          .fetch_add(arrived, order);
      if (!context.has_l2()) advance_expert(context, pool_block.expert, rows, expert_steps(context, pool_block.expert));
      return true;
    });
  }
}

}  // namespace megamoe
