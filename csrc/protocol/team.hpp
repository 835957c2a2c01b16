// A team is the set of threads that works on one claim together. The protocol asks of it:
//   rank(), size()               this thread's place
//   sync()                       barrier over the team, which also orders memory within it
//   once(f)                      the first thread runs f; every thread gets the result, ordered after what f saw
//   all(flag)                    whether the flag holds in every thread; orders memory like sync()
//   scratch()                    kRoutesPerChunk words that the whole team reads and writes
//   take_places(ids, n, places, m)  one after the other, ids[i] becomes places[ids[i]]++ (ids are in scratch; kNoPlace stays);
//                               places may or may not have moved afterwards
//   exclusive_sum(data, n)       data[i] becomes the sum of data[0..i), returns the total; data is the team's alone
// A GPU target builds teams from warps. One thread is a team too.
#pragma once
#include "primitives.hpp"

namespace megamoe {

constexpr uint32_t kNoPlace = ~0u;

struct SoloTeam {
  uint32_t scratch_words[kRoutesPerChunk];

  MEGAMOE_FN uint32_t* scratch() { return scratch_words; }
  MEGAMOE_FN static constexpr uint32_t rank() { return 0; }
  MEGAMOE_FN static constexpr uint32_t size() { return 1; }
  MEGAMOE_FN static void sync() {}
  template <class Function>
  MEGAMOE_FN static auto once(Function function) {
    return function();
  }
  MEGAMOE_FN static bool all(bool flag) { return flag; }
  MEGAMOE_FN static void take_places(uint32_t* ids, uint32_t count, uint32_t* places, uint32_t) {
    for (uint32_t i = 0; i < count; ++i)
      if (ids[i] != kNoPlace) ids[i] = places[ids[i]]++;
  }
  MEGAMOE_FN static uint32_t exclusive_sum(uint32_t* data, uint32_t count) {
    uint32_t total = 0;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t value = data[i];
      data[i] = total;
      total += value;
    }
    return total;
  }
};

}  // namespace megamoe
