// Combine role, one warp a token: fp32 sum over the slots in slot order, masked slots skipped, then bf16.
#pragma once
#include "combine.hpp"
#include "ptx/convert.hpp"
#include "warp_team.hpp"

namespace megamoe::sm90 {

MEGAMOE_FN void fill_nan(uint16_t* y, uint64_t elements, uint32_t first, uint32_t step) {
  auto* words = reinterpret_cast<uint4*>(y);
  const uint4 nan = make_uint4(kBf16NaNPair, kBf16NaNPair, kBf16NaNPair, kBf16NaNPair);
  for (uint64_t i = first; i < elements / 8; i += step) words[i] = nan;
}

constexpr uint32_t kReduceColumns = 4;  // of a lane
constexpr uint32_t kReduceStep = kWarpThreads * kReduceColumns;
constexpr uint32_t kManyTokens = 1024;

constexpr uint32_t kManyParts = 2048;  // more than there are warps

// With few tokens one warp a token would be the tail of the launch.
MEGAMOE_FN CombineOrder combine_order(const Context& context) {
  if (context.num_tokens >= kManyTokens) return order_by_expert(context);
  const uint32_t steps = ceil_div(context.problem->hidden, kReduceStep);
  const bool whole = context.stage != Stage::combine || context.num_tokens == 0;
  return {whole ? 1 : smaller(steps, ceil_div(kManyParts, context.num_tokens)), 1};
}

// y of the columns of one part of a token.
MEGAMOE_FN void reduce_token(const Context& context, const LaunchArguments& launch, uint32_t token,
                             uint32_t part, uint32_t parts) {
  const Problem& problem = *context.problem;
  const Region& region = context.layout->combine;
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint32_t width = ceil_div(problem.hidden, parts * kReduceStep) * kReduceStep;
  const uint32_t first = part * width, last = smaller(first + width, problem.hidden);
  uint16_t* y = reinterpret_cast<uint16_t*>(launch.y) + uint64_t(token) * problem.hidden;
  const int64_t id = lane < problem.num_topk
                         ? context.own<int64_t>(context.layout->topk_idx)[uint64_t(token) * problem.num_topk + lane]
                         : -1;
  const bool impossible = __any_sync(kFullWarp, id >= int64_t(problem.num_experts));  // such a token is NaN
  const float start = impossible ? __uint_as_float(kFp32NaN) : 0.0f;
  const uint32_t slots = __ballot_sync(kFullWarp, id >= 0 && !impossible);
  const uint16_t* partials = context.own<uint16_t>(region) + token * region.stride[1];
  constexpr uint32_t kAtOnce = 8;  // slots whose loads are in flight together
  for (uint32_t column = first + lane * kReduceColumns; column < last; column += kReduceStep) {
    float sum[kReduceColumns];
#pragma unroll
    for (float& column_sum : sum) column_sum = start;
    for (uint32_t left = slots; left != 0;) {
      uint2 words[kAtOnce];
      const uint32_t taken = left;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (left == 0) break;
        const uint32_t slot = __ffs(left) - 1;
        words[i] = __ldcg(reinterpret_cast<const uint2*>(partials + slot * region.stride[0] + column));
        left &= left - 1;
      }
      const uint32_t count = __popc(taken) - __popc(left);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (i >= count) break;
        const uint32_t pairs[] = {words[i].x, words[i].y};
#pragma unroll
        for (uint32_t pair = 0; pair < kReduceColumns / 2; ++pair) {
          sum[2 * pair] += low_bf16(pairs[pair]);
          sum[2 * pair + 1] += high_bf16(pairs[pair]);
        }
      }
    }
    *reinterpret_cast<uint2*>(y + column) = make_uint2(to_bf16x2(sum[0], sum[1]), to_bf16x2(sum[2], sum[3]));
  }
}

}  // namespace megamoe::sm90
