// At the source again: a token is reduced when the experts of all its routes are done.
#pragma once
#include "routes.hpp"

namespace megamoe {

// Wait for the experts of one token's routes, each thread for its own. False when the launch drains.
template <class Team>
MEGAMOE_FN bool wait_for_token(const Context& context, Team& team, uint32_t token) {
  const uint32_t topk = context.problem->num_topk;
  const uint32_t waited = topk - (mutated(Mutation::combine_before_done) ? 1 : 0);
  const uint64_t wanted = context.epoch - (mutated(Mutation::done_of_last_epoch) ? 1 : 0);
  bool reached = true;
  for (uint32_t slot = team.rank(); slot < waited && reached; slot += team.size()) {
    const uint32_t expert = expert_of_route(context, token * topk + slot);
    if (expert == kNoExpert) continue;
    uint64_t* word = context.own<uint64_t>(context.layout->expert_done) + expert;
    reached = wait_until(context, SystemRef<uint64_t>(*word), [&](uint64_t seen) { return stamp_of(seen) >= wanted; },
                         {FaultKind::timeout, WaitFor::expert_done, expert / context.problem->experts_per_rank, expert,
                          context.epoch, 0, 0})
                  .reached;
  }
  return team.all(reached);
}

// Take tokens, each in `parts_of(context)` claims (of columns), until none is left, and hand each to `reduce(begun, token,
// part, parts)` once it is complete; `begun` is what `begin(token)` returned before that was awaited. A launch ends only after
// this, so that afterwards the host may refill what other ranks have read. Where every one of the rank's `teams` comes here (0:
// not each of them, or more than once) and there is a claim for each at most, none asks twice. False when the launch drains.
template <class Team, class PartsOf, class Begin, class Reduce>
MEGAMOE_FN bool combine_tokens(const Context& context, Team& team, uint32_t teams, PartsOf parts_of, Begin begin,
                               Reduce reduce) {
  if (mutated(Mutation::launch_ends_early) && context.stage < Stage::combine) return true;
  for (;;) {
    const uint32_t item = team.once([&] { return take(context, Claim::combine); });
    const uint32_t parts = parts_of(context);
    const uint32_t items = context.num_tokens * parts;
    if (item >= items) return true;
    const auto begun = begin(item / parts);
    if (!wait_for_token(context, team, item / parts)) return false;
    reduce(begun, item / parts, item % parts, parts);
    if (items <= teams) return true;
  }
}
MEGAMOE_FN uint32_t whole_tokens(const Context&) { return 1; }
struct NothingBegun {};
MEGAMOE_FN NothingBegun begin_nothing(uint32_t) { return {}; }

}  // namespace megamoe
