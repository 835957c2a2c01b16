// The fused kernel: one persistent launch of the whole layer. A CTA has one dispatch-and-load warpgroup and two math
// warpgroups; every role takes its work from the counters of the rank that the CTA works for.
//
// MEGAMOE_RANKS_HERE: ranks that this grid runs (1 on a real rank). MEGAMOE_SCALE_GROUPS: scale groups of l2_acts in
// 128 columns, 1 or 2. MEGAMOE_FAST: sums stay in the tensor cores. MEGAMOE_BRING_UP: stages and debug views; without
// it the stage is always combine.
#include "roles/reduce.hpp"
#include "roles/load.hpp"
#include "roles/math.hpp"
#include "worker.hpp"

namespace megamoe::sm90 {
namespace {

constexpr uint32_t kScaleGroups = MEGAMOE_SCALE_GROUPS;
constexpr bool kFast = MEGAMOE_FAST;
constexpr bool kBringUp = MEGAMOE_BRING_UP;

// setmaxnreg: 128 * 56 + 256 * 224 = 64,512, what 384 threads of 168 start with.
constexpr uint32_t kDispatchRegisters = 56;
constexpr uint32_t kMathRegisters = 224;

using Shared = SharedStorage<kScaleGroups>;
using OneWarp = WarpTeam<1>;

static_assert(sizeof(Shared) <= kFusedSharedBytes);

// By the math warpgroups.
template <class T>
MEGAMOE_FN void copy_together(T& to, const T& from) {
  auto* words = reinterpret_cast<uint64_t*>(&to);
  const auto* source = reinterpret_cast<const uint64_t*>(&from);
  for (uint32_t i = threadIdx.x - kFirstMathThread; i < sizeof(T) / 8; i += 128 * kMathWarpgroups) words[i] = source[i];
}

// By the first thread of a CTA.
MEGAMOE_FN Entered enter_cta(Context& context, const LaunchArguments& launch) {
  const Worker worker = this_worker(MEGAMOE_RANKS_HERE);
  const bool drains = aborted(context);  // what is raised from here on, the waits see
  const Entry entry = enter_launch(context, launch_identity(launch));
  const int64_t tokens = given_tokens(launch);
  if (entry == Entry::run && worker.index == 0 && tokens != int64_t(context.num_tokens))
    record_fault(context, {FaultKind::token_count, WaitFor::nothing, context.rank, 0, launch.num_tokens,
                           uint64_t(tokens), 0});
  return {context.epoch, entry, drains};
}

MEGAMOE_FN void init_barriers(Shared& shared) {
  for (uint32_t stage = 0; stage < kStages; ++stage) {
    init_barrier(&shared.full[stage], 2);  // the columns' bytes and the rows'
    init_barrier(&shared.empty[stage], kMathWarps);
  }
  for (uint32_t slot = 0; slot < kTileSlots; ++slot) {
    init_barrier(&shared.tile_full[slot], 1);
    init_barrier(&shared.tile_empty[slot], kMathWarps + 1);  // and the load role
    init_barrier(&shared.rows_ready[slot], 1);
  }
  for (uint64_t& stored : shared.stored) init_barrier(&stored, kMathWarps);
  init_barrier(&shared.claim_next, 1);
  shared.partner_empty = 0;
  for (Mail& mail : shared.claimed) mail.init();
  shared.state_of_partner.init();
  publish_barrier_init();
}

// What every role reads of the launch comes into shared memory while the first thread enters.
MEGAMOE_FN void set_up(const GroupArguments& group, const RankArguments& mine, Shared& shared) {
  if (threadIdx.x == 0) {
    Context context = make_context(group, mine);
    if constexpr (!kBringUp) context.stage = Stage::combine;
    shared.entered = enter_cta(context, mine.launch);
    context.problem = &shared.problem;
    context.layout = &shared.layout;
    if (group.problem.num_ranks <= kSharedBases) context.bases = reinterpret_cast<uint8_t* const*>(shared.bases);
    shared.context = context;
    shared.maps = mine.maps;
  }
  if (threadIdx.x == kWarpThreads) init_barriers(shared);
  if (threadIdx.x >= kFirstMathThread) {
    copy_together(shared.problem, group.problem);
    copy_together(shared.layout, group.layout);
    copy_together(shared.launch, mine.launch);
    const uint32_t rank = threadIdx.x - kFirstMathThread;
    const uint32_t at_hand = smaller(kSharedBases, group.problem.num_ranks);
    if (rank < at_hand) shared.bases[rank] = reinterpret_cast<const uint64_t*>(mine.bases)[rank];
  }
  __syncthreads();
  cluster_sync();  // the partner's barriers are there
}

// The shared memory anew, by an address that the compiler takes for a new one: one pointer kept for the whole kernel would
// be spilled in the roles that need every register.
MEGAMOE_FN Shared& shared_again(Shared& shared) {
  uint32_t address = shared_address(&shared);
  asm volatile("" : "+r"(address));
  return *reinterpret_cast<Shared*>(__cvta_shared_to_generic(address));
}

// Rows of an expert on average, if every rank has as many tokens as this one.
MEGAMOE_FN uint32_t expected_rows(const Context& context) {
  const Problem& problem = *context.problem;
  return ceil_div(context.num_tokens * problem.num_topk * problem.num_ranks, problem.num_experts);
}

// Warp 0.
MEGAMOE_FN void run_load(Shared& shared) {
  if (threadIdx.x == 0) Loader<kScaleGroups>(shared, *reinterpret_cast<const TensorMaps*>(shared.maps)).run();
}

// Schedule warp. Always hands on a last tile that says stop, also when the launch drains: the other roles wait for it.
MEGAMOE_FN void run_schedule(Shared& shared, bool drains) {
  OneWarp team(kScheduleWarp, 0, nullptr);
  Scheduler<kScaleGroups> scheduler(shared, team);
  const uint32_t expected = expected_rows(shared.context);
  if (!drains && expected <= kShortM) scheduler.rehearse(expected);
  const uint32_t first = team.once([&] { return take(shared.context, Claim::tile); });
  const Table table = drains ? Table{false, 0} : wait_for_table(shared.context, team);
  scheduler.run(shared.context, table, first);
}

// One warp of the math role, after the last tile: most tokens are complete only when nearly all experts are. The pull warps, idle
// by then, would be the last to end what they begin: they have few registers for loads in flight.
MEGAMOE_FN void run_combine(Shared& shared) {
  const Context& context = shared.context;
  OneWarp alone(threadIdx.x / kWarpThreads, 0, nullptr);
  const uint32_t teams = this_worker(MEGAMOE_RANKS_HERE).count * kMathWarps;
  combine_tokens(
      context, alone, teams, combine_parts, [&](uint32_t token) { return routes_of_token(context, token); },
      [&](const TokenRoutes& routes, uint32_t token, uint32_t part, uint32_t parts) {
        if (context.stage == Stage::combine) reduce_token(context, shared.launch, routes, token, part, parts);
      });
}

// Warps 2 and 3.
MEGAMOE_FN void run_pull(Shared& shared) {
  const Context& context = shared.context;
  const uint32_t warp = threadIdx.x / kWarpThreads;
  OneWarp alone(warp, 0, nullptr);
  Puller puller(shared.pull[warp - 2]);
  pull_rows(context, alone, [&](uint32_t block, uint32_t first_row, uint32_t rows) {
    puller.copy_rows(context, block, first_row, rows);
  });
}

// The first warpgroup: routes and table together, then each warp its role, then the other bank.
MEGAMOE_FN void run_first_warpgroup(Shared& shared) {
  const Context& context = shared.context;
  const uint32_t warp = threadIdx.x / kWarpThreads;
  DispatchTeam team(0, kDispatchBarrier, &shared_again(shared).dispatch_team);
  const bool drains = !publish_routes(context, team) ||
                      !build_table(context, team, reinterpret_cast<int32_t*>(shared.launch.recv_stats));
  if (warp == 0) {
    run_load(shared);
  } else if (warp == kScheduleWarp) {
    run_schedule(shared, drains);
  } else {
    if (!drains) run_pull(shared_again(shared));
    OneWarp alone(warp, 0, nullptr);
    clear_other_bank(context, alone);
  }
}

// The first warpgroup, in place of that: the launch drains, or stops before dispatch.
MEGAMOE_FN void run_nothing(Shared& shared) {
  const uint32_t warp = threadIdx.x / kWarpThreads;
  if (warp == 0) {
    OneWarp alone(warp, 0, nullptr);
    clear_other_bank(shared.context, alone);
  } else if (threadIdx.x == kScheduleWarp * kWarpThreads) {
    tell_partner(shared, kDrains);
    hear_partner(shared);
  }
}

// By the first warpgroup.
MEGAMOE_FN void fill_y(const Shared& shared) {
  const Context& context = shared.context;
  if (context.stage != Stage::combine || threadIdx.x >= DispatchTeam::kThreads) return;
  fill_nan(reinterpret_cast<uint16_t*>(shared.launch.y), uint64_t(context.num_tokens) * context.problem->hidden,
           threadIdx.x, DispatchTeam::kThreads);
}

MEGAMOE_FN void leave(Shared& shared) {
  DispatchTeam team(0, kDispatchBarrier, &shared.dispatch_team);
  leave_launch(shared.context, team, this_worker(MEGAMOE_RANKS_HERE).count, [&](const Context&) { fill_y(shared); });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    megamoe_fused(const __grid_constant__ GroupArguments group, const __grid_constant__ RankTable table) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const RankArguments& mine = table.ranks[rank_here(MEGAMOE_RANKS_HERE)];
  set_up(group, mine, shared);
  const Context& context = shared.context;
  const Entered entered = shared.entered;
  if (threadIdx.x == kFirstMathThread)
    acknowledge_entry(context, launch_identity(shared.launch), this_worker(MEGAMOE_RANKS_HERE).count);
  if (entered.entry == Entry::refused) {
    if (this_worker(MEGAMOE_RANKS_HERE).index == 0) fill_y(shared);
    return;  // as all CTAs do
  }
  const bool runs = !entered.drains && (!kBringUp || context.stage > Stage::interface);
  // Each warpgroup's way from here to its end is one branch, so that setmaxnreg holds for all of it.
  if (threadIdx.x >= kFirstMathThread) {
    take_registers<kMathRegisters>();
    if (runs) {
      MathRole<kScaleGroups, kFast, kBringUp>(context, shared).run();
      if (!aborted(context)) run_combine(shared_again(shared));
    }
    barrier_sync(kCtaBarrier, kThreads);
    cluster_sync();
  } else {
    give_registers<kDispatchRegisters>();
    if (runs) {
      run_first_warpgroup(shared_again(shared));
    } else {
      run_nothing(shared_again(shared));
    }
    barrier_sync(kCtaBarrier, kThreads);
    leave(shared_again(shared));
    cluster_sync();  // whatever the partner sent has been waited for, and it sends no more
  }
}

}  // namespace megamoe::sm90
