// At the source: sort this rank's routes by expert, stably in token order, and tell every owner what to expect.
#pragma once
#include "faults.hpp"
#include "team.hpp"

namespace megamoe {

struct alignas(8) RouteListEntry {
  uint32_t token;
  uint32_t slot;
};

constexpr uint32_t kNoExpert = ~0u;

// The expert of a route, or kNoExpert when it is masked.
MEGAMOE_FN uint32_t expert_of_route(const Context& context, uint32_t route) {
  const int64_t id = context.own<int64_t>(context.layout->topk_idx)[route];
  return id < 0 || id >= int64_t(context.problem->num_experts) ? kNoExpert : uint32_t(id);
}

struct RouteChunk {
  uint32_t first;
  uint32_t last;  // one past
};

MEGAMOE_FN uint32_t num_routes(const Context& context) { return context.num_tokens * context.problem->num_topk; }
// At least one, so that a rank without tokens publishes its zeros.
MEGAMOE_FN uint32_t num_route_chunks(const Context& context) {
  const uint32_t chunks = ceil_div(num_routes(context), kRoutesPerChunk);
  return chunks == 0 ? 1 : chunks;
}
MEGAMOE_FN RouteChunk route_chunk(const Context& context, uint32_t chunk) {
  return {smaller(chunk * kRoutesPerChunk, num_routes(context)),
          smaller((chunk + 1) * kRoutesPerChunk, num_routes(context))};
}
MEGAMOE_FN uint32_t* chunk_counts(const Context& context, uint32_t chunk) {
  return context.own<uint32_t>(context.layout->chunk_counts) + chunk * context.layout->chunk_counts.stride[0];
}

// Each thread owns the experts that are congruent to its rank.

template <class Team>
MEGAMOE_FN void count_chunk(const Context& context, Team& team, uint32_t chunk) {
  const uint32_t experts = context.problem->num_experts;
  uint32_t* counts = chunk_counts(context, chunk);
  for (uint32_t expert = team.rank(); expert < experts; expert += team.size()) counts[expert] = 0;
  team.sync();
  const RouteChunk range = route_chunk(context, chunk);
  for (uint32_t route = range.first + team.rank(); route < range.last; route += team.size()) {
    const int64_t id = context.own<int64_t>(context.layout->topk_idx)[route];
    if (id < 0) continue;
    if (id < int64_t(experts)) {
      DeviceRef<uint32_t>(counts[id]).fetch_add(1, relaxed);
    } else {
      record_fault(context, {FaultKind::input, WaitFor::nothing, context.rank, route, experts, uint64_t(id), 0});
    }
  }
  team.sync();
}

constexpr uint32_t kChunksAtOnce = 4;  // whose counts are loaded together: one after the other costs a latency each

// Turn the counts of the chunks into the place at which each chunk begins in each expert's part of the list.
template <class Team>
MEGAMOE_FN void place_chunks(const Context& context, Team& team) {
  const uint32_t experts = context.problem->num_experts;
  const uint32_t chunks = num_route_chunks(context);
  uint32_t* bases = context.own<uint32_t>(context.layout->list_bases);
  for (uint32_t expert = team.rank(); expert < experts; expert += team.size()) {
    uint32_t total = 0;
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) total += chunk_counts(context, chunk)[expert];
    bases[expert] = total;
    context.own<uint32_t>(context.layout->expert_totals)[expert] = total;
  }
  team.sync();
  team.exclusive_sum(bases, experts);
  team.sync();
  for (uint32_t expert = team.rank(); expert < experts; expert += team.size()) {
    uint32_t next = bases[expert];
    for (uint32_t first = 0; first < chunks; first += kChunksAtOnce) {
      uint32_t counts[kChunksAtOnce];
      for (uint32_t i = 0; i < kChunksAtOnce; ++i)
        counts[i] = first + i < chunks ? chunk_counts(context, first + i)[expert] : 0;
      for (uint32_t i = 0; i < kChunksAtOnce; ++i) {
        if (first + i < chunks) chunk_counts(context, first + i)[expert] = next;
        next += counts[i];
      }
    }
  }
  team.sync();
}

// The routes of a chunk take the places of their experts in route order: stable whatever the team's size.
template <class Team>
MEGAMOE_FN void list_chunk(const Context& context, Team& team, uint32_t chunk) {
  static_assert(kNoExpert == kNoPlace);
  auto* list = context.own<RouteListEntry>(context.layout->route_list);
  const RouteChunk range = route_chunk(context, chunk);
  const uint32_t routes = range.last - range.first;
  uint32_t* places = team.scratch();
  for (uint32_t i = team.rank(); i < routes; i += team.size()) places[i] = expert_of_route(context, range.first + i);
  team.sync();
  perturb(Point::store);
  if constexpr (mutated(Mutation::pool_order_by_arrival)) {
    for (uint32_t i = team.rank(); i < routes; i += team.size())
      if (places[i] != kNoExpert)
        places[i] = DeviceRef<uint32_t>(chunk_counts(context, 0)[places[i]]).fetch_add(1, relaxed);
    team.sync();
  } else {
    team.take_places(places, routes, chunk_counts(context, chunk), context.problem->num_experts);
  }
  for (uint32_t i = team.rank(); i < routes; i += team.size()) {
    const uint32_t route = range.first + i;
    if (places[i] != kNoExpert)
      list[places[i]] = {route / context.problem->num_topk, route % context.problem->num_topk};
  }
  team.sync();
}

// Two words for each expert, into the memory of its owner. Zero counts too: the owner waits for every word.
template <class Team>
MEGAMOE_FN void publish_counts(const Context& context, Team& team) {
  const auto& problem = *context.problem;
  const auto& layout = *context.layout;
  constexpr auto order = mutated(Mutation::relaxed_publish) ? relaxed : release;
  perturb(Point::publish);
  for (uint32_t step = team.rank(); step < problem.num_experts; step += team.size()) {
    const uint32_t expert = (context.first_expert() + step) % problem.num_experts;
    const uint32_t owner = expert / problem.experts_per_rank;
    const uint64_t word = context.rank * layout.route_count.stride[0] + expert % problem.experts_per_rank;
    context.peer<uint64_t>(owner, layout.route_base)[word] = context.own<uint32_t>(layout.list_bases)[expert];
    const uint32_t routes = context.own<uint32_t>(layout.expert_totals)[expert];
    SystemRef<uint64_t>(context.peer<uint64_t>(owner, layout.route_count)[word])
        .store(stamped(context.epoch, routes), order);
  }
}

// The whole of the source's part. False when the launch drains.
template <class Team>
MEGAMOE_FN bool publish_routes(const Context& context, Team& team) {
  // Asked anew at each place: kept all the way, it would be spilled on the GPU.
  const auto bases_ready = [&] { return SystemRef<uint64_t>(*context.own<uint64_t>(context.layout->bases_ready)); };
  const uint32_t chunks = num_route_chunks(context);
  if (chunks == 1) {  // few tokens: one team does it all
    if (team.once([&] { return take(context, Claim::count_chunk); }) != 0) return true;
    count_chunk(context, team, 0);
    place_chunks(context, team);
    if constexpr (mutated(Mutation::publish_before_list)) publish_counts(context, team);
    list_chunk(context, team, 0);
    if constexpr (!mutated(Mutation::publish_before_list)) publish_counts(context, team);
    return true;
  }
  for (;;) {
    const uint32_t chunk = team.once([&] { return take(context, Claim::count_chunk); });
    if (chunk >= chunks) break;
    count_chunk(context, team, chunk);
    if (!team.once([&] { return finish(context, Claim::counted_chunks, chunks); })) continue;
    place_chunks(context, team);
    if constexpr (mutated(Mutation::publish_before_list)) publish_counts(context, team);
    team.once([&] {
      bases_ready().store(context.epoch, release);
      return true;
    });
  }
  for (;;) {
    const uint32_t chunk = team.once([&] { return take(context, Claim::list_chunk); });
    if (chunk >= chunks) return true;
    const bool placed = team.once([&] {
      return wait_until(context, bases_ready(), [&](uint64_t seen) { return seen == context.epoch; },
                        {FaultKind::timeout, WaitFor::list_bases, context.rank, chunk, context.epoch, 0, 0})
          .reached;
    });
    if (!placed) return false;
    list_chunk(context, team, chunk);
    if (!team.once([&] { return finish(context, Claim::listed_chunks, chunks); })) continue;
    if constexpr (!mutated(Mutation::publish_before_list)) publish_counts(context, team);
  }
}

}  // namespace megamoe
