// L1 epilogue, one warpgroup: SwiGLU, top-k weight, quantisation of its part of a tile into l2_acts.
#pragma once
#include "ptx/convert.hpp"
#include "ptx/store.hpp"
#include "ptx/transpose.hpp"
#include "roles/products_fast.hpp"

namespace megamoe::sm90 {

// Comparisons, not fmin: a NaN stays a NaN.
MEGAMOE_FN void clamp_pair(float& gate, float& up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
}

// exp(-g) = inf makes the sigmoid 0, as it should.
template <bool kFastMath>
MEGAMOE_FN float swiglu(float gate, float up, float weight) {
  const float sigmoid =
      kFastMath ? approximate_reciprocal(1.0f + __expf(-gate)) : __frcp_rn(1.0f + expf(-gate));
  return __fmul_rn(__fmul_rn(__fmul_rn(gate, sigmoid), up), weight);
}

MEGAMOE_FN float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, 1));
  return fmaxf(value, __shfl_xor_sync(kFullWarp, value, 2));
}

constexpr float kAmaxFloor = 1e-10f;  // of a scale group

// A piece of 128 interleaved columns holds eight groups of 8 activations.
constexpr uint32_t kActivationGroups = kPieceN / (2 * kInterleave);

template <uint32_t kPieces, class Shared>
class ActivationStore {
 public:
  static constexpr bool kTall = kPieces == 2;
  static constexpr uint32_t kGroups = kPieces * kActivationGroups;

  MEGAMOE_FN ActivationStore(const Context& context, Shared& shared, const TileResult& tile)
      : context_(context), shared_(shared), tile_(tile), place_(ThreadPlace::here()) {}

  MEGAMOE_FN void run(float (&sums)[kPieces * kSumsPerPiece], uint32_t turn) const {
    if (uniform(shared_.launch.has_clamp)) clamp(sums);
    if (uniform(shared_.launch.fast_math)) {
      activate<true>(sums);
    } else {
      activate<false>(sums);
    }
    if (uniform(context_.problem->l2_sf_granularity) == kScaleBlock) {
      float amax[2] = {kAmaxFloor, kAmaxFloor};
#pragma unroll
      for (uint32_t group = 0; group < kGroups; ++group) take_amax(sums, group, amax);
      amax[0] = quad_max(amax[0]);
      amax[1] = quad_max(amax[1]);
      if constexpr (!kTall) exchange_amax(amax, turn);
      quantize_and_store<0, kGroups>(sums, amax);
    } else {
      quantize_half<0>(sums);
      if constexpr (kTall) quantize_half<kActivationGroups>(sums);
    }
  }

 private:
  MEGAMOE_FN void clamp(float (&sums)[kPieces * kSumsPerPiece]) const {
    const float limit = shared_.launch.activation_clamp;
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) clamp_pair(sums[8 * group + i], sums[8 * group + 4 + i], limit);
  }

  // Gate and up of an activation lie in the same thread; the activation takes the gate's place.
  template <bool kFastMath>
  MEGAMOE_FN void activate(float (&sums)[kPieces * kSumsPerPiece]) const {
    const float* weights = shared_.targets[place_.warpgroup].weight;
    const float weight[2] = {weights[place_.first_row(false)], weights[place_.first_row(false) + 8]};
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        float& gate = sums[8 * group + i];
        gate = swiglu<kFastMath>(gate, sums[8 * group + 4 + i], weight[i / 2]);
      }
  }

  MEGAMOE_FN static void take_amax(const float (&sums)[kPieces * kSumsPerPiece], uint32_t group, float (&amax)[2]) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) amax[i / 2] = fmaxf(amax[i / 2], fabsf(sums[8 * group + i]));
  }

  // The two warpgroups hold the two halves of each row's scale group.
  MEGAMOE_FN void exchange_amax(float (&amax)[2], uint32_t turn) const {
    float(&all)[kMathWarpgroups][kShortM] = shared_.row_amax[turn % kUntoldTiles];
    const uint32_t row = place_.first_row(kTall);
    if (place_.lane % 4 == 0) {
      all[place_.warpgroup][row] = amax[0];
      all[place_.warpgroup][row + 8] = amax[1];
    }
    barrier_sync(kMathBarrier, 128 * kMathWarpgroups);
    amax[0] = fmaxf(amax[0], all[1 - place_.warpgroup][row]);
    amax[1] = fmaxf(amax[1], all[1 - place_.warpgroup][row + 8]);
  }

  template <uint32_t kFirst>
  MEGAMOE_FN void quantize_half(float (&sums)[kPieces * kSumsPerPiece]) const {
    float amax[2] = {kAmaxFloor, kAmaxFloor};
#pragma unroll
    for (uint32_t group = kFirst; group < kFirst + kActivationGroups; ++group) take_amax(sums, group, amax);
    amax[0] = quad_max(amax[0]);
    amax[1] = quad_max(amax[1]);
    quantize_and_store<kFirst, kActivationGroups>(sums, amax);
  }

  // Groups kFirst .. kFirst + kCount of both rows, which share a scale. A lane ends with kCount / 4 whole groups of its
  // row: 8 bytes each, stored 16 at a time.
  template <uint32_t kFirst, uint32_t kCount>
  MEGAMOE_FN void quantize_and_store(float (&sums)[kPieces * kSumsPerPiece], const float (&amax)[2]) const {
    constexpr uint32_t words = kCount / 8;  // of two groups, that a lane gives to each lane
    const auto& layout = *context_.layout;
    const uint32_t granularity = context_.problem->l2_sf_granularity;
    const uint32_t half = kTall ? 0 : place_.warpgroup * kActivationGroups * kInterleave;
    const uint32_t first_column = tile_.column * kBlockN / 2 + half + kFirst * kInterleave;
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
      const uint32_t row = place_.first_row(kTall) + 8 * r;
      const float sf = __fmul_rn(amax[r], 1.0f / 448.0f);
      const float inverse = __frcp_rn(sf);
      uint32_t packed[words][4];
#pragma unroll
      for (uint32_t lane = 0; lane < 4; ++lane)
#pragma unroll
        for (uint32_t word = 0; word < words; ++word) {
          const uint32_t group = kFirst + lane * (kCount / 4) + 2 * word;
          const float* low = &sums[8 * group + 2 * r];
          const float* high = &sums[8 * (group + 1) + 2 * r];
          packed[word][lane] = uint32_t(to_e4m3x2(__fmul_rn(low[0], inverse), __fmul_rn(low[1], inverse))) |
                               uint32_t(to_e4m3x2(__fmul_rn(high[0], inverse), __fmul_rn(high[1], inverse))) << 16;
        }
#pragma unroll
      for (uint32_t word = 0; word < words; ++word) transpose_quad(packed[word], place_.lane);
      const bool valid = row < tile_.rows;
      const uint64_t pool_row = uint64_t(tile_.block) * kBlockM + row;
      uint8_t* to = context_.own<uint8_t>(layout.l2_acts) + pool_row * layout.l2_acts.stride[0] + first_column +
                    place_.lane % 4 * (kCount / 4 * kInterleave);
#pragma unroll
      for (uint32_t word = 0; word < words; ++word) {
        const uint32_t(&v)[4] = packed[word];
        store_if(valid, to + word * sizeof(uint4),
                 make_uint4(__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[2], v[3], 0x5410),
                            __byte_perm(v[0], v[1], 0x7632), __byte_perm(v[2], v[3], 0x7632)));
      }
      float* sf_to =
          context_.own<float>(layout.l2_acts_sf) + first_column / granularity * layout.l2_acts_sf.stride[1] + pool_row;
      store_if(valid && place_.lane % 4 == 0, sf_to, __float_as_uint(sf));
    }
  }

  const Context& context_;
  Shared& shared_;
  const TileResult& tile_;
  const ThreadPlace place_;
};

}  // namespace megamoe::sm90
