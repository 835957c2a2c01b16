// What one worker of the host target does in each role. A worker goes through the roles in order; the protocol lets
// others be in any other role meanwhile.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "arithmetic.hpp"
#include "combine.hpp"
#include "launch.hpp"
#include "pull.hpp"
#include "routes.hpp"
#include "table.hpp"
#include "tiles.hpp"

namespace megamoe::host {

constexpr uint32_t kGroupBlocks = 2;
constexpr uint32_t kGroupLag = 1;

struct Scratch {
  std::vector<float> rows, columns, accumulators, activations;
};

// One output tile of a GEMM with scaled groups: acc = fma(product over a group, sfa * sfb, acc), group after group.
struct GemmTile {
  uint32_t num_rows, num_columns, depth, group;
  const uint8_t* rows;  // e4m3, `depth` apart
  const float* row_scales;
  uint64_t row_scale_stride;  // between groups; consecutive rows are adjacent
  const uint8_t* columns;     // e4m3, `depth` apart

  // Elements from one row of accumulators to the next: columns are multiplied four at a time.
  uint32_t accumulator_stride() const { return (num_columns + 3) / 4 * 4; }
};

// `column_scale(column, k)` is the weight scale of a column of the tile at depth k.
template <class ColumnScale>
void run_gemm(const GemmTile& tile, Scratch& scratch, ColumnScale column_scale) {
  const uint32_t stride = tile.accumulator_stride();
  scratch.rows.resize(size_t(tile.num_rows) * tile.group);
  scratch.columns.assign(size_t(stride) * tile.group, 0.0f);
  scratch.accumulators.assign(size_t(tile.num_rows) * stride, 0.0f);
  for (uint32_t k = 0; k < tile.depth; k += tile.group) {
    for (uint32_t row = 0; row < tile.num_rows; ++row)
      decode_e4m3(tile.rows + size_t(row) * tile.depth + k, tile.group, &scratch.rows[size_t(row) * tile.group]);
    for (uint32_t column = 0; column < tile.num_columns; ++column)
      decode_e4m3(tile.columns + size_t(column) * tile.depth + k, tile.group,
                  &scratch.columns[size_t(column) * tile.group]);
    const float* row_scales = tile.row_scales + k / tile.group * tile.row_scale_stride;
    for (uint32_t column = 0; column < stride; column += 4) {
      const float* four[4];
      float scales[4];
      for (uint32_t c = 0; c < 4; ++c) {
        four[c] = &scratch.columns[size_t(column + c) * tile.group];
        scales[c] = column + c < tile.num_columns ? column_scale(column + c, k) : 0.0f;
      }
      for (uint32_t row = 0; row < tile.num_rows; ++row) {
        float part[4];
        dot4(&scratch.rows[size_t(row) * tile.group], four, tile.group, part);
        float* acc = &scratch.accumulators[size_t(row) * stride + column];
        for (uint32_t c = 0; c < 4; ++c) acc[c] = std::fma(part[c], row_scales[row] * scales[c], acc[c]);
      }
    }
  }
}

inline void copy_rows(const Context& context, uint32_t block, uint32_t first_row, uint32_t rows) {
  const auto& layout = *context.layout;
  const uint32_t hidden = context.problem->hidden;
  for (uint32_t i = 0; i < rows; ++i) {
    const ListPlace place = list_place(context, block, first_row + i, [&](uint32_t expert, uint32_t step) {
      return source_part(context, expert, step);
    });
    const PulledRow row = locate_row(context, block, first_row + i, place);
    std::memcpy(context.own<uint8_t>(layout.l1_acts) + row.pool_row * layout.l1_acts.stride[0],
                context.peer<uint8_t>(row.source, layout.x) + row.token * layout.x.stride[0], hidden);
    const float* scales = context.peer<float>(row.source, layout.x_sf) + row.token * layout.x_sf.stride[0];
    float* to = context.own<float>(layout.l1_acts_sf) + row.pool_row;
    for (uint32_t group = 0; group < hidden / kScaleBlock; ++group) to[group * layout.l1_acts_sf.stride[1]] = scales[group];
    store_row_metadata(context, row, load_row_weight(context, row));
  }
}

// Write the part of a tile that lies in the 128x128 window asked for.
inline void store_accum_debug(const Context& context, const LaunchArguments& launch, const Tile& tile,
                              const GemmTile& gemm, const Scratch& scratch) {
  const uint32_t stride = gemm.accumulator_stride();
  float* window = context.own<float>(context.layout->l1_accum_debug);
  for (uint32_t row = 0; row < gemm.num_rows; ++row) {
    const uint32_t pool_row = tile.unit * context.problem->block_m + row;
    if (pool_row / kAccumDebugEdge != launch.debug_row_block) continue;
    for (uint32_t column = 0; column < gemm.num_columns; ++column) {
      const uint32_t l1_column = tile.column * context.problem->l1_block_n + column;
      if (l1_column / kAccumDebugEdge != launch.debug_column_block) continue;
      window[pool_row % kAccumDebugEdge * kAccumDebugEdge + l1_column % kAccumDebugEdge] =
          scratch.accumulators[size_t(row) * stride + column];
    }
  }
}

// SwiGLU and quantisation of an L1 tile into l2_acts.
inline void store_activations(const Context& context, const LaunchArguments& launch, const Tile& tile,
                              const GemmTile& gemm, Scratch& scratch) {
  const auto& problem = *context.problem;
  const auto& layout = *context.layout;
  const uint32_t stride = gemm.accumulator_stride();
  const uint32_t first = tile.column * problem.l1_block_n / 2, width = gemm.num_columns / 2;
  scratch.activations.resize(width);
  for (uint32_t row = 0; row < gemm.num_rows; ++row) {
    const uint64_t pool_row = uint64_t(tile.unit) * problem.block_m + row;
    const float weight = context.own<float>(layout.l1_topk_weights)[pool_row];
    const float* acc = &scratch.accumulators[size_t(row) * stride];
    for (uint32_t i = 0; i < width; ++i) {
      const uint32_t gate = i / kInterleave * 2 * kInterleave + i % kInterleave;
      scratch.activations[i] = swiglu(acc[gate], acc[gate + kInterleave], weight, launch.has_clamp, launch.activation_clamp);
    }
    uint8_t* to = context.own<uint8_t>(layout.l2_acts) + pool_row * layout.l2_acts.stride[0] + first;
    float* scales = context.own<float>(layout.l2_acts_sf) + pool_row;
    for (uint32_t i = 0; i < width; i += problem.l2_sf_granularity)
      scales[(first + i) / problem.l2_sf_granularity * layout.l2_acts_sf.stride[1]] =
          quantize_group(&scratch.activations[i], problem.l2_sf_granularity, to + i);
  }
}

inline bool run_l1_tile(const Context& context, const LaunchArguments& launch, const Tile& tile, Scratch& scratch) {
  if (!wait_for_rows(context, tile.unit)) return false;
  const auto& problem = *context.problem;
  const auto& layout = *context.layout;
  const PoolBlock block = pool_blocks(context)[tile.unit];
  const uint32_t first_column = tile.column * problem.l1_block_n;
  const uint32_t l1_columns = 2 * problem.intermediate;
  const uint64_t first_row = uint64_t(tile.unit) * problem.block_m;
  const GemmTile gemm{block.rows,
                      std::min(problem.l1_block_n, l1_columns - first_column),
                      problem.hidden,
                      kScaleBlock,
                      context.own<uint8_t>(layout.l1_acts) + first_row * layout.l1_acts.stride[0],
                      context.own<float>(layout.l1_acts_sf) + first_row,
                      layout.l1_acts_sf.stride[1],
                      reinterpret_cast<const uint8_t*>(launch.l1_weight) +
                          (uint64_t(block.expert) * l1_columns + first_column) * problem.hidden};
  const uint32_t depth_scales = problem.hidden / kScaleBlock, half = problem.intermediate / kScaleBlock;
  const float* scales = reinterpret_cast<const float*>(launch.l1_sf) + uint64_t(block.expert) * 2 * half * depth_scales;
  run_gemm(gemm, scratch, [&](uint32_t column, uint32_t k) {
    const uint32_t interleaved = first_column + column;  // the scales stay in natural order: gate, then up
    const uint32_t natural = interleaved / (2 * kInterleave) * kInterleave + interleaved % kInterleave;
    const uint32_t up = interleaved / kInterleave % 2;
    return scales[(up * half + natural / kScaleBlock) * depth_scales + k / kScaleBlock];
  });
  if (launch.debug) store_accum_debug(context, launch, tile, gemm, scratch);
  if (context.stage < Stage::l1_epilogue) return true;
  if constexpr (mutated(Mutation::mask_before_store)) mark_l1_tile(context, tile.unit, tile.column);
  perturb(Point::store);
  store_activations(context, launch, tile, gemm, scratch);
  if constexpr (!mutated(Mutation::mask_before_store)) mark_l1_tile(context, tile.unit, tile.column);
  return true;
}

inline bool run_l2_tile(const Context& context, const LaunchArguments& launch, const Tile& tile, Scratch& scratch) {
  if (!wait_for_l1_tiles(context, tile.unit)) return false;
  const auto& problem = *context.problem;
  const auto& layout = *context.layout;
  const PoolBlock block = pool_blocks(context)[tile.unit];
  const uint32_t first_column = tile.column * problem.l2_block_n;
  const uint64_t first_row = uint64_t(tile.unit) * problem.block_m;
  const GemmTile gemm{block.rows,
                      std::min(problem.l2_block_n, problem.hidden - first_column),
                      problem.intermediate,
                      problem.l2_sf_granularity,
                      context.own<uint8_t>(layout.l2_acts) + first_row * layout.l2_acts.stride[0],
                      context.own<float>(layout.l2_acts_sf) + first_row,
                      layout.l2_acts_sf.stride[1],
                      reinterpret_cast<const uint8_t*>(launch.l2_weight) +
                          (uint64_t(block.expert) * problem.hidden + first_column) * problem.intermediate};
  const uint32_t depth_scales = problem.intermediate / kScaleBlock;
  const float* scales = reinterpret_cast<const float*>(launch.l2_sf) +
                        uint64_t(block.expert) * (problem.hidden / kScaleBlock) * depth_scales;
  run_gemm(gemm, scratch, [&](uint32_t column, uint32_t k) {
    return scales[(first_column + column) / kScaleBlock * depth_scales + k / kScaleBlock];
  });
  const auto tile_is_done = [&] { advance_expert(context, block.expert, 1, expert_steps(context, block.expert)); };
  if constexpr (mutated(Mutation::done_before_last_store)) tile_is_done();
  const uint32_t stride = gemm.accumulator_stride();
  for (uint32_t row = 0; row < gemm.num_rows; ++row) {
    perturb(Point::store);
    const uint32_t* from =
        context.own<uint32_t>(layout.token_src_metadata) + (first_row + row) * layout.token_src_metadata.stride[0];
    uint16_t* to = context.peer<uint16_t>(from[0], layout.combine) + from[2] * layout.combine.stride[0] +
                   from[1] * layout.combine.stride[1] + first_column;
    for (uint32_t column = 0; column < gemm.num_columns; ++column)
      to[column] = to_bf16(scratch.accumulators[size_t(row) * stride + column]);
  }
  if constexpr (!mutated(Mutation::done_before_last_store)) tile_is_done();
  return true;
}

inline bool run_tiles(const Context& context, const LaunchArguments& launch, Scratch& scratch) {
  SoloTeam team;
  const Table table = wait_for_table(context, team);
  if (!table.ready) return false;
  const TileOrder order{table.num_blocks, context.problem->num_l1_tiles,
                        context.has_l2() ? context.problem->num_l2_tiles : 0, kGroupBlocks, kGroupLag};
  TileStep step = order.step(0);
  for (;;) {
    const uint32_t index = take(context, Claim::tile);
    if (index >= order.count()) return true;
    if (aborted(context)) return false;
    step = order.step_of(index, step);
    const Tile tile = order.in_step(step, index);
    const bool ran = tile.kind == TileKind::l1 ? run_l1_tile(context, launch, tile, scratch)
                                               : run_l2_tile(context, launch, tile, scratch);
    if (!ran) return false;
  }
}

inline void fill_nan(uint16_t* y, uint64_t elements) { std::fill_n(y, elements, kBf16NaN); }

// y of one token: fp32 sum over the slots in slot order, masked slots skipped.
inline void reduce_token(const Context& context, const LaunchArguments& launch, uint32_t token, Scratch& scratch) {
  const auto& problem = *context.problem;
  const auto& region = context.layout->combine;
  uint16_t* y = reinterpret_cast<uint16_t*>(launch.y) + uint64_t(token) * problem.hidden;
  scratch.activations.assign(problem.hidden, 0.0f);
  for (uint32_t slot = 0; slot < problem.num_topk; ++slot) {
    const uint32_t route = token * problem.num_topk + slot;
    if (context.own<int64_t>(context.layout->topk_idx)[route] >= int64_t(problem.num_experts))
      return fill_nan(y, problem.hidden);
    if (expert_of_route(context, route) == kNoExpert) continue;
    const uint16_t* partial = context.own<uint16_t>(region) + slot * region.stride[0] + token * region.stride[1];
    for (uint32_t i = 0; i < problem.hidden; ++i) scratch.activations[i] += from_bf16(partial[i]);
  }
  for (uint32_t i = 0; i < problem.hidden; ++i) y[i] = to_bf16(scratch.activations[i]);
}

enum class Role : uint32_t { dispatch, table, pull, tiles, combine, number_of_roles };

// Adds the time a worker spends in a role to the launch's figures, if it keeps them.
class RoleTimer {
 public:
  RoleTimer(const LaunchArguments& launch, Role role)
      : total_(reinterpret_cast<uint64_t*>(launch.role_times)), role_(role), started_(now_ns()) {}
  ~RoleTimer() {
    if (total_ != nullptr) SystemRef<uint64_t>(total_[uint32_t(role_)]).fetch_add(now_ns() - started_, relaxed);
  }

 private:
  uint64_t* total_;
  Role role_;
  uint64_t started_;
};

// The roles one after the other, up to the launch's stage. Stops early when the launch drains.
inline void run_roles(const Context& context, const LaunchArguments& launch, Scratch& scratch) {
  if (context.stage == Stage::interface) return;
  SoloTeam team;
  const auto timed = [&](Role role, auto work) {
    const RoleTimer timer(launch, role);
    return work();
  };
  const bool finished =
      timed(Role::dispatch, [&] { return publish_routes(context, team); }) &&
      timed(Role::table, [&] { return build_table(context, team, reinterpret_cast<int32_t*>(launch.recv_stats)); }) &&
      timed(Role::pull, [&] {
        return pull_rows(context, team, [&](uint32_t block, uint32_t first, uint32_t rows) {
          copy_rows(context, block, first, rows);
        });
      }) &&
      (context.stage < Stage::l1_gemm || timed(Role::tiles, [&] { return run_tiles(context, launch, scratch); })) &&
      timed(Role::combine, [&] {
        return combine_tokens(context, team, 0, whole_tokens, begin_nothing,
                              [&](NothingBegun, uint32_t token, uint32_t, uint32_t) {
                                if (context.stage == Stage::combine) reduce_token(context, launch, token, scratch);
                              });
      });
  (void)finished;  // a launch that drains has said why in a record or an abort flag
}

}  // namespace megamoe::host
