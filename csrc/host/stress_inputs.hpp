// Inputs of the stress program: every value is a function of (seed, epoch, rank, place), so that any thread can say what
// any rank's inputs are without asking that rank.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "context.hpp"

namespace megamoe::host {

inline uint64_t mix(uint64_t value) {
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ value >> 27) * 0x94d049bb133111ebull;
  return value ^ value >> 31;
}

// What a number of the generator is for. Values of different purposes do not depend on each other.
enum class Purpose : uint64_t { stage = 1, num_tokens, routing, expert, mask, topk_weight, x, x_sf, l1, l1_sf, l2, l2_sf };

class StressInputs {
 public:
  StressInputs(const Problem& problem, uint64_t seed, uint32_t truncate_every)
      : problem_(problem), seed_(seed), truncate_every_(truncate_every) {}

  // The same on every rank. Some launches stop early, so that nothing but "done" keeps their inputs alive.
  Stage stage(uint64_t epoch) const {
    if (truncate_every_ == 0 || epoch % truncate_every_ != 0) return Stage::combine;
    return Stage(uint32_t(Stage::dispatch) + number(Purpose::stage, epoch, 0, 0) % 4);
  }

  // 0, 1, full, or a few.
  uint32_t num_tokens(uint64_t epoch, uint32_t rank) const {
    const uint64_t dice = number(Purpose::num_tokens, epoch, rank, 0);
    switch (dice % 8) {
      case 0: return 0;
      case 1: return smaller(1, problem_.max_tokens);
      case 2: return problem_.max_tokens;
      default: return uint32_t(dice / 8 % (problem_.max_tokens / 6 + 1));
    }
  }

  int64_t expert(uint64_t epoch, uint32_t rank, uint32_t route) const {
    const uint64_t pattern = number(Purpose::routing, epoch, rank, 0);
    const uint64_t dice = number(Purpose::expert, epoch, rank, route);
    const uint64_t common = number(Purpose::routing, epoch, ~0u, 0);  // where skewed ranks agree to go
    const uint32_t experts = problem_.num_experts;
    switch (pattern % 8) {
      case 0: return int64_t(common % experts);  // one expert takes all
      case 1:                                    // one owner takes all
        return int64_t(common % problem_.num_ranks * problem_.experts_per_rank + dice % problem_.experts_per_rank);
      case 2: return number(Purpose::mask, epoch, rank, route) % 10 < 3 ? -1 - int64_t(dice % 5) : int64_t(dice % experts);
      case 3: return pattern / 8 % 4 == 0 ? -1 : int64_t(dice % experts * (dice >> 32 & 0xff) / 256);  // none, or few
      case 4: return int64_t((route % problem_.num_topk / 2 + dice % 2 + common) % experts);  // duplicates
      default: return int64_t(dice % experts);
    }
  }

  float topk_weight(uint64_t epoch, uint32_t rank, uint32_t route) const {
    return unit(number(Purpose::topk_weight, epoch, rank, route));
  }

  void x_row(uint64_t epoch, uint32_t rank, uint32_t token, uint8_t* row) const {
    for (uint32_t i = 0; i < problem_.hidden; i += 8)
      e4m3_word(number(Purpose::x, epoch, rank, uint64_t(token) * problem_.hidden + i), row + i);
  }
  float x_sf(uint64_t epoch, uint32_t rank, uint32_t token, uint32_t group) const {
    return 0.5f + unit(number(Purpose::x_sf, epoch, rank, uint64_t(token) * problem_.hidden + group));
  }

 private:
  friend struct StressWeights;

  uint64_t number(Purpose purpose, uint64_t epoch, uint32_t rank, uint64_t place) const {
    return mix(mix(mix(seed_ * 16 + uint64_t(purpose)) + (epoch << 32 | rank)) + place * 0x9e3779b97f4a7c15ull);
  }
  static float unit(uint64_t dice) { return float(dice >> 40) * 0x1p-24f; }
  // Eight e4m3 values of magnitude 1/16 to 3.75, never NaN.
  static void e4m3_word(uint64_t dice, uint8_t* out) {
    for (uint32_t i = 0; i < 8; ++i, dice >>= 8) {
      const uint32_t exponent = 3 + (dice >> 3 & 15) % 6;
      out[i] = uint8_t((dice & 0x87) | exponent << 3);
    }
  }

  Problem problem_;
  uint64_t seed_;
  uint32_t truncate_every_;
};

// Weights of one rank's experts, as the kernel reads them.
struct StressWeights {
  std::vector<uint8_t> l1, l2;
  std::vector<float> l1_sf, l2_sf;

  StressWeights(const StressInputs& inputs, uint32_t rank) {
    const Problem& problem = inputs.problem_;
    const uint64_t matrix = uint64_t(problem.experts_per_rank) * problem.intermediate * problem.hidden;
    const uint64_t blocks = matrix / (kScaleBlock * kScaleBlock);
    fill(inputs, Purpose::l1, rank, 2 * matrix, l1);
    fill(inputs, Purpose::l2, rank, matrix, l2);
    fill_scales(inputs, Purpose::l1_sf, rank, 2 * blocks, l1_sf);
    fill_scales(inputs, Purpose::l2_sf, rank, blocks, l2_sf);
  }

 private:
  static void fill(const StressInputs& inputs, Purpose purpose, uint32_t rank, uint64_t count, std::vector<uint8_t>& out) {
    out.resize(count);
    for (uint64_t i = 0; i < count; i += 8) StressInputs::e4m3_word(inputs.number(purpose, 0, rank, i), &out[i]);
  }
  static void fill_scales(const StressInputs& inputs, Purpose purpose, uint32_t rank, uint64_t count,
                          std::vector<float>& out) {
    out.resize(count);
    for (uint64_t i = 0; i < count; ++i) out[i] = 0.02f * (0.5f + StressInputs::unit(inputs.number(purpose, 0, rank, i)));
  }
};

}  // namespace megamoe::host
