// An expert is done when all reads from the sources and all results for them are performed; they are told once.
#pragma once
#include "pool.hpp"

namespace megamoe {

// Steps after which an expert is done: its L2 tiles, or in a launch that stops before L2 its pulled rows.
MEGAMOE_FN uint32_t expert_steps(const Context& context, uint32_t expert) {
  if (!context.has_l2()) return expert_rows(context, expert);
  const uint32_t* first = expert_blocks(context);
  return (first[expert + 1] - first[expert]) * context.problem->num_l2_tiles;
}

// Count finished steps of an expert, of `all` (expert_steps()). Called by one thread, after a barrier over the threads whose
// stores are completed. Whoever completes the count has acquired every other step and passes all of it on with one release to
// each source.
MEGAMOE_FN void advance_expert(const Context& context, uint32_t expert, uint32_t steps, uint32_t all) {
  perturb(Point::tile_done);
  constexpr auto order = mutated(Mutation::relaxed_tile_counter) ? relaxed : acquire_release;
  DeviceRef<uint32_t> progress(context.banked<uint32_t>(context.layout->expert_progress)[expert]);
  if (progress.fetch_add(steps, order) + steps != all) return;
  fence_before_releases();
  const uint32_t* rows = source_rows(context, expert);
  const uint32_t global = context.first_expert() + expert;
  for (uint32_t step = 0; step < context.problem->num_ranks; ++step) {
    if (rows[step + 1] == rows[step]) continue;  // sent nothing here and may be in a later epoch
    const uint32_t source = rotated_source(context, step);
    perturb(Point::publish);
    SystemRef<uint64_t>(context.peer<uint64_t>(source, context.layout->expert_done)[global])
        .store(stamped(context.epoch, 1), fenced_release);
  }
}

}  // namespace megamoe
