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

constexpr uint32_t kManyParts = 2048;   // more than there are warps
constexpr uint32_t kFewestParts = 2;
constexpr uint32_t kPartColumns = 128;  // at least, and a multiple of this
constexpr uint32_t kLaneColumns = 8;    // 16 bytes
constexpr uint32_t kRounds = 2;         // of a warp's lanes side by side whose loads are in flight together

// Claims a token is cut into: with few tokens one warp a token would be the tail of the launch, and with many the last ones are.
MEGAMOE_FN uint32_t combine_parts(const Context& context) {
  if (context.stage != Stage::combine || context.num_tokens == 0) return 1;
  const uint32_t parts = ceil_div(kManyParts, context.num_tokens);
  return smaller(ceil_div(context.problem->hidden, kPartColumns), parts < kFewestParts ? kFewestParts : parts);
}

// Sums of a lane's columns of one token.
struct ColumnSums {
  float sums[kLaneColumns];

  MEGAMOE_FN void add(const uint4& words) {
    const uint32_t pairs[kLaneColumns / 2] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (uint32_t pair = 0; pair < kLaneColumns / 2; ++pair) {
      sums[2 * pair] += low_bf16(pairs[pair]);
      sums[2 * pair + 1] += high_bf16(pairs[pair]);
    }
  }
  MEGAMOE_FN uint4 rounded() const {
    return make_uint4(to_bf16x2(sums[0], sums[1]), to_bf16x2(sums[2], sums[3]), to_bf16x2(sums[4], sums[5]),
                      to_bf16x2(sums[6], sums[7]));
  }
};

// Which of a token's routes count. By one warp.
struct TokenRoutes {
  uint32_t slots;   // a bit each
  bool impossible;  // an id is out of range: the token is NaN
};
MEGAMOE_FN TokenRoutes routes_of_token(const Context& context, uint32_t token) {
  const Problem& problem = *context.problem;
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const int64_t id = lane < problem.num_topk
                         ? context.own<int64_t>(context.layout->topk_idx)[uint64_t(token) * problem.num_topk + lane]
                         : -1;
  const bool impossible = __any_sync(kFullWarp, id >= int64_t(problem.num_experts));
  return {__ballot_sync(kFullWarp, id >= 0 && !impossible), impossible};
}

// y of the columns of one part of a token, by one warp.
MEGAMOE_FN void reduce_token(const Context& context, const LaunchArguments& launch, const TokenRoutes& routes,
                             uint32_t token, uint32_t part, uint32_t parts) {
  const Problem& problem = *context.problem;
  const Region& region = context.layout->combine;
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint32_t width = ceil_div(problem.hidden, parts * kPartColumns) * kPartColumns;
  const uint32_t first = part * width, last = smaller(first + width, problem.hidden);
  uint16_t* y = reinterpret_cast<uint16_t*>(launch.y) + uint64_t(token) * problem.hidden;
  const float start = routes.impossible ? __uint_as_float(kFp32NaN) : 0.0f;
  const uint16_t* partials = context.own<uint16_t>(region) + token * region.stride[1];
  constexpr uint32_t kAtOnce = 8;  // slots whose loads are in flight together
  constexpr uint32_t kRound = kWarpThreads * kLaneColumns;  // columns
#pragma unroll 1
  for (uint32_t column = first + lane * kLaneColumns; column < last; column += kRounds * kRound) {
    ColumnSums sums[kRounds];
#pragma unroll
    for (ColumnSums& round : sums)
#pragma unroll
      for (float& sum : round.sums) sum = start;
    for (uint32_t left = routes.slots; left != 0;) {
      uint4 words[kAtOnce][kRounds];
      const uint32_t taken = left;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (left == 0) break;
        const uint32_t slot = __ffs(left) - 1;
        const uint16_t* from = partials + slot * region.stride[0] + column;
#pragma unroll
        for (uint32_t round = 0; round < kRounds; ++round)
          if (column + round * kRound < last)
            words[i][round] = __ldcg(reinterpret_cast<const uint4*>(from + round * kRound));
        left &= left - 1;
      }
      const uint32_t count = __popc(taken) - __popc(left);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (i >= count) break;
#pragma unroll
        for (uint32_t round = 0; round < kRounds; ++round) sums[round].add(words[i][round]);
      }
    }
#pragma unroll
    for (uint32_t round = 0; round < kRounds; ++round)
      if (column + round * kRound < last)
        *reinterpret_cast<uint4*>(y + column + round * kRound) = sums[round].rounded();
  }
}

}  // namespace megamoe::sm90
