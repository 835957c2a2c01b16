// A worker of the SM90 target is a CTA: which rank it works for, and its way into a launch.
#pragma once
#include <cuda/ptx>

#include "launch.hpp"
#include "ptx/cluster.hpp"
#include "sm90_arguments.hpp"
#include "warp_team.hpp"

namespace megamoe::sm90 {

// Clusters of CTAs are dealt out to the ranks of this GPU, so that the first ones cover every rank.
struct Worker {
  uint32_t index;  // among the workers of its rank
  uint32_t count;
};
MEGAMOE_FN uint32_t rank_here(uint32_t ranks_here) { return blockIdx.x / cluster_size() % ranks_here; }
MEGAMOE_FN Worker this_worker(uint32_t ranks_here) {
  const uint32_t cluster = blockIdx.x / cluster_size();
  return {cluster / ranks_here * cluster_size() + cluster_rank(), gridDim.x / ranks_here};
}

// The identity of this launch for enter_launch(): what the host gave, or the grid's own number, which also tells replays of
// a captured launch apart. Never 0, and below 2^62, of which enter_launch has room.
MEGAMOE_FN uint64_t launch_identity(const LaunchArguments& launch) {
  constexpr uint64_t from_grid = 1ull << 61;
  return launch.launch != 0 ? launch.launch : (cuda::ptx::get_sreg_gridid() & (from_grid - 1)) | from_grid;
}

// Tokens of this launch as given, on the host or in device memory; may be out of range.
MEGAMOE_FN int64_t given_tokens(const LaunchArguments& launch) {
  const auto* word = reinterpret_cast<const int32_t*>(launch.num_tokens_word);
  return word == nullptr ? int64_t(launch.num_tokens) : int64_t(*word);
}

MEGAMOE_FN Context make_context(const GroupArguments& group, const RankArguments& mine) {
  const int64_t tokens = given_tokens(mine.launch);
  const int64_t most = mine.launch.num_tokens;  // y has room for no more
  Context context{};
  context.problem = &group.problem;
  context.layout = &group.layout;
  context.bases = reinterpret_cast<uint8_t* const*>(mine.bases);
  context.own_base = reinterpret_cast<uint8_t*>(mine.own_base);
  context.host_status = reinterpret_cast<HostStatus*>(mine.host_status);
  context.timeout_ns = mine.launch.timeout_ns;
  context.rank = mine.rank;
  context.num_tokens = uint32_t(tokens < 0 ? 0 : tokens > most ? most : tokens);
  context.stage = Stage(mine.launch.stage);
  return context;
}

struct Entered {
  uint64_t epoch;
  Entry entry;
  bool drains;  // the group was aborted before
};

template <class Team>
MEGAMOE_FN Entered enter(const Context& context, const LaunchArguments& launch, uint32_t num_workers, Team& team) {
  return team.once([&] {
    Context mine = context;
    const Entry entry = enter_launch(mine, launch_identity(launch));
    acknowledge_entry(mine, launch_identity(launch), num_workers);
    return Entered{mine.epoch, entry, aborted(mine)};
  });
}

}  // namespace megamoe::sm90
