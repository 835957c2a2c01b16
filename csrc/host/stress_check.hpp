// What a launch must have left on its rank, worked out from the inputs of all ranks: the order of the pool, its rows and
// the counters. y does not depend on that order, so comparing y alone would not show it.
#pragma once
#include <cstring>
#include <sstream>
#include <string>

#include "stream.hpp"
#include "stress_inputs.hpp"

namespace megamoe::host {

class PoolCheck {
 public:
  PoolCheck(const Rank& rank, const StressInputs& inputs, uint64_t epoch)
      : rank_(rank), inputs_(inputs), problem_(rank.problem), epoch_(epoch), stage_(inputs.stage(epoch)) {}

  // Empty, or the first thing that is wrong. `received` is what the launch added to each local expert's count.
  std::string run(const std::vector<int32_t>& received) {
    uint32_t block = 0;
    for (uint32_t expert = 0; expert < problem_.experts_per_rank; ++expert) {
      const uint32_t rows = check_expert(expert, block * problem_.block_m);
      check("expert_recv_count_sum of expert", expert, own<uint64_t>(layout().expert_recv_count_sum)[expert],
            stamped(epoch_, rows));
      check("received routes of expert", expert, uint64_t(received[expert]), rows);
      const uint32_t blocks = ceil_div(rows, problem_.block_m);
      const uint32_t steps = stage_ >= Stage::l2_gemm ? blocks * problem_.num_l2_tiles : rows;
      check("expert_progress of expert", expert, banked<uint32_t>(layout().expert_progress)[expert], steps);
      for (uint32_t i = 0; i < blocks; ++i) check_block(block + i, smaller(rows - i * problem_.block_m, problem_.block_m));
      block += blocks;
    }
    return wrong_;
  }

 private:
  const BufferLayout& layout() const { return rank_.layout; }
  template <class T>
  const T* own(const Region& region) const {
    return reinterpret_cast<const T*>(rank_.bases[rank_.rank] + region.offset);
  }
  template <class T>
  const T* banked(const Region& region) const {
    return own<T>(region) + (epoch_ & 1) * region.stride[0];
  }

  void check(const char* what, uint64_t index, uint64_t found, uint64_t expected) {
    if (found == expected || !wrong_.empty()) return;
    std::ostringstream text;
    text << what << ' ' << index << " is " << found << ", expected " << expected;
    wrong_ = text.str();
  }

  // Routes to the expert in the order of the contract: source after source from this rank on, then token, then slot.
  uint32_t check_expert(uint32_t expert, uint32_t first_row) {
    const int64_t wanted = int64_t(rank_.rank) * problem_.experts_per_rank + expert;
    uint32_t rows = 0;
    for (uint32_t step = 0; step < problem_.num_ranks; ++step) {
      const uint32_t source = (rank_.rank + step) % problem_.num_ranks;
      const uint32_t routes = inputs_.num_tokens(epoch_, source) * problem_.num_topk;
      for (uint32_t route = 0; route < routes; ++route)
        if (inputs_.expert(epoch_, source, route) == wanted) check_row(first_row + rows++, source, route);
    }
    return rows;
  }

  void check_row(uint64_t row, uint32_t source, uint32_t route) {
    if (!wrong_.empty()) return;
    const uint32_t token = route / problem_.num_topk, slot = route % problem_.num_topk;
    const uint32_t* metadata =
        own<uint32_t>(layout().token_src_metadata) + row * layout().token_src_metadata.stride[0];
    check("token_src_metadata: source of pool row", row, metadata[0], source);
    check("token_src_metadata: token of pool row", row, metadata[1], token);
    check("token_src_metadata: slot of pool row", row, metadata[2], slot);
    expected_row_.resize(problem_.hidden);
    inputs_.x_row(epoch_, source, token, expected_row_.data());
    const uint8_t* acts = own<uint8_t>(layout().l1_acts) + row * layout().l1_acts.stride[0];
    check("l1_acts: bytes compared equal in pool row", row,
          std::memcmp(acts, expected_row_.data(), problem_.hidden) == 0, 1);
    const float* scales = own<float>(layout().l1_acts_sf) + row;
    for (uint32_t group = 0; group < problem_.hidden / kScaleBlock; ++group)
      check("l1_acts_sf of pool row", row, bits(scales[group * layout().l1_acts_sf.stride[1]]),
            bits(inputs_.x_sf(epoch_, source, token, group)));
    check("l1_topk_weights of pool row", row, bits(own<float>(layout().l1_topk_weights)[row]),
          bits(inputs_.topk_weight(epoch_, source, route)));
  }

  void check_block(uint32_t block, uint32_t rows) {
    check("l1_arrival_count of block", block, banked<uint32_t>(layout().l1_arrival_count)[block], rows);
    if (stage_ < Stage::l1_epilogue) return;
    uint64_t marked = 0;
    for (uint32_t word = 0; word < problem_.num_mask_words; ++word)
      marked += uint64_t(std::popcount(
          banked<uint64_t>(layout().l2_arrival_mask)[uint64_t(block) * problem_.num_mask_words + word]));
    check("l2_arrival_mask: tiles marked in block", block, marked, problem_.num_l1_tiles);
  }

  static uint32_t bits(float value) { return std::bit_cast<uint32_t>(value); }

  const Rank& rank_;
  const StressInputs& inputs_;
  const Problem& problem_;
  uint64_t epoch_;
  Stage stage_;
  std::string wrong_;
  std::vector<uint8_t> expected_row_;
};

}  // namespace megamoe::host
