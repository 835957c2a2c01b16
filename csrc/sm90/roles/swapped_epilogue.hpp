// Epilogues of tiles with swapped operands. What is known of a token's row lies in the lane of its number.
#pragma once
#include "ptx/store.hpp"
#include "roles/l1_epilogue.hpp"
#include "roles/products_swapped.hpp"

namespace megamoe::sm90 {

// Of the row of token `lane`: source, token, slot, and the weight of the route.
struct SwappedTarget {
  uint32_t metadata[3];
  float weight;

  MEGAMOE_FN void fetch(const Context& context, const TileSlot& tile) {
    const auto& layout = *context.layout;
    const uint64_t pool_row = uint64_t(tile.block) * kBlockM + ThreadPlace::here().lane % kMostSwapped;
    const uint32_t* from =
        context.own<uint32_t>(layout.token_src_metadata) + pool_row * layout.token_src_metadata.stride[0];
#pragma unroll
    for (uint32_t word = 0; word < 3; ++word) metadata[word] = __ldcg(from + word);
    weight = __ldcg(context.own<float>(layout.l1_topk_weights) + pool_row);
  }
};

// ActivationStore of such a tile.
template <uint32_t kM, class Shared>
class SwappedActivationStore {
 public:
  using Sums = SwappedSums<kM>;

  MEGAMOE_FN SwappedActivationStore(const Context& context, Shared& shared, const TileResult& tile)
      : context_(context), shared_(shared), tile_(tile), place_(ThreadPlace::here()) {}

  MEGAMOE_FN void run(Sums& result, float weight) const {
    if (uniform(shared_.launch.has_clamp)) {
#pragma unroll
      for (uint32_t i = 0; i < Sums::kCount; ++i)
        if (is_gate(i)) clamp_pair(result.sums[i], result.sums[i + 2], shared_.launch.activation_clamp);
    }
    if (uniform(shared_.launch.fast_math)) {
      activate<true>(result, weight);
    } else {
      activate<false>(result, weight);
    }
    store(result, scale_of_token(result));
  }

 private:
  static constexpr uint32_t kHalf = kBlockN / 4;  // activations of a warpgroup

  MEGAMOE_FN static constexpr bool is_gate(uint32_t i) { return i / 2 % 2 == 0; }

  // The activation takes the gate's place.
  template <bool kFastMath>
  MEGAMOE_FN void activate(Sums& result, float weight) const {
    const float held[1] = {weight};
    result.for_each(held, place_.lane, [&](uint32_t i, float of_token) {
      if (is_gate(i)) result.sums[i] = swiglu<kFastMath>(result.sums[i], result.sums[i + 2], of_token);
    });
  }

  // Where a warp leaves the largest activations of its tokens: its own part of the row targets, which such a tile lacks.
  MEGAMOE_FN uint32_t* largest_of_warp(uint32_t warp) const {
    constexpr uint32_t words = sizeof(RowTargets::metadata) / sizeof(uint32_t) / 4;  // a warp
    static_assert(kM <= words);
    return reinterpret_cast<uint32_t*>(shared_.targets[warp / 4].metadata) + words * (warp % 4);
  }

  // The scale of token `lane`: from its largest activation in this warp, then in all warps that share it.
  MEGAMOE_FN float scale_of_token(const Sums& result) const {
    uint32_t* mine = largest_of_warp(4 * place_.warpgroup + place_.warp);
#pragma unroll
    for (uint32_t group = 0; group < Sums::kGroups; ++group)
#pragma unroll
      for (uint32_t q = 0; q < 2; ++q) {
        float amax = kAmaxFloor;
#pragma unroll
        for (uint32_t piece = 0; piece < kSwappedPieces; ++piece)
          amax = fmaxf(amax, fabsf(result.sums[Sums::at(piece, group, 0, q)]));
#pragma unroll
        for (uint32_t lanes = 4; lanes < kWarpThreads; lanes *= 2)
          amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, lanes));
        if (place_.lane < 4) mine[Sums::token_of(group, q, place_.lane)] = __float_as_uint(amax);
      }
    barrier_sync(kMathBarrier, 128 * kMathWarpgroups);
    const bool whole = uniform(context_.problem->l2_sf_granularity) == kScaleBlock;  // of the scale group is this tile
    float amax = kAmaxFloor;
#pragma unroll
    for (uint32_t warp = 0; warp < kMathWarps; ++warp)
      if (whole || warp / 4 == place_.warpgroup)
        amax = fmaxf(amax, __uint_as_float(largest_of_warp(warp)[place_.lane % kM]));
    barrier_sync(kMathBarrier, 128 * kMathWarpgroups);
    return __fmul_rn(amax, 1.0f / 448.0f);
  }

  MEGAMOE_FN void store(const Sums& result, float sf) const {
    const auto& layout = *context_.layout;
    const uint32_t lane = place_.lane;
    const float inverse = __frcp_rn(sf);
    uint32_t words[4] = {};
#pragma unroll
    for (uint32_t group = 0; group < Sums::kGroups; ++group) {
      uint32_t pair = 0;
#pragma unroll
      for (uint32_t q = 0; q < 2; ++q) {
        const float factor = __shfl_sync(kFullWarp, inverse, Sums::token_of(group, q, lane));
        pair |= uint32_t(to_e4m3x2(__fmul_rn(result.sums[Sums::at(0, group, 0, q)], factor),
                                   __fmul_rn(result.sums[Sums::at(1, group, 0, q)], factor)))
                << 16 * q;
      }
      words[group] = transpose_8x8(pair);
    }
    transpose_quad(words, lane);
    // A lane now has eight activations of each piece of one token.
    const uint32_t first_column = tile_.column * kBlockN / 2 + place_.warpgroup * kHalf;
    const uint64_t first_row = uint64_t(tile_.block) * kBlockM;
    const uint32_t token = 8 * (lane % 4) + lane / 4;
    uint8_t* to = context_.own<uint8_t>(layout.l2_acts) + (first_row + token) * layout.l2_acts.stride[0] + first_column +
                  8 * place_.warp;
    store_if(token < tile_.rows, to,
             make_uint2(__byte_perm(words[0], words[1], 0x6420), __byte_perm(words[2], words[3], 0x6420)));
    store_if(token < tile_.rows, to + kHalf / 2,
             make_uint2(__byte_perm(words[0], words[1], 0x7531), __byte_perm(words[2], words[3], 0x7531)));
    float* sf_to = context_.own<float>(layout.l2_acts_sf) +
                   first_column / context_.problem->l2_sf_granularity * layout.l2_acts_sf.stride[1] + first_row + lane;
    store_if(place_.warp == 0 && lane < tile_.rows, sf_to, __float_as_uint(sf));
  }

  const Context& context_;
  Shared& shared_;
  const TileResult& tile_;
  const ThreadPlace place_;
};

// scatter_results() of such a tile.
template <uint32_t kM>
MEGAMOE_FN void scatter_swapped(const Context& context, const TileResult& tile, const SwappedTarget& target,
                                const SwappedSums<kM>& result) {
  const ThreadPlace place = ThreadPlace::here();
  const uint32_t lane = place.lane;
  const Region& region = context.layout->combine;
  if (uniform(place.warpgroup) >= tile.pieces) return;
  // Address, of token `lane`. A row beyond the tile's has whatever metadata lies there: its rank may not be looked up.
  const uint64_t row = reinterpret_cast<uint64_t>(
      context.peer<uint16_t>(lane < tile.rows ? target.metadata[0] : context.rank, region) +
      target.metadata[2] * region.stride[0] + target.metadata[1] * region.stride[1]);
  // Which eight columns a lane has in the end: those of piece lane % 4 / 2, with r = lane % 2.
  const uint32_t column = tile.column * kBlockN + place.warpgroup * kPieceN + lane % 4 / 2 * kSwappedPieceN +
                          16 * place.warp + 8 * (lane % 2);
#pragma unroll
  for (uint32_t group = 0; group < result.kGroups; ++group) {
    uint32_t words[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const float* pair = &result.sums[result.at(i / 2, group, i % 2, 0)];
      words[i] = transpose_8x8(to_bf16x2(pair[0], pair[1]));
    }
    transpose_quad(words, lane);
    const uint32_t token = 8 * group + lane / 4;
    const uint64_t to = __shfl_sync(kFullWarp, row, token);
    store_if(token < tile.rows, reinterpret_cast<uint16_t*>(to) + column,
             make_uint4(words[0], words[1], words[2], words[3]));
  }
}

}  // namespace megamoe::sm90
