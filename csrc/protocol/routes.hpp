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
// Routes of a chunk to each expert.
MEGAMOE_FN uint32_t* chunk_counts(const Context& context, uint32_t chunk) {
  return context.own<uint32_t>(context.layout->chunk_counts) + chunk * context.layout->chunk_counts.stride[0];
}

// Loads of a thread under way together: one after the other costs a latency each. On the GPU more would be spilled.
constexpr uint32_t kIdsAtOnce = 8;        // where one team sorts all routes
constexpr uint32_t kIdsOfChunkAtOnce = 4;  // where it does so chunk by chunk
constexpr uint32_t kChunksAtOnce = 8;     // counts

// The experts of a chunk's routes into the team's scratch. True if this thread met one that does not exist. `beside(first)` runs
// between the loads of a batch and their use; `first`: of the first batch. It holds a barrier over the team, without which the
// compiler would load one, use it and load the next; false: the chunk is not wanted.
template <uint32_t kAtOnce, class Team, class Beside>
MEGAMOE_FN bool read_chunk(const Context& context, Team& team, const RouteChunk& range, Beside beside) {
  const int64_t* ids = context.own<int64_t>(context.layout->topk_idx) + range.first;
  const uint32_t routes = range.last - range.first;
  const int64_t experts = context.problem->num_experts;
  bool bad = false;
  for (uint32_t batch = 0; batch == 0 || batch < routes; batch += kAtOnce * team.size()) {
    const uint32_t first = batch + team.rank();
    int64_t seen[kAtOnce];
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t at = first + i * team.size();
      seen[i] = at < routes ? ids[at] : -1;
    }
    if (!beside(batch == 0)) return false;
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t at = first + i * team.size();
      if (at < routes) team.scratch().words[at] = seen[i] < 0 || seen[i] >= experts ? kIdMask : uint32_t(seen[i]);
      bad = bad || seen[i] >= experts;
    }
  }
  return bad;
}

template <class Team>
MEGAMOE_FN bool read_claimed_chunk(const Context& context, Team& team, const RouteChunk& range) {
  return read_chunk<kIdsOfChunkAtOnce>(context, team, range, [&](bool) {
    team.sync();
    return true;
  });
}

// By the threads for which read_chunk() was true, once for each chunk.
template <class Team>
MEGAMOE_FN void record_bad_ids(const Context& context, Team& team, const RouteChunk& range) {
  const uint32_t experts = context.problem->num_experts;
  MEGAMOE_ROLLED
  for (uint32_t route = range.first + team.rank(); route < range.last; route += team.size()) {
    const int64_t id = context.own<int64_t>(context.layout->topk_idx)[route];
    if (id >= int64_t(experts))
      record_fault(context, {FaultKind::input, WaitFor::nothing, context.rank, route, experts, uint64_t(id), 0});
  }
}

// Experts are sorted in windows; in each, a thread owns the experts that are congruent to its rank.
struct ExpertWindow {
  uint32_t first, count;
};
MEGAMOE_FN ExpertWindow expert_window(const Context& context, uint32_t first) {
  return {first, smaller(kExpertWindow, context.problem->num_experts - first)};
}

// Number the routes of the chunk that lies in the scratch. Afterwards the counts of a part hold those of the parts before it
// too, for the thread that owns the expert; for the others after a barrier.
template <class Team>
MEGAMOE_FN void number_routes(Team& team, uint32_t routes, const ExpertWindow& window) {
  RouteScratch& scratch = team.scratch();
  MEGAMOE_ROLLED
  for (uint32_t e = team.rank(); e < window.count; e += team.size())
    for (uint32_t part = 0; part < kRouteParts; ++part) scratch.counts[part][e] = 0;
  team.sync();
  team.number_equal(routes, window.first);
  team.sync();
  MEGAMOE_ROLLED
  for (uint32_t e = team.rank(); e < window.count; e += team.size())
    for (uint32_t part = 1; part < kRouteParts; ++part)
      scratch.counts[part][e] = uint16_t(scratch.counts[part][e] + scratch.counts[part - 1][e]);
}
// Of the whole chunk. By the thread that owns the expert, or after a barrier.
template <class Team>
MEGAMOE_FN uint32_t routes_of_chunk(Team& team, uint32_t e) {
  return team.scratch().counts[kRouteParts - 1][e];
}

struct RouteShare {
  uint32_t all;     // routes of an expert
  uint32_t before;  // those of them in earlier chunks
};

// Where the chunk's routes of each expert of the window begin in the list. `next`: where the window's begin; the result is
// where the next window's do. `share_of(e)` is asked by the thread that owns expert window.first + e.
template <class Team, class ShareOf>
MEGAMOE_FN uint32_t place_experts(Team& team, const ExpertWindow& window, uint32_t next, ShareOf share_of) {
  MEGAMOE_ROLLED
  for (uint32_t first = 0; first < window.count; first += team.size()) {
    const uint32_t e = first + team.rank();
    const RouteShare share = e < window.count ? share_of(e) : RouteShare{0, 0};
    const PartialSum sum = team.exclusive_sum(share.all);
    if (e < window.count) team.scratch().places[e] = next + sum.before + share.before;
    next += sum.total;
  }
  return next;
}

// `place_of(e, in_order)`: the place in the list of a route to expert window.first + e, given the one in route order.
template <class Team, class PlaceOf>
MEGAMOE_FN void list_routes(const Context& context, Team& team, const RouteChunk& range, const ExpertWindow& window,
                            PlaceOf place_of) {
  const RouteScratch& scratch = team.scratch();
  auto* list = context.own<RouteListEntry>(context.layout->route_list);
  const uint32_t topk = context.problem->num_topk;
  perturb(Point::store);
  MEGAMOE_ROLLED
  for (uint32_t i = team.rank(); i < range.last - range.first; i += team.size()) {
    const uint32_t word = scratch.words[i], e = (word & kIdMask) - window.first, part = i / kRoutesPerPart;
    if (e >= window.count) continue;
    const uint32_t earlier_parts = part == 0 ? 0 : scratch.counts[part - 1][e];
    const uint32_t route = range.first + i;
    list[place_of(e, scratch.places[e] + earlier_parts + (word >> kIdBits))] = {route / topk, route % topk};
  }
}

struct ListPart {
  uint32_t base, routes;  // where an expert's part of the list begins, and how long it is
};

// Two words for each expert, into the memory of its owner. Zero counts too: the owner waits for every word.
// `part_of(e)` is asked by the thread that owns expert window.first + e.
template <class Team, class PartOf>
MEGAMOE_FN void publish_counts(const Context& context, Team& team, const ExpertWindow& window, PartOf part_of) {
  const auto& problem = *context.problem;
  const auto& layout = *context.layout;
  constexpr auto order = mutated(Mutation::relaxed_publish) ? relaxed : release;
  perturb(Point::publish);
  MEGAMOE_ROLLED
  for (uint32_t e = team.rank(); e < window.count; e += team.size()) {
    const ListPart part = part_of(e);
    const uint32_t owner = (window.first + e) / problem.experts_per_rank;
    const uint64_t word =
        context.rank * layout.route_count.stride[0] + window.first + e - owner * problem.experts_per_rank;
    SystemRef<uint32_t>(context.peer<uint32_t>(owner, layout.route_base)[word]).store(part.base, relaxed);
    SystemRef<uint64_t>(context.peer<uint64_t>(owner, layout.route_count)[word])
        .store(stamped(context.epoch, part.routes), order);
  }
}

// All routes of the rank in one chunk: one team does it all, and all but the list stays in its scratch. The claim goes on
// beside the loads of the ids.
template <class Team>
MEGAMOE_FN void sort_alone(const Context& context, Team& team) {
  const RouteChunk range = route_chunk(context, 0);
  bool mine = true;
  const bool bad = read_chunk<kIdsAtOnce>(context, team, range, [&](bool first) {
    if (first) mine = team.once([&] { return take(context, Claim::count_chunk) == 0; });
    return mine;
  });
  if (!mine) return;
  if (bad) record_bad_ids(context, team, range);
  uint32_t next = 0;
  for (uint32_t first = 0; first < context.problem->num_experts; first += kExpertWindow) {
    const ExpertWindow window = expert_window(context, first);
    number_routes(team, range.last - range.first, window);
    next = place_experts(team, window, next, [&](uint32_t e) { return RouteShare{routes_of_chunk(team, e), 0}; });
    const auto publish = [&] {
      publish_counts(context, team, window,
                     [&](uint32_t e) { return ListPart{team.scratch().places[e], routes_of_chunk(team, e)}; });
    };
    team.sync();
    if constexpr (mutated(Mutation::publish_before_list)) publish();
    list_routes(context, team, range, window, [](uint32_t, uint32_t in_order) { return in_order; });
    team.sync();
    if constexpr (!mutated(Mutation::publish_before_list)) publish();
  }
}

// Of the mutation pool_order_by_arrival: the routes that have come so far, above a count of the first chunk.
constexpr uint32_t kArrivalUnit = 1u << 16;

// The routes of an expert, when all chunks are counted.
MEGAMOE_FN RouteShare share_of_chunk(const Context& context, uint32_t chunk, uint32_t expert) {
  const uint32_t chunks = num_route_chunks(context);
  const uint32_t* of_chunks = chunk_counts(context, 0) + expert;
  const uint64_t stride = context.layout->chunk_counts.stride[0];
  RouteShare share{0, 0};
  for (uint32_t first = 0; first < chunks; first += kChunksAtOnce) {
    uint32_t counts[kChunksAtOnce];
    for (uint32_t i = 0; i < kChunksAtOnce; ++i)
      counts[i] = first + i < chunks ? of_chunks[(first + i) * stride] : 0;
    for (uint32_t i = 0; i < kChunksAtOnce; ++i) {
      if constexpr (mutated(Mutation::pool_order_by_arrival)) counts[i] %= kArrivalUnit;
      share.all += counts[i];
      if (first + i < chunk) share.before += counts[i];
    }
  }
  if constexpr (mutated(Mutation::pool_order_by_arrival)) share.before = 0;
  return share;
}

template <class Team>
MEGAMOE_FN void publish_listed(const Context& context, Team& team) {
  const uint32_t* bases = context.own<uint32_t>(context.layout->list_bases);
  for (uint32_t first = 0; first < context.problem->num_experts; first += kExpertWindow)
    publish_counts(context, team, expert_window(context, first), [&](uint32_t e) {
      return ListPart{bases[first + e], bases[first + e + 1] - bases[first + e]};
    });
}

// Count the claimed chunk, which stays in the scratch.
template <class Team>
MEGAMOE_FN void count_chunk(const Context& context, Team& team, uint32_t chunk) {
  const RouteChunk range = route_chunk(context, chunk);
  if (read_claimed_chunk(context, team, range)) record_bad_ids(context, team, range);
  for (uint32_t first = 0; first < context.problem->num_experts; first += kExpertWindow) {
    const ExpertWindow window = expert_window(context, first);
    number_routes(team, range.last - range.first, window);
    for (uint32_t e = team.rank(); e < window.count; e += team.size())
      chunk_counts(context, chunk)[first + e] = routes_of_chunk(team, e);
  }
  team.sync();
}

// List the claimed chunk. `held`: the one that lies in the scratch, as count_chunk() left it. False when the launch drains.
template <class Team>
MEGAMOE_FN bool list_chunk(const Context& context, Team& team, uint32_t chunk, uint32_t held) {
  const RouteChunk range = route_chunk(context, chunk);
  const uint32_t experts = context.problem->num_experts;
  uint32_t* bases = context.own<uint32_t>(context.layout->list_bases);
  if (chunk != held) read_claimed_chunk(context, team, range);
  uint32_t next = 0;
  for (uint32_t first = 0; first < experts; first += kExpertWindow) {
    const ExpertWindow window = expert_window(context, first);
    if (chunk != held || experts > kExpertWindow) number_routes(team, range.last - range.first, window);
    const bool counted = first != 0 || team.once([&] {
      const uint32_t chunks = num_route_chunks(context);
      return wait_until(context, DeviceRef<uint32_t>(*context.claim_word(Claim::counted_chunks)),
                        [&](uint32_t seen) { return seen == chunks; },
                        {FaultKind::timeout, WaitFor::route_chunks, context.rank, chunk, chunks, 0, 0})
          .reached;
    });
    if (!counted) return false;
    next = place_experts(team, window, next, [&](uint32_t e) { return share_of_chunk(context, chunk, first + e); });
    if (chunk == 0) {  // nothing comes before it: its places are where the experts begin
      for (uint32_t e = team.rank(); e < window.count; e += team.size()) bases[first + e] = team.scratch().places[e];
      if (team.rank() == 0) bases[first + window.count] = next;
    }
    team.sync();
    if constexpr (mutated(Mutation::publish_before_list)) {
      if (chunk == 0 && first + window.count == experts) publish_listed(context, team);
    }
    list_routes(context, team, range, window, [&](uint32_t e, uint32_t in_order) {
      if constexpr (mutated(Mutation::pool_order_by_arrival)) {
        DeviceRef<uint32_t> arrived(chunk_counts(context, 0)[first + e]);
        return team.scratch().places[e] + arrived.fetch_add(kArrivalUnit, relaxed) / kArrivalUnit;
      }
      return in_order;
    });
    team.sync();
  }
  return true;
}

// Chunks are claimed twice, to be counted and to be listed. The first claims of both travel together, so that a team most
// often lists what it has counted; a listing that waits for counts waits for none of its own team.
template <class Team>
MEGAMOE_FN bool sort_in_chunks(const Context& context, Team& team) {
  struct Claims {
    uint32_t count, list;
  };
  const uint32_t chunks = num_route_chunks(context);
  const Claims claims = team.once([&] {
    const uint32_t count = take(context, Claim::count_chunk);
    return Claims{count, take(context, Claim::list_chunk)};
  });
  uint32_t held = chunks;
  for (uint32_t chunk = claims.count; chunk < chunks;) {
    count_chunk(context, team, chunk);
    held = chunk;
    chunk = team.once([&] {
      const uint32_t next = take(context, Claim::count_chunk);
      finish(context, Claim::counted_chunks, chunks);
      return next;
    });
  }
  for (uint32_t chunk = claims.list; chunk < chunks;) {
    if (!list_chunk(context, team, chunk, held)) return false;
    held = chunk;
    struct Listed {
      uint32_t next;
      bool all;
    };
    const Listed listed = team.once([&] {
      const uint32_t next = take(context, Claim::list_chunk);
      return Listed{next, finish(context, Claim::listed_chunks, chunks)};
    });
    if constexpr (!mutated(Mutation::publish_before_list)) {
      if (listed.all) publish_listed(context, team);
    }
    chunk = listed.next;
  }
  return true;
}

// The whole of the source's part. False when the launch drains.
template <class Team>
MEGAMOE_FN bool publish_routes(const Context& context, Team& team) {
  if (num_route_chunks(context) > 1) return sort_in_chunks(context, team);
  sort_alone(context, team);
  return true;
}

}  // namespace megamoe
