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
constexpr uint32_t kPartColumns = 128;  // at least, and a multiple of this
// Of a lane at a time: the dispatch warps have no registers for more.
constexpr uint32_t kFewColumns = 4, kManyColumns = 8;

// Claims a token is cut into: with few tokens one warp a token would be the tail of the launch.
MEGAMOE_FN uint32_t combine_parts(const Context& context) {
  if (context.stage != Stage::combine || context.num_tokens == 0) return 1;
  return smaller(ceil_div(context.problem->hidden, kPartColumns), ceil_div(kManyParts, context.num_tokens));
}

// Sums of 8 or 4 columns of one token, and its slots.
template <uint32_t kColumns>
struct ColumnSums {
  static_assert(kColumns == 8 || kColumns == 4);
  using Words = cuda::std::conditional_t<kColumns == 8, uint4, uint2>;
  float sums[kColumns];

  MEGAMOE_FN void add(const Words& words) {
    uint32_t pairs[kColumns / 2];
    cuda::std::memcpy(pairs, &words, sizeof(Words));
#pragma unroll
    for (uint32_t pair = 0; pair < kColumns / 2; ++pair) {
      sums[2 * pair] += low_bf16(pairs[pair]);
      sums[2 * pair + 1] += high_bf16(pairs[pair]);
    }
  }
  MEGAMOE_FN Words rounded() const {
    uint32_t pairs[kColumns / 2];
#pragma unroll
    for (uint32_t pair = 0; pair < kColumns / 2; ++pair) pairs[pair] = to_bf16x2(sums[2 * pair], sums[2 * pair + 1]);
    Words words;
    cuda::std::memcpy(&words, pairs, sizeof(Words));
    return words;
  }
};

// y of the columns of one part of a token, by one warp. `kColumns` of a lane at a time: what is in flight takes registers.
template <uint32_t kColumns>
MEGAMOE_FN void reduce_token(const Context& context, const LaunchArguments& launch, uint32_t token,
                             uint32_t part, uint32_t parts) {
  using Words = typename ColumnSums<kColumns>::Words;
  const Problem& problem = *context.problem;
  const Region& region = context.layout->combine;
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint32_t width = ceil_div(problem.hidden, parts * kPartColumns) * kPartColumns;
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
  for (uint32_t column = first + lane * kColumns; column < last; column += kWarpThreads * kColumns) {
    ColumnSums<kColumns> sums;
#pragma unroll
    for (float& sum : sums.sums) sum = start;
    for (uint32_t left = slots; left != 0;) {
      Words words[kAtOnce];
      const uint32_t taken = left;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (left == 0) break;
        const uint32_t slot = __ffs(left) - 1;
        words[i] = __ldcg(reinterpret_cast<const Words*>(partials + slot * region.stride[0] + column));
        left &= left - 1;
      }
      const uint32_t count = __popc(taken) - __popc(left);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (i >= count) break;
        sums.add(words[i]);
      }
    }
    *reinterpret_cast<Words*>(y + column) = sums.rounded();
  }
}

}  // namespace megamoe::sm90
