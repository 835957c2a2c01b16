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

MEGAMOE_FN void reduce_token(const Context& context, const LaunchArguments& launch, uint32_t token) {
  const Problem& problem = *context.problem;
  const Region& region = context.layout->combine;
  const uint32_t lane = threadIdx.x % kWarpThreads;
  uint16_t* y = reinterpret_cast<uint16_t*>(launch.y) + uint64_t(token) * problem.hidden;
  const int64_t id = lane < problem.num_topk
                         ? context.own<int64_t>(context.layout->topk_idx)[uint64_t(token) * problem.num_topk + lane]
                         : -1;
  if (__any_sync(kFullWarp, id >= int64_t(problem.num_experts))) {
    fill_nan(y, problem.hidden, lane, kWarpThreads);
    return;
  }
  const uint32_t slots = __ballot_sync(kFullWarp, id >= 0);
  const uint16_t* partials = context.own<uint16_t>(region) + token * region.stride[1];
  constexpr uint32_t kAtOnce = 4;  // slots whose loads are in flight together
  for (uint32_t column = lane * 8; column < problem.hidden; column += kWarpThreads * 8) {
    float sum[8] = {};
    for (uint32_t left = slots; left != 0;) {
      uint4 words[kAtOnce];
      uint32_t taken = 0;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (left == 0) break;
        const uint32_t slot = __ffs(left) - 1;
        left &= left - 1;
        words[i] = __ldcg(reinterpret_cast<const uint4*>(partials + slot * region.stride[0] + column));
        ++taken;
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (i >= taken) break;
        const uint32_t pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
          sum[2 * j] += low_bf16(pairs[j]);
          sum[2 * j + 1] += high_bf16(pairs[j]);
        }
      }
    }
    *reinterpret_cast<uint4*>(y + column) = make_uint4(to_bf16x2(sum[0], sum[1]), to_bf16x2(sum[2], sum[3]),
                                                       to_bf16x2(sum[4], sum[5]), to_bf16x2(sum[6], sum[7]));
  }
}

}  // namespace megamoe::sm90
