// A proof of the protocol on the GPU, and not the layer: every word that ranks and roles exchange is the real one, the rows
// are pulled by the real role, and in place of the two GEMMs stand copies that need the same waits. An L1 tile copies
// columns of l1_acts into l2_acts; an L2 tile adds up all of its block's l2_acts by columns modulo 128, times a factor of
// the tile, and scatters the result by bulk stores as the real one will. So a wait too few shows in the data.
// Needs l2_block_n = 128 = l1_block_n / 2 = l2_sf_granularity.
#include "combine.hpp"
#include "ptx/convert.hpp"
#include "roles/row_puller.hpp"
#include "routes.hpp"
#include "table.hpp"
#include "tiles.hpp"
#include "worker.hpp"

namespace megamoe::sm90 {
namespace {

constexpr uint32_t kWarps = 4;
constexpr uint32_t kCtaThreads = kWarps * kWarpThreads;
constexpr uint32_t kCtaBarrier = 1;
constexpr uint32_t kTileColumns = 128;
constexpr uint32_t kMaxTileRows = 128;
constexpr uint32_t kGroupBlocks = 2, kGroupLag = 1;
constexpr uint32_t kDrains = ~0u;
static_assert(kTileColumns == kCtaThreads && kMaxTileRows <= kCtaThreads);

using CtaTeam = WarpTeam<kWarps, RouteScratch>;
using OneWarp = WarpTeam<1>;
using Puller = RowPuller<4, 8192>;

struct Shared {
  Puller::Shared pull[kWarps];
  alignas(128) uint16_t staging[kMaxTileRows][kTileColumns];  // bf16, an L2 tile on its way to its sources
  CtaTeam::Shared team;
};
static_assert(sizeof(Shared) <= kProofSharedBytes);

enum class Role : uint32_t { dispatch, table, pull, tiles, combine };

// Runs a role and adds the time that this CTA's first thread spent in it to the launch's figures, if it keeps them.
template <class Work>
MEGAMOE_FN bool timed(const LaunchArguments& launch, Role role, Work work) {
  auto* times = reinterpret_cast<uint64_t*>(launch.role_times);
  const uint64_t started = now_ns();
  const bool goes_on = work();
  if (times != nullptr && threadIdx.x == 0)
    DeviceRef<uint64_t>(times[uint32_t(role)]).fetch_add(now_ns() - started, relaxed);
  return goes_on;
}

MEGAMOE_FN void fill_nan(uint32_t* y, uint64_t words, uint32_t thread, uint32_t threads) {
  for (uint64_t i = thread; i < words; i += threads) y[i] = kBf16NaNPair;
}

MEGAMOE_FN bool pull(const Context& context, CtaTeam& cta, Shared& shared) {
  const uint32_t warp = threadIdx.x / kWarpThreads;
  OneWarp team(warp, 0, nullptr);
  Puller puller(shared.pull[warp]);
  const bool finished = pull_rows(context, team, [&](uint32_t block, uint32_t first_row, uint32_t rows) {
    puller.copy_rows(context, block, first_row, rows);
  });
  return cta.all(finished);
}

MEGAMOE_FN bool run_l1_tile(const Context& context, CtaTeam& cta, const Tile& tile) {
  if (!cta.once([&] { return wait_for_rows(context, tile.unit); })) return false;
  if (context.stage < Stage::l1_epilogue) return true;
  const auto& problem = *context.problem;
  const auto& layout = *context.layout;
  const uint32_t rows = pool_blocks(context)[tile.unit].rows;
  const uint64_t first_row = uint64_t(tile.unit) * problem.block_m;
  constexpr uint32_t words = kTileColumns / sizeof(uint32_t);
  for (uint32_t i = cta.rank(); i < rows * words; i += cta.size()) {
    const uint64_t row = first_row + i / words;
    const uint32_t to = tile.column * kTileColumns + i % words * uint32_t(sizeof(uint32_t));
    *reinterpret_cast<uint32_t*>(context.own<uint8_t>(layout.l2_acts) + row * layout.l2_acts.stride[0] + to) =
        *reinterpret_cast<const uint32_t*>(context.own<uint8_t>(layout.l1_acts) + row * layout.l1_acts.stride[0] +
                                           to % problem.hidden);
  }
  for (uint32_t i = cta.rank(); i < rows; i += cta.size()) {
    const uint64_t row = first_row + i;
    const uint32_t from = tile.column % (problem.hidden / kScaleBlock);
    context.own<float>(layout.l2_acts_sf)[tile.column * layout.l2_acts_sf.stride[1] + row] =
        __fmul_rn(context.own<float>(layout.l1_acts_sf)[from * layout.l1_acts_sf.stride[1] + row],
                  context.own<float>(layout.l1_topk_weights)[row]);
  }
  cta.sync();
  cta.once([&] {
    mark_l1_tile(context, tile.unit, tile.column);
    return true;
  });
  return true;
}

MEGAMOE_FN bool run_l2_tile(const Context& context, CtaTeam& cta, const Tile& tile, Shared& shared) {
  if (!cta.once([&] { return wait_for_l1_tiles(context, tile.unit); })) return false;
  const auto& problem = *context.problem;
  const auto& layout = *context.layout;
  const PoolBlock block = pool_blocks(context)[tile.unit];
  const uint64_t first_row = uint64_t(tile.unit) * problem.block_m;
  const float factor = float(1 + tile.column % 7);
  for (uint32_t i = 0; i < block.rows; ++i) {
    const uint64_t row = first_row + i;
    const uint8_t* acts = context.own<uint8_t>(layout.l2_acts) + row * layout.l2_acts.stride[0];
    const float* scales = context.own<float>(layout.l2_acts_sf) + row;
    float sum = 0.0f;
    for (uint32_t group = 0; group < problem.intermediate / kTileColumns; ++group)
      sum = __fadd_rn(sum, __fmul_rn(from_e4m3(acts[group * kTileColumns + cta.rank()]),
                                     scales[group * layout.l2_acts_sf.stride[1]]));
    shared.staging[i][cta.rank()] = to_bf16(__fmul_rn(sum, factor));
  }
  fence_shared_for_bulk_store();
  cta.sync();
  if (cta.rank() < block.rows) {
    const uint32_t* from = context.own<uint32_t>(layout.token_src_metadata) +
                           (first_row + cta.rank()) * layout.token_src_metadata.stride[0];
    store_bulk(context.peer<uint16_t>(from[0], layout.combine) + from[2] * layout.combine.stride[0] +
                   from[1] * layout.combine.stride[1] + tile.column * kTileColumns,
               shared.staging[cta.rank()], kTileColumns * sizeof(uint16_t));
    wait_for_stores();
  }
  cta.sync();
  cta.once([&] {
    advance_expert(context, block.expert, 1, expert_steps(context, block.expert));
    return true;
  });
  return true;
}

MEGAMOE_FN bool run_tiles(const Context& context, CtaTeam& cta, Shared& shared) {
  const Table table = wait_for_table(context, cta);
  if (!table.ready) return false;
  const TileOrder order{table.num_blocks, context.problem->num_l1_tiles,
                        context.has_l2() ? context.problem->num_l2_tiles : 0, kGroupBlocks, kGroupLag};
  for (;;) {
    const uint32_t index = cta.once([&] { return aborted(context) ? kDrains : take(context, Claim::tile); });
    if (index == kDrains) return false;
    if (index >= order.count()) return true;
    const Tile tile = order.at(index);
    const bool ran = tile.kind == TileKind::l1 ? run_l1_tile(context, cta, tile) : run_l2_tile(context, cta, tile, shared);
    if (!ran) return false;
  }
}

// y of one token by one warp: fp32 sum over the slots in slot order, masked slots skipped.
MEGAMOE_FN void reduce_token(const Context& context, const LaunchArguments& launch, uint32_t token, uint32_t lane) {
  const auto& problem = *context.problem;
  const Region& region = context.layout->combine;
  const uint32_t pairs = problem.hidden / 2;
  auto* y = reinterpret_cast<uint32_t*>(launch.y) + uint64_t(token) * pairs;
  for (uint32_t slot = 0; slot < problem.num_topk; ++slot) {
    const int64_t id = context.own<int64_t>(context.layout->topk_idx)[token * problem.num_topk + slot];
    if (id >= int64_t(problem.num_experts)) return fill_nan(y, pairs, lane, kWarpThreads);
  }
  for (uint32_t pair = lane; pair < pairs; pair += kWarpThreads) {
    float low = 0.0f, high = 0.0f;
    for (uint32_t slot = 0; slot < problem.num_topk; ++slot) {
      if (expert_of_route(context, token * problem.num_topk + slot) == kNoExpert) continue;
      const uint32_t partial = reinterpret_cast<const uint32_t*>(context.own<uint16_t>(region) + slot * region.stride[0] +
                                                                 token * region.stride[1])[pair];
      low = __fadd_rn(low, low_bf16(partial));
      high = __fadd_rn(high, high_bf16(partial));
    }
    y[pair] = to_bf16x2(low, high);
  }
}

MEGAMOE_FN bool combine(const Context& context, const LaunchArguments& launch, CtaTeam& cta) {
  OneWarp team(threadIdx.x / kWarpThreads, 0, nullptr);
  const bool finished = combine_tokens(context, team, 0, whole_tokens, begin_nothing,
                                       [&](NothingBegun, uint32_t token, uint32_t, uint32_t) {
                                         if (context.stage == Stage::combine)
                                           reduce_token(context, launch, token, team.rank());
                                       });
  return cta.all(finished);
}

// The roles one after the other, up to the launch's stage. Stops early when the launch drains.
MEGAMOE_FN void run_roles(const Context& context, const LaunchArguments& launch, CtaTeam& cta, Shared& shared) {
  if (context.stage == Stage::interface) return;
  if (!timed(launch, Role::dispatch, [&] { return publish_routes(context, cta); })) return;
  auto* recv_stats = reinterpret_cast<int32_t*>(launch.recv_stats);
  if (!timed(launch, Role::table, [&] { return build_table(context, cta, recv_stats); })) return;
  if (!timed(launch, Role::pull, [&] { return pull(context, cta, shared); })) return;
  if (context.stage >= Stage::l1_gemm)
    if (!timed(launch, Role::tiles, [&] { return run_tiles(context, cta, shared); })) return;
  timed(launch, Role::combine, [&] { return combine(context, launch, cta); });
}

}  // namespace
}  // namespace megamoe::sm90

extern "C" __global__ void __launch_bounds__(megamoe::sm90::kCtaThreads, 1)
    megamoe_protocol_proof(const __grid_constant__ megamoe::GroupArguments group,
                           const megamoe::RankArguments* ranks, uint32_t ranks_here) {
  using namespace megamoe;
  using namespace megamoe::sm90;
  extern __shared__ uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const RankArguments& mine = ranks[rank_here(ranks_here)];
  const LaunchArguments& launch = mine.launch;
  const Worker worker = this_worker(ranks_here);
  CtaTeam cta(0, kCtaBarrier, &shared.team);
  Context context = make_context(group, mine);
  auto* y = reinterpret_cast<uint32_t*>(launch.y);
  const uint64_t y_words = uint64_t(context.num_tokens) * group.problem.hidden / 2;

  const Entered entered = enter(context, launch, worker.count, cta);
  context.epoch = entered.epoch;
  if (entered.entry == Entry::refused) {
    if (worker.index == 0 && y != nullptr) fill_nan(y, y_words, cta.rank(), cta.size());
    return;
  }
  if (worker.index == 0 && cta.rank() == 0 && given_tokens(launch) != int64_t(context.num_tokens))
    record_fault(context, {FaultKind::token_count, WaitFor::nothing, context.rank, 0, launch.num_tokens,
                           uint64_t(given_tokens(launch)), 0});
  if (!entered.drains) run_roles(context, launch, cta, shared);
  clear_other_bank(context, cta);
  leave_launch(context, cta, worker.count, [&](const Context&) {
    if (y != nullptr) fill_nan(y, y_words, cta.rank(), cta.size());
  });
}

// Whether a launch can be told from others by its grid's number: every CTA writes what it sees.
extern "C" __global__ void megamoe_grid_identity(uint64_t* seen) {
  if (threadIdx.x == 0) seen[blockIdx.x] = cuda::ptx::get_sreg_gridid();
}
