// At the source again: a token is reduced when the experts of all its routes are done.
#pragma once
#include <cuda/std/bit>

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

// In which order tokens are claimed. Few tokens: one after the other, each in `parts` claims (of columns). Many: in several
// passes, the tokens of a pass being those whose last expert comes in the pass's share of the local experts. Experts are done
// in about that order, the same on every rank, so a team seldom stands before a token that waits for a late expert.
struct CombineOrder {
  uint32_t parts;
  uint32_t passes;
};

constexpr uint32_t kMaxCombinePasses = 32;
constexpr uint32_t kTokensPerPick = 8;  // that one claim of a pass looks through

MEGAMOE_FN CombineOrder order_by_expert(const Context& context) {
  return {1, smaller(context.problem->experts_per_rank, kMaxCombinePasses)};
}

MEGAMOE_FN uint32_t pass_of_token(const Context& context, uint32_t token, uint32_t passes) {
  const uint32_t topk = context.problem->num_topk, local_experts = context.problem->experts_per_rank;
  uint32_t last = 0;
  for (uint32_t slot = 0; slot < topk; ++slot) {
    const uint32_t expert = expert_of_route(context, token * topk + slot);
    if (expert == kNoExpert) continue;
    const uint32_t local = expert % local_experts;
    last = local > last ? local : last;
  }
  return last * passes / local_experts;
}

// What one claim stands for: a part of one token, or the tokens of a pass among kTokensPerPick of them.
struct CombineItem {
  uint32_t first, count;  // tokens to look at
  uint32_t pass, passes;  // 1 pass: all of them
  uint32_t part, parts;
};

MEGAMOE_FN CombineItem combine_item(const Context& context, const CombineOrder& order, uint32_t index) {
  if (order.passes == 1) return {index / order.parts, 1, 0, 1, index % order.parts, order.parts};
  const uint32_t picks = ceil_div(context.num_tokens, kTokensPerPick), first = index % picks * kTokensPerPick;
  return {first, smaller(kTokensPerPick, context.num_tokens - first), index / picks, order.passes, 0, 1};
}
MEGAMOE_FN uint32_t num_combine_items(const Context& context, const CombineOrder& order) {
  if (order.passes == 1) return context.num_tokens * order.parts;
  return ceil_div(context.num_tokens, kTokensPerPick) * order.passes;
}

// Take tokens until none is left, and hand each to `reduce(token, part, parts)` once it is complete. A launch ends only after
// this, so that afterwards the host may refill what other ranks have read. False when the launch drains.
// `order_of(context)` is asked anew, and the item too: beside a reduction there is no register to keep the answer.
template <class Team, class OrderOf, class Reduce>
MEGAMOE_FN bool combine_tokens(const Context& context, Team& team, OrderOf order_of, Reduce reduce) {
  if (mutated(Mutation::launch_ends_early) && context.stage < Stage::combine) return true;
  for (;;) {
    const uint32_t index = team.once([&] { return take(context, Claim::combine); });
    const CombineOrder order = order_of(context);
    if (index >= num_combine_items(context, order)) return true;
    const CombineItem item = combine_item(context, order, index);
    uint32_t picked = team.pick(item.count, [&](uint32_t i) {
      return item.passes == 1 || pass_of_token(context, item.first + i, item.passes) == item.pass;
    });
    for (; picked != 0; picked &= picked - 1) {
      const CombineItem again = combine_item(context, order_of(context), index);
      const uint32_t token = again.first + uint32_t(cuda::std::countr_zero(picked));
      if (!wait_for_token(context, team, token)) return false;
      reduce(token, again.part, again.parts);
    }
  }
}

}  // namespace megamoe
